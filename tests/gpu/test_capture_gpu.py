"""Capture under FULL CUDA graphs equals capture in eager mode, and costs neighbours nothing.

One process per engine. The eager run gets the tokens that the graph run generated as prompts, so that both compute the
same positions from the same tokens. Needs 40 GB of GPU memory, and a folder with a model of Gemma-3-4B's sizes:
GPU_TEST_MODEL, random weights will do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RUNS = Path(__file__).with_name("engine_runs.py")
MIN_COSINE = 0.999
TIMEOUT_S = 500


def start(mode: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start one engine in `mode`."""
    with (folder / f"{mode}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(RUNS), mode, str(folder / f"{mode}.pt")],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait(mode: str, process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """What the engine saw, when it is through."""
    try:
        code = process.wait(timeout=TIMEOUT_S)
    finally:
        process.kill()
    log = (folder / f"{mode}.log").read_text(errors="replace")
    assert code == 0, log[-9000:]
    print(next(line for line in log.splitlines() if line.startswith("RAN")))
    loaded: dict[str, Any] = torch.load(folder / f"{mode}.pt", weights_only=False)
    return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM, capture under graphs, and capture in eager mode saw."""
    folder = tmp_path_factory.mktemp("runs")
    processes = {mode: start(mode, folder) for mode in ("stock", "graphs")}
    seen = {mode: wait(mode, process, folder) for mode, process in processes.items()}
    eager = start("eager", folder, GPU_TEST_REPLAY=str(folder / "graphs.pt"))
    return {**seen, "eager": wait("eager", eager, folder)}


def test_every_request_is_complete(runs):
    for request in runs["graphs"]["requests"]:
        num_rows = len(request["prompt"]) + len(request["tokens"]) - 1

        assert request["status"] == "ok", request["error"]
        assert request["positions"].tolist() == list(range(num_rows))
        assert request["token_ids"].tolist() == (request["prompt"] + request["tokens"])[:num_rows]


def test_rows_under_graphs_equal_those_of_an_eager_run(runs):
    for replayed, eager in zip(runs["graphs"]["requests"], runs["eager"]["requests"], strict=True):
        assert eager["status"] == "ok", eager["error"]
        assert set(replayed["rows"]) == set(eager["rows"])
        for site, rows in replayed["rows"].items():
            expected = eager["rows"][site]
            assert rows.shape == expected.shape
            cosine = torch.nn.functional.cosine_similarity(rows.float(), expected.float(), dim=1)
            assert float(cosine.min()) >= MIN_COSINE, site


def test_rows_of_one_request_are_no_other_requests_rows(runs):
    """A row is nearer to its own position in the eager run than to any position of another request."""
    site = "17.post_mlp"
    replayed = [request["rows"][site][-1].float() for request in runs["graphs"]["requests"]]
    eager = torch.stack([request["rows"][site][-1].float() for request in runs["eager"]["requests"]])

    nearest = [int(torch.cdist(row[None], eager).argmin()) for row in replayed]

    assert nearest == list(range(len(replayed)))


def test_the_sites_ran_in_replayed_graphs(runs):
    (stats,) = runs["graphs"]["stats"]
    fires = set(stats["capture"]["fires"].values())

    assert len(fires) == 1, "every site runs in every forward"
    assert fires.pop() > 24


def test_tokens_are_stocks(runs):
    tokens = [[request["tokens"] for request in runs[mode]["requests"]] for mode in ("stock", "graphs")]

    assert tokens[0] == tokens[1]
