"""Requests to a real engine with the memory consumer: every way to end, chats, samples.

In float32: what bfloat16 rounds away differs from one CPU to the next, and with it the answers' ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headgate.capture import SamplingParams, additional_config
from tests.engine.hf_reference import relative_error

SITES = {"pre_attn": [0], "post_mlp": [7], "final_norm": "all"}
EVERYTHING = {"memory": {"hooks": SITES}}
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]


@pytest.fixture
def llm(shared_llm: Callable[..., Any]) -> Any:
    return shared_llm(additional_config=additional_config(consumers=["memory"], sites=SITES), dtype="float32")


def generate(llm: Any, prompt: str = "Once upon a time", **kwargs: Any) -> Any:
    params = SamplingParams(**{"capture": EVERYTHING, "temperature": 0, "max_tokens": 12, **kwargs})
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def check_rows(output: Any, completion: Any = None) -> Any:
    """Exactly one row for each token that was forwarded, at every site."""
    completion = completion or output.outputs[0]
    result = completion.capture_results["memory"]
    assert result.status == "ok", result.error
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    rows = result.payload
    assert rows.token_ids.tolist() == tokens[:-1]
    assert rows.positions.tolist() == list(range(len(tokens) - 1))
    assert rows.num_prompt_tokens == len(output.prompt_token_ids)
    for site in ("0.pre_attn", "7.post_mlp", "final_norm"):
        assert rows[site].shape == (len(tokens) - 1, 576)
        assert torch.isfinite(rows[site]).all()
    assert result.num_rows == len(tokens) - 1
    return rows


def test_a_request_that_reached_its_length(llm: Any) -> None:
    assert check_rows(generate(llm)).status == "length"


def test_a_request_that_met_a_stop_string(llm: Any) -> None:
    words = generate(llm, max_tokens=20).outputs[0].text.split()
    stop = f" {words[4]}"

    output = generate(llm, max_tokens=20, stop=[stop])

    assert output.outputs[0].stop_reason == stop
    assert check_rows(output).status == "stop"


def test_a_request_that_sampled_a_stop_token(llm: Any) -> None:
    token = generate(llm).outputs[0].token_ids[5]

    output = generate(llm, stop_token_ids=[token])

    assert output.outputs[0].stop_reason == token
    assert check_rows(output).status == "stop"


def test_a_request_that_sampled_eos(llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, capture=EVERYTHING)
    (output,) = llm.chat(CHAT[:1], params, use_tqdm=False)

    assert output.outputs[0].finish_reason == "stop"
    check_rows(output)


def test_every_sample_has_rows_of_its_own(llm: Any) -> None:
    output = generate(llm, n=3, temperature=1.0, seed=1)

    for index, completion in enumerate(output.outputs):
        assert check_rows(output, completion).sample_index == index
    merged = output.capture_results["memory"]
    assert merged.num_rows == sum(len(payload) for payload in merged.payload)


def test_many_requests_with_one_sampling_params(llm: Any) -> None:
    prompts = [f"The number {i} is" + " very" * i for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=6, capture=EVERYTHING)

    outputs = llm.generate(prompts, params, use_tqdm=False)

    for output in outputs:
        check_rows(output)


def message(role: str, index: int) -> Any:
    positions = {"role": role, "index": index}
    capture = {"memory": {"hooks": {"post_mlp": [7]}, "positions": positions}}
    return SamplingParams(temperature=0, max_tokens=3, capture=capture)


@pytest.mark.parametrize("index", range(3))
def test_the_rows_of_one_message_of_a_chat(llm: Any, index: int) -> None:
    turn = CHAT[index]
    counted = [m for m in CHAT if m["role"] == turn["role"]].index(turn)

    (output,) = llm.chat(CHAT, message(turn["role"], counted), use_tqdm=False)
    (whole,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=3, capture=EVERYTHING), use_tqdm=False)

    rows, every = output.capture_results["memory"].payload, check_rows(whole)
    text = llm.get_tokenizer().decode(rows.token_ids.tolist())
    assert text == f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n"
    assert relative_error(rows["7.post_mlp"], every["7.post_mlp"][torch.from_numpy(rows.positions)]) <= 1e-4


def test_the_same_message_of_many_chats(llm: Any) -> None:
    chats = [[{"role": "user", "content": "Say " + "ha" * i}] for i in range(1, 9)]

    outputs = llm.chat(chats, message("user", 0), use_tqdm=False)

    for chat, output in zip(chats, outputs, strict=True):
        tokens = output.capture_results["memory"].payload.token_ids
        assert llm.get_tokenizer().decode(tokens.tolist()) == f"<|im_start|>user\n{chat[0]['content']}<|im_end|>\n"


def test_prompt_rows_are_complete_when_the_prompt_is_cached(llm: Any) -> None:
    prompt = "A long story about " + "a very old house and " * 20
    generate(llm, prompt, capture=None)
    last = {"memory": {"hooks": {"post_mlp": [7]}, "positions": "last_prompt"}}

    plain, everything, last_only = (generate(llm, prompt, capture=c) for c in (None, EVERYTHING, last))

    assert plain.num_cached_tokens > 0
    assert everything.num_cached_tokens == 0
    assert last_only.num_cached_tokens == plain.num_cached_tokens
    rows = check_rows(everything)
    found = last_only.capture_results["memory"].payload
    assert found.positions.tolist() == [len(everything.prompt_token_ids) - 1]
    assert relative_error(found["7.post_mlp"], rows["7.post_mlp"][torch.from_numpy(found.positions)]) <= 1e-4
    assert everything.outputs[0].token_ids == plain.outputs[0].token_ids == last_only.outputs[0].token_ids


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("last_prompt", lambda prompt, total: [prompt - 1]),
        ("all_prompt", lambda prompt, total: list(range(prompt))),
        ("all_generated", lambda prompt, total: list(range(prompt, total - 1))),
        ([0, -1, 999], lambda prompt, total: [0, prompt - 1]),
        ({"start": 1, "step": 3}, lambda prompt, total: list(range(1, total - 1, 3))),
        ({"start": -2, "stop": -1}, lambda prompt, total: [prompt - 2]),
        ([[0], {"start": 2, "stop": 4}, "all_generated"], lambda prompt, total: [0, 2, 3, *range(prompt, total - 1)]),
        (["last_prompt", "all_generated"], lambda prompt, total: list(range(prompt - 1, total - 1))),
    ],
    ids=["last_prompt", "all_prompt", "all_generated", "list", "every-third", "from-the-end", "several", "adjoining"],
)
def test_every_selector(llm: Any, positions: Any, expected: Callable[[int, int], list[int]]) -> None:
    output = generate(llm, capture={"memory": {"hooks": {"post_mlp": [7]}, "positions": positions}})

    rows = output.capture_results["memory"].payload
    num_prompt = len(output.prompt_token_ids)
    wanted = expected(num_prompt, num_prompt + len(output.outputs[0].token_ids))
    assert rows.positions.tolist() == wanted
    np.testing.assert_array_equal(rows.is_prefill, np.asarray(wanted) < num_prompt)


def test_handles_have_the_rows_of_a_capture(llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs, handles = llm.capture([CHAT, CHAT[:1]], params, sites=SITES, use_tqdm=False)
    whole = llm.chat([CHAT, CHAT[:1]], SamplingParams(temperature=0, max_tokens=3, capture=EVERYTHING), use_tqdm=False)

    for output, handle, expected in zip(outputs, handles, map(check_rows, whole), strict=True):
        assert output.capture_results["memory"].payload["num_rows"] == len(handle)
        assert handle.fetch().token_ids.tolist() == expected.token_ids.tolist()
        for site in ("0.pre_attn", "7.post_mlp", "final_norm"):
            assert relative_error(handle[site], expected[site]) < 1e-4
            span = handle.messages[-1]
            assert torch.equal(handle.message(-1)[site], handle[site][span.start : span.stop])
