"""Steering's flags and keywords, and the configuration that they come to."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from headgate.capture.engine.setup import cli_flags
from headgate.capture.engine.setup.cli_flags import additional_config, translate_flags
from headgate.capture.schema.errors import ConfigError
from headgate.steering import SteeringConfig


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """A parser with our flags."""
    return cli_flags.add_cli_args(lambda parser: parser)(argparse.ArgumentParser(exit_on_error=False))  # type: ignore[no-any-return]


def section(parser: argparse.ArgumentParser, *flags: str, base: Any = None) -> Any:
    args = parser.parse_args(flags)
    args.additional_config = base
    translate_flags(args)
    translate_flags(args)
    return None if args.additional_config is None else args.additional_config["headgate"].get("steering")


def test_flags_become_the_section(parser: argparse.ArgumentParser) -> None:
    assert section(parser) is None
    assert section(parser, "--enable-steering") == {}
    assert section(parser, "--max-steering-slots", "100") == {"max_steering_slots": 100}
    assert section(parser, "--max-steering-configs", "4") == {"max_steering_configs": 4}
    waits = section(parser, "--max-steering-waiting", "5", "--max-steering-wait-s", "2.5")
    assert waits == {"max_waiting": 5, "max_wait_s": 2.5}
    assert section(parser, "--steering-sites", '{"post_mlp": [1]}') == {"sites": {"post_mlp": [1]}}
    gathered = section(parser, "--steering-gather-sites", '{"hook_z": [1]}')
    assert gathered == {"gather_sites": {"hook_z": [1]}}
    named = section(parser, "--steering-modules", "a=/x/a.json", "b=b=c.gguf", "--steering-modules", "c=d.json")
    assert named == {"modules": {"a": "/x/a.json", "b": "b=c.gguf", "c": "d.json"}}
    saes = section(parser, "--saes", "a=/x@12.post_mlp", "--saes", "b=c", "--sae-root", "/y", "--max-sae-features", "8")
    assert saes == {"saes": {"a": "/x@12.post_mlp", "b": "c"}, "sae_root": "/y", "max_sae_features": 8}
    assert section(parser, "--probes", "a=x", "--probes", "b=y") == {"probes": {"a": "x", "b": "y"}}
    encoded = section(parser, "--saes", "a=x", "b=y", "c=z", "--sae-encode", "a,b", "--sae-encode", "c")
    assert encoded == {"saes": {"a": "x", "b": "y", "c": "z"}, "sae_encode": ["a", "b", "c"]}
    base = {"headgate": {"steering": {"saes": {"a": "x", "b": "y"}, "sae_encode": ["a"]}}}
    assert section(parser, "--sae-encode", "a,b", base=base)["sae_encode"] == ["a", "b"]


def test_lenses_are_of_the_consumer_and_of_steering_where_there_is_any(parser: argparse.ArgumentParser) -> None:
    assert section(parser, "--lenses", "a=/x.safetensors") is None
    both = section(parser, "--enable-steering", "--lenses", "a=/x.safetensors", "b=/y.safetensors")
    assert both == {"lenses": {"a": "/x.safetensors", "b": "/y.safetensors"}}

    args = parser.parse_args(["--lenses", "a=/x.safetensors", "--capture-consumers", "memory"])
    args.additional_config = None
    translate_flags(args)
    consumers = args.additional_config["headgate"]["capture"]["consumers"]
    assert [consumer["name"] for consumer in consumers] == ["memory", "lens"]
    assert consumers[1]["params"] == {"lenses": {"a": "/x.safetensors"}}


def test_controllers_become_objects_of_the_section(parser: argparse.ArgumentParser) -> None:
    base = {"headgate": {"steering": {"controllers": [{"name": "a"}]}}}

    told = section(parser, "--steering-controllers", "pid:probe=/x,budget_ms=3", "b:instance_name=c", base=base)

    assert [(one["name"], one.get("instance_name"), one.get("params")) for one in told["controllers"]] == [
        ("a", None, None),
        ("pid", None, {"probe": "/x"}),
        ("b", "c", {}),
    ]
    with pytest.raises(argparse.ArgumentError, match="is not key=val"):
        parser.parse_args(["--steering-controllers", "pid:probe"])


def test_flags_are_added_to_what_is_configured(parser: argparse.ArgumentParser) -> None:
    base = {"theirs": 1, "headgate": {"steering": {"self_test": False, "modules": {"a": "a.json"}}}}

    told = section(parser, "--steering-modules", "b=b.json", "--max-steering-slots", "9", base=base)

    assert told == {"self_test": False, "modules": {"a": "a.json", "b": "b.json"}, "max_steering_slots": 9}
    assert base["headgate"] == {"steering": {"self_test": False, "modules": {"a": "a.json"}}}


def test_flags_of_capture_and_steering_together(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["--enable-steering", "--capture-consumers", "memory"])
    translate_flags(args)

    assert set(args.additional_config["headgate"]) == {"capture", "steering"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-steering-slots", "9", "--max-steering-configs", "9"], "give one of them"),
        (["--max-steering-configs", "0"], "must be at least 1"),
        (["--max-steering-waiting", "-1"], "max_waiting must be at least 0"),
        (["--max-steering-wait-s", "0"], "max_wait_s must be above 0"),
        (["--max-steering-slots", "1"], "max_steering_slots must be at least 2"),
        (["--lenses", "a=x", "a=y"], "--lenses: 'a' is given as x and as y"),
        (["--enable-steering", "--lenses", "a=x", "a=y"], "--lenses: 'a' is given as x and as y"),
        (["--steering-modules", "a=a.json", "a=b.json"], "'a' is given as a.json and as b.json"),
        (["--steering-sites", "{}"], "name at least one hook point"),
        (["--saes", "a=x", "--sae-encode", "a,b"], r"--sae-encode\): 'b' is not among the SAEs of --saes: a"),
        (["--sae-encode", "b"], "'b' is not among the SAEs of --saes: none"),
    ],
)
def test_flags_that_contradict(parser: argparse.ArgumentParser, flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        section(parser, *flags)


@pytest.mark.parametrize(
    "flags",
    [["--steering-modules", "a"], ["--steering-modules", "=b"], ["--steering-sites", "x"], ["--sae-encode", "a,"]],
)
def test_wrong_flags_are_errors_of_the_command_line(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(flags)


def test_the_keyword_becomes_the_section() -> None:
    assert additional_config(steering=True) == {"headgate": {"steering": {}}}
    assert additional_config(steering={"max_steering_slots": 9})["headgate"] == {"steering": {"max_steering_slots": 9}}
    config = additional_config(steering=SteeringConfig(max_steering_slots=9), consumers=["memory"])["headgate"]
    assert config["steering"]["max_steering_slots"] == 9
    assert config["capture"]["consumers"]
    assert additional_config(steering=None, base={"theirs": 1}) == {"theirs": 1}
    assert additional_config(steering={}, base={"headgate": {"steering": {"self_test": False}}}) == {
        "headgate": {"steering": {"self_test": False}}
    }


@pytest.mark.parametrize(
    ("wanted", "reason"), [("yes", "expected True"), ({"slots": 1}, "slots"), (3, "expected True")]
)
def test_a_wrong_keyword_is_refused(wanted: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        additional_config(steering=wanted)
