"""Rows of the stream become what a sparse autoencoder reconstructs of them: encoded in full, and decoded.

Of a top-k SAE, rows whose features are edited are encoded, too (`headgate.steering.kernels.select_features`).

Shape suffixes: T tokens of the step, N listed rows, F features, D hidden size. The definition is
`headgate.steering.worker.reconstruction.reconstruction_deltas_reference`.

Four launches: rows are normed; encoded by tiles of rows and features; decoded by tiles of rows and columns, for each of
`_splits` ranges of features; and what these decoded is added up. Tiles after the last listed row return at once. The
first and the last also add up how well rows are reconstructed: the sums of `headgate.steering.programs.codes.NUM_SUMS`,
by atomic additions in fp64, so the last bits of a sum depend on their order; nothing but figures is made of them.

Activations are stored, for `CHUNK` rows at a time. A kernel that decodes at once what it encodes would add to rows as
wide as the stream, which registers do not hold: its sums for each tile of features would take more memory than the
activations, or be added in an order that depends on the batch. Rows and activations in bfloat16 come in `PARTS`: a
value, and what its rounding lost, so that they are as good as fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headgate.steering.features.check import LARGEST_NORM
from headgate.steering.kernels.feature_values import norm_of_row
from headgate.steering.kernels.program_entries import cut_change, stream_row
from headgate.steering.kernels.select_features import Selected, Tables, add_edits, decode_selected, select
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_NUMBERS, NUM_SUMS, InputNorm

_NUM_SUMS = tl.constexpr(program_codes.NUM_SUMS)
_ROW_COUNT = tl.constexpr(program_codes.SUM_ROWS)
_ERRORS = tl.constexpr(program_codes.SUM_ERRORS)
_SQUARES = tl.constexpr(program_codes.SUM_SQUARES)
_LOGS = tl.constexpr(program_codes.SUM_LOGS)
_LENGTHS = tl.constexpr(program_codes.SUM_LENGTHS)
_LARGEST_NORM = tl.constexpr(LARGEST_NORM)
_LAYER_NORM = tl.constexpr(int(InputNorm.LAYER_NORM))
_CONSTANT_NORM = tl.constexpr(int(InputNorm.CONSTANT_NORM))
_LAYER_NORM_EPS = tl.constexpr(program_codes.LAYER_NORM_EPS)


Edits = tuple[Tables, tuple[Tensor, Tensor, Tensor] | None]
"""Tables of programs, and gates, as `headgate.steering.kernels.run_programs.program_deltas` takes them."""


@triton.jit
def store_parts(pointers, stride, values, mask, PARTS: tl.constexpr):
    """Store values in the dtype of the pointers, and what rounding lost `stride` further."""
    stored = values.to(pointers.dtype.element_ty)
    tl.store(pointers, stored, mask=mask)
    if PARTS == 2:
        tl.store(pointers + stride, (values - stored.to(tl.float32)).to(stored.dtype), mask=mask)


@triton.jit(do_not_specialize=["first", "N"])
def encode_kernel(
    rows_ptr,
    encoder_ptr,
    numbers_ptr,
    count_ptr,
    activations_ptr,
    maxima_ptr,
    part_stride,
    first,
    N,
    F,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    STORED_PARTS: tl.constexpr,
):
    """Write the activations of a tile of rows and features, and their largest for each row, if it is wanted.

    Rows are counted from `first`.
    """
    count = tl.minimum(tl.load(count_ptr) - first, N)
    if tl.program_id(0) * ROWS >= count:
        return
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    features = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    row_mask, feature_mask = (rows < count)[:, None], features < F
    depth = tl.arange(0, DEPTH)
    p = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, DEPTH):
        columns = start + depth
        column_mask = (columns < D)[None, :]
        encoder_ptrs = encoder_ptr + features[:, None] * D + columns[None, :]
        encoder = tl.trans(tl.load(encoder_ptrs, mask=feature_mask[:, None] & column_mask, other=0.0))
        for part in tl.static_range(PARTS):
            row_ptrs = rows_ptr + part * part_stride + rows[:, None] * D + columns[None, :]
            p = _add_product(tl.load(row_ptrs, mask=row_mask & column_mask, other=0.0), encoder, p)
    a = _activations(p, numbers_ptr, features, feature_mask, F)
    stored = activations_ptr + rows[:, None] * F + features[None, :]
    store_parts(stored, N.to(tl.int64) * F, a, row_mask & feature_mask[None, :], STORED_PARTS)
    if maxima_ptr is not None:
        maxima = maxima_ptr + rows * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima, tl.max(tl.where(feature_mask[None, :], a, 0.0), axis=1), mask=rows < count)


@triton.jit
def _activations(p, numbers_ptr, features, mask, F):
    """Return activations of a tile of products, ``[rows, features]``."""
    bias = tl.load(numbers_ptr + features, mask=mask, other=0.0)
    threshold = tl.load(numbers_ptr + F + features, mask=mask, other=0.0)
    scale = tl.load(numbers_ptr + 2 * F + features, mask=mask, other=0.0)
    magnitude_bias = tl.load(numbers_ptr + 3 * F + features, mask=mask, other=0.0)
    a = tl.maximum(p * scale[None, :] + magnitude_bias[None, :], 0.0)
    return tl.where(p + bias[None, :] > threshold[None, :], a, 0.0)


@triton.jit
def _add_product(left, right, total):
    """Return ``total + left . right``; products of fp32 are as good as fp32: three of TF32."""
    if _IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["first", "N"])
def decode_kernel(
    activations_ptr,
    decoder_ptr,
    count_ptr,
    decoded_ptr,
    first,
    N,
    F,
    D,
    SPLIT,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write what one range of `SPLIT` features decodes at a tile of rows and columns."""
    count = tl.minimum(tl.load(count_ptr) - first, N)
    if tl.program_id(0) * ROWS >= count:
        return
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = (rows < count)[:, None], (columns < D)[None, :]
    depth = tl.arange(0, DEPTH)
    split = tl.program_id(2)
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, F), DEPTH):
        features = (start + depth).to(tl.int64)
        decoder_ptrs = decoder_ptr + features[:, None] * D + columns[None, :]
        decoder = tl.load(decoder_ptrs, mask=(features < F)[:, None] & column_mask, other=0.0)
        for part in tl.static_range(PARTS):
            a_ptrs = activations_ptr + part * N.to(tl.int64) * F + rows[:, None] * F + features[None, :]
            y = _add_product(tl.load(a_ptrs, mask=row_mask & (features < F)[None, :], other=0.0), decoder, y)
    decoded_ptrs = decoded_ptr + (split * N.to(tl.int64) + rows[:, None]) * D + columns[None, :]
    tl.store(decoded_ptrs, y, mask=row_mask & column_mask)


_IS_INTERPRETED = tl.constexpr(not isinstance(encode_kernel, triton.JITFunction))
"""Triton's interpreter multiplies the bits of bfloat16 as if they were integers."""


@triton.jit
def add_length(sums_ptr, h):
    """Add a row's length to the sums that decide which rows are very long; rows of zeros and non-finite rows add
    nothing.

    To be called for all rows of a step before `add_figures` is for any.
    """
    length = norm_of_row(h)
    if (length > 0) & (length < float("inf")):
        tl.atomic_add(sums_ptr + _LOGS, tl.log(length).to(tl.float64), sem="relaxed")
        tl.atomic_add(sums_ptr + _LENGTHS, 1.0, sem="relaxed")


@triton.jit
def add_figures(sums_ptr, h, error, columns, mask):
    """Add a row and the error of its reconstruction, unless it is very long, zero or not finite."""
    log = tl.load(sums_ptr + _LOGS) / tl.load(sums_ptr + _LENGTHS)
    limit = (tl.exp(log.to(tl.float32)) * _LARGEST_NORM).to(tl.float64)
    wide = tl.where(mask, h, 0.0).to(tl.float64)
    square = tl.sum(wide * wide)
    off = tl.where(mask, error, 0.0).to(tl.float64)
    residual = tl.sum(off * off)
    if (square > 0) & (square <= limit * limit) & (residual < float("inf")):
        tl.atomic_add(sums_ptr + _ROW_COUNT, 1.0, sem="relaxed")
        tl.atomic_add(sums_ptr + _ERRORS, residual, sem="relaxed")
        tl.atomic_add(sums_ptr + _SQUARES, square, sem="relaxed")
        tl.atomic_add(sums_ptr + _NUM_SUMS + columns, wide, mask=mask, sem="relaxed")


CHUNK = 256
"""Rows whose activations are stored at a time: ``2 * CHUNK * F`` values of the encoder's dtype."""

_ROWS = 64
_COLUMNS = 128
_DEPTH = 64
_PROGRAMS = 132
"""Triton programs of a launch for a few rows, at least, if `_MAX_SPLITS` allows: multiprocessors of an H100 or H200."""

_MAX_SPLITS = 8
_VALUES_PER_THREAD = 32
_MAX_WARPS = 16


def reconstruction_deltas(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    shift_TD: Tensor | None,
    token_N: Tensor,
    count_3: Tensor,
    encoder_FD: Tensor,
    decoder_FD: Tensor,
    numbers_4F: Tensor,
    bias_D: Tensor,
    sums_S: Tensor,
    input_norm: InputNorm,
    delta_TD: Tensor | None = None,
    *,
    k: int = 0,
    edits: Edits | None = None,
) -> Tensor:
    """Return what turns listed rows of the stream into their reconstructions: float32 ``[T, D]``.

    Other rows of the result are left as they were: allocated, they may hold anything. A row's bits do not depend on the
    rest of the list.

    Args:
        value_TD: Rows contiguous; fp16, bf16 or fp32.
        addend_TD: The stream is ``value + addend``, rounded to their dtype; None if it is `value`.
        shift_TD: float32, contiguous: what operations add to the stream before it is encoded; None for nothing. Of
            listed rows alone it is read.
        token_N: int32: the listed tokens, each once. Entries beyond the count are not read.
        count_3: int32: how many there are, 0 to N; how many of these, the first, are summed up; and how many, the
            first, become reconstructions. Changes of the others stay, but for their edits.
        encoder_FD: bf16 or fp32, contiguous.
        decoder_FD: As the encoder.
        numbers_4F: float32, contiguous: bias, threshold, magnitude scale and magnitude bias of each feature.
        bias_D: float32: of the decoder.
        sums_S: float64 ``[NUM_SUMS + D]``, contiguous: added to (`headgate.steering.programs.codes.NUM_SUMS`), for the
            rows as they are encoded, and what is decoded of them, without edits.
        input_norm: Normalisation of a row before it is encoded.
        delta_TD: float32, contiguous: by how much `shift_TD`, which must be given, and edits of features move the rows.
            It becomes the result, with what the edits add. None for a new result.
        k: Features that are selected of a row; 0 if the SAE is not of the kind top-k.
        edits: Programs, and gates that were evaluated at this site, if `k` is not 0: edits of selected features act.

    Raises:
        ValueError: If shapes or dtypes do not fit.
    """
    _check_rows(value_TD, addend_TD, shift_TD, delta_TD)
    _check_coder(value_TD.shape[1], encoder_FD, decoder_FD, numbers_4F, bias_D)
    _check_sums(value_TD.shape[1], count_3, sums_S)
    is_edited = delta_TD is not None
    delta_TD = _new_deltas(value_TD) if delta_TD is None else delta_TD
    num_listed = min(len(token_N), len(value_TD))
    if num_listed == 0:
        return delta_TD
    stream = (value_TD, addend_TD, value_TD.stride(0), 0 if addend_TD is None else addend_TD.stride(0))
    listed, coder = (token_N[:num_listed], count_3, sums_S), (encoder_FD.dtype, input_norm)
    rows_2ND, scales_2N = _normed_rows(stream, shift_TD, *listed, *coder)
    for first in range(0, num_listed, CHUNK):
        chunk = rows_2ND[:, first : first + CHUNK]
        if k:
            selected = _selected(chunk, first, count_3, encoder_FD, numbers_4F, k)
            parts = decode_selected(selected, decoder_FD, first, count_3)
        else:
            parts = _decoded_parts(chunk, first, count_3, encoder_FD, decoder_FD, numbers_4F)
        _write_deltas(stream, shift_TD, parts, scales_2N, *listed, bias_D, delta_TD, first, is_edited=is_edited)
        if k and edits is not None:
            add_edits(selected, scales_2N[0], token_N, count_3, *edits, value_TD, delta_TD, first)
    return delta_TD


def _selected(
    rows_2ND: Tensor, first: int, count_3: Tensor, encoder_FD: Tensor, numbers_4F: Tensor, k: int
) -> Selected:
    """Return the features that are selected of a chunk of rows."""
    num_rows, num_tiles = rows_2ND.shape[1], triton.cdiv(len(encoder_FD), _COLUMNS)
    activations_1NF = rows_2ND.new_empty((1, num_rows, len(encoder_FD)), dtype=torch.float32)
    maxima_NM = rows_2ND.new_empty((num_rows, num_tiles), dtype=torch.float32)
    _encode(rows_2ND, first, count_3, encoder_FD, numbers_4F, activations_1NF, maxima_NM)
    return select(activations_1NF[0], maxima_NM, first, count_3, k, _COLUMNS)


def _encode(
    rows_2ND: Tensor,
    first: int,
    count_3: Tensor,
    encoder_FD: Tensor,
    numbers_4F: Tensor,
    activations: Tensor,
    maxima_NM: Tensor | None,
) -> None:
    """Encode a chunk of rows into activations ``[parts, N, F]``, and the largest of each tile, if they are wanted."""
    parts, num_rows, width = rows_2ND.shape
    num_features = len(encoder_FD)
    # the smallest extent runs first, so that programs that are side by side read the same weights
    encode_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_features, _COLUMNS))](
        rows_2ND,
        encoder_FD,
        numbers_4F,
        count_3,
        activations,
        maxima_NM,
        rows_2ND.stride(0),
        first,
        num_rows,
        num_features,
        width,
        STORED_PARTS=len(activations),
        **_tiles(parts),
    )


def _tiles(parts: int) -> dict[str, int]:
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH, "PARTS": parts, "num_warps": 4, "num_stages": 3}


def _new_deltas(value_TD: Tensor) -> Tensor:
    return torch.empty(value_TD.shape, dtype=torch.float32, device=value_TD.device)


_Stream = tuple[Tensor, Tensor | None, int, int]
"""Value, addend, and their strides."""


def _normed_rows(
    stream: _Stream,
    shift_TD: Tensor | None,
    token_N: Tensor,
    count_3: Tensor,
    sums_S: Tensor,
    dtype: torch.dtype,
    norm: InputNorm,
) -> tuple[Tensor, Tensor]:
    """Return listed rows as the encoder reads them, with what rounding lost, and fp32 gains and means."""
    value, addend, value_stride, addend_stride = stream
    num_rows, width = len(token_N), value.shape[1]
    rows_2ND = torch.empty((_parts_of(dtype), num_rows, width), dtype=dtype, device=value.device)
    scales_2N = torch.empty((2, num_rows), dtype=torch.float32, device=value.device)
    _norm_kernel[(num_rows,)](
        value,
        addend,
        shift_TD,
        token_N,
        count_3,
        sums_S,
        rows_2ND,
        scales_2N,
        value_stride,
        addend_stride,
        num_rows,
        width,
        NORM=int(norm),
        PARTS=_parts_of(dtype),
        **_row_options(width),
    )
    return rows_2ND, scales_2N


def _decoded_parts(
    rows_2ND: Tensor, first: int, count_3: Tensor, encoder_FD: Tensor, decoder_FD: Tensor, numbers_4F: Tensor
) -> Tensor:
    """Return what ranges of features decode of a chunk of rows: float32 ``[splits, chunk, D]``."""
    parts, num_rows, width = rows_2ND.shape
    num_features = len(encoder_FD)
    row_tiles, splits = triton.cdiv(num_rows, _ROWS), _splits(width)
    activations_2NF = rows_2ND.new_empty(parts, num_rows, num_features)
    decoded_SND = rows_2ND.new_empty((splits, num_rows, width), dtype=torch.float32)
    _encode(rows_2ND, first, count_3, encoder_FD, numbers_4F, activations_2NF, None)
    decode_kernel[(row_tiles, triton.cdiv(width, _COLUMNS), splits)](
        activations_2NF,
        decoder_FD,
        count_3,
        decoded_SND,
        first,
        num_rows,
        num_features,
        width,
        triton.cdiv(triton.cdiv(num_features, _DEPTH), splits) * _DEPTH,
        **_tiles(parts),
    )
    return decoded_SND


def _write_deltas(
    stream: _Stream,
    shift_TD: Tensor | None,
    decoded_SND: Tensor,
    scales_2N: Tensor,
    token_N: Tensor,
    count_3: Tensor,
    sums_S: Tensor,
    bias_D: Tensor,
    delta_TD: Tensor,
    first: int,
    *,
    is_edited: bool,
) -> None:
    splits, num_rows, width = decoded_SND.shape
    _delta_kernel[(num_rows,)](
        stream[0],
        stream[1],
        shift_TD,
        decoded_SND,
        scales_2N,
        token_N,
        count_3,
        sums_S,
        bias_D,
        delta_TD,
        *stream[2:],
        first,
        num_rows,
        scales_2N.shape[1],
        width,
        IS_EDITED=is_edited,
        SPLITS=splits,
        **_row_options(width),
    )


def _parts_of(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.float32 else 2


def _splits(width: int) -> int:
    """Return into how many ranges features are cut for decoding: by the width alone, not by the batch."""
    tiles = -(-width // _COLUMNS)
    return max(1, min(_MAX_SPLITS, -(-_PROGRAMS // tiles)))


def _row_options(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK_D": block, "num_warps": max(1, min(_MAX_WARPS, block // (32 * _VALUES_PER_THREAD)))}


def _check_rows(value_TD: Tensor, addend_TD: Tensor | None, shift_TD: Tensor | None, delta_TD: Tensor | None) -> None:
    for tensor in (value_TD, value_TD if addend_TD is None else addend_TD):
        if tensor.shape != value_TD.shape or tensor.stride(1) != 1 or tensor.dtype != value_TD.dtype:
            raise ValueError(
                f"reconstruction_deltas: expected contiguous rows {tuple(value_TD.shape)} of {value_TD.dtype}, got "
                f"{tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}"
            )
    for change in (shift_TD, delta_TD):
        if change is not None and (
            change.shape != value_TD.shape or change.dtype != torch.float32 or not change.is_contiguous()
        ):
            raise ValueError(
                f"reconstruction_deltas: expected contiguous float32 changes {tuple(value_TD.shape)}, got "
                f"{tuple(change.shape)} of {change.dtype}"
            )
    if delta_TD is not None and shift_TD is None:
        raise ValueError("reconstruction_deltas: what edits add is told by the shift, which is not given")


def _check_coder(width: int, encoder_FD: Tensor, decoder_FD: Tensor, numbers_4F: Tensor, bias_D: Tensor) -> None:
    expected = (len(encoder_FD), width)
    for name, tensor in (("encoder", encoder_FD), ("decoder", decoder_FD)):
        if tensor.shape != expected or not tensor.is_contiguous() or tensor.dtype != encoder_FD.dtype:
            raise ValueError(
                f"reconstruction_deltas: expected a contiguous {name} {expected} of {encoder_FD.dtype}, got "
                f"{tuple(tensor.shape)} of {tensor.dtype}"
            )
    if encoder_FD.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"reconstruction_deltas: expected a coder in bfloat16 or float32, got {encoder_FD.dtype}")
    if numbers_4F.shape != (NUM_NUMBERS, len(encoder_FD)) or bias_D.shape != (width,):
        raise ValueError(
            f"reconstruction_deltas: expected numbers {NUM_NUMBERS, len(encoder_FD)} and a bias {(width,)}, got "
            f"{tuple(numbers_4F.shape)} and {tuple(bias_D.shape)}"
        )
    if not all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in (numbers_4F, bias_D)):
        raise ValueError("reconstruction_deltas: numbers and bias must be contiguous float32")


def _check_sums(width: int, count_3: Tensor, sums_S: Tensor) -> None:
    if count_3.shape != (3,) or count_3.dtype != torch.int32:
        raise ValueError(f"reconstruction_deltas: expected three int32 counts, got {tuple(count_3.shape)}")
    if sums_S.shape != (NUM_SUMS + width,) or sums_S.dtype != torch.float64 or not sums_S.is_contiguous():
        raise ValueError(
            f"reconstruction_deltas: expected contiguous float64 sums {(NUM_SUMS + width,)}, got "
            f"{tuple(sums_S.shape)} of {sums_S.dtype}"
        )


@triton.jit(do_not_specialize=["N"])
def _norm_kernel(
    value_ptr,
    addend_ptr,
    shift_ptr,
    token_ptr,
    count_ptr,
    sums_ptr,
    rows_ptr,
    scales_ptr,
    value_stride,
    addend_stride,
    N,
    D,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(count_ptr):
        return
    token = tl.load(token_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    h = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask)
    if shift_ptr is not None:
        h += tl.load(shift_ptr + token * D + columns, mask=mask, other=0.0)
    if row < tl.load(count_ptr + 1):
        add_length(sums_ptr, h)
    gain, mean = 1.0, 0.0
    if NORM == _LAYER_NORM:
        mean = tl.sum(h) / D
        h = tl.where(mask, h - mean, 0.0)
        gain = tl.sqrt(tl.sum(h * h) / (D - 1))
        h /= gain + _LAYER_NORM_EPS
    if NORM == _CONSTANT_NORM:
        gain = norm_of_row(h) / tl.sqrt(D.to(tl.float32))
        h = tl.where(gain > 0, h / gain, 0.0)
    tl.store(scales_ptr + row, gain)
    tl.store(scales_ptr + N + row, mean)
    store_parts(rows_ptr + row * D + columns, N.to(tl.int64) * D, h, mask, PARTS)


@triton.jit(do_not_specialize=["first", "N", "LISTED"])
def _delta_kernel(
    value_ptr, addend_ptr, shift_ptr, decoded_ptr, scales_ptr, token_ptr, count_ptr, sums_ptr, bias_ptr, delta_ptr,
    value_stride, addend_stride, first, N, LISTED, D,
    IS_EDITED: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if first + row >= tl.load(count_ptr + 2):
        return
    token = tl.load(token_ptr + first + row).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    y = tl.load(bias_ptr + columns, mask=mask, other=0.0)
    for split in range(SPLITS):
        y += tl.load(decoded_ptr + (split * N.to(tl.int64) + row) * D + columns, mask=mask, other=0.0)
    gain, mean = tl.load(scales_ptr + first + row), tl.load(scales_ptr + LISTED + first + row)
    x = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask)
    delta_ptrs = delta_ptr + token * D + columns
    delta = y * gain + mean - x
    shift = tl.zeros_like(x)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + token * D + columns, mask=mask, other=0.0)
    if first + row < tl.load(count_ptr + 1):
        add_figures(sums_ptr, x + shift, delta - shift, columns, mask)
    if IS_EDITED:
        delta += tl.load(delta_ptrs, mask=mask, other=0.0) - shift
    tl.store(delta_ptrs, cut_change(delta, value_ptr), mask=mask)
