"""Changes of coefficients, on their way from controllers in the engine core to the workers. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.steering.vectors.dtypes import Float32Rows


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
