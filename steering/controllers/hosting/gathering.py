"""Actions on one request each, put together: what a plain controller returns then travels as fast as any."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headgate.steering.controllers.actions import Action, SetSteering, SetSteeringEach

Named = tuple[str, Action]
"""An action with its controller's name."""


class Gathering:
    """Makes `SetSteeringEach` of actions `SetSteering` that stand one behind the other and differ in request and scale.

    It does the same, and is for the very tuple of requests of the one before it where these still run: so that only
    scales have to travel.
    """

    def __init__(self) -> None:
        self._running: tuple[str, ...] = ()
        self._requests: tuple[str, ...] = ()
        """Of the last one that was made."""
        self._places: dict[str, int] = {}
        """The place of each there."""

    def gather(self, actions: Sequence[Named], running: tuple[str, ...]) -> list[Named]:
        """Return actions that do the same, in the same order.

        Args:
            actions: That came of a step.
            running: The requests of the step.
        """
        made: list[Named] = []
        run: dict[str, float] = {}
        of: tuple[str, str] | None = None
        for name, action in actions:
            module = _module_of(action)
            known = None if module is None else (name, module)
            if of is not None and (known != of or (isinstance(action, SetSteering) and action.request in run)):
                made += self._joined(*of, run, running)
                run, of = {}, None
            if known is not None and isinstance(action, SetSteering):
                of = known
                run[action.request] = float(action.scale)
            else:
                made.append((name, action))
        return made if of is None else [*made, *self._joined(*of, run, running)]

    def _joined(self, name: str, module: str, run: dict[str, float], running: tuple[str, ...]) -> list[Named]:
        if running is not self._running or not run.keys() <= self._places.keys():
            wanted = run.keys() | self._places.keys()
            self._running, self._requests = running, tuple(req_id for req_id in running if req_id in wanted)
            self._places = {req_id: place for place, req_id in enumerate(self._requests)}
        if not run.keys() <= self._places.keys():
            return [(name, SetSteering(req_id, module=module, scale=scale)) for req_id, scale in run.items()]
        places = np.array([self._places[req_id] for req_id in run], np.int64)
        order = np.argsort(places)
        scales, at = np.array([*run.values()])[order], None if len(run) == len(self._requests) else places[order]
        return [(name, SetSteeringEach(self._requests, module, scales, at))]


def _module_of(action: Action) -> str | None:
    """Return the module that an action turns on, beside what its request has; None if it does something else."""
    if type(action) is not SetSteering or not action.compose or not isinstance(action.request, str):
        return None
    scale = action.scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        return None
    return action.module if isinstance(action.module, str) and len(action.given) == 1 else None
