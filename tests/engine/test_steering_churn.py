"""Hundreds of requests that steer in all ways, on an engine with too few slots and KV blocks for them: all come out
right, and nothing is left behind.

More configs than the slots can hold at a time, named modules that come and go while requests use them, aborts,
preemption in both phases, chunked prefill, prefix-cache hits, several samples, captures, and neighbours that ask for
nothing. Each answer is compared with Hugging Face running that request alone.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.files import vector_files
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.engine.hf_reference import HFReference, Reference, Steering, relative_error
from tests.engine.steering_cases import Tiers, added, document, logprobs_of, sites_of, vectors
from tests.engine.tiny_models import VOCABULARY, tiny_model

NUM_REQUESTS = 320
IN_FLIGHT = 16
NUM_PREFIXES = 3
NUM_LOGPROBS = 8
BLOCK = 32
SLOTS = 20
SITES = {"pre_attn": "all", "post_attn": "all", "post_mlp": "all"}
STREAM = sites_of(HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
MAX_ERROR = 1e-4
MODULE_SLOTS = 3
MAX_FLEETING = 2
"""At a time, of up to two slots each: then every request fits beside all modules."""
TOO_MUCH = Tiers(prefill=vectors(STREAM, 900), decode=vectors(STREAM, 901))


@dataclass(kw_only=True)
class Job:
    """One random request, and what came of it.

    Attributes:
        tiers: Its inline vectors.
        module: A module of the configuration, and its scale.
        fleeting: Vectors of a module that is registered for it, and unregistered while it runs.
    """

    index: int
    prompt: list[int]
    max_tokens: int
    n: int
    tiers: Tiers
    module: tuple[str, float] | None
    fleeting: Tiers | None
    positions: str | None
    abort_after: int | None
    outputs: list[Any] = field(default_factory=list)
    result: Any = None
    was_registered: bool = False
    error: BaseException | None = None

    @property
    def is_plain(self) -> bool:
        return self.module is None and self.fleeting is None and not self.tiers.fields()


def random_tiers(rng: random.Random, seed: int, max_sites: int = 2) -> Tiers:
    def some(offset: int) -> dict[Site, torch.Tensor]:
        sites = rng.sample(STREAM, rng.randint(1, max_sites))
        return vectors(sites, 10 * seed + offset, rng.choice([0.3, 1.0, 3.0]))

    kind = rng.choice(["base", "prefill", "decode", "phases", "all"] if max_sites > 1 else ["base", "phases"])
    return Tiers(
        base=some(0) if kind in ("base", "all") else {},
        prefill=some(1) if kind in ("prefill", "phases", "all") else {},
        decode=some(2) if kind in ("decode", "phases", "all") else {},
        scale=rng.choice([1.0, 1.0, -1.0, 0.5]),
    )


MODULES = {"calm": vectors(STREAM[:2], 700), "loud": vectors(STREAM[4:5], 701, 3.0)}


def random_jobs(seed: int) -> list[Job]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, VOCABULARY) for _ in range(2 * BLOCK)] for _ in range(NUM_PREFIXES)]
    configs = [random_tiers(rng, at) for at in range(16)]
    jobs = []
    for index in range(NUM_REQUESTS):
        suffix = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 50))]
        kind = rng.choice(["plain", "inline", "inline", "inline", "module", "module and inline", "fleeting"])
        jobs.append(
            Job(
                index=index,
                prompt=rng.choice([suffix, suffix[:1], rng.choice(prefixes), rng.choice(prefixes) + suffix]),
                max_tokens=rng.randrange(1, 40),
                n=rng.choice([1, 1, 1, 1, 2]),
                tiers=rng.choice(configs) if "inline" in kind else Tiers(),
                module=(rng.choice(list(MODULES)), rng.choice([1.0, -0.7])) if "module" in kind else None,
                fleeting=random_tiers(rng, 100 + index, max_sites=1) if kind == "fleeting" else None,
                positions=rng.choice([None, None, "all", "all_generated"]),
                abort_after=rng.randrange(1, 10) if rng.random() < 0.12 else None,
            )
        )
    jobs[60].n, jobs[60].tiers, jobs[60].abort_after = 8, configs[0], None
    for index in (50, 150, 250):
        jobs[index].tiers, jobs[index].module, jobs[index].fleeting = TOO_MUCH, ("calm", 1.0), None
    return jobs


class Watch:
    """What happened on the way: a stat logger, and the answers of ``status``."""

    preemptions = 0
    cached_tokens = 0

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """vLLM makes one for each engine."""

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None:
            Watch.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None and scheduler_stats.prefix_cache_stats is not None:
            Watch.cached_tokens += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


@dataclass
class Churn:
    """The whole run.

    Attributes:
        jobs: With their answers.
        statuses: One from the end of each job.
        last: When all were done.
        stats: Of the worker, then.
    """

    jobs: list[Job]
    statuses: list[Any] = field(default_factory=list)
    last: Any = None
    stats: dict[str, Any] = field(default_factory=dict)


class Gates(NamedTuple):
    """How many may do what at a time."""

    run: asyncio.Semaphore
    register: asyncio.Semaphore


async def run_job(engine: Any, job: Job, gates: Gates, statuses: list[Any]) -> None:
    async with gates.run, gates.register if job.fleeting else nullcontext():
        name = f"fleeting-{job.index}"
        if job.fleeting is not None:
            job.was_registered = await try_register(engine, name, job.fleeting)
        try:
            await follow(engine, job, sampling(job, name), name)
        except ValueError as error:
            job.error = error
        if job.was_registered and name in await engine.steering.modules():
            await engine.steering.unregister(name)
        statuses.append(await engine.steering.status())


async def try_register(engine: Any, name: str, tiers: Tiers) -> bool:
    """False if there are no slots for it just now."""
    try:
        await engine.steering.register(name, **document(tiers))
    except ValueError as error:
        if "slots" not in str(error):
            raise
        return False
    return True


def sampling(job: Job, name: str) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=job.max_tokens,
        ignore_eos=True,
        n=job.n,
        temperature=1.0 if job.n > 1 else 0.0,
        logprobs=NUM_LOGPROBS,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    inline = job.tiers if job.fleeting is None or job.was_registered else job.fleeting
    fields = inline.fields()
    if job.was_registered:
        fields["steering_name"] = name
    if job.module is not None:
        fields["steering_module_ref"] = job.module
    if job.positions is not None:
        fields["capture"] = {"memory": {"hooks": {"post_mlp": "all"}, "positions": job.positions}}
        fields["capture_wait"] = True
    for key, value in fields.items():
        setattr(params, key, value)
    return params


async def follow(engine: Any, job: Job, params: Any, name: str) -> None:
    stream = engine.generate({"prompt_token_ids": job.prompt}, params, f"job-{job.index}")
    samples: dict[int, Any] = {}
    async for output in stream:
        if job.was_registered and not samples:
            await engine.steering.unregister(name)
        samples.update({sample.index: sample for sample in output.outputs})
        if job.abort_after is not None and len(output.outputs[0].token_ids) >= job.abort_after:
            await stream.aclose()
            return
    assert output.finished
    job.outputs = [samples[index] for index in range(job.n)]
    job.result = output.capture_results["memory"] if job.positions is not None else None


async def run_all(folder: Path, jobs: list[Job]) -> Churn:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    paths = {}
    for name, found in MODULES.items():
        paths[name] = str(folder / f"{name}.safetensors")
        vector_files.save(paths[name], PhaseVectors.from_rows({site: row.numpy() for site, row in found.items()}))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(tiny_model("llama")),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=48,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=14,
            enable_prefix_caching=True,
            additional_config={
                "headgate": {
                    "capture": {"consumers": [{"name": "memory"}], "sites": {"post_mlp": "all"}},
                    "steering": {"sites": SITES, "max_steering_slots": SLOTS, "modules": paths},
                }
            },
        ),
        stat_loggers=[Watch],
    )
    try:
        churn, gates = Churn(jobs), Gates(asyncio.Semaphore(IN_FLIGHT), asyncio.Semaphore(MAX_FLEETING))
        await asyncio.gather(*(run_job(engine, job, gates, churn.statuses) for job in jobs))
        churn.last = await engine.steering.status()
        await follow(engine, (last := plain_job()), sampling(last, ""), "")  # the worker hears of the end of the others
        churn.jobs.append(last)
        churn.stats = (await engine.collective_rpc("headgate_stats"))[0]["steering"]
    finally:
        engine.shutdown()
    return churn


def plain_job() -> Job:
    return Job(
        index=NUM_REQUESTS,
        prompt=[5, 6, 7],
        max_tokens=3,
        n=1,
        tiers=Tiers(),
        module=None,
        fleeting=None,
        positions=None,
        abort_after=None,
    )


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Churn:
    return asyncio.run(run_all(tmp_path_factory.mktemp("modules"), random_jobs(seed=20261121)))


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


def test_the_run_was_hard(churn):
    assert Watch.preemptions > 10
    assert Watch.cached_tokens > 500
    assert sum(job.abort_after is not None for job in churn.jobs) > 20
    assert sum(job.is_plain for job in churn.jobs) > 30
    assert sum(job.was_registered for job in churn.jobs) > 10
    assert sum(status.slots[0].waiting > 0 for status in churn.statuses) > 50, "slots were never short"


def test_every_answer_and_row_equals_the_solo_run(churn, reference):
    num_steered = 0

    for job in churn.jobs:
        for at, sample in enumerate(job.outputs):
            steering = steering_of(job)
            expected = reference.run(job.prompt, list(sample.token_ids), steering)
            check_answer(job, sample, expected)
            if job.positions is not None:
                check_rows(job, job.result.payload if job.n == 1 else job.result.payload[at], expected)
            num_steered += not job.is_plain

    assert num_steered > 150


def steering_of(job: Job) -> Steering:
    named = [(MODULES[job.module[0]], job.module[1])] if job.module else []
    parts = [each.steering() for each in (job.tiers, job.fleeting) if each is not None]
    return Steering(
        prefill=added([*named, *((part.prefill, 1.0) for part in parts)]),
        decode=added([*named, *((part.decode, 1.0) for part in parts)]),
    )


def check_answer(job: Job, sample: Any, expected: Reference) -> None:
    logits = expected.logits[len(job.prompt) - 1 :]
    if job.n == 1:
        assert logits.argmax(-1).tolist() == list(sample.token_ids), job
    got, wanted = logprobs_of(sample.logprobs), logits.log_softmax(-1)
    given = ~got.isnan()
    assert (given.sum(-1) >= NUM_LOGPROBS).all()
    assert relative_error(got[given], wanted[given]) <= MAX_ERROR, job


def check_rows(job: Job, captured: Any, expected: Reference) -> None:
    assert job.result.status == "ok", job
    start = len(job.prompt) if job.positions == "all_generated" else 0
    assert captured.positions.tolist() == list(range(start, len(expected.logits)))
    for site in captured.sites:
        rows = expected.rows[site][start:]
        if len(rows):
            assert relative_error(captured.rows[site], rows) <= MAX_ERROR, (job, site)


def test_what_can_never_fit_is_refused_with_the_numbers(churn):
    refused = [job for job in churn.jobs if job.error is not None]

    assert [job.index for job in refused] == [50, 150, 250]
    for job in refused:
        assert f"of {SLOTS - 1} can be free" in str(job.error)
        assert "raise max_steering_slots" in str(job.error)


def test_slots_are_never_more_than_there_are_and_all_come_back(churn):
    slots = [status.slots[0] for status in churn.statuses]

    assert {found.capacity for found in slots} == {SLOTS - 1}
    assert max(found.reserved for found in slots) <= SLOTS - 1
    assert (churn.last.slots[0].reserved, churn.last.slots[0].waiting) == (MODULE_SLOTS, 0)
    assert sorted(churn.last.modules) == sorted(MODULES)
    assert churn.stats["slots_live"] == MODULE_SLOTS
    assert churn.stats["modules"] == len(MODULES)
