"""A file of vectors described: its format, sites, norms and checksum; and the file that is imported from it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from headgate.steering.files.vector_files import VectorFile, format_of, load
from headgate.steering.files.vector_source import VectorSource

_BLOCK = 1 << 20


class VectorAt(msgspec.Struct, frozen=True, kw_only=True):
    """One vector.

    Attributes:
        tier: ``vectors``, ``prefill_vectors`` or ``decode_vectors``.
        site: Where it acts.
        norm: Its length.
        peak: The largest magnitude of a value.
    """

    tier: str
    site: str
    norm: float
    peak: float


class VectorReport(msgspec.Struct, frozen=True, kw_only=True):
    """A file of vectors.

    Attributes:
        file: The path.
        format: One of `headgate.steering.files.vector_files.FORMATS`.
        sha256: Of the whole file, hex.
        dtype: Element type in the file; of a file of headgate, the narrowest that holds all values.
        hidden_size: Values of a vector.
        vectors: In the order of the forward pass, tier by tier.
        metadata: Notes of the file, and what it tells.
    """

    file: str
    format: str
    sha256: str
    dtype: str
    hidden_size: int
    vectors: list[VectorAt]
    metadata: dict[str, str]


def describe(source: VectorSource) -> VectorReport:
    """Describe a file.

    Raises:
        VectorFileError: As `load`.
        OSError: If it cannot be read.
    """
    name, file = format_of(source), _loaded(source)
    tiers = file.tiers()
    told = file.metadata.get("dtype") if name == file.metadata.get("format") else None
    vectors = [
        VectorAt(tier=label, site=site.name, norm=float(np.linalg.norm(row)), peak=float(np.abs(row).max()))
        for label, tier in tiers.items()
        for site, row in zip(tier.sites, tier.float32().astype(np.float64), strict=True)
    ]
    return VectorReport(
        file=str(source.path),
        format=name,
        sha256=_sha256(source.path),
        dtype=told or ", ".join(sorted({tier.dtype for tier in tiers.values()})),
        hidden_size=next(iter(tiers.values())).hidden_size,
        vectors=vectors,
        metadata=dict(file.metadata),
    )


def imported(source: VectorSource) -> VectorFile:
    """Return the content of a file, with the source's name and checksum in the metadata.

    Raises:
        VectorFileError: As `load`.
        OSError: If it cannot be read.
    """
    file = _loaded(source)
    about = {"format": format_of(source), **file.metadata}
    about |= {"source": source.path.name, "source_sha256": _sha256(source.path)}
    return replace(file, metadata=about)


def _loaded(source: VectorSource) -> VectorFile:
    return load(source.path, **{key: value for key, value in source._asdict().items() if key != "path"})


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
