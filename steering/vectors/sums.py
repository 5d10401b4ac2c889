"""Effective vectors of a phase: the sums that act on a token, and their one rounding to the model's dtype. Numpy only.

The effective vectors are ``global_base + global_phase + request_base + request_phase``. Each sum is taken in fp32 and
in one fixed order, so that every rank, and every request that names the same parts, gets the same bits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.sites import Site, sort_sites
from headgate.steering.vectors.dtypes import OVERFLOW, STORAGE, Float32Rows, Rows, StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors

LIMIT: dict[StoredType, float] = {
    "bfloat16": 2.0**28,
    "float16": OVERFLOW["float16"] / 2,
    "float32": 2.0**28,
}
"""Magnitude that the global vectors, and a request's, must stay below: their sum is then finite once rounded.

Rows of models are far smaller. Larger changes would add up over the sites of a model, and be multiplied in its layers,
until they leave the range of float32. What is not a number then stays in blocks of the KV cache, and attention on a CPU
multiplies it by 0 for requests that have these blocks next: no client may do that to others.
"""

LARGEST_NUMBER = float(np.finfo(np.float32).max) / 2
"""Magnitude that scales must stay below, and values of features."""

MAX_STRENGTH = 2.0**20
"""Largest factor by which gates and controllers multiply such vectors: the products stay in that range as well."""

_BFLOAT16_OVERFLOW = 0x7F7F8000
"""Bits of the smallest float32 that rounds to infinity in bfloat16."""

BLOCK = 1 << 14
"""Values that are rounded together, which stay in a processor's cache."""

_HEAD = 16
"""Values of a row that are compared with zero first; in nearly every row that is not zero, one of them is not."""

_SUM_PREFIX = b"headgate sum\n"
"""Keeps the keys of sums apart from those of vectors (`headgate.steering.vectors.phase_vectors.content_key`)."""


class Vectors(Protocol):
    """Vectors at sites whose content key is known before their values are computed, such as `PhaseVectors`."""

    @property
    def key(self) -> bytes:
        """The content key: vectors with equal keys are equal."""
        ...

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites in the order of the forward pass, each once."""
        ...

    def float32(self) -> Float32Rows:
        """Return the values, ``[len(sites), hidden]``."""
        ...

    def stored_as(self, dtype: StoredType) -> Rows | None:
        """Return the rows as stored if they are stored in `dtype`, where rounding would change nothing; else None."""
        ...


class WeightedSum:
    """The sum of scaled vectors, computed when it is asked for: a sum that is in the pool already costs its key only.

    Scales are rounded to fp32 and multiplied in first; the parts are added in the order of their content keys.

    Args:
        parts: Vectors and scales, at least one scale not 0; parts of scale 0 are left out.

    Attributes:
        key: `sum_key` of the parts.
    """

    def __init__(self, parts: Iterable[tuple[PhaseVectors, float]]) -> None:
        self._parts = sorted((part for part in parts if part[1] != 0), key=lambda part: (part[0].key, part[1]))
        key = sum_key((vectors.key, scale) for vectors, scale in self._parts)
        if key is None:
            raise AssertionError("a sum without parts")
        self.key: bytes = key

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """Sites of any part, in the order of the forward pass."""
        return sort_sites({site for vectors, _ in self._parts for site in vectors.sites})

    def stored_as(self, dtype: StoredType) -> Rows | None:
        """Return None: a sum is not stored."""
        return None

    def float32(self) -> Float32Rows:
        """Compute the sum, ``[len(sites), hidden]``; it is not kept."""
        ranks = {site: rank for rank, site in enumerate(self.sites)}
        total = np.zeros((len(ranks), self._parts[0][0].hidden_size), dtype=np.float32)
        for vectors, scale in self._parts:
            total[[ranks[site] for site in vectors.sites]] += vectors.float32() * np.float32(scale)
        return total


def sum_key(parts: Iterable[tuple[bytes, float]]) -> bytes | None:
    """Return the content key of a weighted sum, from the content keys of its parts alone; None if no part is left.

    The order of the parts does not matter, and parts of scale 0 are left out. One part of scale 1 has its own key.
    Sums of equal value that were put together from different parts have different keys: they then share nothing,
    which costs memory and never correctness.
    """
    counted = sorted(part for part in parts if part[1] != 0)
    if not counted:
        return None
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    digest = hashlib.sha256(_SUM_PREFIX)
    for key, scale in counted:
        digest.update(key + struct.pack("<d", scale))
    return digest.digest()


def sum_of(parts: Iterable[tuple[PhaseVectors | None, float]]) -> Vectors | None:
    """Return the sum of scaled vectors: None if there are none, the vectors themselves if alone with scale 1."""
    counted = [(vectors, scale) for vectors, scale in parts if vectors is not None and scale != 0]
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    return WeightedSum(counted) if counted else None


def merge_over(under: PhaseVectors | None, over: PhaseVectors | None) -> PhaseVectors | None:
    """Return `under` with the vectors of `over` in place of its own at the sites of `over`."""
    if under is None or over is None:
        return over or under
    rows: dict[Site, Float32Rows] = {}
    for vectors in (under, over):
        rows.update(zip(vectors.sites, vectors.float32(), strict=True))
    return PhaseVectors.from_rows(rows)


def without(vectors: PhaseVectors | None, sites: Collection[Site]) -> PhaseVectors | None:
    """Return `vectors` without those at `sites`; None if nothing is left."""
    if vectors is None or not sites:
        return vectors
    kept = zip(vectors.sites, vectors.float32(), strict=True)
    rows = {site: row for site, row in kept if site not in sites}
    return PhaseVectors.from_rows(rows) if rows else None


def too_large(vectors: PhaseVectors, dtype: StoredType) -> str | None:
    """Return why these vectors cannot steer a model of this element type; None if they can."""
    limit = LIMIT[dtype]
    if (over := vectors.first_beyond(limit)) is not None:
        return (
            f"the vector at {over.name} has a value too large for the model's {dtype}: all must stay below {limit:.4g}"
        )
    if dtype == "float16":  # which ends so soon that what sites add in one stream must be summed up
        together = float(np.abs(vectors.float32()).max(axis=1).sum())
        if not together < limit:
            return (
                f"the largest values of the vectors at all sites add up to {together:.4g}: in a float16 model they "
                f"must stay below {limit:.4g}; use smaller vectors or fewer sites, or serve the model in bfloat16"
            )
    return None


def peak(vectors: PhaseVectors | None) -> float:
    """Return the largest magnitude of any value; 0 for None."""
    return 0.0 if vectors is None else vectors.peak


def effective(
    parts: Sequence[Vectors | None], site_ids: Mapping[Site, int], dtype: StoredType
) -> tuple[Int64Array, Rows]:
    """Return the vectors that act at the sites of one worker: the sum of `parts`, rounded once.

    Args:
        parts: In the order of addition; None adds nothing. At least one is not None.
        site_ids: The worker's sites and their indices; other sites are left out.
        dtype: The model's element type.

    Returns:
        Ascending site indices, int64 ``[n]``, and the rows, ``[n, hidden]`` as stored.

    Raises:
        AssertionError: If a sum is not finite in `dtype`; `LIMIT` is checked where vectors come in.
    """
    present = [part for part in parts if part is not None]
    owned = [[(site_ids[s], rank) for rank, s in enumerate(part.sites) if s in site_ids] for part in present]
    ids = np.array(sorted({site_id for pairs in owned for site_id, _ in pairs}), dtype=np.int64)
    first = present[0]
    if len(present) == 1 and len(ids) == len(first.sites) and [site_id for site_id, _ in owned[0]] == ids.tolist():
        stored = first.stored_as(dtype)
        return ids, round_to(first.float32(), dtype) if stored is None else stored
    summands = [part.float32() for part in present]
    total = np.zeros((len(ids), summands[0].shape[1]), dtype=np.float32)
    for rows, pairs in zip(summands, owned, strict=True):
        if pairs:
            chosen, ranks = np.array(pairs, dtype=np.int64).T
            total[np.searchsorted(ids, chosen)] += rows[ranks]
    return ids, round_to(total, dtype)


def round_to(values: Float32Rows, dtype: StoredType) -> Rows:
    """Round values to the nearest of `dtype`, ties to even; bfloat16 as uint16 bits.

    Raises:
        AssertionError: If a result is not finite.
    """
    if dtype == "bfloat16":
        stored, is_finite = _round_to_bfloat16(np.ascontiguousarray(values))
    else:
        with np.errstate(over="ignore", under="ignore"):
            stored = values.astype(STORAGE[dtype], copy=False)
        is_finite = bool(np.isfinite(stored).all())
    if not is_finite:
        raise AssertionError(f"the sum of steering vectors is not finite in {dtype}")
    return stored


def _round_to_bfloat16(values: Float32Rows) -> tuple[Rows, bool]:
    """Return rounded values as bits, and whether all are finite."""
    bits = values.reshape(-1).view(np.uint32)
    stored, is_finite = np.empty(values.shape, STORAGE["bfloat16"]), True
    flat = stored.reshape(-1)
    for start in range(0, len(bits), BLOCK):  # Arrays of the size of all would be fetched from the system each time.
        part = bits[start : start + BLOCK]
        rounded = (part >> np.uint32(16)) & np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += part
        rounded >>= np.uint32(16)
        flat[start : start + BLOCK] = rounded
        # Magnitudes order as their bits do; infinity and NaN lie above all that round to something finite.
        is_finite &= int((part & np.uint32(0x7FFFFFFF)).max()) < _BFLOAT16_OVERFLOW
    return stored, is_finite


def is_zero(rows: Rows) -> BoolArray:
    """Return which stored rows are all zero, of either sign: bool ``[n]``."""
    if rows.size <= BLOCK:  # as fast as to look for others
        return _are_zero(rows)
    found = _are_zero(rows[:, :_HEAD])
    if found.any():
        found[found] = _are_zero(rows[found])
    return found


def _are_zero(rows: Rows) -> BoolArray:
    if rows.dtype == np.uint16:
        found: BoolArray = np.bitwise_or.reduce(rows, axis=1) & 0x7FFF == 0
        return found
    return np.logical_not(rows.any(axis=1))
