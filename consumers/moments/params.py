"""Parameters of the moments consumer, and the spec of a request."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headgate.capture.schema.config import GIB
from headgate.capture.schema.consumer import ModelInfo, SpecContext, parse_client_spec
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.limits import check_tag
from headgate.capture.schema.selectors.parsing import parse_positions
from headgate.capture.schema.sites import Site, parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.storage.store import check_name
from headgate.consumers.moments.entry import PHASES, MomentsSettings
from headgate.consumers.moments.held_rows import TAG


class MomentsParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the moments consumer.

    Attributes:
        root: Folder of the state, on a local file system.
        tag: For requests that name none.
        tags: Further tags that requests may name; each has moments of its own.
        hooks: ``{hook point: layers}`` to record for every request.
        positions: Which positions to record with `hooks`. With ``all`` and ``all_prompt`` requests do not read the
            prefix cache.
        skip_positions: Omit this many positions at the beginning of each request; 1 omits the first token.
        max_norm: Omit longer rows, such as those of attention sinks: one number, or one for each site
            (``{"12.post_mlp": 300}``; other sites then have no limit). None omits no row.
        covariance: ``full`` keeps the whole matrix, ``sketch`` its largest directions, ``none`` only the variances;
            ``auto`` is ``full`` up to a hidden size of `full_width`, and ``sketch`` above.
        full_width: See `covariance`.
        rank: Directions of a sketch.
        quantile_error: Relative error of the quantiles of norms.
        flush_s: Seconds between two writes of a changed state; a killed process loses no more than that. 0 writes at
            the end of each request, before its result.
        max_bytes: Memory for the state of one process, with every site, phase and tag in use; writing it takes as
            much again.
    """

    root: str
    tag: str = "default"
    tags: tuple[str, ...] = ()
    hooks: dict[str, Any] | None = None
    positions: Any = "all"
    skip_positions: int = 0
    max_norm: float | dict[str, float] | None = None
    covariance: Literal["auto", "full", "sketch", "none"] = "auto"
    full_width: int = 1024
    rank: int = 64
    quantile_error: float = 0.01
    flush_s: float = 10.0
    max_bytes: int = 2 * GIB

    @property
    def folder(self) -> Path:
        """The root as a path."""
        return Path(self.root).expanduser()

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Every tag that requests may name."""
        return tuple(dict.fromkeys((self.tag, *self.tags)))

    def settings(self, model: ModelInfo, consumer: str) -> MomentsSettings:
        """Return what the state of this configuration is made with, for the instance of that name."""
        kind = self.covariance
        if kind == "auto":
            kind = "full" if model.hidden_size <= self.full_width else "sketch"
        limits = self.max_norm if isinstance(self.max_norm, dict) else {"*": self.max_norm}
        return MomentsSettings(
            consumer=consumer,
            model=model.name,
            hidden_size=model.hidden_size,
            covariance=kind,
            rank=self.rank,
            quantile_error=self.quantile_error,
            skip_positions=self.skip_positions,
            max_norm={site: limit for site, limit in limits.items() if limit is not None},
        )

    def check_size(self, model: ModelInfo) -> None:
        """Raise `ConfigError` if the state could pass `max_bytes`."""
        num_entries = len(model.sites) * len(PHASES) * len(self.all_tags)
        num_bytes = num_entries * self.settings(model, "").entry_bytes
        if num_bytes > self.max_bytes:
            raise ConfigError(
                f"moments: the state of {len(model.sites)} sites, {len(PHASES)} phases and {len(self.all_tags)} tags "
                f"could take {num_bytes} bytes, and max_bytes is {self.max_bytes}; configure fewer capture.sites or "
                "tags, set covariance to sketch or none or lower rank, or raise max_bytes"
            )


def parse_params(params: Mapping[str, Any]) -> MomentsParams:
    """Read and check the parameters; touches no disk.

    Raises:
        ConfigError: Naming the parameter.
    """
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in params.items()}
    try:
        parsed = msgspec.convert(plain, MomentsParams)
        for tag in parsed.all_tags:
            check_name(tag, "tags")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
        if isinstance(parsed.max_norm, dict):
            parsed = msgspec.structs.replace(parsed, max_norm=_by_site(parsed.max_norm))
    except (msgspec.ValidationError, RequestError) as error:
        raise ConfigError(f"moments: {error}") from error
    limits = parsed.max_norm.values() if isinstance(parsed.max_norm, dict) else (parsed.max_norm,)
    checks = {
        "root": (bool(parsed.root) and "://" not in parsed.root, "a folder of this machine"),
        "skip_positions": (parsed.skip_positions >= 0, "0 or more"),
        "max_norm": (all(limit is None or limit > 0 for limit in limits), "above 0"),
        "full_width": (parsed.full_width >= 0, "0 or more"),
        "rank": (parsed.rank >= 1, "at least 1"),
        "quantile_error": (1e-4 <= parsed.quantile_error <= 0.5, "from 0.0001 to 0.5"),
        "flush_s": (parsed.flush_s >= 0 and math.isfinite(parsed.flush_s), "0 or more seconds"),
        "max_bytes": (parsed.max_bytes >= 1, "at least 1"),
    }
    for name, (is_right, expected) in checks.items():
        if not is_right:
            raise ConfigError(f"moments: {name} must be {expected}, got {getattr(parsed, name)!r}")
    return parsed


def _by_site(limits: Mapping[str, float]) -> dict[str, float]:
    """The limits by the names that we write."""
    try:
        return {Site.parse(name).name: limit for name, limit in limits.items()}
    except ValueError as error:
        raise RequestError("max_norm", str(error)) from error


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"hooks", "positions", "tag"}``; ``hooks`` alone is required. The option ``tag`` of the spec is resolved.

    Raises:
        RequestError: Naming the field.
    """
    params = context.parsed_params(parse_params)
    spec = parse_client_spec(raw, context, options=(TAG,))
    tag = check_name(spec.options.get(TAG, params.tag), f"{context.field}.{TAG}")
    check_tag(tag, params.all_tags, f"{context.field}.{TAG}")
    return CaptureSpec(sites=spec.sites, positions=spec.positions, options={TAG: tag})


def parse_global(context: SpecContext) -> CaptureSpec | None:
    """The spec of every request, if the parameters have ``hooks``."""
    params = context.parsed_params(parse_params)
    if params.hooks is None:
        return None
    return parse_request({"hooks": params.hooks, "positions": params.positions}, context)
