"""Five hundred random requests at temperature 1 while global vectors, modules and rules change: each captured row is of
the forward that the token behind it was sampled in, and not of the one before or behind.

Under full CUDA graphs, chunked prefill, prefix caching, async scheduling. See `change_runs`; needs 30 GB of GPU memory
and a folder with a model: GPU_TEST_MODEL, random weights will do. SOAK_REQUESTS and SOAK_SEED choose the requests.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import run_modes
from soak_cases import Job
from soak_runs import NUM_REQUESTS, base, jobs

RUNS = Path(__file__).with_name("change_runs.py")
MIN_COSINE = 0.999
TIMEOUT_S = float(os.environ.get("SOAK_TIMEOUT_S", "450"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engine saw."""
    return run_modes(RUNS, ("changes",), tmp_path_factory.mktemp("changes"), TIMEOUT_S)["changes"]


def captured(run: dict[str, Any]) -> list[tuple[Job, dict[str, Any]]]:
    """The requests that captured and were not aborted, and what came of them."""
    return [(job, run["requests"][job.index]) for job in jobs() if job.hooks and job.index in run["requests"]]


def is_refused(found: dict[str, Any]) -> bool:
    """Whether rows of a prompt that was computed in part were refused, since it was begun again.

    Vectors that were set and cleared meanwhile count as a change.
    """
    return found["status"] == "error" and found["was_begun_again"] and "send the request again" in found["error"]


def versions_of(job: Job, found: dict[str, Any]) -> torch.Tensor:
    """The version of the global vectors that the token behind each captured row was sampled under."""
    behind = [max(int(position) + 1 - len(job.prompt), 0) for position in found["positions"]]
    return torch.tensor([found["versions"][at] for at in behind], dtype=torch.int64)


def test_much_changed_while_requests_ran(run):
    lives = [len(set(found["versions"])) for _, found in captured(run)]

    assert run["is_async"]
    assert set(run["counts"]) == {"set", "clear", "register", "rule"}
    assert sum(run["counts"].values()) > NUM_REQUESTS // 20
    assert sum(count > 2 for count in lives) > NUM_REQUESTS // 10


def test_no_row_is_missing_or_doubled(run):
    num_refused = 0
    for job, found in captured(run):
        if is_refused(found):
            num_refused += 1
            continue
        tokens, positions = list(job.prompt) + found["tokens"], job.expected_positions()
        assert found["status"] == "ok", (job.index, found["error"])
        assert found["positions"].tolist() == positions, job.index
        assert found["token_ids"].tolist() == [tokens[position] for position in positions], job.index
        assert set(found["rows"]) == job.expected_sites(base.NUM_LAYERS), job.index
    print(f"{num_refused} captures of prompts were refused")

    assert num_refused < NUM_REQUESTS / 10


def test_each_row_is_of_the_forward_that_its_token_was_sampled_in(run):
    worst, num_rows, num_told_apart = 1.0, 0, 0
    for job, found in captured(run):
        if is_refused(found) or not len(found["positions"]):
            continue
        versions = versions_of(job, found)
        for site, rows in found["rows"].items():
            alike = {
                version: torch.nn.functional.cosine_similarity(
                    rows.float(), run["solo"][job.index, version]["rows"][site][found["positions"]].float(), dim=1
                )
                for version in set(found["versions"])
            }
            for version in versions.unique().tolist():
                at = versions == version
                own = alike[version][at]
                worst, num_rows = min(worst, float(own.min())), num_rows + len(own)
                assert float(own.min()) >= MIN_COSINE, (job.index, site, version, found["positions"][at][own.argmin()])
                others = [values[at] for other, values in alike.items() if other != version]
                num_told_apart += sum(int((own > values + (1 - MIN_COSINE)).sum()) for values in others)
    print(
        f"{num_rows} rows, smallest cosine {worst:.6f}; told apart from those of other versions {num_told_apart} times"
    )

    assert num_rows > 10 * NUM_REQUESTS
    assert num_told_apart > 10 * NUM_REQUESTS
