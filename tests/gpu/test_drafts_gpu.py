"""Speculative decoding on a GPU, with async scheduling: rows of accepted tokens alone, against Hugging Face.

Tiny random models in fp32, every method by the model runner that verifies it in this vLLM; see `draft_runs`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_runs import MODES, TIERS, Mode, asked_of
from side_by_side import run_modes

from tests.engine.drafting import check, greedy
from tests.engine.hf_reference import HFReference
from tests.engine.tiny_models import tiny_model

WANTED = [name for name in os.environ.get("DRAFT_MODES", "").split(",") if name] or list(MODES)
MAX_ERROR = 5e-3
"""Relative, of fp32 on a GPU, where attention multiplies with the ten bits of TF32, against fp32 on its host (0.0024 on
an H100); rows of neighbouring positions differ by their whole size."""
SAME = 0.9
"""Share of the requests whose greedy answer is that of Hugging Face: two tokens may be as likely but for rounding."""


@pytest.fixture(scope="module")
def reference() -> HFReference:
    return HFReference(tiny_model("llama"), "llama")


@pytest.fixture(scope="module")
def answers(reference: HFReference) -> dict[str, dict[tuple[int, ...], list[int]]]:
    steering = {"plain": None, "steered": TIERS.steering()}
    asked = {name: asked_of(Mode("eagle", steers=acts is not None)) for name, acts in steering.items()}
    return {
        name: {each.prompt: greedy(reference, each.prompt, acts) for each in asked[name]}
        for name, acts in steering.items()
    }


@pytest.fixture(scope="module")
def runs(answers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    torch.save(answers, folder / "answers.pt")
    program = Path(__file__).with_name("draft_runs.py")
    return run_modes(program, WANTED, folder, 300, DRAFT_ANSWERS=str(folder / "answers.pt"))


@pytest.mark.parametrize("name", [name for name in WANTED if not name.endswith("stock")])
def test_rows_are_of_accepted_tokens_alone(name, runs, answers, reference):
    mode, run = MODES[name], runs[name]
    known = answers["steered" if mode.steers else "plain"]
    steering = TIERS.steering() if mode.steers else None
    num_same = num = 0
    for found in run["rounds"]:
        for asked, entry in zip(asked_of(mode), found, strict=True):
            assert entry["status"] == "ok", (asked, entry["error"])
            num_same, num = num_same + (entry["tokens"] == asked.answer(known[asked.prompt])), num + 1
            captured = SimpleNamespace(**{key: entry[key] for key in ("rows", "positions", "token_ids")})
            check(asked, entry["tokens"], captured, reference, steering, MAX_ERROR)
    assert num_same >= SAME * num, (num_same, num)
    assert run["async"] == (mode.method != "ngram" and torch.cuda.is_available())
    if mode.dictates:
        accepted = run["counts"]["spec_decode_num_accepted_tokens"] / run["counts"]["spec_decode_num_draft_tokens"]
        assert 0.2 < accepted < 0.8
    assert run["counts"]["num_preemptions"] > 0


@pytest.mark.skipif("eagle3 stock" not in WANTED, reason="DRAFT_MODES leaves it out")
def test_answers_and_acceptance_are_those_of_stock(runs):
    ours, stock = runs["eagle3"], runs["eagle3 stock"]
    name = "spec_decode_num_accepted_tokens"  # how many are drafted depends on when requests are preempted

    for found, expected in zip(ours["rounds"], stock["rounds"], strict=True):
        assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    assert ours["counts"][name] == stock["counts"][name]
