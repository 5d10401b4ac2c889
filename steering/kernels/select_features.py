"""Features that a top-k SAE selects of a row, what they decode to, and edits of their activations.

Shape suffixes: N rows of a chunk, F features, M tiles of features, K features that are selected, D hidden size. The
definition is `headgate.steering.worker.reconstruction`.

The k-th largest activation is found digit by digit of its bits, among the candidates: activations that are at least the
k-th largest of the largest activations of all tiles of features. There are at least k of these, seldom many more, and
no other activation can be selected. With too many of them, which equal activations make, it is found among the tiles
that have candidates. Activations are not negative, so that they are in the order of their bits. A row's bits do not
depend on other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headgate.steering.kernels.feature_values import edited
from headgate.steering.kernels.program_entries import cut_change, fields_of_entry, numbers_of_operation
from headgate.steering.kernels.scan_gates import gates_as_evaluated
from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS, Code, FeatureActivation, Flag

_NUM_CODES = tl.constexpr(NUM_CODES)
_NUM_PARAMS = tl.constexpr(NUM_PARAMS)
_KIND_MASK = tl.constexpr(program_codes.CODE_MASK | program_codes.ACTIVATION_MASK)
_SELECTED = tl.constexpr(int(Code.FEATURE | FeatureActivation.SELECTED))
_EDIT_MASK = tl.constexpr(program_codes.EDIT_MASK)
_IF_ACTIVE = tl.constexpr(int(Flag.IF_ACTIVE))

_BLOCK = 2048
"""Activations that are looked at together."""
_CANDIDATES = 1024
"""Candidates of a row that there is room for."""
_CANDIDATE_BLOCK = 256
"""Candidates that are looked at together."""
_DEPTH = 8
"""Decoder rows that are read together."""
_COLUMNS = 256

Tables = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Pool, table rows, counts, codes, params and groups: `headgate.steering.kernels.run_programs.program_deltas`."""


class Selected(NamedTuple):
    """The features that are selected of each row of a chunk.

    Attributes:
        activations: float32 ``[N, F]``: before the selection.
        ids: int32 ``[N, K]``, ascending by tile.
        values: float32 ``[N, K]``: their activations, all above 0.
        bounds: int32 ``[N, 3]``: how many are selected; the bits of the least activation, and the largest id among the
            selected features that have it.
    """

    activations: Tensor
    ids: Tensor
    values: Tensor
    bounds: Tensor


def select(activations_NF: Tensor, maxima_NM: Tensor, first: int, count_3: Tensor, k: int, tile: int) -> Selected:
    """Return the k largest activations of each row, of equal ones those of smaller ids; never any that is 0.

    Args:
        activations_NF: float32, contiguous, not negative.
        maxima_NM: float32, contiguous: the largest of each `tile` of them.
        first: Index of the chunk's first row in the list.
        count_3: int32: rows of the list; others are left out.
        k: From 1 to F.
        tile: A divisor of `_BLOCK`.
    """
    num_rows, num_features = activations_NF.shape
    num_tiles, device = maxima_NM.shape[1], activations_NF.device
    ids = torch.empty((num_rows, k), dtype=torch.int32, device=device)
    values = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    bounds = torch.empty((num_rows, 3), dtype=torch.int32, device=device)
    tiles = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    candidates = torch.empty((num_rows, _CANDIDATES), dtype=torch.int32, device=device)
    _select_kernel[(num_rows,)](
        activations_NF.view(torch.int32),
        maxima_NM.view(torch.int32),
        count_3,
        tiles,
        candidates,
        ids,
        values.view(torch.int32),
        bounds,
        first,
        num_features,
        num_tiles,
        k,
        TILE=tile,
        BLOCK=_BLOCK,
        CANDIDATES=_CANDIDATES,
        CANDIDATE_BLOCK=_CANDIDATE_BLOCK,
        num_warps=8,
    )
    return Selected(activations_NF, ids, values, bounds)


def decode_selected(selected: Selected, decoder_FD: Tensor, first: int, count_3: Tensor) -> Tensor:
    """Return what selected features decode to, without the bias, float32 ``[1, N, D]``, of rows to be reconstructed."""
    (num_rows, k), width = selected.ids.shape, decoder_FD.shape[1]
    decoded_1ND = torch.empty((1, num_rows, width), dtype=torch.float32, device=decoder_FD.device)
    _decode_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
        selected.ids,
        selected.values,
        selected.bounds,
        decoder_FD,
        count_3,
        decoded_1ND,
        first,
        k,
        width,
        DEPTH=_DEPTH,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return decoded_1ND


def add_edits(
    selected: Selected,
    gains_N: Tensor,
    token_N: Tensor,
    count_3: Tensor,
    tables: Tables,
    gates: tuple[Tensor, Tensor, Tensor] | None,
    value_TD: Tensor,
    delta_TD: Tensor,
    first: int,
) -> None:
    """Add to changes of rows what the edits of selected features in their programs change.

    Args:
        selected: Of a chunk of rows.
        gains_N: float32, of all listed rows: by which the SAE's norm multiplies what is decoded.
        token_N: int32: the listed tokens.
        count_3: int32: how many there are.
        tables: The programs.
        gates: As `headgate.steering.kernels.run_programs.program_deltas` takes them, evaluated at this site.
        value_TD: Its dtype limits changes.
        delta_TD: float32, contiguous: added to.
        first: Index of the chunk's first row in the list.
    """
    pool, *of_tokens, groups = tables
    num_rows, num_features = selected.activations.shape
    width, num_entries = delta_TD.shape[1], of_tokens[2].shape[1]
    _edit_kernel[(num_rows, triton.cdiv(width, _COLUMNS))](
        selected.activations,
        selected.bounds,
        gains_N,
        token_N,
        count_3,
        pool,
        *of_tokens,
        groups,
        *(gates or (None,) * 3),
        value_TD,
        delta_TD,
        pool.stride(0),
        first,
        num_features,
        num_entries,
        None if gates is None else gates[0].shape[1],
        width,
        BLOCK_E=triton.next_power_of_2(max(num_entries, 1)),
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _bits_at(values_ptr, tiles_ptr, start, count, F, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return bits of a block of values, 0 of none; and the indices of these values.

    Without tiles, they are the values from `start` to `count`; with a list of tiles, those of the tiles.
    """
    place = start + tl.arange(0, BLOCK)
    index = place
    is_value = place < count
    if tiles_ptr is not None:
        tile = tl.load(tiles_ptr + place // TILE, mask=is_value, other=0)
        index = tile * TILE + place % TILE
        is_value = is_value & (index < F)
    return tl.load(values_ptr + index, mask=is_value, other=0), index


@triton.jit
def _kth_largest(values_ptr, tiles_ptr, count, F, k, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the k-th largest value, 0 if there are fewer; and how many of its equals are among the k."""
    digits = tl.arange(0, 16)
    prefix = count * 0
    remaining = k
    for step in tl.static_range(8):
        shift = 28 - 4 * step
        counts = tl.zeros([16], tl.int32)
        for start in range(0, count, BLOCK):
            bits, _index = _bits_at(values_ptr, tiles_ptr, start, count, F, TILE, BLOCK)
            is_alike = (bits > 0) & ((bits >> shift) >> 4 == prefix)
            digit = (bits >> shift) & 15
            counts += tl.sum(((digit[:, None] == digits[None, :]) & is_alike[:, None]).to(tl.int32), axis=0)
        at_least = tl.sum(tl.where(digits[None, :] >= digits[:, None], counts[None, :], 0), axis=1)
        found = tl.max(tl.where(at_least >= remaining, digits, 0))
        remaining -= tl.sum(tl.where(digits > found, counts, 0))
        prefix = (prefix << 4) | found
    return prefix, remaining


@triton.jit(do_not_specialize=["first"])
def _select_kernel(
    activations_ptr, maxima_ptr, count_ptr, tiles_ptr, candidates_ptr, ids_ptr, values_ptr, bounds_ptr,
    first, F, M, K, TILE: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, CANDIDATE_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if first + row >= tl.load(count_ptr):
        return
    activations, tiles, candidates = activations_ptr + row * F, tiles_ptr + row * M, candidates_ptr + row * CANDIDATES
    least_maximum, _equal = _kth_largest(maxima_ptr + row * M, None, M, M, K, TILE, BLOCK)
    num_tiles = M * 0
    for start in range(0, M, BLOCK):
        bits, index = _bits_at(maxima_ptr + row * M, None, start, M, M, TILE, BLOCK)
        is_kept = (bits > 0) & (bits >= least_maximum)
        tl.store(tiles + num_tiles + tl.cumsum(is_kept.to(tl.int32), 0) - 1, index, mask=is_kept)
        num_tiles += tl.sum(is_kept.to(tl.int32))
    tl.debug_barrier()  # threads read tiles that others have stored
    num_candidates = M * 0
    for start in range(0, num_tiles * TILE, BLOCK):
        bits, index = _bits_at(activations, tiles, start, num_tiles * TILE, F, TILE, BLOCK)
        is_kept = (bits > 0) & (bits >= least_maximum)
        place = num_candidates + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(candidates + place, index, mask=is_kept & (place < CANDIDATES))
        num_candidates += tl.sum(is_kept.to(tl.int32))
    tl.debug_barrier()
    ids, values, bounds = ids_ptr + row * K, values_ptr + row * K, bounds_ptr + 3 * row
    if num_candidates <= CANDIDATES:
        _store_selected(activations, candidates, num_candidates, F, K, ids, values, bounds, 1, CANDIDATE_BLOCK)
    else:
        _store_selected(activations, tiles, num_tiles * TILE, F, K, ids, values, bounds, TILE, BLOCK)


@triton.jit
def _store_selected(
    activations_ptr, tiles_ptr, count, F, K, ids_ptr, values_ptr, bounds_ptr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the K largest activations of the listed tiles, `count` features in all, and their bounds."""
    least, num_equal = _kth_largest(activations_ptr, tiles_ptr, count, F, K, TILE, BLOCK)
    found, equal, last = count * 0, count * 0, count * 0 - 1
    for start in range(0, count, BLOCK):
        bits, index = _bits_at(activations_ptr, tiles_ptr, start, count, F, TILE, BLOCK)
        is_equal = (bits > 0) & (bits == least)
        rank = equal + tl.cumsum(is_equal.to(tl.int32), 0)
        is_last = is_equal & (rank <= num_equal)
        is_kept = (bits > least) | is_last
        place = found + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(ids_ptr + place, index, mask=is_kept)
        tl.store(values_ptr + place, bits, mask=is_kept)
        found += tl.sum(is_kept.to(tl.int32))
        equal += tl.sum(is_equal.to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(is_last, index, -1)))
    tl.store(bounds_ptr, found)
    tl.store(bounds_ptr + 1, least)
    tl.store(bounds_ptr + 2, last)


@triton.jit(do_not_specialize=["first"])
def _decode_kernel(
    ids_ptr, values_ptr, bounds_ptr, decoder_ptr, count_ptr, decoded_ptr,
    first, K, D, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if first + row >= tl.load(count_ptr + 2):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_selected = tl.load(bounds_ptr + 3 * row)
    y = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_selected, DEPTH):
        place = start + tl.arange(0, DEPTH)
        is_one = place < num_selected
        ids = tl.load(ids_ptr + row * K + place, mask=is_one, other=0).to(tl.int64)
        values = tl.load(values_ptr + row * K + place, mask=is_one, other=0.0)
        w = tl.load(decoder_ptr + ids[:, None] * D + columns[None, :], mask=is_one[:, None] & (columns < D)[None, :])
        w = tl.where(is_one[:, None] & (columns < D)[None, :], w.to(tl.float32), 0.0)
        y += tl.sum(values[:, None] * w, axis=0)
    tl.store(decoded_ptr + row * D + columns, y, mask=columns < D)


@triton.jit(do_not_specialize=["first"])
def _edit_kernel(
    activations_ptr, bounds_ptr, gains_ptr, token_ptr, count_ptr, pool_ptr, row_ptr, counts_ptr, codes_ptr, params_ptr,
    groups_ptr, signals_ptr, states_ptr, tokens_ptr, value_ptr, delta_ptr, pool_stride, first, F, E, C, D,
    BLOCK_E: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if first + row >= tl.load(count_ptr):
        return
    token = tl.load(token_ptr + first + row).to(tl.int64)
    table_row, count = tl.load(row_ptr + token).to(tl.int64), tl.load(counts_ptr + token)
    groups = tl.load(groups_ptr + token) if groups_ptr is not None else -1
    codes, params = codes_ptr + table_row * E * _NUM_CODES, params_ptr + table_row * E * _NUM_PARAMS
    gates = None
    if signals_ptr is not None:
        gates = gates_as_evaluated(codes, params, count, token, signals_ptr, states_ptr, tokens_ptr, C, BLOCK_E)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gain = tl.load(gains_ptr + first + row)
    least = tl.load(bounds_ptr + 3 * row + 1).to(tl.float32, bitcast=True)
    last = tl.load(bounds_ptr + 3 * row + 2)
    change = tl.zeros([COLUMNS], tl.float32)
    for at in range(count):
        code, _read, write = fields_of_entry(codes, at, count, groups, gates)
        if code & _KIND_MASK == _SELECTED:
            _rs, write_scale, _p0, p1, p2 = numbers_of_operation(codes, params, at, code, gates)
            feature = p1.to(tl.int32)
            a = tl.load(activations_ptr + row * F + feature)
            a = tl.where((a > least) | ((a == least) & (feature <= last)), a, 0.0)
            target = edited(code & _EDIT_MASK, a, p2)
            target = tl.where((code & _IF_ACTIVE == 0) | (a > 0), target, a)
            w = tl.load(pool_ptr + write * pool_stride + columns, mask=columns < D, other=0.0)
            change += write_scale * gain * (target - a) * w.to(tl.float32)
    places = delta_ptr + token * D + columns
    delta = tl.load(places, mask=columns < D, other=0.0)
    tl.store(places, cut_change(delta + change, value_ptr), mask=columns < D)
