"""Effective vectors of a phase: the sums that act on a token, and their one rounding to the model's dtype. Numpy only.

They are ``global_base + global_phase + request_base + request_phase``. Each sum is taken in fp32 and in one fixed
order, so that every rank, and every request that names the same parts, gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.sites import Site, sort_sites
from headgate.steering.vectors.content_keys import sum_key
from headgate.steering.vectors.dtypes import OVERFLOW, STORAGE, Float32Rows, Rows, StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors

LIMIT: dict[StoredType, float] = {
    "bfloat16": OVERFLOW["bfloat16"] / 2,
    "float16": OVERFLOW["float16"] / 2,
    "float32": float(np.finfo(np.float32).max) / 2,
}
"""What the global side of a sum, and a request's side, stay below in magnitude: then the sum is finite once rounded."""

_HEAD = 16
"""Values of a row that are looked at first: hardly ever are they all zero, and then the row is not."""


class Vectors(Protocol):
    """Vectors at sites, of which the key is known before they are; `PhaseVectors` are some."""

    @property
    def key(self) -> bytes:
        """Equal keys: equal vectors."""
        ...

    @property
    def sites(self) -> tuple[Site, ...]:
        """In the order of the forward pass, each once."""
        ...

    def float32(self) -> Float32Rows:
        """``[len(sites), hidden]``."""
        ...

    def stored_as(self, dtype: StoredType) -> Rows | None:
        """The same as stored, if they are stored in `dtype`: rounding them to it would change nothing."""
        ...


class WeightedSum:
    """The sum of scaled vectors, made when it is asked for: one that is in the pool already costs its key only.

    Scales are rounded to fp32 and multiplied in first; the parts are added in the order of their keys.

    Args:
        parts: Vectors and scales, at least one of them not 0; those of scale 0 count for nothing.

    Attributes:
        key: `headgate.steering.vectors.content_keys.sum_key` of the parts.
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
        """None: a sum is not stored."""
        return None

    def float32(self) -> Float32Rows:
        """``[len(sites), hidden]``: the sum, not kept."""
        ranks = {site: rank for rank, site in enumerate(self.sites)}
        total = np.zeros((len(ranks), self._parts[0][0].hidden_size), dtype=np.float32)
        for vectors, scale in self._parts:
            total[[ranks[site] for site in vectors.sites]] += vectors.float32() * np.float32(scale)
        return total


def sum_of(parts: Iterable[tuple[PhaseVectors | None, float]]) -> Vectors | None:
    """The sum of scaled vectors; None if nothing is left. Vectors that are alone with scale 1 come back as such."""
    counted = [(vectors, scale) for vectors, scale in parts if vectors is not None and scale != 0]
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    return WeightedSum(counted) if counted else None


def merge_over(under: PhaseVectors | None, over: PhaseVectors | None) -> PhaseVectors | None:
    """`under`, with the vectors of `over` in place of its own at the sites of `over`."""
    if under is None or over is None:
        return over or under
    rows: dict[Site, Float32Rows] = {}
    for vectors in (under, over):
        rows.update(zip(vectors.sites, vectors.float32(), strict=True))
    return PhaseVectors.from_rows(rows)


def peak(vectors: PhaseVectors | None) -> float:
    """The largest magnitude of any value; 0 if there is none."""
    return 0.0 if vectors is None else vectors.peak


def effective(
    parts: Sequence[Vectors | None], site_ids: Mapping[Site, int], dtype: StoredType
) -> tuple[Int64Array, Rows]:
    """What acts at the sites of one worker: the sum of `parts`, rounded once.

    Args:
        parts: In the order of addition; None adds nothing. At least one is not None.
        site_ids: The worker's sites and their indices; other sites are left out.
        dtype: The model's.

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
    """Round to the nearest value of `dtype`, ties to even; bfloat16 as uint16 bits.

    Raises:
        AssertionError: If a result is not finite.
    """
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits >> np.uint32(16)) & np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        stored: Rows = rounded.astype(STORAGE[dtype])
        is_finite = bool(np.isfinite(values).all()) and bool(((stored & 0x7F80) != 0x7F80).all())
    else:
        with np.errstate(over="ignore", under="ignore"):
            stored = values.astype(STORAGE[dtype], copy=False)
        is_finite = bool(np.isfinite(stored).all())
    if not is_finite:
        raise AssertionError(f"the sum of steering vectors is not finite in {dtype}")
    return stored


def is_zero(rows: Rows) -> BoolArray:
    """Which stored rows are all zero, of either sign: bool ``[n]``."""
    found = _are_zero(rows[:, :_HEAD])
    if found.any():
        found[found] = _are_zero(rows[found])
    return found


def _are_zero(rows: Rows) -> BoolArray:
    values = rows & 0x7FFF if rows.dtype == np.uint16 else rows
    return np.logical_not(values.any(axis=1))
