"""The shapes of sites whose rows are not those of the stream, read from a model's configuration.

Front ends, engine cores and workers of an engine read the same configuration, and so have the same shapes before any of
them has seen the weights. A worker then compares them with the modules that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headgate.capture.engine.vllm_types import HfTextConfig, ModelConfig, VllmConfig
from headgate.capture.schema.sites import HookPoint, Shard, Site, SiteShape


def declared_shapes(config: VllmConfig, num_layers: int, stream: SiteShape) -> dict[Site, SiteShape]:
    """Return the shape of every site of a model whose rows may not be those of the stream.

    Args:
        config: Of the engine.
        num_layers: Decoder layers of the whole model.
        stream: The shape of the stream's rows.
    """
    return {site: shape for layer in range(num_layers) for site, shape in _of_layer(config, layer, stream)}


def _of_layer(config: VllmConfig, layer: int, stream: SiteShape) -> Iterator[tuple[Site, SiteShape]]:
    num_ranks = config.parallel_config.tensor_parallel_size
    columns: Shard = "columns" if num_ranks > 1 else "replicated"
    for hook, num_heads, head_size in _heads(config.model_config, config, layer):
        if num_heads and head_size:
            yield Site(layer, hook), SiteShape(num_heads * head_size, stream.dtype, columns, head_size)
    yield from _of_mlp(config.model_config, layer, stream, columns)
    if config.model_config.use_mla:
        width = int(getattr(config.model_config.hf_text_config, "kv_lora_rank", 0) or 0)
        yield Site(layer, HookPoint.KV_LATENT), SiteShape(width, stream.dtype)


def _of_mlp(model: ModelConfig, layer: int, stream: SiteShape, columns: Shard) -> Iterator[tuple[Site, SiteShape]]:
    text = model.hf_text_config
    num_experts = model.get_num_experts()
    has_experts = bool(num_experts) and not _is_dense(text, layer)
    if has_experts:
        yield Site(layer, HookPoint.ROUTER_LOGITS), SiteShape(num_experts, "float32")
        if num_chosen := _number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"):
            yield Site(layer, HookPoint.EXPERTS), SiteShape(num_chosen, "int16")
            yield Site(layer, HookPoint.EXPERT_WEIGHTS), SiteShape(num_chosen, "float32")
    if num_neurons := _num_neurons(text, layer, has_experts=has_experts):
        yield Site(layer, HookPoint.MLP_ACT), SiteShape(num_neurons, stream.dtype, columns)


def _is_dense(text: HfTextConfig, layer: int) -> bool:
    """Whether a layer of a model with experts has none."""
    frequency = getattr(text, "moe_layer_freq", None) or 1
    step = _number(text, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return (
        layer < _number(text, "first_k_dense_replace", "num_dense_layers")
        or layer in (getattr(text, "mlp_only_layers", None) or ())
        or (layer + 1) % step != 0
        or not (frequency[layer] if isinstance(frequency, Sequence) else layer % frequency == 0)
    )


def _num_neurons(text: HfTextConfig, layer: int, *, has_experts: bool) -> int:
    """Return the inputs of the down projection of a layer's MLP, or of its shared expert; 0 if unknown."""
    if has_experts:
        num_shared = _number(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        return _number(text, "shared_expert_intermediate_size", "shared_intermediate_size") or (
            num_shared * _number(text, "moe_intermediate_size")
        )
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim", "ffn_hidden_dim")
    if text_size := _number(text, "intermediate_size_mlp"):
        return text_size
    found = next((size for name in names if (size := getattr(text, name, None))), None)
    if isinstance(found, Sequence):
        return int(found[layer]) if layer < len(found) else 0
    return int(found or 4 * _number(text, "n_embd"))


def _number(text: HfTextConfig, *names: str) -> int:
    """Return the first of some settings of a model that it has as a number; 0 if none."""
    found = (getattr(text, name, None) for name in names)
    return next((int(number) for number in found if isinstance(number, int) and number), 0)


def _heads(model: ModelConfig, config: VllmConfig, layer: int) -> Iterator[tuple[HookPoint, int, int]]:
    """Yield hook points whose rows are made of heads: with their number, and the size of each; 0 if unknown."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds and layer < len(kinds) else ""
    if kind == "linear_attention":
        sizes = (getattr(text, name, 0) or 0 for name in ("linear_num_value_heads", "linear_value_head_dim"))
        num_heads, head_size = map(int, sizes)
        yield HookPoint.HOOK_Z, num_heads, head_size
        return
    num_heads = model.get_num_attention_heads(config.parallel_config) * config.parallel_config.tensor_parallel_size
    if getattr(text, "kv_lora_rank", None) and getattr(text, "v_head_dim", None):
        yield HookPoint.HOOK_Z, num_heads, int(text.v_head_dim)  # type: ignore[attr-defined]
        sizes = (getattr(text, name, 0) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        yield HookPoint.Q, num_heads, sum(map(int, sizes))
        return
    head_size, num_kv_heads = model.get_head_size(), model.get_total_num_kv_heads()
    if kind == "full_attention" and getattr(text, "global_head_dim", None):
        head_size = int(text.global_head_dim)  # type: ignore[attr-defined]
        num_kv_heads = int(getattr(text, "num_global_key_value_heads", None) or num_kv_heads)
    for hook in (HookPoint.HOOK_Z, HookPoint.Q, HookPoint.Q_PRE):
        yield hook, num_heads, head_size
    for hook in (HookPoint.K, HookPoint.V, HookPoint.K_PRE):
        yield hook, num_kv_heads, head_size
