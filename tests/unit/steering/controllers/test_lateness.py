"""A process of controllers that is late: when it is waited for, and when it counts as hung. On a fake clock."""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.links.child_process import Ready, encode_ready
from headgate.steering.controllers import controller_process, host
from headgate.steering.controllers.controller_process import ControllerProcess, StepAnswer
from headgate.steering.controllers.host import HANGS_S
from tests.fakes.hosted_controllers import spec

STEP_S, BUDGET_S = 0.01, 0.005
QUICK_S = 0.0005
"""What a step takes the controllers."""
ANSWER = pickle.dumps(StepAnswer(actions=(), switched_off=(), figures={}))


class Clock:
    """Stands for the module `time`, and for the answers of a process that come at times on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: deque[float] = deque()

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def work(self, seconds: float) -> None:
        """Let the process answer a step so many seconds after it answered the one before."""
        begins = max(self.now, self._due[-1] if self._due else 0.0)
        self._due.append(begins + seconds)

    def get(self, timeout: float) -> bytes:
        """See `SimpleQueue.get`."""
        until = self.now + timeout
        if not self._due or self._due[0] > until:
            self.now = until
            raise Empty
        self.now = max(self.now, self._due.popleft())
        return ANSWER


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(controller_process, "time", clock)
    monkeypatch.setattr(host, "time", clock)
    return clock


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> ControllerProcess:
    said = iter([encode_ready(Ready(content=pickle.dumps({})))])
    connection = SimpleNamespace(
        receive=lambda: next(said, None), shut=lambda: None, close=lambda: None, send=lambda _: True
    )
    child = SimpleNamespace(wait=lambda timeout=None: 0)
    monkeypatch.setattr(controller_process, "start_child", lambda *_, **__: (connection, child))
    process = ControllerProcess([spec("any", "one", budget_ms=1000 * BUDGET_S)])
    monkeypatch.setattr(process, "_answers", clock)
    return process


def ask(process: ControllerProcess) -> None:
    step: Any = None
    process.ask(step)


def wait(process: ControllerProcess, clock: Clock) -> float:
    """Wait as the engine core does behind a step; returns the time that it took."""
    began = clock.now
    process.take()
    return clock.now - began


def test_one_late_step_is_forgotten_when_it_is_done(process: ControllerProcess, clock: Clock) -> None:
    until, behind, waited_s = clock.now + 60, [], []
    for number in itertools.takewhile(lambda _: clock.now < until, itertools.count(1)):
        ask(process)
        clock.work(3.5 * STEP_S if number == 47 else QUICK_S)
        waited_s.append(wait(process, clock))
        if process.num_behind:
            behind.append(number)
        clock.pass_by(STEP_S)

    assert process.lost is None
    assert behind == [47, 48, 49], "it catches up before step 50, and is waited for as before"
    assert waited_s[46] == pytest.approx(BUDGET_S, abs=1e-3), "the late step costs its budget"
    assert max(waited_s[47:49]) < 1e-4, "and those behind it nothing"
    assert QUICK_S <= waited_s[49] < BUDGET_S
    assert waited_s[50] == pytest.approx(QUICK_S, abs=1e-4)


def test_one_that_is_slower_than_the_steps_works_on_and_costs_few_budgets(
    process: ControllerProcess, clock: Clock
) -> None:
    until, waited_s = clock.now + 60, 0.0
    while clock.now < until:
        if process.num_behind < 64:  # the host skips further ones
            ask(process)
            clock.work(2.5 * STEP_S)
        waited_s += wait(process, clock)
        clock.pass_by(STEP_S)

    assert process.lost is None
    assert waited_s < 1.0, "of a minute"


def test_one_that_does_not_return_from_a_step_is_given_up(process: ControllerProcess, clock: Clock) -> None:
    ask(process)
    began = clock.now
    while process.lost is None and clock.now < began + 60:
        process.take()
        clock.pass_by(STEP_S)

    assert HANGS_S < clock.now - began < HANGS_S + 1
    assert process.lost == "its process has not returned from a step for 10 s"


@pytest.mark.parametrize("seconds", [60.0, 86400.0])
def test_time_in_which_the_engine_core_stood_still_itself_does_not_count(
    process: ControllerProcess, clock: Clock, seconds: float
) -> None:
    for _ in range(3):
        ask(process)
        clock.work(10 * STEP_S)
        process.take()
        clock.now += seconds  # both were stopped, or the machine was suspended
        process.take()

    assert process.lost is None
