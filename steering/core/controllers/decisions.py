"""Applies the actions of controllers, each by itself: one that cannot be applied changes nothing else."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

import numpy as np

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.capture.schema.errors import RequestError
from headgate.steering.controllers.actions import (
    SetGlobal,
    SetScale,
    SetSteering,
    SetSteeringEach,
    SingleAction,
    Stop,
)
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.contents import FIELD
from headgate.steering.core.controllers.outcomes import APPLIED, DROPPED, REJECTED, Outcomes

logger = logging.getLogger("headgate")

MAX_REASON = 256
"""Characters of the reason of `Stop`; a longer one is cut."""


class Decisions:
    """Applies actions.

    Args:
        actuation: Of those that steer.
        outcomes: Told what came of each.
        services: Of the engine core.

    Attributes:
        endings: Requests that are to end, with the reasons, until somebody takes them.
    """

    def __init__(self, actuation: Actuation, outcomes: Outcomes, services: CoreServices) -> None:
        self.endings: dict[str, str] = {}
        self._actuation = actuation
        self._outcomes = outcomes
        self._services = services

    def apply(self, controller: str, action: SingleAction, known: Container[str]) -> None:
        """Apply an action of a controller.

        Args:
            controller: Its name.
            action: To apply.
            known: The requests that have not ended.
        """
        try:
            firsts = self._act(controller, action)
        except RequestError as error:
            self._refuse(controller, action, known, str(error).removeprefix(f"{FIELD}: "))
        except Exception as error:
            # A worker could not take the content over, and nothing has changed: everybody else goes on.
            logger.exception("headgate: controller %s: an action failed", controller)
            self._refuse(controller, action, known, f"{type(error).__name__}: {error}")
        else:
            self._outcomes.count(controller, APPLIED)
            if self._outcomes.traced:
                self._outcomes.note(firsts, controller, action, APPLIED)

    def apply_each(self, controller: str, action: SetSteeringEach, known: Container[str]) -> None:
        """Apply an action for several requests, as `apply` does what it stands for.

        Args:
            controller: Its name.
            action: To apply; a malformed one is refused as a whole.
            known: The requests that have not ended.
        """
        if np.shape(action.scales) != (len(action.requests),):
            reason = f"scales: expected {len(action.requests)} numbers, got the shape {np.shape(action.scales)}"
            self._outcomes.count(controller, REJECTED, len(action.requests))
            logger.warning("headgate: controller %s: rejected: %s", controller, reason)
            return
        done, firsts = self._actuation.steer_each(controller, action)
        num_done = int(np.count_nonzero(done))
        self._outcomes.count(controller, APPLIED, num_done)
        if num_done == len(done) and not self._outcomes.traced:
            return
        for one, is_done, first in zip(action.each(), done.tolist(), firsts.tolist(), strict=True):
            if not is_done:
                self.apply(controller, one, known)
            elif one.request in self._outcomes.traced:
                self._outcomes.note({one.request: first}, controller, one, APPLIED)

    def _refuse(self, controller: str, action: SingleAction, known: Container[str], reason: str) -> None:
        target = action.request if isinstance(action, SetSteering | Stop) else None
        if target is not None and target not in known:
            self._outcomes.count(controller, DROPPED)
            return
        self._outcomes.count(controller, REJECTED)
        if target is not None:
            self._outcomes.note({target: None}, controller, action, REJECTED, reason)
        else:
            logger.warning("headgate: controller %s: rejected: %s", controller, reason)

    def _act(self, controller: str, action: SingleAction) -> Mapping[str, int]:
        if isinstance(action, SetSteering):
            return self._actuation.steer(controller, action)
        if isinstance(action, SetGlobal):
            return self._actuation.steer_all(controller, action)
        if isinstance(action, SetScale):
            return self._actuation.scale(controller, action)
        progress = self._services.progress(action.request)
        if progress is None:
            raise RequestError(FIELD, f"request {action.request!r} has ended")
        self.endings.setdefault(action.request, str(action.reason)[:MAX_REASON])
        return {action.request: progress.position}
