"""Rows of the head are read from the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headgate.capture.engine.setup.vocabulary import ModelVocabulary
from headgate.capture.schema.errors import RequestError, UnsupportedError
from headgate.capture.schema.vocabulary import read_token, read_tokens

HEAD = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
EMBEDDINGS = -HEAD


def vocabulary(folder: Path, *, is_tied: bool = False, hidden: int = 4) -> ModelVocabulary:
    model: Any = SimpleNamespace(
        model=str(folder),
        revision=None,
        hf_text_config=SimpleNamespace(tie_word_embeddings=is_tied),
        get_vocab_size=lambda: 10,
        get_hidden_size=lambda: hidden,
    )
    return ModelVocabulary(None, SimpleNamespace(model_config=model))  # type: ignore[arg-type]


def test_the_head_is_found_in_one_file_and_in_several(tmp_path: Path) -> None:
    both = {"model.embed_tokens.weight": EMBEDDINGS, "lm_head.weight": HEAD}
    save_file(both, tmp_path / "model.safetensors")
    assert vocabulary(tmp_path).head_row(7).tolist() == HEAD[7].float().tolist()

    save_file({"model.embed_tokens.weight": EMBEDDINGS}, tmp_path / "a.safetensors")
    save_file({"language_model.lm_head.weight": HEAD * 2}, tmp_path / "b.safetensors")
    places = {"model.embed_tokens.weight": "a.safetensors", "language_model.lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert vocabulary(tmp_path).head_row(7).tolist() == (HEAD[7] * 2).float().tolist()


class Tokenizer:
    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def decode(self, tokens: list[int]) -> str:
        self.asked.append(tokens)
        return f"<{tokens[0]}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError("a text that is certainly too long is not encoded")


def of_tokenizer(tokenizer: Any) -> ModelVocabulary:
    model: Any = SimpleNamespace(get_vocab_size=lambda: 10, max_model_len=8)
    return ModelVocabulary(tokenizer, SimpleNamespace(model_config=model))  # type: ignore[arg-type]


def test_the_tokenizer_is_asked_once_for_the_text_of_a_token() -> None:
    words = of_tokenizer(tokenizer := Tokenizer())

    assert [words.shown(token) for token in (3, 4, 3, 3)] == ["<3>", "<4>", "<3>", "<3>"]
    assert tokenizer.asked == [[3], [4]]


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_encoded() -> None:
    words = of_tokenizer(Tokenizer())

    with pytest.raises(RequestError, match="prompt: has 2049 characters; 2048 are the most"):
        read_tokens("x" * 2049, words, "prompt")
    with pytest.raises(RequestError, match="expected one token, got a text of 1025 characters"):
        read_token("x" * 1025, words, "tokens[0]")


def test_tied_embeddings_are_the_head_only_where_they_are_tied(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": EMBEDDINGS}, tmp_path / "model.safetensors")

    assert vocabulary(tmp_path, is_tied=True).head_row(0).tolist() == EMBEDDINGS[0].float().tolist()
    with pytest.raises(UnsupportedError, match=r"have no plain head of 4 values a token \(lm_head\.weight"):
        vocabulary(tmp_path).head_row(0)
    with pytest.raises(UnsupportedError, match="no plain head of 8 values"):
        vocabulary(tmp_path, is_tied=True, hidden=8).head_row(0)
