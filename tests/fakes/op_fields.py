"""Fields of operations for the small model of `tests.fakes.vector_forms`, right ones and some with changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.steering.documents.operations import REQUEST_FIELDS, PhaseOps, read_ops
from headgate.steering.programs.program import Program
from tests.fakes.vector_forms import HIDDEN, model

SITES = (*(Site(layer, HookPoint.POST_MLP) for layer in range(3)), Site(2, HookPoint.PRE_ATTN), FINAL_NORM_SITE)
FIRST, SECOND = SITES[0], SITES[1]
V = [1.0, -2.0, 0.5, 0.0, 4.0, 1.5]
W = [0.0, 1.0, 3.0, -1.0, 0.5, 2.0]
ROW = np.array([0.3, -1.0, 2.0, 5.0, -0.25, 1.0])
OPS, PREFILL, DECODE = REQUEST_FIELDS.ops
CLAMPS = REQUEST_FIELDS.clamps[0]


def read(fields: dict[str, Any], max_per_site: int = 8, dtype: str = "float32") -> PhaseOps | None:
    return read_ops(fields, model(dtype), SITES, max_per_site)


def program(fields: dict[str, Any], dtype: str = "float32") -> Program:
    found = read(fields, dtype=dtype)
    assert found is not None
    assert isinstance(found.prefill, Program)
    return found.prefill


def op(**keys: Any) -> dict[str, Any]:
    """An ablation with `keys` changed; what is changed to None is left out."""
    document = {"at": "0.post_mlp", "method": "ablate", "vector": V, **keys}
    return {OPS: [{key: value for key, value in document.items() if value is not None}]}


def clamp(**keys: Any) -> dict[str, Any]:
    return op(**{"method": "clamp", "min": 1.0, **keys})


def clamps(entry: Any) -> dict[str, Any]:
    return {CLAMPS: {"post_mlp": {0: [entry]}}}


def packed_clamps(**changes: Any) -> dict[str, Any]:
    given = {
        "dtype": "float32",
        "shape": [2, HIDDEN],
        "layer_indices": [0, 0],
        "data": np.array([V, W], np.float32).tobytes(),
        "bounds": [[None, 1.0], [0.5, 2.0]],
        "strengths": [1.0, 0.5],
        **changes,
    }
    return {CLAMPS: {"post_mlp": {key: value for key, value in given.items() if value is not None}}}
