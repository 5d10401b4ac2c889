"""Steering takes effect in replayed CUDA graphs, equals the eager kernel, and leaves batch-mates alone.

One process per engine. The eager run gets the tokens that the graph run generated as prompts, so that both compute the
same positions from the same tokens: what decode graphs computed is compared with an eager prefill. Needs a folder with
a model of Gemma-3-4B's sizes: GPU_TEST_MODEL, random weights will do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from steering_runs import is_steered

RUNS = Path(__file__).with_name("steering_runs.py")
MIN_COSINE = 0.999


def run(mode: str, folder: Path, **environment: str) -> dict[str, Any]:
    """One engine in `mode`; returns what it saw."""
    out = folder / f"{mode}.pt"
    done = subprocess.run(
        [sys.executable, str(RUNS), mode, str(out)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout.strip().splitlines()[-1])
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM, steering under graphs, and steering in eager mode saw."""
    folder = tmp_path_factory.mktemp("runs")
    graphs = run("graphs", folder)
    eager = run("eager", folder, GPU_TEST_REPLAY=str(folder / "graphs.pt"))
    return {"stock": run("stock", folder), "graphs": graphs, "eager": eager}


def tokens(requests: list[dict[str, Any]]) -> list[list[int]]:
    return [request["tokens"] for request in requests]


def test_idle_steering_generates_stocks_tokens(runs):
    assert tokens(runs["graphs"]["plain"]) == tokens(runs["stock"]["plain"])


def test_batch_mates_of_steered_requests_generate_stocks_tokens(runs):
    stock, mixed = tokens(runs["stock"]["plain"]), tokens(runs["graphs"]["steered"])
    mates = [index for index in range(len(stock)) if not is_steered(index)]

    assert len(mates) > 10
    assert [mixed[index] for index in mates] == [stock[index] for index in mates]


def test_steered_requests_generate_something_else(runs):
    stock, mixed = tokens(runs["stock"]["plain"]), tokens(runs["graphs"]["steered"])
    steered = [index for index in range(len(stock)) if is_steered(index)]

    assert sum(mixed[index] != stock[index] for index in steered) > 0.9 * len(steered)


def test_rows_under_graphs_equal_those_of_the_eager_kernel(runs):
    pairs = list(zip(runs["graphs"]["steered"], runs["eager"]["steered"], strict=True))
    for replayed, eager in pairs:
        assert (replayed["status"], eager["status"]) == ("ok", "ok"), (replayed["error"], eager["error"])
        for site, rows in replayed["rows"].items():
            cosine = torch.nn.functional.cosine_similarity(rows.float(), eager["rows"][site].float(), dim=1)
            assert float(cosine.min()) >= MIN_COSINE, site


def test_every_site_ran_in_every_replay(runs):
    (stats,) = runs["graphs"]["stats"]
    fires = set(stats["steering"]["fires"].values())

    assert len(fires) == 1, "every site runs in every forward"
    assert fires.pop() > 48
