"""A model's head, and its tokens, for tests without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def runs_loop() -> bool:
    """Whether an event loop runs in this thread: it would stop for as long as a tokenizer works."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Letters:
    """A vocabulary whose tokens are one or two letters: b ... z, aa, ab, ...; token 0 is a full stop."""

    max_text = 1 << 20

    def __init__(self, size: int, *, has_texts: bool = True) -> None:
        self.size, self.has_texts = size, has_texts

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        tokens = {self.shown(token): token for token in range(self.size)}
        return [tokens[text]] if text in tokens else [tokens.get(letter, 0) for letter in text]

    def head_row(self, token: int) -> Any:
        raise AssertionError("no file is read here")

    def shown(self, token: int) -> str:
        text, left = "", token + 1
        while left:
            left, letter = divmod(left - 1, 26)
            text = chr(ord("a") + letter) + text
        return text if token else "."


class FakeHead:
    """A norm by the root mean square, a random unembedding, and a soft cap."""

    def __init__(self, hidden_size: int, vocab_size: int = 60, *, has_texts: bool = True) -> None:
        self.vocab_size, self.dtype = vocab_size, torch.float32
        self.vocabulary = Letters(vocab_size, has_texts=has_texts)
        self.weight = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(3))

    def norm(self, rows: Tensor) -> Tensor:
        found = rows.to(self.dtype)
        return found / found.square().mean(dim=1, keepdim=True).add(1e-6).sqrt()

    def logits(self, normed: Tensor) -> Tensor:
        return 20.0 * torch.tanh(normed @ self.weight.T / 20.0)
