"""One engine of `test_idle_settings_gpu`: ``settings_runs.py SETTING-VARIANT OUT.pt``.

SETTING is one of `SETTINGS`. VARIANT is stock, stock-again (both without headgate) or idle, which captures and steers
where a request asks for it, and none does. GPU_TEST_MODEL is the folder of `Setting.model`. Tokens and logprobs of all
requests at once, and then of some one after the other, whose batches do not depend on when anything arrives, go to
OUT.pt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draft_runs import described, drafts_of, told_of
from idle_runs import prompts, told

IDLE = {
    "capture": {"consumers": [{"name": "memory"}]},
    "steering": {"op_sites": {"pre_attn": [0, 1], "post_attn": [0, 1], "post_mlp": "all"}},
}
NUM_ALONE = 8
MAX_TOKENS = 48
PATTERN = 12
"""Every second prompt repeats so many tokens, which n-gram drafts then guess."""


class Setting(NamedTuple):
    """What vLLM is set to.

    Attributes:
        engine: Keywords of `LLM`.
        method: Of speculative decoding; empty for none.
        model: ``llama`` or ``moe``, of real width, or ``mtp``, a tiny DeepSeek that drafts.
        num_gpus: How many it takes.
        is_v2: Whether the newest model runner is asked for where it is not vLLM's choice.
    """

    engine: dict[str, Any] = {}  # noqa: RUF012
    method: str = ""
    model: str = "llama"
    num_gpus: int = 1
    is_v2: bool = False


_EXPERTS = {"enable_expert_parallel": True}
SETTINGS: dict[str, Setting] = {
    "ngram": Setting(method="ngram"),
    "draft_model": Setting(method="draft_model"),
    "eagle": Setting(method="eagle"),
    "eagle3": Setting(method="eagle3"),
    "mtp": Setting({"block_size": 16}, method="deepseek_mtp", model="mtp", is_v2=True),
    "kv_fp8": Setting({"kv_cache_dtype": "fp8"}),
    "fp8": Setting({"quantization": "fp8"}),
    "offloading": Setting({"kv_offloading_size": 1.0}),
    "synchronous": Setting({"async_scheduling": False}),
    "whole_prompts": Setting({"enable_chunked_prefill": False}),
    "tensor": Setting({"tensor_parallel_size": 2, **_EXPERTS}, model="moe", num_gpus=2),
    "data": Setting({"data_parallel_size": 2, **_EXPERTS}, model="moe", num_gpus=2),
    "pipeline": Setting({"pipeline_parallel_size": 2}, num_gpus=2),
}


def speculative(method: str, model: Path) -> dict[str, Any]:
    """The ``speculative_config`` of a method; a draft model is the model itself without its last layer."""
    found = drafts_of(method, model)
    return {**found, "model": str(shorter(model))} if method == "draft_model" else found


def shorter(model: Path) -> Path:
    """A folder with a model of one layer less, made if it is missing: it guesses some tokens, not all."""
    from safetensors.torch import load_file, save_file

    folder = model.with_name(f"{model.name}-shorter")
    if (folder / "config.json").exists():
        return folder
    config = json.loads((model / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    kept = {
        name: weight
        for name, weight in load_file(model / "model.safetensors").items()
        if not name.startswith(f"model.layers.{last}.")
    }
    folder.mkdir(exist_ok=True)
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": last}))
    return folder


def engine_of(setting: Setting, *, is_stock: bool) -> dict[str, Any]:
    """Keywords of its engine."""
    from engine_runs import MODEL, engine_settings

    longest = json.loads((Path(MODEL) / "config.json").read_text())["max_position_embeddings"]
    drafts = {"speculative_config": speculative(setting.method, Path(MODEL))} if setting.method else {}
    return {
        **engine_settings("stock" if is_stock else "idle", {"headgate": IDLE}),
        "load_format": "auto",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 30,
        "max_model_len": min(2048, longest),
        "disable_log_stats": False,
        **setting.engine,
        **drafts,
        **json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")),
    }


def asked(max_model_len: int) -> list[Any]:
    """The prompts, every second of them repeating what it begins with."""
    from engine_runs import VOCABULARY

    given = prompts(max_model_len - MAX_TOKENS, VOCABULARY)
    repeated = [ids if index % 2 else (ids[:PATTERN] * len(ids))[: len(ids)] for index, ids in enumerate(given)]
    return [{"prompt_token_ids": ids} for ids in repeated]


def params() -> Any:
    """Greedy sampling with five logprobs."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=5, ignore_eos=True, detokenize=False)


def serve(engine: dict[str, Any]) -> dict[str, Any]:
    """By an engine core in this process: so all engines see the same batches. Of cached blocks, none is used again, but
    those that were offloaded.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm, given = LLM(**engine), asked(engine["max_model_len"])
    together = llm.generate(given, params(), use_tqdm=False)
    llm.reset_prefix_cache()
    alone = [output for each in given[:NUM_ALONE] for output in llm.generate([each], params(), use_tqdm=False)]
    return {
        "together": [told(output) for output in together],
        "alone": [told(output) for output in alone],
        "loaded": sum(output.num_cached_tokens or 0 for output in alone),
        "stats": llm.collective_rpc("headgate_stats") if engine["additional_config"] else [],
        **told_of(llm),
    }


async def serve_spread(engine: dict[str, Any]) -> dict[str, Any]:
    """By two data-parallel engines in turns; while one has a request alone, the other computes experts for it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm, given = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine)), asked(engine["max_model_len"])

    async def answer(index: int, how: str) -> dict[str, Any]:
        request = llm.generate(given[index], params(), request_id=f"{how}-{index}", data_parallel_rank=index % 2)
        async for found in request:
            output = found
        return told(output)

    try:
        together = await asyncio.gather(*(answer(index, "together") for index in range(len(given))))
        await llm.reset_prefix_cache()
        alone = [await answer(index, "alone") for index in range(NUM_ALONE)]
        stats = await llm.collective_rpc("headgate_stats") if engine["additional_config"] else []
    finally:
        llm.shutdown()
    return {"together": together, "alone": alone, "stats": stats}


def main() -> None:
    """Serve one setting."""
    (name, _, variant), out = sys.argv[1].partition("-"), sys.argv[2]
    is_stock = variant.startswith("stock")
    os.environ["VLLM_CACHE_ROOT"] = f"{out}.cache"  # each compiles for itself
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # it compiles with nvcc when it is first used
    if is_stock:
        os.environ["VLLM_PLUGINS"] = "none"
    if SETTINGS[name].is_v2 and torch.cuda.is_available():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    engine = engine_of(SETTINGS[name], is_stock=is_stock)
    found = asyncio.run(serve_spread(engine)) if name == "data" else serve(engine)
    torch.save(found, out)
    print(f"RAN {sys.argv[1]}: {described(found) if SETTINGS[name].method else ''}", flush=True)


if __name__ == "__main__":
    main()
