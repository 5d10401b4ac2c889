"""The form in which steering travels from the front end to the engine: plain values, the rows as raw bytes.

A `SteeringWire` is the section of a request in its `RequestWire`, and the ``spec`` of calls that register a
module or set global vectors. An absent key stands for nothing. The front end made and checked it: a malformed one is a
bug, not bad input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypedDict

from headgate.capture.schema.sites import HookPoint, Site, site_map, sort_sites
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import ModuleRef, PhaseVectors, SteeringSpec

TIERS = ("base", "prefill", "decode")
"""Tiers of the global vectors in calls of the engine core; each travels as the prefill of a `SteeringWire`."""


class VectorsWire(TypedDict):
    """`PhaseVectors` as plain values.

    Attributes:
        key: The content key.
        sites: ``{hook: [layers]}``.
        hidden_size: Values of a row.
        dtype: Element type of the payload.
        payload: The rows, one after the other, little-endian.
        peak: The largest magnitude of any value.
    """

    key: bytes
    sites: dict[str, list[int]]
    hidden_size: int
    dtype: StoredType
    payload: bytes
    peak: float


class SteeringWire(TypedDict, total=False):
    """A `SteeringSpec` as plain values.

    Attributes:
        prefill: The inline vectors of the prefill phase.
        decode: The inline vectors of the decode phase, unless they are the prefill vectors.
        is_shared: True if the decode vectors are the prefill vectors, which travel once.
        modules: ``[name, scale]`` of each named module.
        prefill_parts: ``[content key, scale]`` of each module's prefill vectors: written by the engine core, which
            resolves names, for its workers.
        decode_parts: The same for the decode phase.
    """

    prefill: VectorsWire
    decode: VectorsWire
    is_shared: bool
    modules: list[list[Any]]
    prefill_parts: list[list[Any]]
    decode_parts: list[list[Any]]


def to_wire(spec: SteeringSpec) -> SteeringWire:
    """Return the wire form of `spec`; payloads are not copied."""
    wire: SteeringWire = {}
    if spec.modules:
        wire["modules"] = [[ref.name, ref.scale] for ref in spec.modules]
    if spec.prefill is not None:
        wire["prefill"] = _vectors_wire(spec.prefill)
    if spec.prefill is not None and spec.decode is not None and spec.prefill.key == spec.decode.key:
        wire["is_shared"] = True
    elif spec.decode is not None:
        wire["decode"] = _vectors_wire(spec.decode)
    return wire


def from_wire(wire: Mapping[str, Any]) -> SteeringSpec:
    """Return the spec that `to_wire` wrote; its rows are views of the received bytes."""
    prefill = _vectors(wire.get("prefill"))
    decode = prefill if wire.get("is_shared") else _vectors(wire.get("decode"))
    modules = tuple(ModuleRef(name, scale) for name, scale in wire.get("modules", ()))
    return SteeringSpec(prefill=prefill, decode=decode, modules=modules)


def _vectors_wire(vectors: PhaseVectors) -> VectorsWire:
    return {
        "key": vectors.key,
        "sites": site_map(vectors.sites),
        "hidden_size": vectors.hidden_size,
        "dtype": vectors.dtype,
        "payload": vectors.payload,
        "peak": vectors.peak,
    }


def _vectors(wire: VectorsWire | None) -> PhaseVectors | None:
    if wire is None:
        return None
    sites = _sites(tuple([(hook, tuple(layers)) for hook, layers in wire["sites"].items()]))
    return PhaseVectors(
        sites=sites,
        hidden_size=wire["hidden_size"],
        dtype=wire["dtype"],
        payload=wire["payload"],
        key=wire["key"],
        peak=wire["peak"],
    )


@lru_cache(maxsize=256)
def _sites(by_hook: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Site, ...]:
    """Return sites in order; cached, since most requests of a load steer the same ones."""
    return sort_sites(Site(layer, HookPoint(hook)) for hook, layers in by_hook for layer in (layers or (-1,)))
