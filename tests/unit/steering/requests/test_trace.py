"""``return_steering_trace``: who may ask, and the trace that notes make."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError
from headgate.steering.requests.reader import open_reader
from headgate.steering.requests.trace import SteeringTrace, join_notes

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


def test_notes_are_joined_by_row() -> None:
    notes = [
        {"positions": [0, 1], "scores": {"p": [0.5, 0.25]}, "gates": {"g": {"strength": [0, 1], "applied": [0, 1]}}},
        {"positions": [2], "scores": {"q": [3.0]}},
        {"positions": [3], "scores": {"p": [4.0]}, "gates": {"g": {"strength": [0.5], "applied": [0.0]}}},
        {"actions": [{"position": 3, "controller": "c", "action": "Stop", "outcome": "applied"}]},
    ]

    assert join_notes(notes, None) == {
        "positions": [0, 1, 2, 3],
        "scores": {"p": [0.5, 0.25, None, 4.0], "q": [None, None, 3.0, None]},
        "gates": {"g": {"strength": [0, 1, None, 0.5], "applied": [0, 1, None, 0.0]}},
        "actions": [{"position": 3, "controller": "c", "action": "Stop", "outcome": "applied"}],
    }


def test_rows_of_tokens_that_were_not_kept_are_left_out() -> None:
    notes = [{"positions": [4, 5], "scores": {"p": [1, 2]}}, {"positions": [6], "scores": {"p": [3]}}]

    trace = join_notes(notes, 6)

    assert trace["positions"] == [4]
    assert trace["scores"] == {"p": [1]}


def test_a_trace_of_nothing_has_all_its_keys() -> None:
    assert join_notes([], 5) == {"positions": [], "scores": {}, "gates": {}, "actions": []}


def test_the_reader_makes_the_value_of_the_answer() -> None:
    reader = open_reader({}, MODEL)
    wanted = reader.read({"return_steering_trace": True})
    assert wanted is not None

    assert reader.read_notes(wanted, [{"positions": [1]}], None)["steering_trace"]["positions"] == [1]


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
