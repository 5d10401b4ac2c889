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
from tests.engine.hf_reference import Reference, own_process, row_cosines
from tests.engine.quantised_models import METHODS, quantised_rows, write

RUNS = Path(__file__).with_name("quantised_runs.py")
CHOSEN = tuple(os.environ.get("QUANTISED_METHODS", " ".join(METHODS)).split())
TIMEOUT_S = float(os.environ.get("GPU_TEST_TIMEOUT_S", "200"))
AT_ONCE = int(os.environ.get("QUANTISED_AT_ONCE", "4"))
MIN_COSINE = {"kv_fp8_default": 0.97}
"""Of each row; 0.999 where nothing else is said. FlashAttention 3 rounds queries and probabilities to FP8 as well."""


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
    for name, seen in found.items():
        print(f"\n{name:16}", seen.get("failed") or said(seen), end="")
    return found


def captured(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that have rows."""
    return [one for one in seen["ours"]["requests"] if one["kind"] != "plain"]


def cosines(seen: dict[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Of all rows, by kind of request and hook point; those of the padding token's layer 0 are zero in both."""
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    expected: list[Reference] = seen["expected"]
    for one, reference in zip(captured(seen), expected, strict=True):
        for name, rows in one["rows"].items():
            site = Site.parse(name)
            found.setdefault((one["kind"], site.hook.value), []).append(row_cosines(rows, reference.rows[site]))
    return {key: torch.cat(parts) for key, parts in found.items()}


def said(seen: dict[str, Any]) -> str:
    """The worst row of each kind, and of which hook point."""
    worst: dict[str, tuple[float, str]] = {}
    for (kind, hook), found in cosines(seen).items():
        worst[kind] = min(worst.get(kind, (2.0, "")), (float(found.min()), hook))
    shown = ", ".join(f"{kind} {value:.5f} ({hook})" for kind, (value, hook) in worst.items())
    same = seen["stock"]["idle"] == seen["ours"]["idle"]
    return f"idle {'equal' if same else 'DIFFERS'}; worst cosine: {shown}; starts {seen['ours']['start_s']:.0f} s"


@pytest.fixture(params=CHOSEN)
def seen(request: pytest.FixtureRequest, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = runs[request.param]
    assert "failed" not in found, found["failed"]
    return {**found, "min_cosine": MIN_COSINE.get(request.param, 0.999)}


def test_idle_answers_are_stocks_bit_for_bit(seen: dict[str, Any]) -> None:
    assert seen["ours"]["idle"] == seen["stock"]["idle"]


def test_rows_are_those_of_the_dequantised_weights(seen: dict[str, Any]) -> None:
    found = cosines(seen)

    below = {key: float(each.min()) for key, each in found.items() if each.min() < seen["min_cosine"]}
    assert not below, below
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
