"""An error that ends a program is printed after its engines were shut down, whatever came of that."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, signal, sys
from headgate.capture.engine.frontends.llm import shut_down_before_errors

class Client:
    def shutdown(self):
        print("engine ends", file=sys.stderr)
        if sys.argv[1] == "broken":
            raise OSError("no such process")

client, gone = Client(), Client()
for each in (client, client, gone):
    shut_down_before_errors(each)
hook = sys.excepthook
shut_down_before_errors(client)
assert sys.excepthook is hook
del each, gone
gc.collect()
if sys.argv[1] == "ctrl-c":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.kill(os.getpid(), signal.SIGINT)
if sys.argv[1] == "fine":
    sys.exit(0)
raise RuntimeError("the user's own error")
"""


@pytest.mark.parametrize(
    ("case", "status", "last"),
    [
        ("error", 1, "RuntimeError: the user's own error"),
        ("broken", 1, "RuntimeError: the user's own error"),
        ("ctrl-c", -2, "KeyboardInterrupt"),
    ],
)
def test_the_error_is_the_last_thing_that_is_printed(case: str, status: int, last: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, case], capture_output=True, text=True, check=False)

    lines = done.stderr.splitlines()
    assert done.returncode == status
    assert lines.count("engine ends") == 1
    assert lines[0] == "engine ends"
    assert lines[-1] == last


def test_a_program_that_ends_well_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "fine"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
