"""Steering fields for tests: good ones in every form, and bad ones with the field that the error names."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

HIDDEN, LAYERS = 576, 30
"""Of the model that the tests serve."""

ROW = (np.arange(HIDDEN, dtype=np.float32) - 100) / 64


def listed(values: Any) -> list[float]:
    return [float(value) for value in values]


def packed(layers: list[int], **changes: Any) -> dict[str, Any]:
    rows = np.stack([ROW] * len(layers))
    data = base64.b64encode(rows.tobytes()).decode()
    return {"dtype": "float32", "shape": list(rows.shape), "layer_indices": layers, "data": data, **changes}


GOOD: dict[str, dict[str, Any]] = {
    "a list": {"steering_vectors": {"post_mlp": {3: listed(ROW)}}},
    "a list under a text": {"steering_vectors": {"post_mlp": {"3": listed(ROW)}}},
    "with a scale": {"steering_vectors": {"resid_post": {3: {"vector": listed(ROW), "scale": 1.0}}}},
    "packed": {"steering_vectors": {"post_mlp": packed([3])}},
}
"""All the same vector, as JSON values."""

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong width": ({"steering_vectors": {"post_mlp": {3: [1.0] * 10}}}, "steering_vectors.post_mlp.3"),
    "an unknown hook": ({"steering_vectors": {"nowhere": {3: listed(ROW)}}}, "steering_vectors.nowhere"),
    "an unknown layer": ({"decode_steering_vectors": {"post_mlp": {"x": [1.0]}}}, "decode_steering_vectors.post_mlp"),
    "a layer too high": (
        {"prefill_steering_vectors": {"post_mlp": {LAYERS: listed(ROW)}}},
        "prefill_steering_vectors.post_mlp",
    ),
    "a site that is not configured": (
        {"steering_vectors": {"mlp_out": {3: listed(ROW)}}},
        "steering_vectors.mlp_out.3",
    ),
    "too large for the model": (
        {"steering_vectors": {"post_mlp": {3: [3.4e38] * HIDDEN}}},
        "steering_vectors",
    ),
    "a text among the numbers": (
        {"steering_vectors": {"post_mlp": {3: [*listed(ROW[1:]), "1"]}}},
        "steering_vectors.post_mlp.3",
    ),
    "an empty object": ({"steering_vectors": {}}, "steering_vectors"),
    "an empty hook": ({"steering_vectors": {"post_mlp": {}}}, "steering_vectors.post_mlp"),
    "not an object": ({"steering_vectors": [1.0]}, "steering_vectors"),
    "a giant payload": (
        {"steering_vectors": {"post_mlp": packed([3], data="A" * 8_000_000)}},
        "steering_vectors.post_mlp.data",
    ),
    "a mixed dtype": (
        {"steering_vectors": {"post_mlp": packed([3], dtype="float16")}},
        "steering_vectors.post_mlp.data",
    ),
    "one site twice": (
        {"steering_vectors": {"post_mlp": {3: listed(ROW)}, "resid_post": {3: listed(ROW)}}},
        "steering_vectors.resid_post.3",
    ),
    "an unknown name": ({"steering_name": "nobody"}, "steering_name"),
    "an unknown reference": ({"steering_module_ref": ["nobody", 2.0]}, "steering_module_ref"),
    "a wrong reference": ({"steering_module_ref": {"scale": 2.0}}, "steering_module_ref"),
    "a name that is a number": ({"steering_name": 7}, "steering_name"),
}
"""JSON values and the field that is to blame."""
