"""circuit-tracer's transcoders: a folder of ``config.yaml`` and one file for each layer, or two of a cross-layer one.

* Per layer: ``layer_5.safetensors``; also with ``wandb-config.yaml``, as mwhanna's, which read and write the MLP.
* Cross-layer: ``W_enc_5.safetensors`` and ``W_dec_5.safetensors``, whose features write in layer 5 and all later ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]

from headgate.capture.files.reading import read_text, refusing
from headgate.capture.schema.errors import shown
from headgate.capture.schema.sites import Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import (
    MATRICES,
    CoderKind,
    Hints,
    Names,
    SourceCoder,
    expect_only,
    place_of_reads,
    read_weights,
)
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

CONFIG = "config.yaml"

_BY_ROWS = MATRICES._replace(encodes_by_rows=True)
_OF_WANDB = ("wandb-config.yaml", "wanb-config.yaml")
_MLP = {"model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
_FILE = re.compile(r"(?:layer|W_enc|W_dec)_(\d+)\.safetensors")
_THRESHOLD = "activation_function.threshold"


def claims(path: Path) -> bool:
    """Whether a folder, or a layer's file in one, is of this format."""
    folder = path.parent if _FILE.fullmatch(path.name) else path
    return any((folder / name).is_file() for name in (CONFIG, *_OF_WANDB))


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read one layer: that of the file, or of `hints`.

    Raises:
        FeatureFileError: If it is damaged, its layer unknown, or of a kind that is not supported.
    """
    named = _FILE.fullmatch(path.name)
    folder, layer = (path.parent, int(named[1])) if named else (path, hints.layer)
    config_path, config = _config(folder)
    if layer is None:
        raise FeatureFileError(f"{path}: has one transcoder for each layer; name one: --layer L, or its file")
    kind = config.get("model_kind")
    if kind == "transcoder_set":
        return _read_layer(folder, layer, config_path, config, hints)
    if kind == "cross_layer_transcoder":
        return _read_cross_layer(folder, layer, config_path, config)
    raise FeatureFileError(
        f"{config_path}: model_kind {shown(kind)} is not supported; known: transcoder_set, cross_layer_transcoder"
    )


def _config(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    for name in (CONFIG, *_OF_WANDB):
        path = folder / name
        if not path.is_file():
            continue
        with refusing(path, FeatureFileError, "expected an object of YAML"):
            found = yaml.safe_load(read_text(path, FeatureFileError))
        if not isinstance(found, dict):
            raise FeatureFileError(f"{path}: expected an object of YAML, got {type(found).__name__}")
        return path, found if name == CONFIG else _MLP
    raise FeatureFileError(f"{folder}: expected {CONFIG}")


def _file(folder: Path, name: str, config_path: Path, config: Mapping[str, Any]) -> TensorFile:
    if not (folder / name).is_file() and config.get("transcoders"):
        raise FeatureFileError(
            f"{config_path}: its transcoders are elsewhere ({config['transcoders'][0]!r}, ...); import those files"
        )
    return open_tensors(folder / name)


def _hook(config: Mapping[str, Any], key: str, path: Path) -> str:
    hook = config.get(key)
    if not isinstance(hook, str):
        raise FeatureFileError(f"{path}: {key}: expected a hook of TransformerLens, got {shown(hook)}")
    return hook


def _site(layer: int, config: Mapping[str, Any], key: str, path: Path) -> Site:
    return site_of(f"blocks.{layer}.{_hook(config, key, path)}", str(path))


def _threshold(file: TensorFile, name: str, num_features: int) -> Any:
    tensor = file.get(name)
    if tensor is None:
        return None
    found = tensor.read().reshape(-1)
    if (found < 0).any():
        raise FeatureFileError(f"{tensor.where}: a threshold below 0, with which activations could be below 0")
    return np.full(num_features, found[0]) if found.size == 1 else found


def _read_layer(folder: Path, layer: int, config_path: Path, config: Mapping[str, Any], hints: Hints) -> SourceCoder:
    file = _file(folder, f"layer_{layer}.safetensors", config_path, config)
    weights = read_weights(file, _BY_ROWS)
    expect_only(file, (*_BY_ROWS.tensors, "W_skip", _THRESHOLD), "circuit-tracer")
    threshold = _threshold(file, _THRESHOLD, len(weights["bias"]))
    hook = _hook(config, "feature_input_hook", config_path)
    read_site, gain = place_of_reads(layer, hook, hints, str(config_path))
    return SourceCoder(
        format="circuit_tracer",
        paths=(config_path, file.path),
        kind=CoderKind.RELU if threshold is None else CoderKind.JUMPRELU,
        **weights,
        threshold=threshold,
        skip=file.get("W_skip"),
        gain=gain,
        read_site=read_site,
        write_sites=(_site(layer, config, "feature_output_hook", config_path),),
        model=config.get("model_name"),
    )


def _read_cross_layer(folder: Path, layer: int, config_path: Path, config: Mapping[str, Any]) -> SourceCoder:
    reads = _file(folder, f"W_enc_{layer}.safetensors", config_path, config)
    writes = _file(folder, f"W_dec_{layer}.safetensors", config_path, config)
    names = Names(f"W_enc_{layer}", f"W_dec_{layer}", f"b_enc_{layer}", f"b_dec_{layer}", True, True)
    decoder, bias = writes[names.decoder], reads[names.bias].read()
    constant = reads[names.decoder_bias].read()
    if len(decoder.shape) != 3:
        raise FeatureFileError(f"{decoder.where}: expected features, layers, width; got {list(decoder.shape)}")
    num_layers = decoder.shape[1]
    decoder.expect((len(bias), num_layers, len(constant)), "features, layers, width")
    threshold = _threshold(reads, f"threshold_{layer}", len(bias))
    skip = reads.get(f"W_skip_{layer}")
    return SourceCoder(
        format="circuit_tracer",
        paths=(config_path, reads.path, writes.path),
        kind=CoderKind.RELU if threshold is None else CoderKind.JUMPRELU,
        encoder=reads[names.encoder],
        decoders=tuple(decoder[:, index] for index in range(num_layers)),
        bias=bias,
        # A layer's bias is written once, not by the features of every earlier layer.
        decoder_biases=(constant, *(np.zeros_like(constant) for _ in range(num_layers - 1))),
        threshold=threshold,
        skip=None if skip is None else skip.transposed,  # the row is multiplied from the right, unlike per layer
        read_site=_site(layer, config, "feature_input_hook", config_path),
        write_sites=tuple(
            _site(layer + index, config, "feature_output_hook", config_path) for index in range(num_layers)
        ),
        model=config.get("model_name"),
    )
