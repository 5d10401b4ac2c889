"""Which failures a request may have: those that a fault explains, at the time of the fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.chaos.clients import Outcome
from tests.chaos.consumers import BROKEN, MAX_STALL_S
from tests.chaos.notes import Call
from tests.chaos.workload import MAKE_FILES

FULL = "No space left on device"
HUNG = ("hung", "longer than", "held up")
WRITTEN_S = 5.0
"""What no client waits for may be on its way to the disk for so long after the answer."""
SLACK_S = 0.5
"""It takes up to so long between the time that headgate takes of a call and the one that the call notes."""


@dataclass
class Span:
    """A time on the monotonic clock."""

    began: float
    ended: float = math.inf

    def meets(self, outcome: Outcome, *, after_s: float = 0.0) -> bool:
        """Whether the request ran at this time, or had ended up to `after_s` seconds before."""
        return outcome.began <= self.ended and outcome.ended + after_s >= self.began


@dataclass
class Faults:
    """What happened to one server.

    Attributes:
        killed: When one of its processes was, or it was told to end.
        full: When the disk was.
    """

    killed: float = math.inf
    full: list[Span] = field(default_factory=list)


class Failure(NamedTuple):
    """Something that nothing explains.

    Attributes:
        text: What.
        outcome: Of whom.
        is_late: Something took too long, which a machine may be to blame for that is too slow.
    """

    text: str
    outcome: Outcome
    is_late: bool


Spans = defaultdict[str, list[Span]]
"""By consumer."""


def unexcused(outcomes: Sequence[Outcome], faults: Faults, calls: Sequence[Call]) -> list[Failure]:
    """Failures that nothing explains.

    Args:
        outcomes: What came of each request.
        faults: What happened to the server.
        calls: What its consumers did.
    """
    hangs, raises = _hangs(calls), _raises(calls)
    found = []
    for outcome in outcomes:
        text = _failed_request(outcome, faults)
        if text:
            found.append(Failure(text, outcome, outcome.end == "late"))
        if outcome.end != "answered" or outcome.status != 200 or outcome.error:
            continue
        for name, result in (outcome.results or {}).items():
            if result["status"] != "ok" and not _is_excused(outcome, name, result, faults, hangs, raises):
                found.append(Failure(f"{name}: {result['status']} for no reason", outcome, _is_late(result)))
            mood = outcome.shot.moods.get(name)
            if result["status"] == "ok" and mood in ("raise", "hang"):
                # The thread that notices a hanging call may be starved until it has returned.
                found.append(Failure(f"{name}: ok, although it failed", outcome, is_late=mood == "hang"))
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


def _is_late(result: Any) -> bool:
    """Whether its time ran out, or it met a disk that should have had room again."""
    return result["status"] == "pending" or any(word in str(result["error"]) for word in (*HUNG, FULL))


def _hangs(calls: Sequence[Call]) -> Spans:
    """When headgate may have known that a consumer was hung: a call's time without its first `MAX_STALL_S`."""
    found = Spans(list)
    for call in calls:
        if call.ended - call.began >= MAX_STALL_S - SLACK_S:
            found[call.instance].append(Span(call.began + MAX_STALL_S - SLACK_S, call.ended + SLACK_S))
    return found


def _raises(calls: Sequence[Call]) -> Spans:
    """When a consumer raised."""
    found = Spans(list)
    for call in calls:
        if call.has_raised:
            found[call.instance].append(Span(call.ended, call.ended))
    return found


def _is_excused(
    outcome: Outcome,
    name: str,
    result: Any,
    faults: Faults,
    hangs: Spans,
    raises: Spans,
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
        return mine or (name == "trickle" and any(span.meets(outcome) for span in raises[name]))
    if any(word in text for word in HUNG):
        return any(span.meets(outcome) for span in hangs[name])
    return False
