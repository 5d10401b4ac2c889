"""``--capture-consumers``, ``--capture-sites`` and other parts' flags on vLLM's own command line, translated.

vLLM hands its parsed arguments on to other processes and parses configurations anew in them, so the flags are turned
into ``additional_config`` in the arguments themselves, once: every reader of those sees the result.

`ServerArgs` reads vLLM's parsed command line. Servers parse different ones (with an engine or without, one or several),
and programs make such arguments themselves: whatever is not there was not given.
"""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import msgspec

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.request_part import FlagGroup
from headgate.capture.engine.setup.settings import NETWORK, OUR_KEY, SERVER
from headgate.capture.engine.vllm_types import Function
from headgate.capture.schema.batch import Document
from headgate.capture.schema.config import (
    HIDDEN_STATES,
    CaptureConsumerSpec,
    parse_config,
    parse_network,
    parse_server,
    parse_shorthand,
)
from headgate.capture.schema.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The arguments that a server was started with.

    Attributes:
        additional_config: The operator's configuration, in which headgate's stands under a key of its own.
        host: Name or address that it listens on, without brackets; empty for all of the machine's.
        uds: Path of the Unix socket that it listens on instead; None if it does not.
        num_api_servers: Processes that answer requests.
        has_api_key: Whether clients send the server's own key, as ``Authorization: Bearer``.
    """

    additional_config: Document
    host: str
    uds: str | None
    num_api_servers: int
    has_api_key: bool


def read_server_args(args: Namespace) -> ServerArgs:
    """Read what headgate needs to know of a server.

    Raises:
        ConfigError: If ``additional_config`` is not an object.
    """
    given = vars(args)
    config = given.get("additional_config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"additional_config: expected an object, got {config!r}")
    return ServerArgs(
        additional_config=config,
        host=(given.get("host") or "").strip("[]"),
        uds=given.get("uds") or None,
        num_api_servers=given.get("api_server_count") or 1,
        has_api_key=any(given.get("api_key") or [os.environ.get("VLLM_API_KEY")]),
    )


def take_flag(args: Namespace, name: str) -> Any:
    """Return the value of a flag and leave None in its place, so that it is not read again; None if not given."""
    value = vars(args).get(name)
    if value is not None:
        setattr(args, name, None)
    return value


Consumer = str | Document | CaptureConsumerSpec

_OURS = f"additional_config[{OUR_KEY!r}]"


def additional_config(
    *,
    consumers: Sequence[Consumer] = (),
    sites: Document | None = None,
    base: Document | None = None,
    **settings: object,
) -> dict[str, object]:
    """Make ``additional_config`` for `EngineArgs`, `AsyncEngineArgs` or vLLM's `LLM`, with the parts configured.

    Args:
        consumers: Each a `CaptureConsumerSpec`, its shorthand ``name:key=val,key=val``, or its fields as a dict.
            They are added to those in `base`.
        sites: ``{hook point: layers}`` that can be captured.
        base: The rest of ``additional_config``; it is not changed.
        settings: Other fields of `CaptureConsumersConfig`; or ``steering=True``, or ``steering={...}`` with fields of
            `headgate.steering.SteeringConfig`; or ``network={...}`` with those of `NetworkConfig`.

    Raises:
        ConfigError: If anything is wrong.
    """
    merged = dict(base or {})
    ours = _object(merged.get(OUR_KEY), _OURS)
    if (network := settings.pop(NETWORK, None)) is not None:
        ours[NETWORK] = {**_object(ours.get(NETWORK), NETWORK), **_object(network, NETWORK)}
        parse_network(ours[NETWORK])
    parts = {name: settings.pop(name) for name in request_parts() if name in settings}
    for name, wanted in parts.items():
        if wanted is not None and wanted is not False:
            ours[name] = _section(name, ours.get(name), wanted)
    if not (consumers or settings or "capture" in ours) and sites is None and (parts or network is not None):
        return {**merged, OUR_KEY: ours} if ours else merged
    capture = {**_object(ours.get("capture"), "capture"), **settings}
    if consumers:
        known = cast("Sequence[object]", capture.get("consumers", ()))
        capture["consumers"] = [*known, *(_plain_consumer(consumer) for consumer in consumers)]
    if sites is not None:
        capture["sites"] = dict(sites)
    parse_config(capture)
    return {**merged, OUR_KEY: {**ours, "capture": capture}}


def _object(value: object, where: str) -> dict[str, object]:
    """A copy of an object of settings; empty if it is None."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, got {value!r}")
    return dict(value or {})


def _section(name: str, base: object, wanted: object) -> dict[str, object]:
    if isinstance(wanted, msgspec.Struct):
        wanted = msgspec.to_builtins(wanted)
    if wanted is not True and not isinstance(wanted, Mapping):
        raise ConfigError(f"{name}: expected True or an object of settings, got {wanted!r}")
    document = {**_object(base, name), **({} if wanted is True else wanted)}
    request_parts()[name].check_section(document)
    return document


def _plain_consumer(consumer: Consumer) -> dict[str, object]:
    if isinstance(consumer, str):
        consumer = parse_shorthand(consumer)
    if isinstance(consumer, CaptureConsumerSpec):
        return msgspec.to_builtins(consumer)  # type: ignore[no-any-return]
    return dict(consumer)


def add_cli_args(original: Function) -> Function:
    """Wrap ``EngineArgs.add_cli_args``."""

    @wraps(original)
    def wrapped(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        group = parser.add_argument_group(
            title="headgate", description="Capture and steering of activations while the model is served."
        )
        add_flags(group)
        return parser

    return wrapped


def add_flags(group: FlagGroup) -> None:
    """Add capture's flags, and those of every other part, to a group of an `argparse.ArgumentParser`."""
    add_repeatable_flag(
        group,
        "--capture-consumers",
        type=_shorthand,
        metavar="NAME:key=val,...",
        help="Consumers of captured activations, such as filesystem:root=/data/run1.",
    )
    group.add_argument(
        "--capture-sites",
        type=json_object,
        default=None,
        metavar="JSON",
        help='What can be captured, as {hook point: layers}; {"post_mlp": "all"} if not given.',
    )
    add_repeatable_flag(
        group,
        "--lenses",
        type=named_path,
        metavar="NAME=PATH",
        help="Lenses that requests may read by (capture.lens) and steer by: files of `headgate lens import`. Adds the "
        "consumer lens, which has the logit lens as well.",
    )
    group.add_argument(
        "--enable-return-hidden-states",
        action="store_true",
        default=None,
        help="Let requests set return_hidden_states: the last row of the final norm with each choice. Adds the "
        "consumer hidden_states and the site final_norm to what is configured.",
    )
    for flag, (_, _, help_text) in _FLAGS.items():
        kind = str if flag == "--headgate-listen" else os.path.abspath
        metavar = "IP[:FIRST-LAST]" if kind is str else "FILE"
        group.add_argument(flag, type=kind, default=None, metavar=metavar, help=help_text)
    for part in request_parts().values():
        part.add_flags(group)


def add_repeatable_flag(group: FlagGroup, name: str, *, type: Callable[[str], object], metavar: str, help: str) -> None:
    """Add a flag that takes one or several values and may be repeated; what is parsed is one list, or None."""
    group.add_argument(
        name, type=type, nargs="+", action="extend", default=None, metavar=metavar, help=f"{help} May be repeated."
    )


def from_cli_args(original: Function) -> Function:
    """Wrap ``EngineArgs.from_cli_args``."""

    @wraps(original)
    def wrapped(cls: type, args: argparse.Namespace) -> object:
        translate_flags(args)
        return original(cls, args)

    return wrapped


def translate_flags(args: argparse.Namespace) -> None:
    """Move our flags into ``args.additional_config``; a second call changes nothing.

    Raises:
        ConfigError: If the result is wrong.
    """
    sections = _object(read_server_args(args).additional_config.get(OUR_KEY), _OURS)
    given = {name: part.read_flags(args, _object(sections.get(name), name)) for name, part in request_parts().items()}
    parts = {name: document for name, document in given.items() if document is not None}
    consumers, sites = take_flag(args, "capture_consumers"), take_flag(args, "capture_sites")
    lenses, has_states = take_flag(args, "lenses"), take_flag(args, _STATES)
    _move_own_flags(args)
    if not (parts or lenses or has_states) and consumers is None and sites is None:
        return
    base = read_server_args(args).additional_config
    if lenses or has_states:
        configured = _consumers_of(sections.get("capture"), consumers or ())
        if lenses:
            configured = _with_lenses(configured, lenses)
        if has_states and not any(each["name"] == HIDDEN_STATES for each in configured):
            configured.append({"name": HIDDEN_STATES})
        capture = {**_object(sections.get("capture"), "capture"), "consumers": configured}
        base, consumers = {**base, OUR_KEY: {**_object(base.get(OUR_KEY), _OURS), "capture": capture}}, None
    args.additional_config = additional_config(consumers=consumers or (), sites=sites, base=base, **parts)


def _consumers_of(section: object, given: Sequence[Consumer]) -> list[dict[str, object]]:
    """Return the consumers of the section ``capture``, and those of flags."""
    capture = _object(section, "capture")
    parse_config(capture)
    return [
        _plain_consumer(consumer) for consumer in (*cast("Sequence[Consumer]", capture.get("consumers", ())), *given)
    ]


def _with_lenses(consumers: Sequence[dict[str, object]], lenses: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
    """Return `consumers` with lenses among the parameters of the consumer ``lens``, which is added if it is missing."""
    is_lens = [each["name"] == LENS and each.get("instance_name") in (None, LENS) for each in consumers]
    if not any(is_lens):
        return [*consumers, {"name": LENS, "params": {"lenses": merged_names({}, lenses, "--lenses")}}]
    found = list(consumers)
    place = is_lens.index(True)
    params = _object(found[place].get("params"), f"{LENS}.params")
    known = {name: str(path) for name, path in _object(params.get("lenses"), f"{LENS}.params.lenses").items()}
    params["lenses"] = merged_names(known, lenses, "--lenses")
    found[place] = {**found[place], "params": params}
    return found


def merged_names(known: Mapping[str, str], named: Sequence[tuple[str, str]], flag: str) -> dict[str, str]:
    """Return paths by name: the known ones, and those of a flag.

    Raises:
        ConfigError: If a name stands for several paths.
    """
    merged = dict(known)
    for name, path in named:
        if merged.get(name, path) != path:
            raise ConfigError(f"{flag}: {name!r} is given as {merged[name]} and as {path}")
        merged[name] = path
    return merged


_FLAGS = {
    "--headgate-keys": (
        SERVER,
        "keys_file",
        "JSON file of clients' keys, their roles and limits; `headgate keys add` makes it.",
    ),
    "--headgate-usage": (
        SERVER,
        "usage_file",
        "File in which the keys' limits are counted, over restarts and processes.",
    ),
    "--headgate-listen": (
        NETWORK,
        "listen",
        "Address of this host at which the workers of an engine on several hosts reach its front ends.",
    ),
    "--headgate-network-keys": (
        NETWORK,
        "keys_file",
        "File with which the hosts of one engine know each other, the same on each; `headgate keys new` makes it.",
    ),
}
"""Flags that belong to no part, each with its section, its setting and its help."""

_PARSERS = {SERVER: parse_server, NETWORK: parse_network}


def _move_own_flags(args: argparse.Namespace) -> None:
    """Move the flags that belong to no part into their sections."""
    for flag, (name, setting, _) in _FLAGS.items():
        if (value := take_flag(args, flag.removeprefix("--").replace("-", "_"))) is None:
            continue
        base = read_server_args(args).additional_config
        ours = _object(base.get(OUR_KEY), _OURS)
        section = {**_object(ours.get(name), name), setting: value}
        _PARSERS[name](section)
        args.additional_config = {**base, OUR_KEY: {**ours, name: section}}


_STATES = "enable_return_hidden_states"
LENS = "lens"
"""Name of the consumer that ``--lenses`` adds."""


def named_path(text: str) -> tuple[str, str]:
    """Parse ``NAME=PATH``.

    Raises:
        argparse.ArgumentTypeError: If `text` is none.
    """
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _shorthand(text: str) -> str:
    try:
        parse_shorthand(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def json_object(text: str) -> dict[str, object]:
    """Parse the value of a flag that takes a JSON object.

    Raises:
        argparse.ArgumentTypeError: If `text` is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected an object such as {{"post_mlp": "all"}}, got {text!r}')
    return value
