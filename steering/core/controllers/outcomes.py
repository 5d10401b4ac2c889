"""Outcomes of controllers' actions: counted, and noted for the traces of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.steering.controllers.actions import SetSteeringEach, SingleAction, told
from headgate.steering.gates.trace import Note

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
        done = told(action) if noted and action is not None else None
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
