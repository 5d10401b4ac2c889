"""Which failures a request may have: those that a fault explains, at the time of the fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.clients import Outcome
from tests.chaos.consumers import BROKEN, HANG_S, MAX_STALL_S
from tests.chaos.workload import MAKE_FILES

FULL = "No space left on device"
HUNG = ("hung", "longer than", "held up")
GRACE_S = 2.0
"""Work of a consumer that a fault has met may go on for so long after it."""


@dataclass
class Span:
    """A time on the monotonic clock."""

    began: float
    ended: float = math.inf

    def meets(self, outcome: Outcome) -> bool:
        """Whether the request ran at this time."""
        return outcome.began <= self.ended and outcome.ended >= self.began


@dataclass
class Faults:
    """What happened to one server.

    Attributes:
        killed: When one of its processes was, or it was told to end.
        full: When the disk was.
    """

    killed: float = math.inf
    full: list[Span] = field(default_factory=list)


def unexcused(outcomes: Sequence[Outcome], faults: Faults) -> list[tuple[str, Outcome]]:
    """Failures that nothing explains."""
    hangs, raises = _moods(outcomes, "hang"), _moods(outcomes, "raise")
    found = []
    for outcome in outcomes:
        text = _failed_request(outcome, faults)
        if text:
            found.append((text, outcome))
        if outcome.end != "answered" or outcome.status != 200 or outcome.error:
            continue
        for name, result in (outcome.results or {}).items():
            if result["status"] != "ok" and not _is_excused(outcome, name, result, faults, hangs, raises):
                found.append((f"{name}: {result['status']} for no reason", outcome))
            if result["status"] == "ok" and outcome.shot.moods.get(name) in ("raise", "hang"):
                found.append((f"{name}: ok, although it failed", outcome))
    return found


def _failed_request(outcome: Outcome, faults: Faults) -> str:
    if outcome.end == "late":
        return "no answer came"
    if outcome.ended < faults.killed:
        if outcome.end == "broken":
            return "the connection broke"
        if outcome.error or outcome.status != 200:
            return "it was refused"
    return ""


def _moods(outcomes: Iterable[Outcome], mood: str) -> dict[str, list[Span]]:
    """When each consumer was told to fail so."""
    found: dict[str, list[Span]] = {}
    for outcome in outcomes:
        for name, one in outcome.shot.moods.items():
            if one == mood:
                late = HANG_S + MAX_STALL_S if mood == "hang" else 0
                found.setdefault(name, []).append(Span(outcome.began, outcome.ended + GRACE_S + late))
    return found


def _is_excused(
    outcome: Outcome,
    name: str,
    result: Any,
    faults: Faults,
    hangs: dict[str, list[Span]],
    raises: dict[str, list[Span]],
) -> bool:
    text = str(result["error"])
    if result["status"] == "pending":
        return not outcome.shot.waits or outcome.ended >= faults.killed
    if outcome.ended >= faults.killed:
        return True
    if name in (*MAKE_FILES, "spilling") and any(span.meets(outcome) for span in faults.full):
        return FULL in text or name == "spilling"
    if name == "dropping" and result["dropped_rows"]:
        return True
    if BROKEN in text:
        mine = outcome.shot.moods.get(name) == "raise"
        return mine or (name == "trickle" and any(span.meets(outcome) for span in raises.get(name, ())))
    if any(word in text for word in HUNG):
        return any(span.meets(outcome) for span in hangs.get(name, ()))
    return False
