"""Programs on rows of the stream, one kernel for all codes; `headgate.steering.worker.program_reference` defines it.

Shape suffixes: T tokens of the step, S slots of the pool, R rows of the table, E entries of a program at the site,
C and P the fields of an entry (`headgate.steering.programs.codes`), K changes of a row of the stream, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headgate.steering.kernels.feature_values import (
    INPUT_NORM_MASK,
    amounts_between_sites,
    amounts_of_features,
    norm_of_row,
    statistics_of_row,
)
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, Flag

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_READ = tl.constexpr(program_codes.READ)
_WRITE = tl.constexpr(program_codes.WRITE)
_GROUP = tl.constexpr(program_codes.GROUP)
_READ_SCALE = tl.constexpr(program_codes.READ_SCALE)
_WRITE_SCALE = tl.constexpr(program_codes.WRITE_SCALE)
_P0 = tl.constexpr(program_codes.P0)

_LINEAR = tl.constexpr(int(Code.LINEAR))
_CLAMP = tl.constexpr(int(Code.CLAMP))
_NORM_ADD = tl.constexpr(int(Code.NORM_ADD))
_ROTATE = tl.constexpr(int(Code.ROTATE))
_REPLACE = tl.constexpr(int(Code.REPLACE))
_FEATURE = tl.constexpr(int(Code.FEATURE))
_KEEP_NORM_FROM = tl.constexpr(int(Flag.KEEP_NORM_FROM))
_KEEP_NORM_TO = tl.constexpr(int(Flag.KEEP_NORM_TO))
_IF_POSITIVE = tl.constexpr(int(Flag.IF_POSITIVE))

_VALUES_PER_THREAD = 32
"""Of each array of a row. With 16, a multiprocessor has registers for one program at a time instead of two."""

_MAX_WARPS = 16
_TILE = 2
"""Features whose rows are read at once; with 4, registers spill."""

_MAX_PROGRAMS = 264
"""Triton programs of a launch, as far as `_TOKENS` allows: two for each multiprocessor of an H100 or H200."""

_TOKENS = 64
"""Upper limit of the tokens of one Triton program; it looks whether any of them is active, all at once."""


def program_deltas(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    pool_SD: Tensor,
    row_T: Tensor,
    count_T: Tensor,
    codes_REC: Tensor,
    params_REP: Tensor,
    groups_T: Tensor | None = None,
    changes_TK: Tensor | None = None,
    shift_TD: Tensor | None = None,
) -> Tensor:
    """Return what the program of each row of the stream adds to it: float32 ``[T, D]``.

    Entries run one after the other on the row, in fp32. Of a row without a program only `count_T` is read, and its part
    of the result is left as it was allocated: it may hold anything. A row's bits do not depend on the rest of the
    batch.

    Args:
        value_TD: Rows contiguous; fp16, bf16 or fp32.
        addend_TD: The stream is ``value + addend``, rounded to their dtype; None if it is `value`.
        pool_SD: Rows contiguous.
        row_T: int32: the table row of each token, in [0, R). Neither this nor a slot is checked: a check would wait for
            the GPU.
        count_T: int32: entries of each token's program at this site, 0 to E; 0 is no program.
        codes_REC: int32 ``[R, E, NUM_CODES]``, contiguous; features behind all other entries. Slots are in [0, S), and
            slot 0 is never read.
        params_REP: float32 ``[R, E, NUM_PARAMS]``, contiguous.
        groups_T: int64: bit ``g - 1`` says whether position group g acts on the token; None if no entry has a group.
        changes_TK: float32, contiguous: the changes of features that are read at one site and written at later ones. An
            entry that reads writes its change of the token, which entries that write it must find at later sites.
            Other changes are neither read nor written. None if no entry is of that kind.
        shift_TD: float32, contiguous, written as the result is: the part of it that is not of features. None where
            nobody asks for it.

    Raises:
        ValueError: If shapes or dtypes differ, or a row is not contiguous.
    """
    _check_rows(value_TD, [pool_SD] if addend_TD is None else [pool_SD, addend_TD])
    _check_tables(codes_REC, params_REP, row_T, count_T)
    num_tokens, hidden_size, num_entries = *value_TD.shape, codes_REC.shape[1]
    _check_lengths(num_tokens, rows=row_T, counts=count_T, addend=addend_TD, groups=groups_T, changes=changes_TK)
    _check_shift(value_TD, shift_TD)
    delta_TD = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=value_TD.device)
    if num_tokens:
        _program_deltas_kernel[(max(min(num_tokens, _MAX_PROGRAMS), triton.cdiv(num_tokens, _TOKENS)),)](
            value_TD,
            addend_TD,
            pool_SD,
            row_T,
            count_T,
            codes_REC,
            params_REP,
            groups_T,
            changes_TK,
            shift_TD,
            delta_TD,
            value_TD.stride(0),
            0 if addend_TD is None else addend_TD.stride(0),
            pool_SD.stride(0),
            *(num_tokens, num_entries),
            _num_changes(changes_TK),
            hidden_size,
            **_launch_options(num_entries, hidden_size),
        )
    return delta_TD


def _launch_options(num_entries: int, hidden_size: int) -> dict[str, int]:
    """Return what the kernel is compiled for; nothing of the batch, whose rows would get other bits otherwise."""
    block = triton.next_power_of_2(hidden_size)
    return {
        "TOKENS": _TOKENS,
        "TILE": _TILE,
        "BLOCK_E": triton.next_power_of_2(max(num_entries, 1)),
        "BLOCK_D": block,
        "num_warps": max(1, min(_MAX_WARPS, block // (32 * _VALUES_PER_THREAD))),
    }


def _check_lengths(num_tokens: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[0] != num_tokens:
            raise ValueError(f"program_deltas: expected {name} of {num_tokens} tokens, got {tuple(tensor.shape)}")


def _num_changes(changes_TK: Tensor | None) -> int:
    if changes_TK is None:
        return 0
    if changes_TK.dtype != torch.float32 or not changes_TK.is_contiguous():
        raise ValueError("program_deltas: the changes must be contiguous, in float32")
    return changes_TK.shape[1]


def _check_rows(value_TD: Tensor, others: list[Tensor]) -> None:
    for tensor in (value_TD, *others):
        if tensor.dim() != 2 or tensor.shape[1] != value_TD.shape[1] or tensor.stride(1) != 1:
            raise ValueError(
                f"program_deltas: rows must be contiguous and {value_TD.shape[-1]} wide, got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if tensor.dtype != value_TD.dtype:
            raise ValueError(f"program_deltas: expected rows of {value_TD.dtype}, got {tensor.dtype}")


def _check_shift(value_TD: Tensor, shift_TD: Tensor | None) -> None:
    if shift_TD is not None and (
        shift_TD.shape != value_TD.shape or shift_TD.dtype != torch.float32 or not shift_TD.is_contiguous()
    ):
        raise ValueError(
            f"program_deltas: expected a contiguous float32 shift {tuple(value_TD.shape)}, got {tuple(shift_TD.shape)} "
            f"of {shift_TD.dtype}"
        )


def _check_tables(codes_REC: Tensor, params_REP: Tensor, *tokens: Tensor) -> None:
    num_rows, num_entries = codes_REC.shape[:2]
    if codes_REC.shape != (num_rows, num_entries, NUM_CODES) or params_REP.shape != (num_rows, num_entries, NUM_PARAMS):
        raise ValueError(
            f"program_deltas: tables of {tuple(codes_REC.shape)} and {tuple(params_REP.shape)}, "
            f"expected [R, E, {NUM_CODES}] and [R, E, {NUM_PARAMS}]"
        )
    if not all(tensor.is_contiguous() for tensor in (codes_REC, params_REP, *tokens)):
        raise ValueError("program_deltas: the tables must be contiguous")


@triton.jit(do_not_specialize=["T"])
def _program_deltas_kernel(
    value_ptr,
    addend_ptr,
    pool_ptr,
    row_ptr,
    count_ptr,
    codes_ptr,
    params_ptr,
    groups_ptr,
    changes_ptr,
    shift_ptr,
    out_ptr,
    value_stride,
    addend_stride,
    pool_stride,
    T,
    E,
    K,
    D,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    if _num_entries(count_ptr, T, TOKENS) == 0:
        return
    columns = tl.arange(0, BLOCK_D)
    for small_token in range(tl.program_id(0), T, tl.num_programs(0)):
        token = tl.cast(small_token, tl.int64)  # 64-bit: T * D can pass 2**31
        count = tl.load(count_ptr + token)
        if count > 0:
            table_row = tl.load(row_ptr + token).to(tl.int64)
            groups = tl.load(groups_ptr + token) if groups_ptr is not None else -1
            codes, params = codes_ptr + table_row * E * _NUM_CODES, params_ptr + table_row * E * _NUM_PARAMS
            h = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, columns < D)
            h, first = _run_operations(h, codes, params, count, groups, pool_ptr, pool_stride, columns, D, BLOCK_E)
            _store_change(shift_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D)
            changes = changes_ptr + token * K if changes_ptr is not None else None
            h = _add_features(h, codes, params, first, count, groups, changes, pool_ptr, pool_stride, columns, D, TILE)
            _store_change(out_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D)


@triton.jit
def _store_change(out_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D):
    """Store by how much `h` differs from a row of the stream, which is read once more; nothing without `out_ptr`."""
    if out_ptr is not None:
        mask = columns < D
        x = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask)
        tl.store(out_ptr + token * D + columns, h - x, mask=mask)


@triton.jit
def _num_entries(count_ptr, T, TOKENS: tl.constexpr):
    """Return the largest number of entries of this program's tokens."""
    tokens = tl.program_id(0) + tl.arange(0, TOKENS) * tl.num_programs(0)
    return tl.max(tl.load(count_ptr + tokens, mask=tokens < T, other=0))


@triton.jit
def stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask):
    """Return one row of the stream."""
    x = tl.load(value_ptr + token * value_stride + columns, mask=mask, other=0.0)
    if addend_ptr is not None:
        addend = tl.load(addend_ptr + token * addend_stride + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + addend.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _run_operations(h, codes, params, count, groups, pool_ptr, pool_stride, columns, D, BLOCK_E: tl.constexpr):
    """Return `h` after the entries that are no features, and how many those are.

    What an entry needs is on its way while the reductions of the one before it wait for one another.
    """
    code, read, write = _fields(codes, 0, count, groups)
    next_code, next_read, next_write = _fields(codes, 1, count, groups)
    entries = tl.arange(0, BLOCK_E)
    all_codes = tl.load(codes + entries * _NUM_CODES, mask=entries < count, other=_FEATURE)
    u, w = _row(pool_ptr, pool_stride, code, read, columns, D), _row(pool_ptr, pool_stride, code, write, columns, D)
    numbers = _numbers(params, code)
    num_operations = tl.sum((all_codes & _CODE_MASK < _FEATURE).to(tl.int32))
    remembered = -1.0
    for index in range(num_operations):
        next_u = _row(pool_ptr, pool_stride, next_code, next_read, columns, D)
        next_w = _row(pool_ptr, pool_stride, next_code, next_write, columns, D)
        next_numbers = _numbers(params + (index + 1) * _NUM_PARAMS, next_code)
        later_code, later_read, later_write = _fields(codes, index + 2, count, groups)
        if code != 0:
            h, remembered = _operation(code, read, numbers, h, u, w, remembered)
        code, read, u, w, numbers = next_code, next_read, next_u, next_w, next_numbers
        next_code, next_read, next_write = later_code, later_read, later_write
    return h, num_operations


@triton.jit
def _row(pool_ptr, pool_stride, code, slot, columns, D):
    """Return a row of the pool as it is stored; zeros for slot 0, of features, and of entries that do not act."""
    op = code & _CODE_MASK
    width = tl.where(op == 0, 0, tl.where(op >= _FEATURE, 0, tl.where(slot == 0, 0, D)))
    return tl.load(pool_ptr + slot * pool_stride + columns, mask=columns < width, other=0.0)


@triton.jit
def _numbers(params, code):
    """Return `read_scale`, `write_scale` and p0 to p2 of an entry, or of each of a block of entries."""
    acts = code != 0
    return (
        tl.load(params + _READ_SCALE, mask=acts, other=0.0),
        tl.load(params + _WRITE_SCALE, mask=acts, other=0.0),
        tl.load(params + _P0, mask=acts, other=0.0),
        tl.load(params + _P0 + 1, mask=acts, other=0.0),
        tl.load(params + _P0 + 2, mask=acts, other=0.0),
    )


@triton.jit
def _fields(codes, index, count, groups):
    """Return code, 0 if it does not act, and slots of an entry, or of each of a block of entries."""
    fields = codes + index * _NUM_CODES
    code = tl.load(fields, mask=index < count, other=0)
    read = tl.load(fields + _READ, mask=index < count, other=0).to(tl.int64)
    write = tl.load(fields + _WRITE, mask=index < count, other=0).to(tl.int64)
    group = tl.load(fields + _GROUP, mask=index < count, other=0)
    bit = groups >> (tl.maximum(group, 1) - 1).to(tl.int64) & 1
    return tl.where(group == 0, code, tl.where(bit == 0, 0, code)), read, write


@triton.jit
def _operation(code, read, numbers, h, u, w, remembered):
    """Return `h` after an entry that is no feature, and the norm that is remembered."""
    op = code & _CODE_MASK
    read_scale, g, p0, p1, p2 = numbers
    u = u.to(tl.float32)
    gw = g * w.to(tl.float32)
    if code & _KEEP_NORM_FROM != 0:
        remembered = norm_of_row(h)
    if op == _ROTATE:
        z, y = read_scale * tl.sum(h * u), tl.sum(h * gw)
        r = tl.sqrt(z * z + y * y)
        if (z > 0) | (code & _IF_POSITIVE == 0):
            h += p2 * ((p0 * r - z) * read_scale * u + (p1 * r - y) * gw)
    elif op == _REPLACE:
        h += p0 * (gw - tl.where(read == 0, 1.0, u) * h)
    else:
        h += _amount(op, read_scale, p0, p1, p2, h, u) * gw
    if code & _KEEP_NORM_TO != 0:
        norm = norm_of_row(h)
        if (remembered >= 0) & (norm > 0):
            h *= remembered / norm
    return h, remembered


@triton.jit
def _amount(op, read_scale, p0, p1, p2, h, u):
    """Return how often an entry adds its row: of all codes but rotations, replacements and features."""
    amount = 1.0
    if op == _NORM_ADD:
        amount = p0 * norm_of_row(h)
    elif (op == _LINEAR) | (op == _CLAMP):
        z = read_scale * tl.sum(h * u)
        if op == _LINEAR:
            amount = p0 * z + p1
        else:
            bounded = tl.where(z < p0, p0, z)
            amount = p2 * (tl.where(bounded > p1, p1, bounded) - z)
    return amount


@triton.jit
def _add_features(
    h, codes, params, first, count, groups, changes, pool_ptr, pool_stride, columns, D, TILE: tl.constexpr
):
    """Return `h` with what the features add that are its last entries, from `first` on; `TILE` are read at once.

    `changes` points to the row's; None if all features are read and written at the same site.
    """
    d = tl.zeros_like(h)
    mean, std, norm = 0.0, -1.0, -1.0  # of h; negative until a feature needs them
    code, read, write = _fields(codes, first + tl.arange(0, TILE), count, groups)
    for start in range(first, count, TILE):
        index = start + tl.arange(0, TILE)
        u = _rows_of_entries(pool_ptr, pool_stride, tl.where(code == 0, 0, read), columns, D)
        w = _rows_of_entries(pool_ptr, pool_stride, tl.where(code == 0, 0, write), columns, D)
        numbers = _numbers_of_features(params + index * _NUM_PARAMS, code)
        next_code, next_read, next_write = _fields(codes, index + TILE, count, groups)
        mean, std, norm = statistics_of_row(code & INPUT_NORM_MASK, h, mean, std, norm, columns, D)
        dots = tl.sum(h[None, :] * u.to(tl.float32), axis=1)
        amounts = amounts_of_features(code, numbers, dots, mean, std, norm, D)
        if changes is not None:
            amounts = amounts_between_sites(code, numbers, amounts, changes)
        d += tl.sum(amounts[:, None] * w.to(tl.float32), axis=0)
        code, read, write = next_code, next_read, next_write
    return h + d


@triton.jit
def _rows_of_entries(pool_ptr, pool_stride, slots, columns, D):
    """Return a row of the pool for each of `slots`, as it is stored; zeros for slot 0."""
    row_ptrs = pool_ptr + slots[:, None] * pool_stride
    mask = tl.where(slots[:, None] == 0, False, columns[None, :] < D)
    return tl.load(row_ptrs + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _numbers_of_features(params, code):
    """Return the params of a block of features; zeros of those that do not act."""
    acts = code != 0
    read_scale, write_scale, p0, p1, p2 = _numbers(params, code)
    p3 = tl.load(params + _P0 + 3, mask=acts, other=0.0)
    p4 = tl.load(params + _P0 + 4, mask=acts, other=0.0)
    p5 = tl.load(params + _P0 + 5, mask=acts, other=0.0)
    return read_scale, write_scale, p0, p1, p2, p3, p4, p5
