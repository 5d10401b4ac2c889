"""SAEs of real sizes with random weights, and what requests of the benchmarks do with their features."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.benchmarks.models import ModelSize

SIZES = {"16k": 1 << 14, "65k": 1 << 16, "80k": 80 << 10}
"""Names of SAEs, and their features."""
TOP_K = {"80k": 100}
"""The k of those that are of the kind top-k; others are JumpReLU. This one has the sizes of Qwen-Scope's largest."""
FEATURES_OF = "16k"
"""The one whose features requests change."""


def write_sae(
    path: Path, features: int, size: ModelSize, *, layer: int, is_transcoder: bool = False, k: int = 0
) -> Path:
    """Write an SAE as SAELens saves one, and return its folder; a transcoder reads and writes around the layer's MLP.

    JumpReLU, or top-k if `k` is not 0; bfloat16, random; rows of a model with random weights activate few features of
    the first.
    """
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(features)
    spread = size.hidden**-0.5
    tensors = {
        "W_enc": torch.empty(size.hidden, features, dtype=torch.bfloat16).normal_(std=spread),
        "W_dec": torch.empty(features, size.hidden, dtype=torch.bfloat16).normal_(std=spread),
        "b_enc": torch.zeros(features),
        "b_dec": torch.zeros(size.hidden),
    }
    if not k:
        tensors["threshold"] = torch.full((features,), 3.0)
    hooks = {"hook_name": f"blocks.{layer}.hook_resid_post"}
    if is_transcoder:
        hooks = {"hook_name": f"blocks.{layer}.hook_mlp_in", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
    architecture = "topk" if k else "jumprelu_transcoder" if is_transcoder else "jumprelu"
    config = {
        "architecture": architecture,
        **({"k": k} if k else {}),
        "d_in": size.hidden,
        "d_out": size.hidden,
        "d_sae": features,
        "dtype": "bfloat16",
        "normalize_activations": "none",
        "apply_b_dec_to_input": False,
        "metadata": hooks,
    }
    save_file(tensors, str(path / "sae_weights.safetensors"))
    (path / "cfg.json").write_text(json.dumps(config))
    return path


def sae_flags(encoded: str, folder: Path, size: ModelSize) -> list[str]:
    """Flags of a server with an SAE of `SIZES` behind its middle layer, which is written if it is not there.

    Args:
        encoded: Name of the SAE, to encode it in full; empty for the features of `FEATURES_OF`.
        folder: Where SAEs are, one folder each.
        size: Of the model.
    """
    name = encoded or FEATURES_OF
    return ["--saes", f"{name}={written(name, folder, size)}", *(["--sae-encode", encoded] if encoded else [])]


def reading_consumer(name: str, folder: Path, size: ModelSize) -> str:
    """The consumer `features` of a server that reads an SAE of `SIZES`."""
    return f"features:saes={json.dumps({name: str(written(name, folder, size))})},top={READ_TOP}"


READ_TOP = 20


def written(name: str, folder: Path, size: ModelSize) -> Path:
    """The folder of an SAE of `SIZES` behind the middle layer, which is written if it is not there."""
    path = folder / f"sae-{name}.cache"  # nothing to bring home
    if not (path / "cfg.json").exists():
        write_sae(path, SIZES[name], size, layer=size.num_layers // 2, k=TOP_K.get(name, 0))
    return path


@lru_cache(maxsize=300)
def encoded_features(config: int, count: int, sae: str = FEATURES_OF) -> msgspec.Raw:
    """`count` distinct features of one configuration, changed in three ways in turns, as a part of a body in JSON."""
    chosen = np.random.default_rng(config).choice(SIZES[sae], count, replace=False).tolist()
    edits: list[dict[str, Any]] = [
        {"sae": sae, "feature": feature, **({"set": 2.0}, {"scale": 3.0}, {"add": 1.0})[index % 3]}
        for index, feature in enumerate(chosen)
    ]
    return msgspec.Raw(msgspec.json.encode(edits))
