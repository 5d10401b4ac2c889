"""One engine with speculative decoding: ``draft_runs.py MODE OUT.pt``, with the greedy answers in DRAFT_ANSWERS.

MODE is a method, and how it runs: see `MODES`. One whose name ends with ``stock`` is without headgate. What the engine
answered and captured goes to OUT.pt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.conftest import start_llm
from tests.engine.drafting import (
    CONFIG,
    NUM_DRAFTS,
    SITES,
    Asked,
    Drafter,
    counts,
    eagle_folder,
    mtp_folder,
    requests,
)
from tests.engine.steering_cases import Tiers, sites_of, vectors
from tests.engine.tiny_models import HIDDEN, tiny_model

ROUNDS = 3
"""How often all requests are asked: what was captured before must leave nothing behind."""


class Mode(NamedTuple):
    """How drafts are made, and by which model runner they are verified."""

    method: str
    is_v2: bool = False
    is_eager: bool = True
    dictates: bool = False
    steers: bool = False
    is_gated: bool = False
    family: str = "llama"

    @property
    def answers(self) -> str:
        """Which greedy answers its drafts are made of."""
        return "steered" if self.steers else "plain"


MODES = {
    "ngram": Mode("ngram", dictates=True),
    "ngram_gpu": Mode("ngram_gpu"),
    "eagle v1": Mode("eagle"),
    "eagle graphs": Mode("eagle", is_v2=True, is_eager=False, dictates=True),
    "eagle steered": Mode("eagle", is_v2=True, is_eager=False, dictates=True, steers=True),
    "eagle gates": Mode("eagle", is_v2=True, is_eager=False, dictates=True, is_gated=True),
    "eagle v1 gates": Mode("eagle", is_gated=True),
    "eagle3": Mode("eagle3", is_v2=True),
    "eagle3 stock": Mode("eagle3", is_v2=True),
    "mtp": Mode("deepseek_mtp", is_v2=True, is_eager=False, family="deepseek_v3_all"),
    "mtp v1": Mode("deepseek_mtp", family="deepseek_v3_all"),
}
MAX_ERROR = 5e-3
"""Relative, of fp32 on a GPU, where attention multiplies with the ten bits of TF32, against fp32 on its host (0.0024 on
an H100); rows of neighbouring positions differ by their whole size."""
SMALL = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 30,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 28,  # fixed, so that several engines start on one GPU at once
    "enable_prefix_caching": True,
    "block_size": 16,
}
"""An engine with few KV blocks, so that requests are preempted, and steps of few tokens."""
STEERED = sites_of(HookPoint.POST_MLP)
TIERS = Tiers(prefill=vectors(STEERED, 2, 0.5), decode=vectors(STEERED, 3, 0.5))


BEFORE, READ, AFTER = sites_of(HookPoint.POST_MLP, layers=range(3))
WEIGHT = vectors([READ], 11, HIDDEN**-0.5)[READ].tolist()
"""Of the probe that all gates read."""


class Scores(NamedTuple):
    """The probe's scores on rows of plain answers."""

    median: float
    high: float
    spread: float


def gates_of(asked: Asked, scores: Scores) -> list[dict[str, Any]]:
    """A request's gates: what each strength is, follows from all rows before. One that acts early needs two tokens."""

    def gate(name: str, then: Site, above: float, pool: Any, scope: str = "this_token", **more: float) -> Any:
        acts = vectors([then], len(name), 0.3)[then].tolist()
        when = {"probe": {"at": READ.name, "weight": WEIGHT, "bias": 0.0}, "above": above, "pool": pool, **more}
        return {"name": name, "when": when, "then": {"vectors": {"post_mlp": {then.layer: acts}}}, "scope": scope}

    found = [
        gate("average", AFTER, scores.median, {"ema": 0.25}, hysteresis=scores.spread / 4),
        gate("latch", AFTER, scores.high, {"ema": 0.5}, "rest_of_request"),
        gate("prompt", BEFORE, scores.median, "prompt_mean", "rest_of_request"),
    ]
    return found if len(asked.prompt) > 1 else found[:2]


def asked_of(mode: Mode) -> list[Asked]:
    """The requests of a mode; prompts of one token begin beside the drafts of others."""
    if mode.steers:
        return requests()[:8]
    short = [Asked((9,), "some"), Asked((11,), "all")]
    if mode.family != "llama":  # the answers at whose tokens requests stop are Llama's
        return [*(each for each in requests() if each.stop_at is None), *short]
    return [*requests()[:8], *short] if mode.is_gated else [*requests(), *short]


def drafts_of(method: str, llama: Path | None = None) -> dict[str, Any]:
    """The ``speculative_config`` of a method, for a folder of Llama's (default: the tiny one)."""
    if method.startswith("ngram"):
        return {**CONFIG, "method": method}
    llama = llama or tiny_model("llama")
    folder = llama if method == "draft_model" else eagle_folder(method, llama)
    model = {} if method.endswith("mtp") else {"model": str(folder)}
    return {"method": method, **model, "num_speculative_tokens": NUM_DRAFTS}


def open_engine(mode: Mode, **changes: Any) -> Any:
    """`LLM` of a mode, with few KV blocks; async scheduling as vLLM's defaults have it. `changes` are settings."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(mode.is_v2))
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # sampling is greedy, and FlashInfer may be missing
    capture = {"consumers": [{"name": "memory", "params": {"max_bytes": 1 << 30}}], "sites": sites_of_rows(mode)}
    sites = {"post_mlp": "all"}
    steering = {"steering": {"sites": sites, "op_sites": sites}} if mode.steers or mode.is_gated else {}
    settings: dict[str, Any] = {
        **SMALL,
        "dtype": "float32" if mode.family == "llama" else "bfloat16",  # MLA has no kernel for float32 on a GPU
        "enforce_eager": mode.is_eager,
        "disable_log_stats": False,
        "in_process": True,  # drafts are dictated from here
        "speculative_config": drafts_of(mode.method),
        "additional_config": {"headgate": {"capture": capture, **steering}},
        **changes,
    }
    model = mtp_folder(tiny_model(mode.family)) if mode.method.endswith("mtp") else tiny_model(mode.family)
    return start_llm(**{"model": model, **settings} | json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")))


def sites_of_rows(mode: Mode) -> dict[str, Any]:
    """The sites that a mode captures: latent attention has no rows of heads."""
    return SITES if mode.family == "llama" else {hook: layers for hook, layers in SITES.items() if hook != "hook_z"}


def fields_of(mode: Mode, asked: Asked, scores: Scores) -> dict[str, Any]:
    """What a request captures, and what it steers with."""
    found: dict[str, Any] = {"capture": asked.capture(sites_of_rows(mode))}
    if mode.is_gated:
        found |= {"steering_gates": gates_of(asked, scores), "return_steering_trace": True}
    return {**found, **TIERS.fields()} if mode.steers else found


def entry_of(output: Any, *, is_captured: bool = True) -> dict[str, Any]:
    """What came of a request: its tokens, and what was captured of it."""
    entry: dict[str, Any] = {"tokens": list(output.outputs[0].token_ids)}
    if is_captured:
        result = output.capture_results["memory"]
        entry |= {"status": result.status, "error": result.error}
        if (captured := result.payload) is not None:
            entry["rows"] = dict(captured.rows)
            entry["positions"], entry["token_ids"] = captured.positions.copy(), captured.token_ids.copy()
    return entry


def told_of(llm: Any) -> dict[str, Any]:
    """The engine's ``counts``, without vLLM's prefix, and whether it schedules ``async``."""
    return {"counts": counts(llm), "async": llm.llm_engine.vllm_config.scheduler_config.async_scheduling}


def described(told: Mapping[str, Any]) -> str:
    """One line of `told_of`."""
    found = told["counts"]
    drafted = found["spec_decode_num_draft_tokens"], found["spec_decode_num_accepted_tokens"]
    return f"async {told['async']}, drafted and accepted {drafted}, preempted {found['num_preemptions']}"


def main(name: str, out: str) -> None:
    """Have all requests answered, some times, and save what came."""
    mode, is_stock = MODES[name], name.endswith("stock")
    llm, asked = open_engine(mode, **({"additional_config": {}} if is_stock else {})), asked_of(mode)
    known = torch.load(os.environ["DRAFT_ANSWERS"], weights_only=False)
    given = known[mode.answers]
    drafts = list(given.items())
    if mode.dictates:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        Drafter(drafts, {each.prompt: each.rights for each in asked}).install(runner)
    scores = Scores(*known["scores"])
    params = [each.params(given[each.prompt], **({} if is_stock else fields_of(mode, each, scores))) for each in asked]
    rounds = []
    for _ in range(ROUNDS):
        found = []
        for output in llm.generate([{"prompt_token_ids": list(each.prompt)} for each in asked], params, use_tqdm=False):
            entry = entry_of(output, is_captured=not is_stock)
            if mode.is_gated:
                entry["trace"] = output.outputs[0].steering_trace
            found.append(entry)
        rounds.append(found)
        if mode.is_gated:  # the first answers differ from plain ones, of which their drafts were
            drafts += [(each.prompt, entry["tokens"]) for each, entry in zip(asked, found, strict=True)]
    torch.save({"rounds": rounds, **told_of(llm)}, out)
    print(f"RAN {name}: {described(told_of(llm))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
