"""A probe as plain values, as it travels from a front end to the engine cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from headgate.capture.probes.probe import Pooling, Probe, ProbeError, ProbeKind
from headgate.capture.schema.sites import Site


class ProbeWire(TypedDict):
    """A `Probe` that is no MLP; `weight` and `bias` are the raw bytes of float32 values."""

    site: str
    kind: str
    weight: bytes
    bias: bytes
    classes: list[str]
    threshold: float | None
    pooling: Pooling
    model: str | None
    metadata: dict[str, str]


def to_wire(probe: Probe) -> ProbeWire:
    """Return plain values that `from_wire` reads back.

    Raises:
        ProbeError: If it is an MLP, which engines do not evaluate.
    """
    check_kind(probe.kind)
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
    }


def from_wire(wire: Mapping[str, Any]) -> Probe:
    """Return the probe that `to_wire` wrote."""
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
    )


def check_kind(kind: ProbeKind) -> None:
    """Refuse the kind of probe that engines do not evaluate.

    Raises:
        ProbeError: If `kind` is an MLP.
    """
    if kind is ProbeKind.MLP:
        raise ProbeError("mlp probes cannot be registered yet: use it offline, with Probe.scores", "kind")
