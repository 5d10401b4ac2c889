"""The places of the hook points within attention, mixers and the MLP.

Of attention they are arguments of its rotary embedding, its kernel and its output projection; of the MLP, arguments of
its down projection, and of its experts what their router reads and chooses; of a mixer of another kind (state-space
model, linear attention), its input and result. Kernel, experts and mixers are vLLM's own layers, and widths are what
these say of themselves. The output projection is the linear layer whose result is what attention returns. It is read
from the source of the attention module's ``forward``, as decoder layers are.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.symbolic_forward import Path, walk_paths
from headgate.capture.engine.model.symbols import Items, Key, NotUnderstoodError, Sum
from headgate.capture.engine.vllm_types import ExpertsLayer
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import MIXER_HOOKS, HookPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class HookPlace:
    """Where one hook point is taken at a submodule: an argument of its call, or its (first) result.

    Attributes:
        module: Dotted path of the submodule within the layer.
        value: Argument that holds the site's value; None: the result does.
        keyword: Name of that argument, if a caller may give it by name or by position.
        addend: Argument that is added to it, if the stream is carried as a pair.
        carry: Argument that a vector is added to; `value` if None.
        scale: Multiplier between the result and what is added to the stream.
        width: Values of a row on this tensor-parallel rank, as the modules show it; 0: those of the stream.
        whole_width: The same on all ranks together; 0 if the modules do not show it.
        has_heads: Whether the value's first dimension is its rows, and all others are a row.
        is_written: Whether the module writes the argument `value`, which holds the site's value when it returns.
        is_shared: Whether other layers have this very module.
        is_choice: Whether the value is what the router of the module, a layer of experts, chooses: `result` 0 is the
            weights and 1 the experts.
    """

    module: str
    value: Key | None = None
    keyword: str = ""
    result: int = 0
    addend: Key | None = None
    carry: Key | None = None
    scale: float | None = None
    width: int = 0
    whole_width: int = 0
    has_heads: bool = False
    is_written: bool = False
    is_shared: bool = False
    is_choice: bool = False


class InnerPlaces(NamedTuple):
    """The hook points within attention, mixers and the MLP.

    Attributes:
        places: By hook point, in the forward's order.
        absent: Why there is no such hook point.
    """

    places: Mapping[HookPoint, HookPlace]
    absent: Mapping[HookPoint, str]


def inner_places(layer: nn.Module, attn: str | None, attn_input: Key | None) -> InnerPlaces:
    """Find the hook points within the attention and the MLP of a layer.

    Args:
        layer: A decoder layer.
        attn: Module that attention starts with, below `layer`.
        attn_input: Its argument that holds attention's input.
    """
    found = (
        _of_kernel(layer, attn or ""),
        _of_projection(layer, attn, attn_input),
        _of_mixer(layer),
        _of_experts(layer),
        _of_neurons(layer, attn),
    )
    places = {hook: place for each in found for hook, place in each.places.items()}
    return InnerPlaces(places, {hook: why for each in found for hook, why in each.absent.items()})


_HEADS = (HookPoint.Q, HookPoint.K, HookPoint.V)
_NO_HEADS = "latent attention (MLA) makes no keys and values of heads; kv_latent is what it keeps of a token"


def _of_kernel(layer: nn.Module, attn: str) -> InnerPlaces:
    """Return the arguments of the one attention layer of vLLM's below `attn`."""
    every = (HookPoint.Q_PRE, HookPoint.K_PRE, *_HEADS, HookPoint.KV_LATENT)
    found = list(_kernels(layer, attn))
    if len(found) != 1:
        return InnerPlaces({}, dict.fromkeys(every, f"{len(found)} of vLLM's attention layers are in it, not one"))
    [(path, kernel)] = found
    if (shared := getattr(kernel, "attn_type", "decoder")) != "decoder":
        return InnerPlaces({}, dict.fromkeys(every, f"its attention is of the type {shared}"))
    arguments = {
        hook: HookPlace(module=path, value=index, keyword=name, width=width, has_heads=True)
        for index, (hook, name, width) in enumerate(_arguments(kernel))
        if width
    }
    absent = {hook: _NO_HEADS for hook in every if hook not in arguments}
    if HookPoint.K in arguments:
        absent = {HookPoint.KV_LATENT: "its attention has keys and values of heads: k and v"}
        in_front = _in_front_of_rotation(layer, attn, arguments)
        arguments = {**in_front.places, **arguments}
        absent |= in_front.absent
    if getattr(kernel, "kv_sharing_target_layer_name", None) is not None:
        why = f"it reads the keys and values of {kernel.kv_sharing_target_layer_name}"
        absent |= dict.fromkeys((HookPoint.K, HookPoint.V), why)
    return InnerPlaces({hook: place for hook, place in arguments.items() if hook not in absent}, absent)


def _kernels(layer: nn.Module, attn: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the attention layers of vLLM's below `attn`, each with its path below the layer."""
    kinds = tuple(filter(None, (vllm_names.ATTENTION.get(), vllm_names.LATENT_ATTENTION.get())))
    below = layer.get_submodule(attn).named_modules() if kinds else ()
    return ((".".join(filter(None, (attn, name))), module) for name, module in below if isinstance(module, kinds))


def _arguments(kernel: nn.Module) -> Iterator[tuple[HookPoint, str, int]]:
    """Yield the arguments of an attention layer in their order: hook point, name, and width on this rank."""
    sizes = vars(kernel)
    latent = vllm_names.LATENT_ATTENTION.get()
    names = list(inspect.signature(type(kernel).forward).parameters)[1:]
    if latent is not None and isinstance(kernel, latent):
        head_size = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        yield HookPoint.Q, names[0], sizes["num_heads"] * head_size
        yield HookPoint.KV_LATENT, names[1], sizes["kv_lora_rank"]
    else:
        yield HookPoint.Q, names[0], sizes["num_heads"] * sizes["head_size"]
        yield HookPoint.K, names[1], sizes["num_kv_heads"] * sizes["head_size"]
        yield HookPoint.V, names[2], sizes["num_kv_heads"] * sizes.get("head_size_v", sizes["head_size"])


def _in_front_of_rotation(layer: nn.Module, attn: str, behind: Mapping[HookPoint, HookPlace]) -> InnerPlaces:
    """Return the arguments of the one rotary embedding below `attn`, given what the kernel gets."""
    kind = vllm_names.ROTARY_EMBEDDING.get()
    below = layer.get_submodule(attn).named_modules() if kind is not None else ()
    found = [".".join(filter(None, (attn, name))) for name, module in below if isinstance(module, kind)]
    pairs = {HookPoint.Q_PRE: ("query", HookPoint.Q), HookPoint.K_PRE: ("key", HookPoint.K)}
    if len(found) != 1:
        return InnerPlaces({}, dict.fromkeys(pairs, f"{len(found)} rotary embeddings of vLLM's are in it, not one"))
    places = {
        hook: replace(behind[rotated], module=found[0], value=index, keyword=keyword, is_shared=True)
        for index, (hook, (keyword, rotated)) in enumerate(pairs.items(), start=1)
    }
    return InnerPlaces(places, {})


def _of_projection(layer: nn.Module, attn: str | None, attn_input: Key | None) -> InnerPlaces:
    """Return the input of attention's output projection, or why it can be no site."""
    if attn is None or attn_input is None:
        return InnerPlaces({}, {HookPoint.HOOK_Z: "the layer has no one attention with one input"})
    attention = layer.get_submodule(attn)
    found = find_output_projection(attention, attn_input)
    if found is None:
        cls, is_replaced = type(attention).__name__, "forward" in vars(attention)
        shown = "shows no linear layer that makes its result"
        reason = f"vLLM replaced the forward of this {cls}" if is_replaced else f"the source of {cls} {shown}"
        return InnerPlaces({}, {HookPoint.HOOK_Z: reason})
    place = HookPlace(
        module=f"{attn}.{found.module}", value=found.argument, width=found.width, whole_width=found.whole_width
    )
    return InnerPlaces({HookPoint.HOOK_Z: place}, {})


def _of_mixer(layer: nn.Module) -> InnerPlaces:
    """Return the input and the result of the one mixer of vLLM's that is not attention."""
    found = list(_mixers(layer))
    if len(found) != 1:
        why = f"{len(found)} state-space models or linear attentions of vLLM's are in it, not one"
        return InnerPlaces({}, dict.fromkeys(MIXER_HOOKS, why))
    [(path, mixer)] = found
    names = list(inspect.signature(inspect.unwrap(type(mixer).forward)).parameters)[1:]
    if "hidden_states" not in names:
        return InnerPlaces({}, dict.fromkeys(MIXER_HOOKS, f"{type(mixer).__name__} shows no input hidden_states"))
    taken, given = (
        HookPlace(module=path, value=names.index(name), keyword=name, has_heads=True, is_written=name == "output")
        if name in names
        else HookPlace(module=path)
        for name in ("hidden_states", "output")
    )
    return InnerPlaces(dict(zip(MIXER_HOOKS, (taken, given), strict=True)), {})


def _mixers(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    kind = vllm_names.MIXER.get()
    return ((path, module) for path, module in layer.named_modules() if kind is not None and isinstance(module, kind))


def _of_experts(layer: nn.Module) -> InnerPlaces:
    """Return what the one layer of experts of vLLM's reads and chooses."""
    every = (HookPoint.ROUTER_LOGITS, HookPoint.EXPERTS, HookPoint.EXPERT_WEIGHTS)
    kind = vllm_names.EXPERTS.get()
    found: list[tuple[str, ExpertsLayer]] = [
        (path, module) for path, module in layer.named_modules() if kind is not None and isinstance(module, kind)
    ]
    if len(found) != 1:
        return InnerPlaces({}, dict.fromkeys(every, f"{len(found)} of vLLM's layers of experts are in it, not one"))
    [(path, experts)] = found
    sizes = experts.moe_config
    logits = _router_logits(path, experts)
    absent = {} if logits is not None else {HookPoint.ROUTER_LOGITS: "one kernel computes its router and another gate"}
    places = {} if logits is None else {HookPoint.ROUTER_LOGITS: logits}
    if (why := _hidden_choice(experts)) is not None:
        return InnerPlaces(places, absent | dict.fromkeys(every[1:], why))
    for result, hook in enumerate((HookPoint.EXPERT_WEIGHTS, HookPoint.EXPERTS)):
        places[hook] = HookPlace(module=path, result=result, width=sizes.experts_per_token, is_choice=True)
    return InnerPlaces(places, absent)


def _router_logits(path: str, experts: ExpertsLayer) -> HookPlace | None:
    """Return where the router's scores are: an argument of the experts, or the result of a gate that they have."""
    width = experts.moe_config.num_logical_experts
    if getattr(experts, "gate", None) is None:
        return HookPlace(module=path, value=1, keyword="router_logits", width=width, has_heads=True)
    return None if getattr(experts, "_fse_fuse_gate", False) else HookPlace(module=f"{path}.gate", width=width)


def _hidden_choice(experts: ExpertsLayer) -> str | None:
    """Return why the choice of experts cannot be seen; None if it can."""
    if not hasattr(getattr(experts, "router", None), "_compute_routing"):
        return "the router of this vLLM shows no choice of experts"
    if experts.is_monolithic:
        return "its kernel chooses the experts itself and shows no choice; router_logits are what it chooses by"
    parallel = experts.moe_config.moe_parallel_config
    if parallel.dp_size > 1 or getattr(parallel, "is_sequence_parallel", False) or getattr(parallel, "pcp_size", 1) > 1:
        return "its router gets tokens of other ranks too"
    return None


def _of_neurons(layer: nn.Module, attn: str | None) -> InnerPlaces:
    """Return the input of the one down projection outside attention: of the MLP, or of the shared expert."""
    RowParallelLinear = vllm_names.ROW_PARALLEL_LAYER.get()

    others = tuple(f"{path}." for path in (attn, *(path for path, _ in _mixers(layer))) if path)
    with_kernel = {path.rpartition(".")[0] for path, _ in _kernels(layer, "")}  # attention's own projection is there
    found = [
        (path.removesuffix(".base_layer"), module)  # of a layer that LoRA adapters wrap
        for path, module in layer.named_modules()
        if isinstance(module, RowParallelLinear) and not path.startswith(others)
        if path.removesuffix(".base_layer").rpartition(".")[0] not in with_kernel
    ]
    if len(found) != 1:
        why = f"{len(found)} projections are in it behind attention, not one: routed experts have none of their own"
        return InnerPlaces({}, {HookPoint.MLP_ACT: why})
    [(path, module)] = found
    width, whole = int(module.input_size_per_partition), int(module.input_size)
    return InnerPlaces({HookPoint.MLP_ACT: HookPlace(module=path, value=0, width=width, whole_width=whole)}, {})


class OutputProjection(NamedTuple):
    """A linear layer below an attention module.

    Attributes:
        module: Its dotted path, below the attention module.
        argument: Its argument that holds the heads' results.
        width: Values of a row of that argument, on this tensor-parallel rank.
        whole_width: The same on all ranks together.
    """

    module: str
    argument: Key
    width: int
    whole_width: int


def find_output_projection(attention: nn.Module, argument: Key) -> OutputProjection | None:
    """Find the linear layer that makes the result of `attention`; None if the source does not show one.

    Args:
        attention: Module that attention starts with.
        argument: Its argument that holds the input, by position or name.
    """
    names = list(inspect.signature(inspect.unwrap(type(attention).forward)).parameters)[1:]
    name = argument if isinstance(argument, str) else names[argument] if argument < len(names) else ""
    if name not in names or "forward" in vars(attention):
        return None
    try:
        paths = list(walk_paths(type(attention), attention, {name: True}, hands_itself_out=True))
    except (NotUnderstoodError, UnsupportedError):
        return None
    found = {_last_call(path) for path in paths}
    module, key = (found.pop() if len(found) == 1 else None) or ("", 0)
    sizes = _sizes(attention, module)
    return OutputProjection(module, key, *sizes) if sizes is not None else None


def _last_call(path: Path) -> tuple[str, Key] | None:
    """Return the module whose result is the path's, if it is called once, and its one argument that reads the input."""
    result = path.result.values[0] if isinstance(path.result, Items) and path.result.values else path.result
    atom = result.atom if isinstance(result, Sum) else None
    calls = Counter(call.module for call in path.tape.calls)
    if atom is None or atom.element or calls[atom.module] != 1:
        return None
    call = next(call for call in path.tape.calls if call.module == atom.module)
    read = [key for key, value in call.inputs.items() if path.tape.reads(value)]
    return (call.module, read[0]) if len(read) == 1 else None


def _sizes(attention: nn.Module, path: str) -> tuple[int, int] | None:
    """Return the input's width on this rank and on all; None if no linear layer is at `path`."""
    LinearBase = vllm_names.LINEAR_LAYER.get()

    try:
        module = attention.get_submodule(path) if path else None
    except AttributeError:
        return None
    module = getattr(module, "base_layer", module)  # of a layer that LoRA adapters wrap
    if isinstance(module, LinearBase):
        whole = int(module.input_size)
        return int(getattr(module, "input_size_per_partition", whole)), whole
    if isinstance(module, nn.Linear):
        return module.in_features, module.in_features
    return None
