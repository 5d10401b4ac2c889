"""SAELens, version 6 and before: a folder of ``cfg.json`` and ``sae_weights.safetensors``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.steering.features.hook_names import site_of
from headgate.steering.features.source_coder import CoderKind, Hints, Norm, SourceCoder, expect_only, one_of, read_json
from headgate.steering.features.tensors import FeatureFileError, TensorFile, open_tensors

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

_KINDS = {
    "standard": CoderKind.RELU,
    "relu": CoderKind.RELU,
    "jumprelu": CoderKind.JUMPRELU,
    "batchtopk": CoderKind.JUMPRELU,
    "matryoshka_batchtopk": CoderKind.JUMPRELU,
    "gated": CoderKind.GATED,
    "topk": CoderKind.TOPK,
    "transcoder": CoderKind.RELU,
    "skip_transcoder": CoderKind.RELU,
    "jumprelu_transcoder": CoderKind.JUMPRELU,
    "jumprelu_skip_transcoder": CoderKind.JUMPRELU,
}
_REFUSED = {
    "temporal": "its features depend on earlier tokens",
    "matching_pursuit": "its features are found one after the other",
}


def claims(path: Path) -> bool:
    """Whether a folder is of this format."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a folder.

    Raises:
        FeatureFileError: If it is damaged, or its SAE of a kind that is not supported.
    """
    file = open_tensors(path / WEIGHTS)
    config_path = path / CONFIG
    config = _renamed(read_json(config_path))
    metadata = {**config, **(config.get("metadata") or {})}
    kind = _kind(config, config_path)
    width, num_features = one_of(config, "d_in", config_path, int), one_of(config, "d_sae", config_path, int)
    is_transcoder = "transcoder" in config["architecture"]
    out = one_of(config, "d_out", config_path, int) if is_transcoder else width
    norm, scale = _norm(config, config_path, hints)
    _check_tensors(file, kind, config["architecture"])
    return SourceCoder(
        format="saelens",
        paths=(config_path, path / WEIGHTS),
        kind=kind,
        encoder=file["W_enc"].expect((width, num_features), "d_in, d_sae of cfg.json").transposed,
        decoders=(file["W_dec"].expect((num_features, out), "d_sae, width of cfg.json"),),
        bias=file["b_gate" if kind is CoderKind.GATED else "b_enc"].expect((num_features,), "d_sae").read(),
        decoder_biases=(file["b_dec"].expect((out,), "width of cfg.json").read(),),
        threshold=file["threshold"].expect((num_features,), "d_sae").read() if kind is CoderKind.JUMPRELU else None,
        magnitude=_magnitude(file, num_features) if kind is CoderKind.GATED else None,
        k=_k(config, config_path) if kind is CoderKind.TOPK else None,
        norm=norm,
        subtracts_bias=not is_transcoder and bool(config.get("apply_b_dec_to_input", True)),
        scale=scale,
        folds_decoder_norm=kind is CoderKind.TOPK and bool(config.get("rescale_acts_by_decoder_norm", False)),
        skip=file["W_skip"] if "skip" in config["architecture"] else None,
        read_site=hints.site or _site(metadata, "", config_path),
        write_sites=_write_sites(metadata, config_path) if is_transcoder else (),
        model=metadata.get("model_name"),
    )


def _check_tensors(file: TensorFile, kind: CoderKind, architecture: str) -> None:
    """Check that SAELens would load the weights: it takes no others, and no factors but 1 without their flag."""
    factors = file.get("scaling_factor")
    if factors is not None and not np.allclose(factors.read(), 1):
        raise FeatureFileError(
            f"{factors.where}: not all 1, but finetuning_scaling_factor is off, so SAELens refuses it; fold it into "
            "W_dec and save again"
        )
    names = ["W_enc", "W_dec", "b_dec", "scaling_factor"]
    names += ["b_gate", "r_mag", "b_mag"] if kind is CoderKind.GATED else ["b_enc"]
    names += ["threshold"] if kind is CoderKind.JUMPRELU else []
    names += ["W_skip"] if "skip" in architecture else []
    expect_only(file, names, "SAELens")


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the names and defaults of version 6; before, all of it was one flat object."""
    old = {"hook_point": "hook_name", "activation_fn_str": "activation_fn"}
    found = {old.get(key, key): value for key, value in config.items()}
    is_before_6 = "metadata" not in found
    if is_before_6 and found.get("activation_fn") == "topk":
        found["architecture"] = "topk"
        found.setdefault("k", (found.get("activation_fn_kwargs") or {}).get("k"))
    found.setdefault("architecture", "standard")
    return found


def _kind(config: Mapping[str, Any], path: Path) -> CoderKind:
    name = config["architecture"]
    if name not in _KINDS:
        why = _REFUSED.get(name, "it is not known here")
        raise FeatureFileError(f"{path}: architecture {name!r} cannot be used: {why}; can: {', '.join(_KINDS)}")
    if config.get("finetuning_scaling_factor"):
        raise FeatureFileError(f"{path}: finetuning_scaling_factor is not supported; fold it into W_dec and save again")
    if {**config, **(config.get("metadata") or {})}.get("hook_head_index") is not None:
        raise FeatureFileError(f"{path}: hook_head_index: an SAE of one attention head is not supported")
    activation = config.get("activation_fn", "relu")
    if activation not in ("relu", "topk") or (activation == "topk" and name != "topk"):
        raise FeatureFileError(f"{path}: activation_fn {activation!r} is not supported; known: relu, topk")
    return _KINDS[name]


def _norm(config: Mapping[str, Any], path: Path, hints: Hints) -> tuple[Norm, float]:
    given = config.get("normalize_activations")
    name = {None: "none", False: "none", True: "expected_average_only_in"}.get(given, given)
    if name == "expected_average_only_in":
        if hints.scale is None:
            raise FeatureFileError(
                f"{path}: normalize_activations is 'expected_average_only_in', whose factor the files do not have; "
                "give it: --scale X (`norm_scaling_factor` in SAELens's pretrained_saes.yaml; 1 if folded)"
            )
        return Norm.NONE, hints.scale
    if name not in {norm.value for norm in Norm}:
        raise FeatureFileError(f"{path}: normalize_activations {name!r} is not supported; fold it in and save again")
    return Norm(name), hints.scale or 1.0


def _magnitude(file: TensorFile, num_features: int) -> tuple[Any, Any]:
    scale, bias = (file[name].expect((num_features,), "d_sae").read() for name in ("r_mag", "b_mag"))
    return np.exp(scale), bias


def _k(config: Mapping[str, Any], path: Path) -> int:
    k = config.get("k")
    if not isinstance(k, int | float) or k != int(k):
        raise FeatureFileError(f"{path}: k: expected a whole number, got {k!r}")
    return int(k)


def _site(metadata: Mapping[str, Any], suffix: str, path: Path) -> Site | None:
    name = metadata.get(f"hf_hook_name{suffix}") or metadata.get(f"hook_name{suffix}")
    return site_of(name, str(path)) if isinstance(name, str) else None


def _write_sites(metadata: Mapping[str, Any], path: Path) -> tuple[Site, ...]:
    site = _site(metadata, "_out", path)
    if site is None:
        raise FeatureFileError(f"{path}: a transcoder without hook_name_out in its metadata: where does it write?")
    return (site,)
