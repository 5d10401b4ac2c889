"""The runner of the tests: what it started ends with it, and what may run at a time is bounded by memory."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.deadlines import patience

CI = Path(__file__).resolve().parents[3] / ".ci"
TIMEOUT_S = patience(60)

RUNNER = f"""
import sys
sys.path[:0] = [{str(CI)!r}]
import run_tests
from pathlib import Path
run_tests.LOGS, run_tests.TELL_S, run_tests.LOOK_S = Path(sys.argv[1]), 0.3, 0.1
run_tests.LARGEST = 2**20  # whatever else this machine does, there is room for two
jobs = [run_tests.Job(name, (sys.argv[2], name)) for name in ("one", "two", "three")]
sys.exit(run_tests.run_all(jobs, 2))
"""
JOB = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
print("at work", flush=True)
time.sleep(600 if sys.argv[1] != "quick" else 0)
"""


@pytest.fixture
def run_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    import run_tests

    return run_tests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whatever_it_started_ends_with_it(tmp_path: Path, number: int) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    logs = tmp_path / "logs"
    command = [sys.executable, "-c", RUNNER, str(logs), str(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        line = ""
        while not re.search("two .*at work", line):  # it says what runs, and since when
            line = runner.stdout.readline()
            assert line, "it has ended"
        children = [int((logs / f"{name}.log").read_text().split()[0]) for name in ("one", "two")]
        ends = [os.pidfd_open(child) for child in children]
        runner.send_signal(number)
        rest = runner.stdout.read()

    for end in ends:
        assert select.select([end], [], [], TIMEOUT_S)[0], "it lives on"
        os.close(end)
    assert runner.returncode == 128 + number
    assert "4 processes were left and have been ended" in rest
    assert not (logs / "three.log").exists()


@pytest.mark.parametrize(
    ("running", "waiting", "begins"),
    [
        ([], ["engine", "light"], "engine"),
        (["engine"], ["light", "engine"], "light"),
        (["engine", "light"], ["light", "engine"], "engine"),
        (["engine", "engine"], ["engine", "light"], "light"),
        (["engine", "engine", "light"], ["engine", "light"], None),
        (["light"], ["light"], "light"),
        (["light", "light"], ["light"], None),
        (["light", "light"], ["engine"], "engine"),
    ],
)
def test_one_light_job_runs_beside_all_others(
    run_tests: Any, monkeypatch: pytest.MonkeyPatch, running: list[str], waiting: list[str], begins: str | None
) -> None:
    monkeypatch.setattr(run_tests.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * run_tests.GIB))
    jobs = [run_tests.Job(name, (), is_light=name == "light") for name in waiting]
    runner = run_tests.Runner(jobs, 2)
    runner._running = {
        number: run_tests.Running(run_tests.Job(name, (), is_light=name == "light"), 0.0)
        for number, name in enumerate(running)
    }

    job = runner._next()

    assert (job and job.name) == begins


def test_what_may_run_at_a_time_is_bounded_by_memory(run_tests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = run_tests.GIB
    free = 100 * gib
    monkeypatch.setattr(run_tests.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    runner = run_tests.Runner([], 9)

    def has_room(*taken: float) -> bool:
        running = [run_tests.Running(run_tests.Job("any", ()), 0.0, int(each * gib)) for each in taken]
        runner._running = dict(enumerate(running))
        return bool(runner._has_room())

    assert has_room(1, 1, 1)
    assert not has_room(1, 1, 1, 1), "24 GiB, though the machine has more: they may grow to 6 each"
    assert not has_room(7, 6, 6)
    free = 9 * gib
    assert has_room()
    assert has_room(5)
    assert not has_room(1), "others have taken the rest"
    free = 0
    assert has_room(), "one at a time can always be tried"


SHARING = f"""
import os, sys
sys.path[:0] = [{str(CI)!r}]
import run_tests
big = bytearray(os.urandom(1 << 20) * 64)
before = run_tests.taken_by([])[0]
end, theirs = os.pipe()
children = []
for _ in range(2):
    if not (child := os.fork()):
        os.close(theirs)
        os.read(end, 1)
        os._exit(0)
    children.append(child)
print(before, *run_tests.taken_by(children).values())
"""


def test_memory_that_processes_share_counts_once() -> None:
    done = subprocess.run([sys.executable, "-c", SHARING], capture_output=True, text=True, check=True)

    before, *taken = (int(each) >> 20 for each in done.stdout.split())
    assert len(taken) == 3
    assert sum(taken) < before + 32
    assert min(taken) >= 64 // 3, "each of the three has its share"
