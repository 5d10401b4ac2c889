"""``headgate vectors``: shows files of steering vectors of every format, and imports those of other tools."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from headgate.capture.schema.errors import HeadgateError
from headgate.steering.features.commands import fail, print_json
from headgate.steering.files.foreign_files import CONVERTERS, VectorSource
from headgate.steering.files.vector_files import FORMATS, VectorFile, format_of, load, save

_BLOCK = 1 << 20


class VectorAt(msgspec.Struct, frozen=True, kw_only=True):
    """One vector.

    Attributes:
        tier: ``vectors``, ``prefill_vectors`` or ``decode_vectors``.
        site: Where it acts.
        norm: Its length.
        peak: The largest magnitude of a value.
    """

    tier: str
    site: str
    norm: float
    peak: float


class VectorReport(msgspec.Struct, frozen=True, kw_only=True):
    """A file of vectors.

    Attributes:
        file: The path.
        format: One of `headgate.steering.files.vector_files.FORMATS`.
        sha256: Hash of the whole file, hex.
        dtype: Element type in the file; of a file of headgate, the narrowest that holds all values.
        hidden_size: Values of a vector.
        vectors: In the order of the forward pass, tier by tier.
        metadata: The file's metadata, and what its names and layout say.
    """

    file: str
    format: str
    sha256: str
    dtype: str
    hidden_size: int
    vectors: list[VectorAt]
    metadata: dict[str, str]


def describe(source: VectorSource) -> VectorReport:
    """Describe a file.

    Raises:
        VectorFileError: As `load`.
        OSError: If it cannot be read.
    """
    name, file = format_of(source), _loaded(source)
    tiers = file.tiers()
    reported = file.metadata.get("dtype") if name == file.metadata.get("format") else None
    vectors = [
        VectorAt(tier=label, site=site.name, norm=float(np.linalg.norm(row)), peak=float(np.abs(row).max()))
        for label, tier in tiers.items()
        for site, row in zip(tier.sites, tier.float32().astype(np.float64), strict=True)
    ]
    return VectorReport(
        file=str(source.path),
        format=name,
        sha256=_sha256(source.path),
        dtype=reported or ", ".join(sorted({tier.dtype for tier in tiers.values()})),
        hidden_size=next(iter(tiers.values())).hidden_size,
        vectors=vectors,
        metadata=dict(file.metadata),
    )


def imported(source: VectorSource) -> VectorFile:
    """Return the content of a file, with the source's name and checksum in the metadata.

    Raises:
        VectorFileError: As `load`.
        OSError: If it cannot be read.
    """
    file = _loaded(source)
    about = {"format": format_of(source), **file.metadata}
    about |= {"source": source.path.name, "source_sha256": _sha256(source.path)}
    return replace(file, metadata=about)


def _loaded(source: VectorSource) -> VectorFile:
    return load(source.path, **{key: value for key, value in source._asdict().items() if key != "path"})


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
