"""``headgate moments show ROOT``: the moments in a root as a table, as JSON or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.schema.errors import HeadgateError
from headgate.consumers.moments.picture import draw
from headgate.consumers.moments.reader import Moments, open_moments
from headgate.consumers.moments.report import describe

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
