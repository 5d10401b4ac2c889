"""Tiny random models of every type that vLLM serves and Hugging Face defines, each compared with Hugging Face's own.

``python -m tests.engine.architectures RESULTS.json [TYPE ...]`` adds what is missing in RESULTS.json, one type after
another, in a process that is replaced when a type kills it. ``architectures_vllm_0.32.json`` holds what was found and
judged, and `test_architectures` compares with it; ``python -m tests.engine.architectures --table RESULTS.json`` prints
the table of docs/reference/models.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, VOCABULARY = 3, 64, 512
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
    "vocab_size": VOCABULARY,
    "word_embed_proj_dim": HIDDEN,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a configuration gets of the names that it has; heads of 32 are the smallest of vLLM's CPU attention."""

MLA = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "topk_method": "noaux_tc",
}
"""The one size that vLLM's multi-head latent attention has on CPUs."""

TYPES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "score_func": "sigmoid"},
    "apertus": {},
    "arcee": {},
    "axk1": MLA,
    "bloom": {},
    "cohere": {},
    "cohere2": {"sliding_window": 64},
    "cohere2_moe": {"sliding_window": 64},
    "cwm": {},
    "dbrx": {},
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "deepseek_v4": {},
    "doge": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {"num_kv_heads": 1, "ffn_hidden_size": 256},
    "falcon_h1": {},
    "falcon_mamba": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {},
    "gemma4_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 16},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitemoeshared": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "hyperclovax": {},
    "inkling_text": {},
    "jais2": {},
    "jamba": {},
    "kimi_linear": {},
    "laguna": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama": {},
    "llama4_text": {},
    "longcat_flash": MLA,
    "mamba": {},
    "mamba2": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minicpm3": MLA,
    "minimax_m2": {},
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nanbeige": {},
    "nemotron": {},
    "nemotron_h": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {},
    "opt": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen4_exp_text": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {},
    "zamba2": {},
}
"""Model type -> what its configuration needs beside `SIZES`."""

LIMIT_S = 240


def make_model(model_type: str, folder: Path) -> None:
    """Write the tiny model of a type, its norms and biases perturbed: ones and zeros would hide a missing one."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    known = cls().to_dict() | dict.fromkeys(getattr(cls, "attribute_map", {}))
    config = cls(**{name: value for name, value in SIZES.items() if name in known} | dict(TYPES[model_type]))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = ("model type", "class in vLLM", "result", "hook points", "largest error", "note")
    rows = [head, ("---",) * len(head)]
    for name, found in sorted(results.items()):
        error = f"{found['error']:.1e}" if "error" in found else ""
        shown = (found.get("model", ""), found["result"], found.get("hooks", ""), error, found.get("note", ""))
        rows.append((f"`{name}`", *shown))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: list[str]) -> None:
    """Try what RESULTS.json lacks, or print its table."""
    if arguments[0] == "--table":
        print(table(json.loads(Path(arguments[1]).read_text())))
        return
    path, names = Path(arguments[0]), arguments[1:] or list(TYPES)
    while True:
        results = json.loads(path.read_text()) if path.exists() else {}
        missing = [name for name in names if name not in results]
        if not missing:
            return
        command = [sys.executable, "-m", "tests.engine.architecture_runs", str(path), *missing]
        status = subprocess.run(command, check=False, timeout=LIMIT_S * len(missing)).returncode
        results = json.loads(path.read_text()) if path.exists() else {}
        left = [name for name in names if name not in results]
        if left and status:
            results[left[0]] = {"result": "not built", "note": f"the process ended with status {status}"}
            path.write_text(json.dumps(results, indent=1, sort_keys=True))


if __name__ == "__main__":
    main(sys.argv[1:])
