"""The form in which steering travels from the front end to the engine: plain values, the rows as raw bytes.

``extra_args["headgate"]["steering"]`` is::

    {"h": hidden size, "p": prefill key, "d": decode key, "m": [[name, scale], ...],
     "ps": {hook: [layers]}, "pt": dtype, "pb": rows, "pm": peak,      the prefill vectors
     "ds": ..., "dt": ..., "db": ..., "dm": ...}      the decode vectors, unless their key is the prefill key

What is absent is nothing. The front end made and checked it: a malformed one is a bug, not bad input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headgate.capture.schema.sites import HookPoint, Site, site_map, sort_sites
from headgate.steering.vectors.dtypes import STORAGE
from headgate.steering.vectors.phase_vectors import ModuleRef, PhaseVectors, SteeringSpec


def to_wire(spec: SteeringSpec) -> dict[str, Any]:
    """The wire form of `spec`; the payloads are not copied."""
    wire: dict[str, Any] = {}
    if spec.modules:
        wire["m"] = [[ref.name, ref.scale] for ref in spec.modules]
    for phase, vectors in (("p", spec.prefill), ("d", spec.decode)):
        if vectors is None:
            continue
        wire["h"] = vectors.hidden_size
        wire[phase] = vectors.key
        if phase == "p" or wire.get("p") != vectors.key:
            wire[f"{phase}s"] = site_map(vectors.sites)
            wire[f"{phase}t"] = vectors.dtype
            wire[f"{phase}b"] = vectors.payload
            wire[f"{phase}m"] = vectors.peak
    return wire


@dataclass(frozen=True, slots=True)
class SteeringWire:
    """A request's steering as the engine gets it. Keys and counts cost nothing; vectors are made when asked for.

    Attributes:
        wire: The dict of `to_wire`.
    """

    wire: Mapping[str, Any]

    @property
    def prefill_key(self) -> bytes | None:
        """Key of the request's own prefill vectors; None if it has none."""
        return self.wire.get("p")

    @property
    def decode_key(self) -> bytes | None:
        """Key of the request's own decode vectors; None if it has none."""
        return self.wire.get("d")

    @property
    def modules(self) -> tuple[ModuleRef, ...]:
        """Named modules that are added in both phases."""
        return tuple(ModuleRef(name, scale) for name, scale in self.wire.get("m", ()))

    @property
    def num_vectors(self) -> int:
        """As `SteeringSpec.num_vectors`: rows that travel with the request."""
        return sum(
            len(self.wire[f"{phase}b"]) // (self.wire["h"] * STORAGE[self.wire[f"{phase}t"]].itemsize)
            for phase in "pd"
            if f"{phase}b" in self.wire
        )

    def prefill(self) -> PhaseVectors | None:
        """The prefill vectors; their rows are views of the received bytes."""
        return self._phase("p", self.prefill_key)

    def decode(self) -> PhaseVectors | None:
        """The decode vectors; their rows are views of the received bytes."""
        return self._phase("d" if "db" in self.wire else "p", self.decode_key)

    def spec(self) -> SteeringSpec:
        """All of it at once."""
        prefill = self.prefill()
        is_shared = prefill is not None and self.decode_key == prefill.key
        return SteeringSpec(prefill=prefill, decode=prefill if is_shared else self.decode(), modules=self.modules)

    def _phase(self, phase: str, key: bytes | None) -> PhaseVectors | None:
        if key is None:
            return None
        return PhaseVectors(
            sites=_sites(tuple([(hook, tuple(layers)) for hook, layers in self.wire[f"{phase}s"].items()])),
            hidden_size=self.wire["h"],
            dtype=self.wire[f"{phase}t"],
            payload=self.wire[f"{phase}b"],
            key=key,
            peak=self.wire[f"{phase}m"],
        )


@lru_cache(maxsize=256)
def _sites(by_hook: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Site, ...]:
    """Sites in order; most requests of a load steer the same ones."""
    return sort_sites(Site(layer, HookPoint(hook)) for hook, layers in by_hook for layer in (layers or (-1,)))
