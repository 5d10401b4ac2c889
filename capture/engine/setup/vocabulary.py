"""The model's tokens as texts, in the processes that have its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.capture.engine import vllm_names
from headgate.capture.engine.vllm_types import VllmConfig


class ModelVocabulary:
    """Implements `headgate.capture.schema.vocabulary.Vocabulary`.

    Args:
        tokenizer: Of the model, as vLLM made it; None if it was started without one.
        size: Number of tokens.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self._tokenizer = tokenizer
        self.size = size

    @property
    def has_texts(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Return the tokens of a text; of a prompt, with the special tokens that begin one."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=is_prompt)
        return tokens

    def shown(self, token: int) -> str:
        """Return the text of a token, for people."""
        return str(self._tokenizer.decode([token]))


def vocabulary_of_config(config: VllmConfig) -> ModelVocabulary:
    """Return the vocabulary of the model in a worker, which has no front end with a tokenizer."""
    make = vllm_names.TOKENIZER_OF_CONFIG.get()
    model = config.model_config
    return ModelVocabulary(None if make is None else make(model), int(model.get_vocab_size()))
