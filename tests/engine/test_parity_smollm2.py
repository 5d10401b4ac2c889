"""Real chat prompts through SmolLM2-135M-Instruct: every hook point of all 30 layers against Hugging Face.

The engine runs as users run it, in processes of its own, with prefix caching on and prompts cut into chunks.

In bf16 two right implementations differ: over 30 layers of this model, Hugging Face's own bf16 rows have cosines down
to 0.994 with its fp32 rows of the same weights. So bf16 rows are held against fp32 rows: 0.999 on average at every
site, and no row worse than `MIN_ROW_COSINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from tests.engine.hf_reference import HFReference, relative_error, row_cosines

CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Write one sentence about cats and the sea."},
        {"role": "assistant", "content": "The cat watched the waves as if they owed it a fish."},
        {"role": "user", "content": "Now one about dogs, in Français, s'il te plaît: où sont-ils? 🐕"},
    ],
    [{"role": "user", "content": "2+2="}],
]
NUM_LAYERS = 30
NUM_OUTPUT = 16
EVERY_LAYER = range(NUM_LAYERS)
SOME_LAYERS = (0, 1, 15, 29)
"""Compiled: each site adds to a graph that takes minutes to compile on two cores."""
MAX_ERROR = 1e-4
MIN_COSINE = 0.999
MIN_ROW_COSINE = 0.995


def hooks_of(layers: Sequence[int]) -> dict[str, Any]:
    return {hook.value: "all" if hook is HookPoint.FINAL_NORM else list(layers) for hook in HookPoint}


def chat(shared_llm: Callable[..., Any], dtype: str, layers: Sequence[int] = EVERY_LAYER, *, eager: bool) -> list[Any]:
    """Finished requests of `CONVERSATIONS`, with every hook point of `layers` captured."""
    from headgate.capture import SamplingParams

    hooks = hooks_of(layers)
    capture = {"consumers": [{"name": "memory"}], "sites": hooks}
    llm = shared_llm(
        dtype=dtype,
        enforce_eager=eager,
        max_num_batched_tokens=64,
        additional_config={"headgate": {"capture": capture}},
    )
    params = SamplingParams(
        max_tokens=NUM_OUTPUT, temperature=0, capture={"memory": {"hooks": hooks, "positions": "all"}}
    )
    return list(llm.chat(CONVERSATIONS, params, use_tqdm=False))


def compare(outputs: list[Any], model_dir: Path, dtype: torch.dtype, layers: Sequence[int] = EVERY_LAYER) -> None:
    hooks = set(HookPoint) - {HookPoint.FINAL_NORM}
    sites = {Site(layer, hook) for layer in layers for hook in hooks} | {FINAL_NORM_SITE}
    reference = HFReference(model_dir, "llama", torch.float32)
    for served in outputs:
        prompt, output = list(served.prompt_token_ids), list(served.outputs[0].token_ids)
        expected = reference.run(prompt, output)
        result = served.capture_results["memory"]
        assert result.status == "ok", result.error
        captured = result.payload
        assert set(captured.sites) == sites
        np.testing.assert_array_equal(captured.positions, np.arange(len(prompt) + len(output) - 1))
        np.testing.assert_array_equal(captured.token_ids, [*prompt, *output[:-1]])
        for site in captured.sites:
            assert captured[site].dtype == dtype
            check_values(captured[site], expected.rows[site], site)
        if dtype == torch.float32:
            assert expected.next_tokens[len(prompt) - 1 :].tolist() == output


def check_values(got: torch.Tensor, expected: torch.Tensor, site: Site) -> None:
    if got.dtype == torch.float32:
        error = relative_error(got, expected)
        assert error <= MAX_ERROR, f"{site.name}: relative error {error:.2g}"
    else:
        cosines = row_cosines(got, expected)
        assert cosines.mean() >= MIN_COSINE, f"{site.name}: mean cosine {cosines.mean():.5f}"
        assert cosines.min() >= MIN_ROW_COSINE, f"{site.name}: smallest cosine {cosines.min():.5f}"


def test_chat_rows_equal_hugging_face(shared_llm: Callable[..., Any], model_dir: Path) -> None:
    outputs = chat(shared_llm, "float32", eager=True)

    assert sum(len(output.prompt_token_ids) for output in outputs) > 128, "prompts must need several steps"
    compare(outputs, model_dir, torch.float32)


@pytest.mark.extended  # minutes of compiling; `make demo` compares compiled rows too, and so do the tiny models
def test_compiled_chat_rows_equal_hugging_face(
    shared_llm: Callable[..., Any], model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # compiled here and now

    outputs = chat(shared_llm, "float32", SOME_LAYERS, eager=False)

    compare(outputs, model_dir, torch.float32, SOME_LAYERS)


@pytest.mark.extended  # processors without bf16 take a minute of a core for it
def test_chat_rows_point_where_hugging_face_does_in_bf16(shared_llm: Callable[..., Any], model_dir: Path) -> None:
    compare(chat(shared_llm, "bfloat16", eager=True), model_dir, torch.bfloat16)
