"""Changes of coefficients, on their way from controllers in the engine core to the workers. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.steering.vectors.dtypes import Float32Rows


class CoefficientChange(NamedTuple):
    """A coefficient that a request has in a column from a position on."""

    req_id: str
    column: int
    first: int
    value: float


class CoefficientChanges(NamedTuple):
    """Changes in the order in which they were decided; of one request and column the last one counts.

    Attributes:
        req_ids: Requests; the very tuple of an earlier step if they are the same, where no process lies between.
        whose: int64 ``[n]``: the place there of the request of each.
        columns: int64 ``[n]``.
        firsts: int64 ``[n]``: the first position on which each acts.
        values: float32 ``[n]``.
    """

    req_ids: tuple[str, ...]
    whose: Int64Array
    columns: Int64Array
    firsts: Int64Array
    values: Float32Rows

    @classmethod
    def of(cls, changes: Iterable[CoefficientChange]) -> CoefficientChanges:
        """Make it of changes one by one."""
        listed = list(changes)
        return cls(
            tuple(each.req_id for each in listed),
            np.arange(len(listed)),
            np.array([each.column for each in listed], np.int64),
            np.array([each.first for each in listed], np.int64),
            np.array([each.value for each in listed], np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[CoefficientChanges]) -> CoefficientChanges:
        """Put some one behind the other."""
        if len(parts) == 1:
            return parts[0]
        req_ids = tuple(req_id for part in parts for req_id in part.req_ids)
        begins = accumulate((len(part.req_ids) for part in parts), initial=0)
        whose = np.concatenate([part.whose + begin for part, begin in zip(parts, begins, strict=False)])
        columns, firsts, values = (np.concatenate([part[at] for part in parts]) for at in (2, 3, 4))
        return cls(req_ids, whose, columns, firsts, values)

    def where(self, wanted: BoolArray) -> CoefficientChanges:
        """Return those for which `wanted`, ``[n]``, is true."""
        req_ids, whose, columns, firsts, values = self
        return CoefficientChanges(req_ids, whose[wanted], columns[wanted], firsts[wanted], values[wanted])

    def by_column(self) -> Iterator[tuple[int, Any]]:
        """Yield each column, in order, with the index of its changes in arrays."""
        names = set(self.columns.tolist())
        for name in sorted(names):
            yield name, slice(None) if len(names) == 1 else self.columns == name

    def each(self) -> Iterator[CoefficientChange]:
        """Yield them one by one."""
        req_ids = (self.req_ids[at] for at in self.whose.tolist())
        return map(CoefficientChange, req_ids, self.columns.tolist(), self.firsts.tolist(), self.values.tolist())
