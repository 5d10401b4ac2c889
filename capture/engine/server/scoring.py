"""Scores of chosen tokens: one generation of one token, for routes that make many."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Sequence
from typing import Any

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.setup.client_errors import as_client_error
from headgate.capture.schema.errors import RequestError

SCORED = "logprob_token_ids"
"""Field of vLLM's `SamplingParams`: tokens whose logprobs are returned, whatever their rank."""

_LOGPROBS = "raw_logprobs"


class EngineVocabulary:
    """Implements `headgate.capture.engine.contracts.route_part.Vocabulary`.

    Args:
        tokenizer: Of the model, as vLLM made it.
        size: Number of tokens.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self.size = size

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Encode as ``/v1/completions`` does."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=is_prompt)
        return tokens

    def shown(self, token: int) -> str:
        """Decode one token."""
        return str(self._tokenizer.decode([token]))


async def vocabulary_of(engine: Any) -> EngineVocabulary:
    """Return the vocabulary of an `AsyncLLM`.

    Raises:
        RequestError: If it was started without a tokenizer.
    """
    try:
        found = engine.get_tokenizer()
        tokenizer = await found if inspect.isawaitable(found) else found
    except ValueError as error:
        raise RequestError("prompt", f"this server has no tokenizer: {error}") from None
    return EngineVocabulary(tokenizer, int(engine.vllm_config.model_config.get_vocab_size()))


async def score(engine: Any, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
    """Return the logprobs of tokens after a prompt; see `RouteServices.score`."""
    from vllm import SamplingParams

    mode = getattr(
        engine.vllm_config.model_config.logprobs_mode, "value", engine.vllm_config.model_config.logprobs_mode
    )
    if SCORED not in SamplingParams.__struct_fields__ or mode != _LOGPROBS:
        with as_client_error():
            raise RequestError(
                "metric",
                f"this server cannot score tokens: it takes a vLLM whose SamplingParams has {SCORED}, and "
                f"--logprobs-mode {_LOGPROBS}, which is {mode}",
            )
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **{SCORED: list(dict.fromkeys(token_ids))})
    for name, value in fields.items():
        setattr(params, name, value)
    outputs = engine.generate({"prompt_token_ids": list(prompt)}, params, f"score-{secrets.token_hex(8)}")
    last = None
    async for output in outputs:
        last = output
    if last is None or not last.outputs[0].logprobs:
        reason = None if last is None else last.outputs[0].finish_reason
        raise RuntimeError(f"a scored request ended without a token ({reason})")
    step = last.outputs[0].logprobs[0]
    return [float(step[token].logprob) for token in token_ids]
