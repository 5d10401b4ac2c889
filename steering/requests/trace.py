"""``return_steering_trace``: what was read and written at a request's rows, made of the notes of its steps.

A note is an object with any of the keys of a trace, for the rows of one step in the order of their positions; the
engine core makes it, and leaves out rows that were computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import HeatMap, Table, page
from headgate.capture.schema.errors import RequestError

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
        positions: Of the rows, ascending.
        scores: A value for each row, by probe; None where the probe was not read.
        gates: By gate.
        actions: Of controllers: ``{"position", "controller", "action", "outcome"}``.
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
        table = Table(("line", "smallest", "mean", "largest"), list(_extremes(lines, values)), len(lines))
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
        notes: Of one sample; each may have probes and gates that others lack.
        end: Tokens of the prompt and of the output that were kept; rows of later tokens are left out, and so is that of
            the last one, which is never forwarded. None if the sample has not ended.
    """
    trace: Trace = {"positions": [], "scores": {}, "gates": {}, "actions": []}
    for note in notes:
        positions = list(note.get("positions", ()))
        kept = [index for index, position in enumerate(positions) if end is None or position < end - 1]
        before = len(trace["positions"])
        trace["positions"] += [positions[index] for index in kept]
        for probe, scores in note.get("scores", {}).items():
            _append(trace["scores"].setdefault(probe, []), before, [scores[index] for index in kept])
        for gate, told in note.get("gates", {}).items():
            held = trace["gates"].setdefault(gate, {"strength": [], "applied": []})
            _append(held["strength"], before, [told["strength"][index] for index in kept])
            _append(held["applied"], before, [told["applied"][index] for index in kept])
        trace["actions"] += note.get("actions", ())
    num_rows = len(trace["positions"])
    for held in trace["gates"].values():
        _append(held["strength"], num_rows, [])
        _append(held["applied"], num_rows, [])
    for scores in trace["scores"].values():
        _append(scores, num_rows, [])
    return trace


def _append(column: list[float | None], start: int, values: list[float | None]) -> None:
    """Append values from row `start` on; None for rows before it that have no value."""
    column += [None] * (start - len(column)) + values
