"""sparsify: a folder of ``cfg.json`` and ``sae.safetensors``, named after the module, such as ``layers.5.mlp``."""

from __future__ import annotations

import re
from pathlib import Path

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.hook_names import site_of
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
from headgate.steering.features.tensors import FeatureFileError, open_tensors

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"

_NAMES = LINEAR._replace(decoder="W_dec", decoder_bias="b_dec", decodes_by_rows=True)
_KINDS = {"topk": CoderKind.TOPK, "groupmax": CoderKind.GROUPMAX}


def claims(path: Path) -> bool:
    """Whether a folder is of this format."""
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


def read(path: Path, hints: Hints) -> SourceCoder:
    """Read a folder.

    Raises:
        FeatureFileError: If it is damaged, or of a kind that is not supported.
    """
    config_path = path / CONFIG
    config = read_json(config_path)
    activation = config.get("activation", "topk")
    if activation not in _KINDS or config.get("signed"):
        signed = ", signed" if config.get("signed") else ""
        raise FeatureFileError(
            f"{config_path}: activation {activation!r}{signed} is not supported; known: topk, groupmax"
        )
    file = open_tensors(path / WEIGHTS)
    weights = read_weights(file, _NAMES)
    width = one_of(config, "d_in", config_path, int)
    # num_latents is 0, or not there, where the factor counts.
    num_features = config.get("num_latents") or width * one_of(config, "expansion_factor", config_path, int)
    weights["encoder"].expect((num_features, width), "num_latents or expansion_factor, and d_in, of cfg.json")
    transcodes = bool(config.get("transcode", False))
    skips = bool(config.get("skip_connection"))
    if skips and "W_skip" not in file:
        raise FeatureFileError(f"{config_path}: skip_connection, but {file.path} has no W_skip")
    expect_only(file, (*_NAMES.tensors, *(["W_skip"] if skips else [])), "sparsify")
    read_site, write_sites = _sites(path, hints, transcodes=transcodes)
    k = one_of(config, "k", config_path, int)
    return SourceCoder(
        format="sparsify",
        paths=(config_path, path / WEIGHTS),
        kind=_KINDS[activation],
        **weights,
        k=k,
        subtracts_bias=not transcodes,
        skip=file.get("W_skip"),
        scale=hints.scale or 1.0,
        read_site=read_site,
        write_sites=write_sites,
        declared={"l0": float(k)},
    )


def _sites(path: Path, hints: Hints, *, transcodes: bool) -> tuple[Site | None, tuple[Site, ...]]:
    module = path.resolve().name
    found = re.fullmatch(r"(?:layers|h)\.(\d+)\.mlp", module)
    if transcodes:
        if not found:
            raise FeatureFileError(
                f"{path}: a transcoder of {module!r}; transcoders are read of MLPs alone: the folder's name has to be "
                "layers.L.mlp"
            )
        return Site(int(found[1]), HookPoint.MLP_IN), (Site(int(found[1]), HookPoint.MLP_OUT),)
    if hints.site is not None or not re.match(r"(layers|h)\.\d+|embed_tokens", module):
        return hints.site, ()
    return site_of(re.sub(r"^h\.", "layers.", module), str(path)), ()
