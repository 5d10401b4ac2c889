"""Capture and steering on two GPUs, tensor parallel and pipeline parallel, equal those on one.

One process per engine. What two GPUs generated is the prompt of a run on one, so that both compute the same positions
from the same tokens; all rows of it are compared. See `steering_runs`. Needs two GPUs, 10 GB of disk, and a folder with
a model's configuration and tokenizer, GPU_TEST_MODEL; weights are made (`random_weights`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import needs_two_gpus
from steering_runs import SEEN, base, is_steered

from headgate.capture.engine.commands.verify import RANDOM_WEIGHTS

pytestmark = needs_two_gpus
RUNS = Path(__file__).with_name("steering_runs.py")
MIN_COSINE = 0.999
TIMEOUT_S = 280
KINDS = {"tensor": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}


class Run:
    """One engine in a process of its own, from construction on."""

    def __init__(self, name: str, folder: Path, engine: dict[str, Any], **environment: str) -> None:
        self._out, self._log = folder / f"{name}.pt", folder / f"{name}.log"
        settings = {"load_format": "auto", **json.loads(os.environ.get("GPU_TEST_ENGINE", "{}")), **engine}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(RUNS), "graphs", str(self._out)],
                env={
                    **os.environ,
                    "GPU_TEST_ENGINE": json.dumps(settings),
                    "GPU_TEST_MODEL": str(folder / "model"),
                    **environment,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> dict[str, Any]:
        """What it saw."""
        try:
            code = self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()
        log = self._log.read_text(errors="replace")
        assert code == 0, log[-9000:]
        print(next(line for line in log.splitlines() if line.startswith("RAN")))
        loaded: dict[str, Any] = torch.load(self._out, weights_only=False)
        return loaded


def run_all(folder: Path) -> dict[str, dict[str, Any]]:
    """What two GPUs saw in each kind, and one GPU with the tokens of each; the two of a pair run at once."""
    model = folder / "model"
    subprocess.run([sys.executable, "-m", RANDOM_WEIGHTS, base.MODEL, str(model)], check=True, timeout=TIMEOUT_S)
    both = {kind: Run(kind, folder, engine) for kind, engine in KINDS.items()}
    seen = {kind: run.result() for kind, run in both.items()}
    one = {
        kind: Run(
            f"{kind}-one", folder, {}, GPU_TEST_REPLAY=str(folder / f"{kind}.pt"), CUDA_VISIBLE_DEVICES=str(index)
        )
        for index, kind in enumerate(KINDS)
    }
    return {**seen, **{f"{kind} on one": run.result() for kind, run in one.items()}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """See `run_all`."""
    return run_all(tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_is_complete(runs, kind):
    sites = {*(f"{layer}.post_mlp" for layer in SEEN["post_mlp"]), "final_norm"}
    for request in runs[kind]["steered"]:
        tokens = request["prompt"] + request["tokens"]
        assert request["status"] == "ok", request["error"]
        assert set(request["rows"]) == sites
        assert request["positions"].tolist() == list(range(len(tokens) - 1))
        assert request["token_ids"].tolist() == tokens[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_steering_of_two_gpus_equal_those_of_one(runs, kind):
    worst = 1.0
    for index, (two, one) in enumerate(zip(runs[kind]["steered"], runs[f"{kind} on one"]["steered"], strict=True)):
        assert one["status"] == "ok", one["error"]
        assert two["rows"].keys() == one["rows"].keys()
        for site, rows in two["rows"].items():
            assert rows.shape == one["rows"][site].shape
            cosine = torch.nn.functional.cosine_similarity(rows.float(), one["rows"][site].float(), dim=1)
            worst = min(worst, float(cosine.min()))
            assert float(cosine.min()) >= MIN_COSINE, (index, site, is_steered(index))
    print(f"{kind}: smallest cosine {worst:.6f}")


@pytest.mark.parametrize("kind", KINDS)
def test_steered_requests_generate_something_else_and_their_batch_mates_do_not(runs, kind):
    plain, mixed = runs[kind]["plain"], runs[kind]["steered"]
    assert runs[kind]["plain batches"] == runs[kind]["steered batches"]
    same = [before["tokens"] == after["tokens"] for before, after in zip(plain, mixed, strict=True)]
    steered = [is_same for index, is_same in enumerate(same) if is_steered(index)]
    mates = [is_same for index, is_same in enumerate(same) if not is_steered(index)]

    assert len(mates) > 10
    assert all(mates), f"{mates.count(False)} of {len(mates)} batch-mates were touched"
    assert sum(steered) < 0.1 * len(steered)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_that_own_the_sites_captured_and_nothing_was_lost(runs, kind):
    stats = runs[kind]["stats"]
    capturing = [found["capture"] for found in stats if found["capture"] is not None]

    assert len(stats) == 2
    assert len(capturing) == (1 if kind == "tensor" else 2)
    assert sum(capture["dropped_rows"] + capture["dispatch_errors"] for capture in capturing) == 0
    run_counts = [set(found["steering"]["run_counts"].values()) for found in stats if found["steering"]["run_counts"]]
    assert run_counts
    assert all(len(each) == 1 for each in run_counts), "every site runs in every forward"
    if kind == "tensor":
        assert len(set(runs[kind]["checksums"])) == 1, "the tables of the ranks are alike"


def test_the_sites_are_on_both_stages():
    first, last = SEEN["post_mlp"][0], SEEN["post_mlp"][-1]

    assert first < base.NUM_LAYERS // 2 <= last
