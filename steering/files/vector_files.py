"""Steering vectors on disk: saved, loaded, and exchanged with other tools.

Three formats are written and read, distinguished by the suffix of the path:

* ``.safetensors``: one tensor ``[hidden]`` for each vector, called ``TIER/LAYER.HOOK`` (``vectors/12.post_mlp``,
  ``prefill_vectors/...``, ``decode_vectors/...``) in the dtype of its values; the metadata says
  ``{"headgate.steering": "1"}`` beside the user's own. Tensors without a tier
  (``12.post_mlp``) are read as ``vectors``.
* ``.json``: ``{"vectors": {hook: ...}, "prefill_vectors": ..., "decode_vectors": ..., "metadata": {...}}``, the
  document that registers a module, in any form a request may have; packed when written.
* ``.gguf``: a control vector of llama.cpp and repeng; see `headgate.steering.files.gguf_files`.

Loading gives the very vectors that were saved: their values, dtype and content key. Files of other tools are read, too:
`headgate.steering.files.foreign_files` has each one's layout and site.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headgate.capture.files.reading import read_json, refusing
from headgate.capture.files.tensors import open_safetensors
from headgate.capture.files.writing import replacing
from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.sites import FINAL_NORM_SITE, HOOK_NAMES, HookPoint, Site, sort_sites
from headgate.steering.documents.request import MODULE_FIELDS, sum_tiers
from headgate.steering.documents.vectors import read_tier
from headgate.steering.files import gguf_files, tensor_bytes
from headgate.steering.files.foreign_files import (
    ARRAY_SUFFIXES,
    FOREIGN_FORMATS,
    MAX_LAYERS,
    PICKLE_SUFFIXES,
    TORCH_SUFFIXES,
    VectorSource,
    advice,
    recognise,
    row_of,
    unnamed_tensors,
)
from headgate.steering.spec import SteeringSpec
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable, vectors_html

if TYPE_CHECKING:
    from headgate.steering.probes.groups import GroupDirections

FORMAT = {"headgate.steering": "1"}

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

    def _repr_html_(self) -> str:
        """Return it as HTML for a notebook: metadata, and norms by site."""
        tiers = {name: (tier.sites, tier.float32()) for name, tier in self.tiers().items()}
        about = {f"metadata {name}": text for name, text in self.metadata.items()}
        return vectors_html("VectorFile", {"tiers": ", ".join(tiers) or "none", **about}, tiers)

    def spec(self, steerable: Steerable) -> SteeringSpec:
        """Return the content as a named module of a model.

        Raises:
            RequestError: If it does not fit the model: its width, a layer, a site, a value too large.
        """
        tiers = self.tiers()
        return sum_tiers(
            [read_tier(tiers.get(name), steerable, name) for name in MODULE_FIELDS], steerable, MODULE_FIELDS
        )


def save(path: str | os.PathLike[str], content: VectorFile | PhaseVectors | GroupDirections) -> None:
    """Write a file in the format of its suffix; an earlier one is replaced at once, never half.

    Args:
        path: Where to.
        content: What to write; of directions between groups the vectors and the metadata.

    Raises:
        VectorFileError: If the format cannot hold the vectors, or its suffix is not known.
        OSError: If it cannot be written.
    """
    target = Path(path)
    file = _file_of(content)
    if not file.tiers():
        raise VectorFileError(f"{target}: there is no vector to save")
    write = _WRITERS[_suffix(target)]
    try:
        with replacing(target) as new:
            write(new, file)
    except ValueError as error:
        raise VectorFileError(f"{target}: {error}") from error


def _file_of(content: VectorFile | PhaseVectors | GroupDirections) -> VectorFile:
    if isinstance(content, VectorFile):
        return content
    if isinstance(content, PhaseVectors):
        return VectorFile(vectors=content)
    return VectorFile(vectors=content.vectors, metadata=content.metadata)


def load(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    layer: int | None = None,
    concept: int | None = None,
    tensor: str | None = None,
    hook: str | None = None,
) -> VectorFile:
    """Read a file of vectors, of headgate or of another tool; no code of it is run.

    ::

        load("joy.safetensors")
        load("evil_response_avg_diff.pt", layer=19)
        load("DiffMean_weight.pt@layer=20,concept=3")
        load("all.safetensors@tensor=directions.refusal,layer=14")

    Args:
        path: The file. A text may end in ``@KEY=VALUE,...``, which stands for the other arguments, so that they can be
            given wherever a file of vectors is named.
        format: ``safetensors``, ``json``, ``gguf``, ``caa``, ``persona_vectors``, ``refusal_direction``,
            ``assistant_axis``, ``svec``, ``axbench`` or ``tensor``; recognised by name and content if None.
        layer: The layer of the site, of a file that does not name it; of one with a vector for each layer, the one to
            take. Counted as sites are: layer 19 is ``19.post_mlp``, however the tool that made the file counts.
        concept: The concept to take, of a file of several (AxBench); the row, of a tensor with several.
        tensor: The name of the tensor to take, of a file whose names say nothing to headgate; the format is then
            ``tensor``, and `layer` has to be given.
        hook: Of such a tensor, the hook point that it acts at; ``post_mlp``, the layer's output, if None.

    Returns:
        The vectors, those of other tools in `VectorFile.vectors` and rounded to float32. The metadata then has
        ``format``, ``dtype``, the element type in the file, ``acts_on``, the tokens that the tool itself steers, and
        what the file says.

    Raises:
        VectorFileError: If it is damaged or not of that format, may run code, or leaves open what an argument must say.
        OSError: If it cannot be read.
    """
    try:
        source = VectorSource.parse(path, format=format, layer=layer, concept=concept, tensor=tensor, hook=hook)
    except ValueError as error:
        raise VectorFileError(f"{os.fspath(path)}: {error}") from error
    name = format_of(source)
    with refusing(source.path, VectorFileError):
        file = _READERS[f".{name}"](source.path) if name not in FOREIGN_FORMATS else _read_foreign(name, source)
    if not file.tiers():
        raise VectorFileError(f"{source.path}: there is no vector other than zero in it")
    return file


def format_of(source: VectorSource) -> str:
    """Return the name of a file's format: the given one, or else the one that its name and content show.

    Raises:
        VectorFileError: If there is no such format, they do not show it, or the format has no use for layer or concept.
        OSError: If it cannot be read.
    """
    path = source.path
    with refusing(path, VectorFileError):
        name = source.format or ("tensor" if source.tensor is not None else _recognise(path))
    if name not in FORMATS:
        raise VectorFileError(f"{path}: unknown format {name!r}; known: {', '.join(FORMATS)}")
    foreign = FOREIGN_FORMATS.get(name)
    is_tensor, has_concepts = name == "tensor", foreign is not None and foreign.takes_concept
    taken = {"layer": foreign is not None, "concept": has_concepts, "tensor": is_tensor, "hook": is_tensor}
    for key, takes in taken.items():
        value = getattr(source, key)
        if value is not None and not takes:
            raise VectorFileError(f"{path}: {key}={value}: a file of the format {name} has no use for it")
    return name


def _recognise(path: Path) -> str:
    if path.suffix in _READERS:
        return path.suffix.removeprefix(".")
    if path.suffix == ".svec" or path.suffix in TORCH_SUFFIXES:
        return recognise(path)
    if path.suffix in ARRAY_SUFFIXES:
        return "tensor"
    if path.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{path.suffix} files may run code, so they are not loaded. {advice(path)}")
    known = ", ".join(sorted([*_READERS, ".svec", *TORCH_SUFFIXES, *ARRAY_SUFFIXES]))
    raise ValueError(f"unknown suffix {path.suffix!r}; known: {known}")


def _read_foreign(name: str, source: VectorSource) -> VectorFile:
    made_by = FOREIGN_FORMATS[name]
    found = made_by.read(source)
    about = {"format": name, "acts_on": made_by.acts_on, **found.metadata}
    return VectorFile(vectors=PhaseVectors.from_rows(found.rows), metadata=about)


def _suffix(path: Path) -> str:
    if path.suffix not in _WRITERS:
        raise VectorFileError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(sorted(_WRITERS))}")
    return path.suffix


def _write_tensors(path: Path, file: VectorFile) -> None:
    tensors = {}
    for name, tier in file.tiers().items():
        for site, row in zip(tier.sites, tier.rows, strict=True):
            tensor = tensor_bytes.Tensor(_FORMAT_NAME[tier.dtype], (tier.hidden_size,), row.tobytes())
            tensors[f"{name}/{site.name}"] = tensor
    path.write_bytes(tensor_bytes.encode(tensors, {**file.metadata, **FORMAT}))


def _read_tensors(path: Path) -> VectorFile:
    file = open_safetensors(path, VectorFileError)
    metadata = file.texts
    if any(metadata.get(key, value) != value for key, value in FORMAT.items()):
        raise ValueError(f"expected the metadata {FORMAT}, got {metadata}")
    tiers: dict[str, dict[Site, Any]] = {}
    for name, tensor in file.tensors.items():
        tier, _, site_name = name.rpartition("/")
        site = _site_of(site_name)
        if (tier or "vectors") not in MODULE_FIELDS or site is None:
            raise ValueError(
                f"tensor {name!r}: expected TIER/LAYER.HOOK with a tier of {', '.join(MODULE_FIELDS)}, or none; "
                f"{unnamed_tensors(path, file.tensors)}"
            )
        rows = tiers.setdefault(tier or "vectors", {})
        if site in rows:
            raise ValueError(f"tensor {name!r}: {site.name} is given twice")
        rows[site] = row_of(tensor)
    return VectorFile(
        metadata={key: value for key, value in metadata.items() if key not in FORMAT},
        **{name: PhaseVectors.from_rows(rows) for name, rows in tiers.items()},
    )


def _site_of(name: str) -> Site | None:
    try:
        return Site.parse(name)
    except ValueError:
        return None


def _write_json(path: Path, file: VectorFile) -> None:
    document: dict[str, Any] = {name: tier.packed() for name, tier in file.tiers().items()}
    if file.metadata:
        document["metadata"] = dict(file.metadata)
    path.write_bytes(msgspec.json.encode(document))  # bytes become base64


def _read_json(path: Path) -> VectorFile:
    document = read_json(path, VectorFileError)
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

FORMATS = (*(suffix.removeprefix(".") for suffix in _READERS), *FOREIGN_FORMATS)
"""Names of the formats that `load` reads."""
