"""Requests that nobody steers get stock's answers bit for bit, compiled and in bfloat16, with a site at every norm.

Every position of the prompts is compared, so that one other last bit of one norm shows.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import start_llm, stop_llm
from tests.engine.tiny_models import tiny_model
from tests.fakes.transcoders import TinyTranscoder
from tests.fresh_python import fresh_cache

NUM_LAYERS = 2
NUM_PROMPTS = 4
NUM_TOKENS = 200
SITES = {"pre_attn": "all", "attn_in": "all", "hook_z": "all", "post_attn": "all", "post_mlp": "all"}
INNER = SITES | {"q_pre": "all", "k_pre": "all", "q": "all", "k": "all", "v": "all", "mlp_act": "all"}
STEERING = {"steering": {"sites": INNER}}
OPERATIONS = {"steering": {"sites": SITES, "op_sites": INNER}}
BOTH = {"capture": {"consumers": [{"name": "memory"}], "sites": INNER}, **STEERING}
"""Where capture takes the mid stream, steering adds to it there; else ahead of attention."""


@pytest.fixture(scope="module")
def smollm2(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers: the compiled code of the others is the same, and compiling all thirty takes minutes."""
    folder = tmp_path_factory.mktemp("cut")
    config = json.loads((model_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_LAYERS}))
    shutil.copy(model_dir / "generation_config.json", folder)
    others = tuple(f"model.layers.{layer}." for layer in range(NUM_LAYERS, config["num_hidden_layers"]))
    weights = load_file(model_dir / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(others)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(model: Path, vocabulary: int, headgate: dict[str, Any]) -> list[Any]:
    """Tokens and logprobs of each position, by request."""
    from vllm import SamplingParams

    drawn = random.Random(0)
    prompts = [{"prompt_token_ids": drawn.choices(range(3, vocabulary), k=NUM_TOKENS)} for _ in range(NUM_PROMPTS)]
    llm = start_llm(
        model=model,
        dtype="bfloat16",
        enforce_eager=False,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        in_process=True,
        additional_config={"headgate": headgate} if headgate else {},
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        stop_llm(llm)
    return [
        (list(output.outputs[0].token_ids), plain(output.prompt_logprobs[1:]), plain(output.outputs[0].logprobs))
        for output in outputs
    ]


def plain(steps: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in step.items()} for step in steps]


def check(
    model: Path, vocabulary: int, configurations: Sequence[Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(fresh_cache(cache)))  # compiled here and now

    stock = answers(model, vocabulary, {})
    for configured in configurations:
        idle = answers(model, vocabulary, configured)
        assert [mine == theirs for mine, theirs in zip(idle, stock, strict=True)] == [True] * NUM_PROMPTS, configured


def test_smollm2_compiled_in_bf16_answers_as_stock_does_bit_for_bit(smollm2, tmp_path, monkeypatch):
    transcoder = TinyTranscoder(layer=0, num_layers=NUM_LAYERS, width=576).save(tmp_path / "transcoder")
    across = {"steering": {"sites": SITES, "op_sites": SITES, "saes": {"across": str(transcoder)}}}
    check(smollm2, 49152, [BOTH, OPERATIONS, across], tmp_path, monkeypatch)


@pytest.mark.extended  # operations are beside vectors at each site as well
def test_smollm2_compiled_with_vectors_alone_answers_as_stock_does_bit_for_bit(smollm2, tmp_path, monkeypatch):
    check(smollm2, 49152, [STEERING], tmp_path, monkeypatch)


@pytest.mark.extended
def test_gpt2_compiled_in_bf16_answers_as_stock_does_bit_for_bit(tmp_path, monkeypatch):
    """One stream instead of a branch and a residual, and norms of two reductions each.

    Without operations at the mid stream: stock's kernel takes the mean of that sum before it is rounded, and code that
    reads whole rows needs it stored, rounded, in front of the norm.
    """
    inner = {hook: layers for hook, layers in INNER.items() if hook not in ("q_pre", "k_pre")}  # no rotary embedding
    both = {"capture": BOTH["capture"] | {"sites": inner}, "steering": {"sites": inner}}
    op_sites = {hook: layers for hook, layers in inner.items() if hook != "post_attn"}
    operations = {"steering": {"sites": SITES, "op_sites": op_sites}}
    check(tiny_model("gpt2"), 512, [both, operations], tmp_path, monkeypatch)
