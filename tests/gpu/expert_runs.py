"""One engine whose experts are spread over two GPUs: ``expert_runs.py MODE OUT.pt``; MODE is one of `MODES`.

All requests are answered at once, and then some one after the other, so that of two data-parallel engines one has
nothing but idle steps, in which it still computes its experts for the other. What was answered and captured goes to
OUT.pt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from draft_runs import SMALL, TIERS, entry_of

from tests.engine.drafting import CONSUMERS, SITES, Asked, requests
from tests.engine.tiny_models import tiny_model

FAMILY = "qwen3_moe_all"
"""Every expert of it is chosen: where rounding decides which are, rows of two machines differ."""
EXPERTS = {"enable_expert_parallel": True}
BALANCED = {"window_size": 8, "step_interval": 16, "num_redundant_experts": 2}
MODES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, **EXPERTS},
    "data": {"data_parallel_size": 2, **EXPERTS},
    "balanced": {"tensor_parallel_size": 2, **EXPERTS, "enable_eplb": True, "eplb_config": BALANCED},
}
ROUTED = {"router_logits": "all", "experts": "all"}
"""Sites of experts. Routers of data-parallel ranks see tokens of all: there `experts` is refused at start-up."""
NUM_ALONE = 6


def sites_of(mode: str) -> dict[str, Any]:
    """What a mode captures."""
    routed = {"router_logits": "all"} if "data_parallel_size" in MODES[mode] else ROUTED
    return {**SITES, **routed}


def asked() -> list[Asked]:
    """The requests; those that stop at a token need an answer that is known before."""
    return [each for each in requests() if each.stop_at is None]


def is_steered(index: int) -> bool:
    """One of three requests is."""
    return index % 3 == 0


def open_engine(mode: str) -> Any:
    """`AsyncLLM` of a mode, compiled and with CUDA graphs, with few KV blocks; async scheduling as vLLM has it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    headgate = {
        "capture": {"consumers": CONSUMERS, "sites": sites_of(mode)},
        "steering": {"sites": {"post_mlp": "all"}},
    }
    settings: dict[str, Any] = {
        "model": str(tiny_model(FAMILY)),
        **SMALL,
        "dtype": "float32",
        "additional_config": {"headgate": headgate},
        **MODES[mode],
    }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings | json.loads(os.environ.get("GPU_TEST_ENGINE", "{}"))))


async def answer(engine: Any, index: int, each: Asked, name: str, sites: dict[str, Any]) -> dict[str, Any]:
    """What came of one request."""
    fields: dict[str, Any] = TIERS.fields() if is_steered(index) else {}
    params = each.params([], capture=each.capture(sites), capture_wait=True, **fields)
    async for found in engine.generate({"prompt_token_ids": list(each.prompt)}, params, request_id=f"{name}-{index}"):
        output = found
    return entry_of(output)


async def serve(mode: str, given: Sequence[Asked]) -> dict[str, Any]:
    """All requests at once, and some of them again, alone."""
    engine, sites = open_engine(mode), sites_of(mode)
    try:
        together = await asyncio.gather(
            *(answer(engine, index, each, "together", sites) for index, each in enumerate(given))
        )
        alone = [await answer(engine, index, each, "alone", sites) for index, each in enumerate(given[:NUM_ALONE])]
        stats = await engine.collective_rpc("headgate_stats")
        is_async = engine.vllm_config.scheduler_config.async_scheduling
    finally:
        engine.shutdown()
    return {"together": together, "alone": alone, "stats": stats, "is_async": is_async}


def main(mode: str, out: str) -> None:
    """Serve one mode."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # sampling is greedy, and FlashInfer may be missing
    found = asyncio.run(serve(mode, asked()))
    torch.save(found, out)
    print(f"RAN {mode}: async {found['is_async']}, {len(found['together'])} requests")


if __name__ == "__main__":
    main(*sys.argv[1:])
