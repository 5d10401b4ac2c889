"""``headgate lens``: imports lenses of other tools, and checks lenses on a model.

Lenses as other tools write them: Jacobian lenses, and tuned lenses. Nothing of a file is run.

- A Jacobian lens is one ``.pt``: ``{"J": {layer: [d, d]}, "source_layers", "d_model"}``; ``{"J": [layers, d, d],
  "meta"}``, with the layers in ``meta["source_layers"]`` or counted from 0; or the same under ``parameters.jacobians``.
  It reads the stream after layer l: ``J_l h_l``.
- A tuned lens is a folder with ``params.pt`` (``{"0.weight": [d, d], "0.bias": [d], ...}``) and ``config.json``. Its
  translator i reads the input of layer i, which is the stream after layer i - 1; translator 0 reads the embeddings,
  which are after no layer, and is left out.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from headgate.capture.engine.setup.cli_flags import named_path
from headgate.capture.files.reading import read_text, refusing
from headgate.capture.files.tensors import LazyTensor
from headgate.capture.lens import LOGIT, Lens, LensError, LensKind, Matrix, load, save
from headgate.steering.features.tensors import FeatureFileError, TorchFile

PARAMS, CONFIG = "params.pt", "config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LensSource:
    """A lens of another tool.

    Attributes:
        kind: Of its matrices.
        matrices: ``[d, d]``, by layer after which it reads.
        biases: ``[d]``, likewise.
        model: The model that it was fitted on, if the files name it.
    """

    kind: LensKind
    matrices: Mapping[int, Matrix]
    biases: Mapping[int, Matrix]
    model: str | None = None


class _Config(msgspec.Struct):
    """The keys of a tuned lens' ``config.json`` that are read."""

    d_model: int
    base_model_name_or_path: str | None = None
    lens_type: str = "linear_tuned_lens"


def read_source(path: Path) -> LensSource:
    """Read a lens of another tool.

    Raises:
        LensError: If it is none, damaged, or contradicts itself; the message names the file.
    """
    try:
        if path.is_dir() or path.name == PARAMS:
            return _tuned(path if path.is_dir() else path.parent)
        if not path.is_file():
            raise LensError(f"{path}: no such file")
        return _jacobian(path)
    except FeatureFileError as error:
        raise LensError(str(error)) from error


def _jacobian(path: Path) -> LensSource:
    file = TorchFile(path)
    content = file.content
    if not isinstance(content, dict):
        raise LensError(f"{path}: expected a dictionary with 'J', got {type(content).__name__}")
    parameters = content.get("parameters")
    found = parameters.get("jacobians") if isinstance(parameters, dict) else content.get("J")
    if found is None:
        raise LensError(f"{path}: expected 'J' or 'parameters.jacobians', found {', '.join(map(str, content))[:200]}")
    meta: Mapping[Any, Any] = found_meta if isinstance(found_meta := content.get("meta"), dict) else {}
    tensors = _by_layer(file, found, {**content, **meta})
    width = next(iter(tensors.values())).shape[0]
    declared = content.get("d_model", meta.get("d_model", width))
    for layer, tensor in tensors.items():
        tensor.expect((int(declared), int(declared)), f"d_model, layer {layer}")
    named = [meta[name] for name in ("model_name", "model") if isinstance(meta.get(name), str)]
    model = named[0] if named else None
    return LensSource(
        kind=LensKind.JACOBIAN, matrices={layer: _read(one) for layer, one in tensors.items()}, biases={}, model=model
    )


def _by_layer(file: TorchFile, found: Any, about: Mapping[Any, Any]) -> dict[int, LazyTensor]:
    if isinstance(found, dict):
        tensors = {_layer(key, file.path): file.tensor(f"J.{key}", value) for key, value in found.items()}
        declared = about.get("source_layers")
        if isinstance(declared, list) and sorted(declared) != sorted(tensors):
            raise LensError(f"{file.path}: has the layers {sorted(tensors)}, and source_layers says {declared}")
    else:
        whole = file.tensor("J", found)
        if len(whole.shape) != 3:
            raise LensError(f"{file.path}: J has the shape {list(whole.shape)}; expected [layers, d, d]")
        layers = about.get("source_layers", list(range(whole.shape[0])))
        if not isinstance(layers, list) or len(layers) != whole.shape[0]:
            raise LensError(f"{file.path}: J has {whole.shape[0]} layers, and source_layers says {layers}")
        tensors = {_layer(layer, file.path): whole[index] for index, layer in enumerate(layers)}
    if not tensors:
        raise LensError(f"{file.path}: has no layer")
    return dict(sorted(tensors.items()))


def _layer(key: object, path: Path) -> int:
    text = str(key)
    if not re.fullmatch(r"\d{1,4}", text):
        raise LensError(f"{path}: expected numbers of layers, got {text[:40]!r}")
    return int(text)


def _tuned(folder: Path) -> LensSource:
    for name in (PARAMS, CONFIG):
        if not (folder / name).is_file():
            raise LensError(f"{folder}: expected the folder of a tuned lens, with {PARAMS} and {CONFIG}; no {name}")
    with refusing(folder / CONFIG, LensError, "not the config of a tuned lens"):
        config = msgspec.json.decode(read_text(folder / CONFIG, LensError), type=_Config)
    if config.lens_type != "linear_tuned_lens":
        raise LensError(f"{folder / CONFIG}: lens_type {config.lens_type!r} is not known; expected linear_tuned_lens")
    file = TorchFile(folder / PARAMS)
    matrices: dict[int, Matrix] = {}
    biases: dict[int, Matrix] = {}
    for name, value in file.content.items() if isinstance(file.content, dict) else ():
        found = re.fullmatch(r"(\d{1,4})\.(weight|bias)", str(name))
        if found is None:
            raise LensError(f"{file.path}: expected tensors such as '0.weight' and '0.bias', got {str(name)[:40]!r}")
        layer = int(found[1]) - 1
        square = (config.d_model, config.d_model)
        tensor = file.tensor(str(name), value).expect(square if found[2] == "weight" else square[:1], "d_model")
        if layer >= 0:
            (matrices if found[2] == "weight" else biases)[layer] = _read(tensor)
    if not matrices:
        raise LensError(f"{file.path}: has no translator that reads the stream after a layer")
    return LensSource(kind=LensKind.TUNED, matrices=matrices, biases=biases, model=config.base_model_name_or_path)


def _read(tensor: LazyTensor) -> Matrix:
    is_half = tensor.num_bits == 16 and not tensor.is_bfloat16
    return tensor.read(np.float16 if is_half else np.float32)


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
