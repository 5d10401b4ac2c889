"""A real script that leaves its `LLM` open: what it captured is delivered, and its own words are the last ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deadlines import patience
from tests.engine import ending_script
from tests.engine.tiny_models import tiny_model

ROOT = Path(__file__).parents[2]
MOST_S = 50
"""Seconds beside the consumer's own in which all else of the script ends."""
TRACEBACK = "Traceback (most recent call last):"
ENTRY_POINTS = "[vllm.capture_consumers]\nslow = tests.engine.ending_script:Slow\n"


@pytest.mark.parametrize(("end", "start"), [("ends", "spawn"), ("fails", "fork")])
def test_a_script_closes_its_consumers_at_its_end_and_says_why_it_failed_last(
    tmp_path: Path, end: str, start: str
) -> None:
    """However vLLM starts its processes."""
    info = tmp_path / "site" / "slow_consumer-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-consumer\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    log = tmp_path / "log.txt"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = start
    environment["PYTHONPATH"] = os.pathsep.join([str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])

    done = subprocess.run(
        [sys.executable, ending_script.__file__, str(tiny_model("llama")), str(log), end],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )

    is_over = time.monotonic()
    shown = done.stdout + done.stderr
    assert done.returncode == (end == "fails"), shown
    *captured, ended, closed = log.read_text().splitlines()
    assert (captured, closed) == (["captured 6", "captured 6"], "closed"), shown
    assert is_over - float(ended) < ending_script.CLOSING_S + patience(MOST_S), shown
    assert "force killing" not in shown, shown
    tracebacks = [line for line in shown.splitlines() if line.startswith("Traceback")]
    assert tracebacks == [TRACEBACK] * (end == "fails"), shown
    if end == "fails":
        assert done.stderr.splitlines()[-1] == ending_script.ERROR
