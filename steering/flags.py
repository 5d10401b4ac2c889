"""Steering's flags on vLLM's command line, and the section of the configuration that they come to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from headgate.capture.engine.cli_flags import json_object
from headgate.capture.errors import ConfigError

VECTORS_PER_CONFIG = 256
"""What ``--max-steering-configs`` reckons for one configuration: 42 layers at three hook points in both phases."""

_FLAGS = ("enable_steering", "max_steering_slots", "max_steering_configs", "steering_modules", "steering_sites")


def add_flags(group: Any) -> None:
    """Add the flags to a group of an `argparse.ArgumentParser`."""
    group.add_argument(
        "--enable-steering",
        action="store_true",
        default=None,
        help="Let requests add vectors to the residual stream. Any other flag of steering turns it on as well.",
    )
    group.add_argument(
        "--max-steering-slots",
        type=int,
        default=None,
        metavar="N",
        help="Vectors on the device at a time, for all requests, modules and global vectors together (default 8192). "
        "Requests whose vectors find no slot wait.",
    )
    group.add_argument(
        "--max-steering-configs",
        type=int,
        default=None,
        metavar="N",
        help="For those who come from servers with this flag. Configurations are not limited here, vectors are: "
        f"the same as --max-steering-slots {VECTORS_PER_CONFIG}*N + 1.",
    )
    group.add_argument(
        "--steering-modules",
        type=_named_path,
        nargs="+",
        action="extend",
        default=None,
        metavar="NAME=PATH",
        help="Named modules to load at start, from .safetensors, .json or .gguf files. May be repeated.",
    )
    group.add_argument(
        "--steering-sites",
        type=json_object,
        default=None,
        metavar="JSON",
        help='What can be steered, as {hook point: layers}; {"pre_attn": "all", "post_attn": "all", '
        '"post_mlp": "all"} if not given.',
    )


def read_flags(args: argparse.Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Take the flags out of `args` and into a copy of `section`; None if none was given.

    Raises:
        ConfigError: If two of them contradict each other.
    """
    given = {name: value for name in _FLAGS if (value := getattr(args, name, None)) is not None}
    if not given:
        return None
    for name in given:
        setattr(args, name, None)
    document = dict(section or {})
    if "max_steering_slots" in given and "max_steering_configs" in given:
        raise ConfigError("--max-steering-configs is another way to set --max-steering-slots; give one of them")
    if "max_steering_slots" in given:
        document["max_steering_slots"] = given["max_steering_slots"]
    if "max_steering_configs" in given:
        if given["max_steering_configs"] < 1:
            raise ConfigError(f"--max-steering-configs must be at least 1, got {given['max_steering_configs']}")
        document["max_steering_slots"] = VECTORS_PER_CONFIG * given["max_steering_configs"] + 1
    if "steering_modules" in given:
        document["modules"] = _merged(document.get("modules") or {}, given["steering_modules"])
    if "steering_sites" in given:
        document["sites"] = given["steering_sites"]
    return document


def _named_path(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _merged(modules: Mapping[str, str], named: list[tuple[str, str]]) -> dict[str, str]:
    merged = dict(modules)
    for name, path in named:
        if merged.get(name, path) != path:
            raise ConfigError(f"--steering-modules: {name!r} is given as {merged[name]} and as {path}")
        merged[name] = path
    return merged
