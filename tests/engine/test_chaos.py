"""The short form of the chaos run: see `tests.chaos.run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "tests.chaos.run", "--minutes", "0", "--seed", "20261123", "--size", "24", "--start", "fork"]
TIMEOUT_S = 1200


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_everything_is_right_although_everything_fails(tmp_path: Path) -> None:
    command = [sys.executable, *COMMAND, "--keep", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-5000:]}"
