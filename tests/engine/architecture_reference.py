"""What Hugging Face's own model computes of a tiny model: the streams around its layers, by forward hooks.

No model family is known here: a layer's first argument and first result are its streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.architectures import HIDDEN, LAYERS

STEERED_LAYER = 1
ATTENTION_WORDS = ("attn", "attention", "mixer", "mamba", "conv")
Rows = dict[Site, Tensor]


def _gelu_without_tanh(model: Any) -> None:
    for layer in cast("Iterable[Any]", _layers(model)):
        layer.mlp.gelu_impl = nn.GELU()


def _bfloat16_xielu(model: Any) -> None:
    for layer in cast("Iterable[Any]", _layers(model)):
        activation = layer.mlp.act_fn
        for value in (activation.alpha_p, activation.alpha_n, activation.beta, activation.eps):
            value.data = value.data.bfloat16()


def _longer_window(model: Any) -> None:
    model.config.sliding_window += 1


def _no_dynamic_mask(model: Any) -> None:
    for layer in cast("Iterable[Any]", _layers(model)):
        layer.self_attn.A.data.zero_()


AS_VLLM: Mapping[str, tuple[str, Callable[[nn.Module], None]]] = {
    "apertus": ("vLLM holds the parameters of the activation function (xIELU) in bfloat16", _bfloat16_xielu),
    "bloom": ("vLLM computes GELU exactly, Hugging Face with tanh", _gelu_without_tanh),
    **dict.fromkeys(("cohere2", "cohere2_moe"), ("vLLM's sliding window is one token longer", _longer_window)),
    "doge": ("vLLM leaves the dynamic mask of the attention out", _no_dynamic_mask),
}
"""Model type -> how vLLM itself differs from Hugging Face, and what makes Hugging Face's model compute the same."""


def vector() -> Tensor:
    """What the second of two runs adds to the stream after layer `STEERED_LAYER`."""
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What Hugging Face computes for one prompt, by forward hooks.

    Attributes:
        rows: Streams around each layer, and the final norm's output; of shape (tokens, hidden size).
        logits: Of shape (tokens, vocabulary).
        mlp_inputs: Layer -> inputs of its submodules that are neither attention nor norms, in that shape.
        attn_outputs: Layer -> outputs of its attention modules.
    """

    rows: Rows = field(default_factory=dict)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    mlp_inputs: dict[int, list[Tensor]] = field(default_factory=dict)
    attn_outputs: dict[int, list[Tensor]] = field(default_factory=dict)


def reference(
    folder: str,
    tokens: Sequence[Sequence[int]],
    *,
    is_steered: bool,
    forced: Sequence[Rows] | None = None,
    is_as_vllm: bool = False,
    is_rounded: bool = False,
) -> list[Reference]:
    """Run Hugging Face's model over each of `tokens`; with `is_as_vllm`, changed to what `AS_VLLM` says.

    With `is_rounded`, its weights are rounded to bfloat16; it computes in float32 nevertheless.

    With `forced`, every layer, the final norm and what follows it get these rows as their input instead of what the
    part before them computed: each part is compared alone.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters() if is_rounded else ():
        parameter.data = parameter.data.bfloat16().float()
    if is_as_vllm and model.config.model_type in AS_VLLM:
        AS_VLLM[model.config.model_type][1](model)
    found = []
    for index, ids in enumerate(tokens):
        taken, inputs = Reference(), forced[index] if forced else {}
        hooks = []
        for number, layer in enumerate(_layers(model)):
            added = vector() if is_steered and number == STEERED_LAYER else None
            hooks += _tap(layer, number, taken, inputs, added)
        hooks += [norm.register_forward_hook(_norm_tap(taken, inputs)) for norm in _outer_norms(model)]
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        found.append(replace(taken, logits=logits))
        for hook in hooks:
            hook.remove()
    return found


def _layers(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == LAYERS]
    return lists[0]


def _tap(layer: nn.Module, index: int, taken: Reference, inputs: Rows, added: Tensor | None) -> list[Any]:
    before, after = Site(index, HookPoint.PRE_ATTN), Site(index, HookPoint.POST_MLP)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[0] if args else kwargs["hidden_states"]
        taken.rows[before] = _rows(value)
        value = inputs[before].view_as(value).to(value) if before in inputs else value
        return ((value, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": value})

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        taken.rows[after] = _rows(value)
        value = inputs[after].view_as(value).to(value) if after in inputs else value
        value = value + added if added is not None else value
        return (value, *output[1:]) if isinstance(output, tuple) else value

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)]
    for name, part in layer.named_modules():
        if name and "norm" not in name:
            hooks.append(part.register_forward_hook(_part_tap(name, index, taken), with_kwargs=True))
    return hooks


def _part_tap(name: str, index: int, taken: Reference) -> Any:
    is_attention = any(word in name.lower() for word in ATTENTION_WORDS)

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = args[0] if args else kwargs.get("hidden_states")
        if not is_attention and isinstance(value, Tensor) and value.shape[-1] == HIDDEN:
            taken.mlp_inputs.setdefault(index, []).append(_rows(value))
        value = output[0] if isinstance(output, tuple) else output
        if is_attention and isinstance(value, Tensor) and value.shape[-1] == HIDDEN:
            taken.attn_outputs.setdefault(index, []).append(_rows(value))

    return leave


def _outer_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms outside of the layers; the one that runs last is the final norm."""
    within = {id(part) for part in _layers(model).modules()}
    named = ((name.rpartition(".")[2], part) for name, part in model.named_modules() if id(part) not in within)
    return [part for name, part in named if "norm" in name or name.startswith("ln_")]


def _norm_tap(taken: Reference, inputs: Rows) -> Any:
    def leave(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        taken.rows[FINAL_NORM_SITE] = _rows(output)
        return inputs[FINAL_NORM_SITE].view_as(output).to(output) if inputs else None

    return leave


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1]).clone()
