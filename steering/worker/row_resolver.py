"""Which table row each batch row of a step refers to. Numpy only.

Phase follows from the absolute position: below the length of the prompt it is prefill, also where a preempted request
computes it again. Letters in shape comments: B requests of the step, T batch rows, S sites.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headgate.capture.schema.batch import BatchView, Int32Array
from headgate.steering.worker.row_table import BatchRows, RowTable


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The table rows of one step.

    Attributes:
        rows: int32 ``[max_tokens]``, read-only: table row of each batch row, `UNSTEERED_ROW` for padding. Valid until
            the next step is resolved.
        num_changed: The device copy of the step before is right from this index on; 0: it is right altogether.
        is_steered: Whether any row is steered.
    """

    rows: Int32Array
    num_changed: int
    is_steered: bool


class RowResolver:
    """Resolves steps in order. One thread: the step thread.

    While nobody is steered a step costs two comparisons; while the batch stays as it is, nothing is looked up.

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
        self._rest = StepRows(self._shown, 0, False)
        self._batch: tuple[tuple[str, ...], int, BatchRows | None] = ((), -1, None)

    def resolve(self, view: BatchView | None) -> StepRows:
        """The rows of the next step; None for dummy and idle steps."""
        batch = None if view is None or self._table.is_idle else self._rows_of(view.req_ids)
        if view is None or batch is None:
            return self._clear()
        rows = _lay_out(view, _spread(view, batch))
        size, extent = len(rows), self._extent
        if size == extent and np.array_equal(rows, self._rows[:size]):
            return StepRows(self._shown, 0, True)
        self._rows[:size] = rows
        self._rows[size:extent] = 0
        self._extent = size
        return StepRows(self._shown, max(size, extent), True)

    def _clear(self) -> StepRows:
        extent, self._extent = self._extent, 0
        if not extent:
            return self._rest
        self._rows[:extent] = 0
        return StepRows(self._shown, extent, False)

    def _rows_of(self, req_ids: tuple[str, ...]) -> BatchRows | None:
        """Decode steps repeat the batch of the step before, so the last answer is kept."""
        known, version, rows = self._batch
        if version != self._table.version or known != req_ids:
            rows = self._table.batch(req_ids)
            self._batch = (req_ids, self._table.version, rows)
        return rows


def slots_at_sites(table_map: Int32Array, rows: Int32Array) -> Int32Array:
    """The slot that each batch row adds at each site: what the device computes once a step.

    Args:
        table_map: `RowTable.map`, int32 ``[S, num_rows]``.
        rows: int32 ``[T]``.

    Returns:
        int32 ``[S, T]``.
    """
    return table_map[:, rows]


def _spread(view: BatchView, batch: BatchRows) -> Int32Array:
    """Table row of every scheduled token, one request after the other: each a run of prefill and a run of decode."""
    num_scheduled = view.num_scheduled
    counts = np.empty((len(num_scheduled), 2), dtype=np.int64)
    num_prefill = np.minimum(np.maximum(batch.num_prompt - view.num_computed, 0), num_scheduled, out=counts[:, 0])
    np.subtract(num_scheduled, num_prefill, out=counts[:, 1])
    return np.repeat(batch.rows.ravel(), counts.ravel())


def _lay_out(view: BatchView, rows: Int32Array) -> Int32Array:
    """Put the tokens where the runner put them; mostly that is one request after the other already."""
    before = np.cumsum(view.num_scheduled) - view.num_scheduled
    if np.array_equal(view.starts, before):
        return rows
    index = np.arange(len(rows)) + np.repeat(view.starts - before, view.num_scheduled)
    laid_out = np.zeros(int(index.max()) + 1 if len(index) else 0, dtype=np.int32)
    laid_out[index] = rows
    return laid_out
