"""``headgate sae``: imports SAEs and transcoders of every format, checks them on captured rows, and shows features."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from headgate.capture.engine.contracts.parts import stored_requests
from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.results import StoredRequest, whole_rows
from headgate.capture.schema.sites import Site
from headgate.steering.features.canonical import RowType, write_coder
from headgate.steering.features.check import CoderReport, check, measure, sample, site_of_reads, with_figures
from headgate.steering.features.importing import FORMATS, open_coder, read_source
from headgate.steering.features.labels import read_export, write_labels
from headgate.steering.features.source_coder import Hints
from headgate.steering.features.sparse_coder import SparseCoder, coder_of
from headgate.steering.features.tensors import FeatureFileError

Decode = Callable[[Sequence[int]], str]
_ROWS = 1024


class Example(msgspec.Struct, kw_only=True):
    """One token that activates a feature.

    Attributes:
        activation: The feature's activation.
        tag: The capture's tag.
        request_id: The captured request's id.
        position: Position of the token.
        token_id: The token.
        before: Text of captured tokens before it, ``...`` where positions between were not captured.
        token: Its text.
        after: Text of captured tokens after it.
    """

    activation: float
    tag: str
    request_id: str
    position: int
    token_id: int
    before: str
    token: str
    after: str


class Shown(msgspec.Struct, kw_only=True):
    """A feature on captured rows.

    Attributes:
        name: Name of the coder.
        feature: Its number.
        num_rows: Rows that were looked at, those at position 0 left out; the feature is active in `num_active` of them.
        examples: The largest activations first.
    """

    name: str
    feature: int
    num_rows: int
    num_active: int
    examples: list[Example]


def show(coder: SparseCoder, feature: int, root: str, *, decode: Decode, top: int = 10, context: int = 12) -> Shown:
    """Find the tokens that activate a feature most.

    Args:
        coder: An SAE or transcoder with a read site.
        feature: Its number.
        root: Folder of the captured rows.
        decode: Turns ids of tokens into text.
        top: How many tokens.
        context: How many tokens before, and after, each.

    Raises:
        FeatureFileError: If there is no such feature, or no request has rows of the coder's site and width.
        CaptureFileError: If the captures cannot be read.
    """
    if not 0 <= feature < coder.num_features:
        raise FeatureFileError(f"{coder.name}: no feature {feature}; it has 0 to {coder.num_features - 1}")
    site = site_of_reads(coder)
    largest: list[tuple[float, int, int, StoredRequest]] = []
    num_rows = num_active = 0
    for number, request in enumerate(stored_requests(root)):
        if site not in request.sites:
            continue
        activations = _activations(coder, feature, request)
        num_rows += int((request.positions > 0).sum())
        num_active += int((activations > 0).sum())
        for row in np.argsort(-activations)[:top]:
            if activations[row] > 0:
                entry = (float(activations[row]), -number, -int(row), request)
                (heapq.heappush if len(largest) < top else heapq.heappushpop)(largest, entry)
    if not num_rows:
        raise FeatureFileError(f"{root}: no captured rows at {site.name}, where {coder.name} reads")
    examples = [_example(entry, context, decode) for entry in sorted(largest, reverse=True)]
    return Shown(name=coder.name, feature=feature, num_rows=num_rows, num_active=num_active, examples=examples)


def _activations(coder: SparseCoder, feature: int, request: StoredRequest) -> npt.NDArray[np.float32]:
    """Activations of a request's rows; 0 at position 0, whose long row activates features that mean nothing there."""
    rows = whole_rows(request, site_of_reads(coder))
    if rows.shape[1] != coder.width:
        raise FeatureFileError(
            f"{coder.name}: reads rows of width {coder.width}, but those of {request.request_id} have {rows.shape[1]}"
        )
    parts = [coder.encode_few(rows[start : start + _ROWS], [feature])[:, 0] for start in range(0, len(rows), _ROWS)]
    activations: npt.NDArray[np.float32] = np.concatenate([np.zeros(0, np.float32), *parts])
    activations[request.positions == 0] = 0
    return activations


def _example(entry: tuple[float, int, int, StoredRequest], context: int, decode: Decode) -> Example:
    activation, _, row, request = entry
    row = -row
    positions, tokens = request.positions, request.token_ids
    return Example(
        activation=activation,
        tag=request.tag,
        request_id=request.request_id,
        position=int(positions[row]),
        token_id=int(tokens[row]),
        before=_text(positions, tokens, max(0, row - context), row, decode),
        token=decode([int(tokens[row])]),
        after=_text(positions, tokens, row + 1, row + 1 + context, decode),
    )


def _text(
    positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], start: int, stop: int, decode: Decode
) -> str:
    """Text of rows `start` to `stop`, runs of neighbouring positions decoded as one."""
    positions, tokens = positions[start:stop], tokens[start:stop]
    gaps = np.flatnonzero(np.diff(positions) != 1) + 1
    return " ... ".join(decode(part.tolist()) for part in np.split(tokens, gaps)) if len(tokens) else ""


app = typer.Typer(help="Import SAEs and transcoders, and check them.", no_args_is_help=True, add_completion=False)

Coder = Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A file or folder; or a name in --sae-root.")]
Root = Annotated[str, typer.Option("--captures", metavar="ROOT", help="The filesystem consumer's root.")]
SaeRoot = Annotated[Path | None, typer.Option(envvar="HEADGATE_SAE_ROOT", help="Folder of imported SAEs.")]
At = Annotated[str | None, typer.Option("--site", metavar="LAYER.HOOK", help="The site, such as 12.post_mlp.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
MaxRows = Annotated[int, typer.Option(min=16, help="How many captured rows about.")]

_ROW_TYPES: dict[str, RowType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@app.command("import")
def import_coder(
    source: Annotated[Path, typer.Argument(help="A file or folder, as it was downloaded.")],
    to: Annotated[Path, typer.Option(help="The file to write; its name ends in .safetensors.")],
    site: At = None,
    name: Annotated[str | None, typer.Option(help="Its name; the file's without suffix if not given.")] = None,
    layer: Annotated[int | None, typer.Option(help="The layer, of a source that has several.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Of a top-k SAE: stands for its selection.")] = None,
    k: Annotated[int | None, typer.Option(help="k of a top-k SAE whose files do not say it.")] = None,
    scale: Annotated[float | None, typer.Option(help="Factor on rows: the SAE was trained on normalised ones.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the source's if not given.")] = None,
    format_name: Annotated[str | None, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The model's folder: for transcoders that read before the gain of a norm."),
    ] = None,
    captures: Annotated[
        str | None,
        typer.Option(metavar="ROOT", help="Captured rows: measures largest activations, and top-k's threshold."),
    ] = None,
    max_rows: MaxRows = 16384,
) -> None:
    """Read an SAE or transcoder, fold what can be folded, and write it as a file for servers."""
    if to.suffix != ".safetensors":
        fail(f"--to {to}: expected a name that ends in .safetensors")
    if dtype is not None and dtype not in _ROW_TYPES:
        fail(f"--dtype: expected {', '.join(_ROW_TYPES)}, got {dtype!r}")
    try:
        hints = Hints(site=parse_site(site), layer=layer, k=k, scale=scale, threshold=threshold, model=model)
        coder = read_source(source, hints, format_name)
        if captures is not None:
            opened = coder_of(coder, source)
            place = site_of_reads(opened)
            coder = with_figures(coder, measure(opened, sample(captures, place, max_rows).rows[place], None))
        row_dtype = None if dtype is None else _ROW_TYPES[dtype]
        write_coder(to, coder, name=name or to.stem, path=str(source), row_dtype=row_dtype)
        typer.echo(describe(open_coder(to)))
    except (HeadgateError, OSError) as error:
        fail(error)


@app.command("check")
def check_coder(
    coder: Coder,
    captures: Root,
    site: At = None,
    sae_root: SaeRoot = None,
    max_rows: MaxRows = 4096,
    max_fvu: Annotated[float, typer.Option(help="The largest FVU that is well, where the source declares none.")] = 0.6,
    as_json: AsJson = False,
) -> None:
    """Compare L0 and unexplained variance on captured rows with those declared; status 1 if they do not fit."""
    try:
        report = check(
            open_coder(find(coder, sae_root), site=parse_site(site)), captures, max_rows=max_rows, max_fvu=max_fvu
        )
    except (HeadgateError, OSError) as error:
        fail(error)
    print_json(report) if as_json else _print_report(report)
    if report.problems:
        raise typer.Exit(1)


@app.command("show")
def show_feature(
    coder: Coder,
    feature: Annotated[int, typer.Argument(help="Number of the feature.")],
    captures: Root,
    site: At = None,
    sae_root: SaeRoot = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of which model; that of the captures if not given.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many tokens.")] = 10,
    context: Annotated[int, typer.Option(min=0, help="Tokens before and behind each.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Show the captured tokens that activate a feature most, in their context."""
    try:
        opened = open_coder(find(coder, sae_root), site=parse_site(site))
        decode = _decoder(tokenizer or _model_of(captures))
        shown = show(opened, feature, captures, decode=decode, top=top, context=context)
    except (HeadgateError, OSError) as error:
        fail(error)
    print_json(shown) if as_json else _print_shown(shown)


@app.command("labels")
def import_labels(
    coder: Coder,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Neuronpedia's .jsonl or .jsonl.gz, or .csv.")],
    source: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Which labels, of files with labels of several SAEs.")
    ] = None,
    sae_root: SaeRoot = None,
) -> None:
    """Keep texts about features beside an SAE's file, for searches and results; earlier ones are replaced."""
    try:
        opened = open_coder(find(coder, sae_root))
        found = read_export(files, opened.num_features, source)
        if not found.texts:
            fail(f"{', '.join(map(str, files))}: no labels" + (f" of {source}" if source else ""))
        target = write_labels(opened.path, found.texts)
    except (HeadgateError, OSError) as error:
        fail(error)
    named = f" of {', '.join(found.sources)}" if found.sources else ""
    typer.echo(f"{target}: {len(found.texts):,} labels{named}; {opened.name} has {opened.num_features:,} features")
    if found.num_further:
        typer.echo(f"{found.num_further:,} further labels of the same features were left out")


def find(name_or_path: str, root: Path | None) -> Path:
    """Return the path itself if something is there, or else what has that name in the folder of SAEs.

    Raises:
        FeatureFileError: If neither is there.
    """
    places = [Path(name_or_path)]
    places += [root / name_or_path, root / f"{name_or_path}.safetensors"] if root else []
    found = next((place for place in places if place.exists()), None)
    if found is None:
        hint = "" if root else "; names are looked for in --sae-root"
        raise FeatureFileError(f"{name_or_path}: no such file or folder" + (f", nor in {root}" if root else hint))
    return found


def parse_site(text: str | None) -> Site | None:
    """Read ``--site``.

    Raises:
        FeatureFileError: If it is no site.
    """
    try:
        return None if text is None else Site.parse(text)
    except ValueError as error:
        raise FeatureFileError(f"--site: {error}") from error


def describe(coder: SparseCoder) -> str:
    """One line about a coder."""
    read = coder.read_site.name if coder.read_site else "no site; name it with --site"
    sites = f"{read} -> {', '.join(site.name for site in coder.write_sites)}" if coder.is_transcoder else read
    kind = coder.kind.value + (f" {coder.k}" if coder.k else "")
    return (
        f"{coder.name}: {sites}; {coder.num_features} features of width {coder.width}, {kind}; "
        f"from {coder.format}, sha256 {coder.source_sha256[:12]}"
    )


def fail(error: Exception | str) -> NoReturn:
    """Say why, and leave with status 1."""
    typer.secho(str(error), err=True, fg="red")
    raise typer.Exit(1)


def print_json(document: msgspec.Struct) -> None:
    """Print a document, indented."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


def _print_report(report: CoderReport) -> None:
    declared = {"l0": report.declared_l0, "fvu": report.declared_fvu}
    reported = {key: "" if value is None else f" (declared: {value:.3g})" for key, value in declared.items()}
    typer.echo(f"{report.name} at {report.site}: {report.num_rows:,} rows, {report.num_left_out:,} left out")
    typer.echo(f"  L0                    {report.l0:.3g}{reported['l0']}")
    fvu = "not known: needs the rows of its one write site" if report.fvu is None else f"{report.fvu:.3g}"
    typer.echo(f"  variance unexplained  {fvu}{reported['fvu']}")
    typer.echo(f"  never active          {report.num_dead:,} features")
    if report.threshold is not None:
        typer.echo(f"  threshold             {report.threshold:.4g} stands for the selection (import: --threshold)")
    for problem in report.problems:
        typer.secho(f"problem: {problem}", fg="red")
    for finding in report.findings:
        typer.secho(f"better {finding}", fg="yellow")
    if report.problems and not report.findings:
        typer.echo("no other site, factor, threshold or norm is clearly better: another model, or another SAE?")


def _print_shown(shown: Shown) -> None:
    share = shown.num_active / shown.num_rows
    typer.echo(
        f"{shown.name}, feature {shown.feature}: "
        f"active in {shown.num_active:,} of {shown.num_rows:,} rows ({share:.3%})"
    )
    for example in shown.examples:
        token = typer.style(f"[{example.token}]", bold=True)
        text = f"{example.before}{token}{example.after}".replace("\n", "\\n")
        typer.echo(f"{example.activation:9.4g}  {example.tag}/{example.request_id}:{example.position}  {text}")


def _model_of(root: str) -> str | None:
    return next((str(request.metadata.get("model") or "") for request in stored_requests(root)), None)


def _decoder(model: str | None) -> Decode:
    """Return the tokenizer's decoding, or one that prints ids where there is no tokenizer."""
    try:
        from transformers import AutoTokenizer  # seconds to import; only pages for people need it

        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # noqa: BLE001  (whatever keeps a tokenizer from being loaded, ids can be shown)
        typer.echo(
            f"no tokenizer of {model!r} ({type(error).__name__}): showing ids; name one: --tokenizer MODEL", err=True
        )
        return lambda ids: " ".join(map(str, ids)) + " "

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids))

    return decode
