"""Idle headgate answers as stock does, bit for bit, under each setting of vLLM that it serves; see `settings_runs`.

Compiled reproducibly, three engines of each setting at once, each with a compile cache of its own: stock, stock again
and idle. Where stock does not answer as stock does, nothing can be said of headgate: such a test is skipped, and says
how many differ. Models have the width of real ones, few layers and weights made by `random_weights`. Settings are
chosen by ``-k`` or by IDLE_SETTINGS (names with commas); IDLE_SETTINGS_AT_ONCE of them run at once. `test_idle_gpu` has
vLLM's defaults, `test_lora_fp8_gpu` adapters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from settings_runs import MAX_TOKENS, NUM_ALONE, SETTINGS, Setting, speculative
from side_by_side import run_modes

from headgate.capture.engine.commands.verify import RANDOM_WEIGHTS
from tests.benchmarks.models import write_model
from tests.engine.drafting import mtp_folder
from tests.engine.tiny_models import tiny_model

RUNS = Path(__file__).with_name("settings_runs.py")
TIMEOUT_S = float(os.environ.get("GPU_TEST_TIMEOUT_S", "260"))
AT_ONCE = int(os.environ.get("IDLE_SETTINGS_AT_ONCE", "3"))
WANTED = [name for name in os.environ.get("IDLE_SETTINGS", "").split(",") if name] or list(SETTINGS)
VARIANTS = ("stock", "stock-again", "idle")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "vocab_size": 32000},
    "moe": {"num_hidden_layers": 2, "vocab_size": 32000},
}
"""Of three layers EAGLE-3 reads each; of four it would read one twice, and vLLM fails."""
NAMES = {"llama": "llama3-8b", "moe": "qwen3-30b-a3b"}
NEAR = 0.005
"""What the share of accepted drafts may differ by from stock's."""


def made(model: str, folder: Path) -> Path:
    """A model's folder, with weights."""
    if model == "mtp":
        return mtp_folder(tiny_model("deepseek_v3_all"))
    sizes = SIZES[model] | json.loads(os.environ.get("GPU_TEST_SIZES", "{}"))
    write_model(NAMES[model], folder / f"{model}-config", **sizes)
    command = [sys.executable, "-m", RANDOM_WEIGHTS, str(folder / f"{model}-config"), str(folder / model)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return folder / model


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the engines of each setting that is tested saw; the reason where one failed."""
    folder = tmp_path_factory.mktemp("settings")
    own = [item for item in request.session.items if item.path == Path(__file__)]
    chosen = [name for name in WANTED if any(item.callspec.params["name"] == name for item in own)]  # type: ignore[attr-defined]
    settings = {name: SETTINGS[name] for name in chosen}
    models = {model: made(model, folder) for model in {setting.model for setting in settings.values()}}
    for setting in settings.values():
        if setting.method:  # engines that start at once must not write what another reads
            speculative(setting.method, models[setting.model])

    def run(name: str) -> dict[str, Any]:
        modes = [f"{name}-{variant}" for variant in VARIANTS]
        try:
            seen = run_modes(RUNS, modes, folder, TIMEOUT_S, GPU_TEST_MODEL=str(models[settings[name].model]))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return {"failed": str(error)}
        return dict(zip(VARIANTS, (seen[mode] for mode in modes), strict=True))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(settings, pool.map(run, settings), strict=True))


def parameter(name: str, setting: Setting) -> Any:
    """A setting as a parameter: ``-k two_gpus`` chooses those of two."""
    if setting.num_gpus == 1:
        return name
    has_one = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none to be tried")
    return pytest.param(name, id=f"{name}-two_gpus", marks=has_one)


ALL = [parameter(name, SETTINGS[name]) for name in WANTED]
DRAFTING = [name for name in WANTED if SETTINGS[name].method]


def differing(stock: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The requests whose tokens and whose logprobs are others."""
    return {
        key: [index for index, (a, b) in enumerate(zip(stock, other, strict=True)) if a[key] != b[key]]
        for key in ("tokens", "logprobs")
    }


@pytest.mark.parametrize("name", ALL)
def test_every_token_and_logprob_is_stocks(name, runs):
    seen = runs[name]
    assert "failed" not in seen, seen["failed"]
    assert any(stats["capture"] for stats in seen["idle"]["stats"])
    assert all(stats["steering"] for stats in seen["idle"]["stats"])
    assert name != "offloading" or all(one["loaded"] > 0 for one in seen.values()), "no block came back"
    undecided = []
    for how in ("together", "alone"):
        stock, again, ours = (seen[variant][how] for variant in VARIANTS)
        assert len(stock) >= NUM_ALONE
        assert all(len(one["tokens"]) == len(one["logprobs"]) == MAX_TOKENS for one in stock)
        by_itself, by_us = differing(stock, again), differing(stock, ours)
        print(f"IDLE {name}, {how}: of {len(stock)} requests, stock differs from itself {by_itself}, idle {by_us}")
        if any(by_itself.values()):
            undecided.append(f"{how}: stock {by_itself}, idle {by_us}")
        else:
            assert not any(by_us.values()), (how, by_us)
    if undecided:
        pytest.skip(f"stock does not answer as stock does under {name}: {'; '.join(undecided)}")


@pytest.mark.parametrize("name", DRAFTING)
def test_as_many_drafts_are_accepted_as_of_stock(name, runs):
    seen = runs[name]
    assert "failed" not in seen, seen["failed"]
    counts = {variant: seen[variant]["counts"] for variant in VARIANTS}
    drafted = {variant: found["spec_decode_num_draft_tokens"] for variant, found in counts.items()}
    assert all(drafted.values()), drafted
    shares = {variant: counts[variant]["spec_decode_num_accepted_tokens"] / drafted[variant] for variant in VARIANTS}
    print(f"ACCEPTED {name}: {shares} of {drafted}")
    if abs(shares["stock-again"] - shares["stock"]) > NEAR:
        pytest.skip(f"stock does not accept as many as stock under {name}: {shares}")
    assert abs(shares["idle"] - shares["stock"]) <= NEAR
