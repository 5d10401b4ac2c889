"""Arguments that kernels of programs refuse, by shape, dtype or strides. Shape suffixes: `run_programs`."""

from __future__ import annotations

import torch
from torch import Tensor

from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS

Gates = tuple[Tensor, Tensor, Tensor]
"""Signals, states and tokens: `headgate.steering.worker.gates.reference.GateTensors`."""

_GATE_DTYPES = [torch.float32, torch.float32, torch.int32]


def check_lengths(num_tokens: int, **tensors: Tensor | None) -> None:
    """Refuse tensors of another number of tokens."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[0] != num_tokens:
            raise ValueError(f"program_deltas: expected {name} of {num_tokens} tokens, got {tuple(tensor.shape)}")


def num_changes(changes_TK: Tensor | None) -> int:
    """Return K, 0 without changes; refuse changes of another dtype, or that are not contiguous."""
    if changes_TK is None:
        return 0
    if changes_TK.dtype != torch.float32 or not changes_TK.is_contiguous():
        raise ValueError("program_deltas: the changes must be contiguous, in float32")
    return changes_TK.shape[1]


def check_rows(value_TD: Tensor, others: list[Tensor]) -> None:
    """Refuse rows of another width or dtype than those of the stream, or that are not contiguous."""
    for tensor in (value_TD, *others):
        if tensor.dim() != 2 or tensor.shape[1] != value_TD.shape[1] or tensor.stride(1) != 1:
            raise ValueError(
                f"program_deltas: rows must be contiguous and {value_TD.shape[-1]} wide, got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if tensor.dtype != value_TD.dtype:
            raise ValueError(f"program_deltas: expected rows of {value_TD.dtype}, got {tensor.dtype}")


def strides_of(value_TD: Tensor, addend_TD: Tensor | None, pool_SD: Tensor) -> tuple[int, int, int]:
    """Return the strides of rows."""
    return value_TD.stride(0), 0 if addend_TD is None else addend_TD.stride(0), pool_SD.stride(0)


def check_shift(value_TD: Tensor, shift_TD: Tensor | None) -> None:
    """Refuse a shift that is not written as the result is."""
    if shift_TD is not None and (
        shift_TD.shape != value_TD.shape or shift_TD.dtype != torch.float32 or not shift_TD.is_contiguous()
    ):
        raise ValueError(
            f"program_deltas: expected a contiguous float32 shift {tuple(value_TD.shape)}, got {tuple(shift_TD.shape)} "
            f"of {shift_TD.dtype}"
        )


def check_tables(codes_REC: Tensor, params_REP: Tensor, *tokens: Tensor) -> None:
    """Refuse tables whose shapes do not fit together, or that are not contiguous."""
    num_rows, num_entries = codes_REC.shape[:2]
    if codes_REC.shape != (num_rows, num_entries, NUM_CODES) or params_REP.shape != (num_rows, num_entries, NUM_PARAMS):
        raise ValueError(
            f"program_deltas: tables of {tuple(codes_REC.shape)} and {tuple(params_REP.shape)}, "
            f"expected [R, E, {NUM_CODES}] and [R, E, {NUM_PARAMS}]"
        )
    if not all(tensor.is_contiguous() for tensor in (codes_REC, params_REP, *tokens)):
        raise ValueError("program_deltas: the tables must be contiguous")


def check_gates(num_tokens: int, gates: Gates) -> None:
    """Refuse gates whose shapes do not fit together, of other dtypes, or that are not contiguous."""
    num_columns, num_slots = gates[0].shape[-1], len(gates[1])
    shapes = [(num_tokens, num_columns), (num_slots, num_columns), (num_tokens, 2)]
    if [tuple(tensor.shape) for tensor in gates] != shapes or [tensor.dtype for tensor in gates] != _GATE_DTYPES:
        raise ValueError(
            f"program_deltas: expected float32 signals [{num_tokens}, C], float32 states [Q, C] and int32 tokens "
            f"[{num_tokens}, 2] of gates, got {[(tuple(tensor.shape), str(tensor.dtype)) for tensor in gates]}"
        )
    if not all(tensor.is_contiguous() for tensor in gates):
        raise ValueError("program_deltas: the tensors of gates must be contiguous")
