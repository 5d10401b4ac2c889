"""A million tokens under speculative decoding: every captured row is that of a forward over the request's final tokens.

Tiny random models in fp32, three engines at once: n-gram drafts, a draft model, and EAGLE in FULL graphs with async
scheduling; see `draft_soak_runs`. Hugging Face's model computes all tokens of each request once more, in one forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from draft_runs import MAX_ERROR, drafts_of
from draft_soak_runs import MODES, NUM_TOKENS, TIMEOUT_S, jobs, model_folder
from side_by_side import run_modes
from soak_cases import Job

from tests.engine.hf_reference import HFReference
from tests.engine.tiny_models import LAYERS, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    for mode in MODES.values():  # the engines start at once, and must not write what another reads
        drafts_of(mode.method, model_folder())
    program = Path(__file__).with_name("draft_soak_runs.py")
    return run_modes(program, list(MODES), tmp_path_factory.mktemp("runs"), 0.75 * TIMEOUT_S)


@pytest.fixture(scope="module")
def reference() -> HFReference:
    found = HFReference(tiny_model("llama"), "llama")
    found.model.to(DEVICE)
    return found


class Judged(NamedTuple):
    """What was compared of a request.

    Attributes:
        rows: How many rows.
        told_apart: How many of them are unlike the row of the position before, so that one in its place were found.
        error: The largest difference, relative to the largest value of its site.
    """

    rows: int
    told_apart: int
    error: float


def judge(job: Job, entry: dict[str, Any], reference: HFReference) -> Judged:
    """Compare every row of a request; positions and token ids first."""
    tokens, positions = [*job.prompt, *entry["tokens"]], job.expected_positions()
    assert entry["status"] == "ok", (job.index, entry["error"])
    assert len(entry["tokens"]) == job.max_tokens
    assert entry["positions"].tolist() == positions, job.index
    assert entry["token_ids"].tolist() == [tokens[position] for position in positions], job.index
    assert set(entry["rows"]) == job.expected_sites(LAYERS), job.index
    expected = {site.name: rows for site, rows in reference.run(job.prompt, entry["tokens"]).rows.items()}
    num_rows = num_apart = 0
    worst = 0.0
    for site, got in entry["rows"].items():
        assert len(got) == len(positions), (job.index, site)
        if not positions:
            continue
        rows, size = expected[site], float(expected[site].abs().max())
        errors = (got.to(DEVICE) - rows[positions]).abs().amax(1) / size
        before = [max(position - 1, 0) for position in positions]
        num_apart += int(((rows[before] - rows[positions]).abs().amax(1) > 2 * MAX_ERROR * size).sum())
        assert float(errors.max()) <= MAX_ERROR, (job.index, site, positions[int(errors.argmax())], float(errors.max()))
        num_rows, worst = num_rows + len(positions), max(worst, float(errors.max()))
    return Judged(num_rows, num_apart, worst)


@pytest.mark.parametrize("name", MODES)
def test_every_row_is_that_of_the_final_tokens(name, runs, reference):
    run = runs[name]
    finished = [(job, run["requests"][job.index]) for job in jobs(name) if job.index in run["requests"]]

    judged = [judge(job, entry, reference) for job, entry in finished]

    num_tokens = sum(len(job.prompt) + job.max_tokens for job, _ in finished)
    num_rows, num_apart = sum(each.rows for each in judged), sum(each.told_apart for each in judged)
    worst = max(each.error for each in judged)
    print(
        f"JUDGED {name}: {num_tokens} tokens of {len(finished)} requests, {num_rows} rows, largest error {worst:.1e}; "
        f"{num_apart} rows unlike those before them"
    )
    assert num_rows > num_tokens
    assert num_apart > 0.8 * num_rows


@pytest.mark.parametrize("name", MODES)
def test_drafts_were_accepted_and_rejected_and_requests_preempted(name, runs):
    counts = runs[name]["counts"]
    accepted = counts["spec_decode_num_accepted_tokens"] / counts["spec_decode_num_draft_tokens"]

    assert 0.03 < accepted < 0.9
    assert counts["num_preemptions"] > 0
    assert runs[name]["async"] or name != "eagle" or DEVICE == "cpu"


@pytest.mark.parametrize("name", MODES)
def test_nothing_is_dropped_or_left_behind(name, runs):
    (stats,) = runs[name]["stats"]
    capture = stats["capture"]

    assert (capture["dropped_rows"], capture["dispatch_errors"], capture["staged_bytes"]) == (0, 0, 0)


def test_requests_are_missing_only_if_they_were_aborted(runs):
    served = {name: run["requests"] for name, run in runs.items()}
    missing = {name: [job for job in jobs(name) if job.index not in served[name]] for name in MODES}

    assert all(job.abort_step is not None for found in missing.values() for job in found), missing


def test_the_tokens_were_as_many_as_asked(runs):
    num_tokens = {
        name: sum(len(entry["prompt"]) + len(entry["tokens"]) for entry in run["requests"].values())
        for name, run in runs.items()
    }

    assert min(num_tokens.values()) >= NUM_TOKENS, num_tokens
