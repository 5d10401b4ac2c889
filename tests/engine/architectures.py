"""Tiny random models of every type that vLLM serves and Hugging Face defines, each compared with Hugging Face's own.

``python -m tests.engine.architectures RESULTS.json [TYPE ...]`` adds what is missing in RESULTS.json; with
``--at-once 6``, six types at a time; ``gpu`` in place of the types means `ON_A_GPU`.
``architectures_vllm_0.32.json`` holds what was found and judged on a CPU, ``architectures_vllm_0.26_gpu.json`` what on
an H100; `test_architectures` compares with both. ``python -m tests.engine.architectures --merge RESULTS.json 0.26_gpu``
adds what was judged to the second, or with ``0.32`` to the first, and renews docs/reference/models.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.deadlines import patience

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

DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 64),
    "rms_norm_eps": 1e-4,  # less enlarges values that the delta net's sum all but cancelled, their rounding with them
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}

TYPES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "apertus": {},
    "arcee": {},
    "axk1": MLA,
    "bloom": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cwm": {},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": {**MLA, "scoring_func": "sigmoid"},
    "deepseek_v32": {**MLA, "num_experts_per_tok": 4},
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
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 16,
    },
    "gemma4_text": {
        "num_experts": None,
        "moe_intermediate_size": None,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {**MLA, "first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "glm_moe_dsa": {**MLA, "num_experts_per_tok": 4},
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
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64},
    "hy_v4": {},
    "hyperclovax": {},
    "inkling_text": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {
        **{name: size for name, size in MLA.items() if name not in ("head_dim", "topk_method")},
        "q_lora_rank": None,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "use_grouped_topk": True,
    },
    "laguna": {},
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama": {},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 128},
    "longcat_flash": {
        **MLA,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "expert_ffn_hidden_size": 64,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "mamba": {},
    "mamba2": {"num_heads": 4, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "mellum": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "moe_layer_freq": [0, 1, 1],
        "layernorm_epsilon": 1e-5,
        **dict.fromkeys(("v_head_dim", "swa_head_dim", "swa_v_head_dim"), 32),
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": 16,
        "add_swa_attention_sink_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
            for name in ("full_attention", "sliding_attention")
        },
        **dict.fromkeys(("rope_theta", "swa_rope_theta"), 10_000.0),
    },
    "minicpm3": MLA,
    "minimax_m2": {
        "use_routing_bias": True,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "scoring_func": "sigmoid",
    },
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "nanbeige": {},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 64,
        "sliding_window": None,  # vLLM heeds it, Hugging Face's model does not
        "time_step_min": 1e-9,  # Hugging Face's model alone limits the time step by it
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "olmoe": {},
    "opt": {},
    "phi": {},
    "phi3": {"sliding_window": None},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5": DELTA_NET,
    "qwen3_5_moe": {**DELTA_NET, "num_experts_per_tok": 4},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {
        **{name: size for name, size in DELTA_NET.items() if name != "rope_parameters"},
        "num_experts_per_tok": 4,
    },
    "qwen4_exp_text": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 4,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "adapter_rank": 8,
        "num_key_value_heads": 2,
        "attention_head_dim": 64,
    },
}
"""Model type -> what its configuration needs beside `SIZES`."""

WITH_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
"""The vision tower of a type whose text model is a part of it: it is loaded and not run."""

WITH_A_VISION_TOWER = ("qwen3_5", "qwen3_5_moe")
"""Types whose text model vLLM 0.26 has as a part of another alone."""

ON_A_GPU = (
    *("qwen3_5", "kimi_linear", "nemotron_h", "olmo_hybrid", "minimax_m2", "mimo_v2_flash", "qwen3_5_moe", "jamba"),
    *("qwen3_next", "deepseek_v32", "glm_moe_dsa", "hy_v3", "llama", "mamba", "falcon_mamba"),
)
"""What a call on a GPU tries: types that a CPU lacks a kernel for, and one that it does not."""

RENAMED: Mapping[str, Mapping[str, str]] = {
    "kimi_linear": {"layers.0.block_sparse_moe.": "layers.0.mlp."},  # the layer that is dense
    "olmo_hybrid": {
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    },
}
"""Model type -> parts of the names of tensors that Hugging Face saves -> what vLLM and Hugging Face both load."""

SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Types with sparse attention, whose kernels for GPUs have blocks of 64 tokens. vLLM's layers with experts differ from
Hugging Face's by more than a wrong row might: rows that do are compared with vLLM's own modules."""

IN_BFLOAT16 = (*SPARSE, "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Types whose kernels for GPUs take nothing else. All experts are chosen: rounding may change a choice among them."""

LIKE_OWN_MODULES = "as its modules"
"""The result of a type whose rows are those of forward hooks on vLLM's own modules, bit for bit."""

HUGGING_FACE = "Hugging Face: "
"""Begins the note of a type whose model Hugging Face's own code does not make."""

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
"""Shows the results of both documents."""

LIMIT_S = patience(240)
"""Seconds for one type, the start of its process included."""


def make_model(model_type: str, folder: Path) -> None:
    """Write the tiny model of a type, its norms and biases perturbed: ones and zeros would hide a missing one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[model_type]
    has_vision = model_type in WITH_A_VISION_TOWER
    cls = whole.sub_configs["text_config"] if has_vision else whole
    known = cls().to_dict() | dict.fromkeys(getattr(cls, "attribute_map", {}))
    config = cls(**{name: value for name, value in SIZES.items() if name in known} | dict(TYPES[model_type]))
    if has_vision:
        config = whole(text_config=config.to_dict(), vision_config=WITH_VISION)
    torch.manual_seed(1)
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _rename(folder, RENAMED.get(model_type, {}))


def _rename(folder: Path, parts: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors") if parts else ():
        renamed = {}
        for name, tensor in load_file(path).items():
            for old, new in parts.items():
                name = name.replace(old, new)
            renamed[name] = tensor
        save_file(renamed, path, metadata={"format": "pt"})


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as a Markdown table."""
    head = ("model type", "class in vLLM", "result", "hook points", "largest error", "note")
    rows = [head, ("---",) * len(head)]
    for name, found in sorted(results.items()):
        error = f"{found['error']:.1e}{' (1 - cosine, bfloat16)' * ('dtype' in found)}" if "error" in found else ""
        shown = (found.get("model", ""), found["result"], found.get("hooks", ""), error, found.get("note", ""))
        rows.append((f"`{name}`", *shown))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """How many types have which result, in a sentence."""
    counts = Counter(found["result"] for found in results.values())
    return (
        f"Of {len(results)} types, {counts['equal']} are equal, {counts['as vLLM']} differ as vLLM itself does, "
        f"{counts['refused']} are refused, and {counts['not built']} could not be built at this size."
    )


def coverage(results: Mapping[str, Mapping[str, Any]], on_a_gpu: Mapping[str, Mapping[str, Any]]) -> str:
    """How much of what the installed vLLM lists was tried, on a CPU or on a GPU, in a sentence."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    found: dict[str, set[str]] = {}
    for name, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for model in (classes,) if isinstance(classes, str) else classes:
            found.setdefault(model, set()).update(each.get(name, {}).get("result", "") for each in (results, on_a_gpu))
    order = ("equal", "as vLLM", LIKE_OWN_MODULES, "refused", "not built", "not tried")
    best = [
        next((each for each in order if each in found.get(model, ())), order[-1]) for model in _TEXT_GENERATION_MODELS
    ]
    counts = Counter(best)
    return (
        f"vLLM lists {len(best)} architectures that generate text. Of these, {counts['equal']} are equal, "
        f"{counts['as vLLM']} as vLLM, {counts[LIKE_OWN_MODULES]} as its modules, {counts['refused']} refused, "
        f"{counts['not built']} not built, and {counts['not tried']} are not in the tables: "
        "Hugging Face's library has no such model to compare with."
    )


class Trials:
    """Tries types in a process of its own, replaced when a type kills it or may have left something behind in it.

    A context manager; its process, and what that started, ends with it.
    """

    def __init__(self) -> None:
        self._cache = TemporaryDirectory()
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._cache.cleanup()

    def try_type(self, model_type: str) -> dict[str, Any]:
        """Return the entry of one type for the results."""
        self._child = self._child or self._start()
        process, pipe = self._child
        pipe.send((model_type, self._cache.name))
        try:
            found: dict[str, Any] = pipe.recv() if pipe.poll(LIMIT_S) else {"note": f"not ready after {LIMIT_S} s"}
        except (EOFError, ConnectionError):
            process.join()
            found = {"note": f"the process ended with status {process.exitcode}"}
        found.setdefault("result", "not built")
        is_whole = found["result"] in ("equal", "as vLLM", LIKE_OWN_MODULES) or found["note"].startswith(HUGGING_FACE)
        if not is_whole or "BrokenProcessPool" in found.get("note", ""):
            self._stop()  # an engine that did not start may have left modules half imported
        return found

    def _start(self) -> tuple[BaseProcess, Connection]:
        from tests.engine.architecture_runs import serve

        context = get_context("spawn")
        pipe, end = context.Pipe()
        process = context.Process(target=serve, args=(end,))
        process.start()
        end.close()
        return process, pipe

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        process, pipe = child
        pipe.close()
        process.kill()
        process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # its helper: `serve` opens a group of its own


def main(arguments: list[str]) -> None:
    """Try what RESULTS.json lacks, or add what was judged."""
    if arguments[0] == "--merge":
        merge(json.loads(Path(arguments[1]).read_text()), document(arguments[2]))
        return
    num_at_once = int(arguments.pop(arguments.index("--at-once") + 1)) if "--at-once" in arguments else 1
    path, *names = (argument for argument in arguments if argument != "--at-once")
    try_types(Path(path), ON_A_GPU if names == ["gpu"] else names or list(TYPES), num_at_once)


def document(tried_with: str) -> Path:
    """The judged results of ``0.32`` (vLLM's release, on a CPU) or ``0.26_gpu``."""
    return Path(__file__).with_name(f"architectures_vllm_{tried_with}.json")


def judged() -> tuple[dict[str, Any], dict[str, Any]]:
    """What was found and judged, on a CPU and on an H100."""
    cpu, gpu = (json.loads(document(name).read_text()) for name in ("0.32", "0.26_gpu"))
    return cpu, gpu


def merge(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Add `found` to the judged results at `path`, and to the page; a type that is still not built keeps its note.

    Raises:
        SystemExit: A type is wrong.
    """
    wrong = sorted(name for name, each in found.items() if each["result"] == "WRONG")
    if wrong:
        raise SystemExit(f"wrong, to be mended first: {', '.join(wrong)}")
    before, old = _shown(), json.loads(path.read_text())
    unbuilt = {name for name, each in found.items() if each["result"] == old.get(name, {}).get("result") == "not built"}
    new = old | {name: each for name, each in found.items() if name not in unbuilt}
    path.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    page = PAGE.read_text()
    for was, now in zip(before, _shown(), strict=True):
        words = [was] if "\n" in was else was.split()  # a table, or a sentence that is wrapped
        page = re.sub(r"\s+".join(map(re.escape, words)), now.replace("\\", r"\\"), page)
    PAGE.write_text(page)


def _shown() -> list[str]:
    results, on_a_gpu = judged()
    return [summary(results), coverage(results, on_a_gpu), table(results), table(on_a_gpu)]


def try_types(path: Path, names: Sequence[str], num_at_once: int) -> None:
    """Add the entries that the document at `path` lacks; each is written at once."""
    results = json.loads(path.read_text()) if path.exists() else {}
    missing, lock = iter([name for name in names if name not in results]), threading.Lock()

    def work(_: int) -> None:
        with Trials() as trials:
            while True:
                with lock:
                    name = next(missing, None)
                if name is None:
                    return
                found = trials.try_type(name)
                with lock:
                    results[name] = found
                    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                    print(name, found, flush=True)

    with ThreadPoolExecutor(num_at_once) as pool:
        list(pool.map(work, range(num_at_once)))


if __name__ == "__main__":
    main(sys.argv[1:])
