"""SAEs as the configuration names them: their files, their sites, and whether they can be used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from headgate.capture.schema.sites import Site
from headgate.steering.features.importing import open_coder
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError


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


@lru_cache(maxsize=1024)
def sites_of(source: str) -> tuple[Site, ...]:
    """Return the sites of an SAE as `SaeSource` is written: where it reads, and where it writes if it is a transcoder.

    Raises:
        FeatureFileError: If the files cannot be read, or neither they nor the source name the read site.
        OSError: Likewise.
    """
    path, site = SaeSource.parse(source)
    coder = open_coder(path, site=site)
    return (sae_site(coder), *coder.write_sites) if coder.is_transcoder else (sae_site(coder),)


def why_not_encoded(coder: SparseCoder, hidden_size: int) -> str | None:
    """Say why an SAE cannot reconstruct a model's rows exactly; None if it can."""
    if coder.is_transcoder or coder.weights.source.skip is not None:
        return "is a transcoder, which reconstructs the rows of another site; SAEs can be encoded"
    if coder.kind.selects:
        return (
            f"is of the kind {coder.kind.value}: it selects among all features of a row, which is not computed, and a "
            "threshold in its place would be inexact; relu, jumprelu and gated SAEs can be encoded"
        )
    if coder.width != hidden_size:
        return f"has the width {coder.width}; rows of the model have {hidden_size} values"
    return None


def sae_site(coder: SparseCoder) -> Site:
    """Return where an SAE reads and writes, or a transcoder reads.

    Raises:
        FeatureFileError: If neither its files nor the source name the site.
    """
    if coder.read_site is None:
        raise FeatureFileError(f"{coder.path}: has no site; name it, such as --saes NAME=PATH@12.post_mlp")
    return coder.read_site


def cross_stages(sites: Sequence[Site]) -> str:
    """Return why a transcoder whose sites lie on several pipeline stages is refused; `sites` as of `transcoders`."""
    return (
        f"a transcoder that reads at {sites[0].name} and writes at {', '.join(site.name for site in sites[1:])} cannot "
        "be used here: these sites are on different stages of the pipeline, and what a feature changes does not travel "
        "from one to the next"
    )
