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
from headgate.steering.kernels.program_entries import (
    Gates,
    check_gates,
    check_lengths,
    check_rows,
    check_shift,
    check_tables,
    cut_change,
    fields_of_entry,
    num_changes,
    numbers_of_features,
    numbers_of_operation,
    row_of_entry,
    rows_of_entries,
    stream_row,
    strides_of,
)
from headgate.steering.kernels.scan_gates import gates_of_row, scan_gates
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, Flag

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)

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
"""Values of each array of a row. With 16, a multiprocessor has registers for one program at a time instead of two."""

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
    *,
    gates: Gates | None = None,
    scans: bool = True,
) -> Tensor:
    """Return what the program of each row of the stream adds to it: float32 ``[T, D]``.

    Entries run one after the other on the row, in fp32. Of a row without a program only `count_T` is read, and its part
    of the result is left as it was allocated: it may hold anything. A row's bits do not depend on the rest of the
    batch.

    Args:
        value_TD: Rows contiguous; fp16, bf16 or fp32.
        addend_TD: The stream is ``value + addend``, rounded to their dtype; None if it is `value`.
        pool_SD: Rows contiguous; of another dtype than the value where that is float32 in a model of a narrower one.
        row_T: int32: the table row of each token, in [0, R). Neither this nor a slot is checked: a check would wait for
            the GPU.
        count_T: int32: entries of each token's program at this site, 0 to E; 0 is no program.
        codes_REC: int32 ``[R, E, NUM_CODES]``, contiguous; features after all other entries. Slots are in [0, S), and
            slot 0 is never read.
        params_REP: float32 ``[R, E, NUM_PARAMS]``, contiguous.
        groups_T: int64: bit ``g - 1`` says whether position group g acts on the token; None if no entry has a group.
        changes_TK: float32, contiguous: the changes of features that are read at one site and written at later ones. An
            entry that reads writes its change of the token, which entries that write it must find at later sites.
            Other changes are neither read nor written. None if no entry is of that kind.
        shift_TD: float32, contiguous, written as the result is: the part of it that is not of features. None if it is
            not needed.
        gates: None if no entry is of a gate or has one. Otherwise float32 signals ``[T, C]`` and states ``[Q, C]``,
            and int32 ``[T, 2]``: slot of each token's request, in [0, Q), and `TokenFlag`; all contiguous
            (`headgate.steering.worker.gates.reference.GateTensors`). Gates of the site are evaluated, which writes
            signals and states. Several rows of one request must be consecutive, and have `IS_SCANNED`.
        scans: False if no row has that flag, as in a step of one row for each request: two launches are left out.

    Raises:
        ValueError: If shapes differ, the addend has another dtype, or a row is not contiguous.
    """
    check_rows(value_TD, addend_TD, pool_SD)
    check_tables(codes_REC, params_REP, row_T, count_T)
    num_tokens, hidden_size, num_entries = *value_TD.shape, codes_REC.shape[1]
    check_lengths(num_tokens, rows=row_T, counts=count_T, addend=addend_TD, groups=groups_T, changes=changes_TK)
    check_shift(value_TD, shift_TD)
    if gates is not None:
        check_gates(num_tokens, gates)
    delta_TD = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=value_TD.device)
    if num_tokens:
        grid = (max(min(num_tokens, _MAX_PROGRAMS), triton.cdiv(num_tokens, _TOKENS)),)
        options = _launch_options(num_entries, hidden_size)
        rows, tables = (value_TD, addend_TD, pool_SD), (row_T, count_T, codes_REC, params_REP)
        if gates is not None and scans:
            scan_gates(rows, tables, gates, grid, options)
        _program_deltas_kernel[grid](
            *(*rows, *tables, groups_T, changes_TK, shift_TD, *(gates or (None,) * 3), delta_TD),
            *(*strides_of(*rows), num_tokens, num_entries, num_changes(changes_TK)),
            None if gates is None else gates[0].shape[1],
            hidden_size,
            **options,
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


@triton.jit(do_not_specialize=["T"])
def _program_deltas_kernel(
    value_ptr, addend_ptr, pool_ptr, row_ptr, count_ptr, codes_ptr, params_ptr, groups_ptr, changes_ptr, shift_ptr,
    signals_ptr, states_ptr, tokens_ptr, out_ptr,
    value_stride, addend_stride, pool_stride, T, E, K, C, D,
    TOKENS: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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
            gates, first = None, 0
            if signals_ptr is not None:
                gates, first = gates_of_row(
                    h, codes, params, count, token, signals_ptr, states_ptr, tokens_ptr, C, pool_ptr, pool_stride,
                    columns, D, TILE, BLOCK_E,
                )  # fmt: skip
            h, first = _run_operations(
                h, codes, params, first, count, groups, gates, pool_ptr, pool_stride, columns, D, BLOCK_E
            )
            _store_change(shift_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D)
            changes = changes_ptr + token * K if changes_ptr is not None else None
            h = _add_features(
                h, codes, params, first, count, groups, gates, changes, pool_ptr, pool_stride, columns, D, TILE
            )
            _store_change(out_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D)


@triton.jit
def _store_change(out_ptr, h, value_ptr, addend_ptr, token, value_stride, addend_stride, columns, D):
    """Store by how much `h` differs from a row of the stream, which is read once more; nothing without `out_ptr`."""
    if out_ptr is not None:
        mask = columns < D
        x = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, mask)
        tl.store(out_ptr + token * D + columns, cut_change(h - x, value_ptr), mask=mask)


@triton.jit
def _num_entries(count_ptr, T, TOKENS: tl.constexpr):
    """Return the largest number of entries of this program's tokens."""
    tokens = tl.program_id(0) + tl.arange(0, TOKENS) * tl.num_programs(0)
    return tl.max(tl.load(count_ptr + tokens, mask=tokens < T, other=0))


@triton.jit
def _run_operations(
    h, codes, params, first, count, groups, gates, pool_ptr, pool_stride, columns, D, BLOCK_E: tl.constexpr
):
    """Return `h` after the entries that are no features, from `first` on, and the index of the next entry.

    What an entry needs is on its way while the reductions of the one before it wait for one another.
    """
    code, read, write = fields_of_entry(codes, first, count, groups, gates)
    next_code, next_read, next_write = fields_of_entry(codes, first + 1, count, groups, gates)
    entries = tl.arange(0, BLOCK_E)
    all_codes = tl.load(codes + entries * _NUM_CODES, mask=entries < count, other=_FEATURE)
    u = row_of_entry(pool_ptr, pool_stride, code, read, columns, D)
    w = row_of_entry(pool_ptr, pool_stride, code, write, columns, D)
    numbers = numbers_of_operation(codes, params, first, code, gates)
    num_operations = tl.sum((all_codes & _CODE_MASK < _FEATURE).to(tl.int32))
    remembered = -1.0
    for at in range(num_operations):
        index = first + at
        next_u = row_of_entry(pool_ptr, pool_stride, next_code, next_read, columns, D)
        next_w = row_of_entry(pool_ptr, pool_stride, next_code, next_write, columns, D)
        next_numbers = numbers_of_operation(codes, params, index + 1, next_code, gates)
        later_code, later_read, later_write = fields_of_entry(codes, index + 2, count, groups, gates)
        if code != 0:
            h, remembered = _operation(code, read, numbers, h, u, w, remembered)
        code, read, u, w, numbers = next_code, next_read, next_u, next_w, next_numbers
        next_code, next_read, next_write = later_code, later_read, later_write
    return h, first + num_operations


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
    h, codes, params, first, count, groups, gates, changes, pool_ptr, pool_stride, columns, D, TILE: tl.constexpr
):
    """Return `h` with what the features add that are its last entries, from `first` on; `TILE` are read at once.

    `changes` points to the row's; None if all features are read and written at the same site.
    """
    d = tl.zeros_like(h)
    mean, std, norm = 0.0, -1.0, -1.0  # of h; negative until a feature needs them
    code, read, write = fields_of_entry(codes, first + tl.arange(0, TILE), count, groups, gates)
    for start in range(first, count, TILE):
        index = start + tl.arange(0, TILE)
        u = rows_of_entries(pool_ptr, pool_stride, tl.where(code == 0, 0, read), columns, D)
        w = rows_of_entries(pool_ptr, pool_stride, tl.where(code == 0, 0, write), columns, D)
        numbers = numbers_of_features(codes, params, index, code, gates)
        next_code, next_read, next_write = fields_of_entry(codes, index + TILE, count, groups, gates)
        mean, std, norm = statistics_of_row(code & INPUT_NORM_MASK, h, mean, std, norm, columns, D)
        dots = tl.sum(h[None, :] * u.to(tl.float32), axis=1)
        amounts = amounts_of_features(code, numbers, dots, mean, std, norm, D)
        if changes is not None:
            amounts = amounts_between_sites(code, numbers, amounts, changes)
        d += tl.sum(amounts[:, None] * w.to(tl.float32), axis=0)
        code, read, write = next_code, next_read, next_write
    return h + d
