"""Every knob of steering, with its unit and what it costs.

The operator's document is ``additional_config={"headgate": {"steering": {...}}}`` (or vLLM's
``--additional-config``); its keys are the fields below, and unknown keys are refused.

`add_flags` and `read_flags` are steering's flags on vLLM's command line, which make the same section.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headgate.capture.engine.contracts.request_part import FlagGroup
from headgate.capture.engine.setup.cli_flags import add_repeatable_flag, json_object
from headgate.capture.engine.setup.server_args import take_flag
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import Site, parse_sites
from headgate.steering.vectors.phase_vectors import Steerable, check_name


def _stream_sites() -> dict[str, Any]:
    return {"pre_attn": "all", "post_attn": "all", "post_mlp": "all"}


DEFAULT_SLOTS = 8192
MAX_WAITING = 1024
MAX_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Limits of requests that wait for slots.

    Attributes:
        max_waiting: Requests at a time.
        max_wait_s: Seconds of one request.
    """

    max_waiting: float
    max_wait_s: float


class SteeringConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The operator's configuration of steering.

    Attributes:
        max_steering_slots: Vectors that are on the device at a time, for all requests, modules and global vectors
            together; slot 0 is the zero vector. Costs ``max_steering_slots * hidden_size`` elements of the model's
            dtype of device memory: 8192 slots are 42 MB for a hidden size of 2560, 134 MB for 8192, in bfloat16.
            Requests whose vectors find no slot wait for one.
        max_steering_configs: Another way to say it: slots for so many distinct configurations, each with a vector at
            every site of `sites` in both phases, and for global vectors beside them. A registered module counts as one
            configuration. A configuration of fewer vectors takes fewer slots, so more of them fit.
        max_vectors_per_request: Vectors that one request may bring: one for each site and phase, counted once if
            both phases are alike. If None, every site in both phases, as far as the slots suffice. Each costs
            ``hidden_size`` elements of host memory while the request lives.
        max_waiting: Requests that may wait for slots at a time; further ones are answered with HTTP 503 and
            ``Retry-After``. If None, 1024; for an `LLM`, whose program waits for itself alone, as many as come.
        max_wait_s: Seconds that one request may wait for slots, until it is answered likewise. If None, 120; for an
            `LLM` as long as it takes.
        sites: ``{hook point: layers}`` that can be steered; requests choose any subset. Changes the compiled graph.
            A site costs 8 bytes of device memory for each batch row.
        modules: ``{name: path}`` of named modules to load at start (``.safetensors``, ``.json``, ``.gguf``). Each
            vector of a module takes a slot for as long as it is registered.
        audit_file: File to which each change of global vectors and modules is added as a line of JSON, by every engine
            core; none if None.
        self_test: Drive every site with a dummy step at start-up and refuse to serve if one does not respond.
        fire_counter: Count on the device how often each site ran (debugging; one more kernel a site).
    """

    max_steering_slots: int = DEFAULT_SLOTS
    max_steering_configs: int | None = None
    max_vectors_per_request: int | None = None
    max_waiting: int | None = None
    max_wait_s: float | None = None
    sites: dict[str, Any] = msgspec.field(default_factory=_stream_sites)
    modules: dict[str, str] = msgspec.field(default_factory=dict)
    audit_file: str | None = None
    self_test: bool = True
    fire_counter: bool = False

    def steerable(self, *, num_layers: int, hidden_size: int, dtype: str) -> Steerable:
        """Resolve the configured sites and limits for a model.

        Raises:
            ConfigError: If the model has no such sites.
        """
        sites = self._sites(num_layers)
        limit = self.max_vectors_per_request or 2 * len(sites)
        return Steerable(
            num_layers=num_layers,
            hidden_size=hidden_size,
            dtype=dtype,
            sites=sites,
            max_vectors=min(limit, self.num_slots(num_layers) - 1),
        )

    def num_slots(self, num_layers: int) -> int:
        """Return the slots of the vector pool for a model, slot 0 included.

        Raises:
            ConfigError: As `steerable`.
        """
        if self.max_steering_configs is None:
            return self.max_steering_slots
        return 2 * len(self._sites(num_layers)) * (self.max_steering_configs + 1) + 1

    def wait_limits(self, *, is_offline: bool) -> WaitLimits:
        """Return the limits of requests that wait for slots; `is_offline`: of those that an `LLM` makes."""
        max_waiting, max_wait_s = (math.inf, math.inf) if is_offline else (MAX_WAITING, MAX_WAIT_S)
        return WaitLimits(
            max_waiting=max_waiting if self.max_waiting is None else self.max_waiting,
            max_wait_s=max_wait_s if self.max_wait_s is None else self.max_wait_s,
        )

    def _sites(self, num_layers: int) -> tuple[Site, ...]:
        try:
            return parse_sites(self.sites, num_layers, "sites")
        except RequestError as error:
            raise ConfigError(f"{_WHERE}.{error}") from error


_WHERE = "additional_config['headgate']['steering']"


def parse_config(document: Mapping[str, Any] | None) -> SteeringConfig:
    """Read the value of ``additional_config["headgate"]["steering"]``.

    Raises:
        ConfigError: On an unknown key, a wrong type or a value out of range.
    """
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError(f"{_WHERE}: expected an object, got {document!r}")
    try:
        config = msgspec.convert(document or {}, SteeringConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    _check(config)
    return config


def _check(config: SteeringConfig) -> None:
    slots, limit = config.max_steering_slots, config.max_vectors_per_request
    if config.max_steering_configs is not None and config.max_steering_configs < 1:
        raise ConfigError(f"{_WHERE}: max_steering_configs must be at least 1, got {config.max_steering_configs}")
    if config.max_steering_configs is not None and slots != DEFAULT_SLOTS:
        raise ConfigError(f"{_WHERE}: max_steering_configs is another way to set max_steering_slots; give one of them")
    if slots < 2:
        raise ConfigError(f"{_WHERE}: max_steering_slots must be at least 2 (slot 0 is the zero vector), got {slots}")
    if limit is not None and not 0 < limit < slots:
        raise ConfigError(
            f"{_WHERE}: max_vectors_per_request must be from 1 to max_steering_slots - 1 = {slots - 1}, got {limit}"
        )
    if config.max_waiting is not None and config.max_waiting < 0:
        raise ConfigError(f"{_WHERE}: max_waiting must be at least 0, got {config.max_waiting}")
    if config.max_wait_s is not None and not config.max_wait_s > 0:
        raise ConfigError(f"{_WHERE}: max_wait_s must be above 0, got {config.max_wait_s}")
    if not config.sites:
        raise ConfigError(f"{_WHERE}: sites: name at least one hook point, such as {{'post_mlp': 'all'}}")
    for name, path in config.modules.items():
        try:
            check_name(name, "modules")
        except RequestError as error:
            raise ConfigError(f"{_WHERE}.{error}") from error
        if not path:
            raise ConfigError(f"{_WHERE}.modules.{name}: the path is empty")


_SIZES = ("max_steering_slots", "max_steering_configs")
_WAITS = {"max_steering_waiting": "max_waiting", "max_steering_wait_s": "max_wait_s"}
_FLAGS = ("enable_steering", *_SIZES, *_WAITS, "steering_modules", "steering_sites", "steering_audit")


def add_flags(group: FlagGroup) -> None:
    """Add the flags to a group of an `argparse.ArgumentParser`."""
    group.add_argument(
        "--enable-steering",
        action="store_true",
        default=None,
        help="Let requests add vectors to the residual stream. Any other flag of steering turns it on as well.",
    )
    _add_limits(group)
    _add_named_flags(group)


def _add_named_flags(group: FlagGroup) -> None:
    """Add the flags that name files and sites."""
    add_repeatable_flag(
        group,
        "--steering-modules",
        type=_named_path,
        metavar="NAME=PATH",
        help="Named modules to load at start, from .safetensors, .json or .gguf files.",
    )
    group.add_argument(
        "--steering-audit",
        type=os.path.abspath,
        default=None,
        metavar="FILE",
        help="File to which each change of global vectors and modules is added, as a line of JSON.",
    )
    group.add_argument(
        "--steering-sites",
        type=json_object,
        default=None,
        metavar="JSON",
        help='What can be steered, as {hook point: layers}; {"pre_attn": "all", "post_attn": "all", '
        '"post_mlp": "all"} if not given.',
    )


def _add_limits(group: FlagGroup) -> None:
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
        help="In place of --max-steering-slots: slots for N distinct configurations of vectors at all sites in both "
        "phases, and for global vectors beside them. More fit if they steer fewer sites.",
    )
    group.add_argument(
        "--max-steering-waiting",
        type=int,
        default=None,
        metavar="N",
        help="Requests that may wait for slots at a time (default 1024); further ones are answered with HTTP 503.",
    )
    group.add_argument(
        "--max-steering-wait-s",
        type=float,
        default=None,
        metavar="SECONDS",
        help="Time that a request may wait for slots (default 120); then it is answered with HTTP 503.",
    )


def read_flags(args: argparse.Namespace, section: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Move the flags from `args` into a copy of `section`; None if none was given.

    Raises:
        ConfigError: If two of them contradict each other.
    """
    given = {name: value for name in _FLAGS if (value := take_flag(args, name)) is not None}
    if not given:
        return None
    document = dict(section or {})
    if "max_steering_slots" in given and "max_steering_configs" in given:
        raise ConfigError("--max-steering-configs is another way to set --max-steering-slots; give one of them")
    document.update({name: given[name] for name in _SIZES if name in given})
    document.update({name: given[flag] for flag, name in _WAITS.items() if flag in given})
    if "steering_modules" in given:
        document["modules"] = _merged(document.get("modules") or {}, given["steering_modules"])
    if "steering_audit" in given:
        document["audit_file"] = given["steering_audit"]
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
