"""Coders that read the output of the MLP's norm before its gain: a value that the model never has by itself.

TransformerLens calls it ``ln2.hook_normalized``. The MLP's input is this value times the gain, so with the gain of the
model the coder reads the MLP's input instead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import Hints, Vector, one_of, read_json
from headgate.steering.features.tensors import FeatureFileError, open_tensors

BEFORE_GAIN = "ln2.hook_normalized"

_NAMES = ("pre_feedforward_layernorm", "post_attention_layernorm")
_FROM_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text")
_AS_IT_IS = ("llama", "mistral", "qwen2", "qwen3")
_LEAST_GAIN = 1e-6


def place_of_reads(layer: int, hook: str, hints: Hints, where: str) -> tuple[Site, Vector | None]:
    """Return the site of a hook of TransformerLens, and the gain that rows there are divided by.

    Raises:
        FeatureFileError: If there is no such site, or the gain is needed and not to be had.
    """
    if hook != BEFORE_GAIN or hints.model is None:
        return site_of(f"blocks.{layer}.{hook}", where), None
    return Site(layer, HookPoint.MLP_IN), _gain(hints.model, layer)


def _gain(folder: Path, layer: int) -> Vector:
    config_path = folder / "config.json"
    kind = one_of(read_json(config_path), "model_type", config_path, str)
    if kind not in (*_FROM_ONE, *_AS_IT_IS):
        known = ", ".join((*_FROM_ONE, *_AS_IT_IS))
        raise FeatureFileError(f"{config_path}: the gain of norms is not known of {kind!r}; known: {known}")
    files = [open_tensors(path) for path in sorted(folder.glob("*.safetensors"))]
    for name in _NAMES:  # Gemma 2 and 3 have both, and the first is the MLP's
        ending = f"layers.{layer}.{name}.weight"
        found = next((tensor for file in files for key, tensor in file.tensors.items() if key.endswith(ending)), None)
        if found is not None:
            gain: Vector = found.read() + (kind in _FROM_ONE)
            if not (np.isfinite(gain) & (np.abs(gain) > _LEAST_GAIN)).all():
                raise FeatureFileError(f"{found.where}: a gain of 0 or NaN, by which rows cannot be divided")
            return gain
    raise FeatureFileError(f"{folder}: no safetensors file has the norm of layer {layer}'s MLP ({', '.join(_NAMES)})")
