"""One engine of `test_lora_fp8_gpu`: ``python lora_fp8_runs.py KIND-MODE OUT.pt``.

KIND is fp8 (linear layers quantised when they are loaded) or lora (an adapter, GPU_TEST_ADAPTER). MODE is stock (no
headgate), graphs (compiled, CUDA graphs) or eager; the last two capture and steer at every layer. GPU_TEST_MODEL is the
model's folder. One of three requests asks for nothing, one captures, one captures and steers; the latter two use the
adapter where there is one. The engine core is in this process, so that batches, and with them the last bits of sums,
do not depend on when requests arrive.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import numpy as np
import torch

LENGTHS = (1, 2, 3, 300, 150, 200)
NUM_REQUESTS = 24
MAX_TOKENS = 16
SITES: dict[str, Any] = {"pre_attn": "all", "post_mlp": "all", "final_norm": "all"}
STRENGTH = 0.5
ADDED = "post_mlp"
OP_LAYER = 1
"""Every second request that steers adds its vector to this layer by an operation, which must give the same."""


def is_plain(index: int) -> bool:
    """Whether a request asks for nothing."""
    return index % 3 == 0


def is_steered(index: int) -> bool:
    """Whether a request steers."""
    return index % 3 == 2


def vectors(index: int, num_layers: int, hidden: int) -> np.ndarray[Any, Any]:
    """What one request adds to the stream behind each layer, fp32 ``[num_layers, hidden]``."""
    return np.random.default_rng(index).normal(0, STRENGTH, (num_layers, hidden)).astype(np.float32)


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts of 1 to 300 tokens, so that steps mix chunks of prompts with single tokens."""
    rng = random.Random(0)
    lengths = [*LENGTHS, *(rng.randrange(4, 120) for _ in range(NUM_REQUESTS - len(LENGTHS)))]
    return [[rng.randrange(10, vocabulary) for _ in range(length)] for length in lengths]


def params(index: int, max_tokens: int, *, is_stock: bool) -> Any:
    """Greedy sampling with five logprobs, and what the request asks of headgate."""
    from engine_runs import HIDDEN, NUM_LAYERS
    from vllm import SamplingParams

    made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens, logprobs=5)
    if not is_stock and not is_plain(index):
        made.capture = {"memory": {"hooks": SITES, "positions": "all"}}
    if not is_stock and is_steered(index):
        added = dict(enumerate(vectors(index, NUM_LAYERS, HIDDEN)))
        if index % 2:
            at = f"{OP_LAYER}.{ADDED}"
            made.steering_ops = [{"at": at, "method": "additive", "vector": added.pop(OP_LAYER)}]
        made.steering_vectors = {ADDED: added}
    return made


def serve(llm: Any, *, is_stock: bool) -> list[dict[str, Any]]:
    """All prompts in one batch; with GPU_TEST_REPLAY what another run generated is part of the prompts."""
    from engine_runs import VOCABULARY, collect
    from vllm.lora.request import LoRARequest

    requests, max_tokens = prompts(VOCABULARY), MAX_TOKENS
    if replay := os.environ.get("GPU_TEST_REPLAY"):
        recorded = torch.load(replay, weights_only=False)["requests"]
        requests, max_tokens = [entry["prompt"] + entry["tokens"][:-1] for entry in recorded], 1
    made = [params(index, max_tokens, is_stock=is_stock) for index in range(len(requests))]
    adapter = os.environ.get("GPU_TEST_ADAPTER")
    lora = [None if is_plain(index) or not adapter else LoRARequest("ours", 1, adapter) for index in range(len(made))]
    given = [{"prompt_token_ids": ids} for ids in requests]
    outputs = llm.generate(given, made, use_tqdm=False, lora_request=lora if adapter else None)
    return [{**entry, "logprobs": logprobs(output)} for entry, output in zip(collect(outputs), outputs, strict=True)]


def logprobs(output: Any) -> list[list[tuple[int, float]]]:
    """Token and logprob of the likeliest, at each step."""
    return [sorted((token, one.logprob) for token, one in step.items()) for step in output.outputs[0].logprobs]


def main() -> None:
    """Serve one kind in one mode."""
    (kind, _, mode), out = sys.argv[1].partition("-"), sys.argv[2]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CACHE_ROOT"] = f"{out}.cache"  # each compiles for itself
    if mode == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    special = {"quantization": "fp8"} if kind == "fp8" else {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    usual = {
        "kv_cache_memory_bytes": 1 << 30,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "load_format": "auto",
    }
    given = json.loads(os.environ.get("GPU_TEST_ENGINE", "{}"))
    os.environ["GPU_TEST_ENGINE"] = json.dumps(usual | special | given)
    from engine_runs import headgate, open_engine

    started, config = time.perf_counter(), headgate(SITES)
    config["headgate"]["steering"] = {
        "sites": {ADDED: "all"},
        "op_sites": {ADDED: [OP_LAYER]},
        "fire_counter": True,
    }
    llm = open_engine(mode, config)
    start_s = time.perf_counter() - started
    result: dict[str, Any] = {"start_s": start_s, "requests": serve(llm, is_stock=mode == "stock")}
    if mode != "stock":
        result["stats"] = llm.collective_rpc("headgate_stats")
    torch.save(result, out)
    print("RAN", sys.argv[1], f"start {start_s:.1f} s", flush=True)


if __name__ == "__main__":
    main()
