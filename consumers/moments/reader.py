"""Reading the moments in a root, all processes' files merged. Needs neither vLLM nor torch.

::

    moments = open_moments("moments")
    site = moments["12.post_mlp"]                      # both phases, every tag
    whitened = (rows - site.mean) @ site.whitening()
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Float64Array
from headgate.capture.schema.errors import CaptureFileError, RequestError, check_keys, shown
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site, sort_sites
from headgate.consumers.moments.entry import PHASES, MomentsEntry, MomentsKey, MomentsSettings
from headgate.consumers.moments.state_file import StoredMoments, merge_states, read_state, state_files

MIN_ROWS = 2
"""Rows without which there is no variance."""


class SiteMoments:
    """Moments of the rows of one site.

    Attributes:
        site: Name of the site.
        num_rows: Rows that count.
        num_skipped: Rows omitted at the beginning of requests.
        num_sinks: Rows omitted because they are longer than `max_norm`.
        num_not_finite: Rows omitted because they hold NaN or infinity.
        covariance_error: Bound of the spectral norm of the error of a sketch's covariance; 0 for a full covariance.
        kind: How covariance was kept: ``full``, ``sketch`` or ``none``.
    """

    def __init__(self, site: str, entry: MomentsEntry, settings: MomentsSettings) -> None:
        moments = entry.moments
        self._moments = moments
        self._norms = entry.norms
        self.site = site
        self.kind = settings.covariance
        self.num_rows = moments.num_rows
        self.num_skipped = entry.num_skipped
        self.num_sinks = entry.num_sinks
        self.num_not_finite = entry.num_not_finite
        self.covariance_error = 0.0 if moments.low_rank is None else moments.low_rank.error / self._divisor

    def __repr__(self) -> str:
        return f"<SiteMoments of {self.site}: {self.num_rows} rows, covariance {self.kind}>"

    @property
    def mean(self) -> Float64Array:
        """float64 ``[hidden]``; zeros without a row."""
        return self._moments.mean

    @property
    def variance(self) -> Float64Array:
        """float64 ``[hidden]``: unbiased, by element; NaN of fewer than two rows."""
        return self._scaled(self._moments.squares)

    @property
    def mean_norm(self) -> float | None:
        """The mean length of a row, exact but for rounding; None without a row."""
        return self._norms.mean

    def norm_quantile(self, share: float) -> float | None:
        """The length below which that share of the rows lies, within the sketch's relative error; None without a row.

        0 and 1 give the exact extremes.
        """
        return self._norms.quantile(share)

    def covariance(self) -> Float64Array:
        """float64 ``[hidden, hidden]``, unbiased; NaN of fewer than two rows.

        Of a sketch it has at most `rank` dimensions, and lies below the true one by at most `covariance_error`.

        Raises:
            ValueError: If no covariance was kept.
        """
        if self._moments.scatter is not None:
            return self._scaled(self._moments.scatter)
        rows = self.factor()
        return rows.T @ rows

    def factor(self) -> Float64Array:
        """float64 ``[rank, hidden]``: the rows whose products with themselves are the covariance of a sketch.

        Raises:
            ValueError: If covariance was not kept as a sketch.
        """
        if self._moments.low_rank is None:
            raise ValueError(f"{self.site}: there is no sketch of a covariance: covariance was {self.kind!r}")
        scale = np.sqrt(1 / self._divisor) if self.num_rows >= MIN_ROWS else np.nan
        rows: Float64Array = self._moments.low_rank.rows * scale
        return rows

    def spectrum(self) -> Float64Array:
        """The eigenvalues of the covariance, largest first: float64 ``[hidden]``, or ``[rank]`` of a sketch.

        Raises:
            ValueError: If no covariance was kept.
        """
        if self.kind == "full":
            values: Float64Array = np.maximum(np.linalg.eigvalsh(self.covariance())[::-1], 0.0)
        else:
            values = np.asarray(np.linalg.svd(self.factor(), compute_uv=False) ** 2, dtype=np.float64)
        return values

    def whitening(self, floor: float = 1e-6) -> Float64Array:
        """float64 ``[hidden, hidden]``, symmetric: what makes the covariance of centred rows the identity (ZCA).

        Args:
            floor: Eigenvalues below this share of the largest are raised to it.

        Raises:
            ValueError: If covariance is not a whole one, or there are fewer than two rows.
        """
        if self.kind != "full" or self.num_rows < MIN_ROWS:
            raise ValueError(f"{self.site}: {self.num_rows} rows, covariance {self.kind!r}; expected 2 or more, full")
        values, vectors = np.linalg.eigh(self.covariance())
        values = np.maximum(values, max(floor * values[-1], np.finfo(np.float64).tiny))
        whitening: Float64Array = (vectors / np.sqrt(values)) @ vectors.T
        return whitening

    def outliers(self, count: int) -> list[int]:
        """The elements of the largest mean squares, largest first: where a stream has its massive activations."""
        power = self.mean**2 + (self.variance if self.num_rows >= MIN_ROWS else 0.0)
        return [int(index) for index in np.argsort(power)[::-1][:count]]

    @property
    def _divisor(self) -> int:
        return max(self.num_rows - 1, 1)

    def _scaled(self, sums: Float64Array) -> Float64Array:
        return sums / self._divisor if self.num_rows >= MIN_ROWS else np.full_like(sums, np.nan)


class Moments:
    """Every moment in a root.

    Attributes:
        settings: What the state was made with.
        written_at: When the oldest of its files was written: ISO 8601, UTC.
        keys: Tag, site and phase of each entry, in the order of the forward pass.
    """

    def __init__(self, state: StoredMoments) -> None:
        self._entries = state.entries
        self.settings = state.settings
        self.written_at = state.written_at
        places = {site.name: place for place, site in enumerate(sort_sites({_site(key) for key in state.entries}))}
        self.keys: tuple[MomentsKey, ...] = tuple(
            sorted(state.entries, key=lambda key: (key.tag, places[key.site], PHASES.index(key.phase)))
        )

    def __iter__(self) -> Iterator[MomentsKey]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, site: Site | str) -> SiteMoments:
        """The moments of a site in both phases and under all tags; see `select`."""
        return self.select(site)

    def select(self, site: Site | str, *, phase: str | None = None, tag: str | None = None) -> SiteMoments:
        """Return the moments of a site, merged over what is not named.

        Args:
            site: ``"12.post_mlp"``, ``"final_norm"``, an alias, or a `Site`.
            phase: ``prefill`` or ``decode``; both if None.
            tag: All if None.

        Raises:
            KeyError: If there are none; the message lists what there is.
        """
        name = site.name if isinstance(site, Site) else Site.parse(site).name
        found = [key for key in self.keys if key.site == name and phase in (None, key.phase) and tag in (None, key.tag)]
        if not found:
            there = "; ".join(" ".join(key) for key in self.keys[:8]) or "nothing"
            raise KeyError(f"{name}, phase {phase or 'any'}, tag {tag or 'any'}: no such moments; there is {there}")
        if len(found) == 1:
            return SiteMoments(name, self._entries[found[0]], self.settings)
        merged = MomentsEntry(self.settings, name)
        for key in found:
            merged.merge(self._entries[key])
        return SiteMoments(name, merged, self.settings)


def open_moments(root: str | os.PathLike[str]) -> Moments:
    """Read the moments in a root, as they were last written; a server may be at work there.

    Raises:
        CaptureFileError: If there are none, or a file of them is damaged or does not belong to the others.
    """
    folder = Path(root).expanduser()
    try:
        state = merge_states((path, read_state(path)) for path in state_files(folder))
    except OSError as error:
        raise CaptureFileError(f"{folder}: {error}") from error
    if state is None:
        raise CaptureFileError(f"{folder}: there are no moments here (no file moments-N.safetensors)")
    return Moments(state)


def _site(key: MomentsKey) -> Site:
    return Site.parse(key.site)


QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
INCLUDED = ("mean", "variance", "covariance")
NUM_OUTLIERS = 5

_FIELDS = ("tag", "site", "phase", "include")


def report(root: Path, context: ReportContext) -> dict[str, Any]:
    """Describe the moments in a root: of what `context` allows, and of what its query asks for.

    Fields of the query: ``tag``, ``site``, ``phase``, and ``include``, some of `INCLUDED` with commas between them;
    ``covariance`` is sent of one site at a time.

    Raises:
        RequestError: Naming the field of the query that is wrong.
        CaptureFileError: If a file in the root is damaged.
    """
    query, included = _checked(context.query)
    if not root.is_dir() or not state_files(root):
        return {"written_at": None, "settings": None, "entries": [], "count": 0}
    moments = open_moments(root)
    keys = [key for key in moments if _is_wanted(key, query) and _is_allowed(key, context)]
    entries = [{**key._asdict(), **describe(moments, key, included)} for key in keys]
    settings = msgspec.to_builtins(moments.settings)
    return {"written_at": moments.written_at, "settings": settings, "entries": entries, "count": len(entries)}


def describe(moments: Moments, key: MomentsKey, included: tuple[str, ...] = ()) -> dict[str, Any]:
    """One entry in JSON values; numbers that need more rows than there are, are None."""
    found = moments.select(key.site, phase=key.phase, tag=key.tag)
    has_variance = found.num_rows >= MIN_ROWS
    variance = found.variance
    return {
        "num_rows": found.num_rows,
        "num_skipped": found.num_skipped,
        "num_sinks": found.num_sinks,
        "num_not_finite": found.num_not_finite,
        "mean_norm": found.mean_norm,
        "norm_quantiles": {f"{share:g}": found.norm_quantile(share) for share in QUANTILES},
        "norm_of_mean": float(np.linalg.norm(found.mean)),
        "total_variance": float(variance.sum()) if has_variance else None,
        "outliers": [
            {"index": index, "mean": float(found.mean[index]), "variance": _number(variance[index])}
            for index in found.outliers(NUM_OUTLIERS)
        ],
        **_arrays(found, included),
    }


def _arrays(found: SiteMoments, included: tuple[str, ...]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    if "mean" in included:
        arrays["mean"] = _packed(found.mean)
    if "variance" in included:
        arrays["variance"] = _packed(found.variance) if found.num_rows >= MIN_ROWS else None
    if "covariance" in included:
        kept = {"full": found.covariance, "sketch": found.factor}.get(found.kind)
        has_it = kept is not None and found.num_rows >= MIN_ROWS
        arrays["covariance"] = None
        if kept is not None and has_it:
            arrays["covariance"] = {"kind": found.kind, "error": found.covariance_error, **_packed(kept())}
    return arrays


def _packed(array: npt.NDArray[np.float64]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode("ascii")
    return {"dtype": "float64", "shape": list(array.shape), "data": data}


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _checked(query: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    check_keys(query, _FIELDS, "", "the query")
    wanted = dict(query)
    included = tuple(name for name in wanted.pop("include", "").split(",") if name)
    for name in included:
        if name not in INCLUDED:
            raise RequestError("include", f"unknown array {shown(name)}; known: {', '.join(INCLUDED)}")
    if "phase" in wanted and wanted["phase"] not in PHASES:
        raise RequestError("phase", f"unknown phase {shown(wanted['phase'])}; known: {', '.join(PHASES)}")
    if "site" in wanted:
        try:
            wanted["site"] = Site.parse(wanted["site"]).name
        except ValueError as error:
            raise RequestError("site", str(error)) from None
    elif "covariance" in included:
        raise RequestError("include", "covariance is sent of one site at a time: name a site, too")
    return wanted, included


def _is_wanted(key: MomentsKey, query: Mapping[str, str]) -> bool:
    return all(value == query.get(name, value) for name, value in key._asdict().items())


def _is_allowed(key: MomentsKey, context: ReportContext) -> bool:
    return context.allows_tag(key.tag) and context.allows_site(Site.parse(key.site))
