"""Actions of controllers become contributions to the coefficients of requests. Engine thread only.

Each action contributes to one request, or to all: a controller's `SetSteering`, its `SetGlobal`, and one `SetScale` for
each target. The coefficient of a content on a request is the sum of the contributions to it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError
from headgate.steering.controllers.actions import GLOBAL, SetGlobal, SetScale, SetSteering, SetSteeringEach
from headgate.steering.core.controllers.coefficients import Coefficients, Contribution, Source
from headgate.steering.core.controllers.contents import FIELD, Contents, Static
from headgate.steering.vectors.sums import MAX_STRENGTH


class Actuation:
    """Applies actions.

    Args:
        contents: Makes programs.
        coefficients: Coefficients of the requests.

    Attributes:
        coefficients: As given.
    """

    def __init__(self, contents: Contents, coefficients: Coefficients) -> None:
        self._contents = contents
        self.coefficients = coefficients
        self._for_all: dict[Source, SetGlobal | SetScale] = {}
        """Actions for all requests, later ones too."""
        self._again: dict[str, dict[str, tuple[str, int]]] = {}
        """By request and controller: the module that it turned on last, and the version of the names then."""
        self._log = SparseLog("steering")

    def begin(self, req_id: str, num_prompt: int, static: Static) -> list[tuple[str, SetGlobal | SetScale]]:
        """Follow a request; what was set for all acts on it, as far as it can.

        Returns:
            The actions that do, each with its controller.
        """
        self.coefficients.add(req_id, num_prompt, static)
        acting = []
        for source, action in self._for_all.items():
            try:
                if (added := self._for_request(action, static)) is not None:
                    self.coefficients.contribute(req_id, source, added, num_prompt)
                    acting.append((source[0], action))
            except RequestError as error:
                self._log.warning(f"controller {source[0]}: not on request {req_id}: {error}")
        return acting

    def steer(self, controller: str, action: SetSteering) -> dict[str, int]:
        """Apply an action to a request; returns the first position on which it acts there.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        request, first = self.coefficients.of(action.request), self._first(action.request)
        again, known = self._again.setdefault(action.request, {}), (action.module, self._contents.version)
        if action.module is not None and again.get(controller) == known and action.compose:
            _check_number(action.scale)
            self.coefficients.adjust(action.request, (controller,), float(action.scale), first)
            return {action.request: first}
        own = self._contribution(action)
        aside = None
        if not action.compose and not request.static.is_empty:
            aside = Contribution(self._contents.of_static(request.static), -1.0)
        instead = (controller, "instead")
        if aside is not None:
            self.coefficients.check(action.request, [own, aside])
        self.coefficients.contribute(action.request, (controller,), own, first)
        if aside is not None or instead in request.contributions:
            self.coefficients.contribute(action.request, instead, aside, first)
        again.pop(controller, None)
        if action.module is not None and own is not None and action.compose:
            again[controller] = action.module, self._contents.version
        return {action.request: first}

    def take_back(self, controller: str, req_id: str) -> Iterator[tuple[SetSteering | SetScale, dict[str, int]]]:
        """Take back what a controller set on one request alone; yields the actions that do so, and where they act."""
        sources = self.coefficients.of(req_id).contributions
        if (controller,) in sources or (controller, "instead") in sources:
            action = SetSteering(req_id)
            yield action, self.steer(controller, action)
        if (controller, "scale") in sources:
            unscaled = SetScale(req_id, 1.0)
            yield unscaled, self.scale(controller, unscaled)

    def steer_each(self, controller: str, action: SetSteeringEach) -> tuple[BoolArray, Int64Array]:
        """Apply an action to those of its requests on which its controller has that module on alone: by arrays.

        Args:
            controller: Its name.
            action: With a tuple of requests, and a scale for each that it is for, float64 ``[n]``.

        Returns:
            To which of the requests it was applied, ``[n]``, and the first position of each of those, int64 ``[n]``.
            For the others nothing has changed; `steer` applies what `SetSteeringEach.each` yields for them.
        """
        if np.count_nonzero(np.abs(action.scales) <= MAX_STRENGTH) == len(action.scales):  # none is not a number
            try:
                content = self._contents.of_module(action.module)
                return self.coefficients.adjust_each(
                    tuple(action.requests), action.at, (controller,), content, action.scales
                )
            except RequestError:
                pass
        return np.zeros(len(action), np.bool_), np.zeros(len(action), np.int64)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known. Any thread."""
        self.coefficients.forget(req_id)
        self._again.pop(req_id, None)

    def steer_all(self, controller: str, action: SetGlobal) -> dict[str, int]:
        """Apply an action to all requests; returns the first position of each that it changes.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        if action.phase != "decode":
            raise RequestError(
                FIELD, f"phase: controllers act on generated positions: expected decode, got {action.phase!r}"
            )
        return self._apply_to_all((controller, GLOBAL), action)

    def scale(self, controller: str, action: SetScale) -> dict[str, int]:
        """Scale steering that is there without controllers; returns the first position of each request that changes.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        _check_number(action.scale)
        if action.target in self.coefficients.ids():
            request, first = self.coefficients.of(action.target), self._first(action.target)
            added = Contribution(self._contents.of_static(request.static), action.scale - 1.0)
            self.coefficients.contribute(action.target, (controller, "scale"), added, first)
            return {action.target: first}
        if action.target == GLOBAL:
            self._contents.of_global()
        else:
            self._contents.check_module(action.target)
        return self._apply_to_all((controller, "scale", action.target), action)

    def global_changed(self) -> None:
        """Follow a change of the global vectors, after which everything is computed anew: their scale is 1 again."""
        scaled = [
            source
            for source, action in self._for_all.items()
            if isinstance(action, SetScale) and action.target == GLOBAL
        ]
        for source in scaled:
            del self._for_all[source]
            for req_id in self.coefficients.ids():
                self.coefficients.contribute(req_id, source, None, self.coefficients.of(req_id).num_prompt)

    def _first(self, req_id: str) -> int:
        first = self.coefficients.next_position(req_id)
        if first is None:
            raise RequestError(FIELD, f"request {req_id!r} has ended")
        return first

    def _contribution(self, action: SetSteering | SetGlobal) -> Contribution | None:
        """Return what an action turns on; None for nothing."""
        given = action.given
        _check_number(action.scale)
        if len(given) > 1:
            raise RequestError(
                FIELD, f"expected at most one of module, vectors, ops and features, got {' and '.join(given)}"
            )
        if not given or action.scale == 0:
            return None
        if action.module is not None:
            return Contribution(self._contents.of_module(action.module), float(action.scale))
        return Contribution(self._contents.of_document(given), float(action.scale))

    def _for_request(self, action: SetGlobal | SetScale, static: Static) -> Contribution | None:
        """Return what an action for all turns on for a request."""
        if isinstance(action, SetGlobal):
            return self._contribution(action)
        if action.target == GLOBAL:
            return Contribution(self._contents.of_global(), action.scale - 1.0)
        named = [(module, scale) for module, scale in static.modules if module.name == action.target and scale]
        if not named:
            return None
        scale = math.fsum(scale for _, scale in named)
        return Contribution(self._contents.of_module_vectors(named[0][0]), scale * (action.scale - 1.0))

    def _apply_to_all(self, source: Source, action: SetGlobal | SetScale) -> dict[str, int]:
        wanted = {
            req_id: self._for_request(action, self.coefficients.of(req_id).static) for req_id in self.coefficients.ids()
        }
        firsts = {req_id: first for req_id in wanted if (first := self.coefficients.next_position(req_id)) is not None}
        for req_id in firsts:
            self.coefficients.check(req_id, [wanted[req_id]])
        self._for_all[source] = action
        changed = {}
        for req_id, first in firsts.items():
            if wanted[req_id] is not None or source in self.coefficients.of(req_id).contributions:
                self.coefficients.contribute(req_id, source, wanted[req_id], first)
                changed[req_id] = first
        return changed


def _check_number(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(FIELD, f"scale: expected a finite number, got {value!r}")
    if abs(value) > MAX_STRENGTH:
        raise RequestError(FIELD, f"scale: expected a number of at most {MAX_STRENGTH:g} in magnitude, got {value:g}")
