"""``headgate probe``: makes probes from captured rows, and judges them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headgate.capture.probe import POOLINGS, ProbeError, load, save
from headgate.capture.schema.errors import HeadgateError
from headgate.steering.features.commands import fail
from headgate.steering.probes.examples import read_labels
from headgate.steering.probes.fitting import fit
from headgate.steering.probes.judging import Evaluation, Rates, judge, named_examples, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(help="Make probes from captured rows, and judge them.", no_args_is_help=True, add_completion=False)

Root = Annotated[str, typer.Argument(metavar="CAPTURES", help="The filesystem consumer's root.")]
LabelFile = Annotated[
    Path,
    typer.Option("--labels", metavar="FILE", help="JSON, JSONL or CSV: request_id (or tag) and label of each request."),
]
Positive = Annotated[str | None, typer.Option(help="The label of high scores, where labels do not say so themselves.")]
Fpr = Annotated[float, typer.Option(min=0.0, max=1.0, help="The share of negative rows that may fire.")]


@app.command("fit")
def fit_probe(
    captures: Root,
    labels: LabelFile,
    at: Annotated[str, typer.Option(metavar="LAYER.HOOK", help="The site, such as 12.post_mlp.")],
    method: Annotated[str, typer.Option(help="mean_difference, or logistic (needs the extra 'probes').")] = (
        "mean_difference"
    ),
    pooling: Annotated[str, typer.Option("--pool", help=f"One of {', '.join(POOLINGS)}.")] = "last_prompt",
    fpr: Fpr = 0.01,
    held_out: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of requests to judge by; 0: none.")] = 0.25,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of these requests.")] = 0,
    regularization: Annotated[float, typer.Option(help="Of logistic: the strength of its L2 penalty.")] = 1.0,
    positive: Positive = None,
    to: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "probe.safetensors"
    ),
) -> None:
    """Fit a linear probe to captured rows, and write it with its figures on requests that were held out."""
    options: dict[str, Any] = {"method": method, "pooling": pooling, "fpr": fpr, "held_out": held_out, "seed": seed}
    try:
        if to.suffix != ".safetensors":
            raise ProbeError(f"--output {to}: expected a name that ends in .safetensors")
        probe = fit(captures, read_labels(labels), at=at, positive=positive, regularization=regularization, **options)
        save(to, probe)
    except (HeadgateError, OSError) as error:
        fail(error)
    named = "class" if len(probe.classes) == 1 else "classes"
    typer.echo(f"{to}: {probe.site.name}, {probe.kind}, {named} {', '.join(map(repr, probe.classes))}; {probe.pooling}")
    for name, value in probe.metadata.items():
        typer.echo(f"  {name:<20} {value}")
    if probe.threshold is not None:
        typer.echo(f"  {'threshold':<20} {probe.threshold:.6g}")


@app.command("eval")
def eval_probe(
    probe_file: Annotated[Path, typer.Argument(metavar="PROBE", help="A file of headgate probe fit.")],
    captures: Root,
    labels: LabelFile,
    fpr: Fpr = 0.01,
    positive: Positive = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="ROC curve and scores (needs the extra 'plot').")
    ] = None,
    to_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="All figures, and the curve.")] = None,
) -> None:
    """Judge a probe on captured rows: accuracy, AUROC, and what thresholds do."""
    try:
        probe = load(probe_file)
        examples = named_examples(probe, captures, read_labels(labels), positive)
        found = judge(probe, examples, fpr=fpr)
        if to_json is not None:
            to_json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        if picture is not None:
            _draw(picture, plot(probe, examples, found))
    except (HeadgateError, OSError) as error:
        fail(error)
    _print(found)


def _draw(picture: Path, figure: Figure) -> None:
    try:
        figure.savefig(picture)
    except ValueError as error:
        raise ProbeError(f"--picture {picture}: {error}") from error


def _print(found: Evaluation) -> None:
    typer.echo(f"{found.site}, {found.pooling}: {found.num_rows:,} rows of {found.num_requests:,} requests")
    for name, value in (("accuracy", found.accuracy), ("AUROC", found.auroc)):
        if value is not None:
            typer.echo(f"  {name:<20} {value:.4f}")
    thresholds: tuple[tuple[str, Rates | None], ...] = (
        ("own threshold", found.own),
        (f"at FPR {found.chosen_fpr:g}", found.chosen),
    )
    for name, rates in thresholds:
        if rates is not None:
            typer.echo(f"  {name:<20} {rates.threshold:.6g}: fires in {rates.tpr:.2%}, falsely in {rates.fpr:.2%}")
