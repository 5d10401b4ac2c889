"""SAEs that are one file each, with little beside: Qwen-Scope, Goodfire, OpenAI, DeepSeek-R1, and two ``nn.Linear``.

The last may also be safetensors, and without ``decoder.bias``. Layer, width and k are in the names of file and
repository, so a file has to keep its place::

    SAE-Res-Qwen3-1.7B-Base-W32K-L0_50/layer7.sae.pt
    Llama-3.1-8B-Instruct-SAE-l19.pth
    v5_32k/autoencoders/resid_post_mlp/8.pt
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headgate.capture.files.tensors import SAFETENSORS
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.source_coder import (
    LINEAR,
    MATRICES,
    CoderKind,
    Hints,
    Names,
    Norm,
    SourceCoder,
    read_weights,
)
from headgate.steering.features.tensors import TORCH, FeatureFileError, TensorFile, open_tensors

_QWEN = MATRICES._replace(encodes_by_rows=True, decodes_by_rows=False)
_GOODFIRE = Names(
    "encoder_linear.weight", "decoder_linear.weight", "encoder_linear.bias", "decoder_linear.bias", True, False
)
_BARE = (LINEAR.encoder, LINEAR.decoder, LINEAR.bias)
_OPENAI = LINEAR._replace(bias="latent_bias", decoder_bias="pre_bias")
_OPENAI_PLACES = {
    "resid_post_mlp": HookPoint.POST_MLP,
    "resid_post_attn": HookPoint.POST_ATTN,
    "resid_delta_mlp": HookPoint.MLP_OUT,
    "resid_delta_attn": HookPoint.ATTN_OUT,
}


def claims(path: Path) -> bool:
    """Whether a file may be of one of these formats."""
    if not path.is_file():
        return False
    return path.suffix in TORCH or (path.suffix == SAFETENSORS and set(_BARE) <= set(open_tensors(path).tensors))


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a file.

    Raises:
        FeatureFileError: If it is damaged, or its tensors those of no known SAE.
    """
    file = open_tensors(path)
    fields: dict[str, Any]
    if "encoder_linear.weight" in file:
        fields = {
            "format": "goodfire",
            "kind": CoderKind.RELU,
            **read_weights(file, _GOODFIRE),
            "read_site": _layer_l(path),
        }
    elif "latent_bias" in file:
        fields = _openai(path, file)
    elif "W_enc" in file:
        fields = _qwen_scope(path, file, hints)
    elif set(_BARE) <= set(file.tensors) <= set(LINEAR.tensors):
        fields = _linear(path, file, hints)
    else:
        raise FeatureFileError(
            f"{path}: its tensors ({', '.join(list(file.tensors)[:8])}) are those of no known SAE: Goodfire, OpenAI, "
            "Qwen-Scope, two nn.Linear; of dictionary_learning give the folder, with its config.json"
        )
    fields["read_site"] = hints.site or fields["read_site"]
    return SourceCoder(paths=(path,), scale=hints.scale or 1.0, **fields)


def _linear(path: Path, file: TensorFile, hints: Hints) -> dict[str, Any]:
    """Return what two ``nn.Linear`` are: a relu SAE, unless ``--k`` says that it is top-k."""
    return {
        "format": "linear",
        "kind": CoderKind.RELU if hints.k is None else CoderKind.TOPK,
        **read_weights(file, LINEAR, has_decoder_bias=LINEAR.decoder_bias in file),
        "k": hints.k,
        "read_site": _layer_l(path),
    }


def _layer_l(path: Path) -> Site | None:
    """Return the site of a name that ends in ``-l19``."""
    found = re.search(r"-l(\d+)$", path.stem)
    return Site(int(found[1]), HookPoint.POST_MLP) if found else None


def _qwen_scope(path: Path, file: TensorFile, hints: Hints) -> dict[str, Any]:
    weights = read_weights(file, _QWEN)
    repository = re.search(r"SAE-Res-(.+?)-W(\d+)K-L0_(\d+)", str(path.resolve()))
    if repository and int(repository[2]) * 1024 != len(weights["bias"]):
        raise FeatureFileError(f"{path}: {len(weights['bias'])} features, but its folder is called {repository[0]}")
    k = hints.k or (int(repository[3]) if repository else None)
    if k is None:
        raise FeatureFileError(f"{path}: a top-k SAE whose k is in the name of its repository alone; give it: --k K")
    layer = re.fullmatch(r"layer(\d+)\.sae\.pt", path.name)
    return {
        "format": "qwen_scope",
        "kind": CoderKind.TOPK,
        **weights,
        "k": k,
        "read_site": Site(int(layer[1]), HookPoint.POST_MLP) if layer else None,
        "model": f"Qwen/{repository[1]}" if repository else None,
        "declared": {"l0": float(k)},
    }


def _openai(path: Path, file: TensorFile) -> dict[str, Any]:
    activation = file.texts.get("activation", "ReLU")
    after = file.texts.get("activation_state_dict.postact_fn", "ReLU")
    if activation not in ("ReLU", "TopK") or after != "ReLU":
        raise FeatureFileError(
            f"{path}: activation {activation!r} ({after}) is not supported; known: ReLU, TopK (ReLU)"
        )
    is_top_k = activation == "TopK"
    k = int(file.number("activation_state_dict.k")) if is_top_k else None
    site = _OPENAI_PLACES.get(path.resolve().parent.name)
    return {
        "format": "openai",
        "kind": CoderKind.TOPK if is_top_k else CoderKind.RELU,
        **read_weights(file, _OPENAI),
        "k": k,
        "norm": Norm.LAYER_NORM if is_top_k else Norm.NONE,
        "subtracts_bias": True,
        "read_site": Site(int(path.stem), site) if site and path.stem.isdecimal() else None,
        "declared": {} if k is None else {"l0": float(k)},
    }
