"""Traces: what the gates of a request read and did, row by row, from the signals of its steps. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.steering.gates.gate import NamedProbe
from headgate.steering.gates.layout import Layout
from headgate.steering.vectors.dtypes import Float32Rows

Note = dict[str, Any]
"""Positions, scores by probe, and strengths by gate, of the rows of one step; plain values."""


class _Era(NamedTuple):
    """The rules that act on rows from a position on, by their columns."""

    since: int
    layouts: tuple[Layout, ...]


class TraceWriter:
    """Writes the trace of one request, step by step.

    Args:
        own: Columns of its own gates; without gates if it has none.
        rules: Columns of each rule that acts on it.
    """

    def __init__(self, own: Layout, rules: Sequence[Layout] = ()) -> None:
        self._own = own
        self._eras = [_Era(0, tuple(rules))]
        self._end = 0
        """Position behind the last row that was told."""

    def change_rules(self, since: int, rules: Sequence[Layout]) -> None:
        """Let other rules act on the rows from a position on."""
        self._eras = [*(era for era in self._eras if era.since < since), _Era(since, tuple(rules))]

    def note(self, first: int, signals: Float32Rows) -> Note | None:
        """Return the piece of a step's rows; None if all of them were told before: they were computed again.

        Args:
            first: Position of the first row.
            signals: float32 ``[rows, columns]``.
        """
        start = max(self._end, first)
        self._end = max(self._end, first + len(signals))
        if start >= self._end:
            return None
        note: Note = {"positions": list(range(start, self._end)), "scores": {}, "gates": {}}
        ends = [*(era.since for era in self._eras[1:]), self._end]
        for era, end in zip(self._eras, ends, strict=True):
            begin, end = max(era.since, start), min(end, self._end)
            if begin < end:
                self._fill(note, era, signals[begin - first : end - first], begin - start)
        return note

    def _fill(self, note: Note, era: _Era, rows: Float32Rows, at: int) -> None:
        """Write the rows of an era into a note, from its row `at` on."""
        num_rows = len(note["positions"])
        for name, column in _score_columns(self._own, era.layouts).items():
            _put(note["scores"].setdefault(name, [None] * num_rows), at, rows[:, column])
        for name, column in _gate_columns(self._own, era.layouts).items():
            told = note["gates"].setdefault(name, {"strength": [None] * num_rows, "applied": [None] * num_rows})
            _put(told["strength"], at, rows[:, column + 1])
            _put(told["applied"], at, rows[:, column])


def _score_columns(own: Layout, rules: Iterable[Layout]) -> dict[str, int]:
    """Return the columns of scores by their names: a probe that is read twice stands once, the request's own first."""
    found = {score.name: score for score in own.scores}
    for score in (score for layout in rules for score in layout.scores):
        known = found.get(score.name)
        if known is not None and isinstance(known.reading, NamedProbe) and isinstance(score.reading, NamedProbe):
            continue
        found[score.name if known is None else f"{score.name} (rule)"] = score
    return {name: score.column for name, score in found.items()}


def _gate_columns(own: Layout, rules: Iterable[Layout]) -> dict[str, int]:
    """Return the columns of gates by their names; a rule whose name a gate of the request has is told apart."""
    found = {column.gate.name: column.column for column in own.gates}
    for column in (column for layout in rules for column in layout.gates):
        name = column.gate.name
        found[f"{name} (rule)" if name in found else name] = column.column
    return found


def _put(column: list[float | None], at: int, values: Float32Rows) -> None:
    column[at : at + len(values)] = _plain(values)


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
