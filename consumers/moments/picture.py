"""A picture of moments: how long rows are by layer, and how their variance is spread over directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site
from headgate.consumers.moments.reader import MIN_ROWS, Moments, SiteMoments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SPECTRA = 6
"""Sites whose spectra are drawn: evenly spaced ones of those there are."""


def draw(moments: Moments, tag: str | None = None) -> Figure:
    """Return a matplotlib figure: norms (5 to 95 %, and the median) by layer for each hook point, and spectra.

    Phases are merged, and so are tags unless one is named. A spectrum shows the share of the variance that lies outside
    of the k largest directions; it is left out where no covariance was kept.

    Raises:
        ConfigError: If matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"matplotlib is needed: pip install 'headgate[plot]' ({error})") from error
    sites = [Site.parse(name) for name in dict.fromkeys(key.site for key in moments if tag in (None, key.tag))]
    found = {site: moments.select(site, tag=tag) for site in sites}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_norms(left, {site: one for site, one in found.items() if one.num_rows})
    _draw_spectra(right, [one for one in found.values() if one.num_rows >= MIN_ROWS and one.kind != "none"])
    return figure


def _draw_norms(axes: Any, found: dict[Site, SiteMoments]) -> None:
    for hook in dict.fromkeys(site.hook for site in found):
        of_hook = {site.layer: one for site, one in found.items() if site.hook is hook}
        layers = list(of_hook)
        low, middle, high = ([one.norm_quantile(share) for one in of_hook.values()] for share in (0.05, 0.5, 0.95))
        (line,) = axes.plot(layers, middle, marker="o", markersize=3, label=hook.value)
        axes.fill_between(layers, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="layer", ylabel="norm of a row: median, 5 to 95 %", yscale="log", title="norms")
    if found:
        axes.legend()


def _draw_spectra(axes: Any, found: list[SiteMoments]) -> None:
    evenly = np.linspace(0, len(found) - 1, MAX_SPECTRA if found else 0)
    chosen = sorted({round(float(index)) for index in evenly})
    for index in chosen:
        one = found[index]
        values = one.spectrum()
        total = float(one.variance.sum())
        if total > 0:
            left_out = np.maximum(1 - np.cumsum(values) / total, 1e-6)
            axes.plot(np.arange(1, len(values) + 1), left_out, label=one.site)
    axes.set(xlabel="directions", ylabel="share of variance outside of them", xscale="log", yscale="log")
    axes.set(title="covariance" if found else "no covariance was kept")
    if chosen:
        axes.legend()
