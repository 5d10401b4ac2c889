"""The shapes of sites whose rows are not those of the stream, read from a model's configuration.

Front ends, engine cores and workers of an engine read the same configuration, and so have the same shapes before any of
them has seen the weights. A worker then compares them with the modules that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator

from headgate.capture.engine.vllm_types import ModelConfig, VllmConfig
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
    if config.model_config.use_mla:
        width = int(getattr(config.model_config.hf_text_config, "kv_lora_rank", 0) or 0)
        yield Site(layer, HookPoint.KV_LATENT), SiteShape(width, stream.dtype)


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
