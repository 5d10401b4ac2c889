"""Table rows: what a batch row refers to, and which slot that means at each site. Numpy only.

A row stands for the effective vectors of one phase: those of the global phase and of a request together. The device
has ``map[site][row] -> slot`` and the pool of vectors; this module keeps the host's copy and says what to write.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.capture.schema.sites import Site
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.sums import Vectors, effective
from headgate.steering.worker.slot_pool import ZERO_SLOT, SlotPool, SlotWrites

UNSTEERED_ROW = 0
"""Points to the zero vector at every site, for ever."""

RESERVED_ROWS = 3
"""Beside two rows for each running request: `UNSTEERED_ROW`, and one for each global phase."""


def rows_needed(max_num_seqs: int) -> int:
    """Rows with which a batch of `max_num_seqs` requests never runs out."""
    return 2 * max_num_seqs + RESERVED_ROWS


@dataclass(frozen=True, slots=True, eq=False)
class BatchRows:
    """The rows of the requests of a batch, in its order.

    Attributes:
        num_prompt: int64 ``[B]``: positions below it are prefill.
        rows: int32 ``[B, 2]``: of the prefill and of the decode phase.
    """

    num_prompt: Int64Array
    rows: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class TableWrites:
    """What to write to the device before the next forward, the slots first.

    Attributes:
        slots: Vectors to write to the pool; None if it has them all.
        rows: int64 ``[K]``, ascending: the columns of the map that changed.
        columns: int32 ``[num_sites, K]``: their slots.
    """

    slots: SlotWrites | None
    rows: Int64Array
    columns: Int32Array


_Key = tuple[bytes, bytes]
"""Keys of the global and of the request's vectors of a phase; empty where there are none."""

_NOTHING: _Key = (b"", b"")

_Phases = tuple[Vectors | None, Vectors | None]


@dataclass(slots=True, eq=False)
class _PooledSum:
    """Effective vectors that are in the pool."""

    key: _Key
    own: Vectors | None
    """The request's part of it: to make it anew under other global vectors."""
    column: Int32Array
    """Slot at each site, int32 ``[num_sites]``."""
    slots: Int32Array
    """Those of `column` that are its own; where only global vectors act, the slot is that of the global phase."""
    users: int = 0
    row: int = UNSTEERED_ROW
    """The row that stands for it; `UNSTEERED_ROW` while none does."""


_Entries = tuple[_PooledSum | None, _PooledSum | None]

_NOBODY: _Entries = (None, None)


@dataclass(slots=True, eq=False)
class _Request:
    num_prompt: int
    entries: _Entries

    @property
    def vectors(self) -> _Phases:
        """Of its own; one object for all requests with equal vectors."""
        prefill, decode = self.entries
        return (prefill.own if prefill else None), (decode.own if decode else None)


class RowTable:
    """Every request of one worker, its vectors, and the rows for the batches. One thread: the step thread.

    A request keeps its slots from `add` to `remove`, also while it is preempted, as admission reserved them. A row it
    has only while it is in a batch: rows are bound by `batch`, and where none is free, one is taken from a request
    that is not in this batch. So `rows_needed` rows are always enough.

    What no request uses any more stays in the pool until its slots are needed: coming again, it costs nothing.

    Two replicas that are told the same in the same order have the same rows, and on the same sites the same slots.
    Whoever passes on finished requests has to sort them, since vLLM hands them out as a set.

    Args:
        sites: The sites that this worker owns, in order.
        num_rows: Width of the map; see `rows_needed`.
        pool: Used by this table alone.
        dtype: Of the pool.

    Attributes:
        map: int32 ``[num_sites, num_rows]``: slot of each row at each site, as the device has it after the writes.
        version: Changes whenever a batch's rows may have changed.
    """

    def __init__(self, *, sites: Sequence[Site], num_rows: int, pool: SlotPool, dtype: StoredType) -> None:
        self.map: Int32Array = np.zeros((len(sites), num_rows), dtype=np.int32)
        self.version = 0
        self._pool = pool
        self._dtype = dtype
        self._site_ids = {site: index for index, site in enumerate(sites)}
        self._requests: dict[str, _Request] = {}
        self._kept: dict[str, _Request] = {}
        self._entries: dict[_Key, _PooledSum] = {}
        self._idle: dict[_Key, None] = {}
        self._bound: dict[int, _PooledSum] = {}
        self._free_rows = list(range(1, num_rows))
        self._dirty: set[int] = set()
        self._to_hold: dict[str, _Phases] = {}
        self._is_stale = False
        self._next_global: _Phases = (None, None)
        self._global: _Phases = (None, None)
        self._global_entries: _Entries = _NOBODY
        self._num_steered = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody is steered: no request, and no global vectors."""
        return not self._num_steered and not self._is_stale

    @property
    def num_live_slots(self) -> int:
        """Slots that requests or the global phases use; the pool may keep more for later."""
        columns = [entry.column for entry in self._entries.values() if entry.users]
        return len(set(np.concatenate(columns).tolist()) - {ZERO_SLOT}) if columns else 0

    @property
    def num_slots_used(self) -> int:
        """Slots in use, those that are kept for later included."""
        return self._pool.num_used

    def add(self, req_id: str, num_prompt: int, prefill: Vectors | None = None, decode: Vectors | None = None) -> None:
        """Take a request, or start a known id afresh. Unsteered ones too: global vectors act on them."""
        if req_id in self._requests:
            self.remove(req_id)
        self.settle()
        request = _Request(num_prompt, self._hold((prefill, decode)))
        self._requests[req_id] = request
        self._num_steered += request.entries != _NOBODY
        self.version += 1

    def remove(self, req_id: str) -> None:
        """Forget a request that is known."""
        request = self._requests.pop(req_id)
        self._num_steered -= request.entries != _NOBODY
        self._release(request.entries)
        self.version += 1

    def set_global(self, prefill: Vectors | None, decode: Vectors | None) -> None:
        """Change the global vectors of both phases; what is in use is made anew, in one set of writes.

        That is done by `settle`. Slots are given back before new ones are taken, so the pool needs no room for old
        and new side by side.
        """
        self._next_global = (prefill, decode)
        self._is_stale = True
        self.version += 1

    def keep(self, name: str, prefill: Vectors | None, decode: Vectors | None) -> None:
        """Bring vectors that requests are going to name into the pool, and keep them there until `let_go`.

        Args:
            name: Whatever `let_go` is going to say; not kept yet.
        """
        if name in self._kept:
            raise AssertionError(f"{name!r} is kept already")
        self._kept[name] = _Request(0, _NOBODY)
        self._to_hold[name] = (prefill, decode)

    def let_go(self, name: str) -> None:
        """Undo `keep`; requests that use the vectors are not affected."""
        self._release(self._kept.pop(name).entries)
        self._to_hold.pop(name, None)

    def settle(self) -> None:
        """Take slots for what `set_global` and `keep` were told since.

        They are called between steps, when the worker may not know yet which requests have finished; so this waits
        for the next `add` or `batch`, which come after that is known. Calling it earlier is right where it is known.
        """
        if self._is_stale:
            self._make_anew()
        while self._to_hold:
            name, vectors = self._to_hold.popitem()
            self._kept[name].entries = self._hold(vectors)

    def drop_idle(self) -> None:
        """Free the slots that are kept for later."""
        while self._idle:
            self._drop_oldest()

    def batch(self, req_ids: Sequence[str]) -> BatchRows | None:
        """The rows of a batch's requests; None if none of them is steered.

        Raises:
            AssertionError: If a request is not known, or the batch needs more rows than there are.
        """
        self.settle()
        if self.is_idle:
            return None
        try:
            requests = [self._requests[req_id] for req_id in req_ids]
        except KeyError as error:
            raise AssertionError(f"request {error.args[0]!r} is in a batch, but was never added") from None
        needed = dict.fromkeys(entry for request in requests for entry in request.entries if entry is not None)
        if not needed:
            return None
        self._bind(needed)
        flat = [0 if entry is None else entry.row for request in requests for entry in request.entries]
        num_prompt = np.array([request.num_prompt for request in requests], dtype=np.int64)
        return BatchRows(num_prompt, np.array(flat, dtype=np.int32).reshape(-1, 2))

    def take_writes(self) -> TableWrites | None:
        """What the device does not have yet; it counts as written from here on. After `batch`, before the forward."""
        slots = self._pool.take_writes()
        if slots is None and not self._dirty:
            return None
        rows, self._dirty = np.array(sorted(self._dirty), dtype=np.int64), set()
        return TableWrites(slots, rows, self.map[:, rows])

    def checksum(self) -> int:
        """The state as a number: equal on tensor-parallel ranks. For debugging; see `SlotPool.checksum`."""
        bound = repr(sorted((row, entry.key) for row, entry in self._bound.items()))
        return zlib.crc32(bound.encode(), zlib.crc32(self.map.tobytes(), self._pool.checksum()))

    def _make_anew(self) -> None:
        holders = [*(self._kept[name] for name in self._kept if name not in self._to_hold), *self._requests.values()]
        self._release(self._global_entries)
        for holder in holders:
            self._release(holder.entries)
        self.drop_idle()
        self._global, self._is_stale = self._next_global, False
        self._global_entries = self._hold((None, None))
        for holder in holders:
            holder.entries = self._hold(holder.vectors)
        is_global = self._global_entries != _NOBODY
        self._num_steered = is_global + sum(request.entries != _NOBODY for request in self._requests.values())

    def _key(self, phase: int, vectors: Vectors | None) -> _Key:
        shared = self._global[phase]
        return b"" if shared is None else shared.key, b"" if vectors is None else vectors.key

    def _hold(self, vectors: _Phases) -> _Entries:
        """Become a user of the effective vectors of both phases; None where there are none."""
        return self._hold_phase(0, vectors[0]), self._hold_phase(1, vectors[1])

    def _hold_phase(self, phase: int, vectors: Vectors | None) -> _PooledSum | None:
        key = self._key(phase, vectors)
        if key == _NOTHING:
            return None
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._make(key, phase, vectors)
        self._idle.pop(key, None)
        entry.users += 1
        return entry

    def _make(self, key: _Key, phase: int, own: Vectors | None) -> _PooledSum:
        shared = None if own is None else self._global_entries[phase]
        column = np.zeros(len(self.map), dtype=np.int32) if shared is None else shared.column.copy()
        acting = [vectors for vectors in (self._global[phase], own) if vectors is not None]
        ids, stored = effective(acting, self._site_ids if own is None else self._sites_of(own), self._dtype)
        while self._idle and not self._pool.fits(len(ids)):
            self._drop_oldest()
        column[ids] = slots = self._pool.acquire(stored)
        return _PooledSum(key, own, column, slots)

    def _sites_of(self, vectors: Vectors) -> dict[Site, int]:
        """Those of `vectors` that the worker owns, and their indices."""
        return {site: self._site_ids[site] for site in vectors.sites if site in self._site_ids}

    def _release(self, entries: _Entries) -> None:
        for entry in entries:
            if entry is not None:
                entry.users -= 1
                if not entry.users:
                    self._let_rest(entry)

    def _let_rest(self, entry: _PooledSum) -> None:
        """Keep it for later, but not more of those than the map has columns."""
        self._idle[entry.key] = None
        if len(self._idle) > self.map.shape[1]:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._idle))
        del self._idle[key]
        entry = self._entries.pop(key)
        self._pool.release(entry.slots)
        if entry.row != UNSTEERED_ROW:
            self._unbind(entry)

    def _bind(self, needed: dict[_PooledSum, None]) -> None:
        """Give every needed entry a row, at the expense of those that are not needed."""
        for entry in needed:
            if entry.row == UNSTEERED_ROW:
                if not self._free_rows:
                    self._free_spare(needed)
                entry.row = heappop(self._free_rows)
                self._bound[entry.row] = entry
                self.map[:, entry.row] = entry.column
                self._dirty.add(entry.row)

    def _free_spare(self, needed: dict[_PooledSum, None]) -> None:
        """Free all rows that are not needed, at once: it is rare, and so it stays rare."""
        spare = [entry for entry in self._bound.values() if entry not in needed]
        if not spare:
            raise AssertionError(f"the batch needs more than {self.map.shape[1] - 1} rows")
        for entry in spare:
            self._unbind(entry)

    def _unbind(self, entry: _PooledSum) -> None:
        del self._bound[entry.row]
        self._dirty.discard(entry.row)
        heappush(self._free_rows, entry.row)
        entry.row = UNSTEERED_ROW
