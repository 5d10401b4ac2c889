"""One engine run per process, for the GPU tests: ``python engine_runs.py MODE OUT.pt``.

MODE is stock (no headgate), graphs (all hook points of four layers), eager (the same) or all (post_mlp of all layers).

Every mode serves the same model folder with random weights and the same prompts; what it saw goes to OUT.pt.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from typing import Any

import torch

MODEL = os.environ.get("HEADGATE_GPU_MODEL", "/tmp/models/gemma3-4b")
NUM_LAYERS = 34
LAYERS = [0, 5, 17, 33]
HOOKS = ("pre_attn", "post_attn", "post_mlp", "attn_out", "mlp_in", "mlp_out")
SITES = {**dict.fromkeys(HOOKS, LAYERS), "final_norm": "all"}
BENCH_SITES = {"post_mlp": "all"}
NUM_REQUESTS = 48
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    """Prompts of 1 to 700 tokens, so that steps mix chunks of prefill with decodes."""
    rng = random.Random(0)
    lengths = [1, 2, 700, *(rng.randrange(3, 300) for _ in range(NUM_REQUESTS - 3))]
    return [[rng.randrange(1000, 200_000) for _ in range(length)] for length in lengths]


def headgate(sites: dict[str, Any]) -> dict[str, Any]:
    """The `additional_config` of a run with capture."""
    capture = {
        "consumers": [{"name": "memory", "params": {"max_bytes": 64 << 30}}],
        "sites": sites,
        "fire_counter": sites is SITES,
        "staging_bytes": 1 << 30,
    }
    return {"headgate": {"capture": capture}}


def open_engine(mode: str) -> Any:
    """`LLM` for `mode`; chunked prefill, prefix caching and async scheduling as vLLM's defaults have them."""
    from vllm import LLM

    config: dict[str, Any] = {}
    if mode in ("graphs", "eager"):
        config = headgate(SITES)
    elif mode == "all":
        config = headgate(BENCH_SITES)
    return LLM(
        MODEL,
        load_format="dummy",
        max_model_len=4096,
        gpu_memory_utilization=0.6,
        max_num_seqs=64,
        max_num_batched_tokens=int(os.environ.get("HEADGATE_GPU_BATCH", "2048" if mode != "all" else "8192")),
        enforce_eager=mode == "eager",
        additional_config=config,
        seed=0,
    )


def params(mode: str, **kwargs: Any) -> Any:
    """Greedy sampling, with a capture of everything where the mode has it."""
    from vllm import SamplingParams

    made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **kwargs)
    if mode in ("graphs", "eager"):
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
            captured = result.payload
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


def tpot(llm: Any, make: Any, batch: int, prompt: int = 64, repeats: int = 5) -> float:
    """Median milliseconds per output token at `batch` requests in flight: two lengths, so that prefill cancels."""
    rng, seconds = random.Random(1), {}
    for tokens in (1, 129):
        taken = []
        for _ in range(repeats):
            ids = [{"prompt_token_ids": [rng.randrange(1000, 200_000) for _ in range(prompt)]} for _ in range(batch)]
            start = time.perf_counter()
            llm.generate(ids, make(tokens), use_tqdm=False)
            taken.append(time.perf_counter() - start)
        seconds[tokens] = statistics.median(taken[1:])
    return (seconds[129] - seconds[1]) / 128 * 1e3


def prefill(llm: Any, make: Any) -> float:
    """Median milliseconds for 16 prompts of 1024 tokens."""
    rng, taken = random.Random(2), []
    for _ in range(5):
        ids = [{"prompt_token_ids": [rng.randrange(1000, 200_000) for _ in range(1024)]} for _ in range(16)]
        start = time.perf_counter()
        llm.generate(ids, make(1), use_tqdm=False)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:]) * 1e3


def bench(mode: str, llm: Any) -> dict[str, float]:
    """TPOT at 1, 16 and 64 in flight, prefill; idle, and for mode ``all`` also while capturing everything."""

    def idle(tokens: int) -> Any:
        return params("stock", max_tokens=tokens)

    def active(tokens: int) -> Any:
        made = params("stock", max_tokens=tokens)
        made.capture = {"memory": {"hooks": BENCH_SITES}}
        return made

    figures = {f"idle bs{batch}": tpot(llm, idle, batch) for batch in (1, 16, 64)}
    figures["idle prefill"] = prefill(llm, idle)
    if mode == "all":
        figures |= {f"active bs{batch}": tpot(llm, active, batch) for batch in (1, 16, 64)}
        figures["active prefill"] = prefill(llm, active)
    return figures


def main() -> None:
    """Serve and measure one mode."""
    mode, out = sys.argv[1], sys.argv[2]
    started = time.perf_counter()
    llm = open_engine(mode)
    result = {"start_s": time.perf_counter() - started, **serve(mode, llm, os.environ.get("HEADGATE_GPU_REPLAY"))}
    if mode in ("stock", "all"):
        result["bench"] = bench(mode, llm)
    torch.save(result, out)
    print("RAN", mode, f"start {result['start_s']:.1f} s", result.get("bench"), flush=True)


if __name__ == "__main__":
    main()
