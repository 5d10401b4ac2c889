"""``return_hidden_states`` and captures within the answer, on a real engine, against Hugging Face.

This engine schedules synchronously; `test_changes_in_flight` has the same on one that does not.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from headgate.capture import SamplingParams, additional_config
from headgate.capture.schema.sites import FINAL_NORM_SITE
from tests.engine.hf_reference import HFReference, relative_error

PROMPTS = ["The capital of France is", "Once upon a time, in a land far away, there lived", "1 2 3"]
SITES = {"post_mlp": [7], "final_norm": "all"}
MAX_ERROR = 1e-4
MAX_BYTES = 8 * 576 * 4 * 2
"""Eight rows of two sites."""


@pytest.fixture
def llm(shared_llm: Callable[..., Any]) -> Any:
    consumers = ["hidden_states", "memory", f"inline:max_bytes={MAX_BYTES}"]
    config = additional_config(consumers=consumers, sites=SITES)
    return shared_llm(dtype="float32", async_scheduling=False, additional_config=config)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> HFReference:
    return HFReference(model_dir, "llama", torch.float32)


def generate(llm: Any, prompts: Any = PROMPTS, **kwargs: Any) -> list[Any]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, "return_hidden_states": True, **kwargs})
    return list(llm.generate(prompts, params, use_tqdm=False))


def check(reference: HFReference, output: Any, completion: Any) -> None:
    prompt, tokens = list(output.prompt_token_ids), list(completion.token_ids)
    expected = reference.run(prompt, tokens).rows[FINAL_NORM_SITE][-1]
    assert completion.hidden_states.dtype == torch.float32
    error = relative_error(completion.hidden_states, expected)
    assert error <= MAX_ERROR, f"relative error {error:.2g}"


def test_the_state_before_the_last_token_is_hugging_faces(llm: Any, reference: HFReference) -> None:
    for output in generate(llm):
        check(reference, output, output.outputs[0])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_of_the_shortest_answers(llm: Any, reference: HFReference, max_tokens: int) -> None:
    for output in generate(llm, max_tokens=max_tokens):
        check(reference, output, output.outputs[0])


def test_every_sample_has_its_own(llm: Any, reference: HFReference) -> None:
    (output,) = generate(llm, PROMPTS[:1], n=3, temperature=1.0, seed=5)

    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        check(reference, output, completion)


def test_of_an_answer_that_met_a_stop_string(llm: Any, reference: HFReference) -> None:
    (whole,) = generate(llm, PROMPTS[1:2], max_tokens=20)
    stop = f" {whole.outputs[0].text.split()[4]}"

    (output,) = generate(llm, PROMPTS[1:2], max_tokens=20, stop=[stop])

    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) < 20
    check(reference, output, output.outputs[0])


def test_of_an_answer_that_met_a_stop_token(llm: Any, reference: HFReference) -> None:
    (whole,) = generate(llm, PROMPTS[1:2])
    stop = whole.outputs[0].token_ids[5]

    (output,) = generate(llm, PROMPTS[1:2], stop_token_ids=[stop])

    assert output.outputs[0].token_ids[-1] == stop
    check(reference, output, output.outputs[0])


def test_nothing_else_gets_one(llm: Any) -> None:
    (output,) = generate(llm, PROMPTS[:1], return_hidden_states=False)

    assert not hasattr(output.outputs[0], "hidden_states")


def test_a_capture_within_the_answer_is_what_memory_holds(llm: Any) -> None:
    wanted = {"hooks": SITES, "positions": "all_generated"}
    (output,) = generate(llm, PROMPTS[:1], max_tokens=6, capture={"inline": wanted, "memory": wanted})

    payload, rows = (output.capture_results[name].payload for name in ("inline", "memory"))
    tensors = load(base64.b64decode(payload["data"]))
    assert set(tensors) == {"7.post_mlp", "final_norm", "positions", "token_ids"}
    np.testing.assert_array_equal(tensors["positions"], rows.positions)
    np.testing.assert_array_equal(tensors["token_ids"], rows.token_ids)
    for site in ("7.post_mlp", "final_norm"):
        assert tensors[site].shape == (5, 576)
        assert torch.equal(tensors[site], rows[site])
    assert torch.equal(tensors["final_norm"][-1], output.outputs[0].hidden_states)


def test_a_capture_that_is_too_large_for_the_answer_is_an_error(llm: Any) -> None:
    wanted = {"hooks": SITES, "positions": "all_generated"}
    (output,) = generate(llm, PROMPTS[:1], max_tokens=12, capture={"inline": wanted, "memory": wanted})

    result = output.capture_results["inline"]
    assert result.status == "error"
    assert str(MAX_BYTES) in result.error
    assert output.capture_results["memory"].status == "ok"
