"""Addition of each row's steering vector, with its definition in plain PyTorch.

Shape suffixes: T tokens of the step, S slots of the pool (slot 0 is the zero vector), D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rows_reference(
    carry_TD: Tensor,
    pool_SD: Tensor,
    slot_T: Tensor,
    scale: float = 1.0,
    delta_TD: Tensor | None = None,
    active_T: Tensor | None = None,
) -> Tensor:
    """Compute the result of `add_rows` in fp64: the definition that the kernel is tested against."""
    total = carry_TD.double() + pool_SD.double()[slot_T.long()] * scale
    added = torch.where(slot_T[:, None] == 0, carry_TD, total.to(carry_TD.dtype))
    if delta_TD is None or active_T is None:
        return added
    changed = carry_TD.double() + delta_TD[: len(carry_TD)].double() * scale
    return torch.where(active_T[: len(carry_TD), None] != 0, changed.to(carry_TD.dtype), added)


def add_rows(
    carry_TD: Tensor,
    pool_SD: Tensor,
    slot_T: Tensor,
    scale: float = 1.0,
    delta_TD: Tensor | None = None,
    active_T: Tensor | None = None,
) -> Tensor:
    """Return ``carry[t] + pool[slot[t]] * scale``, in fp32 and rounded once, as a new tensor of the carry's dtype.

    Rows of slot 0 are copied bit by bit, and the pool is not read for them. Where `active_T` is not 0, ``delta[t]`` is
    added in place of the pool's row.

    Args:
        carry_TD: Rows contiguous; fp16, bf16 or fp32.
        pool_SD: Rows contiguous.
        slot_T: int32, in [0, S). Not checked: a check would wait for the GPU.
        scale: Factor of what is added.
        delta_TD: fp32, rows contiguous, at least T of them; only active ones are read.
        active_T: int32, at least T of them; given together with `delta_TD`.

    Raises:
        ValueError: If shapes differ or a row is not contiguous.
    """
    num_tokens, hidden_size = carry_TD.shape
    if any(tensor.shape[1] != hidden_size or tensor.stride(1) != 1 for tensor in (carry_TD, pool_SD)):
        raise ValueError(f"add_rows: rows must be contiguous and {hidden_size} wide")
    if slot_T.shape != (num_tokens,):
        raise ValueError(f"add_rows: expected {num_tokens} slots, got {tuple(slot_T.shape)}")
    if (delta_TD is None) != (active_T is None):
        raise ValueError("add_rows: deltas and the rows that they are for are given together, or neither")
    if delta_TD is not None and (
        delta_TD.shape[0] < num_tokens or delta_TD.shape[1] != hidden_size or delta_TD.stride(1) != 1
    ):
        raise ValueError(
            f"add_rows: expected deltas {num_tokens, hidden_size} with contiguous rows, got {tuple(delta_TD.shape)} "
            f"with strides {delta_TD.stride()}"
        )
    out_TD = torch.empty((num_tokens, hidden_size), dtype=carry_TD.dtype, device=carry_TD.device)
    if num_tokens:
        _add_rows_kernel[(num_tokens,)](
            carry_TD,
            pool_SD,
            slot_T,
            delta_TD,
            active_T,
            out_TD,
            carry_TD.stride(0),
            pool_SD.stride(0),
            0 if delta_TD is None else delta_TD.stride(0),
            hidden_size,
            scale,
            HAS_DELTAS=delta_TD is not None,
            BLOCK_D=min(triton.next_power_of_2(hidden_size), 4096),
        )
    return out_TD


@triton.jit
def _add_rows_kernel(
    carry_ptr,
    pool_ptr,
    slot_ptr,
    delta_ptr,
    active_ptr,
    out_ptr,
    carry_stride,
    pool_stride,
    delta_stride,
    D,
    scale,
    HAS_DELTAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # 64-bit: T * D can pass 2**31
    slot = tl.load(slot_ptr + token).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        offsets = start + tl.arange(0, BLOCK_D)
        mask = offsets < D
        row = tl.load(carry_ptr + token * carry_stride + offsets, mask=mask)
        if HAS_DELTAS:
            if tl.load(active_ptr + token) != 0:
                row = _added(row, delta_ptr + token * delta_stride + offsets, mask, scale)
            elif slot != 0:
                row = _added(row, pool_ptr + slot * pool_stride + offsets, mask, scale)
        elif slot != 0:
            row = _added(row, pool_ptr + slot * pool_stride + offsets, mask, scale)
        tl.store(out_ptr + token * D + offsets, row, mask=mask)


@triton.jit
def _added(row, pointers, mask, scale):
    """Return the row plus `scale` times what the pointers point to, added in fp32 and rounded once."""
    return (row.to(tl.float32) + tl.load(pointers, mask=mask).to(tl.float32) * scale).to(row.dtype)
