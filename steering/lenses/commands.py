"""``headgate lens``: imports lenses of other tools, and checks lenses on a model."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Annotated, Any

import typer

from headgate.capture.engine.setup.cli_flags import named_path
from headgate.capture.lens import LOGIT, Lens, LensError, load, save
from headgate.steering.lenses.sources import read_source

app = typer.Typer(add_completion=False, no_args_is_help=True)

PROMPTS = ("The capital of France is", "def add(a, b):", "Once upon a time there was a")
TOP, NUM_TOKENS = 10, 8
_ROUNDING = {"float32": 1e-3, "float16": 0.04, "bfloat16": 0.25}
"""How far logits of a dtype may be from the lens', which are float32: tokens so close to the tenth are alike."""


@app.callback()
def lens() -> None:
    """Import lenses, and check them on a model."""


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A Jacobian lens (.pt), or the folder of a tuned lens.")],
    target: Annotated[Path, typer.Argument(help="File to write: NAME.safetensors.")],
    model: Annotated[str | None, typer.Option(help="Name of the model that it was fitted on.")] = None,
) -> None:
    """Write a lens of another tool as the file that --lenses takes."""
    try:
        found = read_source(source)
        save(target, found.kind, found.matrices, found.biases, model=model or found.model, source=source.name)
        written = load(target)
    except (LensError, OSError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(1) from error
    typer.echo(f"{target}: {_described(written)}")


@app.command()
def show(path: Annotated[Path, typer.Argument(help="A file of headgate lens import.")]) -> None:
    """Say what a file holds."""
    try:
        typer.echo(f"{path}: {_described(load(path))}")
    except LensError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(1) from error


def _described(lens: Lens) -> str:
    layers = f"{lens.layers[0]} to {lens.layers[-1]}" if len(lens.layers) > 1 else str(lens.layers[0])
    whose = f", of {lens.model}" if lens.model else ""
    return f"{lens.kind} lens{whose}, {len(lens.layers)} layers ({layers}), {lens.hidden_size} values"


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="The model: a folder or a name, as vLLM takes it.")],
    lenses: Annotated[list[str] | None, typer.Option("--lens", help="NAME=PATH of a lens; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="As of vLLM.")] = "auto",
) -> None:
    """Compare what lenses read with the model's own next tokens.

    The logit lens after the last layer must have the model's own ten strongest tokens everywhere; other lenses are
    shown by layer.
    """
    named = dict(_named(text) for text in lenses or ())
    overlaps = read_overlaps(model, named, dtype)
    for name, by_layer in overlaps.items():
        for layer, overlap in by_layer.items():
            typer.echo(f"{name:>16} {layer:>4} {overlap:7.1%}")
    last = max(overlaps[LOGIT])
    if overlaps[LOGIT][last] < 1.0:
        typer.secho(f"the logit lens after layer {last} does not read the model's own tokens", err=True, fg="red")
        raise typer.Exit(1)
    typer.echo(f"the logit lens after layer {last} reads the model's own {TOP} strongest tokens everywhere")


def _named(text: str) -> tuple[str, str]:
    try:
        return named_path(text)
    except ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from None


def read_overlaps(model: str, lenses: dict[str, str], dtype: str) -> dict[str, dict[int, float]]:
    """Return the share of the model's ten strongest tokens that each lens has among its own, by layer."""
    from headgate.capture import LLM, SamplingParams

    reads: dict[str, Any] = {"name": "lens", "params": {"lenses": lenses, "max_top": TOP}}
    names = [LOGIT, *lenses]
    consumers = [{**reads, "instance_name": name} for name in names]
    llm = LLM(model, dtype=dtype, capture_consumers=consumers, enforce_eager=True, max_model_len=256)
    wanted = {name: {"lens": name, "top": TOP} for name in names}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=TOP, capture=wanted)
    kept: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    rounding = _ROUNDING[str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")]
    for output in llm.generate(list(PROMPTS), params, use_tqdm=False):
        first = len(output.prompt_token_ids) - 1
        for name in names:
            result = output.capture_results[name]
            if result.status != "ok":
                raise LensError(f"lens {name!r}: {result.error}")
            for layer, read in result.payload["layers"].items():
                shares = kept[name].setdefault(int(layer), [])
                shares += [
                    _overlap(own, read["ids"][first + step], read["logprobs"][first + step], rounding)
                    for step, own in enumerate(output.outputs[0].logprobs)
                ]
    return {name: {layer: sum(all_) / len(all_) for layer, all_ in found.items()} for name, found in kept.items()}


def _overlap(own: dict[int, Any], ids: list[int], logprobs: list[float], rounding: float) -> float:
    """Return the share of `ids` that are among the model's own strongest, or as strong but for rounding."""
    best = sorted((one.logprob for one in own.values()), reverse=True)[:TOP]
    hits = [token in own or abs(logprob - best[-1]) <= rounding for token, logprob in zip(ids, logprobs, strict=True)]
    return float(sum(hits)) / TOP
