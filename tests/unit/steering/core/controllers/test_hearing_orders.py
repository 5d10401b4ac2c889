"""When an engine core lets forwards hear a controller, and when it takes over what they heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.errors import RequestError
from headgate.steering.controllers.hosting.host import Answers, Repeat
from headgate.steering.core.controllers.driving.hearing import FEW_REPEATS, MAX_STEPS, Hearing
from headgate.steering.core.controllers.outcomes import Outcomes
from headgate.steering.gates.coefficient_changes import NOBODY_HEARS

REQUESTS = ("a", "b")
ONE_EACH = {"a": 1, "b": 1, "c": 1}


class Core:
    """What `Hearing` asks, and what it says.

    Attributes:
        hearers: As `Coefficients.hearers` answers; None if not all requests have the content alone.
        acts_from: The row on which what is decided now can be heard.
        has_left: Whether repeats were left to the forward since they are.
        said: Calls that change something.
    """

    def __init__(self) -> None:
        self.hearers: Any = SimpleNamespace(column=7, listener=2), np.array([12, 30])
        self.acts_from: int | None = 12
        self.has_left = False
        self.version = 1
        self.is_known = True
        self.said: list[Any] = []
        self.outcomes = Outcomes()
        heard: Any = SimpleNamespace(
            acts_from=lambda _: self.acts_from,
            begin=lambda: self.said.append("begin"),
            cancel=self._cancel,
            settle=lambda: self.said.append("settle"),
            take_count=lambda: 5,
        )
        coefficients: Any = SimpleNamespace(hearers=lambda *_: self.hearers, settle_each=self._settle)
        self.hearing = Hearing(heard, self, coefficients, self.outcomes)  # type: ignore[arg-type]

    def of_module(self, name: str) -> str:
        if not self.is_known:
            raise RequestError("module", "unknown")
        return f"content of {name}"

    def _cancel(self) -> bool:
        self.said.append("cancel")
        return not self.has_left

    def _settle(self, req_ids: Any, source: Any, drive: Any, values: Any) -> None:
        self.said.append((req_ids, source, drive.column, values.tolist()))

    def repeat(self, number: int = FEW_REPEATS + 1, requests: tuple[str, ...] = REQUESTS) -> None:
        for _ in range(number):
            self.hearing.follow(Answers(repeat=Repeat("pid", requests, "calm", 9)), is_applied=True)


def hearing_core() -> Core:
    core = Core()
    core.repeat()
    order = core.hearing.take_order(ONE_EACH)
    assert order is not None
    assert (order.column, order.listener, order.epoch, order.req_ids) == (7, 2, 9, REQUESTS)
    assert order.firsts.tolist() == [12, 30]
    assert core.hearing.controller == "pid"
    return core


def test_workers_hear_what_is_repeated_until_it_is_settled():
    core = hearing_core()
    core.hearing.prepare()
    assert core.said == ["begin"]

    core.hearing.break_off()
    core.hearing.prepare()
    core.hearing.settle(np.array([1.0, 2.0]))

    assert core.said[1:] == ["settle", (REQUESTS, ("pid",), 7, [1.0, 2.0])]
    assert core.hearing.controller is None
    assert core.hearing.take_order({}) is None, "nobody would follow it"
    assert core.hearing.take_order(ONE_EACH) is NOBODY_HEARS
    assert core.hearing.take_order(ONE_EACH) is None
    assert core.outcomes.counts("pid", 0) == {"submitted": 5, "applied": 5, "rejected": 0, "dropped": 0}
    assert core.outcomes.heard["pid"] == 5


@pytest.mark.parametrize(
    "change", [{"hearers": None}, {"acts_from": 13}, {"acts_from": None}, {"is_known": False}], ids=repr
)
def test_nobody_hears_what_the_engine_core_would_do_otherwise(change: dict[str, Any]):
    core = Core()
    for name, value in change.items():
        setattr(core, name, value)

    core.repeat(20)

    assert core.hearing.controller is None
    assert core.said == []


def test_few_repeats_or_different_ones_are_not_heard():
    core = Core()
    for _ in range(5):
        core.repeat(FEW_REPEATS)
        core.hearing.follow(Answers(), is_applied=True)
        core.repeat(FEW_REPEATS)
        core.repeat(FEW_REPEATS, ("a", "b", "c"))
        core.hearing.follow(Answers(repeat=Repeat("pid", REQUESTS, "calm", 9)), is_applied=False)

    assert core.said == []


@pytest.mark.parametrize("scheduled", [{"a": 1}, {"a": 1, "b": 6}, {}], ids=repr)
@pytest.mark.parametrize("has_left", [False, True])
def test_a_step_that_does_not_go_on_lets_nobody_hear(scheduled: dict[str, int], *, has_left: bool):
    core = Core()
    core.has_left = has_left
    core.repeat()

    assert core.hearing.take_order(scheduled) is None
    assert core.said == ["begin", "cancel"]
    assert (core.hearing.controller is None) is not has_left
    core.hearing.prepare()
    assert core.said[2:] == ["settle"] * has_left


def test_it_is_settled_when_names_change_and_before_notes_are_overwritten():
    core = hearing_core()
    core.version = 2
    core.hearing.prepare()
    assert core.said[1:] == ["settle"]

    core = hearing_core()
    for _ in range(MAX_STEPS - 1):
        core.hearing.prepare()
    assert core.said == ["begin"]
    core.hearing.prepare()
    assert core.said[1:] == ["settle"]
