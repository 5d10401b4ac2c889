"""Requests that controllers act on, contents that they turn on, and a load of random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.controllers import ReadRow, RequestView, SetGlobal, SetScale, SetSteering, Stop
from tests.engine.gate_making import GateCase
from tests.engine.gate_runs import params_of
from tests.engine.steering_cases import Case, Tiers, vectors
from tests.engine.tiny_models import HIDDEN, VOCABULARY

READ = Site(1, HookPoint.POST_ATTN)
RNG = np.random.default_rng(5)
WEIGHT = (RNG.standard_normal(HIDDEN) / HIDDEN**0.5).astype(np.float32)
VECTORS = {
    "post_mlp": {0: (0.4 * RNG.standard_normal(HIDDEN)).tolist(), 2: (0.4 * RNG.standard_normal(HIDDEN)).tolist()}
}
DIRECTION = RNG.standard_normal(HIDDEN).tolist()
CONTENTS = {
    "module": {"module": "calm"},
    "vectors": {"vectors": VECTORS},
    "ops": {
        "ops": [{"method": "ablate", "at": "1.post_mlp", "scale": 1.0, "vector": RNG.standard_normal(HIDDEN).tolist()}]
    },
    "features": {"features": [{"sae": "sae", "feature": 3, "add": 0.7}]},
}
"""What controllers turn on, one of each kind."""
GIVEN = {kind: next(iter(document.values())) for kind, document in CONTENTS.items()}
STATIC = Case("static", Tiers(decode=vectors([Site(0, HookPoint.POST_MLP), Site(2, HookPoint.PRE_ATTN)], 40, 0.4)))


@dataclass(frozen=True, kw_only=True)
class Driven(GateCase):
    """A request that controllers may act on.

    Attributes:
        selects: As ``steering_rules``.
    """

    selects: Sequence[str] | None = None

    def fields(self) -> dict[str, Any]:
        found = {**super().fields(), "return_steering_trace": True}
        return found if self.selects is None else {**found, "steering_rules": list(self.selects)}


def prompt_of(index: int, length: int = 12) -> list[int]:
    """Another prompt for each index."""
    return [1, *((13 * index + 7 * at) % (VOCABULARY - 5) + 5 for at in range(length - 1))]


def steering(row: ReadRow, kind: str, scale: float, **more: Any) -> SetSteering:
    return SetSteering(row.request, **{kind: GIVEN[kind]}, scale=scale, **more)


class RandomLoad:
    """Random requests with gates, static vectors and actions of controllers, some of them stopped or aborted.

    Args:
        seed: Of all.
        gated: Cases with gates.
        num_requests: How many.
    """

    def __init__(self, seed: int, gated: Sequence[GateCase], num_requests: int) -> None:
        self._random = random.Random(seed)
        self.cases, self.prompts, self.lengths = [], [], []
        for at in range(num_requests):
            case = self._random.choice(gated) if self._random.random() < 0.4 else Driven(name="no gates")
            static = STATIC if self._random.random() < 0.3 and not case.static.fields() else case.static
            selects = self._random.choice((None, None, ("other",), ("scripted",), ("scripted", "other")))
            self.cases.append(Driven(name=case.name, gates=case.gates, static=static, selects=selects))
            # Some begin alike, some are the same: blocks of others are found.
            shared = prompt_of(1000 + self._random.randrange(4), self._random.choice((4, 33, 40)))
            self.prompts.append([*shared, *(at % 97 + 5 for at in range(self._random.randrange(3)))])
            self.lengths.append(self._random.randrange(2, 24))
        self.aborted = {at: self._random.randrange(1, 40) for at in self._random.sample(range(num_requests), 5)}

    def plan(self, view: RequestView, row: ReadRow) -> Iterator[Any]:
        """Now and then one or two actions."""
        for _ in range(self._random.choice((0, 0, 0, 1, 1, 2))):
            draw, scale = self._random.random(), self._random.uniform(-1.5, 1.5)
            if draw < 0.5:
                kind = self._random.choice(("module", "vectors", "ops"))
                yield steering(row, kind, scale, compose=self._random.random() < 0.7)
            elif draw < 0.6:
                yield SetSteering(row.request)
            elif draw < 0.75:
                yield SetScale(row.request, scale)
            elif draw < 0.85:
                yield SetGlobal(module="calm", scale=0.3 * scale)
            elif draw < 0.93:
                yield SetGlobal()
            elif draw < 0.95:
                yield Stop(row.request, "by chance")

    def run(self, llm: Any) -> dict[int, Any]:
        """Answer all, several at once; returns the outputs of those that were not aborted."""
        engine, done, waiting, step = llm.llm_engine, {}, list(range(len(self.cases))), 0
        ids: dict[int, str] = {}
        while waiting or engine.has_unfinished_requests():
            while waiting and len(ids) - len(done) < 8 and self._random.random() < 0.5:
                at = waiting.pop(0)
                ids[at] = engine.add_request(
                    str(at), {"prompt_token_ids": self.prompts[at]}, params_of(self.cases[at], self.lengths[at])
                )
            for at, when in self.aborted.items():
                if at in ids and at not in done and step % 41 == when:
                    engine.abort_request([ids[at]], internal=True)
                    done[at] = None
            done.update({int(output.request_id): output for output in engine.step() if output.finished})
            step += 1
        return {at: output for at, output in done.items() if output is not None}
