"""The largest logit and the sum of exponentials of each block of logits, in one pass over them.

Shape suffixes: N rows, V logits of a row, B blocks of `BLOCK` logits; the last one may be shorter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
_BLOCKS = 32
"""Blocks that are read together."""


def block_sums(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each block, and the sum of ``exp(logit - largest)`` over it: both float32 ``[N, B]``.

    A sum is NaN where a logit is; it is 0 where all of them are -inf.

    Args:
        logits_NV: float32, rows contiguous.
    """
    num_rows, num_logits = logits_NV.shape
    num_blocks = triton.cdiv(num_logits, BLOCK)
    maxima_NB = logits_NV.new_empty(num_rows, num_blocks)
    sums_NB = torch.empty_like(maxima_NB)
    _block_sums_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS))](
        logits_NV,
        maxima_NB,
        sums_NB,
        logits_NV.stride(0),
        num_logits,
        num_blocks,
        BLOCKS=_BLOCKS,
        SIZE=BLOCK,
        num_warps=8,
    )
    return maxima_NB, sums_NB


@triton.jit
def _block_sums_kernel(logits_ptr, maxima_ptr, sums_ptr, stride, V, B, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(logits_ptr + row * stride + column, mask=column < V, other=float("-inf"))
    largest = tl.max(x, axis=1)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.sum(tl.exp(x - shift[:, None]), axis=1)
    tl.store(maxima_ptr + row * B + block, largest, mask=block < B)
    tl.store(sums_ptr + row * B + block, sums, mask=block < B)
