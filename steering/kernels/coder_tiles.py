"""Products of rows with the encoder and the decoder of a sparse autoencoder, by tiles.

Letters in names: N rows, F features, D hidden size. Rows and activations in bfloat16 come in two parts, `PARTS`: a
value, and what its rounding lost.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    part_stride,
    first,
    N,
    F,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the activations of a tile of rows and features; rows are counted from `first`."""
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
    store_parts(stored, N.to(tl.int64) * F, a, row_mask & feature_mask[None, :], PARTS)


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
