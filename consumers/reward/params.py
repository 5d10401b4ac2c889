"""Parameters of the reward consumer, and the spec of a request."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headgate.capture.schema.consumer import SpecContext, select_sites
from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site, parse_hook
from headgate.capture.schema.spec import CaptureSpec

DIRECTION = "direction"
"""Field of a request's spec: the name of one of the configured directions."""


class GeneratedSlice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which generated positions count, as Python slices them: 0 is the first generated token, -1 the last with a row.

    Attributes:
        start: First one *(inclusive)*.
        stop: End *(exclusive)*; None for no end.
        step: Distance, at least 1.
    """

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def indices(self, num_generated: int) -> range:
        """Return the chosen of ``0 : num_generated``."""
        return range(num_generated)[slice(self.start, self.stop, self.step)]


class RewardParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the reward consumer.

    Attributes:
        layer: Layer of the site, negative from the last; ignored for ``final_norm``.
        direction: File of the direction: steering vectors (``.safetensors``) or an array ``[hidden]`` (``.npy``).
        directions: Several directions by name, for requests to choose from. Give either `direction` or `directions`.
        default: Name of the direction for requests that name none; the first if None.
        hook: Hook point of the site.
        positions: Slice of the generated positions.
        measure: ``cos``, the mean cosine of the rows with the direction, or ``projection``, the mean of their dot
            products with the direction at unit length.
        scale: Factor of the measure.
        transform: Function of the scaled measure.
        dtype: Precision of products and lengths. ``float32``: computed in float64 on the worker's device, with
            directions rounded to float32, and copied as float32. ``float64``: whole rows are copied.
    """

    layer: int = -1
    direction: str | None = None
    directions: dict[str, str] = msgspec.field(default_factory=dict)
    default: str | None = None
    hook: str = "post_mlp"
    positions: GeneratedSlice = GeneratedSlice()
    measure: Literal["cos", "projection"] = "cos"
    scale: float = 1.0
    transform: Literal["identity", "tanh", "sigmoid"] = "identity"
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def files(self) -> dict[str, str]:
        """Every direction's file by its name; a single `direction` is called ``default``."""
        return self.directions if self.direction is None else {"default": self.direction}

    @property
    def default_name(self) -> str:
        """The direction of requests that name none."""
        return self.default or next(iter(self.files))

    def site(self, num_layers: int) -> Site:
        """Return the site, for a model of that many layers."""
        hook = parse_hook(self.hook, "hook")
        return Site(-1 if hook is HookPoint.FINAL_NORM else self.layer % num_layers, hook)

    def hooks(self) -> dict[str, Any]:
        """Return the site as a request selects it."""
        hook = parse_hook(self.hook, "hook")
        return {hook.value: "all" if hook is HookPoint.FINAL_NORM else [self.layer]}


def parse_params(params: Mapping[str, Any]) -> RewardParams:
    """Read and check the parameters; opens no file.

    Raises:
        ConfigError: Naming the parameter.
    """
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in params.items()}
    try:
        parsed = msgspec.convert(plain, RewardParams)
        hook = parse_hook(parsed.hook, "hook")
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"reward: {error}") from error
    if (parsed.direction is None) == (not parsed.directions):
        raise ConfigError("reward: give either direction, a file, or directions, {name: file}")
    if parsed.default is not None and parsed.default not in parsed.files:
        raise ConfigError(f"reward: default {parsed.default!r} is none of the directions {sorted(parsed.files)}")
    if hook is not HookPoint.FINAL_NORM and "layer" not in params:
        raise ConfigError(f"reward: layer is required with the hook {hook.value}")
    if not math.isfinite(parsed.scale):
        raise ConfigError(f"reward: scale must be finite, got {parsed.scale}")
    if parsed.positions.step is not None and parsed.positions.step < 1:
        raise ConfigError(f"reward: positions.step must be at least 1, got {parsed.positions.step}")
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{}`` or ``{"direction": NAME}``; the option ``direction`` of the spec is the name.

    Raises:
        RequestError: Naming the field; also if the server cannot capture the configured site.
    """
    params = context.parsed_params(parse_params)
    if not isinstance(raw, Mapping):
        raise RequestError(context.field, f'expected an object such as {{"direction": NAME}}, got {shown(raw)}')
    unknown = next((key for key in raw if key != DIRECTION), None)
    if unknown is not None:
        raise RequestError(f"{context.field}.{unknown}", f"unknown field; known: {DIRECTION}")
    name = raw.get(DIRECTION, params.default_name)
    if not isinstance(name, str) or name not in params.files:
        known = ", ".join(sorted(params.files))
        raise RequestError(f"{context.field}.{DIRECTION}", f"no such direction {shown(name)}; configured: {known}")
    sites = select_sites(params.hooks(), context)
    return CaptureSpec(sites=sites, positions=Named("all_generated"), options={DIRECTION: name})
