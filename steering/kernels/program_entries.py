"""How kernels read programs: rows of the stream and of the pool, entries and their gates; and the checks of arguments.

Formulas: `headgate.steering.programs.codes`. `gates` are those of one row: pointers to its signals and to its request's
states, its flags, and f; None where nothing has a gate. Arguments that are named in the singular may also be blocks.
Shape suffixes of checked arguments: `headgate.steering.kernels.run_programs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, Flag, TokenFlag

_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_GROUP = tl.constexpr(program_codes.GROUP)
_P0 = tl.constexpr(program_codes.P0)
_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_ROTATE = tl.constexpr(int(Code.ROTATE))
_REPLACE = tl.constexpr(int(Code.REPLACE))
_READ_FEATURE = tl.constexpr(int(Code.READ_FEATURE))
_ATTENUATE = tl.constexpr(int(Code.ATTENUATE))
_KEEP_NORM = tl.constexpr(int(Flag.KEEP_NORM_FROM | Flag.KEEP_NORM_TO))
_ATTENUATED = tl.constexpr(int(Flag.ATTENUATED))
_GATE_SHIFT = tl.constexpr(program_codes.GATE_SHIFT)
_GATE_COLUMN_MASK = tl.constexpr(program_codes.GATE_COLUMN_MASK)
_EARLY = tl.constexpr(program_codes.EARLY)
_IS_GENERATED = tl.constexpr(int(TokenFlag.IS_GENERATED))
_IS_REPLAYED = tl.constexpr(int(TokenFlag.IS_REPLAYED))

GROUP_MASK = tl.constexpr(program_codes.GROUP_MASK)
_READ = tl.constexpr(program_codes.READ)
_WRITE = tl.constexpr(program_codes.WRITE)
_READ_SCALE = tl.constexpr(program_codes.READ_SCALE)
_WRITE_SCALE = tl.constexpr(program_codes.WRITE_SCALE)
_FEATURE = tl.constexpr(int(Code.FEATURE))
_MAX_CHANGE = tl.constexpr(program_codes.MAX_CHANGE)
_MAX_CHANGE_FLOAT16 = tl.constexpr(program_codes.MAX_CHANGE_FLOAT16)


@triton.jit
def code_that_acts(code, group, gates):
    """Return `code`; 0 if the entry's coefficient is 0 and nothing else of it matters: its rows are not read then."""
    op = code & _CODE_MASK
    is_idle = (_coefficient(code, group, gates) == 0) & (code & _KEEP_NORM == 0) & (op != _READ_FEATURE)
    return tl.where(is_idle, 0, code)


@triton.jit
def numbers_with_coefficient(numbers, code, fields, gates):
    """Return `numbers`, with the entry's coefficient in that one in which its effect is linear.

    Args:
        numbers: `read_scale`, `write_scale`, p0 to p2.
        code: 0 if the entry does not act.
        fields: Pointer to the fields of the entry.
        gates: Not None.
    """
    read_scale, write_scale, p0, p1, p2 = numbers
    op = code & _CODE_MASK
    c = _coefficient(code, tl.load(fields + _GROUP, mask=code != 0, other=0), gates)
    is_of_other = (op == _ROTATE) | (op == _REPLACE) | (op == _READ_FEATURE)
    write_scale = tl.where(is_of_other, write_scale, write_scale * c)
    return read_scale, write_scale, tl.where(op == _REPLACE, p0 * c, p0), p1, tl.where(op == _ROTATE, p2 * c, p2)


@triton.jit
def _coefficient(code, group, gates):
    signals, states, flags, attenuation = gates
    c = _strength(group, signals, states, flags)
    return tl.where(code & _ATTENUATED != 0, c * attenuation, c)


@triton.jit
def _strength(group, signals, states, flags):
    """Return the strength of the gate that an entry's field `GROUP` names; 1 if it names none."""
    flags |= group & 0  # of its shape: Triton's interpreter makes no masks of scalars and blocks
    column = (group >> _GATE_SHIFT & _GATE_COLUMN_MASK) - 1
    is_of_row = (group & _EARLY == 0) | (flags & _IS_REPLAYED != 0)
    is_known = (column >= 0) & (is_of_row | (flags & _IS_GENERATED != 0))
    found = tl.load(tl.where(is_of_row, signals, states) + column, mask=is_known, other=0.0)
    return tl.where(column < 0, 1.0, tl.where(found == found, found, 0.0))


@triton.jit
def attenuation(codes, params, entries, is_of_gate, signals, states, flags):
    """Return f of a row: what entries `ATTENUATE` among a block of a program's make of 1."""
    code = tl.load(codes + entries * _NUM_CODES, mask=is_of_gate, other=0)
    attenuates = code & _CODE_MASK == _ATTENUATE
    group = tl.load(codes + entries * _NUM_CODES + _GROUP, mask=attenuates, other=0)
    p0 = tl.load(params + entries * _NUM_PARAMS + _P0, mask=attenuates, other=1.0)
    return tl.reduce(1 + _strength(group, signals, states, flags) * (p0 - 1), 0, _product)


@triton.jit
def _product(one, other):
    return one * other


@triton.jit
def stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask):
    """Return one row of the stream."""
    x = tl.load(value_ptr + token * value_stride + columns, mask=mask, other=0.0)
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + token * addend_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def cut_change(change, value_ptr):
    """Return changes of a row of the stream, which `value_ptr` points to, cut to `MAX_CHANGE` of its dtype."""
    largest = _MAX_CHANGE
    if value_ptr.dtype.element_ty == tl.float16:
        largest = _MAX_CHANGE_FLOAT16
    change = tl.where(change == change, change, 0.0)
    return tl.where(change > largest, largest, tl.where(change < -largest, -largest, change))


@triton.jit
def row_of_entry(pool_ptr, pool_stride, code, slot, columns, D):
    """Return a row of the pool as it is stored; zeros for slot 0, of features, and of entries that do not act."""
    op = code & _CODE_MASK
    width = tl.where(op == 0, 0, tl.where(op >= _FEATURE, 0, tl.where(slot == 0, 0, D)))
    return tl.load(pool_ptr + slot * pool_stride + columns, mask=columns < width, other=0.0)


@triton.jit
def rows_of_entries(pool_ptr, pool_stride, slots, columns, D):
    """Return a row of the pool for each of `slots`, as it is stored; zeros for slot 0."""
    row_ptrs = pool_ptr + slots[:, None] * pool_stride
    mask = tl.where(slots[:, None] == 0, False, columns[None, :] < D)
    return tl.load(row_ptrs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def fields_of_entry(codes, index, count, groups, gates):
    """Return code, 0 if it does not act, and slots of an entry."""
    fields = codes + index * _NUM_CODES
    code = tl.load(fields, mask=index < count, other=0)
    read = tl.load(fields + _READ, mask=index < count, other=0).to(tl.int64)
    write = tl.load(fields + _WRITE, mask=index < count, other=0).to(tl.int64)
    group = tl.load(fields + _GROUP, mask=index < count, other=0)
    if gates is not None:
        code = code_that_acts(code, group, gates)
        group = group & GROUP_MASK
    bit = groups >> (tl.maximum(group, 1) - 1).to(tl.int64) & 1
    return tl.where(group == 0, code, tl.where(bit == 0, 0, code)), read, write


@triton.jit
def numbers_of_operation(codes, params, index, code, gates):
    """Return `read_scale`, `write_scale` and p0 to p2 of an entry, with its coefficient; zeros if it does not act."""
    params += index * _NUM_PARAMS
    acts = code != 0
    numbers = (
        tl.load(params + _READ_SCALE, mask=acts, other=0.0),
        tl.load(params + _WRITE_SCALE, mask=acts, other=0.0),
        tl.load(params + _P0, mask=acts, other=0.0),
        tl.load(params + _P0 + 1, mask=acts, other=0.0),
        tl.load(params + _P0 + 2, mask=acts, other=0.0),
    )
    if gates is not None:
        numbers = numbers_with_coefficient(numbers, code, codes + index * _NUM_CODES, gates)
    return numbers


@triton.jit
def numbers_of_features(codes, params, index, code, gates):
    """Return the params of a block of features, with their coefficients; zeros of features that do not act."""
    read_scale, write_scale, p0, p1, p2 = numbers_of_operation(codes, params, index, code, gates)
    params += index * _NUM_PARAMS
    acts = code != 0
    p3 = tl.load(params + _P0 + 3, mask=acts, other=0.0)
    p4 = tl.load(params + _P0 + 4, mask=acts, other=0.0)
    p5 = tl.load(params + _P0 + 5, mask=acts, other=0.0)
    return read_scale, write_scale, p0, p1, p2, p3, p4, p5


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


def check_rows(value_TD: Tensor, addend_TD: Tensor | None, pool_SD: Tensor) -> None:
    """Refuse rows of another width than those of the site, or not contiguous, and an addend of another dtype."""
    for tensor in (value_TD, pool_SD, *([] if addend_TD is None else [addend_TD])):
        if tensor.dim() != 2 or tensor.shape[1] != value_TD.shape[1] or tensor.stride(1) != 1:
            raise ValueError(
                f"program_deltas: rows must be contiguous and {value_TD.shape[-1]} wide, got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    if addend_TD is not None and addend_TD.dtype != value_TD.dtype:
        raise ValueError(f"program_deltas: expected rows of {value_TD.dtype}, got {addend_TD.dtype}")


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
