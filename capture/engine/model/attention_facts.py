"""The facts of attention in the layers of a worker, read from vLLM's attention layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.model.layer_structure import analyse_layer
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.vllm_types import ModelConfig
from headgate.capture.schema.consumer import AttentionFacts, ModelInfo
from headgate.capture.schema.sites import HookPoint, Site

IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Where configurations of Hugging Face have the ids of tokens that stand for an image."""


class NotKnownError(Exception):
    """Why `AttentionFacts` cannot say what a layer's attention does."""


def attention_facts(
    layers: Sequence[tuple[int, nn.Module]],
    actions: Mapping[Site, Sequence[SiteAction]],
    model: ModelInfo,
    config: ModelConfig,
    gather: Callable[[Tensor], Tensor],
) -> dict[int, AttentionFacts | str]:
    """Return what attention does in the layers whose queries and keys can be captured; a text where it is not known.

    All tensor-parallel ranks call it at the same point.

    Args:
        layers: Global index and module of each decoder layer.
        actions: What is done at each site.
        model: The shapes of the sites.
        config: vLLM's.
        gather: See `headgate.capture.engine.contracts.worker_hooks.WorkerFacts`, for tensors on the layer's device.
    """
    found: dict[int, AttentionFacts | str] = {}
    for index, layer in layers:
        sites = [Site(index, hook) for hook in (HookPoint.Q, HookPoint.K)]
        if not all(site in model.sites for site in sites):
            continue
        kernel = layer.get_submodule(analyse_layer(type(layer), layer).inner[HookPoint.K].module)
        device = next(layer.parameters()).device
        try:
            found[index] = _facts(kernel, sites, model, config, partial(_gathered, gather, device))
            if any(action.order > 0 for site in sites for action in actions.get(site, ())):
                found[index] = "steering is configured at its q or k, whose rows are captured before it acts"
        except NotKnownError as error:
            found[index] = str(error)
    return found


def _gathered(gather: Callable[[Tensor], Tensor], device: torch.device, tensor: Tensor) -> Tensor:
    return gather(tensor.to(device))


def _facts(
    kernel: nn.Module, sites: Sequence[Site], model: ModelInfo, config: ModelConfig, gather: Callable[[Tensor], Tensor]
) -> AttentionFacts:
    layer, impl = vars(kernel), vars(vars(kernel)["impl"])
    _check_kind(kernel, impl, config)
    q, k = (model.shape(site) for site in sites)
    num_heads, num_kv_heads = q.width // q.head_size, k.width // k.head_size
    each = {name: _of_heads(impl.get(name), num_heads, gather) for name in ("sinks", "alibi_slopes")}
    if layer.get("has_sink") and each["sinks"] is None:
        raise NotKnownError(f"its sinks are not in {type(kernel.impl).__name__}")
    slopes = each["alibi_slopes"]
    return AttentionFacts(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=q.head_size,
        scale=float(impl["scale"]),
        window=layer.get("sliding_window"),
        soft_cap=float(impl.get("logits_soft_cap") or 0) or None,
        sinks=each["sinks"],
        slopes=slopes,
        whole_tokens=_whole_tokens(layer, config),
    )


def _check_kind(kernel: nn.Module, impl: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse attention that is not causal, or not over the keys that the layer was given."""
    layer = vars(kernel)
    if type(kernel) is not vllm_names.ATTENTION.get():
        raise NotKnownError(f"its attention is vLLM's {type(kernel).__name__}, which patterns are not defined for")
    if layer["kv_cache_torch_dtype"] != config.dtype:
        raise NotKnownError(
            f"its KV cache has the dtype {layer['kv_cache_dtype']}, and patterns would be of keys as they were before: "
            "leave --kv-cache-dtype at auto"
        )
    if "scale" not in impl:
        raise NotKnownError(f"{type(kernel.impl).__name__} does not show its scale")
    if impl.get("chunk_lookback", -1) > -1:
        raise NotKnownError("its attention is local to chunks, which patterns are not defined for")
    if layer.get("use_alibi_sqrt"):
        raise NotKnownError("it has ALiBi of square roots, which patterns are not defined for")


def _of_heads(
    tensor: Tensor | Sequence[float] | None, num_heads: int, gather: Callable[[Tensor], Tensor]
) -> tuple[float, ...] | None:
    """Join one number for each head of all tensor-parallel ranks; None if there are none."""
    if tensor is None:
        return None
    joined = gather(torch.as_tensor(tensor).detach().float().flatten()).flatten().tolist()
    if len(joined) != num_heads:
        raise NotKnownError(f"it has {num_heads} heads, and {len(joined)} numbers for them")
    return tuple(joined)


def _whole_tokens(layer: Mapping[str, Any], config: ModelConfig) -> tuple[int, ...]:
    """Ids of tokens that see later ones of their image; none where attention is causal for all."""
    if not layer.get("use_mm_prefix", getattr(config, "is_mm_prefix_lm", False)):
        return ()
    ids = tuple(sorted(set(_image_tokens(config))))
    if not ids:
        raise NotKnownError("tokens of an image see later ones in it, and the model's configuration does not name them")
    return ids


def _image_tokens(config: ModelConfig) -> Iterator[int]:
    for name in IMAGE_TOKENS:
        if isinstance(value := getattr(config.hf_config, name, None), int):
            yield value
