"""The definition of a program's effect on rows of the stream, in plain PyTorch: what a forward on a CPU runs, too.

Shape suffixes: T tokens of the step, S slots of the pool, R rows of the table, E entries of a program at the site,
K changes of a row of the stream, D hidden size, N rows of the stream that share a program. Formulas and fields:
`headgate.steering.programs.codes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from headgate.steering.programs.codes import (
    ACTIVATION_MASK,
    CODE,
    CODE_MASK,
    EDIT_MASK,
    EVERYWHERE,
    GROUP,
    GROUP_MASK,
    INPUT_NORM_MASK,
    LAYER_NORM_EPS,
    MAX_CHANGE,
    MAX_CHANGE_FLOAT16,
    NO_ROW,
    P0,
    P1,
    P2,
    P3,
    P4,
    P5,
    READ,
    READ_SCALE,
    WRITE,
    WRITE_SCALE,
    Code,
    Edit,
    FeatureActivation,
    Flag,
    InputNorm,
    change_index,
    is_of_feature,
    is_of_gate,
    is_selected,
)
from headgate.steering.worker.gates.reference import EntryFactors, GateTensors, evaluate, gate_entries


def program_deltas_reference(
    value_TD: Tensor,
    addend_TD: Tensor | None,
    pool_SD: Tensor,
    row_T: Tensor,
    count_T: Tensor,
    codes_REC: Tensor,
    params_REP: Tensor,
    groups_T: Tensor | None = None,
    changes_TK: Tensor | None = None,
    gates: GateTensors | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    has_features: bool = True,
    selected_TF: Tensor | None = None,
) -> Tensor:
    """Compute the result of `headgate.steering.kernels.run_programs.program_deltas` in `dtype`, as ``[T, D]``.

    Rows without a program are zero. `changes_TK` and `gates` are read, and written to. Without `has_features` no
    feature acts, and gates stay as they were evaluated before. Features `FeatureActivation.SELECTED` act with
    `selected_TF` alone, the activations that an SAE selects; then nothing else acts, and gates stay, too. Waits for the
    device.
    """
    x_TD = value_TD if addend_TD is None else (value_TD.float() + addend_TD.float()).to(value_TD.dtype)
    delta_TD = torch.zeros(x_TD.shape, dtype=dtype, device=x_TD.device)
    programs = []
    for row in sorted(set(row_T[count_T > 0].tolist())):
        tokens_N = ((row_T == row) & (count_T > 0)).nonzero()[:, 0]
        programs.append((tokens_N, codes_REC[row, : count_T[tokens_N[0]]].tolist(), params_REP[row].tolist()))
    gated = [program for program in programs if gate_entries(program[1])]
    if gated and gates is not None and has_features and selected_TF is None:
        evaluate(x_TD.to(dtype), pool_SD, gated, gates)
    for tokens_N, codes, params in programs:
        bits_N = None if groups_T is None else groups_T[tokens_N]
        if not has_features:
            codes = [fields for fields in codes if not is_of_feature(fields[CODE])]  # the last ones
        selected_NF = None if selected_TF is None else selected_TF[tokens_N]
        if selected_TF is not None:
            codes, params = _of_selection(codes, params)
        changes_NK = None if changes_TK is None else changes_TK[tokens_N]
        coefficients = None if gates is None else EntryFactors(gates, tokens_N, dtype)
        rows_ND = x_TD[tokens_N].to(dtype)
        delta_ND = _delta(rows_ND, pool_SD, codes, params, bits_N, (changes_NK, selected_NF), coefficients)
        delta_TD[tokens_N] = cut_change(delta_ND, value_TD.dtype)
        if changes_TK is not None and changes_NK is not None:
            changes_TK[tokens_N] = changes_NK
    return delta_TD


Fields = list[list[int]]
Numbers = list[list[float]]


def _of_selection(codes: Fields, params: Numbers) -> tuple[Fields, Numbers]:
    """Return the entries that act after an SAE has selected features: edits of these, and gates."""
    acting = [is_selected(fields[CODE]) or is_of_gate(fields[CODE]) for fields in codes]
    return list(compress(codes, acting)), list(compress(params, acting))


def cut_change(delta_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """Cut changes of rows to `MAX_CHANGE` of a model's dtype; what is not a number becomes 0."""
    largest = MAX_CHANGE_FLOAT16 if dtype == torch.float16 else MAX_CHANGE
    return delta_ND.nan_to_num(nan=0.0, posinf=largest, neginf=-largest).clamp(-largest, largest)


class _SharedEntry(NamedTuple):
    """An entry on the rows that share it: numbers of rows are ``[N, 1]``."""

    code: int
    h: Tensor
    u: Tensor
    w: Tensor
    params: Sequence[float]
    changes: Tensor | None = None
    selected: Tensor | None = None

    @property
    def z(self) -> Tensor:
        return self.params[READ_SCALE] * (self.h @ self.u)[:, None]

    @property
    def gw(self) -> Tensor:
        return self.params[WRITE_SCALE] * self.w

    @property
    def change(self) -> Tensor:
        """The change that the entry makes or adds, ``[N, 1]``; a view."""
        if self.changes is None:
            raise AssertionError("a feature that is read at one site and written at another, without changes")
        return self.changes[:, change_index(self.code), None]


def _delta(
    x_ND: Tensor,
    pool_SD: Tensor,
    codes: Sequence[Sequence[int]],
    params: Sequence[Sequence[float]],
    bits_N: Tensor | None,
    of_rows: tuple[Tensor | None, Tensor | None],
    coefficients: EntryFactors | None,
) -> Tensor:
    """Run one program on the rows that share it; `of_rows` are changes, which are written to, and selected features."""
    h, d = x_ND, torch.zeros_like(x_ND)
    remembered = torch.full_like(x_ND[:, :1], -1)
    for fields, numbers in zip(codes, params, strict=False):
        code, group = fields[CODE], fields[GROUP] & GROUP_MASK
        if is_of_gate(code):
            if code & CODE_MASK == Code.ATTENUATE and coefficients is not None:
                coefficients.attenuate(fields, numbers)
            continue
        acts = torch.ones_like(remembered, dtype=torch.bool)
        if group != EVERYWHERE and bits_N is not None:
            acts = (bits_N[:, None] >> (group - 1) & 1) != 0
        u, w = pool_SD[fields[READ]].to(h.dtype), pool_SD[fields[WRITE]].to(h.dtype)
        if code & CODE_MASK == Code.REPLACE and fields[READ] == NO_ROW:
            u = torch.ones_like(w)
        if code & Flag.KEEP_NORM_FROM:
            remembered = torch.where(acts, _norm(h), remembered)
        entry = _SharedEntry(code, h, u, w, numbers, *of_rows)
        if code & CODE_MASK == Code.READ_FEATURE:
            entry.change.copy_(torch.where(acts, _amount(entry), entry.change))
            continue
        change = torch.where(acts, _CHANGES[code & CODE_MASK](entry), 0)
        if coefficients is not None:
            change = coefficients.of(fields) * change
        if is_of_feature(code):
            d = d + change
        else:
            h = h + change
        if code & Flag.KEEP_NORM_TO:
            norm = _norm(h)
            h = torch.where(acts & (remembered >= 0) & (norm > 0), h * (remembered / norm), h)
    return (h + d) - x_ND


def _norm(h: Tensor) -> Tensor:
    return h.square().sum(-1, keepdim=True).sqrt()


def _add(at: _SharedEntry) -> Tensor:
    return at.gw.expand_as(at.h)


def _linear(at: _SharedEntry) -> Tensor:
    return (at.params[P0] * at.z + at.params[P1]) * at.gw


def _clamp(at: _SharedEntry) -> Tensor:
    z = at.z
    return at.params[P2] * (z.clamp(min=at.params[P0]).clamp(max=at.params[P1]) - z) * at.gw


def _reconstruct(at: _SharedEntry) -> Tensor:
    return torch.zeros_like(at.h)  # `headgate.steering.worker.reconstruction` does what it stands for


def _norm_add(at: _SharedEntry) -> Tensor:
    return at.params[P0] * _norm(at.h) * at.gw


def _rotate(at: _SharedEntry) -> Tensor:
    z, y = at.z, (at.h @ at.gw)[:, None]
    r = (z.square() + y.square()).sqrt()
    turned = (at.params[P0] * r - z) * at.params[READ_SCALE] * at.u + (at.params[P1] * r - y) * at.gw
    return torch.where((z > 0) | (not at.code & Flag.IF_POSITIVE), at.params[P2] * turned, 0)


def _replace(at: _SharedEntry) -> Tensor:
    return at.params[P0] * (at.gw - at.u * at.h)


def _feature(at: _SharedEntry) -> Tensor:
    if is_selected(at.code) and at.selected is None:
        return torch.zeros_like(at.h)  # acts when the SAE of the site has encoded the rows
    return _amount(at) * at.w


def _amount(at: _SharedEntry) -> Tensor:
    """Return how often a feature is added, ``[N, 1]``."""
    z, gain = _normalised(at)
    a = _activation(at, z)
    return at.params[WRITE_SCALE] * gain * (_target(at, a) - a)


def _written(at: _SharedEntry) -> Tensor:
    return at.change.to(at.h.dtype) * at.gw


def _normalised(at: _SharedEntry) -> tuple[Tensor, Tensor]:
    """Return what an encoder reads of the rows, and what its decoder's output is multiplied by."""
    norm = at.code & INPUT_NORM_MASK
    if norm == InputNorm.LAYER_NORM:
        std = at.h.std(-1, keepdim=True)
        offset = at.params[READ_SCALE] * at.params[P5] * at.h.mean(-1, keepdim=True)
        return (at.z - offset) / (std + LAYER_NORM_EPS), std
    if norm == InputNorm.CONSTANT_NORM:
        gain = _norm(at.h) / at.h.shape[-1] ** 0.5
        return torch.where(gain > 0, at.z / gain, 0), gain
    return at.z, torch.ones_like(at.z)


def _activation(at: _SharedEntry, z: Tensor) -> Tensor:
    if at.selected is not None:
        return at.selected[:, int(at.params[P1]), None]
    kind, q = at.code & ACTIVATION_MASK, z + at.params[P0]
    if kind == FeatureActivation.GATED:
        return torch.where(q > 0, (at.params[P3] * z + at.params[P4]).clamp(min=0), 0)
    if kind == FeatureActivation.JUMP_RELU:
        return torch.where(q > at.params[P1], q, 0)
    return q.clamp(min=0)


def _target(at: _SharedEntry, a: Tensor) -> Tensor:
    value = at.params[P2]
    target = _EDITS[at.code & EDIT_MASK](a, value)
    return torch.where((a > 0) | (not at.code & Flag.IF_ACTIVE), target, a)


_EDITS: dict[int, Callable[[Tensor, float], Tensor]] = {
    Edit.SET: torch.full_like,
    Edit.PLUS: torch.add,
    Edit.TIMES: torch.mul,
    Edit.AT_LEAST: lambda a, value: a.clamp(min=value),
    Edit.AT_MOST: lambda a, value: a.clamp(max=value),
}

_CHANGES: dict[int, Callable[[_SharedEntry], Tensor]] = {
    Code.ADD: _add,
    Code.LINEAR: _linear,
    Code.CLAMP: _clamp,
    Code.NORM_ADD: _norm_add,
    Code.ROTATE: _rotate,
    Code.REPLACE: _replace,
    Code.FEATURE: _feature,
    Code.WRITE_FEATURE: _written,
    Code.RECONSTRUCT: _reconstruct,
}
