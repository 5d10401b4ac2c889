"""Steering vectors in every form a request may have, and the models they are for."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site, sort_sites
from headgate.steering.vectors.phase_vectors import Steerable

LAYERS, HIDDEN = 4, 6

ALL_SITES = sort_sites(
    [
        *(Site(layer, hook) for layer in range(LAYERS) for hook in HookPoint if hook is not HookPoint.FINAL_NORM),
        FINAL_NORM_SITE,
    ]
)
"""Every site of the small model."""

Rows = dict[Site, Any]
"""float32 ``[HIDDEN]`` by site."""


def model(dtype: str = "float32", sites: tuple[Site, ...] = ALL_SITES, max_vectors: int = 1000) -> Steerable:
    """A small model of which `sites` can be steered."""
    return Steerable(num_layers=LAYERS, hidden_size=HIDDEN, dtype=dtype, sites=sites, max_vectors=max_vectors)


def bits_of(rows: Any) -> Any:
    """The bfloat16 bits of values that bfloat16 holds exactly."""
    return (np.asarray(rows, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def nested(rows: Rows, form: Any) -> dict[str, Any]:
    """``{hook: {layer: form(row)}}``; the final norm's vector stands alone."""
    document: dict[str, Any] = {}
    for site, row in rows.items():
        if site == FINAL_NORM_SITE:
            document[site.hook.value] = form(row)
        else:
            document.setdefault(site.hook.value, {})[site.layer] = form(row)
    return document


def packed(rows: Rows, dtype: str, *, as_text: bool = False) -> dict[str, Any]:
    """The packed form in `dtype`, which must hold the values."""
    document = {}
    for hook in {site.hook for site in rows}:
        layers = [site.layer for site in rows if site.hook is hook]
        stacked = np.stack([rows[Site(layer, hook)] for layer in layers])
        data = (bits_of(stacked) if dtype == "bfloat16" else stacked.astype(dtype)).tobytes()
        document[hook.value] = {
            "dtype": dtype,
            "shape": list(stacked.shape),
            "layer_indices": layers,
            "data": b64encode(data).decode() if as_text else data,
        }
    return document


def forms(rows: Rows, dtype: str) -> dict[str, Mapping[str, Any]]:
    """The same vectors in every form, given that `dtype` holds their values exactly."""
    import torch

    found: dict[str, Mapping[str, Any]] = {
        "list": nested(rows, lambda row: row.astype(np.float64).tolist()),
        "scalars": nested(rows, list),
        "texts": {
            hook: given if hook == "final_norm" else {str(layer - LAYERS): row for layer, row in given.items()}
            for hook, given in nested(rows, lambda row: {"vector": row, "scale": 1}).items()
        },
        "float64": nested(rows, lambda row: row.astype(np.float64)),
        "big-endian": nested(rows, lambda row: row.astype(">f4")),
        "strided": nested(rows, lambda row: np.repeat(row, 2)[::2]),
        "tensor": nested(rows, lambda row: torch.tensor(row).to(getattr(torch, dtype))),
        "packed": packed(rows, dtype),
        "base64": packed(rows, dtype, as_text=True),
        "packed float64": packed(rows, "float64"),
    }
    if dtype == "float16":
        found["float16"] = nested(rows, lambda row: row.astype(np.float16))
    return found


@st.composite
def exact_rows(draw: st.DrawFn) -> tuple[Rows, str]:
    """Vectors at some sites, and a type that holds their values exactly; some values are zero."""
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    sites = draw(st.lists(st.sampled_from(ALL_SITES), min_size=1, max_size=6, unique=True))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = generator.standard_normal((len(sites), HIDDEN)) * 10.0 ** generator.integers(-3, 4, (len(sites), 1))
    values[generator.random(values.shape) < 0.2] = 0.0
    values[~values.any(axis=1), 0] = 1.0
    rows = values.astype(np.float32)
    if dtype == "bfloat16":
        rows = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif dtype == "float16":
        rows = rows.astype(np.float16).astype(np.float32)
    return dict(zip(sites, rows, strict=True)), dtype
