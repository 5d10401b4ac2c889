"""The model's tokens as texts, and their rows of the head in the model's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headgate.capture.engine import vllm_names
from headgate.capture.engine.vllm_types import VllmConfig
from headgate.capture.files.tensors import LazyTensor, open_safetensors
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.vocabulary import HeadRow

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
"""Names of the head and of the embeddings in the files of models, without what comes before them."""
_INDEX = "model.safetensors.index.json"
_MAX_KNOWN = 1 << 16
"""Tokens whose texts are kept: a tokenizer takes 15 us for a text, and event loops ask for thousands."""
_TOKEN_TEXT = 256
"""Characters of the longest token of a tokenizer that does not say it."""


class ModelVocabulary:
    """Implements `headgate.capture.schema.vocabulary.Vocabulary`.

    Args:
        tokenizer: Of the model, as vLLM made it; None if it was started without one.
        config: Of the engine.
    """

    def __init__(self, tokenizer: Any, config: VllmConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self.size = int(config.model_config.get_vocab_size())
        self._text = lru_cache(_MAX_KNOWN)(lambda token: str(tokenizer.decode([token])))

    @property
    def max_text(self) -> int:
        """Characters of a text that the model's context can hold, at most."""
        longest: int = getattr(self._tokenizer, "max_chars_per_token", _TOKEN_TEXT)
        return longest * self._config.model_config.max_model_len

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
        return self._text(token)

    def head_row(self, token: int) -> HeadRow:
        """See `Vocabulary.head_row`."""
        found: HeadRow = self._head[token].read(np.float32)
        return found

    @cached_property
    def _head(self) -> LazyTensor:
        model = self._config.model_config
        is_tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        folder = _folder(self._config)
        tensor = find_head(folder, HEADS) or (find_head(folder, EMBEDDINGS) if is_tied else None)
        if tensor is None or tensor.shape[1:] != (model.get_hidden_size(),):
            raise UnsupportedError(
                f"{folder}: its safetensors have no plain head of {model.get_hidden_size()} values a token "
                f"({', '.join((*HEADS, *(EMBEDDINGS if is_tied else ())))}), so directions of tokens cannot be read"
            )
        return tensor


def find_head(folder: Path, names: Sequence[str]) -> LazyTensor | None:
    """Find the matrix of tokens in a model's safetensors, by the end of its name; None if there is none."""
    for path, found in _tensors(folder):
        name = next((name for name in found if name.endswith(tuple(names))), None)
        if name is not None:
            tensor = open_safetensors(path, UnsupportedError)[name]
            return tensor if len(tensor.shape) == 2 else None
    return None


def _tensors(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the files of a model with the names of their tensors."""
    if (index := folder / _INDEX).is_file():
        placed: dict[str, list[str]] = {}
        for name, file in msgspec.json.decode(index.read_bytes())["weight_map"].items():
            placed.setdefault(file, []).append(name)
        yield from ((folder / file, names) for file, names in placed.items())
        return
    for path in sorted(folder.glob("*.safetensors")):
        yield path, list(open_safetensors(path, UnsupportedError).tensors)


def _folder(config: VllmConfig) -> Path:
    """Return the model's folder: as it was named, or in the cache of Hugging Face's hub."""
    model: Any = config.model_config
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    cache_dir = getattr(getattr(config, "load_config", None), "download_dir", None)
    return Path(snapshot_download(model.model, revision=model.revision, cache_dir=cache_dir, local_files_only=True))


def vocabulary_of_config(config: VllmConfig) -> ModelVocabulary:
    """Return the vocabulary of the model in a worker, which has no front end with a tokenizer.

    Raises:
        UnsupportedError: If this vLLM makes no tokenizer in a worker, without which `words_only` cannot be obeyed.
    """
    make = vllm_names.TOKENIZER_OF_CONFIG.get()
    if make is None:
        raise UnsupportedError("this vLLM has no function that makes the tokenizer of a configuration")
    return ModelVocabulary(make(config.model_config), config)
