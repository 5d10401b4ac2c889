"""Scores of chosen tokens over an engine that is played: what it is asked, and what cannot be scored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.server.plugin_routes import score, vocabulary_of
from headgate.capture.schema.errors import RequestError


class Engine:
    """Answers every request with one step."""

    def __init__(self, mode: str = "raw_logprobs", step: Any = None) -> None:
        config = SimpleNamespace(logprobs_mode=mode, get_vocab_size=lambda: 100)
        self.vllm_config = SimpleNamespace(model_config=config, speculative_config=None)
        self.step = step
        self.asked: list[Any] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        self.asked.append((prompt, params, request_id))
        yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=self.step and [self.step], finish_reason="abort")])

    def get_tokenizer(self) -> Any:
        raise ValueError("skip_tokenizer_init")


def logprobs(**values: float) -> dict[int, Any]:
    return {int(token.removeprefix("t")): SimpleNamespace(logprob=value) for token, value in values.items()}


def test_the_logprobs_of_the_tokens_are_returned_in_their_order() -> None:
    engine = Engine(step=logprobs(t9=-0.25, t3=-2.0, t4=-3.0))

    scored = asyncio.run(score(engine, (1, 2), (4, 3), {"steering_name": "calm"}))

    assert scored == [-3.0, -2.0]
    ((prompt, params, request_id),) = engine.asked
    assert prompt == {"prompt_token_ids": [1, 2]}
    assert (params.max_tokens, params.temperature, params.logprob_token_ids) == (1, 0.0, [4, 3])
    assert (params.steering_name, request_id.startswith("score-")) == ("calm", True)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", SimpleNamespace(value="processed_logits")])
def test_a_server_that_returns_other_values_is_refused(mode: Any) -> None:
    engine = Engine(mode)

    with pytest.raises(RequestError, match="--logprobs-mode raw_logprobs") as refusal:
        asyncio.run(score(engine, (1, 2), (4,), {}))

    assert (refusal.value.field, engine.asked) == ("metric", [])


def test_a_request_without_an_answer_is_no_score() -> None:
    with pytest.raises(RuntimeError, match="ended without a token"):
        asyncio.run(score(Engine(), (1, 2), (4,), {}))


def test_without_a_tokenizer_there_is_no_vocabulary() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        asyncio.run(vocabulary_of(Engine()))


def test_a_vocabulary_encodes_texts_as_prompts_and_as_tokens() -> None:
    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [*([1] if add_special_tokens else []), len(text)]

        def decode(self, tokens: list[int]) -> str:
            return f"<{tokens[0]}>"

    engine = Engine()
    engine.get_tokenizer = Tokenizer  # type: ignore[method-assign]

    found = asyncio.run(vocabulary_of(engine))

    assert (found.size, found.encode("abc", is_prompt=True), found.encode("abc", is_prompt=False)) == (100, [1, 3], [3])
    assert found.shown(7) == "<7>"
