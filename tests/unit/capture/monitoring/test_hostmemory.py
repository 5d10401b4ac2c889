"""Sizes that nobody configured: from this machine's memory, or from what its container may use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headgate.capture.engine.worker.capture_part import default_staging_bytes
from headgate.capture.monitoring import machine_memory
from headgate.capture.monitoring.machine_memory import host_memory, share_of_memory
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import parse_sites
from headgate.consumers.filesystem.consumer import parse_params

MIB, GIB = 1 << 20, 1 << 30


def test_without_a_limit_it_is_the_machines_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine_memory, "_LIMITS", (tmp_path / "memory.max", tmp_path / "missing"))

    assert host_memory() == psutil.virtual_memory().total


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000000\n")
    monkeypatch.setattr(machine_memory, "_LIMITS", (tmp_path / "memory.max",))

    assert host_memory() == 1_000_000_000
    assert share_of_memory(10, least=1, most=GIB) == 100_000_000
    assert share_of_memory(10, least=GIB, most=2 * GIB) == GIB
    assert share_of_memory(10, least=1, most=1000) == 1000


@pytest.mark.parametrize(
    ("memory", "tokens", "sites", "expected"),
    [
        (128 * GIB, 8256, 34, 2 * GIB),  # a step of 1.4 GiB
        (128 * GIB, 2048, 34, 512 * MIB),  # 340 MiB
        (128 * GIB, 8256, 1, 256 * MIB),  # 40 MiB
        (128 * GIB, 16384, 62, 2 * GIB),  # 5 GiB
        (24 * GIB, 8256, 34, GIB),  # a sixteenth of the memory is 1.5 GiB
        (2 * GIB, 8256, 34, 256 * MIB),
    ],
)
def test_staging_memory_holds_a_full_step_where_there_is_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, memory: int, tokens: int, sites: int, expected: int
) -> None:
    monkeypatch.setattr(machine_memory, "host_memory", lambda: memory)
    model = ModelInfo(name="m", num_layers=sites, hidden_size=2560, dtype="bfloat16", sites=())
    facts = SimpleNamespace(max_tokens=tokens, model=model)

    assert default_staging_bytes(facts, parse_sites({"post_mlp": "all"}, sites, "sites")) == expected


def test_files_may_take_a_sixteenth_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "host_memory", lambda: 64 * GIB)

    params = parse_params({"root": "r"})
    assert (params.memory, params.request_memory) == (4 * GIB, GIB)
    params = parse_params({"root": "r", "memory_bytes": 100, "max_request_bytes": 7})
    assert (params.memory, params.request_memory) == (100, 7)
