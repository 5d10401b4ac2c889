"""Small transcoders, per layer and cross-layer, told in float64 and saved in circuit-tracer's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headgate.capture.schema.sites import HookPoint, Site
from tests.fakes.saes import FEATURES, Array, target


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyTranscoder:
    """A transcoder of MLPs with random weights that float32 holds exactly, and a skip connection.

    Attributes:
        layer: Whose MLP's input it reads.
        num_layers: It writes the MLPs' outputs of so many layers, from `layer` on; several make it cross-layer.
        has_threshold: Whether it is jumprelu; else relu.
        width: Of rows.
        num_features: F.
        seed: Of the weights.
    """

    layer: int = 1
    num_layers: int = 1
    has_threshold: bool = False
    width: int = 32
    num_features: int = FEATURES
    seed: int = 0
    weights: Mapping[str, Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.seed, self.layer, self.num_layers, self.has_threshold])
        wide = (self.num_features, self.width)
        found = {
            "W_enc": random.standard_normal(wide) / np.sqrt(self.width),
            "W_dec": random.standard_normal((self.num_features, self.num_layers, self.width)) / np.sqrt(self.width),
            "b_enc": 0.3 * random.standard_normal(self.num_features),
            "b_dec": 0.1 * random.standard_normal(self.width),
            "W_skip": random.standard_normal((self.width, self.width)),
            "threshold": random.uniform(0, 0.5, self.num_features),
        }
        rounded = {name: value.astype(np.float32).astype(np.float64) for name, value in found.items()}
        object.__setattr__(self, "weights", rounded)

    @property
    def read_site(self) -> Site:
        """Where it reads."""
        return Site(self.layer, HookPoint.MLP_IN)

    @property
    def write_sites(self) -> tuple[Site, ...]:
        """Where it writes."""
        return tuple(Site(self.layer + index, HookPoint.MLP_OUT) for index in range(self.num_layers))

    def encode(self, rows: Array) -> Array:
        """Activations ``[n, F]`` of rows ``[n, width]`` at the read site."""
        before = rows @ self.weights["W_enc"].T + self.weights["b_enc"]
        return np.where(before > (self.weights["threshold"] if self.has_threshold else 0), np.maximum(before, 0), 0)

    def written(self, rows: Array, edits: Sequence[Mapping[str, Any]]) -> Mapping[Site, Array]:
        """By how much edits, as `steering_features` has them, move the row at each write site: ``[n, width]``."""
        activations = self.encode(np.asarray(rows, np.float64))
        changed = activations.copy()
        for edit in edits:
            changed[:, edit["feature"]] = target(edit, activations[:, edit["feature"]])
        moved = np.einsum("nf,fsd->snd", changed - activations, self.weights["W_dec"])
        return dict(zip(self.write_sites, moved, strict=True))

    def save(self, folder: Path) -> Path:
        """Write it; returns the path to open."""
        folder.mkdir(parents=True)
        kind = "transcoder_set" if self.num_layers == 1 else "cross_layer_transcoder"
        hooks = "feature_input_hook: mlp.hook_in\nfeature_output_hook: hook_mlp_out\n"
        (folder / "config.yaml").write_text(f"model_kind: {kind}\n{hooks}")
        tensors = {name: value.astype(np.float32) for name, value in self.weights.items()}
        threshold = tensors.pop("threshold")
        if self.num_layers == 1:
            tensors["W_dec"] = tensors["W_dec"][:, 0]
            tensors |= {"activation_function.threshold": threshold} if self.has_threshold else {}
            save_file(tensors, path := folder / f"layer_{self.layer}.safetensors")
            return path
        save_file({f"W_dec_{self.layer}": tensors.pop("W_dec")}, folder / f"W_dec_{self.layer}.safetensors")
        tensors |= {"threshold": threshold[None]} if self.has_threshold else {}
        save_file(
            {f"{name}_{self.layer}": np.ascontiguousarray(value) for name, value in tensors.items()},
            path := folder / f"W_enc_{self.layer}.safetensors",
        )
        return path
