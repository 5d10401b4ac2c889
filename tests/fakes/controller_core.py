"""The engine core's half of steering with a controller, without workers and without a scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from headgate.capture.engine.contracts.core_part import CoreFacts, RequestProgress
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import ModelInfo, Submitted
from headgate.capture.schema.sites import Site
from headgate.steering.config import SteeringConfig, parse_config
from headgate.steering.controllers import (
    Action,
    StepReadings,
)
from headgate.steering.core.controllers.controllers import open_controllers
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.gates.step_table import CoefficientChange
from headgate.steering.spec import SteeringSpec
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.controllers import Scripted

HIDDEN, PROMPT = 8, 4
MODEL = ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="float32", sites=())


class Listed(Scripted):
    """Returns the actions that a test puts there.

    Attributes:
        actions: Of the next step.
        needed: Modules.
    """

    actions: ClassVar[list[Action]] = []
    needed: ClassVar[tuple[str, ...]] = ()

    def modules(self) -> tuple[str, ...]:
        return self.needed

    def step(self, readings: StepReadings) -> Iterator[Action]:
        yield from self.actions


class Services:
    """An engine core's, with every request at one position.

    Attributes:
        rules: As workers were told last.
        rekeyed: Requests whose block keys were asked for anew, with the positions.
        position: Of all requests.
        submitted: Actions of capture consumers.
    """

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.rekeyed: list[tuple[str, int]] = []
        self.position = PROMPT
        self.submitted: list[Submitted] = []

    @property
    def actions(self) -> Services:
        return self

    @property
    def num_waiting(self) -> int:
        return len(self.submitted)

    def take(self) -> list[Submitted]:
        found, self.submitted = self.submitted, []
        return found

    def progress(self, req_id: str) -> RequestProgress | None:
        return None if req_id == "gone" else RequestProgress(self.position, range(1000))

    def positions(self, req_ids: Sequence[str]) -> Int64Array:
        found = map(self.progress, req_ids)
        return np.array([-1 if progress is None else progress.position for progress in found], np.int64)

    def rekey(self, req_id: str, first: int) -> None:
        self.rekeyed.append((req_id, first))

    def call_workers(self, method: str, args: Any) -> list[object]:
        if method == "set_rules":
            self.rules = args["rules"]
        return []

    def restart_running(self) -> None:
        pass

    def rekey_running(self) -> dict[str, int]:
        return {}

    def prepare_change(self, field: str) -> None:
        pass


class Core:
    """A core with the controller `Listed`."""

    def __init__(self, **settings: Any) -> None:
        usual = {"op_sites": {"post_mlp": "all"}, "controllers": [{"name": "listed", "budget_ms": 1000}]}
        config: SteeringConfig = parse_config({"max_steering_slots": 257, **usual, **settings})
        steerable = config.steerable(num_layers=2, hidden_size=HIDDEN, dtype="float32")
        self.config, self.services = config, Services()
        services: Any = self.services
        self.core = SteeringCore("float32", config.num_slots(2) - 1, services, config, steerable=steerable)
        self.core.operator.register("m", SteeringSpec(decode=vectors(1.0)))

    def start(self) -> None:
        core, facts, services = self.core, CoreFacts(model=MODEL), self.services
        made: Any = services
        core.start(open_controllers(self.config, facts, core.state, core.reservations, core.operator.set_beside, made))

    def add(self, *names: str) -> None:
        for name in names:
            self.core.accept(name, None, PROMPT)
            self.core.offer(name, priority=0, is_session=False, is_offline=False)

    def step(self, names: list[str], *actions: Action, discarded: Collection[str] = ()) -> list[CoefficientChange]:
        """Read a row of each request, and return what the workers are to be told; the position moves on."""
        Listed.actions = list(actions)
        self.services.position += 1
        count, columns = len(names), self.config.num_columns
        self.core.take_readings(
            {
                "ids": tuple(names),
                "firsts": np.full(count, self.services.position - 1, np.int64),
                "counts": np.ones(count, np.int64),
                "has_one_each": True,
                "columns": columns,
                "reported": None,
                "values": np.zeros((count, columns), np.float32),
            },
            discarded,
        )
        self.core.decide()
        orders = self.core.orders(names)
        return [] if orders is None else [change for piece in orders["drives"] for change in piece.each()]

    @property
    def figures(self) -> dict[str, int]:
        return dict(self.core.call("counts", {})["controllers"]["listed"]["actions"])


def vectors(value: float) -> PhaseVectors:
    found = PhaseVectors.from_rows({Site.parse("1.post_mlp"): np.full(HIDDEN, value, np.float32)})
    assert found is not None
    return found
