"""Operations for ``steering_ops``, made by name: each function returns the plain dict of one operation.

::

    from headgate.steering import SamplingParams, ops

    SamplingParams(steering_ops=[ops.ablate(direction, "12.post_mlp"), ops.clamp(axis, sites, max=3.1)])

In the formulas ``h`` is a row of the stream, ``v`` the vector, ``v^`` its unit vector, ``p = h . v^`` the projection.

Every function takes:

* vectors: a list, array or tensor as long as a row of the site, or a registered module's: its name, or
  ``{"module": name, "site": site}``;
* ``sites``: a site such as ``"12.post_mlp"``, ``{"hook": "post_mlp", "layers": [12, 13]}``, or a list of these;
* ``positions``: the rows it acts on, as captures select positions: ``"last_prompt"``, ``[0, -1]``,
  ``{"start": 5}``; all of the phase if None;
* ``preserve_norm``: scale the row to the norm it had before.

`within` limits an operation to some heads, experts or columns of a row; `ablate_heads`, `ban_experts` and
`force_experts` are operations that are limited so.

Values are checked where the request is read.
"""

from __future__ import annotations

from typing import Any

from headgate.capture.schema.sites import Site

Op = dict[str, Any]
"""One operation, as a request's ``steering_ops`` has it."""


def additive(vector: Any, sites: Any, scale: float = 1.0, *, positions: Any = None, preserve_norm: bool = False) -> Op:
    """``h + scale * v``."""
    return _op("additive", sites, positions, preserve_norm, vector=vector, scale=scale)


def ablate(vector: Any, sites: Any, scale: float = 1.0, *, positions: Any = None, preserve_norm: bool = False) -> Op:
    """``h - scale * p * v^``: with a scale of 1, nothing along `vector` is left."""
    return _op("ablate", sites, positions, preserve_norm, vector=vector, scale=scale)


def orthogonal(vector: Any, sites: Any, scale: float, *, positions: Any = None, preserve_norm: bool = False) -> Op:
    """``h + (scale - 1) * p * v^``: the part along `vector` times `scale`."""
    return _op("orthogonal", sites, positions, preserve_norm, vector=vector, scale=scale)


def clamp(
    vector: Any,
    sites: Any,
    *,
    min: float | None = None,
    max: float | None = None,
    strength: float = 1.0,
    positions: Any = None,
    preserve_norm: bool = False,
) -> Op:
    """``h + strength * (clip(p, min, max) - p) * v^``, with at least one bound; `strength` from 0 to 1."""
    return _op("clamp", sites, positions, preserve_norm, vector=vector, min=min, max=max, strength=strength)


def set_projection(
    vector: Any, sites: Any, value: float, strength: float = 1.0, *, positions: Any = None, preserve_norm: bool = False
) -> Op:
    """``h + strength * (value - p) * v^``: the method ``set``; `strength` from 0 to 1."""
    return _op("set", sites, positions, preserve_norm, vector=vector, value=value, strength=strength)


def swap(vector: Any, target: Any, sites: Any, *, positions: Any = None, preserve_norm: bool = False) -> Op:
    """``h + p * (t^ - v^)``: what lies along `vector` lies along `target` then."""
    return _op("swap", sites, positions, preserve_norm, vector=vector, target=target)


def affine(
    vector: Any,
    sites: Any,
    *,
    reference: Any = None,
    alpha: float | None = None,
    positions: Any = None,
    preserve_norm: bool = False,
) -> Op:
    """``h - p * v^ + (reference . v^) * v^ + alpha * v``; without `reference`, the origin; `alpha` is 0 if None."""
    return _op("affine", sites, positions, preserve_norm, vector=vector, reference=reference, alpha=alpha)


def mean_ablate(vector: Any, mean: Any, sites: Any, *, positions: Any = None, preserve_norm: bool = False) -> Op:
    """``h - p * v^ + mean``: `mean` is added as it is, and usually lies along `vector`."""
    return _op("mean_ablate", sites, positions, preserve_norm, vector=vector, mean=mean)


def norm_scaled_add(
    vector: Any,
    sites: Any,
    scale: float = 1.0,
    *,
    max_ratio: float | None = None,
    positions: Any = None,
    preserve_norm: bool = False,
) -> Op:
    """``h + scale * norm(h) * v^``, the addition at most ``max_ratio * norm(h)`` long."""
    return _op("norm_scaled_add", sites, positions, preserve_norm, vector=vector, scale=scale, max_ratio=max_ratio)


def rotate(
    first: Any,
    second: Any,
    sites: Any,
    degrees: float,
    *,
    only_if_positive: bool = False,
    positions: Any = None,
    preserve_norm: bool = False,
) -> Op:
    """Give the part of h in the plane of two vectors the angle `degrees` from `first` towards `second`.

    With ``b1 = first^``, ``b2`` the unit vector of `second` without its part along b1, and r the length of h's part in
    their plane, that part becomes ``r * (cos(degrees) * b1 + sin(degrees) * b2)``. With `only_if_positive`, rows with
    ``h . b1 <= 0`` stay.
    """
    extra = {"only_if_positive": True} if only_if_positive else {}
    return _op("rotate", sites, positions, preserve_norm, plane=[first, second], degrees=degrees, **extra)


def replace(
    vector: Any,
    sites: Any,
    alpha: float = 1.0,
    *,
    mask: Any = None,
    positions: Any = None,
    preserve_norm: bool = False,
) -> Op:
    """``(1 - alpha * mask) * h + alpha * mask * v``, for patching; it acts before all additions.

    `mask` is a list of 0 and 1 as long as a row, or the indices of the ones; None is 1 everywhere.
    """
    return _op("replace", sites, positions, preserve_norm, vector=vector, alpha=alpha, mask=mask)


def patch(
    request: str,
    position: int,
    sites: Any,
    *,
    site: Any = None,
    sample: int = 0,
    alpha: float = 1.0,
    mask: Any = None,
    positions: Any = None,
) -> Op:
    """`replace` with a row that an earlier request of this server has kept (``"keep"`` of the consumer ``memory``).

    `request` is the name it was kept under, `position` that of the row, negative from the end of the prompt; `site` is
    where it was captured, each site of `sites` its own if None; `sample` is one of the request's ``n``. `positions` are
    those of this request whose rows are replaced: the same one if None.
    """
    source = {"request": request, "position": position, "site": None if site is None else _at(site), "sample": sample}
    source = {key: value for key, value in source.items() if value is not None}
    own = [position] if positions is None else positions
    return _op("replace", sites, own, False, source=source, alpha=alpha, mask=mask)


def within(operation: Op, *, heads: Any = None, experts: Any = None, columns: Any = None) -> Op:
    """Limit an operation to some heads of a row, to some experts of ``router_logits``, or to the columns [start, stop).

    Its vectors are as long as a row, or as these columns together; they count as zero elsewhere. Norms stay those of
    whole rows.
    """
    chosen = {"heads": heads, "experts": experts, "columns": columns}
    return {**operation, **{key: value for key, value in chosen.items() if value is not None}}


def ablate_heads(sites: Any, heads: Any, mean: Any = None, alpha: float = 1.0, *, positions: Any = None) -> Op:
    """Replace what attention heads give, at ``hook_z``, by zeros, or by `mean`, as long as a row or as these heads.

    `alpha` is the part of it, from 0 to 1. As a `replace`, it acts before all additions.
    """
    given = {"value": 0.0} if mean is None else {"vector": mean}
    return within(_op("replace", sites, positions, False, alpha=alpha, **given), heads=heads)


EXPERT_SCORE = 10000.0
"""Far beyond the scores of a router, also after rounding, and finite in float16."""


def ban_experts(sites: Any, experts: Any, *, positions: Any = None) -> Op:
    """Give experts of a router, at ``router_logits``, a score so low that others are chosen."""
    return within(_op("replace", sites, positions, False, value=-EXPERT_SCORE), experts=experts)


def force_experts(sites: Any, experts: Any, *, positions: Any = None) -> Op:
    """Give experts of a router, at ``router_logits``, a score so high that they are chosen.

    Where weights are a softmax of the scores, they have all the weight, in equal parts.
    """
    return within(_op("replace", sites, positions, False, value=EXPERT_SCORE), experts=experts)


def _op(method: str, sites: Any, positions: Any, preserve_norm: bool, **values: Any) -> Op:
    operation = {"at": _at(sites), "method": method, **values, "positions": positions}
    if preserve_norm:
        operation["preserve_norm"] = True
    return {key: value for key, value in operation.items() if value is not None}


def _at(sites: Any) -> Any:
    if isinstance(sites, Site):
        return sites.name
    if isinstance(sites, list | tuple | set | frozenset):
        return [_at(site) for site in sites]
    return sites
