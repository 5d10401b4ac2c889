"""The gates of each step of one worker: before its forward, and after. Step thread only.

`DrivenStrengths` has the coefficients that controllers set on requests, for entries of programs on generated rows. A
coefficient has a column, like the strength of a gate, but nothing on the device evaluates it: the host writes it into
the state of the request where it changes. Rows that are computed again, several in a forward, find theirs in the
signals, as `headgate.steering.programs.codes` has it for entries that act early. Numpy only.

Letters in shape comments: G requests with gates in a step, N their rows, K requests that are driven, n requests or
changes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import BatchView, Int32Array, Int64Array, StepOutcome
from headgate.capture.schema.sites import Site
from headgate.steering.gates.step_table import CoefficientChanges, ColumnChanges, ReportedCounts
from headgate.steering.programs.codes import TokenFlag
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.readings import (
    GateHistory,
    SignalCopier,
    SignalReadings,
    StepSignals,
    WrittenCounts,
)
from headgate.steering.worker.gates.reference import FLAGS, SLOT, GateTensors
from headgate.steering.worker.gates.requests import (
    GatedBatch,
    GatedRequest,
    GateRows,
    GateSlots,
    OwnGates,
    gated_request,
    slots_needed,
)
from headgate.steering.worker.placed_programs import ActingRule, acting_of
from headgate.steering.worker.transfers import PinnedCopies, inference_mode, sent

NEVER = np.iinfo(np.int64).max


class Places(NamedTuple):
    """Numbers to write into signals or states.

    Attributes:
        flat: int64 ``[n]``: the batch row, or slot, times the number of columns, plus the column. The very array of the
            step before if it is the same.
        values: float32 ``[n]``.
    """

    flat: Int64Array
    values: Float32Rows

    def __len__(self) -> int:
        return len(self.flat)

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, float]], num_columns: int) -> Places:
        """Make it of row, column and value of each."""
        listed = list(places)
        flat = np.array([row * num_columns + column for row, column, _ in listed], np.int64)
        return cls(flat, np.array([value for *_, value in listed], np.float32))

    @classmethod
    def joined(cls, *parts: Places) -> Places:
        """Concatenate some."""
        found = [part for part in parts if len(part)]
        if len(found) < 2:
            return found[0] if found else NO_PLACES
        flat, values = (np.concatenate([part[at] for part in found]) for at in (0, 1))
        return cls(flat, values)


NO_PLACES = Places(np.empty(0, np.int64), np.empty(0, np.float32))


class DrivenColumn:
    """The coefficients in one column, of each driven request by its number.

    Args:
        size: Numbers.
        num_slots: Slots of states.

    Attributes:
        firsts: int64 ``[size]``: the position from which the last value acts; `NEVER` for a request that is not driven
            here.
        values: float32 ``[size]``: the last values.
        written: float32 ``[num_slots]``: as the device has it, by slot; NaN if nothing is known.
        is_changed: Whether a value was set since the last step.
    """

    def __init__(self, size: int, num_slots: int) -> None:
        self.firsts: Int64Array = np.full(size, NEVER, np.int64)
        self.values: Float32Rows = np.zeros(size, np.float32)
        self.written: Float32Rows = np.full(num_slots, np.nan, np.float32)
        self.is_changed = False
        self._history: dict[int, tuple[array[int], array[float]]] = {}
        """Positions of each driven request, ascending, and the values from them on."""

    def is_driven(self, numbers: Any) -> Any:
        """Return whether the requests of some numbers, or of one, have had a coefficient here."""
        return self.firsts[numbers] < NEVER

    def grow(self, size: int) -> None:
        """Make room for numbers below `size`."""
        more = size - len(self.firsts)
        self.firsts = np.concatenate([self.firsts, np.full(more, NEVER, np.int64)])
        self.values = np.concatenate([self.values, np.zeros(more, np.float32)])

    def forget(self, number: int) -> None:
        """Let a number be another request's."""
        self.firsts[number] = NEVER
        self._history.pop(number, None)

    def set(self, numbers: Int64Array, changes: ColumnChanges) -> None:
        """Set values from positions on, for good, of requests by their numbers, int64 ``[n]``."""
        self.firsts[numbers], self.values[numbers] = changes.firsts, changes.values
        self.is_changed = True
        each = zip(numbers.tolist(), changes.firsts.tolist(), changes.values.tolist(), strict=True)
        for number, first, value in each:
            if (known := self._history.get(number)) is None:
                known = self._history[number] = array("q"), array("f")
            firsts, values = known
            # One that was decided later takes the place of all that were to act from its position on.
            while firsts and firsts[-1] >= first:
                firsts.pop()
                values.pop()
            firsts.append(first)
            values.append(value)

    def at(self, number: int, positions: Int64Array) -> Float32Rows:
        """Return the value of a request at each of some positions; 0 before the first."""
        firsts, values = self._history[number]
        acting = [bisect_right(firsts, position) for position in positions.tolist()]
        return np.array([values[at - 1] if at else 0.0 for at in acting], np.float32)


_AT_FIRST = 64


class _NamedRequests(NamedTuple):
    """The requests that changes name; the next ones are likely to name the same.

    Attributes:
        req_ids: The tuple object.
        numbers: int64 ``[n]``; `NOBODY` for requests that are not driven.
        columns: The columns in which all of them are driven.
    """

    req_ids: tuple[str, ...]
    numbers: Int64Array
    columns: set[int]


class _Members(NamedTuple):
    """The requests of a batch that are driven in a column; they stay from step to step.

    Attributes:
        at: int64 ``[K]``: their places in the batch; None if it is all of them.
        numbers: int64 ``[K]``.
        slots: int64 ``[K]``.
        flat: int64 ``[K]``: where their coefficients lie in the states.
    """

    at: Int64Array | None
    numbers: Int64Array
    slots: Int64Array
    flat: Int64Array


NOBODY = 0
"""The number of requests that are not driven."""


class DrivenStrengths:
    """The coefficients of a worker's requests. Step thread only.

    Args:
        num_slots: Slots of states.
        num_columns: Number of columns of signals and states.

    Attributes:
        numbers: Numbers of the requests that are driven, by id.
        by_column: Their coefficients.
        is_settled: Whether the device has the last value of each request of the last step.
    """

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self._num_slots, self._num_columns = num_slots, num_columns
        self.numbers: dict[str, int] = {}
        self.by_column: dict[int, DrivenColumn] = {}
        self._size = _AT_FIRST
        """Numbers that there are, free ones included."""
        self._free = list(range(_AT_FIRST - 1, NOBODY, -1))
        self.is_settled = True
        self._named: tuple[tuple[str, ...], Int64Array] = ((), np.empty(0, np.int64))
        """The requests that were asked for last, and the number of each."""
        self._last_named: _NamedRequests | None = None
        """Requests of the last changes; None once numbers have changed."""
        self._batch: GatedBatch | None = None
        self._members: dict[int, _Members] = {}
        """Members of the last batch, by column."""
        self._joined: dict[tuple[int, ...], Int64Array] = {}
        """Where the coefficients of its members lie, by columns."""

    def set(self, changes: CoefficientChanges) -> list[str]:
        """Take changes.

        Returns:
            The requests that were not driven in that column before.
        """
        fresh: dict[str, None] = {}
        for piece in changes:
            column = self.by_column.get(piece.column)
            if column is None:
                column = self.by_column[piece.column] = DrivenColumn(self._size, self._num_slots)
            named = self._named_by(piece.req_ids)
            if piece.column not in named.columns:
                fresh |= dict.fromkeys(self._begin(piece, column, named))
                named = self._named_by(piece.req_ids)
            numbers = named.numbers if len(piece.whose) == len(piece.req_ids) else named.numbers[piece.whose]
            column.set(numbers, piece)
        self.is_settled = False
        return list(fresh)

    def _begin(self, piece: ColumnChanges, column: DrivenColumn, named: _NamedRequests) -> list[str]:
        """Give the requests of changes numbers; return the ones that were not driven in the column before."""
        is_driven = column.is_driven(named.numbers)
        if np.count_nonzero(is_driven) == len(is_driven):
            named.columns.add(piece.column)
            return []
        fresh = [piece.req_ids[at] for at in piece.whose[~is_driven[piece.whose]].tolist()]
        for req_id in fresh:
            self._number(req_id)
        if fresh:
            self._forget_members()
        return fresh

    def columns(self, req_id: str) -> frozenset[int]:
        """Return the columns that a request has had a coefficient in."""
        number = self.numbers.get(req_id)
        if number is None:
            return frozenset()
        return frozenset(name for name, column in self.by_column.items() if column.is_driven(number))

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        number = self.numbers.pop(req_id, None)
        if number is None:
            return
        for name, column in list(self.by_column.items()):
            column.forget(number)
            if not column.is_driven(slice(None)).any():
                del self.by_column[name]
        self._free.append(number)
        self._renumbered()

    def changes(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write before a step that goes on from the one before; it counts as written."""
        return NO_PLACES if self.is_settled else self._settle(rows, batch)

    def states(self, rows: GateRows, batch: GatedBatch, cleared: Int32Array) -> Places:
        """Return what to write into the states before a step; it counts as written.

        Args:
            rows: Rows of the step.
            batch: Batch of the step.
            cleared: Slots whose states are forgotten before.
        """
        for column in self.by_column.values() if len(cleared) else ():
            column.written[cleared] = np.nan
        return self._settle(rows, batch) if self.numbers else NO_PLACES

    def replayed(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> Places:
        """Return what to write into the signals of rows that are computed again.

        Args:
            rows: Rows of the step.
            batch: Batch of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.
        """
        if not self.numbers or not (flags & TokenFlag.IS_REPLAYED).any():
            return NO_PLACES
        found: list[Places] = []
        ends = np.cumsum(rows.counts)
        for at, number in enumerate(self._numbers_of(batch.gated_ids).tolist()):
            (index,) = np.nonzero(flags[ends[at] - rows.counts[at] : ends[at]] & TokenFlag.IS_REPLAYED)
            for name, column in self.by_column.items() if len(index) else ():
                if column.is_driven(number):
                    values = column.at(number, rows.firsts[at] + index)
                    found.append(Places((rows.starts[at] + index) * self._num_columns + name, values))
        return Places.joined(*found)

    def _number(self, req_id: str) -> int:
        """Return the number of a request, which counts as driven from here on."""
        if (known := self.numbers.get(req_id)) is not None:
            return known
        if not self._free:
            self._free = list(range(2 * self._size - 1, self._size - 1, -1))
            self._size *= 2
            for column in self.by_column.values():
                column.grow(self._size)
        number = self.numbers[req_id] = self._free.pop()
        self._renumbered()
        return number

    def _renumbered(self) -> None:
        self._named = ((), self._named[1])
        self._last_named = None
        self._forget_members()

    def _forget_members(self) -> None:
        self._members.clear()
        self._joined.clear()

    def _named_by(self, req_ids: tuple[str, ...]) -> _NamedRequests:
        named = self._last_named
        if named is None or named.req_ids is not req_ids:
            numbers = self._numbers_of(req_ids)
            named = self._last_named = _NamedRequests(req_ids, numbers, set())
        return named

    def _numbers_of(self, req_ids: tuple[str, ...]) -> Int64Array:
        """Return the number of each of some requests, int64 ``[n]``."""
        if self._named[0] != req_ids:
            self._named = req_ids, np.array([self.numbers.get(req_id, NOBODY) for req_id in req_ids], np.int64)
        return self._named[1]

    def _members_of(self, name: int, batch: GatedBatch) -> _Members:
        if (known := self._members.get(name)) is None:
            numbers = self._numbers_of(batch.gated_ids)
            (at,) = self.by_column[name].is_driven(numbers).nonzero()
            slots = batch.slots[at].astype(np.int64)
            flat = slots * self._num_columns + name
            known = _Members(None if len(at) == len(numbers) else at, numbers[at], slots, flat)
            self._members[name] = known
        return known

    def _settle(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write for the first row of each request.

        Where one changes all of a column are written: so the places stay the same from step to step.
        """
        if self._batch is not batch:
            self._batch = batch
            self._forget_members()
        found: list[tuple[int, Places]] = []
        self.is_settled = True
        for name, column in self.by_column.items():
            at, numbers, slots, flat = self._members_of(name, batch)
            firsts = rows.firsts if at is None else rows.firsts[at]
            values = column.values[numbers]
            is_early = firsts < column.firsts[numbers]
            for index in is_early.nonzero()[0].tolist() if np.count_nonzero(is_early) else ():
                self.is_settled = False
                values[index] = column.at(int(numbers[index]), firsts[index : index + 1])[0]
            if column.is_changed or np.count_nonzero(values != column.written[slots]):
                column.is_changed, column.written[slots] = False, values
                found.append((name, Places(flat, values)))
        if len(found) > 1:
            return _one_behind_the_other(found, self._joined)
        return found[0][1] if found else NO_PLACES


def _one_behind_the_other(found: Sequence[tuple[int, Places]], known: dict[tuple[int, ...], Int64Array]) -> Places:
    """Concatenate the places of some columns; `known` has the arrays of before, by columns."""
    joined = Places.joined(*(places for _, places in found))
    return Places(known.setdefault(tuple(name for name, _ in found), joined.flat), joined.values)


_NO_TOKENS: Int32Array = np.empty((0, 2), np.int32)
_NO_SLOTS: Int32Array = np.empty(0, np.int32)
_NO_PLACES: Int64Array = np.empty(0, np.int64)
_NO_VALUES: Float32Rows = np.empty(0, np.float32)


class GateWrites(NamedTuple):
    """Changes of the gates' tensors, to write before the next forward.

    Attributes:
        tokens: int32 ``[n, 2]``: slot and flags of the first batch rows.
        places: int64 ``[k]``: flat places in the signals.
        strengths: float32 ``[k]``: their values before the forward.
        cleared: int32 ``[m]``: slots whose states are to be NaN.
        columns: Columns whose states are to be NaN for all: the first, and the one after the last.
        state_places: int64 ``[d]``: flat places in the states, written after the others.
        states: float32 ``[d]``: their values.
    """

    tokens: Int32Array = _NO_TOKENS
    places: Int64Array = _NO_PLACES
    strengths: Float32Rows = _NO_VALUES
    cleared: Int32Array = _NO_SLOTS
    columns: tuple[tuple[int, int], ...] = ()
    state_places: Int64Array = _NO_PLACES
    states: Float32Rows = _NO_VALUES


class DraftedRows:
    """The rows of a step that may be of drafts, from before its forward until it was sampled.

    States go on from row to row, so after a forward they are those after the last draft. They are taken back to what
    they were before, and the rows that count are evaluated again, from the scores that their signals still have.

    Args:
        rows: As `GatedBatch.drafted` returns them, int64 ``[3, n]``.
        sites: Where gates of their requests are evaluated.
        tensors: As they are right before the forward.
    """

    def __init__(self, rows: Int64Array, sites: frozenset[Site], tensors: GateTensors) -> None:
        self.sites = sites
        self._end = int(rows[0].max()) + 1
        self._rows, self._places, self._after = sent(rows, tensors.states.device)
        self._tokens = tensors.tokens[self._rows]
        self._slots = self._tokens[:, SLOT].long()
        self._states = tensors.states[self._slots]

    def take_back(self, tensors: GateTensors, num_rejected: torch.Tensor | None) -> GateTensors | None:
        """Let states be what they were; return the gates with the rows to evaluate again as their only ones.

        Args:
            tensors: The gates.
            num_rejected: See `StepOutcome.num_rejected`.
        """
        tensors.states.index_copy_(0, self._slots, self._states)
        if num_rejected is None:
            return None
        tokens = torch.zeros_like(tensors.tokens[: self._end])
        counts = self._after >= num_rejected[self._places]
        tokens[self._rows] = self._tokens * counts[:, None]
        return tensors._replace(signals=tensors.signals[: self._end], tokens=tokens)


class StepGates:
    """Follows the requests with gates of one worker through its steps.

    Args:
        max_tokens: Upper limit of batch rows in one forward.
        max_num_seqs: Upper limit of requests in one forward.
        num_columns: Number of columns of signals and states.
        device: Where the forward runs.
        is_output_rank: Whether the engine core gets what this worker reads.
        sites: The op sites in this worker; None if all layers are. Otherwise signals come from the pipeline stage
            before and go to the next one, and each state is on the stage that has the last site which its gate reads.

    Attributes:
        tensors: Read and written by the forward.
    """

    def __init__(
        self,
        max_tokens: int,
        max_num_seqs: int,
        num_columns: int,
        device: torch.device,
        *,
        is_output_rank: bool = True,
        sites: Collection[Site] | None = None,
    ) -> None:
        self._is_output_rank, self._sites = is_output_rank, sites
        num_slots, self._num_columns = slots_needed(max_num_seqs), num_columns
        self.tensors = _tensors(max_tokens, num_slots, num_columns, device)
        self._requests: dict[str, GatedRequest] = {}
        self._own: dict[str, OwnGates] = {}
        """Own gates of all requests."""
        self._rules: Sequence[ActingRule] = ()
        self._new_columns: list[tuple[int, int]] = []
        self._slots = GateSlots(num_slots)
        self._history = GateHistory()
        copies = PinnedCopies() if device.type == "cuda" else None
        self._copier = SignalCopier(self.tensors.signals, copies)
        # What other ranks read would never be taken.
        reported_of = self._requests if is_output_rank else {}
        self._counts = WrittenCounts(self.tensors.states, copies, self._slots, reported_of)
        self._driven = DrivenStrengths(num_slots, num_columns)
        self._tokens = np.zeros((max_tokens, 2), np.int32)
        """As the device has them after the writes."""
        self._num_marked = 0
        """Number of rows after which everything is 0."""
        self._batch: GatedBatch | None = None
        self._decoded: tuple[GatedBatch, GateRows] | None = None
        """The step before, if each request had one generated row."""
        self._rows: GateRows | None = None
        self._outcome: StepOutcome | None = None
        """The last step's, which says which of its rows count; None if all do."""
        self._drafted: DraftedRows | None = None
        self._signals: StepSignals | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_requests(self) -> int:
        """Requests with gates."""
        return len(self._requests)

    @property
    def has_several_rows(self) -> bool:
        """Whether a request with gates has several rows in the step."""
        return self._rows is not None and not self._rows.has_one_each

    def add(self, req_id: str, own: OwnGates) -> None:
        """Add a request, with or without gates, or start a known id afresh."""
        self.remove(req_id)
        self._own[req_id] = own
        self._follow(req_id, own)

    def set_rules(self, rules: Sequence[ActingRule]) -> None:
        """Make `rules` the ones that act, from the next step on. Columns of rules that stay keep their states."""
        before = {rule.columns: tuple(program.key for program in rule.programs) for rule in self._rules}
        self._rules = rules
        for rule in rules:
            if before.get(rule.columns) != tuple(program.key for program in rule.programs):
                self._new_columns.append(rule.columns)
                self._history.clear(*rule.columns)
        for req_id, own in self._own.items():
            self._follow(req_id, own)

    def drive(self, changes: CoefficientChanges) -> dict[str, frozenset[int]]:
        """Take coefficients that controllers set.

        Returns:
            All columns in which a request has been driven, of each request that has another one now.

        Raises:
            AssertionError: If a request is not known.
        """
        changed = {req_id: self._driven.columns(req_id) for req_id in self._driven.set(changes)}
        for req_id in changed:
            if req_id not in self._own:
                raise AssertionError(f"request {req_id!r} is driven, but was never added")
            self._follow(req_id, self._own[req_id])
        return changed

    def _follow(self, req_id: str, own: OwnGates) -> None:
        acting = acting_of(self._rules, own.selection, self._driven.columns(req_id))
        request = gated_request(own, acting, self._sites)
        known = self._requests.get(req_id)
        if request is None:
            self._leave(req_id)
            return
        # The device has counted rows that were sent, or has those of the gates that other stages evaluate.
        if request.is_counted and not (self._sites is None and (known is None or known.is_counted)):
            request = replace(request, is_counted=False)
        if known != request:
            if not request.is_counted:
                self._counts.read_last(req_id)
            self._requests[req_id] = request
            self._history.follow(req_id, request)
            self._batch = None

    def remove(self, req_id: str) -> None:
        """Remove a request, if it is known."""
        self._own.pop(req_id, None)
        self._leave(req_id)

    def _leave(self, req_id: str) -> None:
        if req_id not in self._own:
            self._driven.forget(req_id)
        self._counts.read_last(req_id, has_ended=True)
        if self._requests.pop(req_id, None) is not None:
            self._slots.release(req_id)
            self._history.forget(req_id)
            self._batch = None

    def step_begins(self, view: BatchView | None, *, goes_on: bool = False) -> GateWrites | None:
        """Return what to write before the forward of a step; None if nothing changes, or nothing has gates.

        Args:
            view: The step; None for dummy and idle ones.
            goes_on: Whether it goes on from the step before, as `StepSequence` has it.
        """
        self._rows = self._signals = self._drafted = None
        self._outcome = None if view is None else view.outcome
        decoded = self._decoded
        if view is not None and goes_on and decoded is not None and decoded[0] is self._batch and not self._new_columns:
            return self._goes_on(view, *decoded)
        self._decoded = None
        if view is None or not self._requests:
            return None
        if self._batch is None or self._batch.req_ids != view.req_ids:
            self._batch = GatedBatch(view.req_ids, self._requests, self._slots)
        batch = self._batch
        rows = batch.rows(view)
        if not rows.req_ids:
            return None
        self._rows = rows
        if batch.is_decoding(rows):
            self._decoded = batch, rows
        return self._writes(rows, batch)

    def _goes_on(self, view: BatchView, batch: GatedBatch, before: GateRows) -> GateWrites | None:
        """Follow a step of one generated row of each request, after such a step: only coefficients can change."""
        self._rows = rows = before._replace(firsts=batch.firsts(view))
        changed = self._driven.changes(rows, batch)
        return GateWrites(state_places=changed.flat, states=changed.values) if len(changed) else None

    def _writes(self, rows: GateRows, batch: GatedBatch) -> GateWrites | None:
        columns, self._new_columns = tuple(self._new_columns), []
        for place in batch.restarted(rows):
            self._counts.read_last(rows.req_ids[place])
        cleared = batch.cleared(rows)
        index, flags = rows.batch_rows, batch.take_flags(rows, has_drafts=self._outcome is not None)
        handed_on = self._history.strengths(rows, batch, flags) if batch.has_early else []
        replayed = Places.joined(Places.of(handed_on, self._num_columns), self._driven.replayed(rows, batch, flags))
        states = self._driven.states(rows, batch, cleared)
        changed = np.empty((len(flags), 2), np.int32)
        changed[:, SLOT], changed[:, FLAGS] = np.repeat(batch.slots, rows.counts), flags
        end = int(index.max()) + 1
        # Rows of other requests keep no flag of the step before: scanned rows are visited one by one.
        tokens = np.zeros((max(end, self._num_marked), 2), np.int32)
        tokens[index] = changed
        self._num_marked = end
        if np.array_equal(self._tokens[: len(tokens)], tokens) and not (
            len(replayed) or len(states) or len(cleared) or columns
        ):
            return None
        self._tokens[: len(tokens)] = tokens
        return GateWrites(
            tokens=tokens,
            places=replayed.flat,
            strengths=replayed.values,
            cleared=cleared,
            columns=columns,
            state_places=states.flat,
            states=states.values,
        )

    def launches(self) -> None:
        """Keep what a step with drafts will find, once all was written that its forward finds."""
        if self._rows is None or self._batch is None or self._outcome is None:
            return
        rows = self._batch.drafted(self._rows)
        if rows.size:
            sites = frozenset[Site]().union(*(request.sites for request in self._batch.requests))
            with inference_mode():
                self._drafted = DraftedRows(rows, sites, self.tensors)

    def take_back(self) -> tuple[frozenset[Site], GateTensors] | None:
        """Let the states forget the rows of a step with drafts, after its sampling.

        Returns:
            The sites of gates, and the gates with the rows that are to be evaluated again; None if there are none.
        """
        if (drafted := self._drafted) is None or self._outcome is None:
            return None
        self._drafted = None
        gates = drafted.take_back(self.tensors, self._outcome.num_rejected())
        return None if gates is None else (drafted.sites, gates)

    def step_ends(self) -> None:
        """Copy what the gates of the step did, after its forward."""
        rows, batch = self._rows, self._batch
        if rows is None or batch is None or not batch.reported_requests:
            return
        if not (self._is_output_rank or batch.has_early):
            return
        self._signals = self._copier.copy(rows, batch, self._outcome)
        if batch.has_early:
            self._history.keep(self._signals, batch.reported_requests)

    def to_next_stage(self) -> Tensor | None:
        """Return the signals of the step that ended, float32 ``[T, C]``; None if none of its rows has gates."""
        rows = self._rows
        return None if rows is None else self.tensors.signals[: int((rows.starts + rows.counts).max())].clone()

    def from_last_stage(self, signals: Tensor) -> None:
        """Take the signals of the step that begins, of sites on the pipeline stages before."""
        self.tensors.signals[: len(signals)].copy_(signals)

    def readings(self) -> SignalReadings | None:
        """Return what the engine core gets with the step that ended; None if nothing."""
        counts = self._counts.take()
        return SignalReadings(self._signals, counts) if counts or self._signals is not None else None

    def ask_counts(self) -> list[ReportedCounts]:
        """Return what requests whose rows are not sent have counted, as far as it has arrived."""
        return self._counts.ask()


def _tensors(max_tokens: int, num_slots: int, num_columns: int, device: torch.device) -> GateTensors:
    return GateTensors(
        signals=torch.zeros(max_tokens, num_columns, device=device),
        states=torch.full((num_slots, num_columns), torch.nan, device=device),
        tokens=torch.zeros(max_tokens, 2, dtype=torch.int32, device=device),
    )


def no_gates(device: torch.device) -> GateTensors:
    """Return the tensors of a worker where there can be no gates: they have no columns."""
    return _tensors(1, 1, 0, device)
