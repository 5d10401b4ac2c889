"""Capture under FULL CUDA graphs equals capture in eager mode, and costs neighbours nothing.

One process per engine. The eager run gets the tokens that the graph run generated as prompts, so that both compute the
same positions from the same tokens. Needs 40 GB of GPU memory, and a folder with a model of Gemma-3-4B's sizes:
GPU_TEST_MODEL, random weights will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import run_modes

RUNS = Path(__file__).with_name("engine_runs.py")
MIN_COSINE = 0.999
TIMEOUT_S = 500


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock vLLM, capture under graphs, and capture in eager mode saw."""
    folder = tmp_path_factory.mktemp("runs")
    seen = run_modes(RUNS, ("stock", "graphs"), folder, TIMEOUT_S)
    return seen | run_modes(RUNS, ("eager",), folder, TIMEOUT_S, GPU_TEST_REPLAY=str(folder / "graphs.pt"))


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
    run_counts = set(stats["capture"]["run_counts"].values())

    assert len(run_counts) == 1, "every site runs in every forward"
    assert run_counts.pop() > 24


def test_tokens_are_stocks(runs):
    tokens = [[request["tokens"] for request in runs[mode]["requests"]] for mode in ("stock", "graphs")]

    assert tokens[0] == tokens[1]
