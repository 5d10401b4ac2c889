"""Every captured row belongs to its request and position, whatever the scheduler does.

Several hundred random requests go through the real engine: arrivals, lengths, one-token prompts, chunked prefill,
prefix-cache hits, preemption, several samples, aborts, any sites and selectors for two consumers, and neighbours that
ask for nothing. Each row is compared with Hugging Face running that request alone.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headgate.capture.schema.sites import Site
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.tiny_models import LAYERS, VOCABULARY, tiny_model

NUM_REQUESTS = 400
IN_FLIGHT = 14
NUM_PREFIXES = 3
BLOCK = 32
SITES = {"pre_attn": "all", "post_attn": "all", "post_mlp": "all", "mlp_in": [1], "final_norm": "all"}
HOOKS = ("pre_attn", "post_attn", "post_mlp")
MAX_ERROR = 1e-4


@dataclass
class Job:
    """One random request, and what came of it."""

    index: int
    prompt: list[int]
    max_tokens: int
    n: int
    capture: dict[str, Any]
    abort_after: int | None
    outputs: list[list[int]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def random_positions(rng: random.Random, num_prompt: int) -> Any:
    start = rng.randrange(-num_prompt, num_prompt)
    return rng.choice(
        [
            "last_prompt",
            "all_prompt",
            "all_generated",
            "all",
            sorted({rng.randrange(-num_prompt, num_prompt + 8) for _ in range(4)}),
            {"start": start},
            {"start": 0, "stop": num_prompt + rng.randrange(1, 9), "step": rng.randrange(1, 5)},
        ]
    )


def random_spec(rng: random.Random, num_prompt: int) -> dict[str, Any]:
    hooks: dict[str, Any] = {
        hook: rng.choice(["all", [rng.randrange(LAYERS)], [-1], {"ranges": [[0, 2]]}])
        for hook in rng.sample(HOOKS, rng.randrange(1, 3))
    }
    if rng.random() < 0.3:
        hooks["final_norm"] = "all"
    if rng.random() < 0.2:
        hooks["mlp_in"] = 1
    return {"hooks": hooks, "positions": random_positions(rng, num_prompt)}


def random_jobs(seed: int) -> list[Job]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, VOCABULARY) for _ in range(2 * BLOCK)] for _ in range(NUM_PREFIXES)]
    jobs = []
    for index in range(NUM_REQUESTS):
        suffix = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 50))]
        prompt = rng.choice([suffix, suffix[:1], rng.choice(prefixes) + suffix])
        consumers = rng.choice([[], ["one"], ["one"], ["two"], ["one", "two"]])
        jobs.append(
            Job(
                index=index,
                prompt=prompt,
                max_tokens=rng.randrange(1, 40),
                n=rng.choice([1, 1, 1, 1, 2]),
                capture={name: random_spec(rng, len(prompt)) for name in consumers},
                abort_after=rng.randrange(1, 10) if rng.random() < 0.12 else None,
            )
        )
    return jobs


class Counts:
    """A stat logger that keeps what the test needs to know that it was hard enough."""

    preemptions = 0
    cached_tokens = 0

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """vLLM makes one for each engine."""

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None:
            Counts.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None and scheduler_stats.prefix_cache_stats is not None:
            Counts.cached_tokens += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


async def run_job(engine: Any, job: Job, gate: asyncio.Semaphore) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async with gate:
        params = SamplingParams(
            max_tokens=job.max_tokens,
            ignore_eos=True,
            n=job.n,
            temperature=1.0 if job.n > 1 else 0.0,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        if job.capture:
            params.capture = job.capture
            params.capture_wait = True
        stream = engine.generate({"prompt_token_ids": job.prompt}, params, f"job-{job.index}")
        samples: dict[int, Any] = {}
        async for output in stream:
            samples.update({sample.index: sample for sample in output.outputs})
            if job.abort_after is not None and len(output.outputs[0].token_ids) >= job.abort_after:
                await stream.aclose()
                return
        assert output.finished
        job.outputs = [list(samples[index].token_ids) for index in range(job.n)]
        if job.capture:
            job.results = output.capture_results


async def run_all(model: str, jobs: list[Job]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    consumers = [{"name": "memory", "instance_name": name} for name in ("one", "two")]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=14,
            enable_prefix_caching=True,
            additional_config={"headgate": {"capture": {"consumers": consumers, "sites": SITES}}},
        ),
        stat_loggers=[Counts],
    )
    try:
        gate = asyncio.Semaphore(IN_FLIGHT)
        await asyncio.gather(*(run_job(engine, job, gate) for job in jobs))
        stats = await engine.collective_rpc("headgate_stats")
    finally:
        engine.shutdown()
    return stats[0]["capture"]


def wanted_positions(selector: Any, num_prompt: int, num_rows: int) -> list[int]:
    """The slow and obvious reading of a client's selector."""
    every = range(num_rows)
    if selector == "all":
        return list(every)
    if selector == "all_prompt":
        return [p for p in every if p < num_prompt]
    if selector == "all_generated":
        return [p for p in every if p >= num_prompt]
    if selector == "last_prompt":
        return [num_prompt - 1]
    if isinstance(selector, list):
        absolute = {p if p >= 0 else p + num_prompt for p in selector}
        return [p for p in every if p in absolute]
    start = selector["start"] + (num_prompt if selector["start"] < 0 else 0)
    return [p for p in range(start, selector.get("stop", num_rows), selector.get("step", 1)) if p < num_rows]


@pytest.fixture(scope="module")
def served() -> tuple[list[Job], dict[str, Any]]:
    jobs = random_jobs(seed=20261120)
    return jobs, asyncio.run(run_all(str(tiny_model("llama")), jobs))


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


def test_the_schedule_was_hard(served):
    jobs, _ = served

    assert Counts.preemptions > 10
    assert Counts.cached_tokens > 1000
    assert sum(job.abort_after is not None for job in jobs) > 20
    assert sum(not job.capture for job in jobs) > 40


def test_every_row_equals_the_solo_run(served, reference):
    jobs, _ = served
    num_rows = 0

    for job in jobs:
        for sample, output in enumerate(job.outputs):
            expected = reference.run(job.prompt, output) if job.capture else None
            for name, spec in job.capture.items():
                result = job.results[name]
                assert result.status == "ok", (job, result)
                captured = result.payload if job.n == 1 else result.payload[sample]
                num_rows += check_rows(job, output, captured, spec, expected)

    assert num_rows > 5000


def check_rows(job: Job, output: list[int], captured: Any, spec: dict[str, Any], expected: Any) -> int:
    tokens = job.prompt + output
    positions = wanted_positions(spec["positions"], len(job.prompt), len(tokens) - 1)
    assert captured.positions.tolist() == positions, job
    assert captured.token_ids.tolist() == [tokens[position] for position in positions], job
    assert {site.name for site in captured.sites} == expected_sites(spec["hooks"]), job
    for site in captured.sites:
        rows = captured.rows[site]
        assert rows.shape[0] == len(positions)
        if positions:
            assert relative_error(rows, expected.rows[site][torch.tensor(positions)]) <= MAX_ERROR, (job.index, site)
    return len(positions)


def expected_sites(hooks: dict[str, Any]) -> set[str]:
    every = {"all": range(LAYERS), 1: [1]}
    names = set()
    for hook, layers in hooks.items():
        if hook == "final_norm":
            names.add("final_norm")
        elif isinstance(layers, dict):
            names |= {f"{layer}.{hook}" for layer in range(0, 2)}
        else:
            chosen = every[layers] if not isinstance(layers, list) else [layer % LAYERS for layer in layers]
            names |= {f"{layer}.{hook}" for layer in chosen}
    return names


def test_nothing_is_left_behind(served):
    _, stats = served

    assert (stats["staged_bytes"], stats["dropped_rows"], stats["dispatch_errors"]) == (0, 0, 0)
    for consumer in stats["consumers"]:
        left = {name: consumer[name] for name in ("queued_bytes", "dropped_rows", "errors", "hangs", "lost_reports")}
        assert not any(left.values()), left


def test_site_names_are_as_clients_write_them():
    assert Site.parse("1.mlp_in") in HFReference(tiny_model("llama"), "llama").run([3, 4], [5]).rows
