"""The model's tokens: their texts, and their rows of the model's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray
from headgate.capture.schema.errors import RequestError, shown

HeadRow = npt.NDArray[np.float32]
WORD_LETTERS = 2
"""Letters of a word-like token, at least."""
MAX_TOKEN_TEXT = 1024
"""Characters of a token, at most: a longer text is not encoded to find out that it is no token."""


class Vocabulary(Protocol):
    """The model's tokens.

    Attributes:
        size: Number of tokens.
    """

    size: int

    @property
    def max_text(self) -> int:
        """Characters of a text that the model's context can hold, at most."""
        ...

    @property
    def has_texts(self) -> bool:
        """Whether there is a tokenizer. Without one there is a size alone."""
        ...

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Return the tokens of a text; of a prompt, with the special tokens that begin one."""
        ...

    def shown(self, token: int) -> str:
        """Return the text of a token, for people."""
        ...

    def head_row(self, token: int) -> HeadRow:
        """Read a token's row of the model's head from the model's files, float32 ``[hidden]``.

        Raises:
            UnsupportedError: If they have no plain head, such as one that is quantized.
            OSError: If they are not on this machine.
        """
        ...


def is_token(value: object, vocabulary: Vocabulary) -> bool:
    """Whether a value is the id of a token."""
    return type(value) is int and 0 <= value < vocabulary.size


def read_token(value: object, vocabulary: Vocabulary, field: str) -> int:
    """Read a token that a client named by its id, or by a text that is one token. Takes less than a millisecond.

    Raises:
        RequestError: For `field`, if it is neither.
    """
    if type(value) is int and is_token(value, vocabulary):
        return value
    if not isinstance(value, str):
        raise RequestError(field, f"expected a token, as a text or an id below {vocabulary.size}; got {shown(value)}")
    if not vocabulary.has_texts:
        raise RequestError(field, f"the engine was started without a tokenizer: give an id, not {shown(value)}")
    if len(value) > MAX_TOKEN_TEXT:
        raise RequestError(field, f"expected one token, got a text of {len(value)} characters")
    tokens = vocabulary.encode(value, is_prompt=False)
    if len(tokens) == 1:
        return tokens[0]
    spaced = f" {value}"
    hint = f"; {spaced!r}, with a space, is one" if len(vocabulary.encode(spaced, is_prompt=False)) == 1 else ""
    raise RequestError(field, f"{shown(value)} is {len(tokens)} tokens, {shown(list(tokens))}; give one{hint}")


def read_tokens(value: object, vocabulary: Vocabulary, field: str) -> tuple[int, ...]:
    """Read a prompt: a text, or token ids. A long one takes seconds, so an event loop calls this on a thread.

    Raises:
        RequestError: For `field`, if it is neither, or a text that is certainly too long for the model.
    """
    if isinstance(value, str) and not vocabulary.has_texts:
        raise RequestError(field, f"the engine was started without a tokenizer: give token ids, not {shown(value)}")
    if isinstance(value, str) and len(value) > vocabulary.max_text:
        raise RequestError(
            field, f"has {len(value)} characters; {vocabulary.max_text} are the most that the model's context can hold"
        )
    if isinstance(value, str):
        value = list(vocabulary.encode(value, is_prompt=True))
    if not isinstance(value, list) or not value or not all(is_token(token, vocabulary) for token in value):
        raise RequestError(field, f"expected a text or a non-empty list of token ids, got {shown(value)}")
    return tuple(value)


def word_like(vocabulary: Vocabulary) -> BoolArray:
    """Which tokens are like words: letters alone, at least `WORD_LETTERS`, but for spaces around them. ``[size]``."""
    texts = (vocabulary.shown(token).strip() for token in range(vocabulary.size))
    return np.array([len(text) >= WORD_LETTERS and text.isalpha() for text in texts], np.bool_)
