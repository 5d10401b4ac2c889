"""The rows of one step as a worker read them, unpacked once for all who look at them. Numpy only."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.steering.vectors.dtypes import Float32Rows


class ReportedCounts(NamedTuple):
    """Counts of the rows that a request's gates wrote, as a worker has them.

    Attributes:
        req_id: The request.
        states: float32 ``[columns]``: its states, in which the counts are.
        is_last: Whether the counts begin anew after this.
        has_ended: Whether no more rows of the request will come.
    """

    req_id: str
    states: Float32Rows
    is_last: bool
    has_ended: bool


def spread(values: Float32Rows, reported: Int64Array | None, num_columns: int) -> Float32Rows:
    """Return the signals of rows, float32 ``[rows, num_columns]``, from those of some columns; the others are 0.

    Args:
        values: float32 ``[rows, K]``.
        reported: int64 ``[K]``, ascending: the columns that are known; None for all.
        num_columns: Number of columns of the signals.
    """
    if reported is None:
        return values
    # Column by column, so that pages of columns without values are never touched.
    signals = np.zeros((num_columns, len(values)), np.float32)
    signals[reported] = values.T
    return signals.T


_NO_END = np.iinfo(np.int64).max


class RequestSignals(NamedTuple):
    """The rows of one request in a step: position of the first, and their signals ``[rows, columns]``."""

    req_id: str
    first: int
    signals: Float32Rows


class StepTable(NamedTuple):
    """The rows of a step's requests, one request after the other.

    Attributes:
        ids: The requests; the same tuple object as in the step before if they are the same, where no process lies
            between.
        firsts: int64 ``[G]``: position of the first row of each.
        counts: int64 ``[G]``: rows of each.
        signals: float32 ``[rows, columns]``; 0 in columns without a reader.
        has_one_row_each: Whether each request has one row.
    """

    ids: tuple[str, ...]
    firsts: Int64Array
    counts: Int64Array
    signals: Float32Rows
    has_one_row_each: bool

    @classmethod
    def of(cls, readings: Mapping[str, Any]) -> StepTable:
        """Unpack what `headgate.steering.worker.gates.readings.SignalReadings.collect` made."""
        signals = spread(readings["values"], readings["reported"], readings["columns"])
        ids, firsts, counts = readings["ids"], readings["firsts"], readings["counts"]
        return cls(ids, firsts, counts, signals, readings["has_one_each"])

    def cut(self, ends: Mapping[str, int]) -> StepTable:
        """Return it without the rows of some requests from a position of each on."""
        limits = np.array([ends.get(req_id, _NO_END) for req_id in self.ids], np.int64)
        counts = np.clip(limits - self.firsts, 0, self.counts)
        if np.array_equal(counts, self.counts):
            return self
        offsets = np.arange(len(self.signals)) - (self.counts.cumsum() - self.counts).repeat(self.counts)
        (at,) = counts.nonzero()
        ids = tuple(self.ids[each] for each in at.tolist())
        signals = self.signals[offsets < counts.repeat(self.counts)]
        return StepTable(ids, self.firsts[at], counts[at], signals, has_one_row_each=bool((counts[at] == 1).all()))

    def rows(self, wanted: Container[str]) -> Iterator[RequestSignals]:
        """Yield the rows of each of the requests that are wanted."""
        start = 0
        for req_id, first, count in zip(self.ids, self.firsts.tolist(), self.counts.tolist(), strict=True):
            if req_id in wanted:
                yield RequestSignals(req_id, first, self.signals[start : start + count])
            start += count
