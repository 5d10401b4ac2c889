"""What vLLM's own modules compute, by forward hooks in an engine without headgate.

For layers with Llama's names: a norm before attention and one before the MLP. Each adds what it is given to the stream,
and returns the sum beside its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site

Parts = dict[Site, list[Tensor]]
"""Rows of each site, in the order in which steps computed them."""


@contextmanager
def watched(model: nn.Module, num_layers: int, added: Mapping[int, Tensor]) -> Iterator[Parts]:
    """Note the rows of every site of `model`; `added` are vectors ``[hidden]`` by layer, added behind it."""
    name, layers = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    seen: Parts = defaultdict(list)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            _watch_layer(stack, seen, layer, index, added)
        norm = model.get_submodule(f"{name.removesuffix('layers')}norm")
        stack.callback(norm.register_forward_hook(_norm_hook(seen, num_layers, added, is_final=True)).remove)
        yield seen


def _watch_layer(stack: ExitStack, seen: Parts, layer: Any, index: int, added: Mapping[int, Tensor]) -> None:
    def take(hook: HookPoint, rows: Tensor) -> None:
        seen[Site(index, hook)].append(rows.detach().clone())  # later norms add to the stream in place

    def mlp_hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        take(HookPoint.MLP_IN, args[0])
        take(HookPoint.MLP_OUT, output)

    def layer_hook(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        branch, stream = output
        take(HookPoint.POST_MLP, branch + stream)
        return branch, stream + added[index].to(stream)

    hooks = [
        layer.input_layernorm.register_forward_hook(_norm_hook(seen, index, added)),
        layer.self_attn.register_forward_hook(lambda _, __, output: take(HookPoint.ATTN_OUT, output)),
        layer.post_attention_layernorm.register_forward_hook(lambda *given: take(HookPoint.POST_ATTN, given[2][1])),
        layer.mlp.register_forward_hook(mlp_hook),
        *([layer.register_forward_hook(layer_hook)] if index in added else []),
    ]
    for hook in hooks:
        stack.callback(hook.remove)


def _norm_hook(seen: Parts, index: int, added: Mapping[int, Tensor], *, is_final: bool = False) -> Any:
    """Of the norm before layer `index`, or behind the last: its stream is what the layer before it left."""

    def take(_: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        rows, stream = output if isinstance(output, tuple) else (output, args[0])
        if index and index - 1 not in added:
            seen[Site(index - 1, HookPoint.POST_MLP)].append(stream.detach().clone())
        if is_final:
            seen[FINAL_NORM_SITE].append(rows.detach().clone())
        else:
            seen[Site(index, HookPoint.PRE_ATTN)].append(stream.detach().clone())

    return take


def different_rows(captured: Mapping[Site, Tensor], seen: Parts) -> dict[str, int]:
    """How many rows of each site are not those of the modules, bit for bit; sites that are equal are left out."""
    found = {}
    for site, rows in captured.items():
        own = torch.cat(seen[site]).cpu()
        assert (own.shape, own.dtype) == (rows.shape, rows.dtype), (site.name, own.shape, rows.shape)
        if num := int((own != rows).any(1).sum()):
            found[site.name] = num
    return found
