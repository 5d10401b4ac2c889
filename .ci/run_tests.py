"""Runs the tests in processes of their own, a few at a time: ``run_tests.py [--jobs N] [quick|unit|engine]``.

``quick`` runs the tests of pure modules: folders of ``tests/unit`` that need no vLLM, without what takes long.

Each file that starts engines gets a process of its own, or shares one with a few that are known to get on (`TOGETHER`):
an engine leaves patched classes, process groups and sockets behind in the process that it ran in, and the fakes of
tests/frontend stand in for vLLM's worker there. Importing vLLM takes 13 s of a core, so it is imported once, here, and
these processes are forked from there. What a process printed is shown when it fails; otherwise its last line, and the
whole is kept in .pytest_cache/logs. Their engine cores and workers are forked as well; servers, the demo and scripts
that tests run as a user does start theirs as vLLM does by itself.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import struct_rusage
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
PYTEST_OPTIONS = ("--durations=15", "--timeout=600")
PYTEST = (sys.executable, "-m", "pytest", *PYTEST_OPTIONS)
LOGS = ROOT / ".pytest_cache" / "logs"
NOTHING_COLLECTED = 5
LONGEST = (
    "test_chaos",
    "test_parity_families",
    "test_examples",
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

IMPORTED = ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""Modules that processes with engines find imported."""


class Job(NamedTuple):
    """One process of pytest, or of another program of this Python.

    Attributes:
        name: For people.
        arguments: Of pytest; the whole command line behind Python, if it begins with a path to a program.
        environment: Set there beside what is set here.
        is_forked: Whether it begins with vLLM imported, in a fork of this process.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    is_forked: bool = False

    @property
    def log(self) -> Path:
        """Where it prints to."""
        return LOGS / f"{re.sub('[/: ]+', '-', self.name)}.log"


def unit_jobs() -> list[Job]:
    """The tests that start no engine, in two parts of about one length, and those of kernels.

    Kernels are read by Triton's interpreter if its switch is set before the first of them is imported.
    """
    marker = ("-m", "not engine and not gpu and not extended")
    rest = [
        str(path) for path in sorted((ROOT / "tests").iterdir()) if path.name not in ("unit", "kernels", "__pycache__")
    ]
    rest = [path for path in rest if Path(path).is_dir() or Path(path).name.startswith("test_")]
    return [
        Job("unit", (*marker, "tests/unit")),
        Job("the rest without engines", (*marker, *rest)),
        Job("kernels", (*marker, "tests/kernels"), {"TRITON_INTERPRET": "1"}),
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
            [*program, *job.arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    process.returncode = 0  # `run_all` waits for it
    return process.pid


def become(job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Be ``python -m pytest``, in a fork."""
    import pytest

    with job.log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv[1:], sys.path[0] = [], str(ROOT)
    status = 1
    try:
        status = int(pytest.main([*PYTEST_OPTIONS, *job.arguments]))
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end; it waits for threads
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 whatever it is, it is in the log, and the status tells
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # taking all modules apart takes seconds


def told(job: Job, took: float, status: int, used: struct_rusage) -> tuple[bool, str]:
    """Whether a process that ended passed, and what to show."""
    is_good = os.waitstatus_to_exitcode(status) in (0, NOTHING_COLLECTED)
    printed = job.log.read_text(errors="replace")
    lines = printed.splitlines()
    summary = next((line for line in reversed(lines) if line.startswith("=")), lines[-1] if lines else "no summary")
    times = f"{took:6.0f} s, {used.ru_utime + used.ru_stime:4.0f} of CPU"
    line = f"{times}  {job.name}: {summary.strip('= ')}"
    return is_good, line if is_good else f"{printed}\n{line} FAILED"


def import_vllm() -> None:
    """Import what processes with engines need, under what their tests set before.

    Raises:
        RuntimeError: If that started a thread: forks would lack it.
    """
    from tests.environment import set_environment

    set_environment()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("vllm.utils.system_utils").multiprocessing = _Forking()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # collections in forks pass over all this, and its pages stay shared
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"importing vLLM started threads: {threading.enumerate()}")


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


def run_all(jobs: Sequence[Job], at_a_time: int) -> int:
    """Run them in order, so many at a time; returns the exit status."""
    LOGS.mkdir(parents=True, exist_ok=True)
    if any(job.is_forked for job in jobs):
        import_vllm()
    waiting, running, failed = deque(jobs), dict[int, tuple[Job, float]](), list[str]()
    while waiting or running:
        while waiting and len(running) < at_a_time:
            job = waiting.popleft()
            running[start(job)] = job, time.monotonic()
        process, status, used = os.wait4(-1, 0)  # tells what it used, its own children included
        job, began = running.pop(process)
        is_good, shown = told(job, time.monotonic() - began, status, used)
        print(shown, flush=True)
        if not is_good:
            failed.append(job.name)
    gc.unfreeze()
    print(
        f"{len(jobs) - len(failed)} of {len(jobs)} test processes passed",
        *(f"FAILED {name}" for name in failed),
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    sys.exit(main())
