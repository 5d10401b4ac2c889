"""Speculative decoding on a GPU, with async scheduling: rows and gates of accepted tokens alone, against Hugging Face.

Tiny random models in fp32, every method by the model runner that verifies it in this vLLM; see `draft_runs`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from draft_runs import AFTER, BEFORE, MAX_ERROR, MODES, READ, TIERS, WEIGHT, Mode, Scores, asked_of, gates_of
from side_by_side import run_modes

from tests.engine.drafting import Asked, check, greedy
from tests.engine.gate_reference import Gated, GateReference
from tests.engine.gate_semantics import GateState, Names
from tests.engine.hf_reference import HFReference, relative_error
from tests.engine.tiny_models import tiny_model

WANTED = [name for name in os.environ.get("DRAFT_MODES", "").split(",") if name] or list(MODES)
NEAR = 1e-5
"""Pooled scores as near to a threshold as this, relative to their size, could round to the other side."""
SAME = 0.9
"""Share of the requests whose greedy answer is that of Hugging Face: two tokens may be as likely but for rounding."""
MAX_ERROR_BF16 = 5e-2
"""`MAX_ERROR` of a model in bfloat16."""


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
def scores(reference: HFReference, answers: Any) -> Scores:
    given = asked_of(MODES["eagle gates"])
    rows = [reference.run(each.prompt, answers["plain"][each.prompt]).rows[READ] for each in given]
    found = torch.cat(rows).double() @ torch.tensor(WEIGHT, dtype=torch.float64)
    return Scores(float(found.median()), float(found.quantile(0.8)), float(found.std()))


@pytest.fixture(scope="module")
def runs(answers: Any, scores: Scores, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    torch.save({**answers, "scores": tuple(scores)}, folder / "answers.pt")
    program = Path(__file__).with_name("draft_runs.py")
    return run_modes(program, WANTED, folder, 300, DRAFT_ANSWERS=str(folder / "answers.pt"))


@pytest.mark.parametrize("name", [name for name in WANTED if not name.endswith(("stock", "gates"))])
def test_rows_are_of_accepted_tokens_alone(name, runs, answers, reference):
    mode, run = MODES[name], runs[name]
    is_llama, known = mode.family == "llama", answers[mode.answers]
    max_error = MAX_ERROR if is_llama else MAX_ERROR_BF16
    reference = reference if is_llama else HFReference(tiny_model(mode.family), mode.family)
    steering = TIERS.steering() if mode.steers else None
    num_same = num = 0
    for found in run["rounds"]:
        for asked, entry in zip(asked_of(mode), found, strict=True):
            assert entry["status"] == "ok", (asked, entry["error"])
            num_same, num = num_same + (entry["tokens"] == asked.answer(known[asked.prompt])), num + 1
            captured = SimpleNamespace(**{key: entry[key] for key in ("rows", "positions", "token_ids")})
            check(asked, entry["tokens"], captured, reference, steering, max_error)
    assert num_same >= SAME * num or not is_llama, (num_same, num)
    check_drafts(mode, run)


def check_drafts(mode: Mode, run: Mapping[str, Any]) -> None:
    assert run["async"] == (mode.method != "ngram") or not torch.cuda.is_available()
    if mode.dictates:
        accepted = run["counts"]["spec_decode_num_accepted_tokens"] / run["counts"]["spec_decode_num_draft_tokens"]
        assert 0.1 < accepted < 0.8
    assert run["counts"]["num_preemptions"] > 0


class Following(NamedTuple):
    """Strengths of a gate that follow from the scores of a trace, row after row.

    Attributes:
        name: The gate's.
        applied: By row.
        margin: How far the pooled score nearest to a threshold was from it, relative to its size.
    """

    name: str
    applied: list[float]
    margin: float


def following(gates: list[dict[str, Any]], trace: Mapping[str, Any], num_prompt: int) -> Iterator[Following]:
    weight = np.array(WEIGHT)
    for index, document in enumerate(gates):
        state, applied, margins = GateState(document, index, Names(), (BEFORE, READ, AFTER)), [], []
        for position, score in enumerate(trace["scores"][state.name]):
            state.next_row()
            for leaf in state.leaves:
                leaf.read(weight * (score / (weight @ weight)), position, num_prompt)
                margins.append(leaf.margin())
            state.decide(position, num_prompt)
            applied.append(state.strength_at(is_early=state.name == "prompt", is_prompt=position < num_prompt))
        yield Following(state.name, applied, min(margins))


@pytest.mark.parametrize("name", [name for name in WANTED if name.endswith("gates")])
def test_gates_go_on_over_accepted_rows_alone(name, runs, scores):
    """Each strength is what the scores of all rows before say, and what was added is what the trace says."""
    mode, run, reference = MODES[name], runs[name], GateReference(tiny_model("llama"), "llama")
    seen, num_near, told = Counter[tuple[str, float]](), 0, dict[str, Any]()
    asked = asked_of(mode)
    for each, entry in [pair for found in run["rounds"] for pair in zip(asked, found, strict=True)]:
        assert entry["status"] == "ok", (each, entry["error"])
        gates, num_rows = gates_of(each, scores), len(each.prompt) + len(entry["tokens"]) - 1
        assert entry["trace"]["positions"] == entry["positions"].tolist() == list(range(num_rows))
        for gate in following(gates, entry["trace"], len(each.prompt)):
            if gate.margin < NEAR:  # rounding may have decided
                num_near += 1
                continue
            assert entry["trace"]["gates"][gate.name]["applied"] == gate.applied, (each, gate.name)
            seen.update((gate.name, value) for value in gate.applied[len(each.prompt) :])
        check_added(each, entry, gates, reference, told)
    assert num_near <= 0.1 * len(asked) * len(run["rounds"])
    assert min(seen[gate, value] for gate in ("average", "latch", "prompt") for value in (0.0, 1.0)) > 20, seen
    check_drafts(mode, run)


def check_added(
    asked: Asked, entry: Mapping[str, Any], gates: list[dict[str, Any]], reference: GateReference, told: dict[str, Any]
) -> None:
    """Rows are Hugging Face's with the strengths of the trace, and so are tokens; `told` has what it said before."""
    applied = {gate: found["applied"] for gate, found in entry["trace"]["gates"].items()}
    request = Gated(prompt=asked.prompt, output=entry["tokens"], gates=gates, applied=applied)
    key = repr(request)
    found = told[key] = told.get(key) or reference.tell(request, Names())
    for site, rows in found.reference.rows.items():
        error = relative_error(entry["rows"][site], rows)
        assert error <= MAX_ERROR, (asked, site, error)
    chosen = found.reference.logits[len(asked.prompt) - 1 :]
    lost = chosen.max(-1).values - chosen[range(len(entry["tokens"])), entry["tokens"]]
    assert float(lost.max()) <= MAX_ERROR * float(chosen.abs().max()), asked


@pytest.mark.skipif("eagle3 stock" not in WANTED, reason="DRAFT_MODES leaves it out")
def test_answers_and_acceptance_are_those_of_stock(runs):
    ours, stock = runs["eagle3"], runs["eagle3 stock"]
    name = "spec_decode_num_accepted_tokens"  # how many are drafted depends on when requests are preempted

    for found, expected in zip(ours["rounds"], stock["rounds"], strict=True):
        assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    assert ours["counts"][name] == stock["counts"][name]
