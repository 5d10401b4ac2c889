"""The weights of a `SourceCoder` as encoding uses them: whatever can be folded into rows and biases is folded.

Shapes: n features of F, D width of what is read, O width of what is written. Folded are the factor on rows, the lengths
of decoder rows and the decoder's bias that is taken off the row; all in float64. Only the rows asked for are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.steering.features.source_coder import SourceCoder, Vector
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
        threshold: ``[n]``; 0 where a kind has none, NaN where a row of features cannot tell which are active.
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
        columns = (bias, self._threshold[index], scale, shift)
        return Encoding(encoder.astype(dtype, copy=False), *(column.astype(dtype) for column in columns))

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
