"""Steering vectors on disk: saved, loaded, and exchanged with other tools.

Three formats, told apart by the suffix of the path:

* ``.safetensors``: one tensor ``[hidden]`` for each vector, called ``TIER/LAYER.HOOK`` (``vectors/12.post_mlp``,
  ``prefill_vectors/...``, ``decode_vectors/...``) in the dtype of its values; the metadata says
  ``{"headgate.steering": "1"}`` beside the user's own. Tensors without a tier
  (``12.post_mlp``) are read as ``vectors``.
* ``.json``: ``{"vectors": {hook: ...}, "prefill_vectors": ..., "decode_vectors": ..., "metadata": {...}}``, the
  document that registers a module, in any form a request may have; packed when written.
* ``.gguf``: a control vector of llama.cpp and repeng; see `headgate.steering.files.gguf_files`.

Loading gives the very vectors that were saved: their values, dtype and content key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.sites import FINAL_NORM_SITE, HOOK_NAMES, HookPoint, Site, sort_sites
from headgate.steering.files import gguf_files, tensor_bytes
from headgate.steering.requests.request_fields import MODULE_FIELDS, read_tier, sum_tiers
from headgate.steering.spec import SteeringSpec
from headgate.steering.vectors.dtypes import STORAGE, StoredType, widen
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable

FORMAT = {"headgate.steering": "1"}

MAX_LAYERS = 4096
"""Layers of a model that a file is read for, at most."""

_FORMAT_NAME: dict[StoredType, str] = {dtype: name for name, dtype in tensor_bytes.FORMAT_NAMES.items()}


class VectorFileError(HeadgateError, ValueError):
    """A file of steering vectors cannot be read or written; the message names it and says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorFile:
    """The content of a file of vectors.

    Attributes:
        vectors: For both phases; pass it as ``steering_vectors``.
        prefill_vectors: For the prompt in addition; pass it as ``prefill_steering_vectors``.
        decode_vectors: For generated tokens in addition; pass it as ``decode_steering_vectors``.
        metadata: The user's own notes.
    """

    vectors: PhaseVectors | None = None
    prefill_vectors: PhaseVectors | None = None
    decode_vectors: PhaseVectors | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def tiers(self) -> dict[str, PhaseVectors]:
        """Return the tiers that are not None, by the names of the attributes."""
        tiers = zip(MODULE_FIELDS, (self.vectors, self.prefill_vectors, self.decode_vectors), strict=True)
        return {name: tier for name, tier in tiers if tier is not None}

    def spec(self, steerable: Steerable) -> SteeringSpec:
        """Return the content as a named module of a model.

        Raises:
            RequestError: If it does not fit the model: its width, a layer, a site, a value too large.
        """
        tiers = self.tiers()
        return sum_tiers(
            [read_tier(tiers.get(name), steerable, name) for name in MODULE_FIELDS], steerable, MODULE_FIELDS
        )


def save(path: str | os.PathLike[str], content: VectorFile | PhaseVectors) -> None:
    """Write a file in the format of its suffix; an earlier one is replaced at once, never half.

    Raises:
        VectorFileError: If the format cannot hold the vectors, or its suffix is not known.
        OSError: If it cannot be written.
    """
    target = Path(path)
    file = VectorFile(vectors=content) if isinstance(content, PhaseVectors) else content
    if not file.tiers():
        raise VectorFileError(f"{target}: there is no vector to save")
    write = _WRITERS[_suffix(target)]
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write(temporary, file)
        temporary.replace(target)
    except ValueError as error:
        raise VectorFileError(f"{target}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> VectorFile:
    """Read a file in the format of its suffix.

    Raises:
        VectorFileError: If it is damaged or not of that format.
        OSError: If it cannot be read.
    """
    source = Path(path)
    read = _READERS[_suffix(source)]
    try:
        file = read(source)
    except (ValueError, msgspec.DecodeError) as error:  # a RequestError is a ValueError
        raise VectorFileError(f"{source}: {error}") from error
    if not file.tiers():
        raise VectorFileError(f"{source}: there is no vector other than zero in it")
    return file


def _suffix(path: Path) -> str:
    if path.suffix not in _READERS:
        raise VectorFileError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(sorted(_READERS))}")
    return path.suffix


def _write_tensors(path: Path, file: VectorFile) -> None:
    tensors = {}
    for name, tier in file.tiers().items():
        for site, row in zip(tier.sites, tier.rows, strict=True):
            tensor = tensor_bytes.Tensor(_FORMAT_NAME[tier.dtype], (tier.hidden_size,), row.tobytes())
            tensors[f"{name}/{site.name}"] = tensor
    path.write_bytes(tensor_bytes.encode(tensors, {**file.metadata, **FORMAT}))


def _read_tensors(path: Path) -> VectorFile:
    tensors, metadata = tensor_bytes.decode(path.read_bytes())
    if any(metadata.get(key, value) != value for key, value in FORMAT.items()):
        raise ValueError(f"expected the metadata {FORMAT}, got {metadata}")
    tiers: dict[str, dict[Site, Any]] = {}
    for name, tensor in tensors.items():
        tier, _, site_name = name.rpartition("/")
        if (tier or "vectors") not in MODULE_FIELDS:
            raise ValueError(f"tensor {name!r}: expected TIER/LAYER.HOOK with a tier of {', '.join(MODULE_FIELDS)}")
        rows = tiers.setdefault(tier or "vectors", {})
        site = Site.parse(site_name)
        if site in rows:
            raise ValueError(f"tensor {name!r}: {site.name} is given twice")
        rows[site] = _row(name, tensor)
    return VectorFile(
        metadata={key: value for key, value in metadata.items() if key not in FORMAT},
        **{name: PhaseVectors.from_rows(rows) for name, rows in tiers.items()},
    )


def _row(name: str, tensor: tensor_bytes.Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == "F64":
        row = np.frombuffer(tensor.data, "<f8")
    elif tensor.dtype in tensor_bytes.FORMAT_NAMES:
        dtype = tensor_bytes.FORMAT_NAMES[tensor.dtype]
        row = widen(np.frombuffer(tensor.data, STORAGE[dtype]), dtype)
    else:
        known = ", ".join(tensor_bytes.FORMAT_NAMES)
        raise ValueError(f"tensor {name!r}: expected {known} or F64, got {tensor.dtype}")
    if tensor.shape != row.shape:
        raise ValueError(f"tensor {name!r}: expected the shape [hidden], got {list(tensor.shape)} in {row.size} values")
    return row


def _write_json(path: Path, file: VectorFile) -> None:
    document: dict[str, Any] = {name: tier.packed() for name, tier in file.tiers().items()}
    if file.metadata:
        document["metadata"] = dict(file.metadata)
    path.write_bytes(msgspec.json.encode(document))  # bytes become base64


def _read_json(path: Path) -> VectorFile:
    document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    if document and set(document) <= set(HOOK_NAMES):
        document = {"vectors": document}
    unknown = set(document) - {*MODULE_FIELDS, "name", "metadata"}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}; known: {', '.join(MODULE_FIELDS)}, name, metadata")
    metadata = msgspec.convert(document.get("metadata") or {}, dict[str, str])
    steerable = _any_model([document.get(name) for name in MODULE_FIELDS])
    tiers = {name: read_tier(document.get(name), steerable, name) for name in MODULE_FIELDS}
    return VectorFile(metadata=metadata, **tiers)


def _any_model(tiers: list[Any]) -> Steerable:
    """Return a model that the document's layers and widths fit, so that it can be read before the real one is known."""
    layers, hidden = {0}, 1
    for layer, vector in (pair for tier in tiers if isinstance(tier, dict) for pair in _layers(tier)):
        if not 0 <= layer < MAX_LAYERS:
            raise ValueError(f"layer {layer}: a file counts layers from 0, and to {MAX_LAYERS - 1} at most")
        layers.add(layer)
        hidden = max(hidden, vector)
    hooks = [hook for hook in HookPoint if hook is not HookPoint.FINAL_NORM]
    sites = [Site(layer, hook) for layer in range(max(layers) + 1) for hook in hooks]
    return Steerable(
        num_layers=max(layers) + 1,
        hidden_size=hidden,
        dtype="float32",
        sites=sort_sites([*sites, FINAL_NORM_SITE]),
        max_vectors=2 * len(sites) + 2,
    )


def _layers(tier: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield ``(layer, width)`` of every vector of a tier that has them; errors are left to `read_tier`."""
    for hook, vectors in tier.items():
        is_final = HOOK_NAMES.get(hook) is HookPoint.FINAL_NORM
        if isinstance(vectors, dict) and isinstance(vectors.get("shape"), list):
            listed = vectors.get("layer_indices")
            width = next((size for size in vectors["shape"][1:] if isinstance(size, int)), 1)
            pairs = [(layer, width) for layer in listed if isinstance(layer, int)] if isinstance(listed, list) else []
        elif isinstance(vectors, dict) and not is_final:
            pairs = [(int(key), _width(given)) for key, given in vectors.items() if key.lstrip("-").isdecimal()]
        else:
            pairs = [(0, _width(vectors))]
        yield from ((0 if is_final else layer, width) for layer, width in pairs)


def _width(given: Any) -> int:
    vector = given.get("vector") if isinstance(given, dict) else given
    return len(vector) if isinstance(vector, list) else 1


def _write_gguf(path: Path, file: VectorFile) -> None:
    if set(file.tiers()) != {"vectors"}:
        raise ValueError("a control vector steers both phases alike; save the vectors as .safetensors")
    gguf_files.write(path, cast("PhaseVectors", file.vectors), file.metadata)


def _read_gguf(path: Path) -> VectorFile:
    vectors, metadata = gguf_files.read(path)
    return VectorFile(vectors=vectors, metadata=metadata)


_READERS: dict[str, Callable[[Path], VectorFile]] = {
    ".safetensors": _read_tensors,
    ".json": _read_json,
    ".gguf": _read_gguf,
}
_WRITERS: dict[str, Callable[[Path, VectorFile], None]] = {
    ".safetensors": _write_tensors,
    ".json": _write_json,
    ".gguf": _write_gguf,
}
