"""dictionary_learning: a folder of ``ae.pt`` and ``config.json``, such as ``resid_post_layer_8/trainer_0``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HOOK_NAMES, Site
from headgate.steering.features.source_coder import (
    LINEAR,
    MATRICES,
    CoderKind,
    Hints,
    Names,
    SourceCoder,
    expect_only,
    one_of,
    read_json,
    read_weights,
)
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

CONFIG, WEIGHTS = "config.json", "ae.pt"

_TOP_K = LINEAR._replace(decoder_bias="b_dec")
_NAMES: dict[str, Names] = {
    "AutoEncoder": LINEAR._replace(decoder_bias="bias"),
    "AutoEncoderNew": LINEAR,
    "AutoEncoderTopK": _TOP_K,
    "BatchTopKSAE": _TOP_K,
    "MatryoshkaBatchTopKSAE": MATRICES,
    "GatedAutoEncoder": LINEAR._replace(bias="gate_bias", decoder_bias="decoder_bias"),
    "JumpReluAutoEncoder": MATRICES,
}
_BESIDE: dict[str, tuple[str, ...]] = {
    "AutoEncoderTopK": ("k", "threshold"),
    "BatchTopKSAE": ("k", "threshold"),
    "MatryoshkaBatchTopKSAE": ("k", "threshold", "group_sizes"),
    "GatedAutoEncoder": ("r_mag", "mag_bias"),
    "JumpReluAutoEncoder": ("threshold",),
}
"""Tensors of each class beside those of `_NAMES`."""
_BY_BATCH = ("BatchTopKSAE", "MatryoshkaBatchTopKSAE")
_NO_SUBTRACTION = ("JumpReluAutoEncoder", "AutoEncoderNew")
_FOLDERS = {"resid_pre": "pre_attn", "resid_post": "post_mlp", "attn_out": "attn_out", "mlp_out": "mlp_out"}


def claims(path: Path) -> bool:
    """Whether a folder is of this format."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a folder.

    Raises:
        FeatureFileError: If it is damaged, or its dictionary of a class that is not supported.
    """
    config_path = path / CONFIG
    trainer = one_of(read_json(config_path), "trainer", config_path, dict)
    name = one_of(trainer, "dict_class", config_path, str)
    if name not in _NAMES:
        raise FeatureFileError(f"{config_path}: dict_class {name!r} is not supported; known: {', '.join(_NAMES)}")
    file = open_tensors(path / WEIGHTS)
    weights = read_weights(file, _NAMES[name])
    shape = (one_of(trainer, "dict_size", config_path, int), one_of(trainer, "activation_dim", config_path, int))
    weights["encoder"].expect(shape, "dict_size, activation_dim of config.json")
    kind = _kind(name)
    expect_only(file, (*_NAMES[name].tensors, *_BESIDE.get(name, ())), "dictionary_learning")
    return SourceCoder(
        format="dictionary_learning",
        paths=(config_path, path / WEIGHTS),
        kind=kind,
        **weights,
        threshold=_threshold(file, name, shape[0]),
        magnitude=(np.exp(file["r_mag"].read()), file["mag_bias"].read()) if kind is CoderKind.GATED else None,
        k=_k(file, trainer, config_path) if kind is CoderKind.TOPK else None,
        subtracts_bias=name not in _NO_SUBTRACTION,
        # As `AutoEncoder.from_pretrained` does; rows of the other classes have length 1, or are left alone.
        folds_decoder_norm=name == "AutoEncoder",
        scale=hints.scale or 1.0,
        read_site=hints.site or _site(path, trainer),
        model=trainer.get("lm_name") if isinstance(trainer.get("lm_name"), str) else None,
        declared={"l0": float(trainer["k"])} if isinstance(trainer.get("k"), int) else {},
    )


def _kind(name: str) -> CoderKind:
    if name == "AutoEncoderTopK":
        return CoderKind.TOPK
    if name == "GatedAutoEncoder":
        return CoderKind.GATED
    return CoderKind.JUMPRELU if name in (*_BY_BATCH, "JumpReluAutoEncoder") else CoderKind.RELU


def _threshold(file: TensorFile, name: str, num_features: int) -> Any:
    if name == "JumpReluAutoEncoder":
        return file["threshold"].read()
    if name not in (*_BY_BATCH, "AutoEncoderTopK") or ("threshold" not in file and name not in _BY_BATCH):
        return None
    value = file.number("threshold")
    if value >= 0:
        return np.full(num_features, value)
    if name in _BY_BATCH:
        raise FeatureFileError(
            f"{file.path}: its threshold is {value:g}, which stands for none: training ended before one was found, so "
            "activations of single rows are not defined; train it longer (threshold_start_step)"
        )
    return None


def _k(file: TensorFile, trainer: Mapping[str, Any], path: Path) -> int:
    k: int = one_of(trainer, "k", path, int)
    if "k" in file and file.number("k") != k:
        raise FeatureFileError(f"{path}: trainer.k is {k}, but the weights have k {file.number('k'):g}")
    return k


def _site(path: Path, trainer: Mapping[str, Any]) -> Site | None:
    layer = trainer.get("layer")
    if not isinstance(layer, int):
        return None
    names = [str(trainer.get("submodule_name") or ""), *reversed(path.resolve().parts)]
    for name in names:
        found = re.fullmatch(r"(resid_pre|resid_post|attn_out|mlp_out)_layer_(\d+)", name)
        if found and int(found[2]) == layer:
            return Site(layer, HOOK_NAMES[_FOLDERS[found[1]]])
    return None
