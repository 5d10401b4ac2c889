"""Steering vectors in their canonical form (`PhaseVectors`), the spec of one request, and its wire form.

A set of vectors has one canonical form: its rows in the order of the forward pass, without rows of zeros, in the
first of bfloat16, float16 and float32 that holds every value exactly. So equal vectors have equal bytes and equal
content keys, whether they came as lists, arrays, tensors or packed bytes, and no value is ever rounded on the way. The
worker rounds once, to the model's dtype, after the last sum.

A spec travels from the front end to the engine as a `SteeringWire`: plain values, the rows as raw bytes. It is
the section of a request in its `RequestWire`, and the ``spec`` of calls that register a module or set global vectors.
An absent key stands for nothing. The front end made and checked it: a malformed one is a bug, not bad input.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import HookPoint, Site, site_map, sort_sites
from headgate.steering.vectors.dtypes import OVERFLOW, STORAGE, Float32Rows, Rows, StoredType, narrowest, peaks, widen

TIERS = ("base", "prefill", "decode")
"""Tiers of the global vectors in calls of the engine core; each travels as the prefill of a `SteeringWire`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steerable:
    """The sites of the served model that can be steered, and the limits of one request.

    Attributes:
        num_layers: Decoder layers of the whole model.
        hidden_size: Width of the residual stream, and of every vector.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: the model's, to which sums are rounded.
        sites: In the order of the forward pass.
        max_vectors: Vectors that one request may take: one for each site and phase, counted once if both phases
            are alike.
    """

    num_layers: int
    hidden_size: int
    dtype: str
    sites: tuple[Site, ...]
    max_vectors: int
    ranks: Mapping[HookPoint, Sequence[int]] = field(init=False, repr=False, compare=False)
    """Per hook point, each layer's index into `sites`; -1 where it cannot be steered."""

    def __post_init__(self) -> None:
        ranks = {hook: [-1] * (1 if hook is HookPoint.FINAL_NORM else self.num_layers) for hook in HookPoint}
        for rank, (layer, hook) in enumerate(self.sites):
            ranks[hook][layer] = rank
        object.__setattr__(self, "ranks", ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseVectors:
    """Vectors at sites, for one phase or as one tier; immutable, in canonical form, never empty.

    Make them with `from_rows`, `from_bytes`, `weighted_sum`, or by reading a request or a file.

    Attributes:
        sites: In the order of the forward pass, each once.
        hidden_size: Values of a row.
        dtype: Element type that the rows are stored in.
        payload: The rows, one after the other, little-endian.
        key: The content key, 32 bytes; equal if and only if the vectors are.
        peak: The largest magnitude of any value.
    """

    sites: tuple[Site, ...]
    hidden_size: int
    dtype: StoredType
    payload: bytes = field(repr=False, compare=False)
    key: bytes = field(repr=False)
    peak: float = field(repr=False, compare=False)

    @classmethod
    def from_rows(cls, rows: Mapping[Site, Any]) -> PhaseVectors | None:
        """Make vectors from arrays of ``[hidden]``, rounded to float32; None if all are zero.

        Raises:
            ValueError: If there is none, if their widths differ, or if a value is not finite in float32.
        """
        sites = sort_sites(rows)
        widths = {np.shape(rows[site]) for site in sites}
        if len(widths) != 1 or len(next(iter(widths))) != 1:
            raise ValueError(f"expected one or more vectors of one width, got the shapes {sorted(widths)}")
        with np.errstate(over="ignore"):
            stacked = np.stack([np.asarray(rows[site], np.float64) for site in sites]).astype(np.float32)
        largest = peaks(stacked, "float32")
        for site, peak in zip(sites, largest, strict=True):
            if not np.isfinite(peak):
                raise ValueError(f"the vector at {site.name} has a value that is not finite in float32")
        return cls.from_bytes(sites, stacked.tobytes(), "float32", stacked.shape[1], largest)

    @classmethod
    def from_bytes(
        cls, sites: tuple[Site, ...], payload: bytes, dtype: StoredType, hidden_size: int, largest: Float32Rows
    ) -> PhaseVectors | None:
        """Make vectors from checked rows; None if all are zero.

        Args:
            sites: In the order of the forward pass, each once.
            payload: Their rows; kept as it is if it is canonical.
            dtype: Element type of `payload`.
            hidden_size: Values of a row.
            largest: `peaks` of the rows; all finite.
        """
        rows = _rows(payload, dtype, hidden_size)
        if not largest.all():
            kept = largest != 0
            sites = tuple(site for site, is_kept in zip(sites, kept.tolist(), strict=True) if is_kept)
            rows = rows[kept]
        if not sites:
            return None
        narrow, narrow_dtype = narrowest(rows, dtype)
        if narrow_dtype != dtype or len(narrow) != len(largest):
            payload = narrow.tobytes()
        key = content_key(sites, hidden_size, narrow_dtype, payload)
        peak = float(largest.max())
        return cls(sites=sites, hidden_size=hidden_size, dtype=narrow_dtype, payload=payload, key=key, peak=peak)

    @property
    def rows(self) -> Rows:
        """Rows ``[n, hidden]`` as stored (bfloat16 as uint16 bits): a read-only view of `payload`."""
        return _rows(self.payload, self.dtype, self.hidden_size)

    def float32(self) -> Float32Rows:
        """Return rows ``[n, hidden]`` in float32, exactly; read-only if they are stored in float32."""
        return widen(self.rows, self.dtype)

    def stored_as(self, dtype: StoredType) -> Rows | None:
        """Return `rows` if they are stored in `dtype`, else None."""
        return self.rows if self.dtype == dtype else None

    def scaled(self, scale: float) -> PhaseVectors | None:
        """Return these vectors times `scale`, in float32; None if nothing but zeros is left.

        Raises:
            OverflowError: As `weighted_sum`.
        """
        return weighted_sum([(self, scale)])

    def packed(self, *, as_text: bool = False) -> dict[str, Any]:
        """Return the packed form of a request field, which is read back to equal vectors.

        Args:
            as_text: `data` is base64, for a JSON body, instead of bytes.
        """
        ranks = {site: rank for rank, site in enumerate(self.sites)}
        rows, hooks = self.rows, {}
        for hook, layers in site_map(self.sites).items():
            layers = layers or [-1]
            chosen = rows[[ranks[Site(layer, HookPoint(hook))] for layer in layers]].tobytes()
            hooks[hook] = {
                "dtype": self.dtype,
                "shape": [len(layers), self.hidden_size],
                "layer_indices": layers,
                "data": base64.b64encode(chosen).decode("ascii") if as_text else chosen,
            }
        return hooks

    def first_overflow(self, dtype: str) -> Site | None:
        """Return the first site whose vector is infinite once rounded to `dtype`, the model's; None if none is."""
        if self.peak < OVERFLOW[dtype]:
            return None
        over = np.flatnonzero(peaks(self.rows, self.dtype) >= OVERFLOW[dtype])
        return self.sites[over[0]] if over.size else None


def _rows(payload: bytes, dtype: StoredType, hidden_size: int) -> Rows:
    return np.frombuffer(payload, STORAGE[dtype]).reshape(-1, hidden_size)


_CONTENT_PREFIX = b"headgate vectors\n"
"""Keeps the keys of vectors apart from those of sums (`headgate.steering.vectors.sums.sum_key`)."""


def content_key(sites: Sequence[Site], hidden_size: int, dtype: StoredType, payload: bytes) -> bytes:
    """Return the content key of rows at sites: a whole SHA-256.

    Content keys decide which KV blocks and which vectors requests share, so they must be hard to forge: a client who
    could make two contents of one key could feed the one to users of the other. To find such a pair takes 2^128 tries.

    Args:
        sites: In the order of the forward pass, one for each row.
        hidden_size: Values of a row.
        dtype: The canonical type of the values (`headgate.steering.vectors.dtypes.narrowest`).
        payload: The rows, one after the other.
    """
    digest = hashlib.sha256(_CONTENT_PREFIX)
    names = " ".join([f"{layer}.{hook._value_}" for layer, hook in sites])
    digest.update(f"{dtype} {hidden_size} {len(sites)} {names}\n".encode())
    digest.update(payload)
    return digest.digest()


def weighted_sum(parts: Iterable[tuple[PhaseVectors | None, float]]) -> PhaseVectors | None:
    """Return the sum of vectors times scales, per site, in float32; None if it is zero everywhere.

    Scales are rounded to float32 and multiplied in first. The parts are added in the order of their content keys, so
    the result does not depend on the order they are given in. One part of scale 1 is returned as it is.

    Raises:
        OverflowError: If a sum is not finite in float32; the message names the site.
    """
    counted = [(vectors, scale) for vectors, scale in parts if vectors is not None and scale != 0]
    if not counted:
        return None
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    counted.sort(key=lambda part: (part[0].key, part[1]))
    sites = sort_sites({site for vectors, _ in counted for site in vectors.sites})
    ranks = {site: rank for rank, site in enumerate(sites)}
    total = np.zeros((len(sites), counted[0][0].hidden_size), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for vectors, scale in counted:
            rows = vectors.float32()
            total[[ranks[site] for site in vectors.sites]] += rows if scale == 1 else rows * np.float32(scale)
    largest = peaks(total, "float32")
    if not np.isfinite(largest).all():
        site = sites[int(np.flatnonzero(~np.isfinite(largest))[0])]
        raise OverflowError(f"the sum of the vectors at {site.name} is not finite in float32")
    return PhaseVectors.from_bytes(sites, total.tobytes(), "float32", total.shape[1], largest)


MAX_NAME = 256
"""Characters of a module's name, at most."""


def check_name(name: object, field: str) -> str:
    """Return `name` if it can be a module's.

    Raises:
        RequestError: Unless it is a printable text of 1 to 256 characters.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError(
            field, f"expected a module's name (printable, 1 to {MAX_NAME} characters), got {shown(name)}"
        )
    return name


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A named module and the scale to apply it with. Scale 0 adds nothing, but the name must exist all the same."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringSpec:
    """The vectors that one request, or one named module, steers with.

    Attributes:
        prefill: At positions of the prompt: base plus prefill tier.
        decode: At generated positions: base plus decode tier. The same object as `prefill` if they are equal.
        modules: Named modules that are added in both phases.
    """

    prefill: PhaseVectors | None = None
    decode: PhaseVectors | None = None
    modules: tuple[ModuleRef, ...] = ()

    @property
    def num_vectors(self) -> int:
        """Number of inline vectors, without those of the modules; phases that are alike count once."""
        prefill = len(self.prefill.sites) if self.prefill else 0
        if self.decode is None or (self.prefill and self.decode.key == self.prefill.key):
            return prefill
        return prefill + len(self.decode.sites)


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
