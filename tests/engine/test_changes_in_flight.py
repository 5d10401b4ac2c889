"""Global vectors, modules and rules change while steps are in flight: each captured row is of the forward that the
token behind it was sampled in.

Random requests sample at temperature 1 on an engine that schedules asynchronously, with too few KV blocks and prompts
in chunks; before random steps global vectors are set or cleared, modules are registered anew, rules come and go. Which
launch a token came from is the scheduler's word (`tests.fakes.launches`); what its rows are is Hugging Face's, with
whatever acted then. ``CHANGES_REQUESTS`` and ``CHANGES_SEED`` choose the requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headgate.capture.schema.sites import HookPoint, Site
from tests.conftest import start_llm, stop_llm
from tests.engine.hf_reference import HFReference, Steering, relative_error
from tests.engine.steering_cases import Tiers, document, vectors
from tests.engine.tiny_models import HIDDEN, VOCABULARY, tiny_model
from tests.fakes.launches import Launches, Runs, state_at

pytestmark = pytest.mark.extended

NUM_REQUESTS = int(os.environ.get("CHANGES_REQUESTS", "60"))
SEED = int(os.environ.get("CHANGES_SEED", "20261127"))
BLOCK = 32
SITES = {"pre_attn": [1], "post_attn": "all", "post_mlp": "all", "final_norm": "all"}
STEERED = [Site(0, HookPoint.POST_MLP), Site(1, HookPoint.POST_MLP)]
OWN, RULED = Site(1, HookPoint.MLP_OUT), Site(2, HookPoint.POST_ATTN)
"""In a pipeline rules read on the first stage, and write on the second."""
RULES = {name: np.random.default_rng(at).normal(0, 1, HIDDEN).astype(np.float32) for at, name in enumerate("ab")}
MAX_ERROR = 1e-4
HOW = {"one stage": {}, "a pipeline": {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}}


class State(NamedTuple):
    """What acts on all requests: the number of the global vectors, and the rules that are on."""

    version: int = 0
    rules: frozenset[str] = frozenset()


@dataclass
class Job:
    """A request, and what came of it."""

    index: int
    prompt: list[int]
    max_tokens: int
    step: int
    has_module: bool
    is_traced: bool
    module: int = -1
    output: Any = None


@dataclass
class Changes:
    """Makes the changes of a run.

    Attributes:
        state: As it is.
        module: Number of the vectors that the module stands for.
        counts: How many changes of each kind were made.
    """

    llm: Any
    rng: random.Random
    state: State = field(default_factory=State)
    module: int = -1
    num_versions: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def change(self) -> None:
        """Make one of any kind."""
        kind = self.rng.choice(["set", "set", "clear", "register", "rule", "rule"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        getattr(self, kind)()

    def set(self) -> None:
        self.num_versions += 1
        self.llm.steering.set(**document(Tiers(base=global_vectors(self.num_versions))), replace=True)
        self.state = self.state._replace(version=self.num_versions)

    def clear(self) -> None:
        self.llm.steering.clear()
        self.state = self.state._replace(version=0)

    def register(self) -> None:
        self.module += 1
        self.llm.steering.register("own", **document(Tiers(base=module_vectors(self.module))))

    def rule(self) -> None:
        name = self.rng.choice(sorted(RULES))
        if name in self.state.rules:
            self.llm.steering.unregister_rule(name)
        else:
            always = {"cosine": [1.0] * HIDDEN, "at": "1.pre_attn", "above": -3.0}
            then = {"vectors": {RULED.hook.value: {str(RULED.layer): RULES[name].tolist()}}}
            self.llm.steering.register_rule(name, applies_to="opt_out", when=always, then=then, scope="this_token")
        self.state = self.state._replace(rules=self.state.rules ^ {name})


def global_vectors(version: int) -> dict[Site, torch.Tensor]:
    return vectors(STEERED, 1000 + version) if version else {}


def module_vectors(number: int) -> dict[Site, torch.Tensor]:
    return vectors([OWN], 500 + number) if number >= 0 else {}


def random_jobs(rng: random.Random) -> list[Job]:
    jobs, step = [], 0
    for index in range(NUM_REQUESTS):
        step += rng.choice([0, 1, 1, 3])
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 9, rng.randrange(2, 90)]))]
        kinds = {"has_module": rng.random() < 0.4, "is_traced": rng.random() < 0.4}
        jobs.append(Job(index, prompt, rng.randrange(1, 36), step, **kinds))
    return jobs


def params_of(job: Job) -> Any:
    from headgate.capture import SamplingParams

    params = SamplingParams(
        max_tokens=job.max_tokens,
        temperature=1.0,
        ignore_eos=True,
        detokenize=False,
        capture={"memory": {"hooks": SITES, "positions": "all"}},
        return_hidden_states=True,
        return_steering_trace=job.is_traced,
    )
    if job.has_module:
        params.steering_module_ref = ("own", 1.0)
    return params


@dataclass
class Run:
    """What one engine did."""

    jobs: list[Job]
    launches: Launches
    changes: Changes


def serve(llm: Any, seed: int) -> Run:
    """Bring the requests and the changes before their steps; the engine core is in this process."""
    from vllm import RequestOutput

    rng = random.Random(seed)
    engine, jobs, changes = llm.llm_engine, random_jobs(rng), Changes(llm, rng)
    launches = Launches(engine.engine_core.engine_core, lambda: changes.state)
    changes.register()
    waiting, steps = list(jobs), 0

    def step() -> Any:
        nonlocal steps
        while waiting and waiting[0].step <= steps:
            job = waiting.pop(0)
            job.module = changes.module if job.has_module else -1
            engine.add_request(str(job.index), {"prompt_token_ids": job.prompt}, params_of(job))
        if rng.random() < 0.3:
            changes.change()
        steps += 1
        return type(engine).step(engine)

    engine.has_unfinished_requests = lambda: bool(waiting) or type(engine).has_unfinished_requests(engine)
    engine.step = step
    for output in llm._run_engine(RequestOutput, use_tqdm=False):
        jobs[int(output.request_id.split("-")[0])].output = output
    return Run(jobs, launches, changes)


@pytest.fixture(scope="module", params=HOW.values(), ids=HOW.keys())
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    # Two workers on a machine with one NUMA node.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    llm = start_llm(
        model=tiny_model("llama"),
        in_process=True,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=14,
        block_size=BLOCK,
        additional_config={
            "headgate": {
                "capture": {"consumers": [{"name": "memory"}, {"name": "hidden_states"}], "sites": SITES},
                "steering": {"sites": {"post_mlp": "all", "mlp_out": "all", **SITES}, "op_sites": SITES},
            }
        },
        **request.param,
    )
    # vLLM 0.32 schedules a pipeline on CPUs synchronously, with a step in flight for each stage.
    assert llm.llm_engine.engine_core.engine_core.batch_queue is not None
    try:
        yield serve(llm, SEED)
    finally:
        stop_llm(llm)


@pytest.fixture(scope="module")
def reference() -> Path:
    return HFReference(tiny_model("llama"), "llama")


def test_the_run_was_hard(run: Run) -> None:
    assert set(run.changes.counts) == {"set", "clear", "register", "rule"}
    assert run.launches.num_preempted > NUM_REQUESTS / 20
    lives = [len(set(kept.values())) for kept in run.launches.kept.values()]
    assert sum(count > 2 for count in lives) > NUM_REQUESTS / 4
    assert all(job.output.finished and len(job.output.outputs[0].token_ids) == job.max_tokens for job in run.jobs)


def kept_of(run: Run, job: Job) -> dict[int, Runs]:
    (found,) = (kept for req_id, kept in run.launches.kept.items() if req_id.split("-")[0] == str(job.index))
    return found


def was_in(job: Job, req_ids: set[str]) -> bool:
    return str(job.index) in {req_id.split("-")[0] for req_id in req_ids}


def launch_of(job: Job, kept: dict[int, Runs], position: int) -> Runs:
    """The launch of the token behind a position; of a prompt's, that of the first token."""
    return kept[max(position + 1, len(job.prompt))]


def expected_rows(reference: HFReference, job: Job, runs: Runs) -> Any:
    """The rows of a request as if all of it were one forward under these states."""
    versions = {state.version for _, state in runs}  # type: ignore[attr-defined]
    assert len(versions) == 1, (job.index, runs)
    added = {**global_vectors(versions.pop()), **module_vectors(job.module)}
    tokens = list(job.output.outputs[0].token_ids)
    positions = range(len(job.prompt) + len(tokens))
    ruled = [
        ("both", RULED, {"method": "additive", "vector": vector, "scale": 1.0, "positions": [*acting]})
        for name, vector in RULES.items()
        if (acting := [at for at in positions if name in state_at(runs, at).rules])  # type: ignore[attr-defined]
    ]
    return reference.run(job.prompt, tokens, Steering(prefill=added, decode=added, operations=ruled)).rows


def test_each_row_is_of_the_forward_that_its_token_was_sampled_in(run: Run, reference: HFReference) -> None:
    num_rows, num_refused = 0, 0
    for job in run.jobs:
        kept, captured = kept_of(run, job), job.output.capture_results["memory"]
        if was_in(job, run.launches.restarted) or captured.status != "ok":
            # Of a prompt that was computed in part, and begun again under something else, no rows are given out.
            assert was_in(job, run.launches.begun_again), (job, captured.error)
            assert captured.status == "error", job
            assert "send the request again" in captured.error, job
            num_refused += 1
            continue
        tokens = [*job.prompt, *job.output.outputs[0].token_ids]
        assert captured.payload.positions.tolist() == list(range(len(tokens) - 1))
        assert captured.payload.token_ids.tolist() == tokens[:-1]
        for runs, positions in by_launch(job, kept, len(tokens) - 1).items():
            expected = expected_rows(reference, job, runs)
            for site, rows in captured.payload.rows.items():
                error = relative_error(rows[positions], expected[site][positions])
                assert error <= MAX_ERROR, (job.index, site.name, positions, runs, error)
            num_rows += len(positions)
    assert num_rows > 20 * NUM_REQUESTS
    assert num_refused


def by_launch(job: Job, kept: dict[int, Runs], num_rows: int) -> dict[Runs, list[int]]:
    """The positions of a request whose rows are as of one launch."""
    found: dict[Runs, list[int]] = {}
    for position in range(num_rows):
        found.setdefault(launch_of(job, kept, position), []).append(position)
    return found


def test_the_state_before_the_last_token_is_of_the_forward_that_sampled_it(run: Run, reference: HFReference) -> None:
    for job in run.jobs:
        (completion,), kept = job.output.outputs, kept_of(run, job)
        last = len(job.prompt) + len(completion.token_ids) - 2
        expected = expected_rows(reference, job, launch_of(job, kept, last))[Site.parse("final_norm")][last]
        assert relative_error(completion.hidden_states, expected) <= MAX_ERROR, job.index


def test_traces_tell_what_acted_on_the_rows(run: Run) -> None:
    num_applied, num_begun_again = 0, 0
    for job in run.jobs:
        trace = job.output.outputs[0].steering_trace
        if not job.is_traced:
            continue
        kept, num_rows = kept_of(run, job), len(job.prompt) + job.max_tokens - 1
        positions, gates = ([], {}) if trace is None else (trace["positions"], trace["gates"])
        assert positions == sorted(set(positions)), job.index
        # A prompt that was begun again may have found its first rows in the cache, and these are not told.
        num_cached = 0
        if was_in(job, run.launches.begun_again):
            num_begun_again += 1
            num_cached = min(positions[0] if positions else num_rows, BLOCK * (len(job.prompt) // BLOCK))
        for name in RULES:
            acted = [name in state_at(launch_of(job, kept, at), at).rules for at in range(num_rows)]  # type: ignore[attr-defined]
            told = dict(zip(positions, gates[name]["applied"], strict=True)) if name in gates else {}
            assert [bool(told.get(at)) for at in range(num_cached, num_rows)] == acted[num_cached:], (job.index, name)
            num_applied += sum(acted)
    assert num_applied > NUM_REQUESTS
    assert num_begun_again
