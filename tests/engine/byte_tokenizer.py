"""A tokenizer for tiny models: one token for each byte, so that any text and any grammar can be written with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.engine.tiny_models import VOCABULARY

IMAGE = "<image>"
SPECIAL = ("<pad>", "<s>", "</s>", IMAGE)
"""Their ids are their places: those of padding, beginning, end and images in the tiny models' configurations."""
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
TEMPLATE += "{% for part in m['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
TEMPLATE += "{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def with_tokenizer(model: Path, folder: Path) -> Path:
    """Make `folder` with the files of `model`, by links, and the tokenizer; returns it."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, special: Sequence[str] = SPECIAL) -> None:
    """Write the tokenizer's files into `folder`; `special` begins with `SPECIAL`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *alphabet]
    words += [f"<unused{index}>" for index in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "image_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
