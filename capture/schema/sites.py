"""Hook points, sites, and the selection of sites by a request or a configuration.

A hook point names the value that the next sublayer consumes; a site is a hook point of one layer.
The words are the same for every model family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np

from headgate.capture.schema.errors import RequestError, shown


class HookPoint(str, Enum):
    """A named place in a decoder layer; `FINAL_NORM` is the one place outside the layers."""

    PRE_ATTN = "pre_attn"
    """Residual stream entering the layer, before its input norm: HF ``hidden_states[L]``."""
    POST_ATTN = "post_attn"
    """Stream after the attention branch was added, before the MLP's norm."""
    POST_MLP = "post_mlp"
    """Stream leaving the layer: HF ``hidden_states[L + 1]`` (HF norms the last one)."""
    ATTN_IN = "attn_in"
    """Input of attention: after its input norm; the stream itself where there is none."""
    Q_PRE = "q_pre"
    """Queries of all heads in front of the rotary embedding, after any norm of their own."""
    K_PRE = "k_pre"
    """Keys of all heads in front of the rotary embedding, after any norm of their own."""
    Q = "q"
    """Queries of all heads as the attention kernel gets them: after norms of their own and the rotary embedding."""
    K = "k"
    """Keys of all heads that have keys, as the attention kernel gets them."""
    V = "v"
    """Values of all heads that have keys, as the attention kernel gets them."""
    KV_LATENT = "kv_latent"
    """The compressed row, after its norm, that latent attention (MLA) keeps in place of keys and values."""
    HOOK_Z = "hook_z"
    """Input of attention's output projection: the heads' results, concatenated."""
    MIXER_IN = "mixer_in"
    """Input of a layer's state-space model, linear attention or short convolution."""
    MIXER_OUT = "mixer_out"
    """Result of such a mixer, before the layer multiplies it or adds it to the stream."""
    ATTN_OUT_PRE = "attn_out_pre"
    """Attention's result in front of a norm of its own, before it is added to the stream."""
    ATTN_OUT = "attn_out"
    """Attention branch as it is added to the stream: after any post-norm and multiplier."""
    MLP_IN = "mlp_in"
    """Input of the MLP: after the MLP's norm."""
    ROUTER_LOGITS = "router_logits"
    """Scores of all experts as the router of an MoE layer gets them: before bias and softmax; float32."""
    EXPERTS = "experts"
    """Numbers of the experts that the router chose, int16; among all experts, wherever they are."""
    EXPERT_WEIGHTS = "expert_weights"
    """Weights of the chosen experts in the order of `EXPERTS`, float32."""
    MLP_ACT = "mlp_act"
    """Input of the MLP's down projection: its neurons; of an MoE layer those of the shared expert."""
    MLP_OUT_PRE = "mlp_out_pre"
    """The MLP's result in front of a norm of its own, before it is added to the stream."""
    MLP_OUT = "mlp_out"
    """MLP branch as it is added to the stream: after any post-norm and multiplier."""
    FINAL_NORM = "final_norm"
    """Output of the model's last norm, before the LM head: HF ``hidden_states[-1]``."""

    __hash__ = str.__hash__
    """`Enum` would compute this very hash in Python: sites are looked up often."""

    def __str__(self) -> str:
        return self.value


BEFORE_KERNEL = (
    HookPoint.ATTN_IN,
    HookPoint.Q_PRE,
    HookPoint.K_PRE,
    HookPoint.Q,
    HookPoint.KV_LATENT,
    HookPoint.K,
    HookPoint.V,
    HookPoint.MIXER_IN,
)
"""Hook points that reach the stream through the kernel of attention or of a mixer alone, in the forward's order."""

MIXER_HOOKS = (HookPoint.MIXER_IN, HookPoint.MIXER_OUT)
"""Hook points of layers with a mixer other than attention; their rows are as wide as the stream."""

BEFORE_MLP_OUT = (
    HookPoint.MLP_IN,
    HookPoint.ROUTER_LOGITS,
    HookPoint.EXPERTS,
    HookPoint.EXPERT_WEIGHTS,
    HookPoint.MLP_ACT,
    HookPoint.MLP_OUT_PRE,
)
"""Hook points that reach the stream through the MLP's result alone, in the forward's order."""

READ_ONLY = frozenset({HookPoint.EXPERTS, HookPoint.EXPERT_WEIGHTS})
"""Hook points whose values follow from those of `HookPoint.ROUTER_LOGITS`, and cannot be steered."""

INNER_HOOKS = frozenset({*BEFORE_KERNEL, HookPoint.MIXER_OUT, HookPoint.ATTN_OUT_PRE, *BEFORE_MLP_OUT}) - {
    HookPoint.ATTN_IN,
    HookPoint.MLP_IN,
}
"""Hook points within attention, mixers and the MLP that not every layer has."""
NOT_OF_STREAM = (INNER_HOOKS | {HookPoint.HOOK_Z}) - {*MIXER_HOOKS}
"""Hook points whose rows are neither the residual stream nor a norm of it, nor what is added to it."""

STREAM_HOOKS = frozenset(HookPoint) - INNER_HOOKS - {HookPoint.HOOK_Z, HookPoint.FINAL_NORM}
"""Hook points of layers whose rows are as wide as the stream in every model that has them."""

ALIASES: dict[str, HookPoint] = {
    "resid_pre": HookPoint.PRE_ATTN,
    "resid_mid": HookPoint.POST_ATTN,
    "post_block": HookPoint.POST_MLP,
    "resid_post": HookPoint.POST_MLP,
    "last_hidden_state": HookPoint.FINAL_NORM,
    "hook_resid_pre": HookPoint.PRE_ATTN,
    "hook_resid_mid": HookPoint.POST_ATTN,
    "hook_resid_post": HookPoint.POST_MLP,
    "hook_attn_out": HookPoint.ATTN_OUT,
    "hook_mlp_out": HookPoint.MLP_OUT,
    "attn.hook_q": HookPoint.Q_PRE,
    "attn.hook_k": HookPoint.K_PRE,
    "attn.hook_rot_q": HookPoint.Q,
    "attn.hook_rot_k": HookPoint.K,
    "attn.hook_v": HookPoint.V,
    "attn.hook_z": HookPoint.HOOK_Z,
    "mlp.hook_post": HookPoint.MLP_ACT,
    "hook_q": HookPoint.Q_PRE,
    "hook_k": HookPoint.K_PRE,
    "hook_rot_q": HookPoint.Q,
    "hook_rot_k": HookPoint.K,
    "hook_v": HookPoint.V,
    "hook_post": HookPoint.MLP_ACT,
    "input_layernorm.output": HookPoint.ATTN_IN,
    "self_attn.o_proj.input": HookPoint.HOOK_Z,
    "mlp.input": HookPoint.MLP_IN,
    "mlp.down_proj.input": HookPoint.MLP_ACT,
    "mlp.gate.output": HookPoint.ROUTER_LOGITS,
    "linear_attn.input": HookPoint.MIXER_IN,
    "linear_attn.output": HookPoint.MIXER_OUT,
    "mamba.input": HookPoint.MIXER_IN,
    "mamba.output": HookPoint.MIXER_OUT,
}
"""Names of TransformerLens, nnsight and others that are accepted wherever a hook point is read; answers use our own."""

EMBEDDING_NAMES = frozenset({"embed", "hook_embed"})
"""Names of the stream in front of the first layer, ``0.pre_attn``, after the model's own scaling; without a layer."""

_UNDERSCORED: dict[str, HookPoint] = {**{hook.value: hook for hook in HookPoint}, **ALIASES}

HOOK_NAMES: dict[str, HookPoint] = {
    **_UNDERSCORED,
    **{name.replace("_", "-"): hook for name, hook in _UNDERSCORED.items()},
}
"""Every name of a hook point that is read: with underscores, or with hyphens (``post-mlp``)."""


_SITE = re.compile(r"(?:blocks\.|(?:model\.)?(?:language_model\.)?layers\.)?([0-9]+)\.(.+)")
"""A layer and a name of `HOOK_NAMES`, also as ``blocks.5.hook_resid_pre`` and ``model.layers.5.mlp.input``."""


class Site(NamedTuple):
    """A hook point of one layer.

    Attributes:
        layer: Global layer index, also under pipeline parallelism; -1 for `FINAL_NORM`.
        hook: The hook point.
    """

    layer: int
    hook: HookPoint

    @property
    def name(self) -> str:
        """``"12.post_mlp"``, or ``"final_norm"``: the tensor name in files and results."""
        return self.hook.value if self.hook is HookPoint.FINAL_NORM else f"{self.layer}.{self.hook.value}"

    @classmethod
    def parse(cls, name: object) -> Site:
        """Read what `name` writes; aliases are accepted, with the layer as other tools write it.

        Raises:
            ValueError: If `name` is neither ``LAYER.HOOK`` nor ``final_norm``.
        """
        if isinstance(name, str) and HOOK_NAMES.get(name) is HookPoint.FINAL_NORM:
            return FINAL_NORM_SITE
        if isinstance(name, str) and name in EMBEDDING_NAMES:
            return cls(0, HookPoint.PRE_ATTN)
        found = _SITE.fullmatch(name) if isinstance(name, str) else None
        point = HOOK_NAMES.get(found[2]) if found else None
        if found is None or point is None or point is HookPoint.FINAL_NORM:
            raise ValueError(f"not a site: {name!r}; expected LAYER.HOOK such as 12.post_mlp, or final_norm")
        return cls(int(found[1]), point)


FINAL_NORM_SITE = Site(-1, HookPoint.FINAL_NORM)

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "int16": 2, "int64": 8}
"""Bytes of a number, by the name of its type."""

Shard = Literal["replicated", "columns"]


class SiteShape(NamedTuple):
    """The rows of a site.

    Attributes:
        width: Numbers of a row, on all tensor-parallel ranks together.
        dtype: Of the captured row: a key of `ITEM_SIZES`.
        shard: ``replicated``: every tensor-parallel rank has the whole row. ``columns``: each rank has a part; the row
            is the concatenation of the parts in the order of the ranks. Heads that several ranks hold are in it once.
        head_size: Numbers that stay on one rank together; 1 if the row is not made of heads.
    """

    width: int
    dtype: str
    shard: Shard = "replicated"
    head_size: int = 1

    def part_width(self, num_ranks: int) -> int:
        """Return the numbers of a row that each of so many tensor-parallel ranks has."""
        return self.width if self.shard == "replicated" else max(self.width // num_ranks, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * ITEM_SIZES[self.dtype]


Columns = tuple[tuple[int, int], ...]
"""Columns of a row: ``[start, stop)``, ascending; empty for all of them."""

COLUMN_KEYS = ("heads", "experts", "columns")
"""Keys by which columns of a site are selected."""


def width_of(columns: Columns, width: int) -> int:
    """Return how many numbers of a row are selected."""
    return sum(stop - start for start, stop in columns) if columns else width


def parse_columns(given: Mapping[Any, Any], site: Site, shape: SiteShape, field: str) -> Columns:
    """Read which columns of a site are selected; all of them if `given` has none of `COLUMN_KEYS`.

    Args:
        given: ``{"heads": [0, 3]}`` where a row is made of heads, ``{"experts": [1, 5]}`` of ``router_logits``, or
            ``{"columns": [start, stop]}``, `stop` exclusive.
        site: The site.
        shape: Of its rows.
        field: Path of `given` in the user's document, for errors.

    Raises:
        RequestError: If there is no such column, or a list does not ascend.
    """
    keys = [key for key in COLUMN_KEYS if given.get(key) is not None]
    if not keys:
        return ()
    if len(keys) > 1:
        raise RequestError(f"{field}.{keys[1]}", f"excludes {keys[0]!r}: both select columns")
    [key] = keys
    if key == "columns":
        return (_column_range(given[key], site, shape, f"{field}.columns"),)
    size = shape.head_size if key == "heads" else 1
    is_made_of = shape.head_size > 1 if key == "heads" else site.hook is HookPoint.ROUTER_LOGITS
    if not is_made_of:
        raise RequestError(f"{field}.{key}", f"rows of {site.name} are not made of {key}; select 'columns'")
    listed = given[key] if _is_list(given[key]) else [given[key]]
    most = shape.width // size
    is_known = all(type(each) is int and 0 <= each < most for each in listed[: most + 1])
    if not listed or not is_known or list(listed) != sorted(set(listed)):
        raise RequestError(
            f"{field}.{key}", f"expected ascending numbers from 0 to {most - 1}, each once; got {shown(given[key])}"
        )
    return tuple((each * size, (each + 1) * size) for each in listed)


def _column_range(given: object, site: Site, shape: SiteShape, field: str) -> tuple[int, int]:
    if not _is_list(given) or len(given) != 2 or not all(type(each) is int for each in given):
        raise RequestError(field, f"expected [start, stop] with stop exclusive, got {shown(given)}")
    start, stop = given
    if not 0 <= start < stop <= shape.width:
        raise RequestError(field, f"rows of {site.name} have the columns 0 to {shape.width - 1}; got {shown(given)}")
    return start, stop


NO_SHAPES: Mapping[Site, SiteShape] = {}
"""Stands for sites whose rows are those of the stream."""


def parse_hook(name: object, field: str) -> HookPoint:
    """Return the hook point called `name`, by its own name or an alias.

    Raises:
        RequestError: If there is no such hook point; the message lists those there are.
    """
    point = HOOK_NAMES.get(name) if isinstance(name, str) else None
    if point is None:
        raise RequestError(field, f"unknown hook point {shown(name)}; known: {', '.join(sorted(HookPoint))}")
    return point


def parse_sites(hooks: object, num_layers: int, field: str) -> tuple[Site, ...]:
    """Resolve ``{hook: layers}`` to sites, in layer order, each once.

    Args:
        hooks: Mapping of hook point to layers. Layers are ``"all"``, one int, a list of ints (negative
            from the last layer), or ``{"layers": [...], "ranges": [[start, stop], ...]}`` with `stop`
            exclusive. For ``final_norm`` and ``embed`` the value is ``"all"``, ``True``, ``None`` or ``[]``.
        num_layers: Number of decoder layers of the model.
        field: Path of `hooks` in the user's document, for errors.

    Raises:
        RequestError: On an unknown hook point, a layer out of range, or an empty selection.
    """
    if not isinstance(hooks, Mapping) or not hooks:
        raise RequestError(field, f"expected a non-empty object of hook point to layers, got {shown(hooks)}")
    if len(hooks) > len(HOOK_NAMES):
        raise RequestError(field, f"{len(hooks)} hook points; known: {', '.join(sorted(HookPoint))}")
    sites: set[Site] = set()
    for name, layers in hooks.items():
        if name in EMBEDDING_NAMES:
            _check_no_layers(layers, f"{field}.{name}", "embed")
            sites.add(Site(0, HookPoint.PRE_ATTN))
            continue
        hook = parse_hook(name, f"{field}.{name}")
        if hook is HookPoint.FINAL_NORM:
            _check_no_layers(layers, f"{field}.{name}", "final_norm")
            sites.add(FINAL_NORM_SITE)
        else:
            sites.update(Site(layer, hook) for layer in parse_layers(layers, num_layers, f"{field}.{name}"))
    return sort_sites(sites)


def parse_configured(hooks: object, field: str, *, num_layers: int, sites: Sequence[Site]) -> tuple[Site, ...]:
    """`parse_sites` for the sites that a server has: ``"all"`` means every layer that is configured for a hook point.

    Args:
        hooks: As of `parse_sites`.
        field: Likewise.
        num_layers: Of the model.
        sites: The configured sites.

    Raises:
        RequestError: Also if a site is not configured, naming the configured ones.
    """
    if isinstance(hooks, Mapping) and len(hooks) <= len(HOOK_NAMES):
        hooks = {name: _expand_all(name, layers, sites, field) for name, layers in hooks.items()}
    found, configured = parse_sites(hooks, num_layers, field), frozenset(sites)
    missing = [site for site in found if site not in configured]
    if missing:
        layers = sorted({site.layer for site in sites if site.hook is missing[0].hook})
        raise RequestError(
            f"{field}.{missing[0].hook}",
            f"site {missing[0].name} cannot be captured on this server; its configuration has "
            f"{f'layers {layers}' if layers else 'no layer'} of {missing[0].hook} (setting: capture.sites)",
        )
    return found


def _expand_all(name: object, layers: object, sites: Sequence[Site], field: str) -> object:
    if layers != "all" or name in EMBEDDING_NAMES:
        return layers
    hook = parse_hook(name, f"{field}.{name}")
    configured = [site.layer for site in sites if site.hook is hook and site.layer >= 0]
    return configured or layers


def sort_sites(sites: Iterable[Site]) -> tuple[Site, ...]:
    """Sites in the order of the forward pass: by layer, then as the stream flows; the final norm last."""
    return tuple(sorted(sites, key=_forward_order))


_FLOW = {
    hook: order
    for order, hook in enumerate(
        (
            HookPoint.PRE_ATTN,
            *BEFORE_KERNEL,
            HookPoint.HOOK_Z,
            HookPoint.MIXER_OUT,
            HookPoint.ATTN_OUT_PRE,
            HookPoint.ATTN_OUT,
            HookPoint.POST_ATTN,
            *BEFORE_MLP_OUT,
            HookPoint.MLP_OUT,
            HookPoint.POST_MLP,
        )
    )
}


def _forward_order(site: Site) -> tuple[bool, int, int]:
    is_final = site.hook is HookPoint.FINAL_NORM
    return is_final, site.layer, 0 if is_final else _FLOW[site.hook]


def parse_layers(layers: object, num_layers: int, field: str) -> tuple[int, ...]:
    """Resolve one hook point's layers; see `parse_sites`."""
    if isinstance(layers, str) and layers == "all":
        return tuple(range(num_layers))
    if isinstance(layers, Mapping):
        return _layers_and_ranges(layers, num_layers, field)
    if isinstance(layers, int | np.integer) and not isinstance(layers, bool):
        layers = [layers]
    if _is_list(layers):
        _check_length(layers, num_layers, field)
    if not _is_list(layers) or not layers:
        raise RequestError(
            field,
            f'expected "all", a layer, a non-empty list of layers or {{"layers": [...], "ranges": [...]}}, '
            f"got {shown(layers)}",
        )
    return tuple(sorted({_layer(layer, num_layers, field) for layer in layers}))


def site_map(sites: Iterable[Site]) -> dict[str, list[int]]:
    """``{hook: [layers]}``: what `parse_sites` resolves to the same sites, made of plain values."""
    hooks: dict[str, list[int]] = {}
    for site in sites:
        layers = hooks.setdefault(site.hook.value, [])
        if site.hook is not HookPoint.FINAL_NORM:
            layers.append(site.layer)
    return hooks


def _layers_and_ranges(layers: Mapping[Any, Any], num_layers: int, field: str) -> tuple[int, ...]:
    if not layers or any(key not in ("layers", "ranges") for key in layers):
        raise RequestError(field, f"expected the keys 'layers' and 'ranges', got {shown(dict(layers))}")
    listed = _listed(layers, "layers", num_layers, field)
    chosen = {_layer(layer, num_layers, f"{field}.layers") for layer in listed}
    for index, pair in enumerate(_listed(layers, "ranges", num_layers, field)):
        where = f"{field}.ranges[{index}]"
        if not _is_list(pair) or len(pair) != 2:
            raise RequestError(where, f"expected [start, stop] with stop exclusive, got {shown(pair)}")
        start, stop = (_bound(bound, num_layers, where) for bound in pair)
        if start >= stop:
            raise RequestError(where, f"selects no layer: start {pair[0]} is not below stop {pair[1]}")
        chosen.update(range(start, stop))
    if not chosen:
        raise RequestError(field, "selects no layer")
    return tuple(sorted(chosen))


def _listed(layers: Mapping[Any, Any], key: str, num_layers: int, field: str) -> Sequence[Any]:
    value = layers.get(key)
    if value is None:
        return ()
    if not _is_list(value):
        raise RequestError(f"{field}.{key}", f"expected a list, got {shown(value)}")
    _check_length(value, num_layers, f"{field}.{key}")
    return value


def _check_length(layers: Sequence[Any], num_layers: int, field: str) -> None:
    """Refuse a list that is longer than one of all layers, counted from the first and from the last."""
    if len(layers) > 2 * num_layers:
        raise RequestError(field, f'lists {len(layers)} entries, at most {2 * num_layers} can be; all layers are "all"')


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _layer(layer: object, num_layers: int, field: str) -> int:
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not -num_layers <= layer < num_layers:
        raise RequestError(field, f"layer {shown(layer)} is not an integer from {-num_layers} to {num_layers - 1}")
    return int(layer) % num_layers


def _bound(bound: object, num_layers: int, field: str) -> int:
    if isinstance(bound, bool) or not isinstance(bound, int | np.integer) or not -num_layers <= bound <= num_layers:
        raise RequestError(field, f"bound {shown(bound)} is not an integer from {-num_layers} to {num_layers}")
    return int(bound) if bound >= 0 else int(bound) + num_layers


def _check_no_layers(layers: object, field: str, name: str) -> None:
    is_empty_list = _is_list(layers) and not layers
    if not (layers is None or layers is True or is_empty_list or (isinstance(layers, str) and layers == "all")):
        raise RequestError(field, f'{name} has no layers: expected "all", true, null or [], got {shown(layers)}')
