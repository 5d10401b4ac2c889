"""Table rows: which row each batch row of a step refers to, and which slot a row means at each site. Numpy only.

A row stands for the effective vectors of one phase of a request (`PooledSum`). The device has
``map[site][row] -> slot`` and the pool of vectors; this module keeps the host's copy of the map and says what to write.

Letters in shape comments: B requests of the step, T batch rows, S sites of this worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int32Array, Int64Array
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.sites import Site
from headgate.steering.gates.gate import Selection
from headgate.steering.spec import Steered
from headgate.steering.vectors.sums import Vectors
from headgate.steering.worker.placed_programs import ActingRule, ProgramTable, ProgramWrites, acting_of
from headgate.steering.worker.rows.vector_pool import (
    NO_SUMS,
    UNSTEERED_ROW,
    Phases,
    PooledSum,
    PooledSums,
    SlotPool,
    SlotWrites,
    SumPair,
)

RESERVED_ROWS = 3
"""Rows beside two for each running request: `UNSTEERED_ROW`, and one for each global phase."""

MAX_UNUSED = 1024
"""Sums of requests that have ended, at least, which stay in the pool while their slots are not needed: clients come
back with the same."""

_NO_ROWS: Int64Array = np.empty(0, dtype=np.int64)

PhaseGroups = tuple[tuple[PositionSelector, ...], tuple[PositionSelector, ...]]
"""Resolved selectors of the position groups of a request's programs, in the prefill and in the decode phase."""

_NO_GROUPS: PhaseGroups = ((), ())


def rows_needed(max_num_seqs: int) -> int:
    """Return the number of rows with which a batch of `max_num_seqs` requests never runs out."""
    return 2 * max_num_seqs + RESERVED_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of the requests of a batch, in its order.

    Attributes:
        num_prompt: int64 ``[B]``: positions below it are prefill.
        rows: int32 ``[B, 2]``: of the prefill and of the decode phase.
        groups: The selectors of position groups of each request that has some, by its place in the batch.
    """

    num_prompt: Int64Array
    rows: Int32Array
    groups: Mapping[int, PhaseGroups]


@dataclass(frozen=True, slots=True, eq=False)
class TableWrites:
    """Changes to write to the device before the next forward, the slots first.

    Attributes:
        slots: Vectors to write to the pool; None if it has them all.
        rows: int64 ``[K]``, ascending: the columns of the map that changed.
        columns: int32 ``[S, K]``: their slots.
        programs: Their programs; None where the worker has no op sites.
    """

    slots: SlotWrites | None
    rows: Int64Array
    columns: Int32Array
    programs: ProgramWrites | None = None


class RowMap:
    """Rows bound to sums, and the slots of each at every site. Step thread only.

    Args:
        num_sites: S.
        num_rows: Width of the map; see `rows_needed`.
        op_sites: Index of each site where programs act.
        max_entries: Entries of a row's program at one site, at most.

    Attributes:
        slots: int32 ``[S, num_rows]``: slot of each row at each site, as the device has it after the writes.
    """

    def __init__(self, num_sites: int, num_rows: int, op_sites: Sequence[int] = (), max_entries: int = 0) -> None:
        self.slots: Int32Array = np.zeros((num_sites, num_rows), dtype=np.int32)
        self._op_sites = list(op_sites)
        self._programs = ProgramTable(len(op_sites), num_rows, max_entries)
        self._bound: dict[int, PooledSum] = {}
        self._free = list(range(1, num_rows))
        self._dirty: set[int] = set()

    def bind(self, sums: Iterable[PooledSum], needed: Callable[[], Collection[PooledSum]]) -> bool:
        """Give sums rows, at the expense of sums that are not needed.

        Args:
            sums: Sums of the batch; some may have rows.
            needed: Returns all sums of the batch.

        Returns:
            Whether sums that are not needed have lost theirs.

        Raises:
            AssertionError: If more are needed than there are rows.
        """
        has_freed = False
        for found in sums:
            if found.row == UNSTEERED_ROW:
                if not self._free:
                    self._free_all_but(needed())
                    has_freed = True
                found.row = heappop(self._free)
                self._bound[found.row] = found
                self.slots[:, found.row] = found.column
                self._programs.bind(found.row, found.programs, found.column[self._op_sites])
                self._dirty.add(found.row)
        return has_freed

    def unbind(self, bound: PooledSum) -> None:
        """Free the row of a sum, if it has one."""
        if bound.row != UNSTEERED_ROW:
            del self._bound[bound.row]
            self._dirty.discard(bound.row)
            heappush(self._free, bound.row)
            bound.row = UNSTEERED_ROW

    def take_changed(self) -> Int64Array:
        """Return the rows that the device lacks, int64 ``[K]``, ascending; they count as written from here on."""
        if not self._dirty:
            return _NO_ROWS
        changed, self._dirty = np.array(sorted(self._dirty), dtype=np.int64), set()
        return changed

    def acting_sites(self, rows: Int32Array) -> BoolArray:
        """Return at which op sites a program of any of `rows` acts: bool ``[P]``."""
        acts = self._programs.acts
        is_used = np.zeros(len(acts), dtype=np.bool_)
        is_used[rows] = True
        found: BoolArray = np.logical_or.reduce(acts[is_used], axis=0)
        return found

    def program_writes(self, rows: Int64Array) -> ProgramWrites | None:
        """Return the programs of changed rows; None where there are no op sites."""
        return self._programs.writes(rows.tolist()) if self._op_sites else None

    def checksum(self, start: int) -> int:
        """Return the state as a number that is the same in every process; see `SlotPool.checksum`."""
        bound = repr(sorted((row, found.key) for row, found in self._bound.items()))
        return zlib.crc32(bound.encode(), zlib.crc32(self.slots.tobytes(), start))

    def _free_all_but(self, needed: Collection[PooledSum]) -> None:
        """Free all rows that are not needed, at once: it is rare, and so it stays rare."""
        spare = [found for found in self._bound.values() if found not in needed]
        if not spare:
            raise AssertionError(f"the batch needs more than {self.slots.shape[1] - 1} rows")
        for found in spare:
            self.unbind(found)


@dataclass(slots=True, eq=False)
class _Holder:
    """A request, or a module, and the sums it uses; the prompt's length of a module is 0."""

    num_prompt: int
    sums: SumPair
    groups: PhaseGroups = _NO_GROUPS
    selection: Selection = None
    driven: frozenset[int] = frozenset()
    """Columns in which controllers drive a request."""
    line: int = 0
    """Its line in the table of `_BatchTable`; 0 for modules."""

    @property
    def own(self) -> Phases:
        """Its own vectors of both phases; one object for all holders with equal vectors."""
        prefill, decode = self.sums
        return (prefill.own if prefill else None), (decode.own if decode else None)


_NUM_PROMPT, _ROWS, _IS_BOUND = 0, slice(1, 3), 3
"""Columns of `_BatchTable.table`."""


class _BatchTable:
    """The length and the rows of each request, in one array: a crowd's batch changes in nearly every step, and a loop
    over its 256 requests takes longer than everything else that steering does there.

    Attributes:
        table: int64 ``[L, 4]``: a line for each request: tokens of its prompt, rows of both phases, and whether the
            rows are bound. Rows that are not bound are `UNSTEERED_ROW`.
    """

    def __init__(self) -> None:
        self.table: Int64Array = np.zeros((64, 4), dtype=np.int64)
        self._free = list(range(len(self.table) - 1, 0, -1))
        self._lines: dict[str, int] = {}

    def add(self, req_id: str, request: _Holder) -> None:
        """Give a request a line."""
        if not self._free:
            size = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        request.line = self._lines[req_id] = self._free.pop()
        self.table[request.line] = request.num_prompt, UNSTEERED_ROW, UNSTEERED_ROW, False

    def remove(self, req_id: str) -> None:
        """Free the line of a request."""
        self._free.append(self._lines.pop(req_id))

    def unbind(self, request: _Holder) -> None:
        """Note that the sums of a request have changed."""
        self.table[request.line, 1:] = UNSTEERED_ROW

    def unbind_all(self) -> None:
        """Note that any sum may have changed or lost its row."""
        self.table[:, 1:] = UNSTEERED_ROW

    def of(self, req_ids: Sequence[str]) -> Int64Array:
        """Return the lines of requests, int64 ``[B]``.

        Raises:
            AssertionError: If a request is not known.
        """
        try:
            return np.array([*map(self._lines.__getitem__, req_ids)], dtype=np.int64)
        except KeyError as error:
            raise AssertionError(f"request {error.args[0]!r} is in a batch, but was never added") from None


class RowTable:
    """Every request of one worker, its vectors, and the rows for the batches. One thread: the step thread.

    A request keeps its slots from `add` to `remove`, also while it is preempted, as admission reserved them. A row it
    has only while it is in a batch: rows are bound by `batch`, and where none is free, one is taken from a request
    that is not in this batch. So `rows_needed` rows are always enough.

    Two replicas that get the same calls in the same order have the same rows, and on the same sites the same slots.
    Finished requests have to be passed on in sorted order, since vLLM hands them out as a set.

    Args:
        sites: The sites that this worker owns, in order.
        num_rows: Width of the map; see `rows_needed`.
        pool: The slot pool, used by this table alone.
        op_sites: The sites of `sites` where programs act, in order.
        max_entries: Entries of a request's program at one site, at most, with the global one's and its vectors.

    Attributes:
        map: int32 ``[S, num_rows]``: slot of each row at each site, as the device has it after the writes.
        version: Changes whenever a batch's rows may have changed.
    """

    def __init__(
        self,
        *,
        sites: Sequence[Site],
        num_rows: int,
        pool: SlotPool,
        op_sites: Sequence[Site] = (),
        max_entries: int = 0,
    ) -> None:
        self._rows = RowMap(len(sites), num_rows, [sites.index(site) for site in op_sites], max_entries)
        self.map = self._rows.slots
        self.version = 0
        self._pool = pool
        self._sums = PooledSums(sites, pool, max(num_rows, MAX_UNUSED), self._rows.unbind, op_sites)
        self._requests: dict[str, _Holder] = {}
        self._lines = _BatchTable()
        self._num_grouped = 0
        """Requests that have position groups."""
        self._modules: dict[str, _Holder] = {}
        self._new_modules: dict[str, Phases] = {}
        self._new_global: Phases | None = None
        self._rules: Sequence[ActingRule] = ()
        self._new_rules: Sequence[ActingRule] | None = None
        self._num_steered = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is steered: no request, and no global vectors."""
        return not self._num_steered and self._new_global is None and self._new_rules is None

    @property
    def num_live_slots(self) -> int:
        """Slots that requests, modules or the global phases use; the pool may keep more for later."""
        return self._sums.num_live_slots

    @property
    def num_slots_used(self) -> int:
        """Slots in use, including slots that are kept for later."""
        return self._pool.num_used

    def add(
        self,
        req_id: str,
        num_prompt: int,
        prefill: Vectors | None = None,
        decode: Vectors | None = None,
        selection: Selection = None,
    ) -> None:
        """Add a request, or start a known id afresh. Unsteered ones too: global vectors and rules act on them."""
        if req_id in self._requests:
            self.remove(req_id)
        self.apply_changes()
        groups = (_groups_of(prefill, num_prompt), _groups_of(decode, num_prompt))
        sums = self._sums.acquire((prefill, decode), acting_of(self._rules, selection))
        request = _Holder(num_prompt, sums, groups, selection)
        self._requests[req_id] = request
        self._lines.add(req_id, request)
        self._num_steered += request.sums != NO_SUMS
        self._num_grouped += groups != _NO_GROUPS
        self.version += 1

    def remove(self, req_id: str) -> None:
        """Remove a request that was added."""
        request = self._requests.pop(req_id)
        self._lines.remove(req_id)
        self._num_steered -= request.sums != NO_SUMS
        self._num_grouped -= request.groups != _NO_GROUPS
        self._sums.release(request.sums)
        self.version += 1

    def drive(self, req_id: str, columns: frozenset[int]) -> None:
        """Let the programs of controllers act on a request that are driven in `columns`, and no others."""
        request = self._requests[req_id]
        if request.driven == columns:
            return
        self.apply_changes()
        request.driven = columns
        self._num_steered -= request.sums != NO_SUMS
        self._sums.release(request.sums)
        request.sums = self._sums.acquire(request.own, acting_of(self._rules, request.selection, columns))
        self._lines.unbind(request)
        self._num_steered += request.sums != NO_SUMS
        self.version += 1

    def set_global(self, prefill: Vectors | None, decode: Vectors | None) -> None:
        """Change the global vectors of both phases; `apply_changes` computes every sum in use anew."""
        self._new_global = (prefill, decode)
        self.version += 1

    def set_rules(self, rules: Sequence[ActingRule]) -> None:
        """Change the rules, in the order in which they act; `apply_changes` computes every sum in use anew."""
        self._new_rules = rules
        self.version += 1

    def keep_module(self, name: str, prefill: Vectors | None, decode: Vectors | None) -> None:
        """Bring vectors that requests are going to name into the pool, and keep them there until `release_module`.

        Args:
            name: The module's; not kept yet.
            prefill: Vectors of the prefill phase.
            decode: Vectors of the decode phase.
        """
        if name in self._modules:
            raise AssertionError(f"{name!r} is kept already")
        self._modules[name] = _Holder(0, NO_SUMS)
        self._new_modules[name] = (prefill, decode)

    def release_module(self, name: str) -> None:
        """Undo `keep_module`; requests that use the vectors are not affected."""
        self._sums.release(self._modules.pop(name).sums)
        self._new_modules.pop(name, None)

    def apply_changes(self) -> None:
        """Acquire slots for the vectors that `set_global`, `set_rules` and `keep_module` were given since.

        They are called between steps, when the worker may not know yet which requests have finished; so the slots wait
        for the next `add` or `batch`, which come after that is known. Calling this earlier is right where it is known.
        """
        changes: list[Callable[[], None]] = []
        if self._new_global is not None:
            changes.append(partial(self._sums.change_global, self._new_global))
        if self._new_rules is not None:
            self._rules = self._new_rules
            changes.append(partial(self._sums.change_rules, self._rules))
        self._new_global = self._new_rules = None
        if changes:
            # Every sum in use is computed anew, in one set of writes. All slots are released before new ones are
            # acquired, so the pool needs no room for old and new side by side.
            modules = [self._modules[name] for name in self._modules if name not in self._new_modules]
            holders = [(holder, holder.own) for holder in (*modules, *self._requests.values())]
            for holder, _ in holders:
                self._sums.release(holder.sums)
            for change in changes:
                change()
            for at, (holder, own) in enumerate(holders):
                rules = () if at < len(modules) else acting_of(self._rules, holder.selection, holder.driven)
                holder.sums = self._sums.acquire(own, rules)
            self._lines.unbind_all()
            self._num_steered = self._sums.has_global + sum(one.sums != NO_SUMS for one in self._requests.values())
        while self._new_modules:
            name, vectors = self._new_modules.popitem()
            self._modules[name].sums = self._sums.acquire(vectors)

    def batch(self, req_ids: Sequence[str]) -> BatchRows | None:
        """Return the rows of a batch's requests; None if none of them is steered.

        Raises:
            AssertionError: If a request is not known, or the batch needs more rows than there are.
        """
        self.apply_changes()
        if self.is_idle:
            return None
        lines = self._lines.of(req_ids)
        unbound = np.flatnonzero(self._lines.table[lines, _IS_BOUND] == 0).tolist()
        if unbound:
            self._bind([self._requests[req_ids[at]] for at in unbound], req_ids)
        found = self._lines.table[lines]
        rows = found[:, _ROWS].astype(np.int32)
        if not rows.any():
            return None
        groups: dict[int, PhaseGroups] = {}
        if self._num_grouped:
            of_all = enumerate(self._requests[req_id].groups for req_id in req_ids)
            groups = {at: of_one for at, of_one in of_all if of_one != _NO_GROUPS}
        return BatchRows(found[:, _NUM_PROMPT], rows, groups)

    def _bind(self, requests: Sequence[_Holder], req_ids: Sequence[str]) -> None:
        """Bind rows to requests of a batch that lack some."""

        def needed() -> dict[PooledSum, None]:
            return dict.fromkeys(_sums_of(self._requests[req_id] for req_id in req_ids))

        if self._rows.bind(_sums_of(requests), needed):
            self._lines.unbind_all()  # what the others of the batch have is laid out anew as well
            requests = [self._requests[req_id] for req_id in req_ids]
        for request in requests:
            rows = [UNSTEERED_ROW if found is None else found.row for found in request.sums]
            self._lines.table[request.line, 1:] = *rows, True

    def acting_sites(self, rows: Int32Array) -> BoolArray:
        """Return at which op sites a program of any of `rows`, bound by `batch`, acts: bool ``[P]``."""
        return self._rows.acting_sites(rows)

    def take_writes(self) -> TableWrites | None:
        """Return the changes that the device lacks, which count as written from here on; None if it lacks none.

        To be called after `batch`, before the forward.
        """
        slots, rows = self._pool.take_writes(), self._rows.take_changed()
        if slots is None and not len(rows):
            return None
        return TableWrites(slots, rows, self.map[:, rows], self._rows.program_writes(rows))

    def checksum(self) -> int:
        """Return the state as a number, equal on tensor-parallel ranks. For debugging; see `SlotPool.checksum`."""
        return self._rows.checksum(self._pool.checksum())


def _sums_of(requests: Iterable[_Holder]) -> Iterator[PooledSum]:
    return (found for request in requests for found in request.sums if found is not None)


def _groups_of(acting: Vectors | None, num_prompt: int) -> tuple[PositionSelector, ...]:
    """Return the selectors of a phase's position groups, resolved; the engine core saw that they resolve."""
    if not isinstance(acting, Steered):
        return ()
    return tuple(group.resolve(num_prompt, "positions") for group in acting.program.groups)
