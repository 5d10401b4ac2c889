"""Lenses as other tools write them: Jacobian lenses, and tuned lenses. Nothing of a file is run.

- A Jacobian lens is one ``.pt``: ``{"J": {layer: [d, d]}, "source_layers", "d_model"}``; ``{"J": [layers, d, d],
  "meta"}``, with the layers in ``meta["source_layers"]`` or counted from 0; or the same under ``parameters.jacobians``.
  It reads the stream after layer l: ``J_l h_l``.
- A tuned lens is a folder with ``params.pt`` (``{"0.weight": [d, d], "0.bias": [d], ...}``) and ``config.json``. Its
  translator i reads the input of layer i, which is the stream after layer i - 1; translator 0 reads the embeddings,
  which are after no layer, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.capture.files.reading import read_text, refusing
from headgate.capture.files.tensors import LazyTensor
from headgate.capture.lens import LensError, LensKind, Matrix
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
