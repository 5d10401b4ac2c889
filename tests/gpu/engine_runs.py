"""One engine run per process, for the GPU tests: ``python engine_runs.py MODE OUT.pt``.

MODE is stock (no headgate), graphs (all hook points of four layers) or eager (the same).

Every mode serves the same model folder with random weights and the same prompts; what it saw goes to OUT.pt. Of the
environment: GPU_TEST_MODEL is the folder, GPU_TEST_ENGINE other settings of the engine as JSON (two GPUs; or what it
takes to try these tests on a machine without one).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # sampling is greedy, and FlashInfer may be missing
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # it uses NVLink multicast: not on a shared host

MODEL = os.environ.get("GPU_TEST_MODEL", "/tmp/models/gemma3-4b")


def _sizes() -> tuple[int, int, int, int]:
    """Layers, hidden size, vocabulary and width of heads of `MODEL`; of Gemma-3-4B where tests are only collected."""
    path = Path(MODEL) / "config.json"
    if not path.exists():
        return 34, 2560, 262208, 2048
    config = json.loads(path.read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = heads * (config.get("head_dim") or hidden // heads)
    return config["num_hidden_layers"], hidden, config["vocab_size"], width


NUM_LAYERS, HIDDEN, VOCABULARY, HEADS_WIDTH = _sizes()
LAYERS = sorted({0, NUM_LAYERS * 3 // 20, NUM_LAYERS // 2, NUM_LAYERS - 1})
HOOKS = ("pre_attn", "post_attn", "post_mlp", "attn_out", "mlp_in", "mlp_out")
SITES = {**dict.fromkeys(HOOKS, LAYERS), "final_norm": "all"}
NUM_REQUESTS = int(os.environ.get("GPU_TEST_REQUESTS", "48"))
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    """Prompts of 1 to 700 tokens, so that steps mix chunks of prefill with decodes."""
    rng = random.Random(0)
    lengths = [1, 2, 700, *(rng.randrange(3, 300) for _ in range(NUM_REQUESTS - 3))]
    return [[rng.randrange(1000, min(VOCABULARY, 200_000)) for _ in range(length)] for length in lengths]


def headgate(sites: dict[str, Any]) -> dict[str, Any]:
    """The `additional_config` of a run with capture at `sites`."""
    capture = {
        "consumers": [{"name": "memory", "params": {"max_bytes": 64 << 30}}],
        "sites": sites,
        "fire_counter": True,
        "staging_bytes": 1 << 30,
    }
    return {"headgate": {"capture": capture}}


REPRODUCIBLE = {
    "inductor_compile_config": {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}
}
"""A `compilation_config` under which two engines that were compiled apart answer alike, bit for bit. Inductor chooses a
reduction's blocks, and with them the order of its additions, by timing candidates, unless it is told not to: stock
differs from stock otherwise (on an H200 in 2 to 3 of 40 requests)."""


def engine_settings(mode: str, config: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `LLM` for `mode` with the `additional_config`; chunked prefill, prefix caching and async scheduling
    as vLLM's defaults have them.
    """
    settings: dict[str, Any] = {
        "model": MODEL,
        "load_format": "dummy",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 8 << 30,  # fixed, so that several engines start on one GPU at once
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enforce_eager": mode == "eager",
        "additional_config": {} if mode == "stock" else config,
        "seed": 0,
        **({} if mode == "eager" else {"compilation_config": REPRODUCIBLE}),
    }
    return {**settings, **json.loads(os.environ.get("GPU_TEST_ENGINE", "{}"))}


def open_engine(mode: str, config: dict[str, Any]) -> Any:
    """`LLM` of `engine_settings`."""
    from vllm import LLM

    return LLM(**engine_settings(mode, config))


def params(mode: str, **kwargs: Any) -> Any:
    """Greedy sampling, with a capture of everything where the mode has it."""
    from vllm import SamplingParams

    made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **kwargs)
    if mode != "stock":
        made.capture = {"memory": {"hooks": SITES}}
    return made


def collect(outputs: Any) -> list[dict[str, Any]]:
    """Tokens and rows of each request, as plain tensors."""
    collected = []
    for output in outputs:
        entry: dict[str, Any] = {"prompt": list(output.prompt_token_ids), "tokens": list(output.outputs[0].token_ids)}
        results = getattr(output, "capture_results", None)
        if results:
            result = results["memory"]
            entry["status"], entry["error"] = result.status, result.error
            if (captured := result.payload) is not None:
                entry["rows"] = {site.name: captured.rows[site] for site in captured.sites}
                entry["positions"] = torch.from_numpy(captured.positions)
                entry["token_ids"] = torch.from_numpy(captured.token_ids)
        collected.append(entry)
    return collected


def serve(mode: str, llm: Any, replay: str | None) -> dict[str, Any]:
    """Run all prompts in one batch; in eager mode the tokens of another run as prompts, so that rows compare."""
    requests = prompts()
    kwargs: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    if replay:
        recorded = torch.load(replay, weights_only=False)
        requests = [entry["prompt"] + entry["tokens"][:-1] for entry in recorded["requests"]]
        kwargs = {"max_tokens": 1}
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests], params(mode, **kwargs), use_tqdm=False)
    return {"requests": collect(outputs), "stats": llm.collective_rpc("headgate_stats") if mode != "stock" else None}


def main() -> None:
    """Serve and measure one mode."""
    mode, out = sys.argv[1], sys.argv[2]
    started = time.perf_counter()
    llm = open_engine(mode, headgate(SITES))
    result = {"start_s": time.perf_counter() - started, **serve(mode, llm, os.environ.get("GPU_TEST_REPLAY"))}
    torch.save(result, out)
    print("RAN", mode, f"start {result['start_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
