"""The definition of gates on rows of the stream, in plain PyTorch: what a forward on a CPU runs, too.

Shape suffixes: T tokens of the step, N tokens that share a program, C columns, Q slots of requests, D hidden size, E
entries of a program at the site. Codes and columns: `headgate.steering.programs.codes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headgate.steering.programs.codes import (
    ACTIVATION_MASK,
    CODE,
    CODE_MASK,
    COMBINE_MASK,
    EARLY,
    GROUP,
    INPUT_NORM_MASK,
    LAYER_NORM_EPS,
    LEAST_HYSTERESIS,
    MODE_MASK,
    NO_ROW,
    P0,
    P1,
    P2,
    P3,
    P4,
    P5,
    POOLING_MASK,
    READ,
    READ_SCALE,
    SCOPE_MASK,
    SCORE_KIND_MASK,
    UNIT_MASK,
    WRITE,
    WRITE_SCALE,
    Code,
    Combine,
    FeatureActivation,
    Flag,
    GateFlag,
    GateScope,
    InputNorm,
    Mode,
    ScoreKind,
    ScorePooling,
    TokenFlag,
    UnitFunction,
    change_index,
    gate_column,
    is_of_gate,
)
from headgate.steering.vectors.dtypes import Float32Rows

SLOT, FLAGS = range(2)
"""Columns of `GateTensors.tokens`."""


class GateTensors(NamedTuple):
    """The numbers that gates keep, in the memory of the forward pass.

    Attributes:
        signals: float32 ``[T, C]``: of each batch row. Written at the sites where gates are evaluated.
        states: float32 ``[Q, C]``: of each request. A request's rows are computed in their order.
        tokens: int32 ``[T, 2]``: slot of each batch row's request, and `TokenFlag`. Rows whose program has no gates may
            have any slot below Q.
    """

    signals: Tensor
    states: Tensor
    tokens: Tensor


Entries = Sequence[Sequence[int]]
Params = Sequence[Sequence[float]]


def gate_entries(codes: Entries) -> int:
    """Return how many entries, from the first on, are of gates."""
    return next((at for at, fields in enumerate(codes) if not is_of_gate(fields[CODE])), len(codes))


def evaluate(
    x_TD: Tensor, pool_SD: Tensor, tokens_of: Sequence[tuple[Tensor, Entries, Params]], gates: GateTensors
) -> None:
    """Evaluate the gates of one site: write signals and states.

    Args:
        x_TD: The rows as they came, in the dtype to compute in.
        pool_SD: The vector pool.
        tokens_of: For each program with gates at the site: its batch rows, int64 ``[N]``, ascending; its entries; and
            their params.
        gates: As the forward has them; on any device.
    """
    signals, states, tokens = (tensor.cpu().numpy() for tensor in gates)
    rows: list[tuple[int, Entries, Params]] = []
    for index_N, codes, params in tokens_of:
        number = gate_entries(codes)
        listed: list[int] = index_N.tolist()
        for column, scores in _scores_of(x_TD[index_N], pool_SD, codes[:number], params):
            signals[listed, column] = scores.float().cpu().numpy()
        rows += [(token, codes[:number], params) for token in listed]
    for token, codes, params in sorted(rows, key=lambda row: row[0]):
        slot, flags = tokens[token].tolist()
        _evaluate_row(codes, params, signals[token], states[slot], flags)
    if gates.signals.device.type != "cpu":
        for tensor, values in zip(gates, (signals, states, tokens), strict=True):
            tensor.copy_(torch.from_numpy(values))


def evaluate_scored(tables: tuple[Tensor, Tensor, Tensor, Tensor], gates: GateTensors) -> None:
    """Evaluate the gates of one site on rows whose scores are in their signals, as `evaluate` does.

    Args:
        tables: Row of the table and number of entries of each token; codes and params of the site, by row.
        gates: On the host. Tokens without `TokenFlag.IS_SCANNED` are left out.
    """
    row_T, count_T, codes_REC, params_REP = tables
    signals, states, tokens = (tensor.numpy() for tensor in gates)
    is_scanned = (gates.tokens[:, FLAGS] & TokenFlag.IS_SCANNED != 0) & (count_T > 0)
    for token in is_scanned.nonzero()[:, 0].tolist():
        row, (slot, flags) = int(row_T[token]), tokens[token].tolist()
        codes = codes_REC[row, : int(count_T[token])].tolist()
        _evaluate_row(codes[: gate_entries(codes)], params_REP[row].tolist(), signals[token], states[slot], flags)


def _scores_of(x_ND: Tensor, pool_SD: Tensor, codes: Entries, params: Params) -> Iterator[tuple[int, Tensor]]:
    """Yield column and scores ``[N]`` of each score of a program."""
    total_N = torch.zeros_like(x_ND[:, 0])
    for fields, numbers in zip(codes, params, strict=False):
        code = fields[CODE]
        if code & CODE_MASK != Code.SCORE:
            continue
        scores_N = _scores(x_ND, pool_SD[[fields[READ], fields[WRITE]]].to(x_ND.dtype), fields, numbers)
        if code & SCORE_KIND_MASK != ScoreKind.UNIT:
            yield change_index(code), scores_N
        elif code & UNIT_MASK == UnitFunction.SUM:
            yield change_index(code), total_N + numbers[P0]
            total_N = torch.zeros_like(total_N)
        else:
            total_N = total_N + numbers[P1] * _UNITS[UnitFunction(code & UNIT_MASK)](scores_N)


_UNITS: dict[UnitFunction, Callable[[Tensor], Tensor]] = {
    UnitFunction.RELU: torch.relu,
    UnitFunction.GELU: torch.nn.functional.gelu,
    UnitFunction.SILU: torch.nn.functional.silu,
}


def _scores(x_ND: Tensor, rows_2D: Tensor, fields: Sequence[int], params: Sequence[float]) -> Tensor:
    """Return the scores ``[N]`` of an entry that reads the rows u and w."""
    code = fields[CODE]
    z_N, kind = params[READ_SCALE] * (x_ND @ rows_2D[0]), code & SCORE_KIND_MASK
    if fields[WRITE] != NO_ROW:
        z_N = z_N + params[WRITE_SCALE] * (x_ND @ rows_2D[1])
    if kind == ScoreKind.ACTIVATION:
        return _activations(x_ND, z_N, code, params)
    if kind == ScoreKind.COSINE:
        norm_N = x_ND.square().sum(-1).sqrt()
        z_N = torch.where(norm_N > 0, z_N / norm_N, 0)
    return z_N + params[P0]


def _activations(x_ND: Tensor, z_N: Tensor, code: int, params: Sequence[float]) -> Tensor:
    norm = code & INPUT_NORM_MASK
    if norm == InputNorm.LAYER_NORM:
        std_N = x_ND.std(-1)
        z_N = (z_N - params[READ_SCALE] * params[P5] * x_ND.mean(-1)) / (std_N + LAYER_NORM_EPS)
    elif norm == InputNorm.CONSTANT_NORM:
        gain_N = x_ND.square().sum(-1).sqrt() / x_ND.shape[-1] ** 0.5
        z_N = torch.where(gain_N > 0, z_N / gain_N, 0)
    kind, q_N = code & ACTIVATION_MASK, z_N + params[P0]
    if kind == FeatureActivation.GATED:
        return torch.where(q_N > 0, (params[P3] * z_N + params[P4]).clamp(min=0), 0)
    return torch.where(q_N > params[P1], q_N, 0) if kind == FeatureActivation.JUMP_RELU else q_N.clamp(min=0)


def _evaluate_row(codes: Entries, params: Params, s: Float32Rows, m: Float32Rows, flags: int) -> None:
    """Run the entries of gates on one row: `s` are its signals, `m` its request's states, each ``[C]``."""
    columns = _columns_at_site(codes)
    if flags & TokenFlag.RESETS:
        m[columns] = math.nan
    for fields, numbers in zip(codes, params, strict=False):
        run = _RUN.get(fields[CODE] & CODE_MASK)
        if run is not None:
            run(fields[CODE], numbers, s, m, flags)


def _columns_at_site(codes: Entries) -> list[int]:
    """Return the columns of states that entries at a site write: those of leaves and gates."""
    found = []
    for fields in codes:
        if fields[CODE] & CODE_MASK in (Code.LEAF, Code.GATE):
            first = change_index(fields[CODE])
            found += [first, first + 1, first + 2]
    return found


def _leaf(code: int, params: Sequence[float], s: Float32Rows, m: Float32Rows, flags: int) -> None:
    c = change_index(code)
    before = float(m[c + 1])
    value = _pooled(code & POOLING_MASK, float(s[int(params[P4])]), params[P3], m[c + 1 : c + 3], flags)
    if code & MODE_MASK == Mode.PID:
        acts = bool(flags & (TokenFlag.ENDS_PROMPT | TokenFlag.IS_GENERATED)) and math.isfinite(value)
        s[c] = _controlled(params, value, before, m[c : c + 1]) if acts else 0.0
        s[c + 1], s[c + 2], m[c + 1] = flags & (TokenFlag.ENDS_PROMPT | TokenFlag.IS_GENERATED) != 0, value, value
        return
    sign = -1.0 if code & GateFlag.BELOW else 1.0
    threshold, hysteresis = params[P0], params[P1]
    above = sign * (value - threshold)  # NaN if nothing is known yet: then nothing fires
    fires = above > 0 or (hysteresis > 0 and m[c] > 0 and above >= -hysteresis)
    mode = code & MODE_MASK
    if math.isnan(above):
        strength = 0.0
    elif mode == Mode.PROPORTIONAL:
        strength = params[P2] * min(max((above + hysteresis) / max(hysteresis, LEAST_HYSTERESIS), 0.0), 1.0)
    elif mode == Mode.SIGMOID:
        strength = _sigmoid(params[P2] * above)
    else:
        strength = float(fires)
    m[c] = fires
    s[c], s[c + 1], s[c + 2] = strength, fires, value


def _controlled(params: Sequence[float], value: float, before: float, integral: Float32Rows) -> float:
    """Return the strength of a control loop on a row, and update its integral, ``[1]``."""
    is_first = math.isnan(integral[0])
    held, error = 0.0 if is_first else float(integral[0]), params[P0] - value
    change = before - value if not is_first and math.isfinite(before) else 0.0
    wanted = params[P1] * error + params[P2] * (held + error) + params[P5] * change
    strength = min(max(wanted, params[READ_SCALE]), params[WRITE_SCALE])
    integral[0] = held if (wanted - strength) * error * params[P2] > 0 else held + error
    return strength


def _pooled(pooling: int, score: float, alpha: float, kept: Float32Rows, flags: int) -> float:
    """Return the pooled score of a row, NaN if there is none yet; `kept` are a leaf's sum and count, ``[2]``."""
    before, count = float(kept[0]), float(kept[1])
    if pooling == ScorePooling.TOKEN:
        return score
    if pooling == ScorePooling.EMA:
        kept[0] = score if math.isnan(before) else (1 - alpha) * before + alpha * score
        return float(kept[0])
    is_last, is_generated = bool(flags & TokenFlag.ENDS_PROMPT), bool(flags & TokenFlag.IS_GENERATED)
    if pooling == ScorePooling.LAST_PROMPT:
        if is_last:
            kept[0] = score
    elif not is_generated:
        kept[1] = 1 if math.isnan(count) else count + 1
        kept[0] = score if math.isnan(before) else before + score
        if is_last:
            kept[0] /= kept[1]
    return float(kept[0]) if is_last or is_generated else math.nan


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(max(x, -700.0)) / (1 + math.exp(max(x, -700.0)))


def _node(code: int, params: Sequence[float], s: Float32Rows, m: Float32Rows, flags: int) -> None:
    c, combine = change_index(code), code & COMBINE_MASK
    one, other = int(params[P4]), int(params[P5])
    for at in (0, 1):
        if combine == Combine.ALWAYS:
            s[c + at] = 1
        elif combine == Combine.NOT:
            s[c + at] = 1 - s[one + at]
        else:
            pick = max if combine == Combine.ANY else min
            s[c + at] = pick(s[one + at], s[other + at])


def _gate(code: int, params: Sequence[float], s: Float32Rows, m: Float32Rows, flags: int) -> None:
    c, root, scope = change_index(code), int(params[P4]), code & SCOPE_MASK
    strength, fires = float(s[root]), s[root + 1] > 0
    is_generated = bool(flags & TokenFlag.IS_GENERATED)
    decides = bool(flags & TokenFlag.ENDS_PROMPT) or is_generated
    if code & GateFlag.FROM_PROMPT_END and not decides:
        strength, fires = 0.0, False
    acts, following = strength, math.nan
    if scope == GateScope.NEXT:
        acts, following = float(m[c]), strength
    elif scope == GateScope.REST:
        latched = float(m[c + 1])
        if math.isnan(latched) and is_generated:
            latched = params[P0]
        if math.isnan(latched) and fires:
            latched = strength
        m[c + 1] = acts = latched
        strength = strength if math.isnan(latched) else latched
        following = params[P0] if math.isnan(latched) and decides else latched
    m[c] = following
    s[c] = 0 if math.isnan(acts) or code & GateFlag.OBSERVES else acts
    s[c + 1], s[c + 2] = strength, following
    m[c + 2] = (0 if math.isnan(m[c + 2]) else m[c + 2]) + (s[c] != 0 and not code & GateFlag.UNWRITTEN)


_RUN: dict[int, Callable[..., None]] = {Code.LEAF: _leaf, Code.NODE: _node, Code.GATE: _gate}


class EntryFactors:
    """Factors of the effects of entries on rows that share a program, each ``[N, 1]``.

    Args:
        gates: As the forward has them.
        index_N: The batch rows, int64.
        dtype: To compute in.
    """

    def __init__(self, gates: GateTensors, index_N: Tensor, dtype: torch.dtype) -> None:
        tokens_N2 = gates.tokens[index_N].long()
        self._signals = gates.signals[index_N].to(dtype)
        self._states = gates.states[tokens_N2[:, SLOT]].to(dtype)
        self._flags = tokens_N2[:, FLAGS, None]
        self._attenuation = torch.ones_like(self._signals[:, :1])

    def attenuate(self, fields: Sequence[int], params: Sequence[float]) -> None:
        """Run an entry `Code.ATTENUATE`."""
        self._attenuation = self._attenuation * (1 + self._of_gate(fields[GROUP]) * (params[P0] - 1))

    def of(self, fields: Sequence[int]) -> Tensor:
        """Return the coefficient of an entry."""
        found = self._of_gate(fields[GROUP])
        return found * self._attenuation if fields[CODE] & Flag.ATTENUATED else found

    def _of_gate(self, field: int) -> Tensor:
        column = gate_column(field)
        if column < 0:
            return torch.ones_like(self._attenuation)
        found = self._signals[:, column, None]
        if field & EARLY:
            carried = torch.where(self._flags & TokenFlag.IS_GENERATED != 0, self._states[:, column, None], 0)
            found = torch.where(self._flags & TokenFlag.IS_REPLAYED != 0, found, carried)
        return found.nan_to_num(0.0)
