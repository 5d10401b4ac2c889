"""Gates on rows of the stream: at once on the only row of a request in a step, and in their order on several rows.

Formulas: `headgate.steering.programs.gate_codes`. Several rows of a request have the flag `TokenFlag.IS_SCANNED`, and
are consecutive. Two launches evaluate them before the programs run: one finds the scores of every row by
itself, the other goes through the rows of each request, `_ROWS` at a time, and through the entries for those: what an
entry takes from earlier rows is a maximum, a sum, or a composition of affine maps, which all rows find together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headgate.steering.kernels.feature_values import (
    norms_of_scores,
    scores_of_row,
    statistics_of_row,
    units_together,
)
from headgate.steering.kernels.gate_coefficients import attenuation
from headgate.steering.kernels.gate_values import evaluate_gates
from headgate.steering.kernels.program_arguments import Gates, strides_of
from headgate.steering.kernels.program_entries import numbers_of_features, rows_of_entries, stream_row
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code
from headgate.steering.programs.gate_codes import TokenFlag

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_READ = tl.constexpr(program_codes.READ)
_WRITE = tl.constexpr(program_codes.WRITE)
_CHANGE_SHIFT = tl.constexpr(program_codes.CHANGE_SHIFT)
_CHANGE_MASK = tl.constexpr(program_codes.CHANGE_MASK)
_SCORE = tl.constexpr(int(Code.SCORE))
_RESETS = tl.constexpr(int(TokenFlag.RESETS))
_IS_SCANNED = tl.constexpr(int(TokenFlag.IS_SCANNED))

_ROWS = 2048
"""Rows of a request that are evaluated at once."""

_SCAN_WARPS = 8
_TOKENS = 64
"""Rows among which one Triton program looks for requests to go through."""


def scan_gates(
    rows: tuple[Tensor, Tensor | None, Tensor],
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    gates: Gates,
    grid: tuple[int],
    options: dict[str, int],
) -> None:
    """Evaluate the gates of rows that are scanned: signals and states.

    Args:
        rows: Value, addend and pool.
        tables: Rows of the table and counts of each token; codes and params.
        gates: As `headgate.steering.kernels.run_programs.program_deltas` takes them.
        grid: Grid for a launch with a part of the tokens for each Triton program.
        options: What that launch is compiled for.
    """
    (num_tokens, hidden_size), num_entries, num_columns = rows[0].shape, tables[2].shape[1], gates[0].shape[1]
    signals_TC, states_QC, tokens_T2 = gates
    sizes = (num_tokens, num_entries, num_columns)
    _scores_kernel[grid](*rows, *tables, signals_TC, tokens_T2, *strides_of(*rows), *sizes, hidden_size, **options)
    _scan_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        *(*tables, signals_TC, states_QC, tokens_T2, *sizes),
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        BLOCK_E=options["BLOCK_E"],
        num_warps=_SCAN_WARPS,
    )


@triton.jit
def gates_of_row(
    h, codes, params, count, token, signals_ptr, states_ptr, tokens_ptr, C, pool_ptr, pool_stride, columns, D,
    TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Evaluate the gates of a row, unless it is scanned.

    Returns:
        What its entries' coefficients are read from (`headgate.steering.kernels.gate_coefficients`), and how many
        entries are of gates.
    """
    flags = tl.load(tokens_ptr + 2 * token + 1)
    slot = tl.load(tokens_ptr + 2 * token).to(tl.int64)
    signals, states = signals_ptr + token * C, states_ptr + slot * C
    num_gates, num_scored = _num_gates(codes, count, BLOCK_E)
    f = tl.full((), 1.0, tl.float32)
    if num_gates > 0:
        if flags & _IS_SCANNED == 0:
            _store_scores(h, codes, params, num_scored, signals, pool_ptr, pool_stride, columns, D, TILE)
            tl.debug_barrier()
            evaluate_gates(codes, params, num_gates, signals, signals, states, flags, token * 0, 1, C, 1)
        entries = tl.arange(0, BLOCK_E)
        f = attenuation(codes, params, entries, entries < num_gates, signals, states, flags)
    return (signals, states, flags, f), num_gates


@triton.jit
def _num_gates(codes, count, BLOCK_E: tl.constexpr):
    """Return how many entries of a program are of gates, and how many of them there are up to the last score."""
    entries = tl.arange(0, BLOCK_E)
    op = tl.load(codes + entries * _NUM_CODES, mask=entries < count, other=0) & _CODE_MASK
    return tl.sum((op >= _SCORE).to(tl.int32)), tl.max(tl.where(op == _SCORE, entries + 1, 0))


@triton.jit
def _store_scores(h, codes, params, num_scored, signals, pool_ptr, pool_stride, columns, D, TILE: tl.constexpr):
    """Store what entries `SCORE` read of a row; `TILE` are read at once."""
    mean, std, norm = 0.0, -1.0, -1.0  # negative until a score needs them
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, num_scored, TILE):
        index = start + tl.arange(0, TILE)
        code = tl.load(codes + index * _NUM_CODES, mask=index < num_scored, other=0)
        code = tl.where(code & _CODE_MASK == _SCORE, code, 0)
        read = tl.load(codes + index * _NUM_CODES + _READ, mask=code != 0, other=0).to(tl.int64)
        write = tl.load(codes + index * _NUM_CODES + _WRITE, mask=code != 0, other=0).to(tl.int64)
        u = rows_of_entries(pool_ptr, pool_stride, read, columns, D)
        w = rows_of_entries(pool_ptr, pool_stride, write, columns, D)
        numbers = numbers_of_features(codes, params, index, code, None)
        mean, std, norm = statistics_of_row(norms_of_scores(code), h, mean, std, norm, columns, D)
        dots = tl.sum(h[None, :] * u.to(tl.float32), axis=1)
        rests = tl.sum(h[None, :] * w.to(tl.float32), axis=1)
        scores = scores_of_row(code, numbers, dots, rests, mean, std, norm, D)
        scores, total, is_told = units_together(code, index, numbers, dots, rests, scores, total)
        tl.store(signals + (code >> _CHANGE_SHIFT & _CHANGE_MASK), scores, mask=is_told)


@triton.jit(do_not_specialize=["T"])
def _scores_kernel(
    value_ptr,
    addend_ptr,
    pool_ptr,
    row_ptr,
    count_ptr,
    codes_ptr,
    params_ptr,
    signals_ptr,
    tokens_ptr,
    value_stride,
    addend_stride,
    pool_stride,
    T,
    E,
    C,
    D,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the scores of rows that are scanned."""
    if _num_scanned(count_ptr, tokens_ptr, T, TOKENS) == 0:
        return
    columns = tl.arange(0, BLOCK_D)
    for small_token in range(tl.program_id(0), T, tl.num_programs(0)):
        token = tl.cast(small_token, tl.int64)
        count = tl.load(count_ptr + token)
        if (count > 0) & (tl.load(tokens_ptr + 2 * token + 1) & _IS_SCANNED != 0):
            table_row = tl.load(row_ptr + token).to(tl.int64)
            codes, params = codes_ptr + table_row * E * _NUM_CODES, params_ptr + table_row * E * _NUM_PARAMS
            _num_of_gates, num_scored = _num_gates(codes, count, BLOCK_E)
            if num_scored > 0:
                h = stream_row(value_ptr, addend_ptr, token, value_stride, addend_stride, columns, columns < D)
                signals = signals_ptr + token * C
                _store_scores(h, codes, params, num_scored, signals, pool_ptr, pool_stride, columns, D, TILE)


@triton.jit
def _num_scanned(count_ptr, tokens_ptr, T, TOKENS: tl.constexpr):
    """Return how many of this program's tokens are scanned."""
    tokens = tl.program_id(0) + tl.arange(0, TOKENS) * tl.num_programs(0)
    is_active = tl.load(count_ptr + tokens, mask=tokens < T, other=0) > 0
    flags = tl.load(tokens_ptr + 2 * tokens + 1, mask=is_active, other=0)
    return tl.sum((flags & _IS_SCANNED != 0).to(tl.int32))


@triton.jit(do_not_specialize=["T"])
def _scan_kernel(
    row_ptr, count_ptr, codes_ptr, params_ptr, signals_ptr, states_ptr, tokens_ptr, T, E, C,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Evaluate gates on the rows of requests whose first row is among `TOKENS`."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots, previous = _scanned_slots(tokens_ptr, tokens, T), _scanned_slots(tokens_ptr, tokens - 1, T)
    firsts = tl.where((slots >= 0) & (slots != previous), tokens, T)
    first = tl.min(firsts)
    while first < T:
        slot, at = tl.load(tokens_ptr + 2 * first), first
        while _scanned_slots(tokens_ptr, at, T) == slot:
            at += _scan_rows(
                row_ptr, count_ptr, codes_ptr, params_ptr, signals_ptr, states_ptr, tokens_ptr,
                at, slot, T, E, C, ROWS, BLOCK_E,
            )  # fmt: skip
        first = tl.min(tl.where(firsts > first, firsts, T))


@triton.jit
def _scanned_slots(tokens_ptr, tokens, T):
    """Return the slots of tokens' requests; -1 of tokens that are not scanned, or are none."""
    is_token = (tokens >= 0) & (tokens < T)
    flags = tl.load(tokens_ptr + 2 * tokens + 1, mask=is_token, other=0)
    return tl.load(tokens_ptr + 2 * tokens, mask=flags & _IS_SCANNED != 0, other=-1)


@triton.jit
def _scan_rows(
    row_ptr, count_ptr, codes_ptr, params_ptr, signals_ptr, states_ptr, tokens_ptr,
    first, slot, T, E, C, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Evaluate gates on a request's rows from `first` on that run one program, and return how many: at most `ROWS`."""
    index = tl.arange(0, ROWS)
    tokens = first + index
    count, table_row = tl.load(count_ptr + first), tl.load(row_ptr + first)
    flags = tl.load(tokens_ptr + 2 * tokens + 1, mask=tokens < T, other=0)
    counts = tl.load(count_ptr + tokens, mask=tokens < T, other=0)
    table_rows = tl.load(row_ptr + tokens, mask=tokens < T, other=0)
    follows = (_scanned_slots(tokens_ptr, tokens, T) == slot) & ((index == 0) | (flags & _RESETS == 0))
    follows = follows & (counts == count) & (tl.where(count == 0, table_row, table_rows) == table_row)
    length = tl.min(tl.where(follows, ROWS, index))
    if count > 0:
        codes = codes_ptr + table_row.to(tl.int64) * E * _NUM_CODES
        params = params_ptr + table_row.to(tl.int64) * E * _NUM_PARAMS
        num_gates, _num_scored = _num_gates(codes, count, BLOCK_E)
        signals, states = signals_ptr + tokens.to(tl.int64) * C, states_ptr + slot.to(tl.int64) * C
        evaluate_gates(
            codes, params, num_gates, signals, signals_ptr + tl.cast(first, tl.int64) * C, states, flags, index, length,
            C, ROWS,
        )  # fmt: skip
    return length
