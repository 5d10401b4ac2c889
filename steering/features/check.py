"""Whether an SAE belongs where it is said to: its figures on captured rows, and what else would fit better.

An SAE at a wrong site, with rows of another scale, or with a wrong threshold still gives numbers. It shows in L0 and in
the fraction of variance unexplained (FVU), which is above 1 where the reconstruction is worse than the mean row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.schema.results import StoredRequest, has_whole, whole_rows
from headgate.capture.schema.sites import Site
from headgate.steering.features.source_coder import CoderKind, Norm, SourceCoder
from headgate.steering.features.sparse_coder import SparseCoder, coder_of
from headgate.steering.features.tensors import Array, FeatureFileError

LARGEST_NORM = 10.0
"""Rows longer than this multiple of the usual length are left out: attention sinks, which SAEs are not trained on."""

BLOCK_BYTES = 128 << 20
"""Bytes of activations at a time."""


class Figures(NamedTuple):
    """Figures of a coder on rows.

    Attributes:
        l0: Mean number of active features of a row.
        fvu: Fraction of variance unexplained: squares of the error by squares of the distance to the mean row. None
            if the rows of the write site are not there, or the coder is one of several that write it.
        threshold: Threshold for kinds that select: mean over rows of the least activation that was selected.
        num_dead: Features that no row activates.
        largest: ``[F]``: the largest activation of each feature.
    """

    l0: float
    fvu: float | None
    threshold: float | None
    num_dead: int
    largest: npt.NDArray[np.float32]


def measure(coder: SparseCoder, rows: Array, written: Array | None) -> Figures:
    """Encode rows and decode them again.

    Args:
        coder: An SAE or transcoder.
        rows: ``[n, D]`` of its read site.
        written: ``[n, O]`` of its write site: for an SAE the same rows. None if they are not known.
    """
    largest = np.zeros(coder.num_features, np.float32)
    error, active, least = 0.0, 0, []
    for index in _blocks(len(rows), coder.num_features):
        activations = coder.encode(rows[index])
        is_active = activations > 0
        active += int(is_active.sum())
        np.maximum(largest, activations.max(axis=0), out=largest)
        if coder.kind.selects:
            found = np.where(is_active, activations, np.inf).min(axis=1)
            least.extend(found[np.isfinite(found)])
        if written is not None:
            error += float(np.square(written[index] - coder.decode(activations, rows[index]), dtype=np.float64).sum())
    total = 0.0 if written is None else float(np.square(written - written.mean(axis=0), dtype=np.float64).sum())
    return Figures(
        l0=active / len(rows),
        fvu=error / total if written is not None and total else None,
        threshold=float(np.mean(least)) if least else None,
        num_dead=int((largest == 0).sum()),
        largest=largest,
    )


def with_figures(source: SourceCoder, figures: Figures) -> SourceCoder:
    """Return the coder with the figures that single features need: largest activations, and a threshold of top-k."""
    changes: dict[str, Array] = {"max_activations": figures.largest.astype(np.float64)}
    if source.kind.selects and source.threshold is None and figures.threshold is not None:
        changes["threshold"] = np.full(len(source.bias), figures.threshold)
    return replace(source, **changes)  # type: ignore[arg-type]


def _blocks(num_rows: int, num_features: int) -> Sequence[slice]:
    size = max(1, BLOCK_BYTES // (4 * num_features))
    return [slice(start, start + size) for start in range(0, num_rows, size)]


class SiteSample(NamedTuple):
    """Rows of several sites, of the same tokens.

    Attributes:
        rows: ``[n, D]`` float32 of each site that was asked for and is there.
        num_left_out: Rows that begin a prompt, are not finite, or are very long at the first site.
    """

    rows: dict[Site, Array]
    num_left_out: int


def sample(root: str, site: Site, max_rows: int, others: Iterable[Site] | None = ()) -> SiteSample:
    """Read rows, spread evenly over the requests that have a site.

    Args:
        root: Root folder of the captures.
        site: The site, by whose rows it is decided what is left out.
        max_rows: How many rows about.
        others: Further sites, where every such request has them; None for all that there are.

    Raises:
        FeatureFileError: If the site was not captured, or no rows are left.
        CaptureFileError: If there is no such folder, or a file of it is damaged.
    """
    stored = [request for request in stored_requests(root) if request.num_rows]
    requests = [request for request in stored if site in request.sites]
    if not requests:
        there = ", ".join(dict.fromkeys(found.name for request in stored for found in request.sites)) or "none"
        raise FeatureFileError(f"{root}: {site.name} was not captured; sites that were: {there}")
    common = tuple(found for found in requests[0].sites if all(has_whole(request, found) for request in requests))
    wanted = dict.fromkeys([site, *(common if others is None else (other for other in others if other in common))])
    share = max(1, -(-max_rows // len(requests)))
    parts = [(request, _spread(request, share)) for request in requests]
    rows = {each: np.concatenate([whole_rows(request, each)[index] for request, index in parts]) for each in wanted}
    rows = {each: values.astype(np.float32, copy=False) for each, values in rows.items()}
    kept = _kept(rows[site])
    if not kept.any():
        raise FeatureFileError(f"{root}: no finite rows at {site.name} but those at position 0")
    num_first = sum(int(request.positions[0] == 0) for request in requests)
    return SiteSample({each: values[kept] for each, values in rows.items()}, int((~kept).sum()) + num_first)


def _spread(request: StoredRequest, share: int) -> npt.NDArray[np.int64]:
    """Rows of a request, evenly spread; not the one at position 0, whose token sees nothing before it."""
    index = np.flatnonzero(request.positions > 0)
    if len(index) <= share:
        return index
    return index[np.linspace(0, len(index) - 1, share).astype(np.int64)]


def _kept(rows: Array) -> npt.NDArray[np.bool_]:
    norms = np.linalg.norm(rows, axis=1).astype(np.float64)
    is_finite = np.isfinite(norms)
    median = np.median(norms[is_finite]) if is_finite.any() else 0.0
    kept: npt.NDArray[np.bool_] = is_finite & (norms > 0) & (norms <= LARGEST_NORM * median)
    return kept


L0_FACTOR = 2.0
"""L0 may be off by this factor: it depends on the text."""

FVU_FACTOR = 2.0
"""FVU may be above the declared one by this factor."""

_NUM_TRIED = 128
_CLEARLY_BETTER = 0.7
_WEIGHT_OF_L0 = 0.5


class CoderReport(msgspec.Struct, kw_only=True):
    """Findings on one coder.

    Attributes:
        name: Name of the coder.
        site: Where it reads.
        num_rows: Rows that it was judged by; `num_left_out` others begin prompts or are very long.
        l0: Mean number of active features; `declared_l0` is the source's own figure.
        fvu: Fraction of variance unexplained; `declared_fvu` is the source's own. None where it cannot be known.
        num_dead: Features that no row activates.
        threshold: The threshold that stands for top-k's selection on these rows.
        problems: Empty if all is well.
        findings: Changes with which the figures would be clearly better, the best first.
    """

    name: str
    site: str
    num_rows: int
    num_left_out: int
    l0: float
    declared_l0: float | None
    fvu: float | None
    declared_fvu: float | None
    num_dead: int
    threshold: float | None
    problems: list[str]
    findings: list[str]


def check(coder: SparseCoder, root: str, *, max_rows: int = 4096, max_fvu: float = 0.6) -> CoderReport:
    """Compare a coder's figures on captured rows with those it declares, and look for what would fit better.

    Args:
        coder: An SAE or transcoder; one with a read site.
        root: Root folder of the captured rows.
        max_rows: How many of them about.
        max_fvu: The largest FVU that is well where the source declares none.

    Raises:
        FeatureFileError: If it has no site, or its site was not captured.
        CaptureFileError: If the captures cannot be read.
    """
    site = site_of_reads(coder)
    found = sample(root, site, max_rows, coder.write_sites)
    _check_widths(coder, site, found)
    figures = measure(coder, found.rows[site], written_rows(coder, found))
    problems = _problems(coder, figures, max_fvu)
    return CoderReport(
        name=coder.name,
        site=site.name,
        num_rows=len(found.rows[site]),
        num_left_out=found.num_left_out,
        l0=figures.l0,
        declared_l0=coder.declared.get("l0"),
        fvu=figures.fvu,
        declared_fvu=coder.declared.get("fvu"),
        num_dead=figures.num_dead,
        threshold=figures.threshold,
        problems=problems,
        findings=_findings(coder, root) if problems else [],
    )


def site_of_reads(coder: SparseCoder) -> Site:
    """Return where a coder reads.

    Raises:
        FeatureFileError: If neither its files nor the caller name the site.
    """
    if coder.read_site is None:
        raise FeatureFileError(f"{coder.path}: {coder.name} has no site; name it: --site LAYER.HOOK, or NAME=PATH@SITE")
    return coder.read_site


def written_rows(coder: SparseCoder, found: SiteSample) -> Array | None:
    """Return the rows that a coder should reproduce; None if they are not there or others write them, too."""
    return found.rows.get(coder.write_sites[0]) if len(coder.write_sites) == 1 else None


def _check_widths(coder: SparseCoder, site: Site, found: SiteSample) -> None:
    widths = {**dict.fromkeys(coder.write_sites, ("writes", coder.write_width)), site: ("reads", coder.width)}
    for each, rows in found.rows.items():
        what, width = widths[each]
        if rows.shape[1] != width:
            raise FeatureFileError(
                f"{coder.name}: {what} rows of width {width}, but those captured at {each.name} have {rows.shape[1]}: "
                "another model, or another hook point"
            )


def _problems(coder: SparseCoder, figures: Figures, max_fvu: float) -> list[str]:
    problems = []
    declared = coder.declared.get("l0")
    if declared and not declared / L0_FACTOR <= figures.l0 <= declared * L0_FACTOR:
        problems.append(f"L0 is {figures.l0:.3g}, but {declared:.3g} is declared")
    if not figures.l0:
        problems.append("no feature is active")
    fvu = coder.declared.get("fvu")
    limit = max_fvu if fvu is None else FVU_FACTOR * fvu
    if figures.fvu is not None and not figures.fvu <= limit:
        problems.append(
            f"FVU is {figures.fvu:.3g}, "
            + (f"above {limit:.3g} (--max-fvu)" if fvu is None else f"but {fvu:.3g} is declared")
        )
    return problems


def _findings(coder: SparseCoder, root: str) -> list[str]:
    """Try other sites, factors, thresholds and norms on a few rows, and say what is clearly better."""
    site = site_of_reads(coder)
    few = sample(root, site, _NUM_TRIED, coder.write_sites if coder.is_transcoder else None)
    search = _Search(coder, few, site)
    tried = [*search.sites(), search.readings()]
    source = coder.weights.source
    if source.norm is Norm.NONE:
        usual = float(np.sqrt(coder.width) / np.linalg.norm(few.rows[search.site], axis=1).mean())
        tried.append(
            search.factors("rows times {:.3g} (--scale)", lambda x: replace(source, scale=source.scale * x), usual)
        )
    threshold = source.threshold
    if source.kind is CoderKind.JUMPRELU and threshold is not None:
        tried.append(search.factors("thresholds times {:.3g}", lambda x: replace(source, threshold=threshold * x)))
    now = search.score(coder)
    return [trial.text for trial in sorted(tried) if trial.score < _CLEARLY_BETTER * now.score][:4]


class _Trial(NamedTuple):
    """How well a reading of a source does: lower scores are better."""

    score: float
    text: str


class _Search:
    """Figures of other readings of a source, on few rows."""

    def __init__(self, coder: SparseCoder, few: SiteSample, site: Site) -> None:
        self.site = site
        self._coder, self._few = coder, few
        self._written = written_rows(coder, few)

    def score(self, coder: SparseCoder, text: str = "", rows: Array | None = None) -> _Trial:
        """Judge a coder, at its own site or on other rows, by FVU and by how far L0 is from the declared one."""
        if rows is None:
            figures = measure(coder, self._few.rows[self.site], self._written)
        else:
            figures = measure(coder, rows, rows)
        if not figures.l0:
            return _Trial(float("inf"), text)
        declared = self._coder.declared.get("l0")
        # FVU alone would praise low thresholds, with which everything is active.
        distance = _WEIGHT_OF_L0 * abs(float(np.log(figures.l0 / declared))) if declared else 0.0
        reported = f"L0 {figures.l0:.3g}" + ("" if figures.fvu is None else f", FVU {figures.fvu:.3g}")
        return _Trial((figures.fvu or 0.0) + distance, f"{text}: {reported}")

    def sites(self) -> Iterator[_Trial]:
        """Judge an SAE at every other site that was captured."""
        for other, rows in self._few.rows.items():
            if not self._coder.is_transcoder and other != self.site and rows.shape[1] == self._coder.width:
                yield self.score(self._coder, f"at the site {other.name}", rows)

    def readings(self) -> _Trial:
        """Judge other norms, and the decoder's bias taken off."""
        source = self._coder.weights.source
        changed: list[tuple[str, SourceCoder]] = []
        if not source.is_transcoder:
            changed += [(f"the norm {norm.value}", replace(source, norm=norm)) for norm in Norm if norm != source.norm]
        if not source.is_transcoder and not source.subtracts_bias:
            changed.append(("the decoder's bias taken off the rows", replace(source, subtracts_bias=True)))
        trials = [self.score(coder_of(other, self._coder.path), f"with {text}") for text, other in changed]
        return min(trials, default=_Trial(float("inf"), ""))

    def factors(self, text: str, change: Callable[[float], SourceCoder], *usual: float) -> _Trial:
        """Judge a source with a number changed by a factor: powers of two and `usual` ones, then closer to the best."""

        def tried(factor: float) -> tuple[_Trial, float]:
            return self.score(coder_of(change(factor), self._coder.path), "with " + text.format(factor)), factor

        trials = [tried(factor) for factor in (*(2.0**power for power in range(-8, 9)), *usual)]
        for step in (2**0.5, 2**0.25):
            best = min(trials)[1]
            trials += [tried(best / step), tried(best * step)]
        return min(trials)[0]
