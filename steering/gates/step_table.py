"""Tables of a step between workers and the engine core. Numpy only.

`StepTable` has the rows as a worker read them, unpacked once for all who look at them; `CoefficientChanges` are on
their way from controllers in the engine core to the workers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
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


class CoefficientChange(NamedTuple):
    """A coefficient that a request has in a column from a position on."""

    req_id: str
    column: int
    first: int
    value: float


class ColumnChanges(NamedTuple):
    """Changes in one column, of requests that are all different.

    Attributes:
        req_ids: Requests, and others; the tuple object of an earlier step if they are the same, where no process lies
            between.
        whose: int64 ``[n]``, ascending: the place there of the request of each.
        column: The column.
        firsts: int64 ``[n]``: the first position on which each acts.
        values: float32 ``[n]``.
    """

    req_ids: tuple[str, ...]
    whose: Int64Array
    column: int
    firsts: Int64Array
    values: Float32Rows

    @classmethod
    def of(cls, column: int, changes: Mapping[str, tuple[int, float]]) -> ColumnChanges:
        """Make it of first position and value by request."""
        firsts = np.array([first for first, _ in changes.values()], np.int64)
        values = np.array([value for _, value in changes.values()], np.float32)
        return cls(tuple(changes), np.arange(len(changes)), column, firsts, values)

    def where(self, wanted: BoolArray) -> ColumnChanges:
        """Return those for which `wanted`, ``[n]``, is true."""
        req_ids, whose, column, firsts, values = self
        return ColumnChanges(req_ids, whose[wanted], column, firsts[wanted], values[wanted])

    def each(self) -> Iterator[CoefficientChange]:
        """Yield them one by one."""
        for at, first, value in zip(self.whose.tolist(), self.firsts.tolist(), self.values.tolist(), strict=True):
            yield CoefficientChange(self.req_ids[at], self.column, first, value)


CoefficientChanges: TypeAlias = tuple[ColumnChanges, ...]
"""Changes of one column are in the order in which they were decided: for a request and column the last one counts."""


def by_column(changes: Iterable[CoefficientChange]) -> CoefficientChanges:
    """Put changes that were decided one by one together, as far as they are of one column and different requests."""
    made: list[tuple[int, dict[str, tuple[int, float]]]] = []
    last: dict[int, dict[str, tuple[int, float]]] = {}
    for req_id, column, first, value in changes:
        members = last.get(column)
        if members is None or req_id in members:
            members = last[column] = {}
            made.append((column, members))
        members[req_id] = first, value
    return tuple(ColumnChanges.of(column, members) for column, members in made)
