"""Which rows of a step controllers are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.capture.schema.consumer import Submitted, encode_action
from headgate.steering.controllers import Action, SetGlobal, SetScale, SetSteering, StepReadings
from headgate.steering.gates.trace import join_notes
from headgate.steering.spec import SteeringSpec, to_wire
from tests.fakes.controller_core import PROMPT, Core, Listed, vectors


def test_rows_of_a_request_that_ended_are_not_told_of_the_next_one_with_its_id(opened: Callable[..., Core]) -> None:
    core, told = opened(), []

    def step(self: Any, readings: StepReadings) -> list[Action]:
        told.append((readings.requests, readings.positions.tolist()))
        return []

    core.start()
    core.add("a", "b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listed, "step", step)
        core.step(["a", "b"])
        core.core.release("a")
        core.add("a")
        core.step(["a", "b"], discarded={"a"})  # was launched for the first of that name
        core.services.position = 0
        core.step(["a"])
        core.step(["a"])

    assert told == [(("a", "b"), [4, 4]), (("b",), [5]), (("a",), [0]), (("a",), [1])]


def test_a_request_whose_prompt_begins_again_ends_for_controllers_and_begins_anew(
    opened: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row arrives once, of the computation that counts; what it set on that request alone is taken back."""
    core, told, actions = opened(), [], [SetGlobal(module="m", scale=2.0), SetScale("a", 0.25)]
    actions.append(SetSteering("a", module="m", scale=0.5, compose=False))
    for kind in ("begins", "ends"):
        monkeypatch.setattr(Listed, f"request_{kind}", lambda _, view, kind=kind: told.append((kind, view.request)))

    def step(self: Any, readings: StepReadings) -> list[Action]:
        told.append((readings.requests, readings.positions.tolist()))
        return self.actions

    monkeypatch.setattr(Listed, "step", step)
    core.start()
    core.core.accept("a", to_wire(SteeringSpec(decode=vectors(3.0))), PROMPT)
    core.core.describe("a", PROMPT)
    core.core.offer("a", priority=0, is_session=False, is_offline=False)
    core.add("b")

    core.services.position = PROMPT - 1
    decided = {(change.req_id, change.column): change.value for change in core.step(["a", "b"], *actions)}
    assert core.core.begin_again("a") is not None
    core.services.position = PROMPT - 1
    taken_back = core.step(["a", "b"])
    core.step(["a", "b"])

    assert told[:3] == [("begins", "a"), ("begins", "b"), (("a", "b"), [PROMPT - 1] * 2)]
    assert told[3:] == [("ends", "a"), ("begins", "a"), (("a",), [PROMPT - 1]), (("a", "b"), [PROMPT] * 2)]
    ((_, module),) = (key for key in decided if key[0] == "b")
    ((_, static),) = (key for key in decided if key not in {("a", module), ("b", module)})
    assert decided == {("a", module): 2.5, ("a", static): -1.75, ("b", module): 2.0}
    assert {change[:2]: change[2:] for change in taken_back} == {
        ("a", module): (PROMPT, 2.0),
        ("a", static): (PROMPT, 0),
    }
    noted = join_notes(core.core._readings.log("a"), None)["actions"]
    assert [(note["position"], note["action"]) for note in noted[-2:]] == [
        (PROMPT, {"set_steering": {"scale": 1.0}, "compose": True}),
        (PROMPT, {"set_scale": "a", "scale": 1.0}),
    ]


def test_what_a_consumer_set_on_a_request_stays_when_its_prompt_begins_again(opened: Callable[..., Core]) -> None:
    core = opened(controllers=[], from_consumers=True)
    core.start()
    core.add("a")
    action = SetSteering("a", module="m", scale=0.5)
    core.services.submitted.append(Submitted("reader", encode_action(action), 0))
    assert [change.value for change in core.step(["a"])] == [0.5]

    core.core.begin_again("a")

    assert core.step(["a"]) == []
