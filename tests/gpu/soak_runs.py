"""One engine of the soak test: ``python soak_runs.py MODE OUT.pt``; MODE is stock or headgate.

Both modes serve the same requests, which arrive, and are aborted, before the same steps of the engine: the engine core
is in this process, so that nothing else decides what a batch holds, and the batches of both modes are compared. Then
headgate runs each captured request once more, alone: its prompt and its tokens as one prompt, every row captured.
SOAK_REQUESTS and SOAK_SEED choose the requests.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import engine_runs as base
import numpy as np
import torch
from soak_cases import HOOKS, Job, random_jobs

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "500"))
SEED = int(os.environ.get("SOAK_SEED", "20261120"))
SITES = {**dict.fromkeys(HOOKS, base.LAYERS), "final_norm": "all"}
STEERED_LAYERS = base.LAYERS[1:3]
STRENGTH = 20.0
SOLO_OFFSET = 1_000_000
"""Request ids of solo runs begin here."""


def jobs() -> list[Job]:
    """The requests."""
    return random_jobs(SEED, NUM_REQUESTS, layers=base.LAYERS, vocabulary=min(base.VOCABULARY, 200_000))


def config() -> dict[str, Any]:
    """Capture and steering together."""
    made = base.headgate(SITES)
    made["headgate"]["steering"] = {}
    return made


def vectors(index: int) -> dict[str, Any]:
    """Vectors of one request, for both phases."""
    rng = np.random.default_rng(index)
    return {
        hook: {layer: rng.normal(0, STRENGTH, base.HIDDEN).astype(np.float32) for layer in STEERED_LAYERS}
        for hook in HOOKS
    }


def params(job: Job, mode: str, max_tokens: int, hooks: Any, positions: Any) -> Any:
    """Greedy sampling. Stock gets what makes it schedule like headgate: the same use of the prefix cache."""
    from vllm import SamplingParams

    made = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens)
    if job.reads_whole_prompt:
        made.skip_reading_prefix_cache = True
    if mode == "headgate" and hooks:
        made.capture = {"memory": {"hooks": hooks, "positions": positions}}
    if mode == "headgate" and job.is_steered:
        made.steering_vectors = vectors(job.index)
    return made


def prompt(job: Job, mode: str) -> dict[str, Any]:
    """The prompt; a steered request shares cached blocks with no other, which stock is told by a salt."""
    made: dict[str, Any] = {"prompt_token_ids": list(job.prompt)}
    return {**made, "cache_salt": str(job.index)} if job.is_steered and mode == "stock" else made


class Schedule:
    """Brings requests to an `LLM` before certain steps, and notes the batches; `LLM` runs the engine as always."""

    def __init__(self, llm: Any, mode: str, waiting: Sequence[Job]) -> None:
        self._engine, self._mode, self._waiting = llm.llm_engine, mode, list(waiting)
        self._aborts = [(job.abort_step, str(job.index)) for job in waiting if job.abort_step is not None]
        self._step, self.batches = 0, list[Any]()
        scheduler = self._engine.engine_core.engine_core.scheduler
        original = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if made.num_scheduled_tokens:
                # An engine appends to the ids of requests: what stands before that is ours.
                batch = {request_id.split("-")[0]: count for request_id, count in made.num_scheduled_tokens.items()}
                self.batches.append(batch)
            return made

        scheduler.schedule = schedule
        self._engine.has_unfinished_requests = self.has_unfinished_requests
        self._engine.step = self.step

    def run(self, llm: Any) -> dict[int, dict[str, Any]]:
        """Serve all, and leave the engine as it was: what came of those that were not aborted, by index."""
        from vllm import RequestOutput

        outputs = llm._run_engine(RequestOutput, use_tqdm=False)
        self.close()
        finished = [output for output in outputs if output.outputs[0].finish_reason == "length"]
        return dict(zip((int(output.request_id) for output in finished), base.collect(finished), strict=True))

    def close(self) -> None:
        """Leave the engine as it was."""
        del self._engine.has_unfinished_requests, self._engine.step
        del self._engine.engine_core.engine_core.scheduler.schedule

    def params(self, job: Job) -> Any:
        """The ``SamplingParams`` of a request."""
        return params(job, self._mode, job.max_tokens, job.hooks, job.positions)

    def has_unfinished_requests(self) -> bool:
        """Whether requests run, or will come."""
        return bool(self._waiting) or type(self._engine).has_unfinished_requests(self._engine)

    def step(self) -> Any:
        """Bring what is due, then take a step."""
        while self._waiting and self._waiting[0].step <= self._step:
            job = self._waiting.pop(0)
            self._engine.add_request(str(job.index), prompt(job, self._mode), self.params(job))
        due = [request_id for step, request_id in self._aborts if step == self._step]
        if due:
            self._engine.abort_request(due)
        self._step += 1
        return type(self._engine).step(self._engine)


def soak(llm: Any, mode: str) -> dict[str, Any]:
    """All requests together: what came of those that were not aborted, by index."""
    schedule = Schedule(llm, mode, jobs())
    found = schedule.run(llm)
    assert found.keys() <= {job.index for job in jobs()}
    return {"requests": found, "batches": schedule.batches}


def solo(llm: Any, seen: dict[int, Any]) -> dict[int, Any]:
    """Every captured request alone, all positions of its sites."""
    found = {}
    for job in jobs():
        if not job.hooks or job.index not in seen:
            continue
        tokens = [*job.prompt, *seen[job.index]["tokens"][:-1]]
        asked = params(job, "headgate", 1, job.hooks, "all")
        (output,) = llm.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)
        (found[job.index],) = base.collect([output])
    return found


def main() -> None:
    """Serve one mode."""
    mode, out = sys.argv[1], sys.argv[2]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if mode == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    llm = base.open_engine("stock" if mode == "stock" else "graphs", config())
    began = time.perf_counter()
    result = soak(llm, mode)
    result["soak_s"] = time.perf_counter() - began
    if mode == "headgate":
        result["solo"] = solo(llm, result["requests"])
        result["stats"] = llm.collective_rpc("headgate_stats")
    result["is_async"] = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    torch.save(result, out)
    print(
        "RAN",
        mode,
        f"{len(result['requests'])} requests in {result['soak_s']:.1f} s, {len(result['batches'])} batches",
        flush=True,
    )


if __name__ == "__main__":
    main()
