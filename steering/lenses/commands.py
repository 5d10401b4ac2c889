"""``headgate lens``: imports lenses of other tools, checks lenses on a model, and fits one by steered requests.

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
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from headgate.capture.engine.setup.cli_flags import named_path
from headgate.capture.files.reading import read_text, refusing
from headgate.capture.files.tensors import LazyTensor
from headgate.capture.lens import LOGIT, Lens, LensError, LensKind, Matrix, load, save
from headgate.capture.schema.sites import HookPoint, Site
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
    """Import lenses, check them on a model, and fit one."""


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


SKIPPED = 16
"""Positions at the beginning of a prompt that are left out: attention sinks are there."""
LENGTH = 0.1
"""Length of an added vector, relative to the rows: shorter ones drown in bfloat16, longer ones are not small."""
_AT_A_TIME = 256
"""Requests whose rows are in memory together."""


@app.command()
def fit(
    model: Annotated[str, typer.Argument(help="The model: a folder or a name, as vLLM takes it.")],
    text: Annotated[Path, typer.Argument(help="A file of ordinary text, which is cut into prompts.")],
    target: Annotated[Path, typer.Argument(help="File to write: NAME.safetensors.")],
    layers: Annotated[list[int] | None, typer.Option("--layer", help="May be repeated; all but the last.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to take at most.")] = 100,
    num_tokens: Annotated[int, typer.Option(min=SKIPPED + 2, help="Tokens of a prompt.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts that each direction is added in.")] = 4,
    dtype: Annotated[str, typer.Option(help="As of vLLM.")] = "auto",
) -> None:
    """Fit a Jacobian lens by steered requests alone, without backward passes.

    A layer takes 2 * hidden size * rounds prompts. The file is written after each.
    """
    if target.suffix != ".safetensors":
        raise typer.BadParameter(f"{target}: expected a name that ends in .safetensors")
    try:
        content = read_text(text, LensError)
        llm = _open(model, dtype, num_tokens)
        prompts = cut_prompts(llm.get_tokenizer(), content, num_tokens)[:num_prompts]
        fitted = {}
        for layer in _fittable(layers, llm.llm_engine.model_config.hf_text_config.num_hidden_layers):
            began = time.monotonic()
            fitted[layer] = fit_layer(llm, prompts, layer, rounds).astype(np.float16)
            save(target, LensKind.JACOBIAN, fitted, model=model, source=text.name)
            typer.echo(f"layer {layer}: {time.monotonic() - began:.0f} s")
        typer.echo(f"{target}: {_described(load(target))}")
    except (LensError, OSError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(1) from error


def _open(model: str, dtype: str, num_tokens: int) -> Any:
    from headgate.capture import LLM

    sites = {"post_mlp": "all"}
    return LLM(
        model,
        dtype=dtype,
        capture_consumers=["memory"],
        capture_sites=sites,
        steering={"op_sites": sites},
        max_model_len=num_tokens + 1,
        enable_prefix_caching=False,
        enforce_eager=True,
    )


def _fittable(layers: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Return the layers to fit: `layers`, or all but the last, whose matrix is the identity."""
    if num_layers == 1:
        raise LensError("a model of one layer needs no lens")
    for layer in layers or ():
        if not 0 <= layer < num_layers - 1:
            raise typer.BadParameter(f"--layer {layer}: expected 0 to {num_layers - 2}; the last needs no matrix")
    return layers or range(num_layers - 1)


def cut_prompts(tokenizer: Any, text: str, num_tokens: int) -> list[list[int]]:
    """Cut a text into prompts of `num_tokens` ids each; what is left over at the end is in none.

    Each begins with the id of the text's beginning (BOS), if the tokenizer puts one before a text.

    Raises:
        LensError: If the text is shorter than a prompt.
    """
    begin = [tokenizer.bos_token_id] if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else []
    ids, taken = tokenizer.encode(text, add_special_tokens=False), num_tokens - len(begin)
    if len(ids) < taken:
        raise LensError(f"the text has {len(ids)} tokens, and a prompt takes {taken} of them")
    return [begin + ids[start : start + taken] for start in range(0, len(ids) - taken + 1, taken)]


def fit_layer(llm: Any, prompts: Sequence[list[int]], layer: int, rounds: int = 1) -> npt.NDArray[np.float64]:
    """Fit a Jacobian lens' matrix of one layer.

    It says how the last layer's rows of a prompt change, all together, if a small vector is added to each of its rows
    after the layer; by row, and as the mean over prompts. Rows are those from `SKIPPED` on, but for the last. Each
    direction of the stream is added with both signs, so what is not linear cancels to the second order.

    Args:
        llm: vLLM's, with the consumer ``memory``, and ``post_mlp`` of the layer for operations and of both captured.
        prompts: Token ids, more than `SKIPPED` + 1 of each.
        layer: The layer.
        rounds: Prompts that each direction is added in; prompts take turns.

    Returns:
        ``[hidden, hidden]``.

    Raises:
        LensError: If a row is missing.
    """
    config = llm.llm_engine.model_config
    width, last = config.get_hidden_size(), config.hf_text_config.num_hidden_layers - 1
    plain = _rows(llm, prompts, layer, [None] * len(prompts))
    length = LENGTH * float(np.mean([np.linalg.norm(rows, axis=1).mean() for rows in plain]))
    jobs = [
        (direction, (direction * rounds + number) % len(prompts), sign)
        for direction in range(width)
        for number in range(rounds)
        for sign in (1.0, -1.0)
    ]
    matrix = np.zeros((width, width))
    for start in range(0, len(jobs), _AT_A_TIME):
        chunk = jobs[start : start + _AT_A_TIME]
        vectors = [length * sign * np.eye(1, width, direction, dtype=np.float32)[0] for direction, _, sign in chunk]
        acting = [{"at": f"{layer}.post_mlp", "method": "additive", "vector": vector} for vector in vectors]
        found = _rows(llm, [prompts[prompt] for _, prompt, _ in chunk], last, acting)
        for (direction, _, sign), rows in zip(chunk, found, strict=True):
            matrix[:, direction] += sign * rows.mean(axis=0) / (2 * length * rounds)
    return matrix


def _rows(
    llm: Any, prompts: Sequence[list[int]], layer: int, acting: Sequence[dict[str, Any] | None]
) -> list[npt.NDArray[np.float64]]:
    """Return the rows after a layer at the positions that count, with an operation at those in each prompt."""
    from headgate.capture import SamplingParams

    params = []
    for prompt, operation in zip(prompts, acting, strict=True):
        counted = {"start": SKIPPED, "stop": len(prompt) - 1}
        wanted = {"memory": {"hooks": {"post_mlp": [layer]}, "positions": counted}}
        steered = None if operation is None else [{**operation, "positions": counted}]
        params.append(SamplingParams(max_tokens=1, temperature=0, capture=wanted, steering_ops=steered))
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        result = output.capture_results["memory"]
        if result.status != "ok":
            raise LensError(f"a prompt's rows are missing: {result.error}")
        found.append(result.payload.rows[Site(layer, HookPoint.POST_MLP)].double().numpy())
    return found
