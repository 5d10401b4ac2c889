"""One engine of `test_quantised_gpu`: ``python quantised_runs.py METHOD-MODE OUT.pt``.

METHOD is one of `tests.engine.quantised_models.METHODS`. MODE is stock (no headgate) or ours, which captures every
hook point and steers. QUANTISED_FOLDER has the models. Requests of each kind of `KINDS` run together in the second.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.engine.hf_reference import Steering
from tests.engine.quantised_models import HIDDEN, LAYERS, METHODS, VOCABULARY, WIDE
from tests.fakes.saes import TinySae

NUM_PROMPTS, NUM_OUTPUT = 3, 6
STEERED = Site(1, HookPoint.POST_MLP)
INNER = {"llama": Site(1, HookPoint.MLP_ACT), "gpt_oss": Site(1, HookPoint.ATTN_OUT)}
KINDS = ("plain", "captured", "vector", "inner", "operation", "gate", "feature")
FEATURE = 3
SAE = TinySae(width=HIDDEN, seed=5)
HEADS = (HookPoint.Q_PRE, HookPoint.K_PRE, HookPoint.Q, HookPoint.K, HookPoint.V)
STREAM = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
BRANCHES = (HookPoint.ATTN_IN, HookPoint.HOOK_Z, HookPoint.ATTN_OUT, HookPoint.MLP_IN, HookPoint.MLP_OUT)


def hooks_of(family: str) -> list[HookPoint]:
    """The hook points that are captured; experts have no neurons."""
    return [*STREAM, *BRANCHES, *HEADS, *([HookPoint.MLP_ACT] if family == "llama" else [])]


def prompts() -> list[list[int]]:
    """Prompts of 1 to 90 tokens, so that steps mix chunks of prompts with single tokens."""
    draw = random.Random(2)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (90, 1, 33)[:NUM_PROMPTS]]


def vector(width: int) -> np.ndarray[Any, Any]:
    """What is added, float32 ``[width]``."""
    return np.random.default_rng(width).normal(0, 0.5, width).astype(np.float32)


def direction() -> np.ndarray[Any, Any]:
    """What an operation takes out, float32 ``[hidden]``."""
    return np.random.default_rng(9).standard_normal(HIDDEN).astype(np.float32)


def steering_of(kind: str, family: str) -> Steering:
    """What Hugging Face's model does for a request of a kind."""
    if kind == "operation":
        document = {"method": "ablate", "vector": direction(), "scale": 1.0}
        return Steering(operations=[("both", STEERED, document)])
    site = INNER[family] if kind == "inner" else STEERED
    added = {
        "vector": vector(HIDDEN),
        "inner": vector(WIDE if family == "llama" else HIDDEN),
        "gate": vector(HIDDEN),
        "feature": SAE.weights["W_dec"][FEATURE].astype(np.float32),
    }
    rows = {site: torch.from_numpy(added[kind])} if kind in added else {}
    return Steering(prefill=rows, decode=rows)


def fields(kind: str, family: str) -> dict[str, Any]:
    """What a request of a kind asks for."""
    inner = INNER[family]
    within = steering_of("inner", family).prefill[inner]
    asked: dict[str, dict[str, Any]] = {
        "vector": {"steering_vectors": {STEERED.hook.value: {STEERED.layer: vector(HIDDEN).tolist()}}},
        "inner": {"steering_vectors": {inner.hook.value: {inner.layer: within.tolist()}}},
        "operation": {"steering_ops": [{"at": STEERED.name, "method": "ablate", "vector": direction()}]},
        "gate": {
            "steering_gates": [
                {
                    "when": {"cosine": direction().tolist(), "at": STEERED.name, "above": -2.0},
                    "then": {"module": "always"},
                }
            ]
        },
        "feature": {"steering_features": [{"sae": "tiny", "feature": FEATURE, "add": 1.0}]},
    }
    if kind == "plain":
        return {}
    sites = {hook.value: "all" for hook in hooks_of(family)} | {"final_norm": "all"}
    return {"capture": {"memory": {"hooks": sites, "positions": "all"}}, **asked.get(kind, {})}


def section(family: str, folder: Path) -> dict[str, Any]:
    """The `additional_config` of an engine that does all of it."""
    sites = {hook.value: "all" for hook in hooks_of(family)} | {"final_norm": "all"}
    inner = INNER[family]
    steering = {
        "sites": {STEERED.hook.value: "all", inner.hook.value: "all"},
        "op_sites": {STEERED.hook.value: [STEERED.layer]},
        "saes": {"tiny": f"{SAE.save(folder / 'sae')}@{STEERED.name}"},
    }
    capture = {"consumers": [{"name": "memory"}], "sites": sites, "fire_counter": True}
    return {"headgate": {"capture": capture, "steering": steering}}


def serve(llm: Any, family: str, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every prompt once for each kind, in one batch."""
    from vllm import SamplingParams

    asked = [(kind, ids) for ids in prompts() for kind in kinds]
    params = []
    for kind, _ in asked:
        made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=NUM_OUTPUT, logprobs=5)
        for name, value in fields(kind, family).items():
            setattr(made, name, value)
        params.append(made)
    outputs = llm.generate([{"prompt_token_ids": ids} for _, ids in asked], params, use_tqdm=False)
    return [told(output, kind) for output, (kind, _) in zip(outputs, asked, strict=True)]


def told(output: Any, kind: str) -> dict[str, Any]:
    """Tokens, logprobs and rows of one request, as plain tensors."""
    steps = output.outputs[0].logprobs
    entry: dict[str, Any] = {
        "kind": kind,
        "prompt": list(output.prompt_token_ids),
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": [sorted((token, one.logprob) for token, one in step.items()) for step in steps],
    }
    if results := getattr(output, "capture_results", None):
        result = results["memory"]
        assert result.status == "ok", result.error
        entry["rows"] = {site.name: result.payload.rows[site] for site in result.payload.sites}
        entry["positions"] = result.payload.positions.tolist()
    return entry


def main() -> None:
    """Serve one format in one mode; twice, and the second time prompts are in the cache."""
    (name, _, mode), out = sys.argv[1].rpartition("-"), sys.argv[2]
    method = METHODS[name]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # sampling is greedy, and FlashInfer may be missing
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # it compiles with nvcc when it is first used
    if mode == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    from vllm import LLM

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": str(Path(os.environ["QUANTISED_FOLDER"]) / name),
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 128,
            "gpu_memory_utilization": 0.03,
            "kv_cache_memory_bytes": 1 << 28,
            "enforce_eager": True,
            "seed": 0,
            **({} if mode == "stock" else {"additional_config": section(method.family, Path(folder))}),
            **method.engine,
            **json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")),
        }
        llm = LLM(**settings)
        found: dict[str, Any] = {"start_s": time.perf_counter() - started}
        if mode == "stock":
            found["idle"] = serve(llm, method.family, ("plain",))
        else:
            llm.steering.register("always", vectors={STEERED.hook.value: {STEERED.layer: vector(HIDDEN).tolist()}})
            found["idle"] = serve(llm, method.family, ("plain",))
            found["requests"] = serve(llm, method.family, KINDS)
    torch.save(found, out)
    print(f"RAN {sys.argv[1]} start {found['start_s']:.1f} s, {LAYERS} layers", flush=True)


if __name__ == "__main__":
    main()
