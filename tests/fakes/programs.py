"""Two independent tellings of operations in numpy, in float64: programs by their codes, documents by their formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering.programs.codes import (
    ACTIVATION_MASK,
    CODE_MASK,
    EDIT_MASK,
    INPUT_NORM_MASK,
    LAYER_NORM_EPS,
    NO_ROW,
    Code,
    Edit,
    FeatureActivation,
    Flag,
    InputNorm,
)
from headgate.steering.programs.program import Program
from headgate.steering.vectors.dtypes import widen

Row = Any
"""float64 ``[hidden]``."""


def run(
    program: Program,
    site: Site,
    row: Row,
    groups: frozenset[int] = frozenset(),
    changes: dict[int, float] | None = None,
) -> Row:
    """Run the entries of one site on one row, as `headgate.steering.programs.codes` says.

    Args:
        program: To run.
        site: Whose entries act.
        row: Of the stream.
        groups: Position groups that the row is in.
        changes: What features that were read at earlier sites change; those that are read here are put there.
    """
    h = row.astype(np.float64)
    d = np.zeros_like(h)
    kept = 0.0
    table = np.concatenate([np.zeros((1, program.rows.shape[1])), widen(program.rows, program.dtype)])[:, : len(row)]
    place = [at for at, other in enumerate(program.sites) if other == site]
    for codes, params in zip(program.codes[place].tolist(), program.params[place].astype(np.float64), strict=True):
        code, read, write, group = codes
        if group and group not in groups:
            continue
        if code & Flag.KEEP_NORM_FROM:
            kept = float(np.linalg.norm(h))
        if code & CODE_MASK >= Code.FEATURE:
            d = d + _written(code, h, table[read], params, {} if changes is None else changes) * table[write]
            continue
        h = h + _change(code, h, table[read], table[write], params, masked=read != NO_ROW)
        if code & Flag.KEEP_NORM_TO and h.any():
            h = h * (kept / np.linalg.norm(h))
    return h + d


def _written(code: int, h: Row, u: Row, params: Row, changes: dict[int, float]) -> Any:
    """How often a feature adds the row that it writes here."""
    if code & CODE_MASK == Code.WRITE_FEATURE:
        return params[1] * changes[code >> 19]
    if code & CODE_MASK == Code.READ_FEATURE:
        assert code >> 19 not in changes, "two features have one change"
        changes[code >> 19] = _feature(code, h, u, params)
        return 0.0
    return _feature(code, h, u, params)


def _feature(code: int, h: Row, u: Row, params: Row) -> Row:
    """How often a feature adds the row that it writes."""
    read_scale, g, p0, p1, p2, p3, p4, p5 = params
    z, gain = read_scale * (h @ u), 1.0
    if code & INPUT_NORM_MASK == InputNorm.LAYER_NORM:
        gain = h.std(ddof=1)
        z = read_scale * (h @ u - h.mean() * p5) / (gain + LAYER_NORM_EPS)
    elif code & INPUT_NORM_MASK == InputNorm.CONSTANT_NORM:
        gain = np.linalg.norm(h) / np.sqrt(len(h))
        z = z / gain if gain else 0.0
    a = max(z + p0, 0.0)
    if code & ACTIVATION_MASK == FeatureActivation.JUMP_RELU:
        a = z + p0 if z + p0 > p1 else 0.0
    elif code & ACTIVATION_MASK == FeatureActivation.GATED:
        a = max(p3 * z + p4, 0.0) if z + p0 > 0 else 0.0
    edits = {Edit.SET: p2, Edit.PLUS: a + p2, Edit.TIMES: a * p2, Edit.AT_LEAST: max(a, p2), Edit.AT_MOST: min(a, p2)}
    t = a if code & Flag.IF_ACTIVE and a <= 0 else edits[Edit(code & EDIT_MASK)]
    return g * gain * (t - a)


def _change(code: int, h: Row, u: Row, w: Row, params: Row, *, masked: bool) -> Row:
    read_scale, g, p0, p1, p2 = params[:5]
    z = read_scale * (h @ u)
    match Code(code & CODE_MASK):
        case Code.ADD:
            return g * w
        case Code.LINEAR:
            return g * (p0 * z + p1) * w
        case Code.CLAMP:
            return g * p2 * (min(max(z, p0), p1) - z) * w
        case Code.NORM_ADD:
            return g * p0 * np.linalg.norm(h) * w
        case Code.ROTATE:
            if code & Flag.IF_POSITIVE and z <= 0:
                return np.zeros_like(h)
            y = g * (h @ w)
            r = np.sqrt(z * z + y * y)
            return p2 * ((p0 * r - z) * read_scale * u + (p1 * r - y) * g * w)
        case Code.REPLACE:
            return p0 * (g * w - (u if masked else 1) * h)
        case other:
            raise AssertionError(f"no operation: {other!r}")


def apply(document: Mapping[str, Any], row: Row) -> Row:
    """Apply one operation to one row by the published formula; vectors are arrays, numbers are given.

    The method ``features`` has an SAE of `tests.fakes.saes` and the edits of its features; with ``reconstructs`` the
    SAE's error is dropped.
    """
    before = row.astype(np.float64)
    after = _applied(document, before)
    if document.get("preserve_norm") and after.any():
        after = after * (np.linalg.norm(before) / np.linalg.norm(after))
    return after


def _applied(document: Mapping[str, Any], h: Row) -> Row:
    method = document["method"]
    if method == "rotate":
        return _rotated(document, h)
    if method == "features":
        sae = document["sae"]
        return (sae.reconstructed if document.get("reconstructs") else sae.edited)(h[None], document["edits"])[0]
    v = np.asarray(document["vector"], np.float64)
    if method == "replace":
        part = document["alpha"] * np.asarray(document.get("mask", np.ones_like(h)), np.float64)
        return (1 - part) * h + part * v
    if method == "additive":
        return h + document["scale"] * v
    unit = v / np.sqrt(v @ v)
    p = h @ unit
    along, rest = p * unit, h - p * unit
    match method:
        case "ablate":
            return rest + (1 - document["scale"]) * along
        case "orthogonal":
            return rest + document["scale"] * along
        case "clamp":
            wanted = np.clip(p, document.get("min"), document.get("max"))
            return h + document["strength"] * (wanted * unit - along)
        case "set":
            return h + document["strength"] * (document["value"] * unit - along)
        case "swap":
            target = np.asarray(document["target"], np.float64)
            return rest + p * target / np.sqrt(target @ target)
        case "affine":
            reference = np.asarray(document["reference"], np.float64)
            return rest + (reference @ v) / (v @ v) * v + document["alpha"] * v
        case "mean_ablate":
            return rest + np.asarray(document["mean"], np.float64)
        case "norm_scaled_add":
            length = np.sqrt(h @ h)
            limit = document["max_ratio"] * length
            return h + np.clip(document["scale"] * length, -limit, limit) * unit
    raise AssertionError(f"no method: {method}")


def _rotated(document: Mapping[str, Any], h: Row) -> Row:
    first, second = (np.asarray(vector, np.float64) for vector in document["plane"])
    basis, _ = np.linalg.qr(np.stack([first, second], axis=1))
    b1, b2 = (basis * np.sign([first @ basis[:, 0], second @ basis[:, 1]])).T
    if document.get("only_if_positive") and h @ b1 <= 0:
        return h
    inside = basis @ (basis.T @ h)
    angle = np.deg2rad(document["degrees"])
    return h - inside + np.linalg.norm(inside) * (np.cos(angle) * b1 + np.sin(angle) * b2)
