"""Engines that run at once on one GPU, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, found {torch.cuda.device_count()}"
)

ROOT = Path(__file__).parents[2]


def run_side_by_side(
    commands: Mapping[str, Sequence[str]], folder: Path, timeout_s: float, **environment: str
) -> dict[str, str]:
    """Run Python programs at once; what each printed, by name. Logs are kept in `folder`. They can import `tests`.

    Raises:
        AssertionError: With the log of one that failed.
        subprocess.TimeoutExpired: If one takes too long.
    """
    processes, logs = {}, {name: folder / f"{name}.log" for name in commands}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, command in commands.items():
        with logs[name].open("wb") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, **environment},
            )
    try:
        for name, process in processes.items():
            code = process.wait(timeout=timeout_s)
            assert code == 0, logs[name].read_text(errors="replace")[-6000:]
    finally:
        for process in processes.values():
            process.kill()
    return {name: log.read_text(errors="replace") for name, log in logs.items()}


def run_modes(
    program: Path, modes: Sequence[str], folder: Path, timeout_s: float, **environment: str
) -> dict[str, dict[str, Any]]:
    """What ``program MODE OUT.pt`` (`engine_runs`, `soak_runs`) saw in these modes, all at once."""
    outs = {mode: folder / f"{mode}.pt" for mode in modes}
    commands = {mode: [str(program), mode, str(out)] for mode, out in outs.items()}
    for log in run_side_by_side(commands, folder, timeout_s, **environment).values():
        print(next(line for line in log.splitlines() if line.startswith("RAN")))
    return {mode: torch.load(out, weights_only=False) for mode, out in outs.items()}
