"""The sites and positions that one request captures for one consumer, and their form on the wire; what was parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec

from headgate.capture.schema.batch import SpecWire
from headgate.capture.schema.positions import PositionSelector, selector_from_wire
from headgate.capture.schema.sites import Columns, HookPoint, Site, site_map, sort_sites

_Parsed = TypeVar("_Parsed")

MAX_KNOWN, MAX_KNOWN_BYTES = 256, 4096
_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """Sites and positions that one consumer gets of one request.

    Attributes:
        sites: In the order of the forward pass, each once.
        positions: Which positions of the request.
        hook_positions: Other positions in place of these, at all sites of a hook point.
        positions_field: Field of the client's spec that chose the positions, for errors; does not travel.
        site_fields: The same of sites that another field than ``hooks`` chose.
        options: The consumer's own part of the client's spec (tag, layout, ...): str, number, bool, None,
            list or dict only, since it travels to the worker as msgpack.
        arguments: Integers that the consumer's readouts get beside each of the rows; see `RowArguments`.
        columns: The columns that are wanted, of sites where these are not all.
    """

    sites: tuple[Site, ...]
    positions: PositionSelector
    hook_positions: Mapping[HookPoint, PositionSelector] = field(default_factory=dict)
    positions_field: str = field(default="positions", compare=False)
    site_fields: Mapping[Site, str] = field(default_factory=dict, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[int, ...] = ()
    columns: Mapping[Site, Columns] = field(default_factory=dict)

    @property
    def selectors(self) -> tuple[PositionSelector, ...]:
        """All of them: `positions`, and those of hook points."""
        return (self.positions, *self.hook_positions.values())

    def positions_at(self, site: Site) -> PositionSelector:
        """Return the positions that are wanted at a site."""
        return self.hook_positions.get(site.hook, self.positions)

    @property
    def selections(self) -> list[tuple[tuple[Site, ...], PositionSelector]]:
        """The sites, and the positions that are wanted there; no site twice."""
        if not self.hook_positions:
            return [(self.sites, self.positions)]
        others = tuple(site for site in self.sites if site.hook not in self.hook_positions)
        own = [
            (tuple(site for site in self.sites if site.hook is hook), positions)
            for hook, positions in self.hook_positions.items()
        ]
        return [(others, self.positions), *own]

    def with_positions(self, change: Callable[[PositionSelector], PositionSelector]) -> CaptureSpec:
        """Return the spec with other selectors; itself if `change` returns the ones that it gets."""
        changed = {hook: change(positions) for hook, positions in self.hook_positions.items()}
        positions = change(self.positions)
        if positions is self.positions and all(changed[hook] is self.hook_positions[hook] for hook in changed):
            return self
        return replace(self, positions=positions, hook_positions=changed)

    def to_wire(self) -> SpecWire:
        """A msgpack-able form that `from_wire` reads back."""
        wire: SpecWire = {
            "sites": site_map(self.sites),
            "positions": self.positions.to_wire(),
            "options": dict(self.options),
        }
        if self.arguments:
            wire["arguments"] = list(self.arguments)
        if self.hook_positions:
            wire["hook_positions"] = {hook.value: each.to_wire() for hook, each in self.hook_positions.items()}
        if self.columns:
            wire["columns"] = {site.name: [list(each) for each in columns] for site, columns in self.columns.items()}
        return wire

    @classmethod
    def from_wire(cls, wire: SpecWire) -> CaptureSpec:
        """Read `to_wire`'s form. The front end made and checked it: a malformed one is a bug, not bad input."""
        sites = [Site(layer, HookPoint(hook)) for hook, layers in wire["sites"].items() for layer in (layers or (-1,))]
        return cls(
            sites=sort_sites(sites),
            positions=selector_from_wire(wire["positions"]),
            hook_positions={
                HookPoint(hook): selector_from_wire(each) for hook, each in wire.get("hook_positions", {}).items()
            },
            options=wire["options"],
            arguments=tuple(wire.get("arguments", ())),
            columns={
                Site.parse(name): tuple((start, stop) for start, stop in each)
                for name, each in wire.get("columns", {}).items()
            },
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
        selectors = wire["positions"], wire.get("hook_positions", {})
        is_long = any(
            isinstance(each, bytes) and len(each) > MAX_KNOWN_BYTES for each in (selectors[0], *selectors[1].values())
        )
        key = b"" if is_long else msgspec.msgpack.encode((wire["sites"], *selectors, wire.get("columns")))
        known = self._known.get(key)
        if known is None:
            known = CaptureSpec.from_wire(wire)
            known = replace(
                known,
                sites=tuple(site for site in known.sites if site in self._sites),
                columns={site: columns for site, columns in known.columns.items() if site in self._sites},
                options={},
                arguments=(),
            )
            if 0 < len(key) <= MAX_KNOWN_BYTES:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                self._known[key] = known
        return replace(known, options=wire["options"], arguments=tuple(wire.get("arguments", ())))


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
