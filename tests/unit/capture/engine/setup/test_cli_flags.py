"""Capture's configuration from keywords and command-line flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.setup import cli_flags
from headgate.capture.engine.setup.cli_flags import additional_config, translate_flags
from headgate.capture.schema.config import CaptureConsumerSpec, parse_config
from headgate.capture.schema.errors import ConfigError


def consumers_of(config: dict[str, Any]) -> list[str]:
    return [consumer.instance for consumer in parse_config(config["headgate"]["capture"]).consumers]


@pytest.mark.parametrize(
    "consumer",
    [
        "memory:limit=3,overload=drop",
        {"name": "memory", "params": {"limit": 3}, "overload": "drop"},
        CaptureConsumerSpec(name="memory", params={"limit": 3}, overload="drop"),
    ],
    ids=["shorthand", "fields", "spec"],
)
def test_a_consumer_may_be_given_in_three_ways(consumer: Any) -> None:
    config = additional_config(consumers=[consumer])

    (parsed,) = parse_config(config["headgate"]["capture"]).consumers
    assert parsed == CaptureConsumerSpec(name="memory", params={"limit": 3}, overload="drop")


def test_what_stands_in_additional_config_is_kept_and_not_changed() -> None:
    base = {"theirs": 1, "headgate": {"steering": {}, "capture": {"consumers": [{"name": "logging"}]}}}

    config = additional_config(consumers=["memory"], sites={"post_mlp": [3]}, base=base, self_test=False)

    assert consumers_of(config) == ["logging", "memory"]
    assert config["theirs"] == 1
    assert config["headgate"]["steering"] == {}
    assert config["headgate"]["capture"]["sites"] == {"post_mlp": [3]}
    assert config["headgate"]["capture"]["self_test"] is False
    assert base == {"theirs": 1, "headgate": {"steering": {}, "capture": {"consumers": [{"name": "logging"}]}}}


def test_the_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match="configured more than once"):
        additional_config(consumers=["memory", "memory"])
    with pytest.raises(ConfigError, match="nonsense"):
        additional_config(consumers=["memory"], nonsense=1)


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """A parser with vLLM's one flag that matters here, and ours."""

    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--additional-config", default=None)
        return parser

    return cli_flags.add_cli_args(add_cli_args)(argparse.ArgumentParser(exit_on_error=False))  # type: ignore[no-any-return]


def test_flags_become_additional_config_once(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(
        [
            *("--capture-consumers", "filesystem:root=/tmp/x,layout=raw", "memory"),
            *("--capture-consumers", "logging"),
            *("--capture-sites", '{"pre_attn": [0, -1]}'),
        ]
    )

    translate_flags(args)
    translate_flags(args)

    assert consumers_of(args.additional_config) == ["filesystem", "memory", "logging"]
    assert args.additional_config["headgate"]["capture"]["sites"] == {"pre_attn": [0, -1]}


def test_flags_of_the_network_go_to_a_section_of_their_own(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    args = parser.parse_args(["--headgate-listen", "10.0.0.1:46000", "--headgate-network-keys", str(keys)])

    translate_flags(args)
    translate_flags(args)

    network = {"listen": "10.0.0.1:46000", "keys_file": str(keys)}
    assert args.additional_config == {"headgate": {"network": network}}
    assert additional_config(network=network) == args.additional_config
    assert additional_config(consumers=["memory"], network=network)["headgate"]["network"] == network
    with pytest.raises(ConfigError, match="unknown field `port`"):
        additional_config(network={"port": 1})


def test_without_flags_nothing_changes(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([])

    translate_flags(args)

    assert args.additional_config is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--capture-consumers", "memory:limit"], "is not key=val"),
        (["--capture-consumers", "memory:overload=often"], "overload"),
        (["--capture-sites", "all"], "is not JSON"),
        (["--capture-sites", "[1]"], "expected an object"),
    ],
)
def test_a_wrong_flag_is_an_error_of_the_command_line(
    parser: argparse.ArgumentParser, flags: list[str], reason: str
) -> None:
    with pytest.raises(argparse.ArgumentError, match=reason):
        parser.parse_args(flags)


@pytest.mark.parametrize(
    "flags",
    [[], ["--capture-consumers", "memory"], ["--capture-consumers", "hidden_states", "memory"]],
    ids=["alone", "beside another", "named already"],
)
def test_hidden_states_are_one_flag(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    args = parser.parse_args(["--enable-return-hidden-states", *flags])

    translate_flags(args)
    translate_flags(args)

    assert sorted(consumers_of(args.additional_config)) == sorted({"hidden_states", *flags[1:]})


def test_the_flag_adds_to_what_is_configured(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["--enable-return-hidden-states"])
    args.additional_config = additional_config(consumers=["hidden_states", "memory"], sites={"post_mlp": [1]})

    translate_flags(args)

    assert consumers_of(args.additional_config) == ["hidden_states", "memory"]


LENSES = ["--lenses", "j=/j.safetensors"]
SECTION = {"name": "lens", "params": {"max_top": 5, "lenses": {"t": "/t.safetensors"}}}


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        (["lens"], [], {"j": "/j.safetensors"}),
        (["lens:max_top=5", "memory"], [], {"j": "/j.safetensors"}),
        ([], [SECTION], {"t": "/t.safetensors", "j": "/j.safetensors"}),
        (["memory"], [SECTION], {"t": "/t.safetensors", "j": "/j.safetensors"}),
        (["lens:instance_name=other"], [], {"j": "/j.safetensors"}),
    ],
    ids=str,
)
def test_lenses_join_the_consumer_that_is_configured(
    parser: argparse.ArgumentParser, flags: list[str], section: list[Any], expected: dict[str, str]
) -> None:
    named = ["--capture-consumers", *flags] if flags else []
    args = parser.parse_args([*LENSES, *named, "--enable-return-hidden-states"])
    args.additional_config = {"headgate": {"capture": {"consumers": section, "self_test": False}}}

    translate_flags(args)
    translate_flags(args)

    capture = parse_config(args.additional_config["headgate"]["capture"])
    found = {consumer.instance: consumer for consumer in capture.consumers}
    assert found["lens"].params["lenses"] == expected
    assert found["lens"].params.get("max_top") == (5 if section or flags[0].endswith("=5") else None)
    assert "hidden_states" in found
    assert capture.self_test is False
    assert "lenses" not in found["other"].params if "other" in found else True


def test_a_lens_of_two_paths_is_refused(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([*LENSES, "--capture-consumers", 'lens:lenses={"j": "/other"}'])

    with pytest.raises(ConfigError, match=r"--lenses: 'j' is given as /other and as /j\.safetensors"):
        translate_flags(args)
