"""One engine with speculative decoding: ``draft_runs.py MODE OUT.pt``, with the greedy answers in DRAFT_ANSWERS.

MODE is a method, and how it runs: see `MODES`. One whose name ends with ``stock`` is without headgate. What the engine
answered and captured goes to OUT.pt.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple

import torch

from headgate.capture.schema.sites import HookPoint
from tests.conftest import start_llm
from tests.engine.drafting import CONFIG, NUM_DRAFTS, SITES, Asked, Drafter, eagle_folder, requests
from tests.engine.steering_cases import Tiers, sites_of, vectors
from tests.engine.tiny_models import tiny_model

ROUNDS = 3
"""How often all requests are asked: what was captured before must leave nothing behind."""


class Mode(NamedTuple):
    """How drafts are made, and by which model runner they are verified."""

    method: str
    is_v2: bool = False
    is_eager: bool = True
    dictates: bool = False
    steers: bool = False


MODES = {
    "ngram": Mode("ngram", dictates=True),
    "ngram_gpu": Mode("ngram_gpu"),
    "eagle v1": Mode("eagle"),
    "eagle graphs": Mode("eagle", is_v2=True, is_eager=False, dictates=True),
    "eagle steered": Mode("eagle", is_v2=True, is_eager=False, dictates=True, steers=True),
    "eagle3": Mode("eagle3", is_v2=True),
    "eagle3 stock": Mode("eagle3", is_v2=True),
}
STEERED = sites_of(HookPoint.POST_MLP)
TIERS = Tiers(prefill=vectors(STEERED, 2, 0.5), decode=vectors(STEERED, 3, 0.5))


def asked_of(mode: Mode) -> list[Asked]:
    """The requests of a mode."""
    return requests()[:8] if mode.steers else requests()


def drafts_of(method: str) -> dict[str, Any]:
    """The ``speculative_config`` of a method."""
    if method.startswith("ngram"):
        return {**CONFIG, "method": method}
    return {
        "method": method,
        "model": str(eagle_folder(method, tiny_model("llama"))),
        "num_speculative_tokens": NUM_DRAFTS,
    }


def open_engine(name: str) -> Any:
    """`LLM` of a mode, with few KV blocks; async scheduling as vLLM's defaults have it."""
    mode = MODES[name]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(mode.is_v2))
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # sampling is greedy, and FlashInfer may be missing
    capture = {"consumers": [{"name": "memory", "params": {"max_bytes": 1 << 30}}], "sites": SITES}
    steering = {"steering": {"sites": {"post_mlp": "all"}}} if mode.steers else {}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "enforce_eager": mode.is_eager,
        "num_gpu_blocks_override": 30,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 28,  # fixed, so that several engines start on one GPU at once
        "enable_prefix_caching": True,
        "block_size": 16,
        "disable_log_stats": False,
        "in_process": True,  # drafts are dictated from here
        "speculative_config": drafts_of(mode.method),
        "additional_config": {} if name.endswith("stock") else {"headgate": {"capture": capture, **steering}},
    }
    return start_llm(model=tiny_model("llama"), **settings | json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")))


def main(name: str, out: str) -> None:
    """Have all requests answered, some times, and save what came."""
    mode, is_stock = MODES[name], name.endswith("stock")
    llm, asked = open_engine(name), asked_of(mode)
    given = torch.load(os.environ["DRAFT_ANSWERS"], weights_only=False)["steered" if mode.steers else "plain"]
    if mode.dictates:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        Drafter(list(given.items()), {each.prompt: each.rights for each in asked}).install(runner)
    steering = TIERS.fields() if mode.steers else {}
    params = [
        each.params(given[each.prompt], **({} if is_stock else {"capture": each.capture}), **steering) for each in asked
    ]
    rounds = []
    for _ in range(ROUNDS):
        found = []
        for output in llm.generate([{"prompt_token_ids": list(each.prompt)} for each in asked], params, use_tqdm=False):
            entry: dict[str, Any] = {"tokens": list(output.outputs[0].token_ids)}
            if not is_stock:
                result = output.capture_results["memory"]
                entry |= {"status": result.status, "error": result.error}
                if (captured := result.payload) is not None:
                    entry["rows"] = dict(captured.rows)
                    entry["positions"], entry["token_ids"] = captured.positions.copy(), captured.token_ids.copy()
            found.append(entry)
        rounds.append(found)
    counts = {
        metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    is_async = llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    torch.save({"rounds": rounds, "counts": counts, "async": is_async}, out)
    drafted = counts["spec_decode_num_draft_tokens"], counts["spec_decode_num_accepted_tokens"]
    print(f"RAN {name}: async {is_async}, drafted and accepted {drafted}, preempted {counts['num_preemptions']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
