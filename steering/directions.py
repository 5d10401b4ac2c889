"""Steering vectors out of captured rows: what tells two sets of prompts apart, per site.

Rows are arrays ``[n, hidden]`` per site, as captured; torch tensors do as well. All arithmetic is in float64, and the
result is `PhaseVectors` (float32), to be passed as ``steering_vectors``, saved, or scaled. A positive scale leads from
the negative set to the positive one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.sites import Site
from headgate.steering.vectors import PhaseVectors

Float64Array = npt.NDArray[np.float64]

RowsBySite = Mapping[Site, Any]
"""Per site, an array or tensor ``[n, hidden]``."""


def mean_difference(positive: RowsBySite, negative: RowsBySite, *, normalize: bool = False) -> PhaseVectors:
    """The mean of the positive rows minus the mean of the negative ones, per site.

    Args:
        positive: Rows of the prompts that show what is wanted.
        negative: Rows of the others; the numbers of rows may differ.
        normalize: Scale every vector to length 1. Otherwise its length is the distance of the two means, so that
            scale 1 moves the one mean onto the other.

    Raises:
        ValueError: If the sites or widths differ, a set is empty, a value is not finite, or the means are equal.
    """
    directions = {}
    for site, (plus, minus) in _both(positive, negative).items():
        difference = plus.mean(axis=0) - minus.mean(axis=0)
        directions[site] = _unit(difference, site) if normalize else difference
    return _vectors(directions)


def pca(
    positive: RowsBySite,
    negative: RowsBySite,
    *,
    method: Literal["center", "diff"] = "center",
    normalize: bool = True,
) -> PhaseVectors:
    """The first principal component of contrast pairs, per site; row i of both sets is one pair.

    The sign is chosen so that more pairs have their positive member further along than the other way round; if as
    many, so that the mean of the positive rows is.

    Args:
        positive: One member of each pair.
        negative: The other, in the same order.
        method: ``"center"``: of the rows minus the mean of their pair: the direction in which the members of a pair
            lie apart. ``"diff"``: of the differences minus their mean: the direction in which pairs differ from
            each other in that; needs two pairs. Both as repeng computes ``pca_center`` and ``pca_diff``.
        normalize: Scale every vector to length 1. Otherwise its length is the distance of the two means along it.

    Raises:
        ValueError: As `mean_difference`; also if the sets are not of one length, or all differences are alike.
    """
    if method not in ("center", "diff"):
        raise ValueError(f"unknown method {method!r}; expected 'center' or 'diff'")
    directions = {}
    for site, (plus, minus) in _both(positive, negative).items():
        if len(plus) != len(minus):
            raise ValueError(f"{site.name}: {len(plus)} positive and {len(minus)} negative rows are not pairs")
        differences = plus - minus
        centred = differences - differences.mean(axis=0) if method == "diff" else differences
        direction = _oriented(_first_component(centred, differences, site), differences)
        gap = float(differences.mean(axis=0) @ direction)
        directions[site] = direction if normalize else direction * abs(gap)
    return _vectors(directions)


def _vectors(directions: Mapping[Site, Float64Array]) -> PhaseVectors:
    zero = [site.name for site, direction in directions.items() if not direction.any()]
    vectors = None if zero else PhaseVectors.from_rows(directions)
    if vectors is None or len(vectors.sites) != len(directions):
        raise ValueError(f"the two sets do not differ at {', '.join(zero) or 'some site, in float32'}")
    return vectors


def _both(positive: RowsBySite, negative: RowsBySite) -> dict[Site, tuple[Float64Array, Float64Array]]:
    if not positive or set(positive) != set(negative):
        apart = sorted(site.name for site in set(positive) ^ set(negative))
        raise ValueError(f"expected both sets at the same sites, at least one; only one of them has {apart}")
    pairs = {}
    for site in positive:
        plus, minus = _rows(positive[site], site, "positive"), _rows(negative[site], site, "negative")
        if plus.shape[1] != minus.shape[1]:
            raise ValueError(f"{site.name}: rows of {plus.shape[1]} and {minus.shape[1]} values")
        pairs[site] = plus, minus
    return pairs


def _rows(rows: Any, site: Site, which: str) -> Float64Array:
    if hasattr(rows, "detach"):  # a torch tensor, perhaps in bfloat16, which numpy does not know
        rows = rows.detach().cpu().double().numpy()
    array = np.asarray(rows, np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{which} rows at {site.name}: expected [n, hidden], not empty; got the shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{which} rows at {site.name}: row {int(np.argwhere(~np.isfinite(array))[0][0])} is not finite"
        )
    return array


def _unit(direction: Float64Array, site: Site) -> Float64Array:
    length = np.linalg.norm(direction)
    if length == 0:
        raise ValueError(f"the two sets do not differ at {site.name}")
    return direction / length


def _first_component(centred: Float64Array, differences: Float64Array, site: Site) -> Float64Array:
    """The first right singular vector of ``[n, hidden]``, by the smaller of its two Gram matrices."""
    scale = np.abs(differences).max()
    if np.abs(centred).max() <= 1e-12 * scale:
        raise ValueError(f"the rows have no principal component at {site.name}: their differences are all alike")
    rows = centred / np.abs(centred).max()
    if len(rows) <= rows.shape[1]:
        component = np.linalg.eigh(rows @ rows.T)[1][:, -1] @ rows
    else:
        component = np.linalg.eigh(rows.T @ rows)[1][:, -1]
    return _unit(component, site)


def _oriented(direction: Float64Array, differences: Float64Array) -> Float64Array:
    along = differences @ direction
    votes = int((along > 0).sum()) - int((along < 0).sum())
    if votes == 0:
        votes = int(np.sign(along.mean())) or int(np.sign(direction[np.abs(direction).argmax()]))
    return -direction if votes < 0 else direction
