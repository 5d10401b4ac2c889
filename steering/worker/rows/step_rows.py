"""The table row of each batch row of a step, and the position groups that act on it. Numpy only.

Letters in shape comments: B requests of the step, T batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from headgate.capture.schema.batch import BatchView, Int32Array, Int64Array
from headgate.steering.worker.rows.row_table import BatchRows, RowTable
from headgate.steering.worker.rows.vector_pool import UNSTEERED_ROW


class StepSequence:
    """Compares each step with the one before. Step thread only."""

    def __init__(self) -> None:
        self._last: BatchView | None = None
        self._has_one_each = False
        """Whether each request had one row there."""
        self._next: bytes = b""
        """Positions of the rows of a step that goes on."""

    def goes_on(self, view: BatchView | None) -> bool:
        """Return whether a step has the same requests in the same batch rows, one each, at the positions that follow.

        To be asked once for each step, in their order.

        Args:
            view: The step; None for dummy and idle ones, which interrupt.
        """
        last, self._last = self._last, view
        if view is None:
            return False
        is_alike = last is not None and view.is_laid_out_as(last)
        if not is_alike:
            self._has_one_each = len(view.req_ids) > 0 and bool((view.num_scheduled == 1).all())
        if not self._has_one_each:
            return False
        goes_on = is_alike and view.num_computed.tobytes() == self._next
        self._next = (view.num_computed + 1).tobytes()
        return goes_on


_Array = TypeVar("_Array", Int32Array, Int64Array)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The table rows of one step.

    Attributes:
        rows: int32 ``[max_tokens]``, read-only: table row of each batch row, `UNSTEERED_ROW` for padding. Valid until
            the next step is resolved.
        num_changed: The device copy of the step before is right from this index on; 0: it is right altogether.
        is_steered: Whether any row is steered.
        groups: int64 ``[T]``: the position groups that act on each batch row, group i in bit ``i - 1``; None if no
            request of the step has some.
    """

    rows: Int32Array
    num_changed: int
    is_steered: bool
    groups: Int64Array | None = None


class RowResolver:
    """The table row of each batch row, step by step, in order. One thread: the step thread.

    The phase follows from the absolute position: below the length of the prompt it is prefill, also where a preempted
    request computes it again. While nothing is steered a step costs two comparisons; while the batch stays as it is,
    nothing is looked up.

    Args:
        table: Where the rows of requests are bound.
        max_tokens: Upper limit of batch rows in one forward, padding included.
    """

    def __init__(self, table: RowTable, max_tokens: int) -> None:
        self._table = table
        self._rows: Int32Array = np.zeros(max_tokens, dtype=np.int32)
        self._shown = self._rows.view()
        self._shown.flags.writeable = False
        self._extent = 0
        self._idle_step = StepRows(self._shown, 0, False)
        self._batch: tuple[tuple[str, ...], int, BatchRows | None] = ((), -1, None)
        self._decoded: int | None = None
        """Version of the table at the step before, if its tokens were generated ones, none in a position group."""
        self._same_step = StepRows(self._shown, 0, True)

    def resolve(self, view: BatchView | None, *, goes_on: bool = False) -> StepRows:
        """Return the rows of the next step.

        Args:
            view: The step; None stands for dummy and idle ones.
            goes_on: Whether it goes on from the step before, as `StepSequence` has it.
        """
        if goes_on and self._decoded == self._table.version:
            return self._same_step
        step, self._decoded = self._resolve(view), None
        batch = self._batch[2]
        if view is not None and batch is not None and step.is_steered and step.groups is None:
            is_decoding = not np.count_nonzero(view.num_computed < batch.num_prompt)
            self._decoded = self._batch[1] if is_decoding else None
        return step

    def _resolve(self, view: BatchView | None) -> StepRows:
        batch = None if view is None or self._table.is_idle else self._rows_of(view.req_ids)
        if view is None or batch is None:
            return self._clear_step()
        rows = _lay_out(view, _spread(view, batch))
        groups = _lay_out(view, _spread_groups(view, batch)) if batch.groups else None
        size, extent = len(rows), self._extent
        if size == extent and np.array_equal(rows, self._rows[:size]):
            return StepRows(self._shown, 0, True, groups)
        self._rows[:size] = rows
        self._rows[size:extent] = UNSTEERED_ROW
        self._extent = size
        return StepRows(self._shown, max(size, extent), True, groups)

    def _clear_step(self) -> StepRows:
        extent, self._extent = self._extent, 0
        if not extent:
            return self._idle_step
        self._rows[:extent] = UNSTEERED_ROW
        return StepRows(self._shown, extent, False)

    def _rows_of(self, req_ids: tuple[str, ...]) -> BatchRows | None:
        """Return a batch's rows; the last answer is kept, since decode steps repeat the batch of the step before."""
        known, version, rows = self._batch
        if version != self._table.version or known != req_ids:
            rows = self._table.batch(req_ids)
            self._batch = (req_ids, self._table.version, rows)
        return rows


def _spread(view: BatchView, batch: BatchRows) -> Int32Array:
    """Return the table row of every scheduled token, one request after the other: a run of prefill, a run of decode."""
    num_scheduled = view.num_scheduled
    counts = np.empty((len(num_scheduled), 2), dtype=np.int64)
    num_prefill = np.minimum(np.maximum(batch.num_prompt - view.num_computed, 0), num_scheduled, out=counts[:, 0])
    np.subtract(num_scheduled, num_prefill, out=counts[:, 1])
    return np.repeat(batch.rows.ravel(), counts.ravel())


def _spread_groups(view: BatchView, batch: BatchRows) -> Int64Array:
    """Return the position groups of every scheduled token, as `_spread` returns its row."""
    num_scheduled = view.num_scheduled
    ends = np.cumsum(num_scheduled)
    spread = np.zeros(int(ends[-1]), dtype=np.int64)
    for at, groups in batch.groups.items():
        count = int(num_scheduled[at])
        positions = int(view.num_computed[at]) + np.arange(count, dtype=np.int64)
        num_prompt = np.full(count, batch.num_prompt[at])
        here = spread[ends[at] - count : ends[at]]
        for is_phase, selectors in zip((positions < num_prompt, positions >= num_prompt), groups, strict=True):
            for bit, selector in enumerate(selectors):
                here |= (is_phase & selector.mask(positions, num_prompt)).astype(np.int64) << bit
    return spread


def _lay_out(view: BatchView, rows: _Array) -> _Array:
    """Move the rows to where the runner put their tokens; mostly that is one request after the other already."""
    before = np.cumsum(view.num_scheduled) - view.num_scheduled
    if np.array_equal(view.starts, before):
        return rows
    index = np.arange(len(rows)) + np.repeat(view.starts - before, view.num_scheduled)
    laid_out = np.zeros(int(index.max()) + 1 if len(index) else 0, dtype=rows.dtype)
    laid_out[index] = rows
    return laid_out
