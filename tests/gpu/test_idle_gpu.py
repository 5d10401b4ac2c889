"""Idle headgate answers as stock does, bit for bit: every token and every logprob of 40 requests.

Compiled reproducibly (`engine_runs.REPRODUCIBLE`), five engines at once, each in a process and with a compile cache of
its own. Two stock engines show that the comparison means something. Needs 70 GB of GPU memory and a folder with a
model: GPU_TEST_MODEL, random weights will do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from idle_runs import PARTS

RUNS = Path(__file__).with_name("idle_runs.py")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each engine answered."""
    folder, processes = tmp_path_factory.mktemp("idle"), {}
    for variant in PARTS:
        with (folder / f"{variant}.log").open("wb") as log:
            command = [sys.executable, str(RUNS), variant, str(folder / f"{variant}.json")]
            processes[variant] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for variant, process in processes.items():
            code = process.wait(timeout=TIMEOUT_S)
            assert code == 0, (folder / f"{variant}.log").read_text(errors="replace")[-4000:]
    finally:
        for process in processes.values():
            process.kill()
    return {variant: json.loads((folder / f"{variant}.json").read_text()) for variant in PARTS}


@pytest.mark.parametrize("variant", [name for name in PARTS if name != "stock"])
def test_every_token_and_logprob_is_stocks(answers, variant):
    pairs = list(zip(answers["stock"], answers[variant], strict=True))

    other_tokens = [index for index, (stock, ours) in enumerate(pairs) if stock["tokens"] != ours["tokens"]]
    other_logprobs = [index for index, (stock, ours) in enumerate(pairs) if stock["logprobs"] != ours["logprobs"]]

    assert (other_tokens, other_logprobs) == ([], [])
