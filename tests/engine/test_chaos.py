"""The short form of the chaos run: see `tests.chaos.run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.run import TOO_SLOW
from tests.deadlines import patience
from tests.fakes.forks import ADDRESS

ROOT = Path(__file__).parents[2]
LIMIT_S = 900
"""It takes 120 s on two quiet cores, and gives up here."""
CLEAR_S = 300
"""For what it does when it has given up."""
COMMAND = ["-m", "tests.chaos.run", "--minutes", "0", "--seed", "20261123", "--size", "24", "--start", "fork"]


@pytest.mark.timeout(LIMIT_S + CLEAR_S + 60)
def test_everything_is_right_although_everything_fails(tmp_path: Path) -> None:
    command = [sys.executable, *COMMAND, "--keep", str(tmp_path), "--limit", str(LIMIT_S)]
    # The run counts and kills what its server started: a fork of another process would be none of these.
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS}

    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S + patience(CLEAR_S),
        check=False,
    )

    if done.returncode == TOO_SLOW:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
