"""OpenMOSS's Language-Model-SAEs: Llama Scope, its R1 distillation, and llamascopium.

Llama Scope is a folder of ``hyperparams.json`` and ``checkpoints/final.safetensors``; later releases are folders of
``config.json`` and ``sae_weights.safetensors``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import (
    LINEAR,
    CoderKind,
    Hints,
    Names,
    Norm,
    SourceCoder,
    one_of,
    read_json,
    read_weights,
)
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

FIRST, FIRST_WEIGHTS = "hyperparams.json", "checkpoints/final.safetensors"
LATER, LATER_WEIGHTS = "config.json", "sae_weights.safetensors"

_LLAMASCOPIUM = Names("W_E", "W_D", "b_E", "b_D", False, True)
_KINDS = {"relu": CoderKind.RELU, "jumprelu": CoderKind.JUMPRELU, "topk": CoderKind.TOPK}
_LOG_THRESHOLD = "log_jumprelu_threshold"


def claims(path: Path) -> bool:
    """Whether a folder is of this format."""
    return _files(path) is not None


def _files(path: Path) -> tuple[Path, Path] | None:
    pairs = [(path / FIRST, path / FIRST_WEIGHTS), (path / LATER, path / LATER_WEIGHTS)]
    return next((pair for pair in pairs if pair[0].is_file() and pair[1].is_file()), None)


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a folder.

    Raises:
        FeatureFileError: If it is damaged, or of a kind that is not supported.
    """
    files = _files(path)
    if files is None:
        raise FeatureFileError(f"{path}: expected {FIRST} and {FIRST_WEIGHTS}, or {LATER} and {LATER_WEIGHTS}")
    config_path, weights_path = files
    config, file = read_json(config_path), open_tensors(weights_path)
    kind = _kind(config, config_path)
    weights = read_weights(file, _LLAMASCOPIUM if "W_E" in file else LINEAR)
    width = one_of(config, "d_model", config_path, int)
    weights["encoder"].expect((len(weights["bias"]), width), "features, d_model")
    norm, scale = _norm(config, file, config_path, width, hints)
    threshold = _threshold(config, file, len(weights["bias"]), scale) if kind is CoderKind.JUMPRELU else None
    top_k = config.get("top_k")
    return SourceCoder(
        format="openmoss",
        paths=files,
        kind=kind,
        **weights,
        threshold=threshold,
        k=hints.k or top_k if kind is CoderKind.TOPK else None,
        norm=norm,
        subtracts_bias=bool(config.get("apply_decoder_bias_to_pre_encoder", False)),
        scale=scale,
        folds_decoder_norm=bool(config.get("sparsity_include_decoder_norm", False)),
        read_site=hints.site or site_of(one_of(config, "hook_point_in", config_path, str), str(config_path)),
        model=config.get("model_name") if isinstance(config.get("model_name"), str) else None,
        declared={"l0": float(top_k)} if isinstance(top_k, int | float) and top_k > 0 else {},
    )


def _kind(config: Mapping[str, Any], path: Path) -> CoderKind:
    name = config.get("act_fn", "jumprelu")
    if name not in _KINDS:
        raise FeatureFileError(f"{path}: act_fn {name!r} is not supported; known: {', '.join(_KINDS)}")
    if config.get("use_glu_encoder"):
        raise FeatureFileError(f"{path}: use_glu_encoder is not supported: its encoder has two matrices")
    if config.get("sae_type", "sae") != "sae" or config.get("hook_point_out") not in (
        None,
        config.get("hook_point_in"),
    ):
        raise FeatureFileError(
            f"{path}: reads {config.get('hook_point_in')!r} and writes {config.get('hook_point_out')!r}, type "
            f"{config.get('sae_type', 'sae')!r}: of OpenMOSS's coders SAEs alone are supported"
        )
    return _KINDS[name]


def _norm(config: Mapping[str, Any], file: TensorFile, path: Path, width: int, hints: Hints) -> tuple[Norm, float]:
    name = config.get("norm_activation", "dataset-wise")
    if name == "token-wise":
        return Norm.CONSTANT_NORM_RESCALE, 1.0
    if name == "inference":  # folded when it was saved
        return Norm.NONE, 1.0
    if name != "dataset-wise":
        raise FeatureFileError(f"{path}: norm_activation {name!r} is not supported: it depends on the other rows")
    if hints.scale is not None:
        return Norm.NONE, hints.scale
    declared = (config.get("dataset_average_activation_norm") or {}).get("in")
    if declared is None:
        stored = [key for key in file.tensors if key.startswith("dataset_average_activation_norm.")]
        declared = file.number(stored[0]) if len(stored) == 1 else None
    if not isinstance(declared, int | float) or declared <= 0:
        raise FeatureFileError(
            f"{path}: trained on rows of length sqrt({width}), but dataset_average_activation_norm.in is {declared!r}: "
            "give the factor on rows: --scale X (`norm_scaling_factor` in SAELens's pretrained_saes.yaml)"
        )
    return Norm.NONE, math.sqrt(width) / declared


def _threshold(config: Mapping[str, Any], file: TensorFile, num_features: int, scale: float) -> Any:
    stored = [name for name in file.tensors if name.rpartition(".")[2] == _LOG_THRESHOLD]
    if stored:
        found = np.exp(file[stored[0]].read()).reshape(-1)
        return np.full(num_features, found[0]) if found.size == 1 else found
    value = config.get("jump_relu_threshold")
    if not isinstance(value, int | float):
        raise FeatureFileError(
            f"{file.path}: no {_LOG_THRESHOLD}, and jump_relu_threshold is {value!r} in the configuration"
        )
    # In units of the rows as they are, as SAELens reads it: with it L0 is what the release declares.
    return np.full(num_features, value * scale)
