"""Traces: what the gates of a request read and did, row by row, from the signals of its steps. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headgate.steering.gates.layout import Layout
from headgate.steering.vectors.dtypes import Float32Rows

Note = dict[str, Any]
"""Positions, scores by probe, and strengths by gate, of the rows of one step; plain values."""


class TraceWriter:
    """Writes the trace of one request, step by step.

    Args:
        layout: Of its gates.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._end = 0
        """Position behind the last row that was told."""

    def note(self, first: int, signals: Float32Rows) -> Note | None:
        """Return the piece of a step's rows; None if all of them were told before: they were computed again.

        Args:
            first: Position of the first row.
            signals: float32 ``[rows, columns]``.
        """
        known = max(self._end - first, 0)
        rows = signals[known:]
        if not len(rows):
            return None
        self._end = first + len(signals)
        strengths = {
            column.gate.name: {
                "strength": _plain(rows[:, column.column + 1]),
                "applied": _plain(rows[:, column.column]),
            }
            for column in self._layout.gates
        }
        return {
            "positions": list(range(first + known, self._end)),
            "scores": {score.name: _plain(rows[:, score.column]) for score in self._layout.scores},
            "gates": strengths,
        }


class StepRows(NamedTuple):
    """The rows of one request in a step: position of the first, and their signals ``[rows, columns]``."""

    req_id: str
    first: int
    signals: Float32Rows


def rows_of(readings: Mapping[str, Any]) -> Iterator[StepRows]:
    """Yield the rows of each request in what a worker read of a step.

    Args:
        readings: As `headgate.steering.worker.gates.readings.SignalReadings.collect` made them.
    """
    firsts, counts = (np.frombuffer(readings[name], np.int64).tolist() for name in ("firsts", "counts"))
    values = np.frombuffer(readings["values"], np.float32).reshape(-1, readings["columns"])
    start = 0
    for req_id, first, count in zip(readings["ids"], firsts, counts, strict=True):
        yield StepRows(req_id, first, values[start : start + count])
        start += count


def _plain(values: Float32Rows) -> list[float | None]:
    """Return numbers as JSON has them: None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
