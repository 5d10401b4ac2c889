"""Gemma Scope 1 (``params.npz``) and 2 (``params.safetensors``): JumpReLU, no bias taken off the row.

The site is in the path, of a repository's folder as it was downloaded::

    gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71/params.npz
    gemma-scope-2-4b-pt/resid_post/layer_17_width_16k_l0_medium/params.safetensors
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import (
    BEFORE_GAIN,
    MATRICES,
    CoderKind,
    Hints,
    SourceCoder,
    Vector,
    expect_only,
    place_of_reads,
    read_json,
    read_weights,
)
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

FIRST, SECOND, CONFIG = "params.npz", "params.safetensors", "config.json"

_LAYER = re.compile(r"/layer_(\d+)")
_CROSS_LAYER = re.compile(r"params_layer_(\d+)\.safetensors")

_IN_FOLDER = {
    "resid_post": "model.layers.{}.output",
    "mlp_out": "model.layers.{}.post_feedforward_layernorm.output",
    "attn_out": "model.layers.{}.self_attn.o_proj.input",
    "transcoder": "model.layers.{}.pre_feedforward_layernorm.output",
}
_OUT = "model.layers.{}.post_feedforward_layernorm.output"


def claims(path: Path) -> bool:
    """Whether a folder or file is of this format."""
    return _file(path, None) is not None


def _file(path: Path, layer: int | None) -> Path | None:
    if path.name in (FIRST, SECOND) or _CROSS_LAYER.fullmatch(path.name):
        return path
    if layer is not None and (path / f"params_layer_{layer}.safetensors").is_file():
        return path / f"params_layer_{layer}.safetensors"
    if found := next((path / name for name in (FIRST, SECOND) if (path / name).is_file()), None):
        return found
    return next(path.glob("params_layer_*.safetensors"), None) if path.is_dir() and layer is None else None


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read one coder.

    Raises:
        FeatureFileError: If it is damaged, its site unknown, or of a kind that is not supported.
    """
    target = _file(path, hints.layer)
    if target is None:
        raise FeatureFileError(f"{path}: expected {FIRST}, {SECOND} or params_layer_{hints.layer}.safetensors")
    if target != path and hints.layer is None and _CROSS_LAYER.fullmatch(target.name):
        raise FeatureFileError(f"{path}: a cross-layer transcoder has a file for each layer; name one: --layer L")
    file = open_tensors(target)
    return _read_first(target, file, hints) if target.name == FIRST else _read_second(target, file, hints)


def _weights(file: TensorFile, layer: int | None = None) -> dict[str, Any]:
    """Return what both versions have; of a cross-layer transcoder of `layer` a decoder for it and each later layer."""
    there = {name.lower(): name for name in file.tensors}
    # The second version writes w_enc and w_dec in small letters.
    names = MATRICES._replace(encoder=there.get("w_enc", "W_enc"), decoder=there.get("w_dec", "W_dec"))
    threshold = file["threshold"].read()
    if layer is None:
        return {"kind": CoderKind.JUMPRELU, "threshold": threshold, **read_weights(file, names)}
    decoder, bias = file[names.decoder], file[names.bias].read()
    constant = file[names.decoder_bias].read()
    decoder.expect((len(bias), *decoder.shape[1:2], len(constant)), "features, layers of the model, width")
    num_later = decoder.shape[1] - layer
    if num_later < 1:
        raise FeatureFileError(f"{decoder.where}: writes {decoder.shape[1]} layers, but is of layer {layer}")
    return {
        "kind": CoderKind.JUMPRELU,
        "encoder": file[names.encoder].expect((len(constant), len(bias)), "width, features").transposed,
        "decoders": tuple(decoder[:, layer + index] for index in range(num_later)),
        "bias": bias,
        # A layer's bias is written once, not by the features of every earlier layer.
        "decoder_biases": (constant, *(np.zeros_like(constant) for _ in range(num_later - 1))),
        "threshold": threshold,
    }


def _read_first(path: Path, file: TensorFile, hints: Hints) -> SourceCoder:
    weights = _weights(file)
    expect_only(file, (*MATRICES.tensors, "threshold", "scaling_factor"), "the loader of Gemma Scope")
    folder = path.resolve().parent
    parts = "/".join(folder.parts)
    l0 = re.search(r"average_l0_(\d+)", parts)
    is_embedding = "embedding" in folder.parts
    factor = file.get("scaling_factor")
    if factor is not None and not np.allclose(factor.read(), 1):
        raise FeatureFileError(f"{factor.where}: an SAE that was fine-tuned with factors on features is not supported")
    found = re.search(r"gemma-scope-(\w+?)-(pt|it)-(res|mlp|att|transcoders)", parts)
    # Embeddings were divided by sqrt(width) for training; as in SAELens, the decoder's bias was not.
    scale = 1 / math.sqrt(weights["encoder"].shape[1]) if is_embedding else hints.scale or 1.0
    if is_embedding:
        weights["decoder_biases"] = tuple(bias * scale for bias in weights["decoder_biases"])
    read_site: Site | None
    gain: Vector | None = None
    write_sites: tuple[Site, ...] = ()
    if found and found[3] == "transcoders":
        layer = int(_LAYER.findall(parts)[-1])
        read_site, gain = place_of_reads(layer, BEFORE_GAIN, hints, str(path))
        write_sites = (Site(layer, HookPoint.MLP_OUT),)
    else:
        read_site = hints.site or _first_site(path, parts, found[3] if found else None, is_embedding)
    return SourceCoder(
        format="gemma_scope",
        paths=(path,),
        **weights,
        scale=scale,
        gain=gain,
        read_site=read_site,
        write_sites=write_sites,
        model=f"google/gemma-2-{found[1]}" + ("-it" if found[2] == "it" else "") if found else None,
        declared={"l0": float(l0[1])} if l0 else {},
    )


def _first_site(path: Path, parts: str, part: str | None, is_embedding: bool) -> Site | None:
    if is_embedding:
        return Site(0, HookPoint.PRE_ATTN)
    layers = _LAYER.findall(parts)
    if part is None or not layers:
        return None
    if part == "att":
        return site_of(f"blocks.{layers[-1]}.attn.hook_z", str(path))
    return Site(int(layers[-1]), HookPoint.POST_MLP if part == "res" else HookPoint.MLP_OUT)


def _read_second(path: Path, file: TensorFile, hints: Hints) -> SourceCoder:
    config = _second_config(path)
    if config.get("architecture", "jump_relu") != "jump_relu":
        raise FeatureFileError(f"{path}: architecture {config['architecture']!r} is not supported; known: jump_relu")
    skip = file.get("affine_skip_connection")
    if config.get("affine_connection") and skip is None:
        raise FeatureFileError(f"{path}: config.json says affine_connection, but there is no affine_skip_connection")
    hook, out = config.get("hf_hook_point_in"), config.get("hf_hook_point_out")
    is_transcoder = isinstance(out, str) and out != hook
    if skip is not None and not is_transcoder:
        raise FeatureFileError(
            f"{skip.where}: of a transcoder, but neither config.json nor the folders say where it writes"
        )
    crosses = _CROSS_LAYER.fullmatch(path.name)
    weights = _weights(file, int(crosses[1]) if crosses else None)
    first = site_of(str(out), str(path)) if is_transcoder else None
    given = None if is_transcoder else hints.site
    return SourceCoder(
        format="gemma_scope_2",
        paths=tuple(found for found in (path, path.with_name(CONFIG)) if found.is_file()),
        **weights,
        skip=None if skip is None else skip.transposed,  # stored as input, output
        read_site=given or (site_of(hook, str(path)) if hook else None),
        write_sites=()
        if first is None
        else tuple(Site(first.layer + i, first.hook) for i in range(len(weights["decoders"]))),
        scale=hints.scale or 1.0,
        model=config.get("model_name"),
        declared={"l0": float(config["l0"])} if isinstance(config.get("l0"), int | float) else {},
    )


def _second_config(path: Path) -> dict[str, Any]:
    """Return the configuration, or what the names of folders and file say where there is none."""
    crosses = _CROSS_LAYER.fullmatch(path.name)
    if path.with_name(CONFIG).is_file() and not crosses:
        return read_json(path.with_name(CONFIG))
    parts = path.resolve().parent.parts
    layer = crosses or re.match(r"layer_(\d+)", parts[-1])
    kind = next((name for name in _IN_FOLDER for part in parts[-3:] if part.startswith(name)), None)
    kind = "transcoder" if crosses else kind
    if layer is None or kind is None:
        return {}
    config: dict[str, Any] = {"hf_hook_point_in": _IN_FOLDER[kind].format(layer[1])}
    if kind == "transcoder":
        config["hf_hook_point_out"] = _OUT.format(layer[1])
        config["affine_connection"] = "affine" in parts[-1]
    return config
