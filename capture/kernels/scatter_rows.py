"""Scatter of wanted rows into the staging ring, with its definition in plain PyTorch.

Shape suffixes: T tokens of the step, R rows of the ring (the last ones are trash rows), D hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def scatter_rows_reference(
    value_TD: Tensor, addend_TD: Tensor | None, slot_T: Tensor, ring_RD: Tensor, *, num_trash_rows: int
) -> Tensor:
    """The definition that `scatter_rows` is tested against: the same scatter in plain PyTorch, in fp64."""
    ring_RD, first_trash = ring_RD.clone(), ring_RD.shape[0] - num_trash_rows
    for token, slot in enumerate(slot_T.tolist()):
        if slot < first_trash:
            row = value_TD[token].double()
            if addend_TD is not None:
                row = row + addend_TD[token].double()
            ring_RD[slot] = row.to(ring_RD.dtype)
    return ring_RD


def scatter_rows(
    value_TD: Tensor, addend_TD: Tensor | None, slot_T: Tensor, ring_RD: Tensor, *, num_trash_rows: int
) -> None:
    """Write ``value[t] + addend[t]`` to ``ring[slot[t]]`` for every token whose slot is no trash row.

    The sum is taken in fp32 and rounded once, to the ring's dtype. Tokens of trash rows are neither read nor written.

    Args:
        value_TD: Rows contiguous; fp16, bf16 or fp32.
        addend_TD: Second summand of the same shape, or None.
        slot_T: int64, in [0, R). Not checked: a check would wait for the GPU. Slots that are no trash rows differ.
        ring_RD: Rows contiguous, of the values' dtype.
        num_trash_rows: The ring's last rows, for tokens without a wanted row.

    Raises:
        ValueError: If shapes differ or a row is not contiguous.
    """
    num_tokens, hidden_size = value_TD.shape
    tensors = [value_TD, ring_RD] if addend_TD is None else [value_TD, addend_TD, ring_RD]
    if any(tensor.shape[1] != hidden_size or tensor.stride(1) != 1 for tensor in tensors):
        raise ValueError(f"scatter_rows: rows must be contiguous and {hidden_size} wide")
    if slot_T.shape[0] != num_tokens or (addend_TD is not None and addend_TD.shape[0] != num_tokens):
        raise ValueError(f"scatter_rows: expected {num_tokens} slots and addend rows")
    if num_tokens == 0:
        return
    has_addend = addend_TD is not None
    addend = addend_TD if addend_TD is not None else value_TD
    _scatter_rows_kernel[(num_tokens,)](
        value_TD,
        addend,
        slot_T,
        ring_RD,
        value_TD.stride(0),
        addend.stride(0),
        ring_RD.stride(0),
        hidden_size,
        FIRST_TRASH=ring_RD.shape[0] - num_trash_rows,
        HAS_ADDEND=has_addend,
        BLOCK_D=min(triton.next_power_of_2(hidden_size), 4096),
    )


@triton.jit
def _scatter_rows_kernel(
    value_ptr,
    addend_ptr,
    slot_ptr,
    ring_ptr,
    value_stride,
    addend_stride,
    ring_stride,
    D,
    FIRST_TRASH: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # 64-bit: T * D can pass 2**31
    slot = tl.load(slot_ptr + token)
    if slot < FIRST_TRASH:
        for start in range(0, D, BLOCK_D):
            offsets = start + tl.arange(0, BLOCK_D)
            mask = offsets < D
            row = tl.load(value_ptr + token * value_stride + offsets, mask=mask).to(tl.float32)
            if HAS_ADDEND:
                row += tl.load(addend_ptr + token * addend_stride + offsets, mask=mask).to(tl.float32)
            tl.store(ring_ptr + slot * ring_stride + offsets, row.to(ring_ptr.dtype.element_ty), mask=mask)
