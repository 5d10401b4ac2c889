"""Runs the tests in processes of their own, a few at a time: ``run_tests.py [--jobs N] [quick|unit|engine]``.

``quick`` runs the tests of pure modules: folders of ``tests/unit`` that need no vLLM, without what takes long.

Each file that starts engines gets a process of its own, or shares one with a few that are known to get on (`TOGETHER`):
an engine leaves patched classes, process groups and sockets behind in the process that it ran in, and the fakes of
tests/frontend stand in for vLLM's worker there. Importing vLLM takes 13 s of a core, so it is imported once, here, and
these processes are forked from there. What a process printed is shown when it fails; otherwise its last line, and the
whole is kept in .pytest_cache/logs. Their engine cores, workers, servers and headgate's own processes are forked as
well (`tests.fakes.forks`); what tests run as a user does, README's scripts and server, the demo, traced servers and
the chaos run, begins in a new Python. Tests without engines wait for half of their time, so one process of them runs
beside as many with engines as there may be at a time.

Every minute it says what runs. A process is begun only where the machine has the memory that the largest one takes, of
24 GiB in all, and the most that they took together is printed at the end. Whatever was started ends with this process:
on SIGTERM and SIGINT, too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage, struct_rusage
from typing import Any, NamedTuple, NoReturn

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PYTEST_OPTIONS = ("--durations=15", "--timeout=600")
PYTEST = (sys.executable, "-m", "pytest", *PYTEST_OPTIONS)
LOGS = ROOT / ".pytest_cache" / "logs"
NOTHING_COLLECTED = 5
GIB = 2**30
LIMIT = 24 * GIB
"""Bytes that all processes of the tests may take together, if the machine has them."""
LARGEST = 6 * GIB
"""Bytes that a process is expected to take, its own processes included; the largest one of all took 5."""
TELL_S, LOOK_S, POLL_S = 60.0, 5.0, 0.2
"""Intervals at which is told what runs, memory is looked at, and ends are waited for."""
END_S = 10.0
"""Seconds that processes have to end when they are told to; then they are killed."""
PR_SET_CHILD_SUBREAPER = 36
LONGEST = (
    "test_chaos",
    "test_parity_families",
    "test_examples",
    "test_studio",
    "test_readme",
    "test_parity_smollm2",
    "test_fresh_processes",
    "test_neighbours",
)
"""Begun first, so that none of them is left for the end."""

TOGETHER = {
    "tests/frontend: applications": ("test_app", "test_access", "test_random_bodies", "test_route_table"),
    "tests/frontend: engine cores": ("test_steering_core", "test_steering_admission", "test_steering_process"),
    "tests/frontend: LLM": ("test_llm", "test_steering_llm", "test_refusals_at_start"),
    "tests/frontend: AsyncLLM": ("test_async_llm", "test_steering_async"),
    "tests/engine: tiny models": (
        "test_neighbours",
        "test_steering_cache",
        "test_steering_churn",
        "test_attribution",
        "test_new_weights",
    ),
    "tests/engine: SmolLM2": ("test_frontend", "test_hidden_states", "test_parity_smollm2"),
}
"""Files of one folder that share a process, and its engines where they ask for the same."""

IMPORTED = (
    *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    *("vllm.v1.worker.cpu_model_runner", "vllm.distributed.kv_transfer.kv_connector.factory", "compressed_tensors"),
)
"""Modules that processes with engines find imported, beside those of headgate."""
STARTERS = ("vllm.utils.system_utils", "vllm.v1.utils")
"""Modules of vLLM that start its engine cores and workers, and its API servers."""
NOT_IMPORTED = ("kernels", "commands", "testing", "__main__")
"""Modules and packages of headgate that are not: they are programs, for others' tests, or read Triton's switch."""


class Job(NamedTuple):
    """One process of pytest, or of another program of this Python.

    Attributes:
        name: For people.
        arguments: Of pytest; the whole command line behind Python, if it begins with a path to a program.
        environment: Set there beside what is set here.
        is_forked: Whether it begins with vLLM imported, in a fork of this process.
        is_light: Whether it starts no engine and waits for half of its time, so that one runs beside all others.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    is_forked: bool = False
    is_light: bool = False

    @property
    def log(self) -> Path:
        """Where it prints to."""
        return LOGS / f"{re.sub('[/: ]+', '-', self.name)}.log"


def unit_jobs() -> list[Job]:
    """The tests that start no engine, in two parts of about one length, and those of kernels.

    Kernels are read by Triton's interpreter if its switch is set before the first of them is imported.
    """
    marker = ("-m", "not engine and not gpu and not extended")
    others = ("unit", "kernels", "engine", "gpu", "__pycache__")  # all of the folders engine and gpu is marked so
    rest = [str(path) for path in sorted((ROOT / "tests").iterdir()) if path.name not in others]
    rest = [path for path in rest if Path(path).is_dir() or Path(path).name.startswith("test_")]
    return [
        Job("unit", (*marker, "tests/unit"), {"TESTS_EXAMPLES": "50"}, is_light=True),
        Job("the rest without engines", (*marker, *rest), is_light=True),
        Job("kernels", (*marker, "tests/kernels"), {"TRITON_INTERPRET": "1"}, is_light=True),
    ]


def quick_jobs() -> list[Job]:
    """The tests of pure modules, in two parts; they fail if one of them imports vLLM."""
    marker = ("-m", "not engine and not gpu and not extended", "-p", "tests.without_vllm", "--no-header")
    capture = [
        ROOT / "tests/unit/capture" / name for name in ("schema", "planning", "staging", "delivery", "monitoring")
    ]
    names = ("vectors/test_sums.py", "vectors/test_directions.py", "files", "requests", "core")
    steering = [ROOT / "tests/unit/steering" / name for name in names]
    others = [ROOT / "tests/unit/consumers" / name for name in ("test_memory.py", "test_logging.py", "test_dump.py")]
    parts = {"quick, capture": capture, "quick, steering and consumers": [*steering, *others]}
    return [Job(name, (*marker, *map(str, paths))) for name, paths in parts.items()]


def engine_jobs() -> list[Job]:
    """A job for each file that may hold tests with engines, or for those that share a process."""
    files = [
        *ROOT.glob("tests/engine/test_*.py"),
        *ROOT.glob("tests/frontend/test_*.py"),
        ROOT / "tests/test_examples.py",
        ROOT / "tests/test_guides.py",
        ROOT / "tests/test_readme.py",
        ROOT / "tests/test_example_notebook.py",
    ]
    name_of = {(name.partition(":")[0], stem): name for name, stems in TOGETHER.items() for stem in stems}
    jobs: dict[str, list[str]] = {}
    for path in sorted(files, key=lambda path: (LONGEST.index(path.stem) if path.stem in LONGEST else 99, str(path))):
        file = str(path.relative_to(ROOT))
        jobs.setdefault(name_of.get((str(path.parent.relative_to(ROOT)), path.stem), file), []).append(file)
    marker = ("-m", "engine and not gpu and not extended")
    return [Job(name, (*marker, *paths), is_forked=True) for name, paths in jobs.items()]


def start(job: Job) -> int:
    """Start its process; returns the id."""
    # Threads that wait for each other spin on shared cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **job.environment}
    if job.is_forked:
        return os.fork() or become(job, environment)
    program = [sys.executable] if job.arguments[0].endswith(".py") else PYTEST
    with job.log.open("wb") as file:
        process = subprocess.Popen(
            [*program, *job.arguments],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's signals reach this process alone, which ends all others
        )
    process.returncode = 0  # `Runner` waits for it
    return process.pid


def become(job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Be ``python -m pytest``, in a fork."""
    import pytest

    from tests.fakes.forks import finish

    os.setsid()
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    with job.log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv[1:], sys.path[0] = [], str(ROOT)
    finish(lambda: int(pytest.main([*PYTEST_OPTIONS, *job.arguments])))


def import_vllm() -> None:
    """Import what processes with engines need, under what their tests set before.

    Raises:
        RuntimeError: If that started a thread: forks would lack it.
    """
    from tests.environment import set_environment
    from tests.fakes.forks import Forking

    set_environment()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in (*IMPORTED, *modules_of_headgate()):
        importlib.import_module(name)
    compile_ranks()
    for name in STARTERS:
        importlib.import_module(name).multiprocessing = _Forking()  # type: ignore[attr-defined]
    importlib.import_module("headgate.capture.links.child_process").subprocess = Forking()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # collections in forks pass over all this, and its pages stay shared
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"importing vLLM started threads: {threading.enumerate()}")


def modules_of_headgate() -> Iterator[str]:
    """Names of all modules but those below `NOT_IMPORTED`."""
    for package in ("capture", "steering", "consumers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not set(parts) & set(NOT_IMPORTED):
                yield ".".join(("headgate", *parts)).removesuffix(".__init__")


def compile_ranks() -> None:
    """Let vLLM compile what it ranks tokens with, which each process that asks for logprobs would do for seconds."""
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    tqdm.monitor_interval = 0  # no thread
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with torch.inference_mode():
        for size in (16, 32, 64):  # from the second on, sizes are symbols
            logprobs, values = torch.zeros(2, size), torch.zeros(2, 1)
            for each in (logprobs, values):
                torch._dynamo.decorators.mark_unbacked(each, 0)
            batched_count_greater_than(logprobs, values)
    if folder is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it to its default


class _Forking:
    """Stands for the module ``multiprocessing`` where vLLM asks how to start its processes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        """Fork, whatever is asked for: on a CPU vLLM would spawn, and each engine core import it all once more."""
        return multiprocessing.get_context("fork")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", nargs="?", choices=("quick", "unit", "engine"), help="both, if none is named")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2), help="processes at a time")
    options = parser.parse_args(arguments)
    engines = engine_jobs() if options.group in (None, "engine") else []
    units = {"quick": quick_jobs, "engine": list, "unit": unit_jobs}.get(options.group, unit_jobs)()
    return run_all([*engines[:1], *units, *engines[1:]], options.jobs)


@dataclass
class Running:
    """A job's process.

    Attributes:
        job: What it runs.
        began: When, on the monotonic clock.
        taken: Bytes that it and its own processes take; memory that several share is theirs in equal parts.
        most: The most so far.
    """

    job: Job
    began: float
    taken: int = 0
    most: int = 0

    def state(self) -> str:
        """What it is at: the last file that it named, or the last that it printed."""
        # A fork that has only begun has opened no log yet.
        lines = self.job.log.read_text(errors="replace").splitlines() if self.job.log.exists() else []
        last = next((line for line in reversed(lines) if line.startswith("tests/")), "".join(lines[-1:]))
        return (
            f"{self.job.name} ({time.monotonic() - self.began:.0f} s, {self.taken / GIB:.1f} GiB): {last.strip()[:90]}"
        )

    def end(self, status: int, used: struct_rusage) -> tuple[bool, str]:
        """Whether it passed, and what to show."""
        is_good = os.waitstatus_to_exitcode(status) in (0, NOTHING_COLLECTED)
        printed = self.job.log.read_text(errors="replace")
        lines = printed.splitlines()
        summary = next((line for line in reversed(lines) if line.startswith("=")), lines[-1] if lines else "no summary")
        times = f"{time.monotonic() - self.began:6.0f} s, {used.ru_utime + used.ru_stime:4.0f} of CPU"
        line = f"{times}, {self.most / GIB:4.1f} GiB  {self.job.name}: {summary.strip('= ')}"
        return is_good, line if is_good else f"{printed}\n{line} FAILED"


class Runner:
    """Runs jobs in order, a few at a time.

    Args:
        jobs: The jobs.
        at_a_time: How many at most, and one light one beside them.
    """

    def __init__(self, jobs: Sequence[Job], at_a_time: int) -> None:
        self._num_jobs = len(jobs)
        self._waiting = deque(jobs)
        self._at_a_time = at_a_time
        self._running: dict[int, Running] = {}
        self._failed: list[str] = []
        self._began = self._told_at = self._looked_at = time.monotonic()
        self._most, self._most_of = 0, "nothing"

    def run(self) -> int:
        """Run all; returns the exit status."""
        while self._waiting or self._running:
            while (job := self._next()) is not None:
                self._waiting.remove(job)
                self._running[start(job)] = Running(job, time.monotonic())
            process, status, used = os.wait4(-1, os.WNOHANG)  # tells what it used, its own children included
            if (ended := self._running.pop(process, None)) is not None:
                is_good, shown = ended.end(status, used)
                print(shown, flush=True)
                self._failed += [] if is_good else [ended.job.name]
            elif not process:  # an orphan otherwise
                self._watch()
                time.sleep(POLL_S)
        print(
            f"{self._num_jobs - len(self._failed)} of {self._num_jobs} test processes passed", self._memory(), sep="; "
        )
        print(*(f"FAILED {name}" for name in self._failed), sep="\n", end="\n" if self._failed else "")
        return 1 if self._failed else 0

    def _next(self) -> Job | None:
        """The first job that may begin now."""
        num_light = sum(each.job.is_light for each in self._running.values())
        may_begin = {
            True: not num_light or len(self._running) < self._at_a_time,
            False: len(self._running) - num_light < self._at_a_time and len(self._running) <= self._at_a_time,
        }
        job = next((each for each in self._waiting if may_begin[each.is_light]), None)
        return job if job is not None and self._has_room() else None

    def _has_room(self) -> bool:
        """Whether the memory for one more is there, when those that run have taken what they may."""
        free = psutil.virtual_memory().available
        taken = [each.taken for each in self._running.values()]
        limit = min(LIMIT, free + sum(taken))
        return not taken or sum(max(each, LARGEST) for each in taken) + LARGEST <= limit

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            states = "".join(f"\n         {each.state()}" for each in self._running.values())
            print(f"{now - self._began:6.0f} s  {len(self._waiting)} wait, these run:{states}", flush=True)

    def _look(self) -> None:
        """Look at the memory of every process."""
        taken = taken_by([*self._running])
        for process, each in self._running.items():
            each.taken = taken[process]
            each.most = max(each.most, each.taken)
        if (total := sum(taken.values())) > self._most:
            self._most, self._most_of = total, " + ".join(each.job.name for each in self._running.values())

    def _memory(self) -> str:
        return f"at most {self._most / GIB:.1f} GiB at a time, looked at every {LOOK_S:.0f} s: {self._most_of}"


def descendants() -> dict[int, list[int]]:
    """Processes that this one and its own have started, by which of its children they come from.

    Those whose parent has ended are children of this process: see `run_all`.
    """
    parent_of: dict[int, int] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parent_of[process.pid] = process.ppid()
    found: dict[int, list[int]] = {}
    for process_id in parent_of:
        one = process_id
        while parent_of.get(one, 0) not in (0, os.getpid()):
            one = parent_of[one]
        if parent_of.get(one) == os.getpid():
            found.setdefault(one, []).append(process_id)
    return found


def taken_by(children: Sequence[int]) -> dict[int, int]:
    """Bytes that each of these children takes with its own processes, and under 0 this process and orphans."""
    taken = dict.fromkeys([0, *children], 0)
    for child, family in {os.getpid(): [os.getpid()], **descendants()}.items():
        for process in family:
            with suppress(OSError):  # it has ended
                shares = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
                taken[child if child in taken else 0] += 1024 * int(shares[1]) if shares else 0
    return taken


def end_descendants() -> int:
    """End whatever was started here and runs; returns how many processes those were."""
    told: set[tuple[int, int]] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + END_S
        while (left := descendants()) and time.monotonic() < until:
            for process in chain.from_iterable(left.values()):
                if (process, number) not in told:
                    told.add((process, number))
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(POLL_S)
    return len({process for process, _ in told})


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_all(jobs: Sequence[Job], at_a_time: int) -> int:
    """Run them in order, so many at a time; returns the exit status. Whatever they have started ends here."""
    LOGS.mkdir(parents=True, exist_ok=True)
    keeper = None
    if any(job.is_forked for job in jobs):
        from tests.fakes.forks import keep

        import_vllm()
        keeper = keep()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process
    for number in ENDING:
        signal.signal(number, _stop)
    try:
        return Runner(jobs, at_a_time).run()
    finally:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        if keeper is not None:
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
        if (count := end_descendants()) > 0:
            print(f"{count} processes were left and have been ended", flush=True)
        used = getrusage(RUSAGE_CHILDREN)
        print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU in all, with what was forked for tests", flush=True)
        gc.unfreeze()


def _stop(number: int, _frame: object) -> NoReturn:
    print(f"{signal.Signals(number).name}: ending what runs", flush=True)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    sys.exit(main())
