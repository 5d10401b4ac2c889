"""Signals of the gates of a step, on their way to the host: for the engine core, and for rows computed again.

How many rows the gates of a request wrote is counted on the device, in its states. If nothing more is read, these
counts are all that is copied, on request.

Letters in shape comments: G requests with gates in a step, N their rows, C columns, K columns that are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headgate.capture.schema.batch import Int32Array, Int64Array, StepOutcome
from headgate.steering.gates.gate import FOLLOWING
from headgate.steering.gates.step_table import ReportedCounts, spread
from headgate.steering.programs.codes import TokenFlag
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.requests import GatedBatch, GatedRequest, GateRows, GateSlots
from headgate.steering.worker.transfers import PinnedCopies, PinnedCopy, inference_mode, sent


@dataclass(frozen=True, slots=True, eq=False)
class CountPiece:
    """`ReportedCounts` of some requests, on the way to the host: states float32 ``[n, columns]``, one of each."""

    req_ids: Sequence[str]
    states: PinnedCopy | Float32Rows
    is_last: bool
    has_ended: bool

    @property
    def is_there(self) -> bool:
        """Whether `reported` returns at once."""
        return not isinstance(self.states, PinnedCopy) or self.states.is_there

    def reported(self) -> list[ReportedCounts]:
        """Return the counts as they are sent to the engine core. To be called once; waits for the copy. Any thread."""
        states = self.states.take() if isinstance(self.states, PinnedCopy) else self.states
        return [
            ReportedCounts(req_id, each, self.is_last, self.has_ended)
            for req_id, each in zip(self.req_ids, states, strict=True)
        ]


class WrittenCounts:
    """Reads the counts of requests whose rows are not sent, until the counts are sent to the engine core.

    Args:
        states: float32 ``[Q, C]``: the gates' states, as the forward writes them.
        copies: Makes the copies; None where the states are on the host.
        slots: Slots of the states. A slot is read here before another request gets it.
        requests: The requests with gates, by id, as they are now.
    """

    def __init__(
        self, states: Tensor, copies: PinnedCopies | None, slots: GateSlots, requests: Mapping[str, GatedRequest]
    ) -> None:
        self._states = states
        self._copies = copies
        self._slots = slots
        self._requests = requests
        self._pieces: list[CountPiece] = []
        slots.on_loss.append(self.read_last)

    def read_last(self, req_id: str, *, has_ended: bool = False) -> None:
        """Read the counts of a request after what was launched, before they begin anew."""
        if (slot := self._slot_of(req_id)) is not None:
            with inference_mode():
                self._read([req_id], self._states[slot : slot + 1], is_last=True, has_ended=has_ended)

    def take(self) -> Sequence[CountPiece]:
        """Take everything that was read."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def ask(self) -> list[ReportedCounts]:
        """Return what was read and is there. Of requests that run, the rest comes with a later step.

        While none runs there may be no later step: then everything is waited for.
        """
        running = {req_id: slot for req_id in self._requests if (slot := self._slot_of(req_id)) is not None}
        if running:
            with inference_mode():
                index = sent(np.array([*running.values()], np.int64), self._states.device)
                self._read([*running], self._states[index], is_last=False, has_ended=False)
        there = [piece for piece in self._pieces if not running or piece.is_there]
        self._pieces = [piece for piece in self._pieces if piece not in there]
        return [reported for piece in there for reported in piece.reported()]

    def _slot_of(self, req_id: str) -> int | None:
        """Return the slot of a request that counts; None if it has none."""
        request = self._requests.get(req_id)
        return self._slots.find(req_id) if request is not None and request.is_counted else None

    def _read(self, req_ids: Sequence[str], states: Tensor, *, is_last: bool, has_ended: bool) -> None:
        found = states.numpy().copy() if self._copies is None else self._copies.start(states)
        self._pieces.append(CountPiece(req_ids, found, is_last, has_ended))


class ReportedColumns:
    """The columns of signals that the host reads.

    Args:
        columns: int64 ``[K]``, ascending.
        device: Where the signals are.

    Attributes:
        columns: As given.
    """

    def __init__(self, columns: Int64Array, device: torch.device) -> None:
        self.columns = columns
        self._device = device

    @cached_property
    def on_device(self) -> Tensor:
        """`columns` on the device: sent on first use."""
        return sent(self.columns, self._device)


LARGE_BYTES = 64 << 10
"""From so many bytes on the device selects the columns; below, copying all costs less than the launch."""


class SignalRows:
    """The signals of some batch rows on the device, to be copied after each of the steps that have these rows.

    Of more than `LARGE_BYTES`, as prompts have them, only the columns that are read are copied.

    Args:
        signals: float32 ``[T, C]``, as the forward writes them.
        batch_rows: int64 ``[N]``.
        columns: The columns that are read.
        copies: Makes the copies; None where the signals are on the host.

    Attributes:
        batch_rows: As given.
        columns: As given.
        num_columns: C.
        reported: int64 ``[K]``: the columns that are copied; None if all are.
    """

    def __init__(
        self, signals: Tensor, batch_rows: Int64Array, columns: ReportedColumns, copies: PinnedCopies | None
    ) -> None:
        self.batch_rows, self.columns, self.num_columns = batch_rows, columns, signals.shape[1]
        are_first = np.array_equal(batch_rows, np.arange(len(batch_rows)))
        self._signals = signals[: len(batch_rows)] if are_first else signals
        self._index = None if are_first else sent(batch_rows, signals.device)
        is_large = len(batch_rows) * self.num_columns * signals.element_size() > LARGE_BYTES
        self.reported: Int64Array | None = columns.columns if is_large else None
        self._copies = copies

    def copy(self) -> PinnedCopy | Float32Rows:
        """Copy them to the host, on the current stream; returns the copy, or one that is under way."""
        found = self._signals if self._index is None else self._signals[self._index]
        if self.reported is not None:
            found = found.index_select(1, self.columns.on_device)
        if self._copies is not None:
            return self._copies.start(found)
        values: Float32Rows = (found.clone() if found is self._signals else found).numpy()
        return values


class StepSignals:
    """The signals of one step's rows with gates, copied to the host while the step runs. Any thread may read them.

    Args:
        rows: The step's rows.
        copied: Their signals, which are copied here.
        outcome: Says which of the rows count; None if all do.

    Attributes:
        rows: As given.
        num_columns: C.
        reported: int64 ``[K]``: the columns that were copied; None if all were.
    """

    def __init__(self, rows: GateRows, copied: SignalRows, outcome: StepOutcome | None = None) -> None:
        self.rows, self.num_columns, self.reported = rows, copied.num_columns, copied.reported
        self._counted, self._outcome = rows, outcome
        self._values = copied.copy()
        self._lock = Lock()

    def counted(self) -> tuple[GateRows, Float32Rows]:
        """Return the rows that count, and their signals ``[N, len(reported)]`` or ``[N, C]``; waits for both."""
        with self._lock:
            if isinstance(self._values, PinnedCopy):
                self._values = self._values.take()
            if self._outcome is not None:
                self._counted, counts = self.rows.counted(self._outcome.view())
                self._values, self._outcome = self._values[counts], None
            return self._counted, self._values

    def of(self, req_id: str) -> tuple[int, Float32Rows]:
        """Return position of the first row, and the signals ``[n, C]``, of one of the requests; 0 if no row counts."""
        rows, values = self.counted()
        if req_id not in rows.req_ids:
            return 0, np.empty((0, self.num_columns), np.float32)
        at = rows.req_ids.index(req_id)
        start = int(rows.counts[:at].sum())
        own = values[start : start + int(rows.counts[at])]
        return int(rows.firsts[at]), spread(own, self.reported, self.num_columns)


class SignalCopier:
    """Copies the signals of the rows that are sent to the host; what successive steps have in common is kept.

    Args:
        signals: float32 ``[T, C]``, as the forward writes them.
        copies: Makes the copies; None where the signals are on the host.
    """

    def __init__(self, signals: Tensor, copies: PinnedCopies | None) -> None:
        self._all = signals
        self._copies = copies
        self._starts: Int64Array | None = None
        """First batch rows of the last step; steps that go on have the same array object."""
        self._reported: GateRows | None = None
        self._copied: SignalRows | None = None
        """Signals of that step's rows."""

    def copy(self, rows: GateRows, batch: GatedBatch, outcome: StepOutcome | None = None) -> StepSignals:
        """Copy the signals of a step's rows that are sent; there are some. Its outcome says which of them count."""
        if self._reported is None or self._copied is None or self._starts is not rows.starts:
            reported = rows.part(batch.reported_at)
            self._copied = self._rows_to_copy(reported, batch)
        else:
            are_all = len(batch.reported_at) == len(rows.req_ids)
            reported = rows if are_all else self._reported._replace(firsts=rows.firsts[batch.reported_at])
        self._reported, self._starts = reported, rows.starts
        return StepSignals(reported, self._copied, outcome)

    def _rows_to_copy(self, reported: GateRows, batch: GatedBatch) -> SignalRows:
        """Return the rows to copy; indices that the device has are not sent again."""
        known, index = self._copied, reported.batch_rows
        if known is None or not np.array_equal(known.columns.columns, batch.reported):
            return SignalRows(self._all, index, ReportedColumns(batch.reported, self._all.device), self._copies)
        if np.array_equal(known.batch_rows, index):
            return known
        return SignalRows(self._all, index, known.columns, self._copies)


class SignalReadings:
    """Implements `StepReadings` of `headgate.capture.engine.contracts.worker_hooks`: what the engine core gets.

    Args:
        signals: The step's signals; None if none of its rows are sent here.
        written: Counts of requests whose rows are not sent.
    """

    def __init__(self, signals: StepSignals | None, written: Sequence[CountPiece] = ()) -> None:
        self._signals = signals
        self._written = written

    def collect(self) -> dict[str, Any]:
        """Return the requests, the position of the first row and the number of rows of each, and their signals.

        All of it is left out if no rows are sent. ``written``, if there are any, are `ReportedCounts`.

        ``ids`` are a tuple; ``firsts`` and ``counts`` int64 ``[G]``; ``has_one_each`` says that all counts are 1.
        ``values``, float32, are the signals of all rows, in all ``columns`` if ``reported`` is None, else in those
        whose indices it has, int64 ``[K]``.
        """
        written = (
            {"written": [reported for piece in self._written for reported in piece.reported()]} if self._written else {}
        )
        if self._signals is None:
            return written
        rows, values = self._signals.counted()
        if not rows.req_ids:
            return written
        return {
            **written,
            "ids": rows.req_ids,
            "firsts": rows.firsts,
            "counts": rows.counts,
            "has_one_each": rows.has_one_each,
            "columns": self._signals.num_columns,
            "reported": self._signals.reported,
            "values": values,
        }


_UNREAD = 4
"""Steps whose signals wait before they are read: their copies are long done, so that reading them waits for nothing."""


class _Strengths:
    """Strengths that rows of one request hand on, from the last row of its prompt.

    Args:
        request: The request.
    """

    def __init__(self, request: GatedRequest) -> None:
        self._columns = np.array(request.early, np.int64)
        self._of_rules = request.of_rules
        self._first = request.num_prompt - 1
        self._values = np.zeros((_ROWS_AT_FIRST, len(self._columns)), np.float32)
        self._count = 0

    def follow(self, request: GatedRequest) -> None:
        """Keep the columns that `request` has now; on rows that were computed before, new ones handed nothing on."""
        values = np.zeros((len(self._values), len(request.early)), np.float32)
        known = {column: at for at, column in enumerate(self._columns.tolist())}
        for at, column in enumerate(request.early):
            if column in known:
                values[:, at] = self._values[:, known[column]]
        self._columns, self._of_rules, self._values = np.array(request.early, np.int64), request.of_rules, values

    def clear(self, first: int, end: int) -> None:
        """Let the columns ``first : end`` have handed nothing on so far: they were another rule's."""
        self._values[:, (self._columns >= first) & (self._columns < end)] = 0.0

    def put(self, first: int, signals: Float32Rows) -> None:
        """Put the rows from position `first` on, by their signals ``[n, C]``; rows come in their order."""
        begin = max(first, self._first)
        values = signals[begin - first :, self._columns + FOLLOWING]
        start, end = begin - self._first, begin - self._first + len(values)
        if end > len(self._values):
            self._values = np.concatenate([self._values, np.zeros((end, self._values.shape[1]), np.float32)])
        self._values[start:end] = values
        self._count = max(self._count, end)

    def at(self, position: int) -> list[float] | None:
        """Return the strengths of the row at a position, one for each of its columns; None if it is not known."""
        at = position - self._first
        if 0 <= at < self._count:
            return cast("list[float]", self._values[at].tolist())
        # A row without known signals was computed before its rules were there.
        return [0.0] * len(self._columns) if self._of_rules.issuperset(self._columns.tolist()) else None


_ROWS_AT_FIRST = 64


class GateHistory:
    """Strengths that acted at sites before their gates, of requests that run: rows may be computed again.

    Rows that are computed again, after a preemption, share a forward; the strength that acted on one at an earlier site
    followed from the row before it. Step thread only.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[StepSignals, dict[str, GatedRequest]]] = deque()
        self._strengths: dict[str, _Strengths] = {}

    def follow(self, req_id: str, request: GatedRequest) -> None:
        """Follow a request on which other rules act from the next step on."""
        self._read(0)  # as long as the columns are those of the steps
        if (known := self._strengths.get(req_id)) is not None:
            known.follow(request)

    def clear(self, first: int, end: int) -> None:
        """Let the columns ``first : end`` belong to another rule from the next step on."""
        self._read(0)
        for known in self._strengths.values():
            known.clear(first, end)

    def keep(self, signals: StepSignals, requests: Sequence[GatedRequest]) -> None:
        """Keep what a step's rows hand on, of requests with gates that act early."""
        ends = (signals.rows.firsts + signals.rows.counts).tolist()
        kept = {
            req_id: request
            for req_id, request, end in zip(signals.rows.req_ids, requests, ends, strict=True)
            if request.early and end >= request.num_prompt
        }
        for req_id, request in kept.items():
            if req_id not in self._strengths:
                self._strengths[req_id] = _Strengths(request)
        if kept:
            self._unread.append((signals, kept))
            self._read(_UNREAD)

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        self._strengths.pop(req_id, None)
        for _, kept in self._unread:
            kept.pop(req_id, None)

    def strengths(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> list[tuple[int, int, float]]:
        """Return the strengths that act again on replayed rows: batch row, column and value of each.

        Args:
            rows: Rows of a step.
            batch: Batch of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.

        Raises:
            AssertionError: If a row was not computed before.
        """
        if not (flags & TokenFlag.IS_REPLAYED).any():
            return []
        self._read(0)
        found: list[tuple[int, int, float]] = []
        end = 0
        for at, (req_id, request) in enumerate(zip(rows.req_ids, batch.requests, strict=True)):
            start, end = end, end + int(rows.counts[at])
            for index in np.flatnonzero(flags[start:end] & TokenFlag.IS_REPLAYED).tolist() if request.early else ():
                values = self._at(req_id, request, int(rows.firsts[at]) + index - 1)
                row = int(rows.starts[at]) + index
                found += [(row, column, value) for column, value in zip(request.early, values, strict=True)]
        return found

    def _at(self, req_id: str, request: GatedRequest, position: int) -> list[float]:
        known = self._strengths.get(req_id)
        if known is None:
            known = self._strengths[req_id] = _Strengths(request)
        if (values := known.at(position)) is None:
            raise AssertionError(f"request {req_id}: nothing is known of its gates at position {position}")
        return values

    def _read(self, num_left: int) -> None:
        """Read the signals of all steps but the last `num_left`."""
        while len(self._unread) > num_left:
            signals, kept = self._unread.popleft()
            for req_id in kept:
                self._strengths[req_id].put(*signals.of(req_id))
