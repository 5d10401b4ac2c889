"""A controller's thread: what it returns in time and too late, and what becomes of one that fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import numpy as np
import pytest

from headgate.steering.controllers import Action, Controller, Probe, SetSteering, SetSteeringEach, StepReadings
from headgate.steering.controllers import host as module
from headgate.steering.controllers.host import ControllerThread
from tests.deadlines import patience

TIMEOUT_S = patience(30)


class Asked(Controller):
    """Does in each step what the test says.

    Attributes:
        do: Called with the readings.
    """

    def __init__(self, do: Callable[[StepReadings], Iterable[Action]]) -> None:
        self.do = do

    def probes(self) -> Mapping[str, Probe]:
        return {}

    def step(self, readings: StepReadings) -> Iterable[Action]:
        return self.do(readings)


def readings(*requests: str) -> StepReadings:
    count = len(requests)
    return StepReadings(
        requests=requests,
        positions=np.arange(count),
        is_prompt=np.zeros(count, np.bool_),
        scores={},
        tokens=[[0] * count] * count,
    )


def names(actions: Iterable[Any]) -> list[str]:
    return [action.request for action in actions]


def test_actions_of_a_step_come_with_it_in_order() -> None:
    thread = ControllerThread("c", Asked(lambda step: [SetSteering(name) for name in step.requests]), TIMEOUT_S)

    assert thread.take() == []
    for requests in (("a", "b"), ("c",)):
        thread.step(readings(*requests))
        assert names(thread.take()) == list(requests)
    assert (thread.figures.steps, thread.figures.over_budget) == (2, 0)
    assert thread.figures.seconds > 0


def test_a_late_step_is_waited_for_once_and_taken_when_it_is_done() -> None:
    go_on, done = threading.Event(), threading.Event()

    def slow(step: StepReadings) -> Iterator[Action]:
        assert go_on.wait(TIMEOUT_S)
        yield SetSteering(step.requests[0])

    thread = ControllerThread("c", Asked(slow), budget_s=0.001)
    thread.step(readings("a"))

    assert thread.take() == []
    thread.step(readings("b"))
    assert thread.take() == []
    assert (thread.figures.steps, thread.figures.skipped, thread.figures.over_budget) == (1, 1, 1)
    go_on.set()
    thread.post(done.set)
    assert done.wait(TIMEOUT_S)
    assert names(thread.take()) == ["a"]
    assert thread.is_on


def test_one_that_is_late_again_and_again_is_switched_off() -> None:
    events: list[threading.Event] = []

    def late(step: StepReadings) -> Iterator[Action]:
        assert events[-1].wait(TIMEOUT_S)
        yield SetSteering(step.requests[0])

    thread = ControllerThread("c", Asked(late), budget_s=0.001)
    for at in range(module.MAX_OVER_BUDGET):
        done = threading.Event()
        events.append(threading.Event())
        thread.step(readings("a"))
        assert thread.is_on, at
        assert thread.take() == []
        events[-1].set()
        if at + 1 < module.MAX_OVER_BUDGET:
            thread.post(done.set)
            assert done.wait(TIMEOUT_S)
            thread.take()

    assert thread.figures.error == "it took longer than budget_ms=1 in 10 steps one after the other"
    thread.step(readings("a"))
    assert thread.take() == []


def test_one_that_hangs_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANGS_S", 0.0)
    forever = threading.Event()

    def hang(_: StepReadings) -> list[Action]:
        forever.wait(TIMEOUT_S)
        return []

    thread = ControllerThread("c", Asked(hang), budget_s=0.001)

    thread.step(readings("a"))

    assert thread.take() == []
    assert "has not returned from a step" in str(thread.figures.error)
    forever.set()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda _: ["a"], "TypeError: step returned 'a', which is no action"),
        (lambda _: None, "TypeError"),
    ],
)
def test_one_that_raises_is_switched_off(answer: Any, message: str) -> None:
    thread = ControllerThread("c", Asked(answer), TIMEOUT_S)

    thread.step(readings("a"))

    assert thread.take() == []
    assert message in str(thread.figures.error)
    assert not thread.is_on


def test_one_that_floods_is_cut_and_switched_off_in_the_end() -> None:
    def flood(step: StepReadings) -> Iterator[Action]:
        while True:
            yield SetSteering(step.requests[0])

    thread, counts = ControllerThread("c", Asked(flood), TIMEOUT_S), []
    for _ in range(module.MAX_OVER_BUDGET):
        thread.step(readings("a", "b"))
        counts.append(len(thread.take()))

    limit = module.MAX_ACTIONS + 2 * module.MAX_ACTIONS_EACH
    assert counts == [limit] * (module.MAX_OVER_BUDGET - 1) + [0]
    assert thread.figures.dropped == module.MAX_OVER_BUDGET
    assert "returned more than" in str(thread.figures.error) or "returned over" in str(thread.figures.error)


def test_the_thread_ends_with_its_owner() -> None:
    thread = ControllerThread("short-lived", Asked(lambda _: []), TIMEOUT_S)
    thread.step(readings("a"))
    thread.take()
    (running,) = [each for each in threading.enumerate() if each.name == "headgate-controller-short-lived"]
    gone = ref(thread.controller)

    del thread
    gc.collect()

    running.join(TIMEOUT_S)
    assert not running.is_alive()
    assert gone() is None


class Prompt(Asked):
    """Says that it never waits."""

    never_waits = True


def test_one_that_never_waits_is_called_at_once_and_without_a_thread() -> None:
    callers: list[threading.Thread] = []

    def note(step: StepReadings) -> Iterator[Action]:
        callers.append(threading.current_thread())
        yield SetSteering(step.requests[0])

    thread = ControllerThread("prompt", Prompt(note), TIMEOUT_S)
    thread.post(lambda: callers.append(threading.current_thread()))
    thread.step(readings("a"))

    assert callers == [threading.current_thread()] * 2
    assert names(thread.take()) == ["a"]
    assert "headgate-controller-prompt" not in [each.name for each in threading.enumerate()]


def test_one_that_said_so_and_waits_gets_a_thread() -> None:
    callers: list[threading.Thread] = []

    def note(step: StepReadings) -> Iterator[Action]:
        callers.append(threading.current_thread())
        yield SetSteering(step.requests[0])

    thread = ControllerThread("prompt", Prompt(note), budget_s=0.0)
    thread.step(readings("a"))
    assert names(thread.take()) == ["a"]
    done = threading.Event()
    thread.step(readings("b"))
    thread.post(done.set)

    assert done.wait(TIMEOUT_S)
    assert names(thread.take()) == ["b"]
    assert callers[0] is threading.current_thread()
    assert callers[1] is not threading.current_thread()
    assert thread.figures.over_budget >= 1


def test_one_that_never_waits_and_raises_is_switched_off() -> None:
    thread = ControllerThread("prompt", Prompt(lambda _: ["a"]), TIMEOUT_S)  # type: ignore[list-item, return-value]

    thread.step(readings("a"))

    assert thread.take() == []
    assert "no action of headgate.steering.controllers" in str(thread.figures.error)


def test_an_action_for_many_requests_counts_as_so_many() -> None:
    def flood(step: StepReadings) -> Iterator[Action]:
        yield SetSteering("a")
        yield SetSteeringEach(["a"] * module.MAX_ACTIONS * 2, "m", np.ones(module.MAX_ACTIONS * 2))

    thread = ControllerThread("c", Asked(flood), TIMEOUT_S)
    thread.step(readings("a"))

    assert names(thread.take()) == ["a"]
    assert thread.figures.dropped == 1
