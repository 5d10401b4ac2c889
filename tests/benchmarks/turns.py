"""Engines side by side on one GPU, timed in turns: one works at a time, and all see the same minutes of the machine.

An engine started on its own differs from another of the same kind by about one per cent, which is as much as what is
measured here. In turns, each round compares every variant with stock at once; the medians of those ratios are shown.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

START_TIMEOUT_S = 400


class Job(NamedTuple):
    """Requests that are sent at once; every mode of an engine runs each job once a round.

    Attributes:
        batch: How many; 64 run at once.
        prompt: Tokens of each prompt.
        tokens: Tokens that each generates; on average, if more requests are sent than run at once.
    """

    batch: int
    prompt: int
    tokens: int

    @property
    def lengths(self) -> list[int]:
        """Tokens that each request generates: requests of a load come and go one by one."""
        if self.batch <= NUM_RUNNING:
            return [self.tokens] * self.batch
        return random.Random(self.batch).choices(
            range(self.tokens // 4, 2 * self.tokens - self.tokens // 4), k=self.batch
        )


NUM_RUNNING = 64
LONG = 129
BATCHES = (1, 16, 64)
PREFILL = Job(16, 1024, 1)
LOAD = Job(256, 128, 128)
WARM_UP = (Job(64, 64, 9), PREFILL)
"""What every mode runs once, untimed: kernels and graphs are loaded, pages are touched, connections are made."""
JOBS = [*(Job(batch, 64, tokens) for batch in BATCHES for tokens in (1, LONG)), *[PREFILL] * 3, LOAD]


class Served:
    """What `serve` runs; a variant opens its engine in `__init__` and says in `modes` how it can be used.

    Attributes:
        modes: Their names.
        vocabulary: Prompts are of token ids from 1000 to below it.
    """

    modes: Sequence[str] = ("idle",)
    vocabulary = 120_000
    _drawn = random.Random(0)

    def __init__(self, variant: str, model: str) -> None:
        self.llm = open_llm(model)

    def answer(self, asked: Any) -> Any:
        """Run ``(mode, job)``; the seconds that it took."""
        mode, job = asked
        prompts = [self._drawn.choices(range(1000, self.vocabulary), k=job.prompt) for _ in range(job.batch)]
        self.prepare(mode)
        params = [self.params(mode, tokens) for tokens in job.lengths]
        begin = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        self.check(mode, job, outputs)
        del outputs
        self.settle(mode)
        return seconds

    def prepare(self, mode: str) -> None:
        """Before each job."""

    def params(self, mode: str, tokens: int) -> Any:
        """Sampling parameters of every request of a job."""
        from vllm import SamplingParams

        return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)

    def check(self, mode: str, job: Job, outputs: Sequence[Any]) -> None:
        """Every request was served whole."""
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == job.lengths, (lengths, job.lengths)

    def settle(self, mode: str) -> None:
        """After each job, outside of its time."""

    def report(self) -> str:
        """What else there is to say at the end."""
        return ""


def open_llm(model: str, **settings: Any) -> Any:
    """`LLM` with random weights and room for several of its kind on one GPU."""
    from vllm import LLM

    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 4 << 30,
        "max_num_seqs": NUM_RUNNING,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
    }
    return LLM(model, **{**defaults, **settings})


def serve(connection: Connection, log: str, make: Callable[[str, str], Served], variant: str, model: str) -> None:
    """The engine's process."""
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # sampling is greedy, and FlashInfer may be missing
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # it uses NVLink multicast: not on a shared host
    os.environ["VLLM_CACHE_ROOT"] = f"{log}.cache"  # engines that start at once compile into folders of their own
    try:
        started = time.perf_counter()
        served = make(variant, model)
        connection.send((time.perf_counter() - started, served.modes))
        answer(connection, served)
    except Exception:  # noqa: BLE001  whatever it is, it goes to the log
        traceback.print_exc()
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(1)  # an engine core that still runs would be waited for


def answer(connection: Connection, served: Served) -> None:
    """Answer what is asked, until None is."""
    while (asked := connection.recv()) is not None:
        connection.send(served.answer(asked))
    connection.send(served.report())
    served.llm.llm_engine.engine_core.shutdown()


@dataclass
class Engine:
    """One process with one engine.

    Attributes:
        name: As shown.
        start_s: What it took to start, beside the others.
        seconds: Of each mode and job, one for each round.
    """

    name: str
    process: Any
    connection: Connection
    modes: Sequence[str] = ()
    start_s: float = 0.0
    seconds: dict[tuple[str, Job], list[float]] = field(default_factory=dict)

    def ask(self, question: Any, timeout_s: float = 300) -> Any:
        """What the process answers.

        Raises:
            TimeoutError: If it does not.
        """
        self.connection.send(question)
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"{self.name}: no answer to {question} in {timeout_s} s")
        return self.connection.recv()

    def run(self, mode: str, job: Job, *, is_kept: bool = True) -> None:
        """Run one job, and note its seconds; an engine that fails is reported and runs no more."""
        if mode not in self.modes:
            return
        try:
            seconds = self.ask((mode, job))
        except (OSError, EOFError) as error:
            print(f"{self.name} FAILED at {mode} {job}: {error!r}; see its log", flush=True)
            self.modes = ()
            self.process.kill()
            return
        if is_kept:
            self.seconds.setdefault((mode, job), []).append(seconds)

    def figures(self, mode: str) -> dict[str, list[float]]:
        """Milliseconds by column, one for each run: per output token, for prompts alone, and for a load."""
        taken = {job: self.seconds[mode, job] for job in JOBS}
        found = {}
        for batch in BATCHES:
            short, long = taken[Job(batch, 64, 1)], taken[Job(batch, 64, LONG)]
            found[f"bs{batch}"] = [(b - a) / (LONG - 1) * 1e3 for a, b in zip(short, long, strict=True)]
        found["prefill"] = [value * 1e3 for value in taken[PREFILL]]
        found["load"] = [value * 1e3 for value in taken[LOAD]]
        return found


def start(folder: Path, make: Callable[[str, str], Served], names: Sequence[str], model: str) -> list[Engine]:
    """Start an engine for each name, all at once; those that fail are reported and left out."""
    context, engines = multiprocessing.get_context("spawn"), []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, str(folder / f"{name}.log"), make, name, model))
        process.start()
        theirs.close()
        engines.append(Engine(name, process, ours))
    alive, deadline = [], time.monotonic() + START_TIMEOUT_S
    for engine in engines:
        try:
            if not engine.connection.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"not ready after {START_TIMEOUT_S} s")
            engine.start_s, engine.modes = engine.connection.recv()
        except (EOFError, TimeoutError) as error:
            print(f"{engine.name} FAILED to start: {error!r}; see its log", flush=True)
            engine.process.kill()
        else:
            print(f"{engine.name} is ready after {engine.start_s:.0f} s", flush=True)
            alive.append(engine)
    return alive


def run_rounds(
    engines: Sequence[Engine],
    seconds: float,
    after_round: Callable[[], None] = lambda: None,
    jobs: Sequence[Job] | None = None,
) -> int:
    """Time all jobs of all modes in random order, round by round, until `seconds` are over; at least two rounds.

    Args:
        engines: Those that run; what is measured is kept in them.
        seconds: For all rounds; the one that would end later is not begun.
        after_round: Called after each.
        jobs: What is timed; `JOBS` if None.
    """
    rng, started, num_rounds = random.Random(0), time.monotonic(), 0
    turns = [(engine, mode) for engine in engines for mode in engine.modes]
    jobs = JOBS if jobs is None else jobs
    for job in WARM_UP:
        for engine, mode in turns:
            engine.run(mode, job, is_kept=False)
    slowest = 0.0
    while any(engine.modes for engine in engines) and (
        num_rounds < 2 or time.monotonic() - started + slowest < seconds
    ):
        begin = time.monotonic()
        for job in jobs:
            rng.shuffle(turns)
            for engine, mode in turns:
                engine.run(mode, job)
        slowest = max(slowest, time.monotonic() - begin)
        num_rounds += 1
        after_round()
    return num_rounds


def table(engines: Sequence[Engine], baselines: Mapping[str, str]) -> list[str]:
    """A line for each mode: median milliseconds, and the median ratio to its baseline's idle mode with quartiles."""
    by_name = {engine.name: engine for engine in engines}
    lines = []
    for engine in engines:
        base = by_name.get(baselines[engine.name])
        base = base if base is not None and base.modes else None
        for mode in engine.modes:
            figures, cells = engine.figures(mode), []
            for column, values in figures.items():
                cell = f"{statistics.median(values):8.3f}"
                if base is not None and (base is not engine or mode != base.modes[0]):
                    against = base.figures(base.modes[0])[column]
                    ratios = [value / other * 100 - 100 for value, other in zip(values, against, strict=True)]
                    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                    cell += f" {middle:+6.2f}% ({low:+.1f}..{high:+.1f})"
                cells.append(f"{cell:31}")
            lines.append(f"{engine.name + ' ' + mode:24} {' '.join(cells)}".rstrip())
    return [
        f"{'ms':24} " + " ".join(f"{column:31}" for column in [*(f"bs{b} TPOT" for b in BATCHES), "prefill", "load"]),
        *lines,
    ]


def stop(engines: Sequence[Engine]) -> None:
    """Ask every engine for its report, and end it."""
    for engine in engines:
        if engine.modes and (report := engine.ask(None)):
            print(f"{engine.name}: {report}", flush=True)
    for engine in engines:
        engine.process.join(30)
        if engine.process.is_alive():
            print(f"{engine.name} did not end", file=sys.stderr)
            engine.process.kill()
