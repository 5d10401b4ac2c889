"""Sizes that nobody configured: from this machine's memory and processors, or from what its container may use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from headgate.capture.engine.worker import capture_part
from headgate.capture.engine.worker.capture_part import CapturePart, default_ring_rows, default_staging_bytes
from headgate.capture.monitoring import machine_memory
from headgate.capture.monitoring.machine_memory import (
    available_memory,
    num_processors,
    share_of_memory,
)
from headgate.capture.schema.config import CaptureConsumersConfig
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import Site, parse_sites
from headgate.consumers.filesystem.consumer import parse_params, sizes_of

MIB, GIB = 1 << 20, 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\nHugePages_Total:  0\n"

Machine = Callable[[Mapping[str, str]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Makes a machine of 64 GiB, of which 32 are available, of 16 processors, and of the files that it is given."""

    def make(files: Mapping[str, str]) -> None:
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(machine_memory, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return make


def test_this_machine_has_the_memory_that_others_see() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total
    assert 1 <= num_processors() <= (os.cpu_count() or 1)


def test_without_a_limit_it_is_all_of_the_machine(machine: Machine) -> None:
    machine({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})

    assert (available_memory(), num_processors()) == (32 * GIB, 16)


@pytest.mark.parametrize("place", ["", "jobs/mine/"])
def test_limits_of_version_2_count_also_those_of_groups_above(machine: Machine, place: str) -> None:
    folder = f"sys/fs/cgroup/{place}"
    machine(
        {
            "proc/self/cgroup": "0::/jobs/mine/inner\n",
            f"{folder}memory.max": f"{8 * GIB}\n",
            f"{folder}memory.current": f"{3 * GIB}\n",
            f"{folder}memory.stat": f"anon 7\ninactive_file {GIB}\n",
            f"{folder}cpu.max": "250000 100000\n",
        }
    )

    assert (available_memory(), num_processors()) == (6 * GIB, 3)


def test_limits_of_version_1_count(machine: Machine) -> None:
    machine(
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/a\n8:memory:/a/b\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/a/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        }
    )

    assert (available_memory(), num_processors()) == (2 * GIB, 1)


def test_a_share_has_bounds(machine: Machine) -> None:
    machine({})

    assert share_of_memory(10, least=1, most=GIB) == GIB
    assert share_of_memory(32, least=1, most=2 * GIB) == GIB
    assert share_of_memory(1000, least=GIB, most=2 * GIB) == GIB


def sites_of(num_layers: int) -> tuple[Site, ...]:
    return parse_sites({"post_mlp": "all"}, num_layers, "sites")


def facts(tokens: int, *, requests: int = 64, pp_size: int = 1, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        max_tokens=tokens,
        max_num_seqs=requests,
        pp_size=pp_size,
        model=ModelInfo(name="m", num_layers=62, hidden_size=2560, dtype="bfloat16", sites=()),
        device=torch.device(device),
    )


@pytest.mark.parametrize(
    ("memory", "tokens", "requests", "sites", "expected"),
    [
        (128 * GIB, 8256, 256, 34, 8 * GIB),  # a step of 1.4 GiB
        (128 * GIB, 2048, 64, 34, 2 * GIB),  # 340 MiB
        (128 * GIB, 512, 256, 34, 2 * GIB),  # more for 32 steps of decoding than for prompts
        (128 * GIB, 8256, 64, 1, 256 * MIB),  # 40 MiB
        (128 * GIB, 16384, 64, 62, 8 * GIB),  # 5 GiB; a tenth of the memory is 12.8 GiB
        (1024 * GIB, 16384, 64, 62, 16 * GIB),
        (24 * GIB, 8256, 64, 34, 2 * GIB),
        (2 * GIB, 8256, 64, 34, 256 * MIB),
    ],
)
def test_staging_memory_holds_bursts_of_prompts_where_there_is_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, memory: int, tokens: int, requests: int, sites: int, expected: int
) -> None:
    monkeypatch.setattr(machine_memory, "available_memory", lambda: memory)

    assert default_staging_bytes(facts(tokens, requests=requests), sites_of(sites)) == expected


def test_stages_of_a_pipeline_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "available_memory", lambda: 128 * GIB)

    assert default_staging_bytes(facts(8256, pp_size=4), sites_of(34)) == 2 * GIB
    assert sizes_of(parse_params({"root": "r"}), 4).memory == 8 * GIB


@pytest.mark.parametrize(
    ("free", "total", "tokens", "sites", "expected"),
    [
        (60 * GIB, 140 * GIB, 8256, 34, 2 * 8256),
        (60 * GIB, 60 * GIB, 8256, 34, 15360),  # a 24th of the GPU
        (21 * GIB, 80 * GIB, 8256, 34, 8256),  # more than an eighth of what is free
        (21 * GIB, 80 * GIB, 8256, 30, 2 * 8256),
        (2 * GIB, 24 * GIB, 8256, 34, 8256),
    ],
)
def test_the_ring_holds_two_steps_where_the_gpu_has_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, free: int, total: int, tokens: int, sites: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))

    assert default_ring_rows(facts(tokens, device="cuda"), sites_of(sites)) == expected
    assert default_ring_rows(facts(tokens), sites_of(sites)) == tokens


def test_a_machine_with_little_memory_is_told_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture_part, "available_memory", lambda: 3 * GIB)
    monkeypatch.setattr(machine_memory, "available_memory", lambda: 3 * GIB)
    part = CapturePart(CaptureConsumersConfig())
    part._sites = sites_of(34)

    assert part._default_staging_bytes(facts(8256)) == 256 * MIB  # type: ignore[arg-type]
    assert "3.0 GiB of host memory are available, so rows on their way get 256 MiB" in caplog.text
    assert "has 1371 MiB" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert part._default_staging_bytes(facts(512)) == 256 * MIB  # type: ignore[arg-type]
    assert not caplog.records


def test_files_may_take_a_quarter_of_the_memory_and_of_the_processors(machine: Machine) -> None:
    machine({})

    chosen = sizes_of(parse_params({"root": "r"}), 1)
    assert (chosen.threads, chosen.memory, chosen.request_memory) == (4, 8 * GIB, 2 * GIB)
    configured = {"root": "r", "memory_bytes": 100, "max_request_bytes": 7, "threads": 3}
    given = sizes_of(parse_params(configured), 1)
    assert (given.threads, given.memory, given.request_memory) == (3, 100, 7)


@pytest.mark.parametrize(("processors", "threads"), [(1, 2), (8, 2), (16, 4), (128, 8)])
def test_writer_threads_follow_the_processors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, processors: int, threads: int
) -> None:
    machine({})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))

    assert sizes_of(parse_params({"root": "r"}), 1).threads == threads
