"""Activations of features of sparse autoencoders, how far an edit moves a row of the stream along them, and scores.

Formulas: `headgate.steering.programs.codes`. Arguments that are named in the singular may
also be blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headgate.steering.programs import codes as program_codes
from headgate.steering.programs.codes import Code, Edit, FeatureActivation, Flag, InputNorm, ScoreKind, UnitFunction

_CODE_MASK = tl.constexpr(program_codes.CODE_MASK)
_READ_FEATURE = tl.constexpr(int(Code.READ_FEATURE))
_WRITE_FEATURE = tl.constexpr(int(Code.WRITE_FEATURE))
_CHANGE_SHIFT = tl.constexpr(program_codes.CHANGE_SHIFT)
_CHANGE_MASK = tl.constexpr(program_codes.CHANGE_MASK)
_IF_ACTIVE = tl.constexpr(int(Flag.IF_ACTIVE))
_ACTIVATION_MASK = tl.constexpr(program_codes.ACTIVATION_MASK)
_GATED = tl.constexpr(int(FeatureActivation.GATED))
_SELECTED = tl.constexpr(int(FeatureActivation.SELECTED))
_JUMP_RELU = tl.constexpr(int(FeatureActivation.JUMP_RELU))
INPUT_NORM_MASK = tl.constexpr(program_codes.INPUT_NORM_MASK)
_LAYER_NORM = tl.constexpr(int(InputNorm.LAYER_NORM))
_CONSTANT_NORM = tl.constexpr(int(InputNorm.CONSTANT_NORM))
_LAYER_NORM_EPS = tl.constexpr(program_codes.LAYER_NORM_EPS)
_EDIT_MASK = tl.constexpr(program_codes.EDIT_MASK)
_PLUS = tl.constexpr(int(Edit.PLUS))
_TIMES = tl.constexpr(int(Edit.TIMES))
_AT_LEAST = tl.constexpr(int(Edit.AT_LEAST))
_AT_MOST = tl.constexpr(int(Edit.AT_MOST))
_SCORE_KIND_MASK = tl.constexpr(program_codes.SCORE_KIND_MASK)
_COSINE = tl.constexpr(int(ScoreKind.COSINE))
_ACTIVATION = tl.constexpr(int(ScoreKind.ACTIVATION))
_UNIT = tl.constexpr(int(ScoreKind.UNIT))
_UNIT_MASK = tl.constexpr(program_codes.UNIT_MASK)
_GELU = tl.constexpr(int(UnitFunction.GELU))
_SILU = tl.constexpr(int(UnitFunction.SILU))
_SUM = tl.constexpr(int(UnitFunction.SUM))
_SQRT_HALF = tl.constexpr(0.5**0.5)


@triton.jit
def norm_of_row(h):
    """Return the Euclidean norm of a row."""
    return tl.sqrt(tl.sum(h * h))


@triton.jit
def statistics_of_row(norms, h, mean, std, norm, columns, D):
    """Return mean, standard deviation and norm of `h`, computing only the ones that a feature needs."""
    if (std < 0) & (tl.max((norms == _LAYER_NORM).to(tl.int32)) > 0):
        mean = tl.sum(h) / D
        centred = tl.where(columns < D, h - mean, 0.0)
        std = tl.sqrt(tl.sum(centred * centred) / (D - 1))
    if (norm < 0) & (tl.max((norms == _CONSTANT_NORM).to(tl.int32)) > 0):
        norm = norm_of_row(h)
    return mean, std, norm


@triton.jit
def amounts_of_features(code, numbers, dots, mean, std, norm, D):
    """Return how often each of some features adds its row; 0 if it does not act, or an SAE selects its activation."""
    read_scale, write_scale, p0, p1, p2, p3, p4, p5 = numbers
    norms = code & INPUT_NORM_MASK
    z, gain = _normalised(norms, read_scale * dots, read_scale, p5, mean, std, norm, D)
    a = activation(code & _ACTIVATION_MASK, z, p0, p1, p3, p4)
    target = edited(code & _EDIT_MASK, a, p2)
    target = tl.where(code & _IF_ACTIVE == 0, target, tl.where(a > 0, target, a))
    is_selected = code & _ACTIVATION_MASK == _SELECTED
    return tl.where((code == 0) | is_selected, 0.0, write_scale * gain * (target - a))


@triton.jit
def _normalised(norms, z, read_scale, p5, mean, std, norm, D):
    """Return what an encoder reads of a row, and what its decoder's output is multiplied by."""
    rms = norm / tl.sqrt(D.to(tl.float32))
    z = tl.where(norms == _LAYER_NORM, (z - read_scale * p5 * mean) / (std + _LAYER_NORM_EPS), z)
    z = tl.where(norms == _CONSTANT_NORM, tl.where(rms > 0, z / rms, 0.0), z)
    gain = tl.where(norms == _LAYER_NORM, std, tl.where(norms == _CONSTANT_NORM, rms, 1.0))
    return z, gain


@triton.jit
def norms_of_scores(code):
    """Return the `InputNorm` whose statistics of a row entries `Code.SCORE` need."""
    kind = code & _SCORE_KIND_MASK
    norms = tl.where(kind == _ACTIVATION, code & INPUT_NORM_MASK, 0)
    return tl.where(kind == _COSINE, _CONSTANT_NORM, norms)


@triton.jit
def scores_of_row(code, numbers, dots, rests, mean, std, norm, D):
    """Return the scores of some entries `Code.SCORE`; `rests` are products of the row with their second rows."""
    read_scale, write_scale, p0, p1, _p2, p3, p4, p5 = numbers
    y = read_scale * dots + write_scale * rests
    kind = code & _SCORE_KIND_MASK
    norms = tl.where(kind == _ACTIVATION, code & INPUT_NORM_MASK, 0)
    z, _gain = _normalised(norms, y, read_scale, p5, mean, std, norm, D)
    cosine = tl.where(norm > 0, y / norm, 0.0)
    a = activation(code & _ACTIVATION_MASK, z, p0, p1, p3, p4)
    return tl.where(kind == _ACTIVATION, a, tl.where(kind == _COSINE, cosine, y) + p0)


@triton.jit
def units_together(code, index, numbers, dots, rests, scores, total):
    """Return scores, with units joined; the sum that goes on after them; and which scores are to be stored.

    Args:
        code: Codes of some entries; 0 for entries that do not count.
        index: Their places, ascending.
        numbers: Their params.
        dots: Products of the row with their first rows.
        rests: Products of the row with their second rows.
        scores: As `scores_of_row` returns them: right but for units.
        total: The sum of the units before, since the last `UnitFunction.SUM`.
    """
    is_unit = (code != 0) & (code & _SCORE_KIND_MASK == _UNIT)
    kind = code & _UNIT_MASK
    is_sum = is_unit & (kind == _SUM)
    if tl.max(is_unit.to(tl.int32)) > 0:
        read_scale, write_scale, p0, p1, _p2, _p3, _p4, _p5 = numbers
        q = read_scale * dots + write_scale * rests + p0
        soft = tl.where(kind == _SILU, q / (1.0 + tl.exp(-q)), 0.5 * q * (1.0 + tl.erf(q * _SQRT_HALF)))
        added = p1 * tl.where((kind == _GELU) | (kind == _SILU), soft, tl.maximum(q, 0.0))
        added = tl.where(is_unit, tl.where(is_sum, 0.0, added), 0.0)
        # Units count towards the next sum: those with as many sums before them as it has.
        is_before = index[None, :] < index[:, None]
        part = tl.sum((is_before & is_sum[None, :]).to(tl.int32), axis=1)
        is_part = is_before & (part[None, :] == part[:, None])
        inside = tl.sum(tl.where(is_part, added[None, :], 0.0), axis=1)
        scores = tl.where(is_sum, p0 + inside + tl.where(part == 0, total, 0.0), scores)
        num_sums = tl.sum(is_sum.to(tl.int32))
        total = tl.where(num_sums == 0, total, 0.0) + tl.sum(tl.where(part == num_sums, added, 0.0))
    return scores, total, (code != 0) & ((code & _SCORE_KIND_MASK != _UNIT) | is_sum)


@triton.jit
def amounts_between_sites(code, numbers, amounts, changes):
    """Return `amounts` with those of features whose halves are at several sites.

    What is read goes into the row's `changes` and is not added here; what is written comes from there.
    """
    op = code & _CODE_MASK
    places = changes + (code >> _CHANGE_SHIFT & _CHANGE_MASK)
    tl.store(places, amounts, mask=op == _READ_FEATURE)
    made = tl.load(places, mask=op == _WRITE_FEATURE, other=0.0)
    amounts = tl.where(op == _READ_FEATURE, 0.0, amounts)
    return tl.where(op == _WRITE_FEATURE, numbers[1] * made, amounts)


@triton.jit
def activation(kind, z, p0, p1, p3, p4):
    """Return what an encoder makes of `z`; `kind` is one of `FeatureActivation`."""
    q = z + p0
    threshold = tl.where(kind == _JUMP_RELU, p1, 0.0)
    a = tl.where(kind == _GATED, tl.maximum(p3 * z + p4, 0.0), q)
    return tl.where(q > threshold, a, 0.0)


@triton.jit
def edited(edit, a, value):
    """Return the target of an activation; `edit` is one of `Edit`."""
    target = tl.where(edit == _PLUS, a + value, value)
    target = tl.where(edit == _TIMES, a * value, target)
    target = tl.where(edit == _AT_LEAST, tl.maximum(a, value), target)
    return tl.where(edit == _AT_MOST, tl.minimum(a, value), target)
