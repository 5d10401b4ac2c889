"""Parameters of the probe consumer, the files that they name, and the spec of a request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from headgate.capture.probes.files import load
from headgate.capture.probes.probe import Probe, ProbeError
from headgate.capture.schema.consumer import SpecContext, select_sites
from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.capture.schema.selectors.parsing import parse_positions
from headgate.capture.schema.sites import site_map, sort_sites
from headgate.capture.schema.spec import CaptureSpec

PROBES = "probes"
"""Field of a request's spec: the names of configured probes. The option of that name has their checksums, too."""

FIELDS = (PROBES, "positions")


class ProbeParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the probe consumer.

    Attributes:
        probes: Files of probes by name, for requests to choose from.
        max_scores: Largest number of scores in the result of one sample: positions times classes, over all its probes.
    """

    probes: dict[str, str]
    max_scores: int = 65_536


def parse_params(params: Mapping[str, Any]) -> tuple[ProbeParams, dict[str, Probe]]:
    """Read and check the parameters, and the probes by name.

    A file is read again only if it has changed, so a request costs one look at each file's time.

    Raises:
        ConfigError: Naming the parameter.
    """
    given = params.get(PROBES)
    if isinstance(given, Mapping):
        plain = {name: os.fspath(path) if isinstance(path, os.PathLike) else path for name, path in given.items()}
        params = {**params, PROBES: plain}
    try:
        parsed = msgspec.convert(dict(params), ProbeParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"probe: {error}") from error
    if not parsed.probes:
        raise ConfigError('probe: probes: name at least one, {"anger": "anger.safetensors"}')
    if parsed.max_scores < 1:
        raise ConfigError(f"probe: max_scores must be at least 1, got {parsed.max_scores}")
    return parsed, {name: _read(name, path) for name, path in parsed.probes.items()}


def _read(name: str, path: str) -> Probe:
    place = Path(path).expanduser()
    try:
        status = place.stat()
        probe = _load(place, (status.st_mtime_ns, status.st_size, status.st_ino))
    except (OSError, ProbeError) as error:
        raise ConfigError(f"probe: probes.{name}: {error}") from error
    return probe


@lru_cache(maxsize=256)
def _load(place: Path, version: tuple[int, ...]) -> Probe:
    """The probe in a file as it was at that `version`."""
    return load(place)


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"probes": [NAME, ...], "positions": SELECTOR}``; by default all probes, and all positions.

    Returns:
        The spec, with the sites of the chosen probes; its option ``probes`` is ``{NAME: sha256}``.

    Raises:
        RequestError: Naming the field; also if the server cannot capture the site of a probe.
    """
    _, known = parse_params(context.params)
    if not isinstance(raw, Mapping):
        raise RequestError(context.field, f'expected an object such as {{"probes": [NAME]}}, got {shown(raw)}')
    unknown = next((key for key in raw if key not in FIELDS), None)
    if unknown is not None:
        raise RequestError(f"{context.field}.{unknown}", f"unknown field; known: {', '.join(FIELDS)}")
    names = _names(raw.get(PROBES, list(known)), known, f"{context.field}.{PROBES}")
    hooks = site_map(sort_sites({known[name].site for name in names}))
    parse = partial(parse_positions, context_length=context.model.context_length, takes_several=True)
    return CaptureSpec(
        sites=select_sites(hooks, context),
        positions=context.parsed_once(raw.get("positions", "all"), "positions", parse),
        options={PROBES: {name: known[name].sha256 for name in names}},
    )


def _names(given: object, known: Mapping[str, Probe], field: str) -> list[str]:
    if not isinstance(given, list) or not given or len(given) > len(known):
        raise RequestError(field, f"expected a list of up to {len(known)} names, not empty; got {shown(given)}")
    for number, name in enumerate(given):
        if not isinstance(name, str) or name not in known:
            raise RequestError(
                f"{field}[{number}]", f"no such probe {shown(name)}; configured: {', '.join(sorted(known))}"
            )
    if len(set(given)) < len(given):
        raise RequestError(field, f"expected each name once, got {shown(given)}")
    return given
