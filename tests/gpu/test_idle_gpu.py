"""Idle headgate answers as stock does, bit for bit: every token and every logprob of 40 requests.

Compiled reproducibly (`engine_runs.REPRODUCIBLE`); the engines of a model run at once, each in a process and with a
compile cache of its own. Two stock engines show that the comparison means something. The model in the folder
GPU_TEST_MODEL has vLLM's dummy weights; two more have the width of real ones, a few layers, and weights made by
`random_weights`: with dummy ones, branches are too small for Llama's stream to show anything. As many engines run at
once as the GPU has room for.

Capture has its usual sites. Where it takes `post_attn`, too, Gemma's last bits differ: see docs/performance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
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
    **dict.fromkeys(NUM_LAYERS, tuple(part for part in PARTS if part != "capture")),
}
LARGEST = 13 << 30
"""Bytes that one engine takes: Gemma 3 4B's weights, 3 GiB for keys and values, its context and graphs."""

Answers = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=list(VARIANTS))
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each engine answered with one model."""
    model, folder = request.param, tmp_path_factory.mktemp(request.param)
    environment = {} if model == GIVEN else made(model, folder)
    outs = {variant: folder / f"{variant}.json" for variant in VARIANTS[model]}
    commands = {variant: [str(HERE / "idle_runs.py"), variant, str(out)] for variant, out in outs.items()}
    num_at_once = max(1, torch.cuda.mem_get_info()[0] // LARGEST) if torch.cuda.is_available() else 1
    for together in batched(commands, num_at_once):
        run_side_by_side({variant: commands[variant] for variant in together}, folder, TIMEOUT_S, **environment)
    return {variant: json.loads(out.read_text()) for variant, out in outs.items()}


def batched(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield the names in order, so many at a time; `itertools` has it from Python 3.12 on."""
    left = iter(names)
    while found := tuple(islice(left, size)):
        yield found


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
        print(f"{variant}: tokens of {other_tokens}, logprobs of {other_logprobs} differ", flush=True)

    assert len(differing) > 1
    assert differing == dict.fromkeys(answers, ([], []))
