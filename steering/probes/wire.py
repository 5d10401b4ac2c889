"""A probe as plain values, as it travels from a front end to the engine cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from headgate.capture.probe import Activation, HiddenLayer, Pooling, Probe, ProbeKind
from headgate.capture.schema.sites import Site


class HiddenWire(TypedDict):
    """A `HiddenLayer`; `weight` and `bias` are the raw bytes of float32 values."""

    weight: bytes
    bias: bytes
    activation: str


class ProbeWire(TypedDict):
    """A `Probe`; `weight` and `bias` are the raw bytes of float32 values."""

    site: str
    kind: str
    weight: bytes
    bias: bytes
    classes: list[str]
    threshold: float | None
    pooling: Pooling
    model: str | None
    metadata: dict[str, str]
    hidden: HiddenWire | None


def to_wire(probe: Probe) -> ProbeWire:
    """Return plain values that `from_wire` reads back."""
    hidden = probe.hidden
    return {
        "site": probe.site.name,
        "kind": probe.kind.value,
        "weight": probe.weight.tobytes(),
        "bias": probe.biases.tobytes(),
        "classes": list(probe.classes),
        "threshold": probe.threshold,
        "pooling": probe.pooling,
        "model": probe.model,
        "metadata": dict(probe.metadata),
        "hidden": None
        if hidden is None
        else {
            "weight": hidden.weight.tobytes(),
            "bias": hidden.bias.tobytes(),
            "activation": hidden.activation.value,
        },
    }


def from_wire(wire: Mapping[str, Any]) -> Probe:
    """Return the probe that `to_wire` wrote."""
    hidden = None
    if (layer := wire["hidden"]) is not None:
        bias = np.frombuffer(layer["bias"], np.float32)
        weight = np.frombuffer(layer["weight"], np.float32).reshape(len(bias), -1)
        hidden = HiddenLayer(weight=weight, bias=bias, activation=Activation(layer["activation"]))
    return Probe(
        site=Site.parse(wire["site"]),
        kind=ProbeKind(wire["kind"]),
        weight=np.frombuffer(wire["weight"], np.float32).reshape(len(wire["classes"]), -1),
        bias=np.frombuffer(wire["bias"], np.float32),
        classes=tuple(wire["classes"]),
        threshold=wire["threshold"],
        pooling=wire["pooling"],
        model=wire["model"],
        metadata=wire["metadata"],
        hidden=hidden,
    )
