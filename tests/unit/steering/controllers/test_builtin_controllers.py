"""The controllers that come with headgate: the contract, and when they turn their module on."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.capture.probe import ProbeError, save
from headgate.capture.schema.sites import Site
from headgate.steering.controllers import Controller, Probe, SetGlobal, SetSteering
from headgate.steering.controllers.pid import PidController
from headgate.steering.controllers.testing import ControllerContract, ControllerFeed
from headgate.steering.controllers.threshold import ThresholdController

Make = Callable[..., Any]


def probe_file(folder: Path, threshold: float | None = None) -> str:
    path = folder / "probe.safetensors"
    save(path, Probe(site=Site.parse("1.post_mlp"), weight=np.ones((1, 8), np.float32), threshold=threshold))
    return str(path)


class WithProbe:
    @pytest.fixture(autouse=True)
    def with_probe(self, tmp_path: Path) -> None:
        self.path = probe_file(tmp_path)


class TestThreshold(WithProbe, ControllerContract):
    def make(self) -> Controller:
        return ThresholdController(probe=self.path, module="m", threshold=0.5)


class TestGlobalThreshold(WithProbe, ControllerContract):
    def make(self) -> Controller:
        proportional: Any = {"gain_mode": "proportional", "hysteresis": 0.5}
        return ThresholdController(probe=self.path, module="m", threshold=0.5, actuation="global", **proportional)


class TestPid(WithProbe, ControllerContract):
    def make(self) -> Controller:
        return PidController(probe=self.path, module="m", setpoint=0.5)


@pytest.fixture
def threshold(tmp_path: Path) -> Make:
    def make(**params: Any) -> ControllerFeed:
        usual = {"probe": probe_file(tmp_path), "module": "m", "threshold": 1.0}
        return ControllerFeed(ThresholdController(**{**usual, **params}))

    return make


def on(request: str, scale: float) -> SetSteering:
    return SetSteering(request, module="m", scale=scale)


def test_it_engages_at_the_threshold_and_disengages_below_the_hysteresis(threshold: Make) -> None:
    feed = threshold(ema_alpha=1.0, hysteresis=0.5, gain=2.0)
    feed.begin("a", [1])
    feed.begin("b", [1])

    told = [feed.step({"a": score, "b": 0.0}) for score in (0.9, 1.0, 0.6, 0.5, 0.4, 0.9)]

    assert told == [[], [on("a", 2.0)], [], [], [on("a", 0.0)], []]


def test_the_first_row_seeds_the_average_and_rows_of_the_prompt_prime_it(threshold: Make) -> None:
    primed, other = threshold(ema_alpha=0.5), threshold(ema_alpha=0.5, prime=False)
    for feed in (primed, other):
        feed.begin("a", [1, 2, 3])

    assert primed.step({"a": [2.0, 1.5]}) == [on("a", 1.0)]
    assert primed.step({"a": [-1.0]}) == [on("a", 0.0)]  # (1.75 - 1) / 2
    assert other.step({"a": [9.0, 9.0, 9.0]}) == []
    assert other.step({"a": 1.0}) == [on("a", 1.0)]


def test_a_chunk_of_a_prompt_is_read_as_its_rows_one_by_one(threshold: Make) -> None:
    scores = [round(math.sin(at) + math.sin(at / 3), 2) for at in range(60)]
    whole, single = (threshold(hysteresis=0.4, ema_alpha=0.6, threshold=0.8) for _ in range(2))
    for feed in (whole, single):
        feed.begin("a", [1] * 60)
    states, found = [0.0, 0.0], []
    for length in (3, 1, 7, 2, 11, 4, 12, 9, 11):
        rows, scores = scores[:length], scores[length:]
        told = whole.step({"a": rows}), [action for row in rows for action in single.step({"a": row})]
        states = [actions[-1].scale if actions else before for actions, before in zip(told, states, strict=True)]
        assert states[0] == states[1]
        found.append(states[0])

    assert set(found) == {0.0, 1.0}


def test_a_proportional_gain_follows_the_average_in_steps(threshold: Make) -> None:
    feed = threshold(ema_alpha=1.0, hysteresis=1.0, gain=4.0, gain_mode="proportional", min_emit_delta=0.5)
    feed.begin("a", [1])

    assert feed.step({"a": 1.0}) == [on("a", 4.0)]
    assert feed.step({"a": 0.5}) == [on("a", 2.0)]
    assert feed.step({"a": 0.45}) == []
    assert feed.step({"a": -0.5}) == [on("a", 0.0)]


def test_all_requests_are_steered_while_one_is_engaged(threshold: Make) -> None:
    feed = threshold(ema_alpha=1.0, actuation="global")
    feed.begin("a", [1])
    feed.begin("b", [1])

    assert feed.step({"a": 0.0, "b": 2.0}) == [SetGlobal(module="m", scale=1.0)]
    assert feed.step({"a": 3.0, "b": 0.0}) == []
    feed.end("a")
    assert feed.step({"b": 0.0}) == [SetGlobal(module="m", scale=0.0)]


def test_shadow_mode_asks_for_nothing(threshold: Make) -> None:
    feed = threshold(gain=0.0)
    feed.begin("a", [1])

    assert [feed.step({"a": score}) for score in (0.0, 5.0, 5.0, -5.0)] == [[]] * 4


def test_the_loop_brings_a_score_to_its_set_point(tmp_path: Path) -> None:
    feed = ControllerFeed(PidController(probe=probe_file(tmp_path), module="m", setpoint=0.5, min_emit_delta=0.0))
    feed.begin("a", [1, 2])
    feed.step({"a": [0.0, 0.0]})
    scale, scores = 0.0, []
    for _ in range(150):
        score = -0.4 + 0.8 * scale  # of an imagined model, whose rows follow at once
        scores.append(score)
        scale = next((action.scale for action in feed.step({"a": score}) if isinstance(action, SetSteering)), scale)

    assert scores[0] == -0.4
    assert scores[-1] == pytest.approx(0.5, abs=0.02)


def test_the_sum_does_not_grow_at_a_limit(tmp_path: Path) -> None:
    controller = PidController(probe=probe_file(tmp_path), module="m", setpoint=10.0, kp=0.0, ki=1.0, max_scale=2.0)
    feed = ControllerFeed(controller)
    feed.begin("a", [1])
    feed.step({"a": 0.0})

    assert [action.scale for action in feed.step({"a": 0.0})] == [2.0]
    for _ in range(50):
        assert feed.step({"a": 0.0}) == []
    # Nothing has piled up that would have to be taken down first.
    assert [action.scale for action in feed.step({"a": 11.0})] == [-1.0]


BAD: dict[str, tuple[type[Controller], dict[str, Any], str]] = {
    "no threshold": (ThresholdController, {"threshold": None}, "has no threshold of its own"),
    "hysteresis": (ThresholdController, {"hysteresis": -1.0}, "hysteresis: expected not negative"),
    "alpha": (ThresholdController, {"ema_alpha": 0.0}, "ema_alpha"),
    "mode": (ThresholdController, {"gain_mode": "soft"}, "gain_mode"),
    "actuation": (ThresholdController, {"actuation": "all"}, "actuation"),
    "set point": (PidController, {"setpoint": math.nan}, "setpoint"),
    "set point that no float holds": (PidController, {"setpoint": 10**400}, "setpoint: expected a finite number"),
    "limit that no float holds": (PidController, {"max_scale": 10**400}, "max_scale: expected a finite number"),
    "threshold that no float holds": (ThresholdController, {"threshold": 10**400}, "threshold: expected a finite"),
    "gain": (ThresholdController, {"gain": math.nan}, "gain: expected a finite number"),
    "limits": (PidController, {"min_scale": 1.0}, "limits around 0"),
    "average": (PidController, {"ema_alpha": 2.0}, "ema_alpha"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, params, message = BAD[case]
    usual = {"threshold": 1.0} if kind is ThresholdController else {"setpoint": 0.0}

    with pytest.raises((ValueError, ProbeError), match=message):
        kind(**{"probe": probe_file(tmp_path), "module": "m", **usual, **params})  # type: ignore[call-arg]
