"""The sites and positions that one request captures for one consumer, and their form on the wire; what was parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from headgate.capture.schema.batch import SpecWire
from headgate.capture.schema.positions import PositionSelector, selector_from_wire
from headgate.capture.schema.sites import HookPoint, Site, site_map, sort_sites

_Parsed = TypeVar("_Parsed")

MAX_KNOWN, MAX_KNOWN_BYTES = 256, 4096
_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """Sites and positions that one consumer gets of one request.

    Attributes:
        sites: In the order of the forward pass, each once.
        positions: Which positions of the request.
        options: The consumer's own part of the client's spec (tag, layout, ...): str, number, bool, None,
            list or dict only, since it travels to the worker as msgpack.
        arguments: Integers that the consumer's readouts get beside each of the rows; see `RowArguments`.
    """

    sites: tuple[Site, ...]
    positions: PositionSelector
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[int, ...] = ()

    def to_wire(self) -> SpecWire:
        """A msgpack-able form that `from_wire` reads back."""
        wire: SpecWire = {
            "sites": site_map(self.sites),
            "positions": self.positions.to_wire(),
            "options": dict(self.options),
        }
        if self.arguments:
            wire["arguments"] = list(self.arguments)
        return wire

    @classmethod
    def from_wire(cls, wire: SpecWire) -> CaptureSpec:
        """Read `to_wire`'s form. The front end made and checked it: a malformed one is a bug, not bad input."""
        sites = [Site(layer, HookPoint(hook)) for hook, layers in wire["sites"].items() for layer in (layers or (-1,))]
        return cls(
            sites=sort_sites(sites),
            positions=selector_from_wire(wire["positions"]),
            options=wire["options"],
            arguments=tuple(wire.get("arguments", ())),
        )


class SpecReader:
    """Reads specs off the wire for one worker. What many requests want alike is read once, but for their options
    and arguments.

    Args:
        sites: The sites that the worker owns; others are left out.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = frozenset(sites)
        self._known: dict[bytes, CaptureSpec] = {}

    def read(self, wire: SpecWire) -> CaptureSpec:
        """Read `CaptureSpec.to_wire`'s form."""
        is_long = isinstance(wire["positions"], bytes) and len(wire["positions"]) > MAX_KNOWN_BYTES
        key = b"" if is_long else msgspec.msgpack.encode((wire["sites"], wire["positions"]))
        known = self._known.get(key)
        if known is None:
            known = CaptureSpec.from_wire(wire)
            known = CaptureSpec(
                sites=tuple(site for site in known.sites if site in self._sites), positions=known.positions
            )
            if 0 < len(key) <= MAX_KNOWN_BYTES:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        return CaptureSpec(
            sites=known.sites,
            positions=known.positions,
            options=wire["options"],
            arguments=tuple(wire.get("arguments", ())),
        )


class Memo:
    """Parsed parts of one call's document, by the identity of what was parsed: its prompts all ask for the same.

    One that outlives calls knows what many of them write alike, too, by its content.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[object, object]] = {}
        self._alike: dict[tuple[str, bytes], object] = {}

    def parsed(self, raw: object, field: str, parse: Callable[[object, str], _Parsed]) -> _Parsed:
        """``parse(raw, field)``, called once for each `raw` and `field`. What raises is not kept."""
        key = field, id(raw)
        if key not in self._known:
            self._known[key] = raw, parse(raw, field)  # with `raw`, whose identity must stay taken
        return cast("_Parsed", self._known[key][1])

    def parsed_alike(self, raw: object, field: str, parse: Callable[[object, str], _Parsed]) -> _Parsed:
        """``parse(raw, field)``, called once for short values of equal content; what it returns must not be changed."""
        try:
            key = field, msgspec.msgpack.encode(raw)
        except (TypeError, ValueError, OverflowError, RecursionError):  # not plain: a Python caller's own
            return parse(raw, field)
        known = self._alike.get(key, _UNKNOWN)  # once: another thread may clear it
        if known is not _UNKNOWN:
            return cast("_Parsed", known)
        parsed = parse(raw, field)
        if len(key[1]) <= MAX_KNOWN_BYTES:
            if len(self._alike) >= MAX_KNOWN:
                self._alike.clear()
            self._alike[key] = parsed
        return parsed
