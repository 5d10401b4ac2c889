"""``headgate moments show ROOT``: the moments in a root as a table, as JSON or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.schema.errors import ConfigError, HeadgateError
from headgate.capture.schema.sites import Site
from headgate.consumers.moments.reader import MIN_ROWS, Moments, SiteMoments, describe, open_moments

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


MAX_WIDTH = 1000
"""Characters in a line of the table, at most."""

app = typer.Typer(help="Look at moments of captured rows.", no_args_is_help=True, add_completion=False)


@app.callback()
def _moments() -> None:
    """Look at moments of captured rows."""  # a callback, so that `show` stays a word of its own


@app.command("show")
def show(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="The root of the consumer `moments`.")],
    tag: Annotated[str | None, typer.Option(help="Only this tag.")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Norms by layer, and spectra (needs headgate[plot]).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show rows, norms and variance of every site, phase and tag."""
    try:
        moments = open_moments(root)
        found = [(key, describe(moments, key)) for key in moments if tag in (None, key.tag)]
        if not found:
            tags = ", ".join(sorted({key.tag for key in moments}))
            _fail(f"{root}: no moments of tag {tag!r}; there are those of {tags or 'no tag'}")
        if picture is not None:
            draw(moments, tag).savefig(picture, dpi=150)
    except (HeadgateError, OSError, ValueError) as error:
        _fail(str(error))
    if as_json:
        document = {
            "written_at": moments.written_at,
            "settings": moments.settings,
            "entries": [{**key._asdict(), **description} for key, description in found],
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    _print(moments, found)


def _print(moments: Moments, found: list[tuple[Any, dict[str, Any]]]) -> None:
    console, settings = Console(), moments.settings
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("tag", "site", "phase"):
        table.add_column(title)
    for title in ("rows", "left out", "norm 1%", "50%", "99%", "max", "variance", "largest elements"):
        table.add_column(title, justify="right")
    for key, entry in found:
        norms = entry["norm_quantiles"]
        left_out = sum(entry[name] for name in ("num_skipped", "num_sinks", "num_not_finite"))
        table.add_row(
            escape(key.tag),
            key.site,
            key.phase,
            f"{entry['num_rows']:,}",
            f"{left_out:,}",
            *(_shown(norms[share]) for share in ("0.01", "0.5", "0.99", "1")),
            _shown(entry["total_variance"]),
            " ".join(str(outlier["index"]) for outlier in entry["outliers"][:3]),
        )
    # Lines may be longer than those of the terminal: a number that is cut off would be another one.
    Console(width=Console(width=MAX_WIDTH).measure(table).maximum).print(table)
    console.print(
        f"[dim]{escape(settings.model)}, hidden size {settings.hidden_size}; covariance: {settings.covariance}; norms "
        f"within {settings.quantile_error:.2%}; written {moments.written_at}[/dim]"
    )


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(1)
