"""Controllers that do as tests tell them, and the entry points under which an engine in this process finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Event
from typing import Any, ClassVar, NamedTuple

from headgate.steering.controllers import Action, Controller, Probe, ReadRow, RequestView, SetSteering, StepReadings

Plan = Callable[[RequestView, ReadRow], Iterable[Action]]
"""What to do behind a row of a request."""


class Scripted(Controller):
    """Asks a plan behind each row, by the prompt's tokens.

    Attributes:
        probe: Read by all controllers of this module.
        plans: By prompt; requests without one are left alone.
        told: What it was told: ``("begins" or "ends", RequestView)`` and each row.
    """

    probe: ClassVar[Probe]
    plans: ClassVar[dict[tuple[int, ...], Plan]] = {}
    told: ClassVar[list[Any]] = []

    def __init__(self, **params: Any) -> None:
        self.params = params
        self.views: dict[str, RequestView] = {}

    def probes(self) -> Mapping[str, Probe]:
        return {"score": self.probe}

    def request_begins(self, request: RequestView) -> None:
        self.views[request.request] = request
        self.told.append(("begins", request))

    def request_ends(self, request: RequestView) -> None:
        del self.views[request.request]
        self.told.append(("ends", request))

    def step(self, readings: StepReadings) -> Iterator[Action]:
        for row in readings.rows():
            self.told.append(row)
            view = self.views[row.request]
            plan = self.plans.get(tuple(view.token_ids[: view.num_prompt_tokens]))
            if plan is not None:
                yield from plan(view, row)


class Raising(Scripted):
    """Raises at the first generated row."""

    def step(self, readings: StepReadings) -> Iterator[Action]:
        if not readings.is_prompt.all():
            raise ValueError("no more")
        yield from ()


class Exiting(Scripted):
    """Ends its thread."""

    def step(self, readings: StepReadings) -> Iterator[Action]:
        sys.exit(3)
        yield from ()


class Hanging(Scripted):
    """Hangs in its first step until `released`."""

    released: ClassVar[Event] = Event()

    def step(self, readings: StepReadings) -> Iterator[Action]:
        self.released.wait()
        yield from ()


class Flooding(Scripted):
    """Returns actions without an end."""

    def step(self, readings: StepReadings) -> Iterator[Action]:
        while True:
            yield SetSteering(readings.requests[-1], module="calm", scale=0.0)


class EntryPoint(NamedTuple):
    """An entry point of the group ``headgate.controllers``."""

    name: str
    found: type

    @property
    def value(self) -> str:
        return f"{self.found.__module__}:{self.found.__name__}"

    def load(self) -> type:
        return self.found


def entry_points(**_: str) -> list[EntryPoint]:
    """In place of `importlib.metadata.entry_points`."""
    classes = (Scripted, Raising, Exiting, Hanging, Flooding)
    return [EntryPoint(found.__name__.lower(), found) for found in classes]
