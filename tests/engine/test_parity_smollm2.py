"""Real chat prompts through SmolLM2-135M-Instruct: every hook point of all 30 layers against Hugging Face.

The engine runs as users run it, in processes of its own, with prefix caching on and prompts cut into chunks.

In bf16 two right implementations differ: over 30 layers of this model, Hugging Face's own bf16 rows have cosines down
to 0.994 with its fp32 rows of the same weights. So bf16 rows are held against fp32 rows: 0.999 on average at every
site, and no row worse than `MIN_ROW_COSINE`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture.sites import FINAL_NORM_SITE, HookPoint, Site
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
HOOKS = {hook.value: "all" for hook in HookPoint}
SITES = {Site(layer, hook) for layer in range(NUM_LAYERS) for hook in HookPoint if hook is not HookPoint.FINAL_NORM}
MAX_ERROR = 1e-4
MIN_COSINE = 0.999
MIN_ROW_COSINE = 0.995


def chat(llm: Any) -> list[Any]:
    """Finished requests of `CONVERSATIONS`, with everything captured."""
    from headgate.capture import SamplingParams

    params = SamplingParams(
        max_tokens=NUM_OUTPUT, temperature=0, capture={"memory": {"hooks": HOOKS, "positions": "all"}}
    )
    return list(llm.chat(CONVERSATIONS, params, use_tqdm=False))


def start(shared_llm: Callable[..., Any], dtype: str, *, eager: bool) -> Any:
    capture = {"consumers": [{"name": "memory"}], "sites": HOOKS}
    return shared_llm(
        dtype=dtype,
        enforce_eager=eager,
        max_num_batched_tokens=64,
        additional_config={"headgate": {"capture": capture}},
    )


def compare(outputs: list[Any], model_dir: Path, dtype: torch.dtype) -> None:
    reference = HFReference(model_dir, "llama", torch.float32)
    for served in outputs:
        prompt, output = list(served.prompt_token_ids), list(served.outputs[0].token_ids)
        expected = reference.run(prompt, output)
        result = served.capture_results["memory"]
        assert result.status == "ok", result.error
        captured = result.payload
        assert set(captured.sites) == SITES | {FINAL_NORM_SITE}
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


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_chat_rows_equal_hugging_face(
    eager: bool,
    shared_llm: Callable[..., Any],
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # compiled here and now

    outputs = chat(start(shared_llm, "float32", eager=eager))

    assert sum(len(output.prompt_token_ids) for output in outputs) > 128, "prompts must need several steps"
    compare(outputs, model_dir, torch.float32)


def test_chat_rows_point_where_hugging_face_does_in_bf16(shared_llm: Callable[..., Any], model_dir: Path) -> None:
    compare(chat(start(shared_llm, "bfloat16", eager=True)), model_dir, torch.bfloat16)
