"""What start-up says headgate costs is what it costs: device memory with it and without, on an otherwise idle GPU.

One process per engine, one after the other, with the same model and the same KV cache; each says what its device has
free before and after (`memory_runs`). Needs a GPU that nobody else uses, and a folder with a model: GPU_TEST_MODEL,
random weights will do. Start-up and compile times of cold starts are printed by the way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUNS = Path(__file__).with_name("memory_runs.py")
MIB = 1 << 20
TOLERANCE_MIB = 96
"""Segments of PyTorch's allocator, kernels that are loaded and recorded graphs differ by so much."""
TIMEOUT_S = 200


def run(mode: str, folder: Path) -> dict[str, Any]:
    """One engine, started and ended: what it said, and its log as ``log``."""
    log = folder / f"{mode}.log"
    with log.open("wb") as target:
        command = [sys.executable, str(RUNS), mode, str(folder / f"{mode}.cache")]
        done = subprocess.run(
            command,
            stdout=target,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},  # what start-up says is what is tested
        )
    text = log.read_text(errors="replace")
    assert done.returncode == 0, text[-6000:]
    said = next(line.removeprefix("RAN ") for line in text.splitlines() if line.startswith("RAN "))
    print(mode, said)
    return {**json.loads(said), "log": text}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stock vLLM's engine said."""
    return run("stock", tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module", params=["steering", "capture", "both"])
def mode(request: pytest.FixtureRequest) -> str:
    """One of headgate's configurations."""
    return str(request.param)


@pytest.fixture(scope="module")
def ours(mode: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What its engine said."""
    return run(mode, tmp_path_factory.mktemp("memory"))


def printed_mib(log: str) -> dict[str, float]:
    """What start-up printed: MiB of device memory of capture, and of steering."""
    found = {
        "capture": re.search(r"capture: ([\d.]+) MiB of \w+ memory", log),
        "steering": re.search(r"steering: \d+ sites, \d+ slots, ([\d.]+) MiB of \w+ memory", log),
    }
    return {name: float(match[1]) for name, match in found.items() if match}


def test_start_up_says_what_each_part_takes(ours, mode):
    wanted = {"steering", "capture"} if mode == "both" else {mode}

    assert printed_mib(ours["log"]).keys() == wanted


def test_what_is_printed_is_what_the_parts_hold(ours):
    held, printed = ours["device_bytes"] / MIB, sum(printed_mib(ours["log"]).values())

    assert abs(held - printed) < 0.2, (held, printed)


def test_the_device_has_that_much_less_free_than_under_stock(ours, stock):
    used = (ours["used_bytes"] - stock["used_bytes"]) / MIB
    held = ours["device_bytes"] / MIB

    assert abs(used - held) < TOLERANCE_MIB, f"{used:.0f} MiB more in use, {held:.0f} MiB accounted for"


def test_the_model_and_the_cache_are_stock_s(ours, stock):
    assert ours["kv_tokens"] == stock["kv_tokens"]
