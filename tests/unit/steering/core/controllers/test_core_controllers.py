"""Controllers of an engine core without workers: refusals at start, and what becomes of contents and coefficients."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headgate.capture.probe import Activation, HiddenLayer, ProbeKind
from headgate.capture.schema.consumer import Submitted, encode_action
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.config import MAX_DRIVEN
from headgate.steering.controllers import (
    Action,
    Probe,
    SetGlobal,
    SetScale,
    SetSteering,
    SetSteeringEach,
    Stop,
)
from headgate.steering.documents.gates import read_rule
from headgate.steering.spec import SteeringSpec, to_wire
from tests.fakes.controller_core import HIDDEN, PROMPT, Core, Listed, vectors
from tests.fakes.controllers import Scripted


def test_what_cannot_run_is_refused_at_start(opened: Callable[..., Core], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            opened(**settings).start()

    refused("there are none; declare them with --steering-op-sites", op_sites={})
    refused("no gate can read at 0.post_mlp", op_sites={"post_mlp": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(Listed, "needed", ("calm",))
        refused("needs module 'calm'; registered at start .*: m")
    with monkeypatch.context() as patch:
        probe = Probe(site=Site.parse("0.post_mlp"), weight=np.ones((1, 3), np.float32))
        patch.setattr(Scripted, "probe", probe)
        refused("has the width 3, rows of 0.post_mlp have 8")
    layer = HiddenLayer(weight=np.ones((3, HIDDEN)), bias=np.zeros(3), activation=Activation.SILU)
    mlp = Probe(site=Site.parse("0.post_mlp"), kind=ProbeKind.MLP, weight=np.ones((1, 3), np.float32), hidden=layer)
    with monkeypatch.context() as patch:
        patch.setattr(Scripted, "probe", mlp)
        refused("the MLP probes at 0.post_mlp make 4 entries, at most 3 fit.*--max-probe-units", max_probe_units=3)
        opened(max_probe_units=4).start()
    core = opened()
    rule = read_rule("listed", {"applies_to": "all", "when": "always", "then": "observe"}, core.core.state.steerable)
    core.core.operator.register_rule(rule)
    with pytest.raises(ConfigError, match="'listed' has the name of a rule"):
        core.start()


def test_requests_select_controllers_by_the_names_that_front_ends_are_told(opened: Callable[..., Core]) -> None:
    core = opened(controllers=[{"name": "listed", "applies_to": "opt_in", "budget_ms": 1000}])
    core.start()
    core.add("plain")
    core.core.accept("watched", to_wire(SteeringSpec(rules=("listed",))), PROMPT)
    core.core.offer("watched", priority=0, is_session=False, is_offline=False)

    assert "rule\nlisted" in [entry["name"] for entry in core.core.call("names", {})]
    assert core.step(["plain"], SetSteering("plain", module="m")) == []
    assert core.figures["applied"] == 0
    assert [drive[0] for drive in core.step(["plain", "watched"], SetSteering("watched", module="m"))] == ["watched"]
    with pytest.raises(RequestError, match="unknown rule 'other'; GET /v1/steering/rules lists"):
        core.core.accept("wrong", to_wire(SteeringSpec(rules=("other",))), PROMPT)


def test_a_scale_that_changes_is_one_number_and_the_request_gets_a_key_of_its_own(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a", "b")
    keys = [core.core.block_keys(name) for name in ("a", "b")]

    (first,) = core.step(["a", "b"], SetSteering("a", module="m", scale=0.5))
    (second,) = core.step(["a", "b"], SetSteering("a", module="m", scale=0.75))
    told = core.step(["a", "b"], SetSteering("a", module="m", scale=0.75))

    assert (first[0], first[2:], second[2:], told) == ("a", (PROMPT + 1, 0.5), (PROMPT + 2, 0.75), [])
    assert first[1] == second[1]
    assert core.services.rekeyed == [("a", PROMPT + 1)]
    assert core.core.block_keys("b") == keys[1]
    now: Any = core.core.block_keys("a")
    assert now != keys[0]
    assert now.prefill == getattr(keys[0], "prefill", None)


def test_changes_wait_for_a_step_of_their_request(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a", "b")

    assert core.step(["b"], SetSteering("a", module="m")) == []
    assert [drive[0] for drive in core.step(["a", "b"])] == ["a"]


def test_contents_take_the_place_of_those_that_no_running_request_has_had(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a")
    for at in range(MAX_DRIVEN):
        core.add(f"r{at}")
        core.step(["a", f"r{at}"], SetSteering(f"r{at}", vectors={"post_mlp": {1: [1.0 + at] * HIDDEN}}))
    assert core.figures["applied"] == MAX_DRIVEN

    more = SetSteering("a", vectors={"post_mlp": {1: [-1.0] * HIDDEN}})
    assert core.step(["a"], more) == []
    assert core.figures == {"submitted": MAX_DRIVEN + 1, "applied": MAX_DRIVEN, "rejected": 1, "dropped": 0}
    core.core.release("r3")
    ((_, column, _, value),) = core.step(["a"], more)
    assert value == 1.0
    (acting,) = (rule for rule in core.services.rules if rule["columns"] == [column, column + 1])
    assert acting["applies_to"] is None
    for name in ["a", *(f"r{at}" for at in range(MAX_DRIVEN) if at != 3)]:
        core.core.release(name)
    held = core.core.reservations.num_reserved
    core.add("later")
    core.step(["later"], SetSteering("later", vectors={"post_mlp": {1: [-2.0] * HIDDEN}}))
    assert core.core.reservations.num_reserved == held


def test_actions_of_several_sources_add_up(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a")

    told = core.step(["a"], SetSteering("a", module="m", scale=0.5), SetGlobal(module="m", scale=0.25))
    taken = core.step(["a"], SetGlobal())

    assert [drive[3] for drive in told] == [0.5, 0.75]
    assert [drive[3] for drive in taken] == [0.5]
    assert core.step(["a"], SetSteering("a"))[0][3] == 0.0


def test_a_module_that_is_turned_on_again_with_something_else_is_refused(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a")
    core.step(["a"], SetSteering("a", module="m", scale=0.5))

    both = SetSteering("a", module="m", vectors={"post_mlp": {1: [1.0] * HIDDEN}}, scale=0.25)

    assert core.step(["a"], both) == []
    assert core.figures == {"submitted": 2, "applied": 1, "rejected": 1, "dropped": 0}


def test_actions_for_requests_that_are_gone_are_dropped(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a")

    assert core.step(["a"], SetSteering("nobody", module="m"), SetSteering("a", module="none")) == []
    assert core.figures == {"submitted": 2, "applied": 0, "rejected": 1, "dropped": 1}


def test_one_action_for_many_requests_does_what_one_for_each_does(opened: Callable[..., Core]) -> None:
    rng = random.Random(5)
    cores = [opened(), opened()]
    names = [f"r{at}" for at in range(70)]
    for core in cores:
        core.core.operator.register("other", SteeringSpec(decode=vectors(2.0)))
        core.start()
        core.add(*names)
    for _ in range(60):
        requests = rng.sample([*names, "gone", "nobody"], rng.randint(1, 12) if rng.random() < 0.5 else len(names))
        scales = np.array([rng.choice((0.0, 0.5, rng.random())) for _ in requests])
        at = None
        if rng.random() < 0.5:
            at = np.array(sorted(rng.sample(range(len(requests)), rng.randint(0, len(requests)))), np.int64)
            scales = scales[at]
        each = SetSteeringEach(requests, rng.choice(("m", "m", "m", "other")), scales, at)
        more: list[Action] = [
            SetSteering(rng.choice(names), module="other"),
            SetSteering(rng.choice(names), module="m", compose=False),
            SetGlobal(module="m", scale=rng.random()),
            SetGlobal(),
        ]
        beside = [more[rng.randrange(4)]] if rng.random() < 0.3 else []
        scheduled = rng.sample(names, rng.randint(30, 70))

        told = [
            {change[:3]: change.value for change in core.step(scheduled, *actions, *beside)}
            for core, actions in zip(cores, ([each], list(each.each())), strict=True)
        ]

        assert told[0] == told[1]
        assert cores[0].figures == cores[1].figures
    for core in cores:
        for name in names:
            core.core.release(name)
    assert cores[0].core.reservations.num_reserved == cores[1].core.reservations.num_reserved


def test_an_action_for_many_requests_that_is_malformed_is_rejected(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a", "b")

    wrong: Any = ["x", "y"]
    for each in (
        SetSteeringEach(["a", "b"], "m", np.ones(3)),
        SetSteeringEach(["a", "b"], "m", wrong),
        SetSteeringEach([["a"], "b"], "m", np.ones(2)),  # type: ignore[list-item]
        SetSteeringEach(["a", "b"], ["m"], np.ones(2)),  # type: ignore[arg-type]
        SetSteeringEach(["a", "b"], "m", np.ones(2), np.array([1, 0])),
        SetSteeringEach(["a", "b"], "m", np.ones(2), np.array([1, 2])),
        SetSteeringEach(["a", "b"], "m", np.ones(1), np.array([0, 1])),
        SetSteeringEach(["a", "b"], "m", np.ones(2), np.array([0.0, 1.0])),
    ):
        assert core.step(["a", "b"], each) == []
    assert core.figures == {"submitted": 16, "applied": 0, "rejected": 16, "dropped": 0}
    assert core.step(["a", "b"], SetSteering(["a"], module="m")) == []  # type: ignore[arg-type]
    (change,) = core.step(["a", "b"], SetSteeringEach(["a", "b"], "m", np.array([np.nan, 1.0])))
    assert (change.req_id, change.value) == ("b", 1.0)
    assert core.step(["b"], SetSteering("b", module="m", scale=1.1e6), SetScale("b", -1.1e6)) == []
    assert core.step(["b"], SetSteering("b", module="m", scale=10**400), SetScale("b", 10**400)) == []
    assert core.step(["b"], SetSteeringEach(["b"], "m", np.array([1.1e6]))) == []
    assert core.figures == {"submitted": 24, "applied": 1, "rejected": 23, "dropped": 0}
    (change,) = core.step(["b"], SetSteeringEach(["b", "b"], "m", np.array([2.0, 1.0])))[1:]
    assert (change.req_id, change.value) == ("b", 1.0)


def submitted(action: object, num_dropped: int = 0) -> Submitted:
    encoded = action if isinstance(action, bytes) else encode_action(action)
    return Submitted("mine", encoded, num_dropped)


def test_actions_of_consumers_are_applied_as_those_of_controllers(opened: Callable[..., Core]) -> None:
    core = opened(controllers=[], from_consumers=True)
    core.start()
    core.add("a", "b")
    rows = {"post_mlp": {1: np.full(HIDDEN, 0.5, np.float32)}}
    core.services.submitted = [
        submitted(SetSteering("a", module="m", scale=0.5)),
        submitted(SetSteeringEach(["a", "b", "gone"], "m", np.array([0.25, 1.0]), np.array([1, 2])), num_dropped=3),
        submitted(SetSteering("b", vectors=rows, scale=2.0)),
        submitted(Stop("a", "enough")),
        submitted(SetSteering("a", module="none")),
        submitted(b"\x00"),
        submitted(SetGlobal(scale="many")),  # type: ignore[arg-type]
    ]

    assert core.core.call("dynamic", {})["queue"] == {"waiting": 7, "dropped": 0}
    told = core.step(["a", "b"])
    assert core.core.call("dynamic", {})["queue"] == {"waiting": 0, "dropped": 4}

    # The vectors take the place of what the same consumer set before.
    assert sorted((change.req_id, change.value) for change in told) == [("a", 0.5), ("b", 0.0), ("b", 0.25), ("b", 2.0)]
    counts = core.core.call("counts", {})["controllers"]
    assert counts == {
        "consumer:mine": {"actions": {"submitted": 11, "applied": 4, "rejected": 3, "dropped": 4}, "seconds": 0.0}
    }
    assert core.core.block_keys("a") is not None


def test_an_engine_that_does_not_take_them_asks_for_none(opened: Callable[..., Core]) -> None:
    core = opened()
    core.start()
    core.add("a")
    core.services.submitted = [submitted(SetSteering("a", module="m"))]

    assert core.step(["a"]) == []
    assert len(core.services.submitted) == 1
