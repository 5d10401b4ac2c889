"""Gates on rows of the stream: at once on the only row of a request in a step, and in their order on several rows.

Formulas: `headgate.steering.programs.codes`. Several rows of a request have the flag `TokenFlag.IS_SCANNED`, and
are consecutive. Two launches evaluate them before the programs run: one finds the scores of every row by
itself, the other goes through the rows of each request, `_ROWS` at a time, and through the entries for those: what an
entry takes from earlier rows is a maximum, a sum, or a composition of affine maps, which all rows find together.

`signals` points to the first column of each row, `states` to the first column of their request. `index` counts the
rows; rows from `length` on (none if `ROWS` is 1) are neither read nor written.
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
from headgate.steering.kernels.program_entries import (
    Gates,
    attenuation,
    numbers_of_features,
    rows_of_entries,
    stream_row,
    strides_of,
)
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import (
    NUM_CODES,
    NUM_PARAMS,
    Code,
    Combine,
    GateFlag,
    GateScope,
    Mode,
    ScorePooling,
    TokenFlag,
)

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_P0 = tl.constexpr(program_codes.P0)
_CHANGE_SHIFT = tl.constexpr(program_codes.CHANGE_SHIFT)
_CHANGE_MASK = tl.constexpr(program_codes.CHANGE_MASK)
_LEAF = tl.constexpr(int(Code.LEAF))
_NODE = tl.constexpr(int(Code.NODE))
_GATE = tl.constexpr(int(Code.GATE))

_BELOW = tl.constexpr(int(GateFlag.BELOW))
_FROM_PROMPT_END = tl.constexpr(int(GateFlag.FROM_PROMPT_END))
_OBSERVES = tl.constexpr(int(GateFlag.OBSERVES))
_UNWRITTEN = tl.constexpr(int(GateFlag.UNWRITTEN))
_MODE_MASK = tl.constexpr(program_codes.MODE_MASK)
_PROPORTIONAL = tl.constexpr(int(Mode.PROPORTIONAL))
_SIGMOID = tl.constexpr(int(Mode.SIGMOID))
_PID = tl.constexpr(int(Mode.PID))
_POOLING_MASK = tl.constexpr(program_codes.POOLING_MASK)
_EMA = tl.constexpr(int(ScorePooling.EMA))
_LAST_PROMPT = tl.constexpr(int(ScorePooling.LAST_PROMPT))
_PROMPT_MEAN = tl.constexpr(int(ScorePooling.PROMPT_MEAN))
_COMBINE_MASK = tl.constexpr(program_codes.COMBINE_MASK)
_ALWAYS = tl.constexpr(int(Combine.ALWAYS))
_ANY = tl.constexpr(int(Combine.ANY))
_NOT = tl.constexpr(int(Combine.NOT))
_SCOPE_MASK = tl.constexpr(program_codes.SCOPE_MASK)
_NEXT = tl.constexpr(int(GateScope.NEXT))
_REST = tl.constexpr(int(GateScope.REST))

_RESETS = tl.constexpr(int(TokenFlag.RESETS))
_ENDS_PROMPT = tl.constexpr(int(TokenFlag.ENDS_PROMPT))
_IS_GENERATED = tl.constexpr(int(TokenFlag.IS_GENERATED))

_LEAST_HYSTERESIS = tl.constexpr(program_codes.LEAST_HYSTERESIS)
_READ = tl.constexpr(program_codes.READ)
_WRITE = tl.constexpr(program_codes.WRITE)
_SCORE = tl.constexpr(int(Code.SCORE))
_IS_SCANNED = tl.constexpr(int(TokenFlag.IS_SCANNED))


@triton.jit
def evaluate_gates(
    codes, params, num_entries, signals, first_signals, states, flags, index, length, C, ROWS: tl.constexpr
):  # fmt: skip
    """Run the entries of gates on rows whose scores are there; the first row alone may be one that resets.

    `first_signals` points to the first column of the first row.
    Barriers stand between what a thread writes and what another reads of it, both ways.
    """
    resets = flags & _RESETS
    if ROWS > 1:
        resets = tl.sum(tl.where(index == 0, resets, 0))
    for at in range(num_entries):
        code = tl.load(codes + at * _NUM_CODES)
        op = code & _CODE_MASK
        numbers = params + at * _NUM_PARAMS + _P0
        column = code >> _CHANGE_SHIFT & _CHANGE_MASK
        if op == _LEAF:
            _leaf(code, numbers, signals, first_signals, column, states + column, resets, flags, index, length, C, ROWS)
        elif op == _NODE:
            _node(code, numbers, signals, column, index, length)
        elif op == _GATE:
            _gate(code, numbers, signals, column, states + column, resets, flags, index, length, C, ROWS)


@triton.jit
def _leaf(
    code, numbers, signals, first_signals, column, states, resets, flags, index, length, C, ROWS: tl.constexpr
):  # fmt: skip
    fired, before, count = _load_states(states, resets)
    is_row = index < length
    score = tl.load(signals + tl.load(numbers + 4).to(tl.int32), mask=is_row, other=0.0)
    pooling, value = code & _POOLING_MASK, score
    total = tl.where(is_row, before, 0.0)  # of each row
    if pooling == _EMA:
        total = _moving_average(score, tl.load(numbers + 3), before, index, ROWS)
        value = total
    elif pooling != 0:
        before, count = _of_prompt(pooling, score, before, count, flags, is_row, ROWS)
        total = tl.where(is_row, before, 0.0)
        value = tl.where(flags & (_ENDS_PROMPT | _IS_GENERATED) != 0, total, float("nan"))
    if code & _MODE_MASK == _PID:
        _control(
            numbers, signals + column, first_signals + column, states, fired, before, count, value, flags, index,
            length, C, ROWS,
        )  # fmt: skip
    else:
        _compare(
            code, numbers, signals + column, states, fired, total, count, value, index, length, ROWS
        )  # fmt: skip


@triton.jit
def _control(
    numbers, places, first_place, states, integral, before, count, value, flags, index, length, C, ROWS: tl.constexpr
):  # fmt: skip
    """Run a control loop on rows whose pooled scores are `value`: each row needs the integral of the one before."""
    is_row = index < length
    acts = is_row & (flags & (_ENDS_PROMPT | _IS_GENERATED) != 0)
    tl.debug_barrier()
    if ROWS == 1:
        strength, later = _controlled(numbers, value, before, integral)
        _store(places, tl.where(acts, strength, 0.0), acts.to(tl.float32), value, is_row)
        _store(states, tl.where(acts, later, integral), value, count, is_row)
    else:
        _store(places, value * 0, acts.to(tl.float32), value, is_row)
        tl.debug_barrier()
        for at in range(tl.min(tl.where(acts, index, length)), length):
            place = first_place + at * C
            earlier = tl.where(at > 0, tl.load(place + 2 - C, mask=at > 0, other=0.0), before)
            strength, integral = _controlled(numbers, tl.load(place + 2), earlier, integral)
            tl.store(place, strength)
        _store(states, integral, tl.load(first_place + (length - 1) * C + 2), count, length > 0)
    tl.debug_barrier()


@triton.jit
def _controlled(numbers, value, before, integral):
    """Return the strength of a control loop on one row, and its integral after that row."""
    least, largest = tl.load(numbers - 2), tl.load(numbers - 1)
    error, gain = tl.load(numbers) - value, tl.load(numbers + 2)
    is_first = integral != integral
    held = tl.where(is_first, 0.0, integral)
    has_change = (is_first == 0) & (tl.abs(before) < float("inf"))
    change = tl.where(has_change, before - value, 0.0)
    wanted = tl.load(numbers + 1) * error + gain * (held + error) + tl.load(numbers + 5) * change
    strength = tl.minimum(tl.maximum(wanted, least), largest)
    later = tl.where((wanted - strength) * (error * gain) > 0, held, held + error)
    is_number = tl.abs(value) < float("inf")
    return tl.where(is_number, strength, 0.0), tl.where(is_number, later, integral)


@triton.jit
def _compare(
    code, numbers, places, states, fired, total, count, value, index, length, ROWS: tl.constexpr
):  # fmt: skip
    """Compare the pooled scores of rows, `value`, with a leaf's threshold."""
    threshold, hysteresis = tl.load(numbers), tl.load(numbers + 1)
    above = tl.where(code & _BELOW != 0, threshold - value, value - threshold)
    fires = _with_hysteresis(above, hysteresis, fired, index, ROWS)
    strength = _strength(code & _MODE_MASK, above, hysteresis, tl.load(numbers + 2), fires)
    fires = fires.to(tl.float32)
    tl.debug_barrier()
    _store(places, strength, fires, value, index < length)
    _store(states + index * 0, fires, total, count, index == length - 1)
    tl.debug_barrier()


@triton.jit
def _load_states(states, resets):
    """Return three states of a request, NaN where they are forgotten."""
    is_kept = resets == 0
    return (
        tl.load(states, mask=is_kept, other=float("nan")),
        tl.load(states + 1, mask=is_kept, other=float("nan")),
        tl.load(states + 2, mask=is_kept, other=float("nan")),
    )


@triton.jit
def _store(places, first, second, third, mask):
    """Store three columns that follow one another."""
    tl.store(places, first, mask=mask)
    tl.store(places + 1, second, mask=mask)
    tl.store(places + 2, third, mask=mask)


@triton.jit
def _moving_average(score, alpha, before, index, ROWS: tl.constexpr):
    """Return the pooled score of each row: a composition of affine maps."""
    is_first = index == tl.where(before == before, -1, 0)
    keep, term = tl.where(is_first, 0.0, 1 - alpha), tl.where(is_first, score, alpha * score)
    if ROWS > 1:
        keep, term = tl.associative_scan((keep, term), 0, _composed)
    return keep * tl.where(before == before, before, 0.0) + term


@triton.jit
def _composed(keep, term, later_keep, later_term):
    return keep * later_keep, later_keep * term + later_term


@triton.jit
def _of_prompt(pooling, score, total, count, flags, is_row, ROWS: tl.constexpr):
    """Return the two states of a leaf that pools a prompt, after the rows."""
    is_last = is_row & (flags & _ENDS_PROMPT != 0)
    is_counted = is_row & tl.where(pooling == _PROMPT_MEAN, flags & _IS_GENERATED == 0, is_last)
    added, number, ends = tl.where(is_counted, score, 0.0), is_counted.to(tl.float32), is_last.to(tl.int32)
    if ROWS > 1:
        added, number, ends = tl.sum(added), tl.sum(number), tl.sum(ends)
    if pooling == _PROMPT_MEAN:
        added += tl.where(total == total, total, 0.0)
        later = number + tl.where(count == count, count, 0.0)
        count = tl.where(number > 0, later, count)
        added = tl.where(ends > 0, added / tl.maximum(later, 1.0), added)
    return tl.where(number > 0, added, total), count


@triton.jit
def _with_hysteresis(above, hysteresis, fired, index, ROWS: tl.constexpr):
    """Return which rows fire: a row that decides nothing does as the last one before that did."""
    fires = above > 0
    stays = above >= tl.where(hysteresis > 0, -hysteresis, float("inf"))
    if ROWS == 1:
        fires = fires | (stays & (fired > 0))
    elif hysteresis > 0:
        decided = tl.where(fires, 2 * index + 2, tl.where(stays, 0, 2 * index + 1))
        latest = tl.associative_scan(decided, 0, _later)
        fires = tl.where(latest == 0, fired, (latest % 2 == 0).to(tl.float32)) > 0
    return fires


@triton.jit
def _later(one, other):
    return tl.maximum(one, other)


@triton.jit
def _strength(mode, above, hysteresis, amount, fires):
    """Return the strength of a leaf; `above` is NaN where nothing is known yet."""
    ramp = (above + hysteresis) / tl.maximum(hysteresis, _LEAST_HYSTERESIS)
    ramp = amount * tl.minimum(tl.maximum(ramp, 0.0), 1.0)
    x = amount * above
    e = tl.exp(-tl.abs(x))
    sigmoid = tl.where(x > 0, 1.0, e) / (1 + e)
    strength = tl.where(mode == _PROPORTIONAL, ramp, tl.where(mode == _SIGMOID, sigmoid, fires.to(tl.float32)))
    return tl.where(above == above, strength, 0.0)


@triton.jit
def _node(code, numbers, signals, column, index, length):
    combine = code & _COMBINE_MASK
    one, other = signals + tl.load(numbers + 4).to(tl.int32), signals + tl.load(numbers + 5).to(tl.int32)
    is_one_read = index < tl.where(combine == _ALWAYS, 0, length)
    is_other_read = index < tl.where((combine == _ALWAYS) | (combine == _NOT), 0, length)
    for at in tl.static_range(2):
        a = tl.load(one + at, mask=is_one_read, other=0.0)
        b = tl.load(other + at, mask=is_other_read, other=0.0)
        both = tl.where(combine == _ANY, tl.maximum(a, b), tl.minimum(a, b))
        value = tl.where(combine == _ALWAYS, 1.0, tl.where(combine == _NOT, 1 - a, both))
        tl.store(signals + column + at, value, mask=index < length)
    tl.debug_barrier()


@triton.jit
def _gate(code, numbers, signals, column, states, resets, flags, index, length, C, ROWS: tl.constexpr):
    carried, latched, num_written = _load_states(states, resets)
    is_row, root, p0 = index < length, signals + tl.load(numbers + 4).to(tl.int32), tl.load(numbers)
    decides = flags & (_ENDS_PROMPT | _IS_GENERATED) != 0
    counts = tl.where(code & _FROM_PROMPT_END == 0, is_row, is_row & decides)
    strength = tl.load(root, mask=counts, other=0.0)
    fires = tl.load(root + 1, mask=counts, other=0.0) > 0
    scope = code & _SCOPE_MASK
    acts, latch, following = strength, tl.where(is_row, latched, 0.0), tl.where(is_row, float("nan"), 0.0)
    if scope == _NEXT:
        acts, following = tl.where(index == 0, carried, 0.0), strength
        if ROWS > 1:
            tl.store(signals + column + 2, following, mask=is_row)
            tl.debug_barrier()
            acts = tl.load(signals - C + column + 2, mask=is_row & (index > 0), other=0.0)
            acts = tl.where(index == 0, carried, acts)
    elif scope == _REST:
        latch = _latched(strength, fires, latched, p0, flags & _IS_GENERATED != 0, index, is_row, ROWS)
        acts, is_known = latch, latch == latch
        strength = tl.where(is_known, latch, strength)
        following = tl.where(is_known, latch, tl.where(decides, p0, latch))
    acts = tl.where(code & _OBSERVES == 0, tl.where(acts == acts, acts, 0.0), 0.0)
    is_written = (is_row & (acts != 0) & (code & _UNWRITTEN == 0)).to(tl.float32)
    if ROWS > 1:
        is_written = tl.sum(is_written)
    num_written = is_written + tl.where(num_written == num_written, num_written, 0.0)
    tl.debug_barrier()
    _store(signals + column, acts, strength, following, is_row)
    _store(states + index * 0, following, latch, num_written, index == length - 1)
    tl.debug_barrier()


@triton.jit
def _latched(strength, fires, before, p0, is_generated, index, is_row, ROWS: tl.constexpr):
    """Return the strength that is latched on each row: once there is one, it stays."""
    latch = tl.where(fires, strength, float("nan"))
    latch = tl.where(p0 == p0, tl.where(is_generated, p0, latch), latch)
    if ROWS > 1:
        first = tl.min(tl.where(is_row & (latch == latch), index, ROWS))
        found = tl.sum(tl.where(index == first, latch, 0.0))
        latch = tl.where(index < first, float("nan"), found)
    return tl.where(before == before, before, latch)


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
    signals_TC, _, tokens_T2 = gates
    sizes = (num_tokens, num_entries, num_columns)
    _scores_kernel[grid](*rows, *tables, signals_TC, tokens_T2, *strides_of(*rows), *sizes, hidden_size, **options)
    scan_scored(tables, gates)


def scan_scored(tables: tuple[Tensor, Tensor, Tensor, Tensor], gates: Gates) -> None:
    """Evaluate the gates of rows that are scanned, and whose scores are in their signals.

    Args:
        tables: See `scan_gates`.
        gates: Likewise.
    """
    (num_tokens, num_columns), num_entries = gates[0].shape, tables[2].shape[1]
    _scan_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        *(*tables, *gates, num_tokens, num_entries, num_columns),
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        BLOCK_E=triton.next_power_of_2(max(num_entries, 1)),
        num_warps=_SCAN_WARPS,
    )


@triton.jit
def gates_of_row(
    h, codes, params, count, token, signals_ptr, states_ptr, tokens_ptr, C, pool_ptr, pool_stride, columns, D,
    TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Evaluate the gates of a row, unless it is scanned.

    Returns:
        What its entries' coefficients are read from (`headgate.steering.kernels.program_entries`), and how many
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
def gates_as_evaluated(
    codes, params, count, token, signals_ptr, states_ptr, tokens_ptr, C, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Return what the coefficients of a row's entries are read from, after `gates_of_row` has evaluated its gates."""
    flags = tl.load(tokens_ptr + 2 * token + 1)
    signals = signals_ptr + token * C
    states = states_ptr + tl.load(tokens_ptr + 2 * token).to(tl.int64) * C
    num_gates, _num_scored = _num_gates(codes, count, BLOCK_E)
    f = tl.full((), 1.0, tl.float32)
    if num_gates > 0:
        entries = tl.arange(0, BLOCK_E)
        f = attenuation(codes, params, entries, entries < num_gates, signals, states, flags)
    return signals, states, flags, f


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
        scores, total, is_stored = units_together(code, index, numbers, dots, rests, scores, total)
        tl.store(signals + (code >> _CHANGE_SHIFT & _CHANGE_MASK), scores, mask=is_stored)


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
