"""What controllers decide too late: it acts on the run of a request by whose rows it was decided, and on no other."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.steering.gates.step_table import CoefficientChange
from headgate.steering.gates.trace import join_notes
from headgate.steering.spec import SteeringSpec, to_wire
from tests.deadlines import patience
from tests.fakes.controller_core import PROMPT, Core, vectors
from tests.fakes.hosted_controllers import publish

LAST = PROMPT - 1
"""The position of the prompt's last row, by which is decided."""
DECIDED = [
    ("SetSteering", {"request": "a", "module": "m", "scale": 0.5}),
    ("SetSteeringEach", {"requests": ["a", "b"], "module": "m", "scales": [0.25, 0.75]}),
    ("SetScale", {"target": "a", "scale": 0.5}),
    ("Stop", {"request": "a", "reason": "enough"}),
]


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugins")
    publish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


class LateCore(Core):
    """A core with a controller that decides when the test writes into a pipe, long after its budget."""

    def __init__(self, pipe: Path, *, has_process: bool, never_waits: bool) -> None:
        os.mkfifo(pipe)
        self.pipe = pipe
        params = {"pipe": str(pipe), "at": LAST, "never_waits": never_waits}
        late = {"name": "late", "instance_name": "listed", "budget_ms": 1, "params": params}
        super().__init__(controllers=[late], controller_process=has_process)
        self.start()
        self.core.accept("a", to_wire(SteeringSpec(decode=vectors(3.0))), PROMPT)
        self.core.offer("a", priority=0, is_session=False, is_offline=False)
        self.add("b")

    def step_at(self, position: int, *names: str) -> list[CoefficientChange]:
        """Step with the rows of a position."""
        self.services.position = position
        return self.step(list(names))

    def decide_late(self, decided: list[tuple[str, dict[str, Any]]], *names: str) -> list[CoefficientChange]:
        """Let the controller decide, and step until that has come; returns what the workers are to be told."""
        before, changes = self.figures["submitted"], []
        self.pipe.write_text(json.dumps(decided))  # waits for the controller to be there
        until = time.monotonic() + patience(30)
        while self.figures["submitted"] == before:
            assert time.monotonic() < until, "the answer does not come"
            changes += self.step_at(PROMPT, *names)
        return changes


@pytest.fixture(
    params=[(False, False), (True, False), (True, True)],
    ids=["its thread", "its thread in the process", "the process itself"],
)
def late(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LateCore]]:
    has_process, never_waits = request.param
    yield lambda: LateCore(tmp_path / "pipe", has_process=has_process, never_waits=never_waits)
    gc.collect()  # the thread or process ends with its controller


@pytest.mark.parametrize("how", ["its prompt begins again", "another request has its id"])
def test_what_was_decided_by_an_earlier_run_does_not_act_on_a_new_one(late: Callable[[], LateCore], how: str) -> None:
    core = late()
    assert core.step_at(LAST, "a", "b") == []
    if how == "its prompt begins again":
        core.core.begin_again("a")
    else:
        core.core.release("a")
        core.add("a")

    changes = core.decide_late(DECIDED, "b")
    assert [(change.req_id, change.value) for change in changes] == [("b", 0.75)]
    assert core.figures == {"submitted": 5, "applied": 1, "rejected": 0, "dropped": 4}
    assert core.step_at(PROMPT, "b", "a") == [], "nothing waits for a step of the new run"


def test_what_is_decided_by_the_new_run_acts_however_late_it_comes(late: Callable[[], LateCore]) -> None:
    core = late()
    core.core.begin_again("a")
    core.step_at(LAST, "a", "b")

    changes = core.decide_late(DECIDED, "a", "b")
    last = {(change.req_id, change.column): change.value for change in changes}
    assert sorted((req_id, value) for (req_id, _), value in last.items()) == [("a", -0.5), ("a", 0.25), ("b", 0.75)]
    assert core.figures == {"submitted": 5, "applied": 5, "rejected": 0, "dropped": 0}


def test_what_was_decided_before_an_answer_was_computed_again_acts_from_the_next_row_on(
    late: Callable[[], LateCore],
) -> None:
    """A preempted request, whose rows stay what they were: they are not read again, and the answer is theirs."""
    core = late()
    core.step_at(LAST, "a", "b")
    core.step_at(LAST, "a", "b")  # computed again; a controller that read it would wait for the pipe a second time

    changes = core.decide_late(DECIDED[:1], "a", "b")
    assert [(change.req_id, change.value) for change in changes] == [("a", 0.5)]
    assert all(change.first > PROMPT for change in changes)
    assert core.figures["dropped"] == 0


def test_what_was_decided_before_the_global_vectors_changed_does_not_scale_the_new_ones(
    late: Callable[[], LateCore],
) -> None:
    core = late()

    def set_global(value: float) -> None:
        tier = to_wire(SteeringSpec(prefill=vectors(value)))
        core.core.call("set_global", {"tiers": {"decode": tier}, "replace": True})

    set_global(1.0)
    core.step_at(LAST, "a", "b")
    set_global(2.0)
    scale_all = ("SetScale", {"target": "global", "scale": 0.0})

    assert core.decide_late([scale_all], "a", "b") == []
    assert core.figures == {"submitted": 1, "applied": 0, "rejected": 0, "dropped": 1}


def test_only_traces_of_its_requests_say_that_a_controller_was_switched_off(tmp_path: Path) -> None:
    failing = {"name": "failing", "applies_to": "opt_in", "budget_ms": 1000, "params": {"how": "die"}}
    telling = {"name": "telling", "budget_ms": 1000, "params": {"names": ["one"]}}
    core = Core(controllers=[failing, telling], controller_process=True)
    core.start()
    core.core.accept("a", to_wire(SteeringSpec(rules=("failing",))), PROMPT)
    core.core.accept("b", None, PROMPT)
    for name in ("a", "b"):
        core.core.describe(name, PROMPT)
        core.core.offer(name, priority=0, is_session=False, is_offline=False)
    core.step(["a", "b"])

    def noted(name: str) -> list[str]:
        return [note["controller"] for note in join_notes(core.core._readings.log(name), None)["actions"]]

    assert noted("a") == ["failing", "telling"]
    assert noted("b") == ["telling"]
