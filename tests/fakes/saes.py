"""Small SAEs of every kind and norm, told in float64 as their producers do, and saved in the format of SAELens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headgate.capture.schema.sites import Site

Array = Any
"""float64."""

KINDS = ("standard", "jumprelu", "gated", "topk")
NORMS = ("none", "layer_norm", "constant_norm_rescale")
FEATURES = 12
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class TinySae:
    """An SAE with random weights that float32 holds exactly; about half of its features are active on a random row.

    Attributes:
        architecture: SAELens's name of the kind.
        norm: Of rows.
        subtracts_bias: Whether the decoder's bias is taken off the row before it is encoded.
        width: Of rows.
        num_features: F.
        k: Of top-k.
        seed: Of the weights.
    """

    architecture: str = "standard"
    norm: str = "none"
    subtracts_bias: bool = True
    width: int = 32
    num_features: int = FEATURES
    k: int = 4
    seed: int = 0
    weights: Mapping[str, Array] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.seed, KINDS.index(self.architecture), NORMS.index(self.norm)])
        wide, narrow = (self.width, self.num_features), (self.num_features, self.width)
        found = {
            "W_enc": random.standard_normal(wide) / np.sqrt(self.width),
            "W_dec": random.standard_normal(narrow) / np.sqrt(self.width),
            "b_dec": 0.1 * random.standard_normal(self.width),
        }
        if self.architecture == "gated":
            found |= {name: 0.3 * random.standard_normal(self.num_features) for name in ("b_gate", "b_mag", "r_mag")}
        else:
            found["b_enc"] = 0.3 * random.standard_normal(self.num_features)
        if self.architecture == "jumprelu":
            found["threshold"] = random.uniform(0, 0.5, self.num_features)
        rounded = {name: value.astype(np.float32).astype(np.float64) for name, value in found.items()}
        object.__setattr__(self, "weights", rounded)

    def encode(self, rows: Array) -> Array:
        """Activations ``[n, F]`` of rows ``[n, width]``."""
        w = self.weights
        entered = self._normed(rows) - (w["b_dec"] if self.subtracts_bias else 0)
        if self.architecture == "gated":
            magnitude = np.maximum(entered @ (w["W_enc"] * np.exp(w["r_mag"])) + w["b_mag"], 0)
            return np.where(entered @ w["W_enc"] + w["b_gate"] > 0, magnitude, 0)
        before = entered @ w["W_enc"] + w["b_enc"]
        if self.architecture == "jumprelu":
            return np.where(before > w["threshold"], np.maximum(before, 0), 0)
        found = np.maximum(before, 0)
        if self.architecture == "topk":
            smallest = np.sort(found, axis=1)[:, -self.k, None]
            found = np.where(found >= smallest, found, 0)
        return found

    def decode(self, activations: Array, rows: Array) -> Array:
        """What activations write, for the rows that were encoded."""
        written = activations @ self.weights["W_dec"] + self.weights["b_dec"]
        if self.norm == "layer_norm":
            return written * rows.std(axis=1, ddof=1, keepdims=True) + rows.mean(axis=1, keepdims=True)
        if self.norm == "constant_norm_rescale":
            return written * np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(self.width)
        return written

    def edited(self, rows: Array, edits: Sequence[Mapping[str, Any]]) -> Array:
        """``decode(edited) + error`` of rows in float64; edits as `steering_features` has them."""
        wide = np.asarray(rows, np.float64)
        error = wide - self.reconstructed(wide)
        return self.reconstructed(wide, edits) + error

    def reconstructed(self, rows: Array, edits: Sequence[Mapping[str, Any]] = ()) -> Array:
        """``decode(edited encode(rows))`` in float64."""
        wide = np.asarray(rows, np.float64)
        activations = self.encode(wide)
        changed = activations.copy()
        for edit in edits:
            changed[:, edit["feature"]] = target(edit, activations[:, edit["feature"]])
        return self.decode(changed, wide)

    def save(self, folder: Path, site: Site | None = None) -> Path:
        """Write ``cfg.json`` and the weights, as SAELens 6 does; without a site, nobody knows where it acts."""
        folder.mkdir(parents=True)
        config: dict[str, Any] = {
            "architecture": self.architecture,
            "d_in": self.width,
            "d_sae": self.num_features,
            "dtype": "float32",
            "apply_b_dec_to_input": self.subtracts_bias,
            "normalize_activations": self.norm,
            "metadata": {} if site is None else {"hook_name": site.name},
        }
        if self.architecture == "topk":
            config["k"] = self.k
        (folder / "cfg.json").write_text(json.dumps(config))
        tensors = {name: value.astype(np.float32) for name, value in self.weights.items()}
        save_file(tensors, str(folder / "sae_weights.safetensors"))
        return folder

    def _normed(self, rows: Array) -> Array:
        if self.norm == "layer_norm":
            return (rows - rows.mean(axis=1, keepdims=True)) / (rows.std(axis=1, ddof=1, keepdims=True) + EPSILON)
        if self.norm == "constant_norm_rescale":
            return rows * np.sqrt(self.width) / np.linalg.norm(rows, axis=1, keepdims=True)
        return rows


def target(edit: Mapping[str, Any], activation: Array) -> Array:
    """What an edit makes of the activations of its feature."""
    if "set" in edit:
        wanted = np.full_like(activation, edit["set"])
    elif "add" in edit:
        wanted = activation + edit["add"]
    elif "scale" in edit:
        wanted = activation * edit["scale"]
    elif "min" in edit:
        wanted = np.maximum(activation, edit["min"])
    else:
        wanted = np.minimum(activation, edit["max"])
    return np.where(activation > 0, wanted, activation) if edit.get("only_if_active") else wanted
