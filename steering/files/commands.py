"""``headgate vectors``: shows files of steering vectors of every format, and imports those of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headgate.capture.schema.errors import HeadgateError
from headgate.steering.features.commands import fail, print_json
from headgate.steering.files.converters import CONVERTERS
from headgate.steering.files.report import VectorReport, describe, imported
from headgate.steering.files.vector_files import FORMATS, save
from headgate.steering.files.vector_source import VectorSource

app = typer.Typer(help="Show and import files of steering vectors.", no_args_is_help=True, add_completion=False)

File = Annotated[str, typer.Argument(metavar="FILE", help="A file of vectors; FILE@layer=N,concept=N is read, too.")]
Format = Annotated[str | None, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")]
Layer = Annotated[int | None, typer.Option(min=0, help="The layer of the site, or the one to take.")]
Concept = Annotated[int | None, typer.Option(min=0, help="The concept to take, of a file of AxBench; a tensor's row.")]
Tensor = Annotated[str | None, typer.Option(help="The tensor to take, of a file with other names of tensors.")]
Hook = Annotated[str | None, typer.Option(help="The hook point that such a tensor acts at, if not post_mlp.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.command("show")
def show_file(
    file: File,
    format_name: Format = None,
    layer: Layer = None,
    concept: Concept = None,
    tensor: Tensor = None,
    hook: Hook = None,
    as_json: AsJson = False,
) -> None:
    """Show a file's format, sites, norms, element type and checksum."""
    try:
        report = describe(
            VectorSource.parse(file, format=format_name, layer=layer, concept=concept, tensor=tensor, hook=hook)
        )
    except (HeadgateError, OSError, ValueError) as error:
        fail(error)
    print_json(report) if as_json else _print_report(report)


@app.command("import")
def import_file(
    file: File,
    to: Annotated[Path, typer.Option(metavar="OUT", help="The file to write; its name ends in .safetensors.")],
    format_name: Format = None,
    layer: Layer = None,
    concept: Concept = None,
    tensor: Tensor = None,
    hook: Hook = None,
) -> None:
    """Read a file of any format, and write its vectors as a file of headgate."""
    if to.suffix != ".safetensors":
        fail(f"--to {to}: expected a name that ends in .safetensors")
    try:
        save(
            to,
            imported(
                VectorSource.parse(file, format=format_name, layer=layer, concept=concept, tensor=tensor, hook=hook)
            ),
        )
        _print_report(describe(VectorSource(to)))
    except (HeadgateError, OSError, ValueError) as error:
        fail(error)


@app.command("converter")
def show_converter(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(CONVERTERS)}.")],
) -> None:
    """Print a program that turns a pickle into a file that can be read safely; run it where the pickle was made."""
    if name not in CONVERTERS:
        fail(f"no converter {name!r}; there are {', '.join(CONVERTERS)}")
    typer.echo(CONVERTERS[name], nl=False)


def _print_report(report: VectorReport) -> None:
    typer.echo(f"{report.file}: {report.format}, {report.dtype}, vectors of {report.hidden_size} values")
    typer.echo(f"  sha256 {report.sha256}")
    for name, text in report.metadata.items():
        if name not in ("format", "dtype"):
            typer.echo(f"  {name}: {text}")
    width = max(len(vector.site) for vector in report.vectors)
    for vector in report.vectors:
        tier = "" if vector.tier == "vectors" else f"  {vector.tier}"
        typer.echo(
            f"  {vector.site:<{width}}  norm {vector.norm:<10.5g} largest value {vector.peak:<10.5g}{tier}".rstrip()
        )
