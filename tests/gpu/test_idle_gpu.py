"""Idle headgate answers as stock does, bit for bit: every token and every logprob of 40 requests.

Compiled reproducibly (`engine_runs.REPRODUCIBLE`); the engines of a model run at once, each in a process and with a
compile cache of its own. Two stock engines show that the comparison means something. The model in the folder
GPU_TEST_MODEL has vLLM's dummy weights; two more have the width of real ones, a few layers, and weights made by
`random_weights`: with dummy ones, branches are too small for Llama's stream to show anything. Needs 70 GB of memory.

Capture has its usual sites. Where it takes `post_attn`, too, Gemma's last bits differ: see docs/performance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from idle_runs import PARTS
from side_by_side import run_side_by_side

from headgate.capture.engine.commands.verify import RANDOM_WEIGHTS
from tests.benchmarks.models import write_model

HERE = Path(__file__).parent
TIMEOUT_S = 300
GIVEN = "given"
NUM_LAYERS = {"llama3-8b": 6, "qwen3-30b-a3b": 3}
VARIANTS = {
    GIVEN: tuple(PARTS),
    **dict.fromkeys(NUM_LAYERS, ("stock", "steering", "both", "ops", "ops-branches", "ops-heads", "saes")),
}

Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=list(VARIANTS))
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each engine answered with one model."""
    model, folder = request.param, tmp_path_factory.mktemp(request.param)
    environment = {} if model == GIVEN else made(model, folder)
    outs = {variant: folder / f"{variant}.json" for variant in VARIANTS[model]}
    commands = {variant: [str(HERE / "idle_runs.py"), variant, str(out)] for variant, out in outs.items()}
    run_side_by_side(commands, folder, TIMEOUT_S, **environment)
    return {variant: json.loads(out.read_text()) for variant, out in outs.items()}


def made(name: str, folder: Path) -> dict[str, str]:
    """Write a model of few layers with real weights; the environment that has it served."""
    write_model(name, folder / "config", num_hidden_layers=NUM_LAYERS[name])
    command = [sys.executable, "-m", RANDOM_WEIGHTS, str(folder / "config"), str(folder / "model")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    engine = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 2048, "load_format": "auto"}
    return {"GPU_TEST_MODEL": str(folder / "model"), "GPU_TEST_ENGINE": json.dumps(engine)}


def test_every_token_and_logprob_is_stocks(answers):
    differing = {}
    for variant, found in answers.items():
        pairs = list(zip(answers["stock"], found, strict=True))
        other_tokens = [index for index, (stock, ours) in enumerate(pairs) if stock["tokens"] != ours["tokens"]]
        other_logprobs = [index for index, (stock, ours) in enumerate(pairs) if stock["logprobs"] != ours["logprobs"]]
        differing[variant] = (other_tokens, other_logprobs)

    assert len(differing) > 1
    assert differing == dict.fromkeys(answers, ([], []))
