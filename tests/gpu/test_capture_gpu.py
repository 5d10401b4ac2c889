"""Capture under FULL CUDA graphs equals capture in eager mode, and costs neighbours nothing.

One process per engine. The eager run gets the tokens that the graph run generated as prompts, so that both compute the
same positions from the same tokens. Needs a folder with a model of Gemma-3-4B's sizes: HEADGATE_GPU_MODEL, random
weights will do.
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


def run(mode: str, folder: Path, **environment: str) -> dict[str, Any]:
    """One engine in `mode`; returns what it saw."""
    out = folder / f"{mode}.pt"
    done = subprocess.run(
        [sys.executable, str(RUNS), mode, str(out)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    print(done.stdout.strip().splitlines()[-1])
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM, capture under graphs, and capture in eager mode saw."""
    folder = tmp_path_factory.mktemp("runs")
    graphs = run("graphs", folder)
    eager = run("eager", folder, HEADGATE_GPU_REPLAY=str(folder / "graphs.pt"))
    return {"stock": run("stock", folder), "graphs": graphs, "eager": eager}


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
