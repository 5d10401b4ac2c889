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
    num_heads, head_size = _mixed_heads(config.model_config, config, layer)
    if num_heads and head_size:
        shape = SiteShape(num_heads * head_size, stream.dtype, columns, head_size)
        yield Site(layer, HookPoint.HOOK_Z), shape


def _mixed_heads(model: ModelConfig, config: VllmConfig, layer: int) -> tuple[int, int]:
    """Return the number and the size of the heads' results in front of attention's output projection; 0 if unknown."""
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds and layer < len(kinds) else ""
    if kind == "linear_attention":
        sizes = (getattr(text, name, 0) or 0 for name in ("linear_num_value_heads", "linear_value_head_dim"))
        num_heads, head_size = map(int, sizes)
        return num_heads, head_size
    num_heads = model.get_num_attention_heads(config.parallel_config) * config.parallel_config.tensor_parallel_size
    if getattr(text, "kv_lora_rank", None) and getattr(text, "v_head_dim", None):
        return num_heads, int(text.v_head_dim)  # type: ignore[attr-defined]
    if kind == "full_attention" and getattr(text, "global_head_dim", None):
        return num_heads, int(text.global_head_dim)  # type: ignore[attr-defined]
    return num_heads, model.get_head_size()
