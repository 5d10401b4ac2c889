"""Changes of coefficients, on their way from controllers in the engine core to the workers. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
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
        req_ids: The request of each, ``[n]``.
        columns: int64 ``[n]``.
        firsts: int64 ``[n]``: the first position on which each acts.
        values: float32 ``[n]``.
    """

    req_ids: Sequence[str]
    columns: Int64Array
    firsts: Int64Array
    values: Float32Rows

    @classmethod
    def of(cls, changes: Iterable[CoefficientChange]) -> CoefficientChanges:
        """Make it of changes one by one."""
        listed = list(changes)
        return cls(
            [each.req_id for each in listed],
            np.array([each.column for each in listed], np.int64),
            np.array([each.first for each in listed], np.int64),
            np.array([each.value for each in listed], np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence[CoefficientChanges]) -> CoefficientChanges:
        """Put some one behind the other."""
        if len(parts) == 1:
            return parts[0]
        req_ids = [req_id for part in parts for req_id in part.req_ids]
        columns, firsts, values = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3))
        return cls(req_ids, columns, firsts, values)

    def part(self, at: Sequence[int]) -> CoefficientChanges:
        """Return some of them, by their indices."""
        index = np.array(at, np.int64)
        return CoefficientChanges(
            [self.req_ids[each] for each in at], self.columns[index], self.firsts[index], self.values[index]
        )

    def each(self) -> Iterator[CoefficientChange]:
        """Yield them one by one."""
        arrays = (self.columns.tolist(), self.firsts.tolist(), self.values.tolist())
        return map(CoefficientChange, self.req_ids, *arrays)

    def to_wire(self) -> dict[str, Any]:
        """Return plain values and bytes, for `from_wire`."""
        return {
            "ids": list(self.req_ids),
            "columns": self.columns.tobytes(),
            "firsts": self.firsts.tobytes(),
            "values": self.values.tobytes(),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> CoefficientChanges:
        """Return what `to_wire` wrote."""
        columns, firsts = (np.frombuffer(wire[name], np.int64) for name in ("columns", "firsts"))
        return cls(wire["ids"], columns, firsts, np.frombuffer(wire["values"], np.float32))
