"""The SAEs of one engine core, and the programs that edits of their features become.

Registered SAEs are only read: rows of features are taken from mapped files when a request is accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.features.importing import open_coder, sae_site
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.gates.gate import is_reached
from headgate.steering.lru_cache import LruCache
from headgate.steering.programs.feature_edits import FeatureEdit, SaeFacts, check_edits, feature_entries, sae_key
from headgate.steering.programs.program import MAX_KEPT_BYTES, Entry, Program, bytes_of
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable

logger = logging.getLogger("headgate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sae:
    """A registered SAE.

    Attributes:
        name: Its name in requests.
        coder: Reads its features.
        site: Where it reads; an SAE writes there, too.
        sha256: Hex, of the files that it was published as.
        is_encoded: Whether workers have its weights, so that rows can become its reconstructions.
    """

    name: str
    coder: SparseCoder
    site: Site
    sha256: str
    is_encoded: bool = False

    @property
    def facts(self) -> SaeFacts:
        """Facts that requests are checked against."""
        coder, has_max_act = self.coder, self.coder.max_activations([0]) is not None
        sites = (self.site, *coder.write_sites) if coder.is_transcoder else (self.site,)
        return SaeFacts(sites, coder.num_features, coder.decision, has_max_act, self.is_encoded)

    def described(self) -> dict[str, object]:
        """Return plain values for the list of SAEs."""
        coder, facts = self.coder, self.facts
        return {
            "name": self.name,
            "site": self.site.name,
            "write_sites": [site.name for site in (facts.sites[1:] or facts.sites)],
            "width": coder.width,
            "num_features": facts.num_features,
            "activation": coder.kind.value,
            "k": coder.k,
            "norm": coder.norm.value,
            "decision": facts.decision,
            "has_max_act": facts.has_max_act,
            "is_encoded": facts.is_encoded,
            "format": coder.format,
            "model": coder.model,
            "source": str(coder.path),
            "sha256": self.sha256,
        }


def open_sae(name: str, path: Path, site: Site | None, steerable: Steerable, sha256: str | None = None) -> Sae:
    """Open an SAE for a model, and read one feature of it.

    Args:
        name: Its name in requests.
        path: Path of its file or folder.
        site: Where it acts; None if the files name it.
        steerable: The model.
        sha256: Hash of its files, where that was computed already: it takes a second for each gigabyte.

    Raises:
        FeatureFileError: If it cannot be read or does not fit the model.
        OSError: Likewise.
    """
    coder = open_coder(path, name=name, site=site)
    read_site = sae_site(coder)
    write_sites = coder.write_sites if coder.is_transcoder else ()
    missing = [found.name for found in (read_site, *write_sites) if found not in steerable.op_sites]
    if missing:
        declared = ", ".join(op_site.name for op_site in steerable.op_sites) or "none"
        raise FeatureFileError(
            f"{path}: no operations at {', '.join(missing)}, where the SAE acts; declared sites: {declared}; the "
            "operator declares them with --steering-op-sites, or by --saes NAME=PATH"
        )
    _check_order(path, read_site, write_sites)
    if coder.is_transcoder and not steerable.max_changes:
        raise FeatureFileError(
            f"{path}: a transcoder, for which this engine made no room when it started; it does with --sae-root, or "
            "with a transcoder among --saes"
        )
    if why := steerable.why_unread(read_site):
        raise FeatureFileError(f"{path}: {why}")
    for site, width in ((read_site, coder.width), *((each, coder.write_width) for each in write_sites or (read_site,))):
        if width != steerable.width(site):
            raise FeatureFileError(
                f"{path}: an SAE of width {width}; rows of {site.name} have {steerable.width(site)} values"
            )
    coder.rows([0])
    return Sae(name=name, coder=coder, site=read_site, sha256=sha256 or coder.source_sha256)


def _check_order(path: Path, read_site: Site, write_sites: Sequence[Site]) -> None:
    """Refuse a transcoder that writes where the forward has been when it reads."""
    for site in write_sites:
        if site == read_site or not is_reached(site, read_site):
            raise FeatureFileError(
                f"{path}: a transcoder that reads at {read_site.name} and writes at {site.name} cannot be used: it "
                "must write at later sites, and not from a layer's attention into the MLP beside it"
            )


class SaeRegistry:
    """SAEs by name, and the programs of edits. Any thread.

    Attributes:
        by_name: All SAEs: another object after each change.

    Args:
        dtype: The model's.
        max_per_site: Features of one phase at one site, at most.
    """

    def __init__(self, dtype: StoredType, max_per_site: int = 0) -> None:
        self._dtype: StoredType = dtype
        self._max_per_site = max_per_site
        self.by_name: Mapping[str, Sae] = {}
        self._made: LruCache[Program] = LruCache(MAX_KEPT_BYTES)
        """By edits and SAEs: many requests of a load change the same features."""

    def put(self, sae: Sae) -> None:
        """Register an SAE, in place of an earlier one of its name."""
        self.by_name = {**self.by_name, sae.name: sae}
        self._made.clear()

    def remove(self, name: str) -> None:
        """Forget an SAE, if it is there."""
        self.by_name = {other: sae for other, sae in self.by_name.items() if other != name}
        self._made.clear()

    def find(self, name: str) -> Sae | None:
        """Return the SAE of that name, if there is one."""
        return self.by_name.get(name)

    def all(self) -> list[Sae]:
        """Return all SAEs, in the order of their names."""
        return [sae for _, sae in sorted(self.by_name.items())]

    def names(self) -> list[dict[str, object]]:
        """Return the descriptions of all SAEs, each with its key among registered names as ``name``."""
        return [{**sae.described(), "name": sae_key(sae.name)} for sae in self.all()]

    def program(self, edits: Sequence[FeatureEdit]) -> Program | None:
        """Return the program of the edits of one phase; None if there are none. Reads the features' rows.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        if not edits:
            return None
        saes = self.by_name  # of this moment
        for edit in edits:
            if edit.sae not in saes:
                known = ", ".join(sorted(saes)) or "none"
                raise RequestError(edit.sae_at, f"unknown SAE {edit.sae!r}; registered: {known}")
        key = (*(edit.content for edit in edits), *(saes[name] for name in sorted({edit.sae for edit in edits})))
        if (earlier := self._made.find(key)) is not None:
            return earlier
        facts = {name: saes[name].facts for name in {edit.sae for edit in edits}}
        check_edits(edits, lambda edit: facts[edit.sae], self._max_per_site)
        changes = count()
        made = Program.from_entries(
            [
                entry
                for name, of_sae in groupby(edits, key=lambda edit: edit.sae)
                for entry in _entries(saes[name], list(of_sae), self._dtype, changes)
            ],
            self._dtype,
        )
        self._made.keep(key, made, bytes_of(made))
        return made

    def check_shared(self, edits: Iterable[FeatureEdit]) -> None:
        """Check that edits can act on everybody.

        Raises:
            RequestError: Naming an edit that reads a feature of a transcoder.
        """
        for edit in edits:
            sae = self.find(edit.sae)
            if sae is not None and sae.facts.is_transcoder and edit.reads:
                raise RequestError(
                    edit.where,
                    f"reads a feature of transcoder {edit.sae!r}, which cannot act on everybody: its change is kept "
                    "between the sites that it reads and writes in places that belong to requests. 'add' without "
                    "only_if_active, which reads nothing, can; give others in requests, or in a module that they name",
                )


def _entries(sae: Sae, edits: list[FeatureEdit], dtype: StoredType, changes: Iterator[int]) -> list[Entry]:
    try:
        return feature_entries(sae.coder, sae.site, edits, dtype, changes, is_encoded=sae.is_encoded)
    except (FeatureFileError, OSError) as error:
        raise RequestError(edits[0].sae_at, f"SAE {sae.name!r} cannot be read: {error}") from error


def warn_of_other_model(sae: Sae, model: str) -> None:
    """Log if an SAE says that it was trained on another model than the one that is served."""
    trained, served = (name.rstrip("/").rpartition("/")[2].lower() for name in (sae.coder.model or model, model))
    if trained != served:
        logger.warning("steering: SAE %s was trained on %s, and %s is served", sae.name, sae.coder.model, model)


NO_SAES = "this server takes no SAEs; the operator starts it with --saes or --sae-root"
