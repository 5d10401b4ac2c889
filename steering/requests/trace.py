"""``return_steering_trace``: what was read and written at a request's rows, from the records of its steps.

The engine core makes a record of the rows of each step, and leaves out rows that were computed again after their
tokens were sampled; here the records are unpacked, all at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import HeatMap, TextTable, page
from headgate.capture.schema.errors import RequestError
from headgate.steering.gates.trace import TraceLog

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
        lines |= {f"applied {gate}": told["applied"] for gate, told in gates}
        values = np.array([[np.nan if value is None else value for value in line] for line in lines.values()], float)
        positions = self.get("positions", [])
        facts = {
            "rows": f"{len(positions)}",
            "probes": ", ".join(self.get("scores", {})) or "none",
            "gates": ", ".join(f"{gate}: on at {_num_on(told)} rows" for gate, told in gates) or "none",
        }
        if not values.size:
            return page("Steering trace", facts)
        table = TextTable(("line", "smallest", "mean", "largest"), list(_extremes(lines, values)), len(lines))
        columns = f"position {positions[0]}", f"{positions[-1]}"
        return page("Steering trace", facts, table, HeatMap("by row", list(lines), columns, values, by_row=True))


def _num_on(told: GateTrace) -> int:
    return sum(value is not None and value != 0 for value in told["applied"])


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
    if value is not None and not isinstance(value, bool):
        raise RequestError(RETURN_TRACE, f"expected true or false, got {value!r}")
    return bool(value)


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
            log = TraceLog()
            for each in notes:
                log.add(dict(each))
            return log.notes
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
