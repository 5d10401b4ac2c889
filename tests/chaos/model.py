"""The model of the chaos run: the tests' tiny Llama in float32, with a tokenizer of bytes and a chat template."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.engine.tiny_models import MAX_LENGTH, VOCABULARY, tiny_model

FIRST_BYTE = 3
"""Token ids below it are special: padding, beginning, end. Token ``FIRST_BYTE + b`` is the byte ``b``."""

CHAT = "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\n' }}{% endfor %}a:"
"""The chat template: a line for each message."""


def chat_prompt(messages: list[dict[str, str]]) -> str:
    """The text that `CHAT` makes of messages."""
    return "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages) + "a:"


def chaos_model(folder: Path) -> Path:
    """Make the model in `folder`: a copy of the tiny Llama and the files of a tokenizer."""
    shutil.copytree(tiny_model("llama"), folder)
    alphabet = _byte_alphabet()
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{alphabet[byte]: FIRST_BYTE + byte for byte in range(256)}}
    vocabulary |= {f"<extra-{token}>": token for token in range(len(vocabulary), VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {**_ADDED, "id": token, "content": content} for content, token in vocabulary.items() if _is_special(content)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        "chat_template": CHAT,
        "model_max_length": MAX_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _is_special(content: str) -> bool:
    return content in ("<pad>", "<s>", "</s>")


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def tokens_of(text: str) -> list[int]:
    """The token ids of a text, as the tokenizer gives them."""
    return [FIRST_BYTE + byte for byte in os.fsencode(text)]
