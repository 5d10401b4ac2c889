"""Five hundred random requests at once, under full CUDA graphs, chunked prefill, prefix caching, async scheduling.

They come and go, and are aborted; some capture any sites and positions, some are steered, some do neither. Every row
equals the row of the same request running alone, none is missing or foreign, and requests that are not steered get the
tokens that stock vLLM gives them in the same batches. See `soak_runs`; needs 50 GB of GPU memory, and a folder with a
model: GPU_TEST_MODEL, random weights will do.
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

RUNS = Path(__file__).with_name("soak_runs.py")
MIN_COSINE = 0.999
TIMEOUT_S = float(os.environ.get("SOAK_TIMEOUT_S", "450"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both saw."""
    return run_modes(RUNS, ("stock", "headgate"), tmp_path_factory.mktemp("soak"), TIMEOUT_S)


def captured(runs: dict[str, dict[str, Any]]) -> list[tuple[Job, dict[str, Any]]]:
    """The requests that captured and were not aborted, and what came of them."""
    seen = runs["headgate"]["requests"]
    return [(job, seen[job.index]) for job in jobs() if job.hooks and job.index in seen]


def test_the_requests_were_many_and_of_all_kinds(runs):
    seen, most = runs["headgate"]["requests"], max(len(batch) for batch in runs["headgate"]["batches"])
    aborted = [job for job in jobs() if job.index not in seen]

    assert runs["headgate"]["is_async"]
    assert all(job.abort_step is not None for job in aborted)
    assert len(aborted) > NUM_REQUESTS // 50
    assert most > 20
    assert sum(job.is_steered and not job.hooks for job in jobs()) > NUM_REQUESTS // 20
    assert sum(not job.is_steered and not job.hooks for job in jobs()) > NUM_REQUESTS // 10


def test_no_row_is_missing_or_foreign(runs):
    for job, found in captured(runs):
        tokens, positions = list(job.prompt) + found["tokens"], job.expected_positions()

        assert found["status"] == "ok", (job.index, found["error"])
        assert found["prompt"] == list(job.prompt)
        assert len(found["tokens"]) == job.max_tokens
        assert found["positions"].tolist() == positions, job.index
        assert found["token_ids"].tolist() == [tokens[position] for position in positions], job.index
        assert set(found["rows"]) == job.expected_sites(base.NUM_LAYERS), job.index
        assert {len(rows) for rows in found["rows"].values()} == {len(positions)}, job.index


def test_every_row_equals_that_of_the_solo_run(runs):
    worst, num_rows = 1.0, 0
    for job, found in captured(runs):
        alone = runs["headgate"]["solo"][job.index]
        assert alone["status"] == "ok", (job.index, alone["error"])
        assert alone["positions"].tolist() == list(range(job.num_rows))
        for site, rows in found["rows"].items():
            expected = alone["rows"][site][found["positions"]]
            if len(rows):
                cosine = torch.nn.functional.cosine_similarity(rows.float(), expected.float(), dim=1)
                worst, num_rows = min(worst, float(cosine.min())), num_rows + len(rows)
                assert float(cosine.min()) >= MIN_COSINE, (job.index, site, job.is_steered)
    print(f"{num_rows} rows, smallest cosine {worst:.6f}")

    assert num_rows > 10 * NUM_REQUESTS


def test_rows_are_nearer_to_their_own_solo_run_than_to_another(runs):
    """A cosine near 1 alone would not tell requests apart if all rows were alike."""
    site = f"{base.LAYERS[2]}.post_mlp"
    pairs = [
        (found["rows"][site][-1].float(), runs["headgate"]["solo"][job.index]["rows"][site][found["positions"][-1]])
        for job, found in captured(runs)
        if site in found["rows"] and len(found["positions"])
    ]
    alone = torch.stack([row.float() for _, row in pairs])

    nearest = [int(torch.cdist(row[None], alone).argmin()) for row, _ in pairs]

    same = [torch.equal(alone[at], alone[index]) or at == index for index, at in enumerate(nearest)]
    assert all(same), same.count(False)


def test_both_engines_ran_the_same_batches(runs):
    stock, ours = (runs[mode]["batches"] for mode in ("stock", "headgate"))
    differing = next((at for at, pair in enumerate(zip(stock, ours, strict=False)) if pair[0] != pair[1]), None)

    assert differing is None, (differing, stock[differing], ours[differing])
    assert len(stock) == len(ours)


def test_requests_that_are_not_steered_get_stocks_tokens(runs):
    stock, ours = runs["stock"]["requests"], runs["headgate"]["requests"]
    plain = [job.index for job in jobs() if not job.is_steered and job.index in ours]

    different = [index for index in plain if ours[index]["tokens"] != stock[index]["tokens"]]

    assert stock.keys() == ours.keys()
    assert not different, f"{len(different)} of {len(plain)} differ: {different[:20]}"


def test_requests_that_are_steered_get_others(runs):
    stock, ours = runs["stock"]["requests"], runs["headgate"]["requests"]
    steered = [job.index for job in jobs() if job.is_steered and job.index in ours and job.max_tokens > 2]

    assert sum(ours[index]["tokens"] != stock[index]["tokens"] for index in steered) > 0.9 * len(steered)


def test_nothing_is_dropped_or_left_behind(runs):
    (stats,) = runs["headgate"]["stats"]
    capture = stats["capture"]

    assert capture["rows"] > 0
    assert (capture["dropped_rows"], capture["dispatch_errors"], capture["staged_bytes"]) == (0, 0, 0)
    for consumer in capture["consumers"]:
        left = {name: consumer[name] for name in ("queued_bytes", "dropped_rows", "errors", "hangs", "lost_reports")}
        assert not any(left.values()), left
