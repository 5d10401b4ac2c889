"""Actions that were put together do what they did one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.controllers import SetGlobal, SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.actions import Action, singles
from headgate.steering.controllers.controller_process import gathered
from headgate.steering.controllers.host import DecidedAction

actions = st.one_of(
    st.builds(SetSteering, st.sampled_from("abcdefghz"), module=st.sampled_from("mn"), scale=st.floats(-2, 2)),
    st.builds(
        SetSteering, st.sampled_from("ab"), module=st.just("m"), scale=st.sampled_from([0, 1]), compose=st.booleans()
    ),
    st.sampled_from([SetSteering("a"), SetGlobal(module="m"), Stop("b", "well"), SetSteering("c", ops=[{}])]),
)


def alike(decided: list[DecidedAction]) -> list[tuple[str, Action, int]]:
    return [(name, one, step) for name, action, step in decided for one in singles([action])]


@given(
    actions=st.lists(st.builds(DecidedAction, st.sampled_from(["one", "two"]), actions, st.integers(1, 2)), max_size=12)
)
def test_they_do_the_same_in_the_same_order(actions):
    assert alike(gathered(actions)) == actions


def test_scales_of_one_module_on_different_requests_are_put_together():
    calm, firm = (
        [DecidedAction("one", SetSteering(each, module=module, scale=ord(each)), 1) for each in "cab"]
        for module in ("calm", "firm")
    )

    made = gathered([*calm, *calm[:1], DecidedAction("one", Stop("a", "well"), 1), *firm])

    assert [type(action) for _, action, _ in made] == [SetSteeringEach, SetSteering, Stop, SetSteeringEach]
    (_, first, _), *_, (_, last, _) = made
    assert (first.requests, first.module, first.scales.tolist(), first.at) == (
        ("c", "a", "b"),
        "calm",
        [99, 97, 98],
        None,
    )
    assert last.module == "firm"


@pytest.mark.parametrize("scale", [True, float("nan"), float("inf"), "1", None, np.float32(1)], ids=repr)
def test_a_scale_that_is_refused_is_left_alone(scale):
    decided = DecidedAction("one", SetSteering("a", module="m", scale=scale), 1)

    assert gathered([decided]) == [decided]
