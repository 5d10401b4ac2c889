"""Quantised checkpoints: rows are Hugging Face's of the dequantised weights, vectors act, idle answers are stock's.

One tiny random model for each method of `tests.engine.quantised_models`, quantised here; two engines for each, in
processes of their own, some at once. QUANTISED_METHODS chooses methods; without a GPU, GPU_TEST_ENGINE may have
settings that a CPU needs. What is found is printed, one line for each method.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_runs import KINDS, STEERED, steering_of
from side_by_side import run_modes

from headgate.capture.schema.sites import Site
from tests.engine.hf_reference import own_process
from tests.engine.quantised_models import METHODS, Cosines, cosines, further, quantised_rows, write

RUNS = Path(__file__).with_name("quantised_runs.py")
CHOSEN = tuple(os.environ.get("QUANTISED_METHODS", " ".join(METHODS)).split())
TIMEOUT_S = float(os.environ.get("GPU_TEST_TIMEOUT_S", "200"))
AT_ONCE = int(os.environ.get("QUANTISED_AT_ONCE", "4"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both engines of each method saw, and the reference; the reason where one did not start."""
    folder = tmp_path_factory.mktemp("quantised")

    def run(name: str) -> dict[str, Any]:
        try:
            seen = run_modes(RUNS, (f"{name}-stock", f"{name}-ours"), folder, TIMEOUT_S, QUANTISED_FOLDER=str(folder))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            lines = [line for line in str(error).splitlines() if "Error" in line] or [type(error).__name__]
            return {"failed": lines[-1][:400]}
        return {"stock": seen[f"{name}-stock"], "ours": seen[f"{name}-ours"]}

    with own_process() as helper:
        plain = {name: helper.submit(write, name, folder).result()[1] for name in CHOSEN}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(zip(CHOSEN, pool.map(run, CHOSEN), strict=True))
        for name, seen in found.items():
            if "failed" not in seen:
                family = METHODS[name].family
                asked = [(one["prompt"], one["tokens"], steering_of(one["kind"], family)) for one in captured(seen)]
                seen["expected"] = helper.submit(quantised_rows, plain[name], name, asked).result()
                seen["rounded"] = helper.submit(quantised_rows, plain[name], name, asked, is_rounded=True).result()
    for name, seen in found.items():
        print(f"\n{name:16}", seen.get("failed") or said(seen), end="")
    return found


def captured(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that have rows."""
    return [one for one in seen["ours"]["requests"] if one["kind"] != "plain"]


def found_and_usual(seen: dict[str, Any]) -> tuple[Cosines, Cosines]:
    """Cosines with the reference of the engine's rows, and of those of the reference that rounds to bfloat16."""
    rows = [(one["kind"], {Site.parse(name): each for name, each in one["rows"].items()}) for one in captured(seen)]
    rounded = [
        (kind, {site: own.rows[site] for site in sites})
        for (kind, sites), own in zip(rows, seen["rounded"], strict=True)
    ]
    return cosines(rows, seen["expected"]), cosines(rounded, seen["expected"])


def said(seen: dict[str, Any]) -> str:
    """The worst row of each kind, its hook point, and the worst of the reference that rounds to bfloat16."""
    found, usual = found_and_usual(seen)
    worst: dict[str, tuple[float, str, float]] = {}
    for (kind, hook), rows in found.items():
        worst[kind] = min(worst.get(kind, (2.0, "", 0.0)), (float(rows.min()), hook, float(usual[kind, hook].min())))
    shown = ", ".join(f"{kind} {value:.5f} ({hook}, usual {own:.5f})" for kind, (value, hook, own) in worst.items())
    same = seen["stock"]["idle"] == seen["ours"]["idle"]
    return f"idle {'equal' if same else 'DIFFERS'}; worst cosine: {shown}; starts {seen['ours']['start_s']:.0f} s"


@pytest.fixture(params=CHOSEN)
def seen(request: pytest.FixtureRequest, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = runs[request.param]
    assert "failed" not in found, found["failed"]
    return found


def test_idle_answers_are_stocks_bit_for_bit(seen: dict[str, Any]) -> None:
    assert seen["ours"]["idle"] == seen["stock"]["idle"]


def test_rows_are_those_of_the_dequantised_weights(seen: dict[str, Any]) -> None:
    found, usual = found_and_usual(seen)

    wrong = further(found, usual)
    assert not wrong, "; ".join(f"{kind} {hook}: {reason}" for (kind, hook), reason in wrong.items())
    assert {kind for kind, _ in found} == set(KINDS) - {"plain"}


def test_every_row_is_there_once_and_steering_moves_what_follows(seen: dict[str, Any]) -> None:
    plain = {tuple(one["prompt"]): one for one in captured(seen) if one["kind"] == "captured"}
    after = f"{STEERED.layer + 1}.pre_attn"

    assert Counter(one["kind"] for one in captured(seen)) == dict.fromkeys(KINDS[1:], len(plain))
    for one in captured(seen):
        assert one["positions"] == list(range(len(one["prompt"]) + len(one["tokens"]) - 1))
        base = plain[tuple(one["prompt"])]
        first, other = one["rows"][after][0], base["rows"][after][0]
        assert torch.equal(first, other) == (one["kind"] == "captured"), one["kind"]
