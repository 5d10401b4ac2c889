"""``headgate dump export ROOT --to PATH --format npy|parquet|webdataset|saelens``."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.datasets.dataset import Dataset, open_dataset
from headgate.consumers.datasets.export.destination import finish, new_folder
from headgate.consumers.datasets.export.npy import export_npy
from headgate.consumers.datasets.export.parquet import export_parquet
from headgate.consumers.datasets.export.saelens_folder import export_saelens
from headgate.consumers.datasets.export.webdataset import export_webdataset
from headgate.consumers.datasets.view import RowView


class Format(str, Enum):
    """Forms of an export."""

    NPY = "npy"
    PARQUET = "parquet"
    WEBDATASET = "webdataset"
    SAELENS = "saelens"


Export = Callable[[RowView, Path], dict[str, Any]]


def export_captures(
    roots: Annotated[list[str], typer.Argument(metavar="ROOT...", help="Roots of the filesystem consumer.")],
    to: Annotated[str, typer.Option("--to", help="A new folder.", metavar="PATH")],
    form: Annotated[Format, typer.Option("--format", help="Of the files.")],
    sites: Annotated[list[str] | None, typer.Option("--site", help="Only this site; may be repeated.")] = None,
    phase: Annotated[str | None, typer.Option(help="Only prefill or only decode.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Only this tag; may be repeated.")] = None,
    roles: Annotated[list[str] | None, typer.Option("--role", help="Only messages of this role; repeatable.")] = None,
    drop_bos: Annotated[bool, typer.Option("--drop-bos", help="Leave out position 0.")] = False,
    context_size: Annotated[int, typer.Option(min=1, help="Rows of a context; saelens alone.")] = 128,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out what cannot be read.")] = False,
) -> None:
    """Write captured rows as files of other tools. Rows have a value at every selected site."""
    exports: dict[Format, Export] = {
        Format.NPY: export_npy,
        Format.PARQUET: export_parquet,
        Format.WEBDATASET: export_webdataset,
        Format.SAELENS: partial(export_saelens, context_size=context_size),
    }
    try:
        data = open_dataset(
            roots,
            sites=sites,
            phases=phase,
            tags=tags,
            roles=roles or None,
            drop_bos=drop_bos,
            strict=not skip_damaged,
            index=False,
        )
        written = export(data, to, exports[form])
    except (CaptureFileError, ValueError, OSError) as error:
        _fail(str(error))
    except ImportError as error:
        _fail(f"{error}: pip install 'headgate[datasets]'")
    for problem in data.problems:
        if problem.kind != "foreign":
            Console(stderr=True).print(f"[red]{problem.kind}:[/red] {escape(problem.message)}", soft_wrap=True)
    facts = written["export"]
    left_out = f", {facts['left_out_rows']:,} left out" if facts["left_out_rows"] else ""
    Console().print(f"{facts['rows']:,} rows of {', '.join(data.sites)} in {escape(to)}{left_out}", soft_wrap=True)


def export(data: Dataset, to: str, write: Export) -> dict[str, Any]:
    """Write all rows of a data set, and its manifest as the last file; return that.

    Raises:
        ValueError: If nothing is selected, or something is in the folder.
    """
    if not data.sites:
        raise ValueError("no rows are selected: there is nothing to export")
    view = data.rows()
    folder = new_folder(to)
    return finish(folder, data.manifest(), **write(view, folder))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(1)
