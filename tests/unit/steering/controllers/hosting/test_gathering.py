"""Actions that were put together do what they did one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.controllers import SetGlobal, SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.actions import Action, singles
from headgate.steering.controllers.hosting.gathering import Gathering

RUNNING = tuple("abcdefgh")
actions = st.one_of(
    st.builds(SetSteering, st.sampled_from("abcdefghz"), module=st.sampled_from("mn"), scale=st.floats(-2, 2)),
    st.builds(
        SetSteering, st.sampled_from("ab"), module=st.just("m"), scale=st.sampled_from([0, 1]), compose=st.booleans()
    ),
    st.sampled_from([SetSteering("a"), SetGlobal(module="m"), Stop("b", "well"), SetSteering("c", ops=[{}])]),
)
steps = st.lists(st.lists(st.tuples(st.sampled_from(["one", "two"]), actions), max_size=12), max_size=6)


def alike(named: list[tuple[str, Action]]) -> list[tuple[str, Action]]:
    return [(name, one) for name, action in named for one in singles([action])]


@given(steps=steps, seed=st.integers(0, 9))
def test_they_do_the_same_in_the_same_order(steps, seed):
    gathering, draw, running = Gathering(), random.Random(seed), RUNNING
    for step in steps:
        if draw.random() < 0.3:
            running = tuple(one for one in RUNNING if draw.random() < 0.8)
        made = gathering.gather(step, running)

        found = alike(made)
        # Of those that were put together, each on another request, the order does not matter.
        assert sorted(found, key=repr) == sorted(alike(step), key=repr)
        for request in "abcdefghz":
            mine = [(name, one) for name, one in found if getattr(one, "request", None) in (request, None)]
            assert mine == [(name, one) for name, one in step if getattr(one, "request", None) in (request, None)]
        for _, action in made:
            if isinstance(action, SetSteeringEach) and action.at is not None:
                assert (np.diff(action.at) > 0).all()


def test_what_is_set_again_and_again_has_the_same_tuple_of_requests():
    gathering = Gathering()

    def step(*requests: str) -> SetSteeringEach:
        actions = [("one", SetSteering(each, module="m", scale=ord(each))) for each in requests]
        ((_, action),) = gathering.gather(actions, RUNNING)
        assert isinstance(action, SetSteeringEach)
        assert [(one.request, one.scale) for one in action.each()] == [(each, ord(each)) for each in sorted(requests)]
        return action

    first, second, third = step("c", "a"), step("a", "c"), step("c")
    assert first.requests is second.requests is third.requests
    assert first.at is second.at is None
    assert third.at is not None
    assert step("d", "a").requests == ("a", "c", "d")
    assert step("a").requests is step("c", "d").requests


@pytest.mark.parametrize("scale", [True, float("nan"), float("inf"), "1", None, np.float32(1)], ids=repr)
def test_a_scale_that_is_refused_is_left_alone(scale):
    action = SetSteering("a", module="m", scale=scale)

    assert Gathering().gather([("one", action)], RUNNING) == [("one", action)]
