"""Top-k SAEs that are two ``nn.Linear`` and a bias: a folder of ``config.json`` and ``weights.safetensors``.

The configuration is ``{hidden_dim, dict_size, k}``; it does not name the site.
"""

from __future__ import annotations

from pathlib import Path

from headgate.steering.features.source_coder import (
    LINEAR,
    CoderKind,
    Hints,
    SourceCoder,
    expect_only,
    one_of,
    read_json,
    read_weights,
)
from headgate.steering.features.tensors import open_tensors

CONFIG, WEIGHTS = "config.json", "weights.safetensors"

_NAMES = LINEAR._replace(decoder_bias="pre_bias")


def claims(path: Path) -> bool:
    """Whether a folder is of this format."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a folder.

    Raises:
        FeatureFileError: If it is damaged, or its configuration is not of these weights.
    """
    config_path = path / CONFIG
    config, file = read_json(config_path), open_tensors(path / WEIGHTS)
    shape = (one_of(config, "dict_size", config_path, int), one_of(config, "hidden_dim", config_path, int))
    k: int = one_of(config, "k", config_path, int)
    expect_only(file, _NAMES.tensors, "the class that writes this configuration")
    weights = read_weights(file, _NAMES)
    weights["encoder"].expect(shape, "dict_size, hidden_dim of config.json")
    return SourceCoder(
        format="linear_top_k",
        paths=(config_path, path / WEIGHTS),
        kind=CoderKind.TOPK,
        **weights,
        k=k,
        subtracts_bias=True,
        scale=hints.scale or 1.0,
        read_site=hints.site,
        declared={"l0": float(k)},
    )
