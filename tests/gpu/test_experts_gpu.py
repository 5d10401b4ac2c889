"""Experts spread over two GPUs, by tensor-parallel and by data-parallel ranks, and balanced: rows against Hugging Face.

A tiny random model in fp32, in engines that run one after the other; see `expert_runs`. Needs two GPUs.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_runs import TIERS
from expert_runs import FAMILY, MODES, NUM_ALONE, asked, is_steered
from side_by_side import needs_two_gpus, run_modes

from tests.engine.drafting import check
from tests.engine.hf_reference import HFReference
from tests.engine.tiny_models import tiny_model

pytestmark = needs_two_gpus
WANTED = [name for name in os.environ.get("EXPERT_MODES", "").split(",") if name] or list(MODES)
MAX_ERROR = 1e-2
"""Relative, of fp32 on a GPU, where attention multiplies with the ten bits of TF32, against fp32 on its host (0.0056 on
an H200); rows of neighbouring positions differ by their whole size."""


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model(FAMILY), FAMILY)


@pytest.fixture(scope="module", params=WANTED)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    found = run_modes(Path(__file__).with_name("expert_runs.py"), [request.param], folder, 200)[request.param]
    return {**found, "name": request.param}


def test_every_row_is_hugging_faces(run, reference):
    given = asked()
    for name, requests in (("together", given), ("alone", given[:NUM_ALONE])):
        for index, (each, entry) in enumerate(zip(requests, run[name], strict=True)):
            assert entry["status"] == "ok", (name, each, entry["error"])
            captured = SimpleNamespace(**{key: entry[key] for key in ("rows", "positions", "token_ids")})
            steering = TIERS.steering() if is_steered(index) else None
            check(each, entry["tokens"], captured, reference, steering, MAX_ERROR)


def test_the_experts_of_every_row_are_logical_ones(run):
    """With copies of experts on several ranks, too: all experts of the model are chosen, each once."""
    for entry in [*run["together"], *run["alone"]]:
        chosen = {site.name: rows for site, rows in entry["rows"].items() if site.name.endswith(".experts")}
        logits = {site.name for site in entry["rows"] if site.name.endswith(".router_logits")}

        assert len(logits) > 0
        assert len(chosen) == (0 if run["name"] == "data" else len(logits))
        for rows in chosen.values():
            assert torch.equal(rows.sort(dim=1).values.long(), torch.arange(rows.shape[1]).expand(len(rows), -1))


def test_nothing_was_dropped(run):
    captured = [stats["capture"] for stats in run["stats"] if stats["capture"] is not None]

    assert captured
    assert sum(each["rows"] for each in captured) > 0
    assert sum(each["dropped_rows"] + each["dispatch_errors"] for each in captured) == 0
