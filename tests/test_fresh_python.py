"""A program that is forked ends and prints as one in a new process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import fresh_python

PROGRAMS = {
    "ends": "print('out'); print('err', file=sys.stderr); print(sys.argv[1:], os.environ['GIVEN'], os.getcwd())",
    "raises": "print('out'); raise ValueError('told')",
    "exits": "sys.exit(3)",
    "exits with a text": "sys.exit('told')",
    "is killed": f"os.kill(os.getpid(), {int(signal.SIGKILL)})",
    "has duties at its end": "atexit.register(print, 'end'); threading.Timer(0.1, print, ['thread']).start()",
    "reads nothing": "print(repr(sys.stdin.read()))",
    "prints by itself": "os.system('echo beside')",
    "finds no other code of ours": "import examples",
    "fails in a thread": "threading.Thread(target=lambda: 1 / 0).start()",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_program_does_as_a_new_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import atexit, os, sys, threading\n{PROGRAMS[name]}\n")
    monkeypatch.setattr(fresh_python, "is_ready", lambda: True)

    def run(may_fork: bool) -> tuple[int, str, str]:
        environment = {"GIVEN": "given", "PYTHONPATH": ""}
        arguments = [str(program), "argument"]
        done = fresh_python.run_python(arguments, cwd=tmp_path, environment=environment, may_fork=may_fork)
        return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]

    assert run(may_fork=True) == run(may_fork=False)
    assert "GIVEN" not in os.environ
