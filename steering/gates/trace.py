"""Traces: what the gates of a request read and did, row by row, from the signals of its steps. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headgate.steering.gates.layout import FOLLOWING, Layout
from headgate.steering.programs.codes import GROUP
from headgate.steering.programs.gate_codes import EARLY, gate_column
from headgate.steering.programs.program import Program
from headgate.steering.vectors.dtypes import Float32Rows

Note = dict[str, Any]
"""Positions, scores by probe, and strengths by gate, of the rows of one step; plain values."""


class Writes(NamedTuple):
    """The gates that turn something on in one phase, by their columns.

    Attributes:
        late: At sites where they are evaluated before.
        early: At sites where they are evaluated after.
    """

    late: frozenset[int]
    early: frozenset[int]


def writes_of(program: Program | None) -> Writes:
    """Return the gates that multiply entries of a phase's program."""
    fields = set() if program is None else set(program.codes[:, GROUP].tolist())
    found = {(gate_column(field), bool(field & EARLY)) for field in fields if gate_column(field) >= 0}
    late, early = (frozenset(column for column, is_early in found if is_early == wanted) for wanted in (False, True))
    return Writes(late, early)


class TraceWriter:
    """Writes the trace of one request, step by step.

    Args:
        layout: Of its gates.
        programs: Its own programs, prefill and decode.
        num_prompt: Tokens of its prompt.
    """

    def __init__(self, layout: Layout, programs: tuple[Program | None, Program | None], num_prompt: int) -> None:
        self._layout = layout
        self._prefill, self._decode = map(writes_of, programs)
        self._num_prompt = num_prompt
        self._end = 0
        """Position behind the last row that was told."""
        self._last: Float32Rows | None = None
        """Signals ``[1, columns]`` of that row."""

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
        before = np.concatenate([np.zeros_like(rows[:1]) if self._last is None else self._last, rows[:-1]])
        self._last = rows[-1:].copy()
        strengths = {
            column.gate.name: {
                "strength": _plain(rows[:, column.column + 1]),
                "applied": _plain(self._applied(column.column, first + known, rows, before)),
            }
            for column in self._layout.gates
        }
        return {
            "positions": list(range(first + known, self._end)),
            "scores": {score.name: _plain(rows[:, score.column]) for score in self._layout.scores},
            "gates": strengths,
        }

    def _applied(self, column: int, first: int, rows: Float32Rows, before: Float32Rows) -> Float32Rows:
        """Return the strength of a gate that was written on each row, from its signals and those of the row before."""
        applied = np.zeros(len(rows), np.float32)
        num_prompt = max(self._num_prompt - first, 0)
        for writes, part in ((self._prefill, slice(num_prompt)), (self._decode, slice(num_prompt, None))):
            if column in writes.late:
                applied[part] = rows[part, column]
            elif column in writes.early:
                applied[part] = np.nan_to_num(before[part, column + FOLLOWING], nan=0.0)
        return applied


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
