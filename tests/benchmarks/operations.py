"""Operations that requests of the benchmarks bring, and the sites where servers let them act."""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.benchmarks.models import ModelSize

HOOK = "post_mlp"
NUM_SITES = 8
SPREAD = 0.02
"""Standard deviation of the elements of what gates add."""


def op_sites(size: ModelSize) -> dict[str, list[int]]:
    """Op sites of a server: `NUM_SITES` layers spread over the model, or all that it has."""
    count = min(NUM_SITES, size.num_layers)
    return {HOOK: [(2 * index + 1) * size.num_layers // (2 * count) for index in range(count)]}


def gathered_sites(size: ModelSize) -> dict[str, list[int]]:
    """Sites at the same layers whose rows tensor-parallel ranks share and gather."""
    return {"hook_z": op_sites(size)[HOOK]}


def operations(config: int, size: ModelSize, count: int, *, as_text: bool = False) -> list[dict[str, Any]]:
    """The operations of one configuration, at every op site: `count` methods in turns, each with vectors of its own."""
    rng, made = np.random.default_rng(config), []

    def vector() -> dict[str, Any]:
        row = rng.normal(0, 1, size.hidden).astype("<f4").view("<u4") >> 16  # bfloat16, towards zero
        data = row.astype("<u2").tobytes()
        about = {"dtype": "bfloat16", "shape": [size.hidden]}
        return {**about, "data": base64.b64encode(data).decode() if as_text else data}

    at = {"hook": HOOK, "layers": op_sites(size)[HOOK]}
    for index in range(count):
        method = ("ablate", "clamp", "rotate", "norm_scaled_add")[index % 4]
        keys: dict[str, Any] = {"plane": [vector(), vector()]} if method == "rotate" else {"vector": vector()}
        keys |= {"clamp": {"min": -1.0, "max": 1.0}, "rotate": {"degrees": 30}}.get(method, {})
        keys |= {"scale": 0.02} if method == "norm_scaled_add" else {}
        made.append({"at": at, "method": method, **keys})
    return made


@lru_cache(maxsize=300)
def encoded_vector(config: int, size: ModelSize) -> msgspec.Raw:
    """Vectors of one configuration at one op site, behind the middle, as a part of a body in JSON."""
    return msgspec.Raw(msgspec.json.encode(_vector_at(op_sites(size)[HOOK][-2], config, size)))


@lru_cache(maxsize=300)
def encoded_gate(config: int, size: ModelSize, *, is_loop: bool) -> msgspec.Raw:
    """A gate with a probe of its own, before the middle: on every row it turns on what `encoded_vector` gives.

    With `is_loop` a control loop sets how strongly.
    """
    layer = op_sites(size)[HOOK][1]
    weight = {"dtype": "bfloat16", "shape": [size.hidden], "data": _random_row(config + 1000, size)}
    probe = {"at": f"{layer}.{HOOK}", "weight": weight}
    gate: dict[str, object] = {
        "when": {"probe": probe} if is_loop else {"probe": probe, "above": -1e9},
        "then": {"vectors": _vector_at(op_sites(size)[HOOK][-2], config, size)},
    }
    if is_loop:
        gate["strength"] = {"pid": {"setpoint": 0.5, "kp": 0.5, "ki": 0.1, "kd": 0.1, "min": -1, "max": 1}}
    return msgspec.Raw(msgspec.json.encode([gate]))


WATCH, HOLD = "watch", "hold"
"""Controllers of the server ``controllers``: one that only reads, one that sets a scale behind each row."""


def controller_flags(folder: Path, size: ModelSize) -> list[str]:
    """Flags of a server with `WATCH` and `HOLD`, for requests that select them; their files are written to a folder."""
    from headgate.capture.schema.sites import HookPoint, Site
    from headgate.steering import PhaseVectors, probes, save

    layers = op_sites(size)[HOOK]
    rng, made = np.random.default_rng(3), folder / "controllers.cache"
    made.mkdir(exist_ok=True)
    weight = rng.normal(0, 1 / size.hidden**0.5, size.hidden).astype(np.float32)
    probes.save(made / "probe.safetensors", probes.Probe(site=Site(layers[1], HookPoint(HOOK)), weight=weight[None]))
    vector = rng.normal(0, SPREAD, size.hidden).astype(np.float32)
    found = PhaseVectors.from_rows({Site(layers[-2], HookPoint(HOOK)): vector})
    assert found is not None
    save(made / "module.safetensors", found)
    keys = f"applies_to=opt_in,probe={made / 'probe.safetensors'},module=calm"
    return [
        *("--steering-modules", f"calm={made / 'module.safetensors'}"),
        *("--steering-controllers", f"threshold:instance_name={WATCH},{keys},threshold=0,gain=0,prime=false"),
        *("--steering-controllers", f"pid:instance_name={HOLD},{keys},setpoint=0.5,max_scale=1,min_scale=-1"),
    ]


def _vector_at(layer: int, config: int, size: ModelSize) -> dict[str, Any]:
    about = {"dtype": "bfloat16", "shape": [1, size.hidden], "layer_indices": [layer]}
    return {HOOK: {**about, "data": _random_row(config, size)}}


def _random_row(config: int, size: ModelSize) -> str:
    row = np.random.default_rng(config).normal(0, SPREAD, size.hidden).astype("<f4").view("<u4") >> 16
    return base64.b64encode(row.astype("<u2").tobytes()).decode()  # bfloat16, towards zero


@lru_cache(maxsize=300)
def encoded_operations(config: int, size: ModelSize, count: int) -> msgspec.Raw:
    """The operations of `operations` as a part of a body in JSON."""
    return msgspec.Raw(msgspec.json.encode(operations(config, size, count, as_text=True)))
