"""Traces: what the gates that act on a request read and did, row by row, from its steps' signals. Numpy only.

The engine core makes a `Note` of the rows of each step, and leaves out rows that were computed again after their tokens
were sampled. The front end unpacks all notes of a request at once (`join_notes`), for ``return_steering_trace``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import HeatMap, TextTable, page
from headgate.capture.schema.errors import read_flag
from headgate.steering.gates.gate import GateColumns, columns_of
from headgate.steering.programs.codes import EARLY, GROUP, gate_column
from headgate.steering.programs.program import Program

Note = dict[str, Any]
"""A piece of a trace; plain values. Of a step's rows: the position of the ``first``, how many ``rows``, the names of
``scores`` and of ``gates``, and as ``values`` the bytes of float32 ``[rows, scores + 2 gates]``: scores, strengths, and
what was applied; not finite where there is nothing. Rows from ``first`` on that earlier pieces have count no more: they
were computed again before a token was sampled after them. Or the ``actions`` of controllers."""


def add_note(log: list[Note], note: Note) -> None:
    """Add a piece, which stays as it is, to the pieces of a trace in their order.

    Rows that go on where the piece before ends lengthen that one.

    Args:
        log: Pieces that were added here, and no others.
        note: The piece.
    """
    if "values" in note:
        last_rows = next((each for each in reversed(log) if "values" in each), None)
        if last_rows is not None and note["first"] < last_rows["first"] + last_rows["rows"]:
            log[:] = _without_rows(log, note["first"])
    if log and _goes_on(log[-1], note):
        log[-1]["rows"] += note["rows"]
        log[-1]["values"] += note["values"]
    else:
        log.append({**note, "values": bytearray(note["values"])} if "values" in note else note)


def _without_rows(notes: Iterable[Note], first: int) -> list[Note]:
    """Return pieces of a trace without the rows from position ``first`` on."""
    kept = []
    for note in notes:
        if "values" not in note or note["first"] + note["rows"] <= first:
            kept.append(note)
        elif note["first"] < first:
            num_rows = first - note["first"]
            num_bytes = len(note["values"]) // note["rows"] * num_rows
            kept.append({**note, "rows": num_rows, "values": note["values"][:num_bytes]})
    return kept


def _goes_on(last: Note, note: Note) -> bool:
    if "values" not in last or "values" not in note or last["first"] + last["rows"] != note["first"]:
        return False
    return bool(last["scores"] == note["scores"] and last["gates"] == note["gates"])


class Writes(NamedTuple):
    """The gates that turn something on at generated positions, by their columns.

    Attributes:
        late: At sites where they are evaluated before.
        early: At sites where they are evaluated after. They write nothing there at prompt positions.
    """

    late: frozenset[int]
    early: frozenset[int]


def writes_of(program: Program | None) -> Writes:
    """Return the gates that multiply entries of a program."""
    fields = set() if program is None else set(program.codes[:, GROUP].tolist())
    gated = [field for field in fields if gate_column(field) >= 0]
    late = frozenset([gate_column(field) for field in gated if not field & EARLY])
    return Writes(late, frozenset([gate_column(field) for field in gated if field & EARLY]))


class GateSource(NamedTuple):
    """Gates that come together: a request's own, or a rule.

    Attributes:
        columns: Their columns.
        prefill: Columns of the gates that turn something on at prompt positions.
        decode: Gates that turn something on at generated positions.
        key: Hash of their content and columns.
    """

    columns: GateColumns
    prefill: frozenset[int]
    decode: Writes
    key: bytes

    @classmethod
    def of(cls, columns: GateColumns, programs: tuple[Program | None, Program | None]) -> GateSource:
        """Make it of the columns and of the programs of both phases."""
        key = b"".join(program.key for program in programs if program is not None)
        return cls(columns, writes_of(programs[0]).late, writes_of(programs[1]), key)

    @classmethod
    def nothing(cls) -> GateSource:
        """Return that of a request without gates."""
        return cls.of(columns_of(()), (None, None))

    @property
    def strength_columns(self) -> list[int]:
        """The column of each gate's acting strength."""
        return [gate.column for gate in self.columns.gates]

    def whose(self, column: int) -> tuple[int, int]:
        """Return which row's signals have the strength that a gate writes on rows of the prompt, and on generated rows.

        Args:
            column: Column of the strength that acts.

        Returns:
            `NOW` or `NEVER`, and `NOW`, `BEFORE` or `NEVER`; the row before has it in the column `FOLLOWING` after
            this one.
        """
        decode = NOW if column in self.decode.late else BEFORE if column in self.decode.early else NEVER
        return NOW if column in self.prefill else NEVER, decode


NOW, BEFORE, NEVER = range(3)
"""The row that a number is taken of: that row itself, the one before it, or none: it is 0."""


RETURN_TRACE = "return_steering_trace"
TRACE = "steering_trace"


class GateTrace(TypedDict):
    """One gate in a trace: a value for each row, None where the gate was not there.

    Attributes:
        strength: With which the gate acted, or would have.
        applied: The strength that was written at the row.
    """

    strength: list[float | None]
    applied: list[float | None]


class Trace(TypedDict):
    """A trace, or a piece of one. Plain values.

    Attributes:
        positions: Positions of the rows, ascending.
        scores: A value for each row, by probe; None where the probe was not read.
        gates: By gate.
        actions: Actions of controllers: ``{"position", "controller", "action", "outcome"}``.
    """

    positions: list[int]
    scores: dict[str, list[float | None]]
    gates: dict[str, GateTrace]
    actions: list[Mapping[str, object]]


class SteeringTrace(dict[str, Any]):
    """A `Trace` that a notebook shows as a picture; otherwise it is the same dict."""

    def _repr_html_(self) -> str:
        """Return it as HTML: what each probe read and each gate wrote, row by row."""
        gates = self.get("gates", {}).items()
        lines = {f"score {probe}": scores for probe, scores in self.get("scores", {}).items()}
        lines |= {f"applied {gate}": reported["applied"] for gate, reported in gates}
        values = np.array([[np.nan if value is None else value for value in line] for line in lines.values()], float)
        positions = self.get("positions", [])
        facts = {
            "rows": f"{len(positions)}",
            "probes": ", ".join(self.get("scores", {})) or "none",
            "gates": ", ".join(f"{gate}: on at {_num_on(reported)} rows" for gate, reported in gates) or "none",
        }
        if not values.size:
            return page("Steering trace", facts)
        table = TextTable(("line", "smallest", "mean", "largest"), list(_extremes(lines, values)), len(lines))
        columns = f"position {positions[0]}", f"{positions[-1]}"
        return page("Steering trace", facts, table, HeatMap("by row", list(lines), columns, values, by_row=True))


def _num_on(reported: GateTrace) -> int:
    return sum(value is not None and value != 0 for value in reported["applied"])


def _extremes(lines: Iterable[str], values: npt.NDArray[np.float64]) -> Iterator[tuple[str, ...]]:
    for label, row in zip(lines, values, strict=True):
        known = row[np.isfinite(row)]
        found = (known.min(), known.mean(), known.max()) if known.size else ()
        yield label, *(f"{value:.5g}" for value in found)


def read_asked(value: object) -> bool:
    """Return whether a request asks for its trace.

    Raises:
        RequestError: If `value` is neither true, false nor None.
    """
    return value is not None and read_flag(value, RETURN_TRACE)


def join_notes(notes: Sequence[Mapping[str, Any]], end: int | None) -> Trace:
    """Return the trace that notes make, one after the other.

    Args:
        notes: Notes of one sample (`headgate.steering.gates.trace.Note`); each may have probes and gates that others
            lack.
        end: Tokens of the prompt and of the output that were kept, if the output is the sample's last; else None.
            Rows of later tokens are left out, and so is that of the last one, which is never forwarded. So are changes
            of steering by controllers that were to act from such a row on.
    """
    trace: Trace = {"positions": [], "scores": {}, "gates": {}, "actions": []}
    runs: list[list[Mapping[str, Any]]] = []
    names: tuple[Sequence[str], Sequence[str]] | None = None
    for note in _last_computed(notes):
        trace["actions"] += [each for each in note.get("actions", ()) if end is None or _has_row(each, end)]
        if "values" not in note:
            continue
        if names != (note["scores"], note["gates"]):
            names = note["scores"], note["gates"]
            runs.append([])
        runs[-1].append(note)
    for run in runs:
        _add_run(trace, run, end)
    num_rows = len(trace["positions"])
    for column in _columns(trace):
        _append(column, num_rows, [])
    return trace


def _has_row(noted: Mapping[str, Any], end: int) -> bool:
    """Whether what is noted of a controller acts on a row before the last token, or is no change of steering."""
    position, action = noted["position"], noted["action"]
    return position is None or action is None or "stop" in action or bool(position < end - 1)


def _last_computed(notes: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return notes without the rows that later ones have again."""
    end = 0
    for note in notes:
        if "values" not in note:
            continue
        if note["first"] < end:
            log: list[Note] = []
            for each in notes:
                add_note(log, dict(each))
            return log
        end = note["first"] + note["rows"]
    return notes


def _columns(trace: Trace) -> Iterator[list[float | None]]:
    yield from trace["scores"].values()
    for held in trace["gates"].values():
        yield held["strength"]
        yield held["applied"]


def _add_run(trace: Trace, run: Sequence[Mapping[str, Any]], end: int | None) -> None:
    """Append the rows of notes that have the same names."""
    scores, gates, before = run[0]["scores"], run[0]["gates"], len(trace["positions"])
    positions = [note["first"] + at for note in run for at in range(note["rows"])]
    if end is not None:
        # Positions ascend, and those of tokens that were not kept are the last.
        positions = positions[: bisect_left(positions, end - 1)]
    trace["positions"] += positions
    width = len(scores) + 2 * len(gates)
    found = memoryview(b"".join([note["values"] for note in run])).cast("f").tolist()[: len(positions) * width]
    values = found if all(map(isfinite, found)) else [value if isfinite(value) else None for value in found]
    for at, name in enumerate(scores):
        _append(trace["scores"].setdefault(name, []), before, values[at::width])
    for at, name in enumerate(gates, len(scores)):
        held = trace["gates"].setdefault(name, {"strength": [], "applied": []})
        _append(held["strength"], before, values[at::width])
        _append(held["applied"], before, values[at + len(gates) :: width])


def _append(column: list[float | None], start: int, values: Sequence[float | None]) -> None:
    """Append values from row `start` on; None for rows before it that have no value."""
    column.extend([None] * (start - len(column)))
    column.extend(values)
