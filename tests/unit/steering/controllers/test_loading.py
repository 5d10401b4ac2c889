"""Controllers by name: from the flag to an object, or a refusal that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site
from headgate.steering.config import parse_config
from headgate.steering.controllers import Probe, loading
from headgate.steering.controllers.loading import load_controller, parse_shorthand, read_probes
from tests.fakes import controllers
from tests.fakes.controllers import EntryPoint, Scripted


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "entry_points", controllers.entry_points)


def probe(**fields: Any) -> Probe:
    return Probe(**{"site": Site.parse("1.post_mlp"), "weight": np.ones((1, 8), np.float32), **fields})


def test_a_shorthand_becomes_a_controller_with_its_arguments() -> None:
    spec = parse_shorthand("scripted:instance_name=mine,applies_to=opt_in,budget_ms=2,path=/x,gain=0.5,names=[1, 2]")

    made = load_controller(spec)

    assert (spec.instance, spec.applies_to, spec.budget_ms) == ("mine", "opt_in", 2.0)
    assert isinstance(made, Scripted)
    assert made.params == {"path": "/x", "gain": 0.5, "names": [1, 2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":a=1", "expected name:key=val"),
        ("scripted:a", "'a' is not key=val"),
        ("scripted:applies_to=some", "applies_to: expected one of all, opt_in, opt_out; got 'some'"),
        ("scripted:budget_ms=0", "budget_ms: must be above 0"),
        ("scripted:budget_ms=soon", "budget_ms"),
        ("scripted:instance_name=" + "x" * 300, "controller"),
    ],
)
def test_a_wrong_shorthand_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_shorthand(text)


def test_one_name_is_one_controller() -> None:
    twice = [{"name": "scripted"}, {"name": "other", "instance_name": "scripted"}]

    with pytest.raises(ConfigError, match="scripted configured more than once; give each an instance_name"):
        parse_config({"controllers": twice})


def test_what_cannot_be_made_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(*, setpoint: float) -> None:
        raise ValueError(f"setpoint: {setpoint}")

    found = [EntryPoint("picky", picky), EntryPoint("foreign", dict)]  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "entry_points", lambda group: found)

    for text, message in (
        ("none", "no entry point of that name in the group 'headgate.controllers'; installed: foreign, picky"),
        ("picky", "missing 1 required keyword-only argument"),
        ("picky:setpoint=3", r"\(setpoint=3\) failed: ValueError: setpoint: 3"),
        ("foreign", "does not derive from headgate.steering.controllers.Controller"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_controller(parse_shorthand(text))


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ({}, "returned none"),
        ({"p": "probe.safetensors"}, "expected a headgate.steering.controllers.Probe, got str"),
        ({"p": probe(weight=np.ones((2, 8), np.float32), classes=("a", "b"))}, "one class"),
    ],
)
def test_probes_that_cannot_be_read_are_refused_by_name(probes: Any, message: str) -> None:
    class With(Scripted):
        def probes(self) -> Any:
            return probes

    with pytest.raises(ConfigError, match=f"controller 'c'.*{message}"):
        read_probes("c", With())
