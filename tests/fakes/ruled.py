"""Rules as an engine core tells them to its workers, for a small model whose op sites are all ``post_mlp``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.core.content import Limits
from headgate.steering.core.operator_calls import made_rule
from headgate.steering.core.rules.registry import KeptRule
from headgate.steering.core.state import SteeringState
from headgate.steering.documents.gates import read_rule
from headgate.steering.vectors.phase_vectors import Steerable

HIDDEN = 16


def steerable(*layers: Sequence[int]) -> Steerable:
    """A model with `layers` on each of its pipeline stages."""
    stages = {Site(layer, HookPoint.POST_MLP): stage for stage, own in enumerate(layers) for layer in own}
    sites = tuple(stages)
    return Steerable(
        num_layers=len(sites),
        hidden_size=HIDDEN,
        dtype="float32",
        sites=sites,
        max_vectors=2 * len(sites),
        op_sites=sites,
        max_ops_per_site=8,
        max_gates=2,
        max_rules=3,
        stages=stages if len(layers) > 1 else {},
    )


STEERABLE = steerable((0, 1))
SITES = STEERABLE.sites


def unit(index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    row = np.zeros(HIDDEN, np.float32)
    row[index] = 1.0
    return row


def document(**fields: Any) -> dict[str, Any]:
    """A rule that adds ``unit(1)`` at ``1.post_mlp`` to rows whose first value there is above 0."""
    return {
        "applies_to": "all",
        "when": {"probe": {"at": "1.post_mlp", "weight": unit(0)}, "above": 0.0},
        "then": {"vectors": {"post_mlp": {"1": unit(1)}}},
        **fields,
    }


class Rules:
    """The rules of an engine core without workers."""

    def __init__(self, model: Steerable = STEERABLE) -> None:
        self.model, self.state = model, SteeringState("float32", Limits(16, 0), model)

    def on(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Register a rule; returns all, as workers are told."""
        registry = self.state.rules
        made = made_rule(self.state, read_rule(name, document(**fields), self.model))
        return self.put(registry.with_rule(made))

    def off(self, name: str) -> list[dict[str, Any]]:
        return self.put(self.state.rules.without(name))

    def put(self, rules: dict[str, KeptRule]) -> list[dict[str, Any]]:
        self.state.rules.put(rules)
        return [rule.to_worker() for rule in self.state.rules.all()]
