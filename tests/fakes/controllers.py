"""Controllers that do as tests tell them, and the entry points under which an engine in this process finds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from threading import Event
from typing import Any, ClassVar, NamedTuple

from headgate.capture.schema import registry
from headgate.capture.schema.consumer import (
    FinishedRequest,
    RequestInfo,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
)
from headgate.capture.schema.spec import CaptureSpec
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


class Submitting(StreamingConsumer):
    """Turns a module on for each request whose prompt is known here, when it hears of it.

    Attributes:
        submitted: By prompt, set when the action was taken.
        notes: By prompt, on the rows of the request that ended.
    """

    submitted: ClassVar[dict[tuple[int, ...], Event]] = {}
    notes: ClassVar[dict[tuple[int, ...], Mapping[str, Any]]] = {}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_client_spec(raw, context, options=())

    def begin(self, request: RequestInfo) -> None:
        event = self.submitted.get(tuple(request.prompt_token_ids.tolist()))
        if event is not None and self.context.steering.submit(SetSteering(request.request_id, module="calm")):
            event.set()

    def write(self, blocks: Sequence[RowBlock]) -> None:
        pass

    def finish(self, finished: FinishedRequest) -> None:
        self.notes[tuple(finished.request.prompt_token_ids.tolist())] = finished.final.notes

    def abandon(self, request: RequestInfo) -> None:
        pass


class SubmittingDriver(Submitting):
    """The same in the driver."""

    location = "driver"


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


def consumer_entry_points(**given: str) -> Any:
    """In place of `importlib.metadata.entry_points` for consumers: two more."""
    mine = {"here": Submitting, "there": SubmittingDriver}
    made = [metadata.EntryPoint(name, f"{__name__}:{kind.__name__}", registry.GROUP) for name, kind in mine.items()]
    return metadata.EntryPoints([*metadata.entry_points(**given), *made])
