"""Steering vectors in their canonical form (`PhaseVectors`), and the sites and limits of the served model.

A set of vectors has one canonical form: its rows in the order of the forward pass, without rows of zeros, in the
first of bfloat16, float16 and float32 that holds every value exactly. So equal vectors have equal bytes and equal
content keys, whether they came as lists, arrays, tensors or packed bytes, and no value is ever rounded on the way. The
worker rounds once, to the model's dtype, after the last sum.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import HeatMap, TextTable, norms, page
from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import Columns, HookPoint, Site, SiteShape, site_map, sort_sites
from headgate.steering.vectors.dtypes import STORAGE, Float32Rows, Rows, StoredType, narrowest, peaks, widen

Tier = tuple[Sequence[Site], npt.NDArray[np.float32]]
"""Sites, and a row ``[hidden]`` for each: float32 ``[n, hidden]``."""

_LISTED = 10


def vectors_html(
    title: str,
    facts: Mapping[str, object],
    tiers: Mapping[str, Tier],
    scores: Mapping[Site, float] | None = None,
) -> str:
    """Return vectors as HTML of bounded length.

    Args:
        title: Their kind.
        facts: Values by name.
        tiers: Vectors by the name of their tier, which is shown if there are several.
        scores: AUROC by site; the largest are listed first.
    """
    lengths = {
        (tier, site): float(value)
        for tier, (sites, rows) in tiers.items()
        for site, value in zip(sites, norms(rows), strict=True)
    }
    order = sorted(lengths, key=lambda key: -scores[key[1]]) if scores else list(lengths)
    lines = []
    for tier, site in order[:_LISTED]:
        score = [f"{scores[site]:.4f}"] if scores else []
        lines.append([*([tier] if len(tiers) > 1 else []), site.name, f"{lengths[tier, site]:.5g}", *score])
    header = [*(["tier"] if len(tiers) > 1 else []), "site", "norm", *(["AUROC"] if scores else [])]
    return page(title, facts, TextTable(header, lines, len(order)), _heat_map(lengths, len(tiers) > 1))


def _heat_map(lengths: Mapping[tuple[str, Site], float], names_tiers: bool) -> HeatMap | None:
    """Return norms by hook point and layer; the final norm, which has no layer, is left out."""
    inner = {key: value for key, value in lengths.items() if key[1].hook is not HookPoint.FINAL_NORM}
    if not inner:
        return None
    layers = sorted({site.layer for _, site in inner})
    rows = list(dict.fromkeys((tier, site.hook) for tier, site in inner))
    values = np.full((len(rows), layers[-1] - layers[0] + 1), np.nan)
    for (tier, site), value in inner.items():
        values[rows.index((tier, site.hook)), site.layer - layers[0]] = value
    labels = [f"{tier} {hook.value}" if names_tiers else hook.value for tier, hook in rows]
    return HeatMap("norms", labels, (f"layer {layers[0]}", str(layers[-1])), values)


TIERS = ("base", "prefill", "decode")
"""Tiers of the global vectors in calls of the engine core; each travels as the prefill of a `SteeringWire`."""


class Directions(Protocol):
    """Reads directions of tokens, where a request names one in place of a vector's numbers."""

    def read(self, value: Mapping[Any, Any], where: str) -> tuple[Site, Float32Rows, float]:
        """Return the site of ``{"lens", "token", "at", "scale"}``, float32 ``[hidden]``, and the scale.

        Raises:
            RequestError: Naming the key that is wrong.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Steerable:
    """The sites of the served model that can be steered, and the limits of one request.

    Attributes:
        num_layers: Decoder layers of the whole model.
        hidden_size: Width of the residual stream.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: the model's, to which sums are rounded.
        sites: In the order of the forward pass.
        max_vectors: Vectors that one request may take: one for each site and phase, counted once if both phases
            are alike.
        op_sites: The sites of `sites` where operations act, in the order of the forward pass.
        max_ops_per_site: Operations of one request at one site and in one phase.
        max_sae_features: Features of SAEs that one request may change at one site in one phase; 0 if there are no SAEs.
        max_changes: Features that one request may read at one site and write at others, in one phase; 0 if there can be
            no transcoders.
        max_gates: Gates of one request; 0 if there can be none.
        max_rules: Rules that can be registered; 0 if there can be none.
        max_probe_units: Units of MLP probes at one site, and one for each probe; 0 if none can be read.
        knows_positions: Whether positions of generated rows are known when their step is launched. With speculative
            decoding they are not: drafts of the step before may be rejected.
        stages: The number of the pipeline stage of each op site; empty where there is one stage, and in front ends.
        shapes: Of the sites of `sites` whose rows are not those of the stream.
        gathered: Op sites of rows whose columns tensor-parallel ranks share, and that each of them gathers.
        directions: Reads directions of tokens; None where there are none, as in files.
    """

    num_layers: int
    hidden_size: int
    dtype: str
    sites: tuple[Site, ...]
    max_vectors: int
    op_sites: tuple[Site, ...] = ()
    max_ops_per_site: int = 0
    max_sae_features: int = 0
    max_changes: int = 0
    max_gates: int = 0
    max_rules: int = 0
    max_probe_units: int = 0
    knows_positions: bool = True
    stages: Mapping[Site, int] = field(default_factory=dict, repr=False)
    shapes: Mapping[Site, SiteShape] = field(default_factory=dict, repr=False)
    gathered: frozenset[Site] = frozenset()
    directions: Directions | None = field(default=None, repr=False, compare=False)
    ranks: Mapping[HookPoint, Sequence[int]] = field(init=False, repr=False, compare=False)
    """Per hook point, each layer's index into `sites`; -1 where it cannot be steered."""

    def __post_init__(self) -> None:
        ranks = {hook: [-1] * (1 if hook is HookPoint.FINAL_NORM else self.num_layers) for hook in HookPoint}
        for rank, (layer, hook) in enumerate(self.sites):
            ranks[hook][layer] = rank
        object.__setattr__(self, "ranks", ranks)

    def width(self, site: Site) -> int:
        """Return the width of the vectors of a site."""
        return self.shapes[site].width if site in self.shapes else self.hidden_size

    def shape(self, site: Site) -> SiteShape:
        """Return the shape of a site's rows."""
        return self.shapes.get(site) or SiteShape(self.hidden_size, self.dtype)

    def rank_width(self, site: Site) -> int:
        """Return the values of a row that certainly lie on one rank together; 0 where programs run on whole rows."""
        shape = self.shapes.get(site)
        return shape.head_size if shape is not None and shape.shard == "columns" and site not in self.gathered else 0

    def why_unread(self, site: Site) -> str | None:
        """Say why no probe, gate or SAE reads at a site; None if they do."""
        if not self.rank_width(site):
            return None
        return (
            f"{site.name} has its columns on several tensor-parallel ranks, and what reads rows needs whole ones; the "
            "operator names sites whose rows are gathered with --steering-gather-sites"
        )

    def is_in_one_stage(self, sites: Iterable[Site]) -> bool:
        """Whether some op sites lie on one pipeline stage."""
        return len({self.stages.get(site, 0) for site in sites}) < 2

    @property
    def row_size(self) -> int:
        """The width that every vector is stored with: that of the widest site. Others are followed by zeros."""
        return max((self.hidden_size, *(shape.width for shape in self.shapes.values())))


def within(row: npt.NDArray[Any], columns: Columns, width: int) -> npt.NDArray[Any]:
    """Return a row of `width` values that is zero outside of `columns`.

    Args:
        row: Of that width, or as wide as `columns` are together.
        columns: Empty for all.
        width: Of the site's rows.
    """
    if not columns:
        return row
    found, at = np.zeros(width, row.dtype), 0
    for start, stop in columns:
        found[start:stop] = row[start:stop] if len(row) == width else row[at : at + stop - start]
        at += stop - start
    return found


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
        try:
            with np.errstate(over="ignore"):
                stacked = np.stack([np.asarray(rows[site], np.float64) for site in sites]).astype(np.float32)
        except OverflowError as error:
            raise ValueError("has a number that does not fit float32") from error
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

    def _repr_html_(self) -> str:
        """Return them as HTML for a notebook: norms by site."""
        facts = {
            "vectors": f"{len(self.sites)} of {self.hidden_size} values, stored as {self.dtype}",
            "largest value": f"{self.peak:.5g}",
            "content key": self.key.hex(),
        }
        return vectors_html("PhaseVectors", facts, {"": (self.sites, self.float32())})

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

    def first_beyond(self, limit: float) -> Site | None:
        """Return the first site whose vector has a value of magnitude `limit` or above; None if none has."""
        if self.peak < limit:
            return None
        over = np.flatnonzero(peaks(self.rows, self.dtype) >= limit)
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


def check_name(name: object, field: str, of: str = "a module") -> str:
    """Return `name` if it can be that of a module, or of what else is registered.

    Raises:
        RequestError: Unless it is a printable text of 1 to 256 characters.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise RequestError(field, f"expected {of}'s name (printable, 1 to {MAX_NAME} characters), got {shown(name)}")
    return name
