"""`SparseCoder`: one SAE or transcoder, opened without being read.

Shapes: n rows, F features, D width of what is read, O width of what is written, S write sites.
With ``p = norm(x) . E``::

    a = relu(p * magnitude_scale + magnitude_bias) where p + bias > threshold, else 0
    y = (a . W + decoder_bias) * gain, with the norm undone, plus skip . x

The norm's gain is 1, the standard deviation (`Norm.LAYER_NORM`) or ``|x| / sqrt(D)`` (`Norm.CONSTANT_NORM_RESCALE`).
Kinds differ by these numbers alone; top-k and groupmax select among the activations of a row in addition.

Whatever can be folded into rows and biases is folded (`FoldedWeights`): the factor on rows, the lengths of decoder rows
and the decoder's bias that is taken off the row; all in float64. Only the rows asked for are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.sites import Site
from headgate.steering.features.source_coder import CoderKind, Norm, SourceCoder, Vector
from headgate.steering.features.tensors import Array, FeatureFileError, LazyTensor

BLOCK_BYTES = 64 << 20
"""Bytes of weights that are worked on at a time."""

_MIN_NORM = 1e-8

Index = slice | npt.NDArray[np.int64]


class Encoding(NamedTuple):
    """Folded weights that turn rows into activations: ``p = norm(x) . encoder``, then as `SparseCoder` says.

    Attributes:
        encoder: ``[n, D]``.
        bias: ``[n]``.
        threshold: ``[n]``; 0 where a kind has none, NaN where a feature's own row does not decide whether it is active.
        magnitude_scale: ``[n]``; 1 but for gated coders.
        magnitude_bias: ``[n]``; equal to `bias` but for gated coders.
    """

    encoder: Array
    bias: Array
    threshold: Array
    magnitude_scale: Array
    magnitude_bias: Array


class FoldedWeights:
    """Reads folded rows of features; an index is a slice of features, or an int64 array of them.

    Attributes:
        source: The coder as its file has it.
    """

    def __init__(self, source: SourceCoder) -> None:
        self.source = source
        changes = source.folds_decoder_norm or source.subtracts_bias or source.gain is not None
        self._is_plain = not changes and source.scale == 1
        if source.threshold is None:
            self._threshold = np.full(len(source.bias), np.nan if source.kind.selects else 0.0)
        else:
            self._threshold = source.threshold

    def encoding(self, index: Index, dtype: npt.DTypeLike = np.float64) -> Encoding:
        """Return what encodes the features of `index`, contiguous and in `dtype`.

        Raises:
            FeatureFileError: If a weight is not finite.
        """
        source = self.source
        encoder = _read(source.encoder, index, dtype if self._is_plain else np.float64)
        bias = source.bias[index]
        scale, shift = (part[index] for part in source.magnitude) if source.magnitude else (np.ones(len(bias)), bias)
        if source.gain is not None:
            encoder = encoder / source.gain
        if source.subtracts_bias:
            taken = encoder @ source.decoder_biases[0]
            bias, shift = bias - taken, shift - scale * taken
        if source.folds_decoder_norm:
            lengths = _lengths(_read(source.decoders[0], index, np.float64))
            encoder, bias, shift = encoder * lengths[:, None], bias * lengths, shift * lengths
        if source.scale != 1:
            encoder = encoder * source.scale
        return Encoding(
            encoder=encoder.astype(dtype, copy=False),
            bias=bias.astype(dtype),
            threshold=self._threshold[index].astype(dtype),
            magnitude_scale=scale.astype(dtype),
            magnitude_bias=shift.astype(dtype),
        )

    def decoder(self, index: Index, write_site: int = 0, dtype: npt.DTypeLike = np.float64) -> Array:
        """``[n, O]``: what the features of `index` write at a write site, contiguous and in `dtype`.

        Raises:
            FeatureFileError: If a weight is not finite.
        """
        source = self.source
        rows = _read(source.decoders[write_site], index, dtype if self._is_plain else np.float64)
        if source.folds_decoder_norm:
            first = rows if write_site == 0 else _read(source.decoders[0], index, np.float64)
            rows = rows / _lengths(first)[:, None]
        if source.scale != 1:
            rows = rows / source.scale
        return rows.astype(dtype, copy=False)

    def decoder_bias(self, write_site: int = 0) -> Vector:
        """``[O]``: the constant that is written at a write site."""
        bias: Vector = self.source.decoder_biases[write_site] / self.source.scale
        return bias

    def blocks(self) -> Iterator[slice]:
        """Yield blocks of features whose rows take about `BLOCK_BYTES` in float64."""
        num_features, width = self.source.encoder.shape
        widest = max(width, *(decoder.shape[1] for decoder in self.source.decoders))
        size = max(256, BLOCK_BYTES // (8 * widest))
        return (slice(start, min(start + size, num_features)) for start in range(0, num_features, size))


def _read(tensor: LazyTensor, index: Any, dtype: npt.DTypeLike) -> Array:
    rows = tensor.rows(index, dtype)
    if not np.isfinite(rows).all():
        raise FeatureFileError(f"{tensor.where}: holds NaN or infinity; the file is damaged, or training diverged")
    return rows


def _lengths(decoder: Array) -> Array:
    return np.asarray(np.maximum(np.linalg.norm(decoder, axis=1), _MIN_NORM))


LAYER_NORM_EPSILON = 1e-5

Float32 = npt.NDArray[np.float32]
Decision = Literal["exact", "threshold", "none"]


class FeatureRows(NamedTuple):
    """Rows with which a few features read and write, float32 and contiguous, in the order in which they were asked for.

    Attributes:
        encoder: ``[n, D]``.
        decoders: ``[S, n, O]``, one for each write site.
        bias: ``[n]``; the feature is active where ``p + bias > threshold``.
        threshold: ``[n]``; 0 for relu and gated, NaN where `SparseCoder.decision` is ``none``.
        magnitude_scale: ``[n]``; 1 but for gated coders.
        magnitude_bias: ``[n]``; the activation is ``relu(p * magnitude_scale + magnitude_bias)``.
    """

    encoder: Float32
    decoders: Float32
    bias: Float32
    threshold: Float32
    magnitude_scale: Float32
    magnitude_bias: Float32

    @property
    def decoder(self) -> Float32:
        """``[n, O]`` of a coder with one write site."""
        decoder: Float32
        (decoder,) = self.decoders
        return decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseCoder:
    """One SAE or transcoder; rows of features are read from a mapped file when they are asked for.

    Attributes:
        name: Chosen when it was opened or imported.
        path: The file or folder that was opened.
        format: The format of the source: ``saelens``, ``gemma_scope``, ...
        num_features: F.
        width: D.
        write_width: O.
        kind: Activation function.
        k: Number of active features, for kinds that select.
        norm: Normalisation of rows, before they are encoded.
        read_site: Where it reads; None if neither its files nor the user said so.
        write_sites: Where it writes: for an SAE the read site, for a transcoder another, for a CLT several; empty for
            an SAE without a site.
        model: The model it was trained on, if its files say so.
        declared: Figures of the source: ``l0``, ``fvu``.
        weights: Reads what the rows have, folded.
    """

    name: str
    path: Path
    format: str
    num_features: int
    width: int
    write_width: int
    kind: CoderKind
    k: int | None
    norm: Norm
    read_site: Site | None
    write_sites: tuple[Site, ...]
    model: str | None
    declared: Mapping[str, float]
    weights: FoldedWeights

    @property
    def is_transcoder(self) -> bool:
        """Whether it writes elsewhere than it reads."""
        return self.weights.source.is_transcoder

    @property
    def decision(self) -> Decision:
        """How a feature's own row decides whether it is active.

        ``exact``; or by a ``threshold`` in place of the selection, an approximation; or ``none``: only `encode` knows.
        """
        if not self.kind.selects:
            return "exact"
        return "none" if self.weights.source.threshold is None else "threshold"

    @cached_property
    def source_sha256(self) -> str:
        """Hex SHA-256 of the source's files; those of an imported file were read at import, others are read now."""
        source = self.weights.source
        return source.sha256 or digest(source.paths)

    def rows(self, features: Sequence[int] | npt.NDArray[np.integer[Any]]) -> FeatureRows:
        """Read the rows of a few features.

        Raises:
            IndexError: If one is not in ``[0, num_features)``.
            FeatureFileError: If one holds NaN or infinity.
        """
        index = self._index(features)
        encoding = self.weights.encoding(index, np.float32)
        found = [self.weights.decoder(index, site, np.float32) for site in range(len(self.weights.source.decoders))]
        decoders = found[0][None] if len(found) == 1 else np.stack(found)
        return FeatureRows(
            encoder=encoding.encoder,
            decoders=decoders,
            bias=encoding.bias,
            threshold=encoding.threshold,
            magnitude_scale=encoding.magnitude_scale,
            magnitude_bias=encoding.magnitude_bias,
        )

    def max_activations(self, features: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Float32 | None:
        """``[n]``: the largest activations that the source declares of a few features; None if it declares none."""
        found = self.weights.source.max_activations
        return None if found is None else found[self._index(features)].astype(np.float32)

    def encode(self, rows: Array, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return the activations ``[n, F]`` of rows ``[n, D]``, computed in `dtype`, by blocks of features.

        Raises:
            ValueError: If the rows have another width.
        """
        normed = self._normed(rows, dtype)
        activations = np.empty((len(normed), self.num_features), dtype)
        for block in self.weights.blocks():
            activations[:, block] = self._activations(normed, self.weights.encoding(block, dtype))
        return self._selected(activations)

    def encode_few(
        self, rows: Array, features: Sequence[int] | npt.NDArray[np.integer[Any]], dtype: npt.DTypeLike = np.float32
    ) -> Array:
        """Return the activations ``[n, len(features)]`` of a few features, from their own rows unless the kind selects.

        Raises:
            IndexError: If there is no such feature.
            ValueError: If the rows have another width.
        """
        index = self._index(features)
        if self.kind.selects:
            return np.asarray(self.encode(rows, dtype)[:, index])
        return self._activations(self._normed(rows, dtype), self.weights.encoding(index, dtype))

    def decode(self, activations: Array, rows: Array, write_site: int = 0) -> Array:
        """Return what activations ``[n, F]`` write, ``[n, O]``, in their dtype.

        Args:
            activations: Edited or not.
            rows: The rows ``[n, D]`` that were encoded: norm and skip depend on them.
            write_site: Index of the write site.
        """
        dtype = activations.dtype
        written = np.zeros((len(activations), self.write_width), dtype)
        for block in self.weights.blocks():
            written += activations[:, block] @ self.weights.decoder(block, write_site, dtype)
        written = (written + self.weights.decoder_bias(write_site).astype(dtype)) * self.gain(rows, dtype)
        if self.norm is Norm.LAYER_NORM:
            written += rows.astype(dtype).mean(axis=1, keepdims=True)
        skip = self.weights.source.skip if write_site == 0 else None
        return np.asarray(written if skip is None else written + rows.astype(dtype) @ skip.read(dtype).T)

    def delta(self, rows: Array, targets: Mapping[int, float], dtype: npt.DTypeLike = np.float32) -> Array:
        """Return the change ``[S, n, O]`` that sets activations of features to `targets` and keeps the error.

        Equal to ``decode(edited) - decode(encode(rows))``, from the rows of the named features alone. Of kinds that
        select, the whole row is encoded, since other features decide which are active.
        """
        index = self._index(sorted(targets))
        wanted = np.asarray([targets[int(feature)] for feature in index], dtype)
        activations = self.encode_few(rows, index, dtype)
        sites = range(len(self.weights.source.decoders))
        decoders = np.stack([self.weights.decoder(index, site, dtype) for site in sites])
        change: Array = np.einsum("nf,sfo->sno", wanted - activations, decoders) * self.gain(rows, dtype)
        return change

    def gain(self, rows: Array, dtype: npt.DTypeLike = np.float32) -> Array:
        """``[n, 1]``: the factor by which the norm multiplies what is written for each row."""
        wide = rows.astype(dtype, copy=False)
        if self.norm is Norm.LAYER_NORM:
            return np.asarray(wide.std(axis=1, ddof=1, keepdims=True))
        if self.norm is Norm.CONSTANT_NORM_RESCALE:
            return np.asarray(np.linalg.norm(wide, axis=1, keepdims=True) / np.sqrt(self.width)).astype(dtype)
        return np.ones((len(rows), 1), dtype)

    def _index(self, features: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        index = np.asarray(features, np.int64).reshape(-1)
        if index.size and not 0 <= index.min() <= index.max() < self.num_features:
            wrong = next(int(i) for i in index if not 0 <= i < self.num_features)
            raise IndexError(f"{self.name}: feature {wrong}; it has the features 0 to {self.num_features - 1}")
        return index

    def _normed(self, rows: Array, dtype: npt.DTypeLike) -> Array:
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(f"{self.name}: expected rows of width {self.width}, got the shape {list(rows.shape)}")
        wide = rows.astype(dtype, copy=False)
        if self.norm is Norm.LAYER_NORM:
            wide = wide - wide.mean(axis=1, keepdims=True)
            return np.asarray(wide / (self.gain(rows, dtype) + LAYER_NORM_EPSILON))
        return np.asarray(wide / self.gain(rows, dtype)) if self.norm is Norm.CONSTANT_NORM_RESCALE else wide

    def _activations(self, normed: Array, weights: Encoding) -> Array:
        """Activations before features are selected."""
        projection = normed @ weights.encoder.T
        activations = np.maximum(projection * weights.magnitude_scale + weights.magnitude_bias, 0)
        if self.kind.selects:
            return np.asarray(activations)
        return np.where(projection + weights.bias > weights.threshold, activations, 0)

    def _selected(self, activations: Array) -> Array:
        if self.kind is CoderKind.TOPK and self.k is not None and self.k < self.num_features:
            others = np.argpartition(activations, -self.k, axis=1)[:, : -self.k]
            np.put_along_axis(activations, others, 0, axis=1)
        elif self.kind is CoderKind.GROUPMAX and self.k is not None:
            groups = activations.reshape(len(activations), self.k, -1)
            largest = groups.argmax(axis=2, keepdims=True)
            kept = np.zeros_like(groups)
            np.put_along_axis(kept, largest, np.take_along_axis(groups, largest, axis=2), axis=2)
            activations = kept.reshape(activations.shape)
        return activations


def coder_of(source: SourceCoder, path: Path, name: str | None = None) -> SparseCoder:
    """Return the coder of what a reader read.

    Args:
        source: As the reader returned it.
        path: What was opened.
        name: In place of the source's own; by default that of the path.
    """
    num_features, width = source.encoder.shape
    return SparseCoder(
        name=name or source.name or (path.name if path.is_dir() else path.stem),
        path=path,
        format=source.format,
        num_features=num_features,
        width=width,
        write_width=len(source.decoder_biases[0]),
        kind=source.kind,
        k=source.k,
        norm=source.norm,
        read_site=source.read_site,
        write_sites=source.write_sites or tuple(filter(None, [source.read_site])),
        model=source.model,
        declared=source.declared,
        weights=FoldedWeights(source),
    )


def gathered(coder: SparseCoder, max_bytes: int) -> tuple[SparseCoder, int]:
    """Return a coder whose rows are contiguous, as far as its file does not have them so, and the bytes of its copies.

    Features of such a file are columns: one takes a cache line for each of its values.

    Args:
        coder: As it was opened.
        max_bytes: Upper limit for the bytes of the copies. A coder that needs more is returned as it is, with 0.
    """
    source = coder.weights.source
    scattered = [tensor for tensor in (source.encoder, *source.decoders) if tensor.is_scattered]
    num_bytes = sum(tensor.nbytes for tensor in scattered)
    if not 0 < num_bytes <= max_bytes:
        return coder, 0
    encoder, *decoders = (
        tensor.gathered() if tensor.is_scattered else tensor for tensor in (source.encoder, *source.decoders)
    )
    # The hash is that of what was read: the file may be another one, or gone, when the hash is asked for.
    source = replace(source, encoder=encoder, decoders=tuple(decoders), sha256=coder.source_sha256)
    return replace(coder, weights=FoldedWeights(source)), num_bytes


def digest(paths: tuple[Path, ...]) -> str:
    """Return the hex SHA-256 of the bytes of files, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                found.update(block)
    return found.hexdigest()
