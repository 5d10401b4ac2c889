"""``return_steering_trace``: who may ask, and the trace that notes make."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError
from headgate.steering.documents.request import open_reader
from headgate.steering.gates.trace import Note, SteeringTrace, add_note, join_notes

MODEL = ModelInfo(name="m", num_layers=4, hidden_size=2, dtype="float32", sites=())
VECTORS = {"post_mlp": {1: [1.0, 2.0]}}


def read(**values: Any) -> Any:
    return open_reader({}, MODEL).read(values)


def test_a_request_may_ask_for_its_trace_alone() -> None:
    wanted = read(return_steering_trace=True)

    assert wanted.wire == {"trace": True}
    assert wanted.wants_notes
    assert wanted.field == "return_steering_trace"


def test_a_request_that_steers_may_ask_too_and_others_do_not_get_it() -> None:
    reader = open_reader({}, MODEL)
    values = {"steering_vectors": VECTORS}
    plain = reader.read(values)
    traced = reader.read({**values, "return_steering_trace": True})

    assert plain is not None
    assert traced is not None
    assert traced.wire == {**plain.wire, "trace": True}
    assert (plain.wants_notes, traced.wants_notes) == (False, True)
    assert reader.read(values) is plain
    assert reader.read({**values, "return_steering_trace": False}) is plain


def test_false_asks_for_nothing() -> None:
    assert read(return_steering_trace=False) is None


@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="return_steering_trace: expected true or false, got"):
        read(steering_vectors=VECTORS, return_steering_trace=value)


def note(first: int, rows: list[list[float]], scores: tuple[str, ...], gates: tuple[str, ...] = ()) -> dict[str, Any]:
    values = np.array(rows, np.float32).tobytes()
    return {"first": first, "rows": len(rows), "scores": scores, "gates": gates, "values": values}


def test_notes_are_joined_by_row() -> None:
    notes = [
        note(0, [[0.5, 0, 0], [0.25, 1, 1]], ("p",), ("g",)),
        note(2, [[3.0]], ("q",)),
        note(3, [[np.nan, 0.5, 0]], ("p",), ("g",)),
        note(4, [[np.inf, 0.25, 0]], ("p",), ("g",)),
        {"actions": [{"position": 3, "controller": "c", "action": "Stop", "outcome": "applied"}]},
    ]

    assert join_notes(notes, None) == {
        "positions": [0, 1, 2, 3, 4],
        "scores": {"p": [0.5, 0.25, None, None, None], "q": [None, None, 3.0, None, None]},
        "gates": {"g": {"strength": [0, 1, None, 0.5, 0.25], "applied": [0, 1, None, 0, 0]}},
        "actions": [{"position": 3, "controller": "c", "action": "Stop", "outcome": "applied"}],
    }


def test_rows_of_tokens_that_were_not_kept_are_left_out() -> None:
    notes = [note(4, [[1], [2]], ("p",)), note(6, [[3]], ("p",)), note(7, [[4]], ("q",))]

    trace = join_notes(notes, 6)

    assert trace["positions"] == [4]
    assert trace["scores"] == {"p": [1], "q": [None]}


def test_changes_of_steering_that_acted_on_no_row_are_left_out() -> None:
    def noted(position: int | None, action: dict[str, Any] | None, outcome: str = "applied") -> dict[str, Any]:
        return {"position": position, "controller": "c", "action": action, "outcome": outcome}

    changes = [{"set_steering": {"module": "m", "scale": 1.0}, "compose": True}, {"set_global": {"scale": 1.0}}]
    changes.append({"set_scale": "global", "scale": 0.5})
    # Of six tokens, the last one is at position 5 and has no row.
    kept = [*(noted(4, each) for each in changes), noted(6, {"stop": "enough"})]
    kept += [noted(None, changes[0], "rejected"), noted(None, None, "switched off")]
    gone = [noted(position, each) for position in (5, 6) for each in changes]
    notes = [note(4, [[1]], ("p",)), {"actions": gone[:3]}, {"actions": [*kept, *gone[3:]]}]

    assert join_notes(notes, 6)["actions"] == kept
    assert join_notes(notes, None)["actions"] == [*gone[:3], *kept, *gone[3:]]


def test_rows_on_which_nothing_acts_have_positions_alone() -> None:
    assert join_notes([note(4, [[], []], ()), note(6, [[]], ())], None)["positions"] == [4, 5, 6]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3), st.sampled_from([("p",), ("q", "p")])), max_size=8),
    st.none() | st.integers(0, 20),
)
def test_a_log_of_pieces_makes_the_same_trace(pieces: list[tuple[int, int, tuple[str, ...]]], end: int | None) -> None:
    notes, position, log = [], 0, list[Note]()
    for at, (gap, num_rows, scores) in enumerate(pieces):
        rows = [[10 * at + each] * (len(scores) + 2) for each in range(num_rows)]
        action = {"position": position, "action": {"set_scale": f"{at}"}}
        notes += [note(position + gap, rows, scores, ("g",)), {"actions": [action]}][: 1 + gap]
        position += gap + num_rows
    for each in notes:
        add_note(log, each)

    assert join_notes(log, end) == join_notes(notes, end)
    assert len(log) <= len(notes)


def test_pieces_that_follow_one_another_are_one() -> None:
    log: list[Note] = []
    for at in range(5):
        add_note(log, note(at, [[at]], ("p",)))

    assert [(each["first"], each["rows"]) for each in log] == [(0, 5)]


def test_a_trace_of_nothing_has_all_its_keys() -> None:
    assert join_notes([], 5) == {"positions": [], "scores": {}, "gates": {}, "actions": []}


def test_the_reader_makes_the_value_of_the_answer() -> None:
    reader = open_reader({}, MODEL)
    wanted = reader.read({"return_steering_trace": True})
    assert wanted is not None

    assert reader.read_notes(wanted, [note(1, [[2.0]], ("p",))], None)["steering_trace"]["positions"] == [1]


def test_a_notebook_shows_each_probe_and_gate_on_a_scale_of_its_own() -> None:
    trace = SteeringTrace(
        {
            "positions": [39, 40, 41, 42],
            "scores": {"anger": [-3.25, None, 0.5, 1.75], "<b>": [2.0, 2.0, 2.0, 2.0]},
            "gates": {"calm": {"strength": [0, 0, 1, 1], "applied": [0, 0, 0, 1.5]}},
            "actions": [],
        }
    )

    shown = trace._repr_html_()

    assert "position 39 to 42" in shown
    assert "calm: on at 1 rows" in shown
    assert "<tr><td>score anger</td><td>-3.25</td><td>-0.33333</td><td>1.75</td></tr>" in shown
    assert shown.count("<td style=background") == 4 + 4 + 3
    applied = shown.rpartition("applied calm</td>")[2].partition("</tr>")[0].split("<td style=background:")[1:]
    assert len(set(applied[:3])) == 1
    assert applied[0] != applied[3]
    assert "<b>" not in shown.partition("</b>")[2]
    assert msgspec.json.decode(msgspec.json.encode(trace)) == trace


def test_a_notebook_shows_a_trace_without_rows() -> None:
    assert "gates: none" in SteeringTrace(join_notes([], 5))._repr_html_()
