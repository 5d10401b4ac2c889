"""Moments as the answer of ``GET /v1/capture/moments``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site
from headgate.consumers.moments.entry import PHASES, MomentsKey
from headgate.consumers.moments.reader import MIN_ROWS, Moments, SiteMoments, open_moments
from headgate.consumers.moments.state_file import state_files

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
    unknown = next((name for name in query if name not in _FIELDS), None)
    if unknown is not None:
        raise RequestError(unknown, f"unknown field; known: {', '.join(_FIELDS)}")
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
