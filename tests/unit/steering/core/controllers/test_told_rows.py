"""Which rows of a step controllers are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headgate.steering.controllers import (
    Action,
    StepReadings,
)
from tests.fakes.controller_core import Core, Listed


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
