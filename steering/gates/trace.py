"""Traces: what the gates that act on a request read and did, row by row, from its steps' signals. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headgate.steering.gates.gate import NamedProbe
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


class GateSource(NamedTuple):
    """Gates that come together: a request's own, or a rule.

    Attributes:
        layout: Their columns.
        prefill: Those that turn something on at prompt positions.
        decode: Those that do at generated positions.
        key: Of their content and columns.
    """

    layout: Layout
    prefill: Writes
    decode: Writes
    key: bytes

    @classmethod
    def of(cls, layout: Layout, programs: tuple[Program | None, Program | None]) -> GateSource:
        """Make it of the columns and of the programs of both phases."""
        key = b"".join(program.key for program in programs if program is not None)
        return cls(layout, writes_of(programs[0]), writes_of(programs[1]), key)

    @property
    def columns(self) -> list[int]:
        """Of each gate, the column of its strength that acts."""
        return [gate.column for gate in self.layout.gates]

    @property
    def is_written_late(self) -> bool:
        """Whether each gate writes in both phases, at sites where it was evaluated: what acts is what is written."""
        columns = frozenset(self.columns)
        return columns <= self.prefill.late and columns <= self.decode.late

    def applied(self, column: int, num_prompt: int, rows: Float32Rows, before: Float32Rows) -> Float32Rows:
        """Return the strength of a gate that was written on each row, float32 ``[rows]``.

        Args:
            column: Of the strength that acts.
            num_prompt: How many of the rows, the first ones, are the prompt's.
            rows: Their signals, ``[rows, columns]``.
            before: Those of the row before each.
        """
        if not num_prompt and column in self.decode.late:
            return rows[:, column]
        applied = np.zeros(len(rows), np.float32)
        for writes, part in ((self.prefill, slice(num_prompt)), (self.decode, slice(num_prompt, None))):
            if column in writes.late:
                applied[part] = rows[part, column]
            elif column in writes.early:
                applied[part] = np.nan_to_num(before[part, column + FOLLOWING], nan=0.0)
        return applied


class _Era(NamedTuple):
    """The rules that act on rows from a position on.

    Attributes:
        since: That position.
        rules: The rules.
        fresh: Columns of those that did not act before.
        scores: The column of each score, by its name in traces.
        gates: Whose each gate is, and its column, by its name in traces.
    """

    since: int
    rules: tuple[GateSource, ...]
    fresh: tuple[int, ...]
    scores: dict[str, int]
    gates: dict[str, tuple[GateSource, int]]

    @classmethod
    def of(cls, own: GateSource, since: int, rules: Iterable[GateSource], fresh: Iterable[int] = ()) -> _Era:
        """Make it of the rules beside a request's own gates."""
        acting = tuple(rules)
        return cls(since, acting, tuple(fresh), _score_columns(own, acting), _gate_columns(own, acting))


class _Rows(NamedTuple):
    """Rows to tell of: position of the first, their signals, and those of the row before each."""

    first: int
    signals: Float32Rows
    before: Float32Rows

    def part(self, begin: int, end: int) -> _Rows:
        """Return the rows at positions ``begin : end``."""
        at = slice(begin - self.first, end - self.first)
        return _Rows(begin, self.signals[at], self.before[at])


class TraceWriter:
    """Writes the trace of one request, step by step.

    Args:
        own: Its own gates; without any if it has none.
        num_prompt: Tokens of its prompt.
        rules: Each rule that acts on it.
    """

    def __init__(self, own: GateSource, num_prompt: int, rules: Sequence[GateSource] = ()) -> None:
        self._own = own
        self._num_prompt = num_prompt
        self._eras = [_Era.of(own, 0, rules)]
        self._end = 0
        """Position behind the last row that was told."""
        self._last: Float32Rows | None = None
        """Signals ``[1, columns]`` of that row."""

    def change_rules(self, since: int, rules: Sequence[GateSource]) -> None:
        """Let other rules act on the rows from a position on."""
        kept = [era for era in self._eras if era.since < since]
        # Rules that no row met count as well: they ended those before them.
        earlier = [{rule.key for rule in era.rules} for era in (*kept[-1:], *self._eras[len(kept) :])]
        stay = set.intersection(*earlier)
        fresh = [column for rule in rules if rule.key not in stay for column in rule.columns]
        self._eras = [*kept, _Era.of(self._own, since, rules, fresh)]

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
        signals = signals[start - first :]
        before = np.concatenate([np.zeros_like(signals[:1]) if self._last is None else self._last, signals[:-1]])
        self._last = signals[-1:].copy()
        rows = _Rows(start, signals, before)
        note: Note = {"positions": list(range(start, self._end)), "scores": {}, "gates": {}}
        ends = [*(era.since for era in self._eras[1:]), self._end]
        for era, end in zip(self._eras, ends, strict=True):
            begin, end = max(era.since, start), min(end, self._end)
            if begin < end:
                self._fill(note, era, rows.part(begin, end), begin - start)
        return note

    def _fill(self, note: Note, era: _Era, rows: _Rows, at: int) -> None:
        """Write the rows of an era into a note, from its row `at` on."""
        num_rows = len(note["positions"])
        if rows.first == era.since:
            # Whatever had these columns before, if anything had, is another rule.
            rows.before[0, [column + FOLLOWING for column in era.fresh]] = 0.0
        num_prompt = max(self._num_prompt - rows.first, 0)
        for name, column in era.scores.items():
            _put(note["scores"].setdefault(name, [None] * num_rows), at, rows.signals[:, column])
        for name, (source, column) in era.gates.items():
            told = note["gates"].setdefault(name, {"strength": [None] * num_rows, "applied": [None] * num_rows})
            _put(told["strength"], at, rows.signals[:, column + 1])
            _put(told["applied"], at, source.applied(column, num_prompt, rows.signals, rows.before))


def _score_columns(own: GateSource, rules: Iterable[GateSource]) -> dict[str, int]:
    """Return the columns of scores by their names: a probe that is read twice stands once, the request's own first."""
    found = {score.name: score for score in own.layout.scores}
    for score in (score for rule in rules for score in rule.layout.scores):
        known = found.get(score.name)
        if known is not None and isinstance(known.reading, NamedProbe) and isinstance(score.reading, NamedProbe):
            continue
        found[score.name if known is None else f"{score.name} (rule)"] = score
    return {name: score.column for name, score in found.items()}


def _gate_columns(own: GateSource, rules: Iterable[GateSource]) -> dict[str, tuple[GateSource, int]]:
    """Return gates by their names, with whose they are; a rule whose name a gate of the request has is told apart."""
    found = {gate.gate.name: (own, gate.column) for gate in own.layout.gates}
    for rule in rules:
        for gate in rule.layout.gates:
            name = gate.gate.name
            found[f"{name} (rule)" if name in found else name] = rule, gate.column
    return found


def _put(column: list[float | None], at: int, values: Float32Rows) -> None:
    column[at : at + len(values)] = _plain(values)


def _plain(values: Float32Rows) -> list[float | None]:
    """Return numbers as JSON has them: None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
