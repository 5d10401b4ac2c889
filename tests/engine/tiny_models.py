"""Tiny random models of many families, as Hugging Face folders that vLLM serves: no download, made in a second.

Sizes are the smallest that vLLM's CPU attention takes (heads of 32). Norm weights and biases are perturbed, so that
leaving out a norm, a post-norm or a bias shows up. There is no tokenizer: serve them with ``skip_tokenizer_init``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.model import cache_dir

MAKER = 1
"""Raised when the weights change without the configuration changing."""

VOCABULARY = 512
HIDDEN = 64
LAYERS = 3
MAX_LENGTH = 256
IMAGE_TOKEN, TILE, PATCH, SCALE = 3, 32, 4, 2
"""Of the vision model: its placeholder; pixels of a tile's side and of a patch's; patches of a placeholder's side."""

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.1,
}
_WIDE_HEADS = {**_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_GEMMA_2_3 = {**_WIDE_HEADS, "sliding_window": 16, "query_pre_attn_scalar": 32}
_DEEPSEEK_V3 = {
    **_LLAMA,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", _WIDE_HEADS),
    "qwen3_one_kv": ("Qwen3Config", {**_WIDE_HEADS, "num_key_value_heads": 1}),
    "gemma": ("GemmaConfig", _WIDE_HEADS),
    "gemma2": ("Gemma2Config", _GEMMA_2_3),
    "gemma3": ("Gemma3TextConfig", _GEMMA_2_3),
    "granite": (
        "GraniteConfig",
        {
            **_LLAMA,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "olmo2": ("Olmo2Config", _LLAMA),
    "mixtral": ("MixtralConfig", {**_WIDE_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_WIDE_HEADS, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_LLAMA,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK_V3),
    "deepseek_v3_all": ("DeepseekV3Config", {**_DEEPSEEK_V3, "n_routed_experts": 2}),
    "mixtral_all": ("MixtralConfig", {**_WIDE_HEADS, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "qwen3_moe_all": (
        "Qwen3MoeConfig",
        {**_WIDE_HEADS, "moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 2},
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_NEOX, "use_parallel_residual": True}),
    "gpt_neox_sequential": ("GPTNeoXConfig", {**_NEOX, "use_parallel_residual": False}),
    "phi": ("PhiConfig", _NEOX),
    "idefics3": (
        "Idefics3Config",
        {
            "text_config": {**_LLAMA, "model_type": "llama"},
            "vision_config": {
                "hidden_size": HIDDEN,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": TILE,
                "patch_size": PATCH,
                "initializer_range": 0.1,
            },
            "scale_factor": SCALE,
            "image_token_id": IMAGE_TOKEN,
            "pad_token_id": 0,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            **_COMMON,
            "hidden_size": HIDDEN,
            "word_embed_proj_dim": HIDDEN,
            "ffn_dim": 128,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "init_std": 0.1,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            **_COMMON,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 2,
            "n_positions": MAX_LENGTH,
            "initializer_range": 0.1,
        },
    ),
}
"""Family -> name of its configuration class in transformers, and the configuration."""

MIXERS = ("lfm2", "granitemoehybrid")
"""Families whose first and last layer have a mixer in place of attention."""

ATTENTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bloom": ("BloomConfig", {**_COMMON, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_WIDE_HEADS,
            "intermediate_size": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_LLAMA,
            "layer_types": ["conv", "full_attention", "conv"],
            **dict.fromkeys(("block_dim", "conv_dim"), HIDDEN),
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_LLAMA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "residual_multiplier": 0.5,
            **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16},
        },
    ),
    "mistral_window": ("MistralConfig", {**_LLAMA, "sliding_window": 16}),
}
"""Further families, whose attention is unlike the others', or which have mixers of another kind."""


def tiny_model(family: str, cache: Path | None = None) -> Path:
    """Folder of the tiny model of `family`, made on first use; `cache` is the models' cache folder if None.

    A process of its own makes it, and with it all others that the usual cache lacks: vLLM's Transformers backend
    decorates the model classes of the process that it runs in, and then nothing but vLLM can make such a model.
    """
    folder = _folder(family, cache or cache_dir() / "models")
    if not folder.exists():
        every = [family] if cache else [*FAMILIES, *ATTENTIONS]
        families = [name for name in every if not _folder(name, folder.parent).exists()]
        subprocess.run([sys.executable, "-m", __name__, str(folder.parent), *families], check=True)
    return folder


def _made_of(family: str) -> tuple[str, Mapping[str, Any]]:
    return FAMILIES[family] if family in FAMILIES else ATTENTIONS[family]


def _folder(family: str, cache: Path) -> Path:
    recipe = json.dumps([MAKER, *_made_of(family)], sort_keys=True).encode()
    return cache / f"tiny-{family}-{hashlib.sha256(recipe).hexdigest()[:12]}"


def _make_all(cache: str, *families: str) -> None:
    for family in families:
        folder = _folder(family, Path(cache))
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        _make(*_made_of(family), unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process made it meanwhile, from the same seed
            shutil.rmtree(unfinished)


def _make(name: str, settings: Mapping[str, Any], folder: Path) -> None:
    import torch
    import transformers

    config = getattr(transformers, name)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        auto = transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases: initialised to ones and zeros
                    parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def has_vision(config: object) -> bool:
    """Whether a Hugging Face configuration is one of a model that takes images."""
    return hasattr(config, "vision_config")


if __name__ == "__main__":
    _make_all(*sys.argv[1:])
