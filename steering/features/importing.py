"""Sources of SAEs as users name them; finding out which format one is of, and reading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from headgate.capture.files.reading import refusing
from headgate.capture.schema.sites import Site
from headgate.steering.features import canonical
from headgate.steering.features.formats import (
    circuit_tracer,
    dictionary_learning,
    gemma_scope,
    linear_top_k,
    openmoss,
    saelens,
    sparsify,
    torch_files,
)
from headgate.steering.features.source_coder import Hints, SourceCoder
from headgate.steering.features.sparse_coder import SparseCoder, coder_of
from headgate.steering.features.tensors import FeatureFileError

FORMATS: dict[str, ModuleType] = {
    "headgate": canonical,
    "saelens": saelens,
    "gemma_scope": gemma_scope,
    "sparsify": sparsify,
    "dictionary_learning": dictionary_learning,
    "openmoss": openmoss,
    "linear_top_k": linear_top_k,
    "circuit_tracer": circuit_tracer,
    "torch_files": torch_files,
}
"""Readers by name, in the order in which they are asked whether a source is theirs."""


class SaeSource(NamedTuple):
    """An SAE as the configuration names it: a file or folder, and its site unless its files name it."""

    path: Path
    site: Site | None

    @classmethod
    def parse(cls, text: str) -> SaeSource:
        """Read ``PATH`` or ``PATH@SITE``."""
        path, separator, name = text.rpartition("@")
        try:
            return cls(Path(path), Site.parse(name)) if separator else cls(Path(text), None)
        except ValueError:  # an @ of the path's own
            return cls(Path(text), None)


def sae_site(coder: SparseCoder) -> Site:
    """Return where an SAE reads and writes, or a transcoder reads.

    Raises:
        FeatureFileError: If neither its files nor the source name the site.
    """
    if coder.read_site is None:
        raise FeatureFileError(f"{coder.path}: has no site; name it, such as --saes NAME=PATH@12.post_mlp")
    return coder.read_site


def open_coder(path: Path, *, name: str | None = None, site: Site | None = None) -> SparseCoder:
    """Open an imported file, or a source of any format as it was downloaded; its weights are not read.

    Args:
        path: A file or folder. Single features are read fastest from a file of ``headgate sae import``.
        name: Replaces the name given at import; other sources are named after their path.
        site: An SAE's site, in place of the one that the files name.

    Raises:
        FeatureFileError: If it is of no known format, or damaged, or cannot be used.
    """
    return coder_of(read_source(path, Hints(site=site)), path, name)


def read_source(path: Path, hints: Hints, format_name: str | None = None) -> SourceCoder:
    """Read an SAE or transcoder of any known format.

    Args:
        path: A file or folder.
        hints: What the files do not say.
        format_name: One of `FORMATS`; found out if None.

    Raises:
        FeatureFileError: If it is of none, or damaged, or cannot be used.
    """
    if not path.exists():
        raise FeatureFileError(f"{path}: no such file or folder")
    if format_name is not None and format_name not in FORMATS:
        raise FeatureFileError(f"--format: unknown {format_name!r}; known: {', '.join(FORMATS)}")
    with refusing(path, FeatureFileError, "damaged, or not as its format has it"):
        found = format_name or next((known for known, reader in FORMATS.items() if reader.claims(path)), None)
        if found is None:
            raise FeatureFileError(
                f"{path}: of no known format ({', '.join(FORMATS)}). Pickled files (.npy of a dictionary, .pkl) can "
                "run code and are not read: save their tensors with safetensors where they were made"
            )
        coder: SourceCoder = FORMATS[found].read(path, hints)
        return _with_hints(coder, hints)


def _with_hints(coder: SourceCoder, hints: Hints) -> SourceCoder:
    where = coder.encoder.where
    if hints.site is not None and hints.site != coder.read_site:
        if coder.is_transcoder:
            raise FeatureFileError(f"{where}: a transcoder, whose sites the source must tell; no --site")
        coder = replace(coder, read_site=hints.site, write_sites=())
    if hints.threshold is not None:
        if not coder.kind.selects:
            raise FeatureFileError(f"{where}: {coder.kind.value} takes no --threshold; it stands for top-k's selection")
        coder = replace(coder, threshold=np.full(len(coder.bias), hints.threshold))
    return coder
