"""Damaged files of every format: only errors of headgate come out, no crash, no hang, no memory without bound.

Runs for FUZZ_SECONDS, 8 if that is not set; ``make fuzz`` runs for longer. What a failing case prints repeats it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

SECONDS = float(os.environ.get("FUZZ_SECONDS", "8"))
SEED = os.environ.get("FUZZ_SEED", "20261127")


@pytest.mark.timeout(SECONDS + 600)
def test_damaged_files_are_refused_by_errors_of_headgate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.files", str(tmp_path), str(SECONDS), SEED]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "refused" in done.stdout
