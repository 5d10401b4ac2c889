"""Vectors as HTML in a notebook: norms by hook point and layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.notebook import HeatMap, Table, norms, page
from headgate.capture.schema.sites import HookPoint, Site

Tier = tuple[Sequence[Site], npt.NDArray[np.float32]]
"""Sites, and a row ``[hidden]`` for each: float32 ``[n, hidden]``."""

_LISTED = 10


def vectors_html(
    title: str,
    facts: Mapping[str, object],
    tiers: Mapping[str, Tier],
    scores: Mapping[Site, float] | None = None,
) -> str:
    """Return vectors as HTML of bounded length.

    Args:
        title: Their kind.
        facts: Values by name.
        tiers: Vectors by the name of their tier, which is shown if there are several.
        scores: AUROC by site; the largest are listed first.
    """
    lengths = {
        (tier, site): float(value)
        for tier, (sites, rows) in tiers.items()
        for site, value in zip(sites, norms(rows), strict=True)
    }
    order = sorted(lengths, key=lambda key: -scores[key[1]]) if scores else list(lengths)
    lines = []
    for tier, site in order[:_LISTED]:
        score = [f"{scores[site]:.4f}"] if scores else []
        lines.append([*([tier] if len(tiers) > 1 else []), site.name, f"{lengths[tier, site]:.5g}", *score])
    header = [*(["tier"] if len(tiers) > 1 else []), "site", "norm", *(["AUROC"] if scores else [])]
    return page(title, facts, Table(header, lines, len(order)), _heat_map(lengths, len(tiers) > 1))


def _heat_map(lengths: Mapping[tuple[str, Site], float], names_tiers: bool) -> HeatMap | None:
    """Return norms by hook point and layer; the final norm, which has no layer, is left out."""
    inner = {key: value for key, value in lengths.items() if key[1].hook is not HookPoint.FINAL_NORM}
    if not inner:
        return None
    layers = sorted({site.layer for _, site in inner})
    rows = list(dict.fromkeys((tier, site.hook) for tier, site in inner))
    values = np.full((len(rows), layers[-1] - layers[0] + 1), np.nan)
    for (tier, site), value in inner.items():
        values[rows.index((tier, site.hook)), site.layer - layers[0]] = value
    labels = [f"{tier} {hook.value}" if names_tiers else hook.value for tier, hook in rows]
    return HeatMap("norms", labels, (f"layer {layers[0]}", str(layers[-1])), values)
