"""Files of vectors that other tools write: each one's layout, and the site that it was made for.

Every reader takes a `VectorSource` and returns `ForeignVectors`. None of them runs code of a file: PyTorch's files are
loaded with ``weights_only=True``, and may hold tensors, numbers and texts alone.

Unpickling runs code that the file names, so headgate does not do it. The file's author can, and has its classes: for
pickles, the error has a program that turns the file into one that can be read safely, to be run where the pickle was
made.
"""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headgate.capture.files.reading import read_json
from headgate.capture.schema.batch import Float64Array
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import HOOK_NAMES, HookPoint, Site
from headgate.steering.features.tensors import (
    FeatureFileError,
    LazyTensor,
    PickledObjectsError,
    TorchFile,
    open_tensors,
)

MAX_LAYERS = 4096
"""Layers of a model that a file is read for, at most."""

_PAIR = r"(?:(?:format|layer|concept|hook)=[^@,=/]*|tensor=[^@,=]*)"
_OPTIONS = re.compile(rf"(?s:(.+))@({_PAIR}(?:,{_PAIR})*)")


class VectorSource(NamedTuple):
    """A file of vectors, as a caller or a configuration names it.

    Attributes:
        path: The file.
        format: The name of its format; None to recognise it by the file's name and content.
        layer: The layer of the site that the vector acts at, of a file that does not name it; of a file with a vector
            for each layer, the one to take. None takes them all.
        concept: The number of the vector in a file of several for one site, or in a tensor of several.
        tensor: The name of the tensor to take, of a file whose names of tensors headgate does not know.
        hook: Of such a tensor, the hook point that it acts at; None stands for ``post_mlp``, the layer's output.
    """

    path: Path
    format: str | None = None
    layer: int | None = None
    concept: int | None = None
    tensor: str | None = None
    hook: str | None = None

    @classmethod
    def parse(
        cls,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        layer: int | None = None,
        concept: int | None = None,
        tensor: str | None = None,
        hook: str | None = None,
    ) -> VectorSource:
        """Read ``PATH`` or ``PATH@KEY=VALUE,...``, whose keys are the arguments below.

        Args:
            path: The text or path; one that is there as it stands, with its ``@``, is taken so.
            format: As the key; like the others, not to be given twice.
            layer: As the key.
            concept: As the key.
            tensor: As the key; here it may hold ``@``, ``,`` and ``=``, too.
            hook: As the key.

        Raises:
            ValueError: If a value is no number of its kind, or a key is given twice.
        """
        given: dict[str, Any] = {"format": format, "layer": layer, "concept": concept, "tensor": tensor, "hook": hook}
        text = os.fspath(path)
        found = _OPTIONS.fullmatch(text)
        if found is not None and not Path(text).exists():
            text = found[1]
            for pair in found[2].split(","):
                key, _, value = pair.partition("=")
                if given[key] is not None:
                    raise ValueError(f"{key} is given twice, as {given[key]} and as {value}")
                given[key] = value if key in ("format", "tensor", "hook") else _number(key, value)
        for key in ("layer", "concept"):
            _check(key, given[key])
        return cls(Path(text), **given)


def _number(key: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal():
        raise ValueError(f"@{key}={value}: expected a whole number from 0")
    return int(value)


def _check(key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key}: expected a whole number from 0, got {value!r}")
    if key == "layer" and value >= MAX_LAYERS:
        raise ValueError(f"layer {value}: a file counts layers from 0, and to {MAX_LAYERS - 1} at most")


CONVERTERS: dict[str, str] = {
    "steering-vectors": """\
# A steering_vectors.SteeringVector that was pickled or torch.saved: each layer's output.
import torch
from safetensors.torch import save_file

vector = torch.load("OLD.pt", map_location="cpu", weights_only=False)  # of a plain pickle: pickle.load
assert vector.layer_type == "decoder_block", vector.layer_type
rows = {f"{layer}.post_mlp": row.flatten().contiguous() for layer, row in vector.layer_activations.items()}
save_file(rows, "NEW.safetensors")
""",
    "numpy": """\
# Numpy arrays by layer, pickled in .npy, .pkl or .pt (angular steering, vLLM-Hook). Each names its layers in its own
# way, and may act elsewhere than at the layers' outputs: put the right hook point in place of post_mlp.
import numpy as np
from safetensors.numpy import save_file

vectors = np.load("OLD.npy", allow_pickle=True).item()  # of .pt: torch.load(..., weights_only=False)
rows = {f"{int(layer)}.post_mlp": np.asarray(row, np.float32).ravel() for layer, row in vectors.items()}
save_file(rows, "NEW.safetensors")
""",
    "legacy-torch": """\
# A file of torch.save from before PyTorch 1.6, or of plain pickle: the same tensors in today's format.
import torch

torch.save(torch.load("OLD.pt", map_location="cpu", weights_only=False), "NEW.pt")
""",
    "objects": """\
# Any object: take its vectors, of [hidden], and name the site of each.
import torch
from safetensors.torch import save_file

made = torch.load("OLD.pt", map_location="cpu", weights_only=False)  # of a plain pickle: pickle.load
vectors = {12: made}  # the layer of each vector
rows = {f"{layer}.post_mlp": row.float().flatten().contiguous() for layer, row in vectors.items()}
save_file(rows, "NEW.safetensors")
""",
}
"""The programs by name."""

PICKLE_SUFFIXES = (".npy", ".pkl", ".pickle")
_SCANNED = 1 << 20


def advice(path: Path) -> str:
    """Say which program of `CONVERTERS` fits a file, by the classes that its pickle names; nothing of it is run."""
    name = _converter(path)
    return (
        f"Convert it where it was made: `headgate vectors converter {name}` prints the program, and "
        "docs/reference/steering.md has them all"
    )


def _converter(path: Path) -> str:
    if path.suffix == ".npy":
        return "numpy"
    names = _named_classes(path)
    if any(name.startswith("steering_vectors.") for name in names):
        return "steering-vectors"
    if any(name.partition(".")[0] in ("numpy", "_codecs") for name in names):
        return "numpy"
    is_old = path.suffix not in PICKLE_SUFFIXES and not zipfile.is_zipfile(path)
    return "legacy-torch" if is_old and all(_is_plain(name) for name in names) else "objects"


def _is_plain(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "collections")


def _named_classes(path: Path) -> set[str]:
    """Return ``module.name`` of the classes and functions in a pickle, as far as it can be read."""
    names: set[str] = set()
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_of(path)):
            if opcode.name == "GLOBAL":
                names.add(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                names.add(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    except Exception:  # noqa: BLE001  (a damaged pickle: what was found so far is all that can be said of it)
        return names
    return names


def _pickle_of(path: Path) -> bytes:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            if found is None:
                return b""
            with archive.open(found) as member:
                return member.read(_SCANNED)
    with path.open("rb") as file:
        return file.read(_SCANNED)


_CAA_NAME = re.compile(r"vec_layer_(\d{1,6})(?:_(.+))?")
_PERSONA_NAME = re.compile(r".*_(?:response_avg|prompt_avg|prompt_last)_diff")
_METADATA = "direction_metadata.json"
_ELEMENT_BITS = {16: "float16", 32: "float32", 64: "float64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignVectors:
    """The vectors of a file.

    Attributes:
        rows: float64 ``[hidden]`` for each site.
        metadata: The element type (``dtype``), and what else the file or its name says.
    """

    rows: Mapping[Site, Float64Array]
    metadata: dict[str, str] = field(default_factory=dict)


def read_caa(source: VectorSource) -> ForeignVectors:
    """Read a vector of Contrastive Activation Addition, ``vec_layer_LAYER_MODEL.pt``: ``[hidden]``, at ``post_mlp``."""
    found = _CAA_NAME.fullmatch(source.path.stem)
    layer = _one_layer(source, int(found[1]) if found else None, "the file's name")
    model = {"model": found[2]} if found and found[2] else {}
    return _single(_tensor(source.path), Site(layer, HookPoint.POST_MLP), model)


def read_persona(source: VectorSource) -> ForeignVectors:
    """Read a difference of persona_vectors, ``TRAIT_response_avg_diff.pt``: ``[layers + 1, hidden]``.

    Row ``l`` is of Hugging Face's ``hidden_states[l]``, and its tool adds it to the output of layer ``l - 1``: the site
    ``(l - 1).post_mlp``. Row 0, of the embeddings, is the output of no layer, and left out.
    """
    tensor = _of_rank(_tensor(source.path), 2, "[layers + 1, hidden]")
    if tensor.shape[0] < 2:
        raise ValueError(f"expected the shape [layers + 1, hidden], got {list(tensor.shape)}")
    about = {"left_out": "row 0, of the embeddings, which are the output of no layer"}
    return _layers(source, tensor[1:], HookPoint.POST_MLP, about)


def read_refusal(source: VectorSource) -> ForeignVectors:
    """Read ``direction.pt`` of refusal_direction: ``[hidden]``, often float64, at ``pre_attn`` of its metadata's layer.

    The metadata is the file ``direction_metadata.json`` beside it: ``{"pos": ..., "layer": ...}``.
    """
    place = source.path.with_name(_METADATA)
    about = _DirectionMetadata()
    if place.is_file():
        about = read_json(place, FeatureFileError, _DirectionMetadata)
    layer = _one_layer(source, about.layer, place.name)
    position = {} if about.pos is None else {"pos": str(about.pos)}
    return _single(_tensor(source.path), Site(layer, HookPoint.PRE_ATTN), position)


class _DirectionMetadata(msgspec.Struct):
    layer: int | None = None
    pos: int | None = None


def read_axis(source: VectorSource) -> ForeignVectors:
    """Read ``assistant_axis.pt``: ``[layers, hidden]``, alone or as ``"axis"`` of a dictionary, at ``post_mlp``."""
    file = _load(source.path)
    content = file.content
    if isinstance(content, dict):
        if "axis" not in content:
            raise ValueError(f"expected 'axis' in the dictionary, found {_keys(content)}")
        content = content["axis"]
    tensor = _of_rank(_checked(file, "axis", content), 2, "[layers, hidden]")
    return _layers(source, tensor, HookPoint.POST_MLP, {})


class _Svec(msgspec.Struct, forbid_unknown_fields=True):
    directions: dict[str, list[float]]
    model_type: str | None = None
    explained_variances: Any = None


def read_svec(source: VectorSource) -> ForeignVectors:
    """Read a ``.svec`` file of activation-steering (CAST) and EasySteer: JSON, directions by layer, at ``pre_attn``."""
    document = read_json(source.path, FeatureFileError, _Svec)
    rows = {}
    for key, values in document.directions.items():
        if not key.isascii() or not key.isdecimal() or int(key) >= MAX_LAYERS:
            raise ValueError(f"directions: expected layers from 0 to {MAX_LAYERS - 1}, got {shown(key)}")
        rows[Site(int(key), HookPoint.PRE_ATTN)] = np.asarray(values, np.float64)
    if len(rows) != len(document.directions):
        raise ValueError("directions: a layer is given twice")
    model = {} if document.model_type is None else {"model_type": document.model_type}
    return ForeignVectors(rows=_chosen(rows, source.layer), metadata={"dtype": "float64", **model})


def read_axbench(source: VectorSource) -> ForeignVectors:
    """Read one concept of ``METHOD_weight.pt`` of AxBench: ``[concepts, hidden]``, at ``post_mlp`` of the given layer.

    The bias of ``METHOD_bias.pt`` beside it is of the concept's detector, and becomes metadata; it does not steer.
    """
    path, concept = source.path, source.concept
    if path.stem.endswith("_bias"):
        weights = path.with_name(f"{path.stem.removesuffix('_bias')}_weight{path.suffix}").name
        raise ValueError(f"these are the biases of detectors; the vectors are in {weights}")
    weight = _of_rank(_tensor(path), 2, "[concepts, hidden]")
    if source.layer is None or concept is None:
        raise ValueError(
            f"holds {weight.shape[0]} concepts and no layer; give both: layer= (that of the run's configuration) "
            f"and concept=, or {path.name}@layer=N,concept=N"
        )
    about = {"concept": str(concept)}
    row = _row_of(weight, concept, "concept")
    beside = path.with_name(f"{path.stem.removesuffix('_weight')}_bias{path.suffix}")
    if path.stem.endswith("_weight") and beside.is_file():
        bias = _of_rank(_tensor(beside), 1, "[concepts]")
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{beside.name}: expected {weight.shape[0]} biases, got the shape {list(bias.shape)}")
        about["bias"] = repr(float(bias[concept].read()))
    return _single(row, Site(source.layer, HookPoint.POST_MLP), about)


def read_tensor(source: VectorSource) -> ForeignVectors:
    """Read one tensor by its name, ``[hidden]`` or one row of ``[n, hidden]``, at a hook point of the layer given."""
    tensors = _tensors(source.path)
    name = next(iter(tensors)) if source.tensor is None and len(tensors) == 1 else source.tensor
    if name is None or name not in tensors:
        raise ValueError(unnamed_tensors(source.path, tensors, name))
    hook = HOOK_NAMES.get(source.hook or "post_mlp")
    if hook in (None, HookPoint.FINAL_NORM):
        raise ValueError(f"hook {shown(source.hook)}: expected one of {', '.join(HOOK_NAMES)}, but final_norm")
    row, named = tensors[name], f"tensor {name!r}" if name else "the array"
    if len(row.shape) == 2 and (source.concept is not None or row.shape[0] == 1):
        row = _row_of(row, source.concept or 0, "row")
    elif len(row.shape) == 2:
        raise ValueError(f"{named} has the shape {list(row.shape)}; give the row that is the vector: concept=N")
    elif source.concept is not None:
        raise ValueError(f"concept={source.concept}: {named} is one vector")
    values, about = row_of(row), {"tensor": name} if name else {}
    site = Site(_one_layer(source, None, named), hook)
    return ForeignVectors(rows={site: values}, metadata={"dtype": _dtype(row), **about})


def _tensors(path: Path) -> Mapping[str, LazyTensor]:
    """Return the tensors of a file of any format; the one of a file without names is called ""."""
    if path.suffix not in TORCH_SUFFIXES:
        try:
            return open_tensors(path).tensors
        except FeatureFileError as error:
            hint = f" {advice(path)}" if path.suffix in PICKLE_SUFFIXES and path.is_file() else ""
            raise ValueError(f"{str(error).removeprefix(f'{path}: ')}.{hint}" if hint else str(error)) from error
    file = _load(path)
    named = file.content if isinstance(file.content, dict) else {"": file.content}
    return {str(name): _checked(file, str(name), value) for name, value in named.items() if hasattr(value, "shape")}


def unnamed_tensors(path: Path, tensors: Mapping[str, LazyTensor], asked: str | None = None) -> str:
    """Say which tensors a file has, and how one of them is chosen."""
    shapes = [f"{name or 'one without a name'} {list(tensor.shape)}" for name, tensor in tensors.items()]
    more = f" and {len(shapes) - _SHOWN_TENSORS} more" if len(shapes) > _SHOWN_TENSORS else ""
    there = ", ".join(shapes[:_SHOWN_TENSORS]) + more
    asked_for = "" if asked is None else f"there is no tensor {shown(asked)}; "
    first = next(iter(tensors), "NAME")
    return (
        f"{asked_for}it has {there or 'no tensor'}. Choose one, and say where it acts: tensor=NAME and layer=N, "
        f"or {path.name}@tensor={first},layer=N (and hook= where that is not the layer's output)"
    )


def row_of(tensor: LazyTensor) -> np.ndarray[Any, Any]:
    """Read a vector ``[hidden]``: float64 if it is stored so, else float32.

    Raises:
        ValueError: If it has another shape or type.
    """
    if len(tensor.shape) != 1:
        raise ValueError(f"{tensor.where}: expected the shape [hidden], got {list(tensor.shape)}")
    if tensor.dtype.kind != "f" and not tensor.is_bfloat16:
        raise ValueError(f"{tensor.where}: expected real numbers, got elements of type {tensor.dtype}")
    return tensor.read(np.float64 if tensor.num_bits == 64 else np.float32)


class ForeignFormat(NamedTuple):
    """A format of another tool.

    Attributes:
        read: Its reader.
        acts_on: The tokens that its own tool steers.
        takes_concept: Whether a file holds vectors of several concepts.
    """

    read: Callable[[VectorSource], ForeignVectors]
    acts_on: str
    takes_concept: bool = False


FOREIGN_FORMATS: dict[str, ForeignFormat] = {
    "caa": ForeignFormat(read_caa, "the tokens after the instruction: decode_steering_vectors"),
    "persona_vectors": ForeignFormat(read_persona, "the prompt's last token and generated ones (its type 'response')"),
    "refusal_direction": ForeignFormat(read_refusal, "all tokens"),
    "assistant_axis": ForeignFormat(read_axis, "all tokens"),
    "svec": ForeignFormat(read_svec, "all tokens"),
    "axbench": ForeignFormat(read_axbench, "all tokens behind the first", takes_concept=True),
    "tensor": ForeignFormat(read_tensor, "not known: the file does not tell", takes_concept=True),
}
"""Formats by their names."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
ARRAY_SUFFIXES = (".npy", ".npz")
_SHOWN_TENSORS = 8


def recognise(path: Path) -> str:
    """Return the name of the format of a file whose suffix is ``.svec`` or PyTorch's.

    Raises:
        ValueError: If neither its name nor its content determines the format.
        OSError: If it cannot be read.
    """
    if path.suffix == ".svec":
        return "svec"
    if _CAA_NAME.fullmatch(path.stem):
        return "caa"
    if _PERSONA_NAME.fullmatch(path.stem):
        return "persona_vectors"
    if path.stem == "direction" and path.with_name(_METADATA).is_file():
        return "refusal_direction"
    if path.stem == "assistant_axis":
        return "assistant_axis"
    if path.stem.endswith(("_weight", "_bias")):
        return "axbench"
    content = _load(path).content
    if isinstance(content, dict) and "axis" in content:
        return "assistant_axis"
    held = f"a dictionary of {_keys(content)}" if isinstance(content, dict) else f"a {type(content).__name__}"
    shape = f" of the shape {list(content.shape)}" if hasattr(content, "shape") else ""
    raise ValueError(
        f"holds {held}{shape}, and neither that nor its name tells the format; give it: "
        f"format=NAME, or {path.name}@format=NAME, with one of {', '.join(FOREIGN_FORMATS)}; or take it as it is: "
        f"{path.name}@{'tensor=NAME' if isinstance(content, dict) else 'format=tensor'},layer=N"
    )


def _load(path: Path) -> TorchFile:
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    try:
        return TorchFile(path)
    except PickledObjectsError as error:
        raise ValueError(f"{error.reason}. {advice(path)}") from error


def _tensor(path: Path) -> LazyTensor:
    file = _load(path)
    return _checked(file, "vector", file.content)


def _checked(file: TorchFile, name: str, value: Any) -> LazyTensor:
    if not hasattr(value, "shape"):
        raise ValueError(f"expected a tensor, got {shown(value) if not isinstance(value, dict) else _keys(value)}")
    try:
        tensor = file.tensor(name, value)
    except FeatureFileError as error:
        raise ValueError(str(error).removeprefix(f"{file.path}: ")) from error
    if tensor.dtype.kind != "f" and not tensor.is_bfloat16:
        raise ValueError(f"expected real numbers, got elements of type {value.dtype}")
    return tensor


def _keys(content: Mapping[Any, Any]) -> str:
    return shown(list(content)[:8])


def _of_rank(tensor: LazyTensor, rank: int, layout: str) -> LazyTensor:
    if len(tensor.shape) != rank or not tensor.size:
        raise ValueError(f"expected the shape {layout}, got {list(tensor.shape)}")
    return tensor


def _one_layer(source: VectorSource, reported: int | None, by: str) -> int:
    """Return the layer of a file with one vector: by the file, or as the caller says."""
    layer = source.layer if reported is None else reported
    if layer is None:
        raise ValueError(f"{by} does not tell the layer; give it: layer=N, or {source.path.name}@layer=N")
    if source.layer not in (None, layer):
        raise ValueError(f"layer {source.layer} was asked for, and {by} says {layer}")
    if not 0 <= layer < MAX_LAYERS:
        raise ValueError(f"{by}: layer {layer}: expected 0 to {MAX_LAYERS - 1}")
    return layer


def _row_of(tensor: LazyTensor, index: int, of: str) -> LazyTensor:
    if index >= tensor.shape[0]:
        raise ValueError(f"there is no {of} {index}; the file has 0 to {tensor.shape[0] - 1}")
    return tensor[index]


def _single(tensor: LazyTensor, site: Site, about: Mapping[str, str]) -> ForeignVectors:
    row = _of_rank(tensor, 1, "[hidden]")
    return ForeignVectors(rows={site: row.read()}, metadata={"dtype": _dtype(tensor), **about})


def _layers(source: VectorSource, tensor: LazyTensor, hook: HookPoint, about: Mapping[str, str]) -> ForeignVectors:
    if tensor.shape[0] > MAX_LAYERS:
        raise ValueError(f"{tensor.shape[0]} layers; {MAX_LAYERS} are read at most")
    layers = range(tensor.shape[0]) if source.layer is None else [source.layer]
    rows = {Site(layer, hook): _row_of(tensor, layer, "layer").read() for layer in layers}
    return ForeignVectors(rows=rows, metadata={"dtype": _dtype(tensor), **about})


def _chosen(rows: Mapping[Site, Float64Array], layer: int | None) -> Mapping[Site, Float64Array]:
    if layer is None:
        return rows
    kept = {site: row for site, row in rows.items() if site.layer == layer}
    if not kept:
        raise ValueError(f"there is no layer {layer}; the file has {', '.join(str(site.layer) for site in rows)}")
    return kept


def _dtype(tensor: LazyTensor) -> str:
    return "bfloat16" if tensor.is_bfloat16 else _ELEMENT_BITS[tensor.num_bits]
