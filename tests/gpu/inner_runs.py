"""Rows within attention and the MLP of a tiny model, bfloat16 under CUDA graphs: ``inner_runs.py FAMILY OUT.pt``."""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch

from headgate.capture.schema.sites import READ_ONLY, HookPoint
from tests.conftest import start_llm
from tests.engine.test_inner_sites import FAMILIES, layers_of
from tests.engine.tiny_models import tiny_model

NUM_REQUESTS, NUM_OUTPUT = 48, 24
ABLATED, EVERY = (8, 40), 3
"""Columns of the queries of layer 1 that are 0 in every third request."""


def requests_of(family: str) -> list[tuple[list[int], list[HookPoint]]]:
    """Prompts of any length, each with some of the hook points: rows of different widths share every step."""
    draw = random.Random(4)
    hooks = [*FAMILIES[family], HookPoint.POST_MLP]
    return [
        ([draw.randrange(3, 500) for _ in range(draw.randint(1, 90))], draw.sample(hooks, draw.randint(1, len(hooks))))
        for _ in range(NUM_REQUESTS)
    ]


def sites_that_act(family: str) -> dict[HookPoint, list[int]]:
    """Layers of the hook points where operations can act."""
    return {hook: layers_of(family, hook) for hook in FAMILIES[family] if hook not in READ_ONLY}


def main(family: str, out: str) -> None:
    """Have all requests answered at once, and save their tokens and rows."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # sampling is greedy, and FlashInfer may be missing
    from vllm import SamplingParams

    hooks = [*FAMILIES[family], HookPoint.POST_MLP]
    sites = {hook.value: layers_of(family, hook) for hook in hooks}
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": None,
        "additional_config": {
            "headgate": {
                "capture": {"consumers": [{"name": "memory"}], "sites": sites},
                "steering": {"op_sites": {hook.value: layers for hook, layers in sites_that_act(family).items()}},
            }
        },
    }
    llm = start_llm(model=tiny_model(family), **settings | json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")))
    requests = requests_of(family)
    params = []
    for number, (_, wanted) in enumerate(requests):
        made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT)
        made.capture = {"memory": {"hooks": {hook.value: sites[hook.value] for hook in wanted}}}
        if number % EVERY == 0:
            made.steering_ops = [{"at": "1.q", "method": "replace", "columns": list(ABLATED), "value": 0}]
        params.append(made)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    found = []
    for answer in answers:
        result = answer.capture_results["memory"]
        assert result.status == "ok", result.error
        found.append((list(answer.prompt_token_ids), list(answer.outputs[0].token_ids), dict(result.payload.rows)))
    torch.save(found, out)
    print(f"RAN {family}: {len(found)} requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
