"""Applies the actions of controllers, each by itself, and counts their outcomes. One that cannot be applied changes
nothing else. Outcomes are noted for the traces of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headgate.capture.monitoring.logs import ReasonLog, SparseLog
from headgate.capture.schema.action_sink import Submitted
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError
from headgate.steering.controllers.actions import (
    Action,
    SetGlobal,
    SetScale,
    SetSteering,
    SetSteeringEach,
    SingleAction,
    Stop,
    are_places,
    described,
    read_action,
)
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.contents import FIELD
from headgate.steering.gates.trace import Note

if TYPE_CHECKING:
    from headgate.capture.engine.core.part_services import CoreServices

SUBMITTED, APPLIED, REJECTED, DROPPED = "submitted", "applied", "rejected", "dropped"
SWITCHED_OFF = "switched off"
OUTCOMES = (SUBMITTED, APPLIED, REJECTED, DROPPED)
"""Each action is submitted, and then one of the other three. One that cannot be done is rejected; one for a request
that has ended is dropped, and so are too many."""


class Outcomes:
    """The outcomes of all actions. Engine thread, but for `forget`.

    Attributes:
        traced: Requests whose traces are wanted; nothing is noted for others. Any thread.
    """

    def __init__(self) -> None:
        self.traced: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._notes: dict[str, list[Mapping[str, Any]]] = {}
        """Outcomes by request that were not reported yet."""

    def counts(self, controller: str, num_flooded: int) -> dict[str, int]:
        """Return how many actions of a controller came to what; `num_flooded` of its steps returned too many."""
        found = {outcome: self._counts[controller, outcome] for outcome in OUTCOMES}
        return {**found, SUBMITTED: found[SUBMITTED] + num_flooded, DROPPED: found[DROPPED] + num_flooded}

    def count(self, controller: str, outcome: str, number: int = 1) -> None:
        """Count an action, or several."""
        self._counts[controller, outcome] += number

    def note(
        self,
        firsts: Mapping[str, int | None],
        controller: str,
        action: SingleAction | None,
        outcome: str,
        reason: str | None = None,
    ) -> None:
        """Note an action for the traces of requests.

        Args:
            firsts: The first position on which it acts, by request; None if it acts on none.
            controller: Whose it is.
            action: None if the note is about the controller.
            outcome: What came of it.
            reason: Why; None if it was applied.
        """
        noted = [(req_id, first) for req_id, first in firsts.items() if req_id in self.traced]
        done = described(action) if noted and action is not None else None
        for req_id, first in noted:
            note = {"position": first, "controller": controller, "action": done, "outcome": outcome}
            self._notes.setdefault(req_id, []).append(note if reason is None else {**note, "reason": reason})

    def note_each(self, controller: str, action: SetSteeringEach, done: BoolArray, firsts: Int64Array) -> None:
        """Note what an action was applied to, for the traces of those requests.

        Args:
            controller: Whose it is.
            action: With scales as an array.
            done: To which of its requests it was applied, ``[n]``.
            firsts: The first position on which it acts, of each of those, int64 ``[n]``.
        """
        rows = zip(action.named, action.scales.tolist(), done.tolist(), firsts.tolist(), strict=True)
        for req_id, scale, is_done, first in rows:
            if is_done and req_id in self.traced:
                set_each = {"set_steering": {"module": action.module, "scale": scale}, "compose": True}
                note = {"position": first, "controller": controller, "action": set_each, "outcome": APPLIED}
                self._notes.setdefault(req_id, []).append(note)

    def take_notes(self, present: Collection[str]) -> dict[str, Note]:
        """Return the notes of requests of a step, as pieces of their traces; they count as reported."""
        if not self._notes:
            return {}
        return {
            req_id: {"actions": self._notes.pop(req_id)}
            for req_id in [known for known in list(self._notes) if known in present]
        }

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known. Any thread."""
        self.traced.discard(req_id)
        self._notes.pop(req_id, None)


_rejected = ReasonLog("headgate: actions are rejected")
_failed = SparseLog("headgate")

MAX_REASON = 256
"""Characters of the reason of `Stop`; a longer one is cut."""


class ActionApplier:
    """Applies actions.

    Args:
        actuation: Applies the actions that steer.
        outcomes: Records the outcome of each action.
        services: The engine core's.

    Attributes:
        endings: Requests that are to end, with the reasons, until they are taken.
        consumers: Names of capture consumers that have submitted actions.
    """

    def __init__(self, actuation: Actuation, outcomes: Outcomes, services: CoreServices) -> None:
        self.endings: dict[str, str] = {}
        self.consumers: set[str] = set()
        self._actuation = actuation
        self._outcomes = outcomes
        self._services = services
        self._named: tuple[str, ...] = ()
        """The last requests that were found to be names."""

    def apply(self, controller: str, action: Action, known: Container[str], begun_after: Collection[str] = ()) -> None:
        """Apply an action of a controller.

        Args:
            controller: Its name.
            action: To apply.
            known: The requests that have not ended.
            begun_after: Requests that began, or began anew, after the rows by which it was decided, and `GLOBAL` if the
                global vectors have changed: it is dropped for them.
        """
        if isinstance(action, SetSteeringEach):
            self._outcomes.count(controller, SUBMITTED, len(action))
            self._apply_each(controller, action, known, begun_after)
            return
        self._outcomes.count(controller, SUBMITTED)
        if begun_after and _target(action) in begun_after:
            self._outcomes.count(controller, DROPPED)
        else:
            self._apply_one(controller, action, known)

    def apply_submitted(self, submitted: Submitted, known: Container[str]) -> None:
        """Apply an action that a capture consumer submitted, under the name ``consumer:INSTANCE``.

        Args:
            submitted: As it came.
            known: The requests that have not ended.
        """
        name = f"consumer:{submitted.consumer}"
        self.consumers.add(name)
        if submitted.num_dropped:
            self._outcomes.count(name, SUBMITTED, submitted.num_dropped)
            self._outcomes.count(name, DROPPED, submitted.num_dropped)
        try:
            action = read_action(submitted.action)
        except ValueError as error:
            self._outcomes.count(name, SUBMITTED)
            self._outcomes.count(name, REJECTED)
            _rejected.warning(name, f"{name}: {error}")
            return
        self.apply(name, action, known)

    def _apply_one(self, controller: str, action: SingleAction, known: Container[str]) -> None:
        try:
            firsts = self._act(controller, action)
        except RequestError as error:
            self._refuse(controller, action, known, str(error).removeprefix(f"{FIELD}: "))
        except Exception as error:  # noqa: BLE001  (a worker's, whatever it is)
            # A worker could not take the content over, and nothing has changed: everybody else goes on.
            _failed.error(f"controller {controller}: an action failed", cause=error)
            self._refuse(controller, action, known, f"{type(error).__name__}: {error}")
        else:
            self._outcomes.count(controller, APPLIED)
            if self._outcomes.traced:
                self._outcomes.note(firsts, controller, action, APPLIED)

    def _apply_each(
        self, controller: str, action: SetSteeringEach, known: Container[str], begun_after: Collection[str]
    ) -> None:
        """Apply an action for several requests, as `apply` does what it stands for; a malformed one is refused."""
        try:
            action = self._checked(action)
            if begun_after:
                num_given, action = len(action), _without(action, begun_after)
                self._outcomes.count(controller, DROPPED, num_given - len(action))
            done, firsts = self._actuation.steer_each(controller, action)
        except (TypeError, ValueError) as error:
            self._outcomes.count(controller, REJECTED, len(action))
            _rejected.warning(controller, f"controller {controller}: {error}")
            return
        num_done = int(np.count_nonzero(done))
        self._outcomes.count(controller, APPLIED, num_done)
        if self._outcomes.traced:
            self._outcomes.note_each(controller, action, done, firsts)
        if num_done < len(done):
            for one, is_done in zip(action.each(), done.tolist(), strict=True):
                if not is_done:
                    self._apply_one(controller, one, known)

    def _refuse(self, controller: str, action: SingleAction, known: Container[str], reason: str) -> None:
        target = action.request if isinstance(action, SetSteering | Stop) and isinstance(action.request, str) else None
        if target is not None and target not in known:
            self._outcomes.count(controller, DROPPED)
            return
        self._outcomes.count(controller, REJECTED)
        if target is not None:
            self._outcomes.note({target: None}, controller, action, REJECTED, reason)
        else:
            _rejected.warning(controller, f"controller {controller}: {reason}")

    def _act(self, controller: str, action: SingleAction) -> Mapping[str, int]:
        if isinstance(action, SetSteering | Stop) and not isinstance(action.request, str):
            raise RequestError(FIELD, f"request: expected the id of one, got {action.request!r}")
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

    def _checked(self, action: SetSteeringEach) -> SetSteeringEach:
        """Return an action with a tuple and arrays as they are expected.

        Raises:
            ValueError: If there is not a number for each request, or a place for each number.
            TypeError: If something in it is of another kind.
        """
        requests, at, scales = action.requests, action.at, np.asarray(action.scales, np.float64)
        if requests is not self._named:
            requests = tuple(requests)
            if not all(isinstance(each, str) for each in requests):
                raise TypeError(f"requests: expected names, got {requests[:3]!r}")
            self._named = requests = self._named if requests == self._named else requests
        if not isinstance(action.module, str):
            raise TypeError(f"module: expected a name, got {action.module!r}")
        if at is not None:
            at = _checked_places(np.asarray(at), len(requests))
        expected = len(requests) if at is None else len(at)
        if scales.shape != (expected,):
            raise ValueError(f"scales: expected {expected} numbers, got the shape {list(scales.shape)}")
        if requests is action.requests and at is action.at and scales is action.scales:
            return action
        return SetSteeringEach(requests, action.module, scales, at)


def _target(action: SingleAction) -> str | None:
    """Return the request, module or `GLOBAL` that an action names; None if it names none, or something odd."""
    if isinstance(action, SetGlobal):
        return None
    named = action.target if isinstance(action, SetScale) else action.request
    return named if isinstance(named, str) else None


def _without(action: SetSteeringEach, left_out: Collection[str]) -> SetSteeringEach:
    """Return a checked action for its other requests alone."""
    stays = np.array([request not in left_out for request in action.named], np.bool_)
    at = np.arange(len(action.requests)) if action.at is None else action.at
    return SetSteeringEach(action.requests, action.module, action.scales[stays], at[stays])


def _checked_places(at: np.ndarray[Any, Any], num_requests: int) -> Int64Array:
    if at.ndim != 1 or at.dtype.kind not in "iu":
        raise TypeError(f"at: expected a list of places among the requests, got {at.dtype} {list(at.shape)}")
    found: Int64Array = at.astype(np.int64, copy=False)
    if not are_places(found, num_requests):
        raise ValueError(f"at: expected ascending places below {num_requests}, got {found[:8].tolist()}")
    return found
