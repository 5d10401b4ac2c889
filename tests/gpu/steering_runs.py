"""One engine run per process, for the GPU tests of steering: ``python steering_runs.py MODE OUT.pt``.

MODE is stock (no headgate), graphs (compiled, FULL CUDA graphs) or eager (the fused kernel). The last two serve the
prompts once without steering and once with two of three requests steered, each by vectors of its own; with
GPU_TEST_REPLAY the tokens of another run are the prompts, so that rows compare. The engine core is in this process, so
that batches do not depend on when requests arrive, and with them the last bits of sums: they are the same each time,
which is checked.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import engine_runs as base
import numpy as np
import torch

LAYERS = tuple(base.LAYERS[1:3])
HOOKS = ("pre_attn", "post_attn", "post_mlp")
SEEN = {"post_mlp": base.LAYERS[1:], "final_norm": "all"}
HIDDEN = base.HIDDEN
STRENGTH = 20.0
"""Of a random model's stream this moves the next token for sure."""


def is_steered(index: int) -> bool:
    """Two of three requests are."""
    return index % 3 != 0


def vectors(index: int) -> dict[str, Any]:
    """Vectors of one request, in both phases."""
    rng = np.random.default_rng(index)
    return {hook: {layer: rng.normal(0, STRENGTH, HIDDEN).astype(np.float32) for layer in LAYERS} for hook in HOOKS}


def headgate() -> dict[str, Any]:
    """Capture and steering together."""
    config = base.headgate(SEEN)
    config["headgate"]["steering"] = {"fire_counter": True}
    return config


def params(index: int, *, steers: bool, max_tokens: int) -> Any:
    """Greedy sampling; what the request captures and steers with."""
    from headgate.capture import SamplingParams

    return SamplingParams(
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=max_tokens,
        capture={"memory": {"hooks": SEEN}} if steers else None,
        steering_vectors=vectors(index) if steers and is_steered(index) else None,
    )


def serve(llm: Any, *, steers: bool) -> list[dict[str, Any]]:
    """All prompts in one batch."""
    requests, max_tokens = base.prompts(), base.MAX_TOKENS
    if replay := os.environ.get("GPU_TEST_REPLAY"):
        recorded = torch.load(replay, weights_only=False)["steered"]
        requests, max_tokens = [entry["prompt"] + entry["tokens"][:-1] for entry in recorded], 1
    made = [params(index, steers=steers, max_tokens=max_tokens) for index in range(len(requests))]
    return base.collect(llm.generate([{"prompt_token_ids": ids} for ids in requests], made, use_tqdm=False))


class Batches:
    """Notes which requests an engine computes how many tokens of, step by step.

    Args:
        llm: The engine, its core in this process.
    """

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        original, self._steps = scheduler.schedule, list[tuple[int, ...]]()

        def schedule(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if made.num_scheduled_tokens:
                self._steps.append(tuple(made.num_scheduled_tokens.values()))
            return made

        scheduler.schedule = schedule

    def take(self) -> list[tuple[int, ...]]:
        """Those since the last call."""
        steps, self._steps = self._steps, []
        return steps


def main() -> None:
    """Serve one mode."""
    mode, out = sys.argv[1], sys.argv[2]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = time.perf_counter()
    llm = base.open_engine(mode, headgate())
    start_s, batches = time.perf_counter() - started, Batches(llm)
    result: dict[str, Any] = {"start_s": start_s, "plain": serve(llm, steers=False), "plain batches": batches.take()}
    if mode != "stock":
        result["steered"], result["steered batches"] = serve(llm, steers=True), batches.take()
        result["stats"] = llm.collective_rpc("headgate_stats")
        result["checksums"] = llm.collective_rpc("headgate_call", args=("steering", "checksum", {}))
    torch.save(result, out)
    print("RAN", mode, f"start {result['start_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
