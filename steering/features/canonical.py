"""headgate's own file of an SAE or transcoder: safetensors, with the rows of each feature contiguous.

Tensors: ``encoder`` ``[F, D]`` and ``decoder.0``, ``decoder.1``, ... ``[F, O]`` in one element type; ``bias`` ``[F]``,
``decoder_bias.0``, ... ``[O]`` and, where there are any, ``threshold``, ``magnitude_scale``, ``magnitude_bias`` and
``max_activations`` ``[F]`` in float64; ``skip`` ``[O, D]`` in float32. The metadata ``headgate.sparse_coder`` is the
version of the format, and ``about`` a JSON document of `_Metadata`. Everything that can be folded into the weights is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from headgate.capture.files.tensors import SAFETENSORS
from headgate.capture.files.writing import replacing
from headgate.capture.schema.sites import Site
from headgate.steering.features.source_coder import CoderKind, Hints, Norm, SourceCoder
from headgate.steering.features.sparse_coder import Encoding, FoldedWeights, digest
from headgate.steering.features.tensors import Array, FeatureFileError, open_tensors

RowType = Literal["bfloat16", "float16", "float32"]
VERSION_KEY, VERSION = "headgate.sparse_coder", "1"

_CODES: dict[RowType, tuple[str, int]] = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
_ENCODER, _BIAS, _THRESHOLD, _SKIP, _LARGEST = "encoder", "bias", "threshold", "skip", "max_activations"
_MAGNITUDE = ("magnitude_scale", "magnitude_bias")
_PLACE = dict[str, tuple[str, int, tuple[int, ...]]]


class _Metadata(msgspec.Struct, kw_only=True):
    """The coder as the metadata describe it.

    Attributes:
        name: Chosen at import.
        kind: As in `SourceCoder`, like `k`, `norm`, `model` and `declared`.
        read_site: Name of the site, if known.
        write_sites: Write sites of a transcoder.
        format: Format of the imported files.
        sha256: Hash of the imported files.
        path: The file or folder that was imported.
    """

    name: str
    kind: CoderKind
    k: int | None
    norm: Norm
    read_site: str | None
    write_sites: list[str]
    format: str
    sha256: str
    path: str
    model: str | None
    declared: dict[str, float]


def write_coder(target: Path, coder: SourceCoder, *, name: str, path: str, row_dtype: RowType | None = None) -> None:
    """Fold a coder and write it, by blocks of features; an earlier file is replaced at once, never half.

    Args:
        target: The file.
        coder: As a reader returned it.
        name: Name of the coder.
        path: The file or folder that is imported.
        row_dtype: Element type of the rows; if None, the source's, or float32 where folding changes the rows.

    Raises:
        FeatureFileError: If a weight is not finite, or does not fit into `row_dtype`.
        OSError: If it cannot be written.
    """
    dtype = row_dtype or _row_type(coder)
    about = _Metadata(
        name=name,
        kind=coder.kind,
        k=coder.k,
        norm=coder.norm,
        read_site=coder.read_site.name if coder.read_site else None,
        write_sites=[site.name for site in coder.write_sites],
        format=coder.format,
        sha256=coder.sha256 or digest(coder.paths),
        path=path,
        model=coder.model,
        declared=dict(coder.declared),
    )
    header, offsets = _header(_layout(coder, dtype), about)
    with replacing(target) as new, new.open("wb") as file:
        file.write(header)
        _write_weights(file, FoldedWeights(coder), dtype, offsets)
        file.flush()
        os.fsync(file.fileno())


def claims(path: Path) -> bool:
    """Whether a file is one that `write_coder` wrote."""
    return path.is_file() and path.suffix == SAFETENSORS and VERSION_KEY in open_tensors(path).texts


def read(path: Path, hints: Hints) -> SourceCoder:
    """Open a file that `write_coder` wrote; its weights are not read.

    Raises:
        FeatureFileError: If it is damaged, or of another version.
    """
    file = open_tensors(path)
    if file.texts.get(VERSION_KEY) != VERSION:
        raise FeatureFileError(f"{path}: expected version {VERSION} of headgate's format; import the SAE again")
    try:
        about = msgspec.json.decode(file.texts.get("about", ""), type=_Metadata)
        write_sites = tuple(Site.parse(text) for text in about.write_sites)
        read_site = None if about.read_site is None else Site.parse(about.read_site)
    except ValueError as error:
        raise FeatureFileError(f"{path}: damaged metadata: {error}") from error
    count = max(1, len(write_sites))
    threshold, factor, shift, largest = (
        None if tensor is None else tensor.read() for tensor in map(file.get, (_THRESHOLD, *_MAGNITUDE, _LARGEST))
    )
    return SourceCoder(
        format=about.format,
        paths=(path,),
        kind=about.kind,
        encoder=file[_ENCODER],
        decoders=tuple(file[f"decoder.{index}"] for index in range(count)),
        bias=file[_BIAS].read(),
        decoder_biases=tuple(file[f"decoder_bias.{index}"].read() for index in range(count)),
        threshold=threshold,
        magnitude=None if factor is None or shift is None else (factor, shift),
        k=about.k,
        norm=about.norm,
        skip=file.get(_SKIP),
        read_site=read_site or hints.site,
        write_sites=write_sites,
        model=about.model,
        declared=about.declared,
        max_activations=largest,
        name=about.name,
        sha256=about.sha256,
    )


def _row_type(coder: SourceCoder) -> RowType:
    changes = coder.folds_decoder_norm or coder.scale != 1 or coder.gain is not None
    tensors = (coder.encoder, *coder.decoders)
    if changes or any(tensor.num_bits > 16 for tensor in tensors):
        return "float32"
    types = {tensor.is_bfloat16 for tensor in tensors}
    return "float32" if len(types) > 1 else "bfloat16" if types == {True} else "float16"


def _layout(coder: SourceCoder, dtype: RowType) -> _PLACE:
    """Return type, bytes of an element and shape of each tensor, in the order of the file."""
    num_features = len(coder.bias)
    code, size = _CODES[dtype]
    columns = [_BIAS]
    columns += [_THRESHOLD] if coder.threshold is not None else []
    columns += _MAGNITUDE if coder.magnitude is not None else []
    columns += [_LARGEST] if coder.max_activations is not None else []
    plan: _PLACE = dict.fromkeys(columns, ("F64", 8, (num_features,)))
    for index, bias in enumerate(coder.decoder_biases):
        plan[f"decoder_bias.{index}"] = ("F64", 8, bias.shape)
    if coder.skip is not None:
        plan[_SKIP] = ("F32", 4, coder.skip.shape)
    plan[_ENCODER] = (code, size, coder.encoder.shape)
    for index, decoder in enumerate(coder.decoders):
        plan[f"decoder.{index}"] = (code, size, decoder.shape)
    return plan


def _header(plan: _PLACE, about: _Metadata) -> tuple[bytes, dict[str, int]]:
    metadata = {VERSION_KEY: VERSION, "about": msgspec.json.encode(about).decode()}
    entries: dict[str, object] = {"__metadata__": metadata}
    starts, end = {}, 0
    for name, (code, size, shape) in plan.items():
        starts[name], end = end, end + size * int(np.prod(shape))
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": (starts[name], end)}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)  # so that float64 lies aligned in a mapped file
    header = len(text).to_bytes(8, "little") + text
    return header, {name: start + len(header) for name, start in starts.items()}


def _write_weights(file: BinaryIO, weights: FoldedWeights, dtype: RowType, offsets: dict[str, int]) -> None:
    coder, size = weights.source, _CODES[dtype][1]
    for block in weights.blocks():
        encoding = weights.encoding(block)
        decoders = [weights.decoder(block, index) for index in range(len(coder.decoders))]
        for name, rows in [(_ENCODER, encoding.encoder), *((f"decoder.{i}", d) for i, d in enumerate(decoders))]:
            file.seek(offsets[name] + size * block.start * rows.shape[1])
            file.write(_narrow(rows, dtype, coder.encoder.where))
        for name, column in _columns(encoding, coder, block).items():
            if name in offsets:
                file.seek(offsets[name] + 8 * block.start)
                file.write(column.astype("<f8").tobytes())
    for index in range(len(coder.decoder_biases)):
        file.seek(offsets[f"decoder_bias.{index}"])
        file.write(weights.decoder_bias(index).astype("<f8").tobytes())
    if coder.skip is not None:
        skip = coder.skip.read()
        if not np.isfinite(skip).all():
            raise FeatureFileError(f"{coder.skip.where}: holds NaN or infinity; the file is damaged")
        file.seek(offsets[_SKIP])
        file.write(skip.astype("<f4").tobytes())


def _columns(encoding: Encoding, coder: SourceCoder, block: slice) -> dict[str, Array]:
    columns = {_BIAS: encoding.bias, _THRESHOLD: encoding.threshold}
    columns |= dict(zip(_MAGNITUDE, (encoding.magnitude_scale, encoding.magnitude_bias), strict=True))
    return columns if coder.max_activations is None else {**columns, _LARGEST: coder.max_activations[block]}


def _narrow(rows: Array, dtype: RowType, where: str) -> bytes:
    with np.errstate(over="ignore"):
        single = rows.astype(np.float32)
        if dtype == "bfloat16":
            bits = single.view(np.uint32)
            # Rounds to the nearest, ties to even: the upper half, plus one where the lower half is above its middle.
            narrow = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            fits = bool(((narrow & 0x7F80) != 0x7F80).all())
        else:
            narrow = single.astype("<f2" if dtype == "float16" else "<f4")
            fits = bool(np.isfinite(narrow).all())
    if not fits:
        raise FeatureFileError(f"{where}: a weight is too large for {dtype}; import it with --dtype float32")
    return narrow.tobytes()
