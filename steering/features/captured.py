"""Captured rows that an SAE is judged by: a sample at its sites, without those that no SAE is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.captures import StoredRequest
from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.schema.sites import Site
from headgate.steering.features.measuring import LARGEST_NORM
from headgate.steering.features.tensors import Array, FeatureFileError


class Sample(NamedTuple):
    """Rows of several sites, of the same tokens.

    Attributes:
        rows: ``[n, D]`` float32 of each site that was asked for and is there.
        num_left_out: Rows that begin a prompt, are not finite, or are very long at the first site.
    """

    rows: dict[Site, Array]
    num_left_out: int


def sample(root: str, site: Site, max_rows: int, others: Iterable[Site] | None = ()) -> Sample:
    """Read rows, spread evenly over the requests that have a site.

    Args:
        root: Of the captures.
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
    common = tuple(found for found in requests[0].sites if all(found in request.sites for request in requests))
    wanted = dict.fromkeys([site, *(common if others is None else (other for other in others if other in common))])
    share = max(1, -(-max_rows // len(requests)))
    parts = [(request, _spread(request, share)) for request in requests]
    rows = {each: np.concatenate([request.numpy(each)[index] for request, index in parts]) for each in wanted}
    rows = {each: values.astype(np.float32, copy=False) for each, values in rows.items()}
    kept = _kept(rows[site])
    if not kept.any():
        raise FeatureFileError(f"{root}: no finite rows at {site.name} but those at position 0")
    num_first = sum(int(request.positions[0] == 0) for request in requests)
    return Sample({each: values[kept] for each, values in rows.items()}, int((~kept).sum()) + num_first)


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
