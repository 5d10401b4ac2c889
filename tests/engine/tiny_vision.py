"""A tiny random vision model as a Hugging Face folder with its processor: no download, and no torchvision.

Idefics 3 cuts an image into tiles, each of which becomes `TILE_TOKENS` placeholders in the prompt. An image twice as
wide as high has three: two halves, and the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tests.engine.byte_tokenizer import IMAGE, SPECIAL, write_tokenizer
from tests.engine.tiny_models import IMAGE_TOKEN, PATCH, SCALE, TILE, tiny_model

if TYPE_CHECKING:
    from PIL.Image import Image

TILE_TOKENS = (TILE // PATCH // SCALE) ** 2
TILES = 3
MARKS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>")

_IMAGES = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": True,
    "size": {"longest_edge": 2 * TILE},
    "max_image_size": {"longest_edge": TILE},
}


def vision_model(folder: Path) -> Path:
    """Make `folder` with the tiny vision model, its tokenizer and its processor; returns it."""
    folder.mkdir(parents=True)
    for path in tiny_model("idefics3").iterdir():
        (folder / path.name).symlink_to(path.resolve())
    write_tokenizer(folder, (*SPECIAL, *MARKS))
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def image(seed: int) -> Image:
    """Random pixels, of a size whose tiles are no copies of each other."""
    from PIL import Image as images

    pixels = np.random.default_rng(seed).integers(0, 256, (TILE, 2 * TILE, 3), dtype=np.uint8)
    return images.fromarray(pixels)


def placeholders(token_ids: list[int]) -> list[int]:
    """Positions that hold a piece of an image."""
    return [position for position, token in enumerate(token_ids) if token == IMAGE_TOKEN]


def pixels(folder: Path, *given: Image) -> Mapping[str, Tensor]:
    """Arguments of Hugging Face's model that hold `given`, in the order of the prompt."""
    from transformers import AutoProcessor

    found = AutoProcessor.from_pretrained(folder)(images=[list(given)], text=IMAGE * len(given), return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}
