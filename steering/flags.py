"""Steering's flags on vLLM's command line, which make the section that `headgate.steering.config` reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from headgate.capture.engine.contracts.request_part import FlagGroup
from headgate.capture.engine.setup.cli_flags import (
    add_repeatable_flag,
    json_object,
    merged_names,
    named_path,
    take_flag,
)
from headgate.capture.schema.errors import ConfigError
from headgate.steering.config import DEFAULT_FEATURES, DEFAULT_GATES, DEFAULT_OPS, DEFAULT_RULES
from headgate.steering.controllers.loading import parse_shorthand

_SIZES = ("max_steering_slots", "max_steering_configs")
_WAITS = {"max_steering_waiting": "max_waiting", "max_steering_wait_s": "max_wait_s"}
_SAME = {
    **{"steering_sites": "sites", "steering_op_sites": "op_sites", "steering_gather_sites": "gather_sites"},
    "max_steering_ops_per_site": "max_ops_per_site",
    "max_steering_gates": "max_gates",
    "max_steering_rules": "max_rules",
    "max_probe_units": "max_probe_units",
    "steering_rules": "rules_file",
}
_SAES = ("sae_root", "max_sae_features")
_NAMED = {"steering_modules": "modules", "saes": "saes", "probes": "probes"}
_CONTROLLERS = "steering_controllers"
_FROM_CONSUMERS = "steering_from_consumers"
_FLAGS = (
    "enable_steering",
    *_SIZES,
    *_WAITS,
    *_SAME,
    *_SAES,
    *_NAMED,
    "sae_encode",
    "steering_audit",
    _CONTROLLERS,
    _FROM_CONSUMERS,
)


_VALUED: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    (
        "--max-steering-slots",
        int,
        "N",
        "Vectors on the device at a time, for all requests, modules and global vectors together (default 8192). "
        "Requests whose vectors find no slot wait.",
    ),
    (
        "--max-steering-configs",
        int,
        "N",
        "In place of --max-steering-slots: slots for N distinct configurations of vectors at all sites in both "
        "phases, and for global vectors beside them. More fit if they steer fewer sites.",
    ),
    (
        "--max-steering-waiting",
        int,
        "N",
        "Requests that may wait for slots at a time (default 1024); further ones are answered with HTTP 503.",
    ),
    (
        "--max-steering-wait-s",
        float,
        "SECONDS",
        "Time that a request may wait for slots (default 120); then it is answered with HTTP 503.",
    ),
    (
        "--steering-audit",
        os.path.abspath,
        "FILE",
        "File to which each change of global vectors and modules is added, as a line of JSON.",
    ),
    (
        "--steering-sites",
        json_object,
        "JSON",
        'What can be steered, as {hook point: layers}; {"pre_attn": "all", "post_attn": "all", "post_mlp": "all"} if '
        "not given.",
    ),
    (
        "--steering-op-sites",
        json_object,
        "JSON",
        "Where operations (ablate, clamp, rotate, ...) can act, as {hook point: layers}; nowhere if not given. Each "
        "site adds a small kernel to every step.",
    ),
    (
        "--steering-gather-sites",
        json_object,
        "JSON",
        "Sites of heads or neurons whose rows all tensor-parallel ranks gather, as {hook point: layers}: gates, probes "
        "and SAEs read there, and every operation acts. Those of --probes and --saes are among them.",
    ),
    (
        "--max-steering-ops-per-site",
        int,
        "N",
        f"Operations of one request at one site and in one phase (default {DEFAULT_OPS}).",
    ),
    (
        "--max-steering-gates",
        int,
        "N",
        f"Gates of one request (default {DEFAULT_GATES}); 0 for none.",
    ),
    (
        "--steering-rules",
        os.path.abspath,
        "FILE",
        "Rules to register at start, a list in YAML or JSON: gates that act on requests which did not ask.",
    ),
    (
        "--max-steering-rules",
        int,
        "N",
        f"Rules at a time (default {DEFAULT_RULES}); 0 for none.",
    ),
    (
        "--max-probe-units",
        int,
        "N",
        "Hidden units of MLP probes that the gates of a request read at one site, and one for each such probe "
        "(default: those of --probes).",
    ),
    (
        "--sae-root",
        os.path.abspath,
        "PATH",
        "Folder whose SAEs may be registered at run time (POST /v1/steering/saes/register); none if not given.",
    ),
    (
        "--max-sae-features",
        int,
        "N",
        f"Features of one request that may be changed at one site and in one phase (default {DEFAULT_FEATURES}).",
    ),
)
"""Flags with one value: name, what reads the value, what it is called, help."""

_REPEATABLE = (
    (
        "--steering-modules",
        "NAME=PATH",
        "Named modules to load at start, from files of vectors of any format (headgate vectors show PATH). Where a "
        "file does not tell them, layer and concept follow: NAME=PATH@layer=20,concept=3.",
    ),
    (
        "--saes",
        "NAME=PATH[@SITE]",
        "SAEs and transcoders whose features requests may change: files of `headgate sae import`, or as they are "
        "downloaded. The site of an SAE is named where the files do not tell it; operations can act there, too.",
    ),
    (
        "--probes",
        "NAME=PATH",
        "Probes that gates can name: files of `headgate probe fit`. Operations can act at their sites, too.",
    ),
)
"""Flags that name files, any number of times: name, what a value is called, help."""

_CONTROLLER_HELP = (
    "Plug-ins that read scores of running requests and change their steering (entry points of headgate.controllers). "
    "Keys are arguments of the plug-in, and instance_name, applies_to and budget_ms. They read and write at op sites."
)

_SAE_ENCODE = (
    "SAEs of --saes that requests may let reconstruct rows (sae_reconstruction), at most one for each site; edits of "
    "top-k SAEs among them use the true selection. Their weights are kept on the device."
)


def add_flags(group: FlagGroup) -> None:
    """Add the flags to a group of an `argparse.ArgumentParser`."""
    group.add_argument(
        "--enable-steering",
        action="store_true",
        default=None,
        help="Let requests add vectors to the residual stream. Any other flag of steering turns it on as well.",
    )
    for name, read, metavar, text in _VALUED:
        group.add_argument(name, type=read, default=None, metavar=metavar, help=text)
    for name, metavar, text in _REPEATABLE:
        add_repeatable_flag(group, name, type=named_path, metavar=metavar, help=text)
    add_repeatable_flag(group, "--sae-encode", type=_names, metavar="NAME[,NAME]", help=_SAE_ENCODE)
    group.add_argument(
        "--steering-from-consumers",
        action="store_true",
        default=None,
        help="Let capture consumers steer running requests and end them (context.steering.submit), at op sites.",
    )
    add_repeatable_flag(
        group, "--steering-controllers", type=_controller, metavar="NAME:KEY=VAL,KEY=VAL", help=_CONTROLLER_HELP
    )


def read_flags(args: argparse.Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Move the flags from `args` into a copy of `section`; None if none was given.

    Raises:
        ConfigError: If two of them contradict each other.
    """
    given = {name: value for name in _FLAGS if (value := take_flag(args, name)) is not None}
    lenses = vars(args).get("lenses") if given or section else None
    if not given and not lenses:
        return None
    document = dict(section or {})
    if lenses:  # of capture, whose consumer reads by them; directions of their tokens steer
        document["lenses"] = merged_names(document.get("lenses") or {}, lenses, "--lenses")
    if "max_steering_slots" in given and "max_steering_configs" in given:
        raise ConfigError("--max-steering-configs is another way to set --max-steering-slots; give one of them")
    document.update({name: given[name] for name in _SIZES if name in given})
    document.update({name: given[flag] for flag, name in _WAITS.items() if flag in given})
    for flag, name in _NAMED.items():
        if flag in given:
            document[name] = merged_names(document.get(name) or {}, given[flag], f"--{flag.replace('_', '-')}")
    document.update({name: given[name] for name in _SAES if name in given})
    if "sae_encode" in given:
        named = [name for names in given["sae_encode"] for name in names]
        document["sae_encode"] = list(dict.fromkeys([*(document.get("sae_encode") or ()), *named]))
    if "steering_audit" in given:
        document["audit_file"] = given["steering_audit"]
    document.update({name: given[flag] for flag, name in _SAME.items() if flag in given})
    if _FROM_CONSUMERS in given:
        document["from_consumers"] = True
    if _CONTROLLERS in given:
        document["controllers"] = [*(document.get("controllers") or ()), *given[_CONTROLLERS]]
    return document


def _controller(text: str) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", msgspec.to_builtins(parse_shorthand(text)))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME[,NAME]")
    return names
