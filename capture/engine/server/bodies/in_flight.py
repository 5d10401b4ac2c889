"""A budget of bytes for bodies that are on their way, over all connections of a server.

A body that does not fit is refused at once, with an error 503 that says when to try again. Waiting for room would not
do: bodies that hold a part of the budget each could wait for one another for ever, and a client that waits holds a
connection. Two kinds of bodies make way for others instead: slow ones, and those of a client that holds more than its
share. And each has so much time: one that comes more slowly than `LEAST_RATE` is given up, whether others wait or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

STALLED_S = 10.0
"""A body of which nothing has come for so long, or which is slow after so long, makes way if others need the room."""
SLOW_RATE = 128 << 10
"""Bytes a second below which a body is slow, from its beginning on: some 1 Mbit/s."""
SHARES = 4
"""A client that holds more than one part in so many of the budget makes way for clients that hold less."""
GRACE_S = 10.0
LEAST_RATE = 16 << 10
"""Bytes a second that a body must come in, once it has had `GRACE_S`."""
MAX_S = 600.0
"""The most time that any body has."""


class ArrivingBody:
    """One body on its way.

    Args:
        client: Who sends it: what it holds counts against the share of that client.

    Attributes:
        pieces: Its bytes so far.
        is_refused: Whether there was no room for it; then it has no pieces.
        size: Bytes that it holds.
        num_received: Bytes that have come, those that were thrown away included.
    """

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.pieces: list[bytes] = []
        self.is_refused = False
        self.size = 0
        self.num_received = 0
        self.began_s: float | None = None
        self.last_s = 0.0


class BytesInFlight:
    """The budget. Event loop only.

    Args:
        max_bytes: Of all bodies together.
        clock: Tells the time, in seconds.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.used = 0
        self._clock = clock
        self._arriving: dict[ArrivingBody, None] = {}
        """Bodies that are not complete."""
        self._held: Counter[str] = Counter()
        """Bytes by client, of those that hold any."""

    def begin(self, body: ArrivingBody) -> None:
        """Let the time of a body begin; its first piece does so, too."""
        body.began_s = body.last_s = self._clock()

    def seconds_left(self, body: ArrivingBody) -> float:
        """Return how long the next piece of a body that has begun may take; 0 or less if it is too late."""
        assert body.began_s is not None  # noqa: S101
        allowed = min(GRACE_S + body.num_received / LEAST_RATE, MAX_S)
        return body.began_s + allowed - self._clock()

    def add(self, body: ArrivingBody, piece: bytes) -> None:
        """Add a piece to a body, or refuse it."""
        if body.began_s is None:
            self.begin(body)
        body.num_received += len(piece)
        if body.is_refused:
            return
        now = self._clock()
        while self.used + len(piece) > self.max_bytes:
            victim = self._find_victim(body, len(piece), now)
            if victim is None:
                self.refuse(body)
                return
            self.refuse(victim)
        self._arriving[body] = None
        body.pieces.append(piece)
        body.size += len(piece)
        body.last_s = now
        self.used += len(piece)
        self._held[body.client] += len(piece)

    def complete(self, body: ArrivingBody) -> None:
        """Nothing more will come; what it holds stays taken until `release`."""
        self._arriving.pop(body, None)

    def release(self, body: ArrivingBody) -> None:
        """Give back what a body holds. A second call does nothing."""
        self._arriving.pop(body, None)
        self.used -= body.size
        self._held[body.client] -= body.size
        if not self._held[body.client]:
            del self._held[body.client]
        body.size = 0

    def _find_victim(self, asking: ArrivingBody, num_bytes: int, now: float) -> ArrivingBody | None:
        """Find the body that makes way for a piece of another one; None if none does."""
        others = [body for body in self._arriving if body is not asking and body.size]
        slow = [body for body in others if _is_slow(body, now)]
        if slow:
            return _costliest(slow, now)
        share = self.max_bytes // SHARES
        if self._held[asking.client] + num_bytes > share:
            return None
        above = [body for body in others if self._held[body.client] > share]
        if not above:
            return None
        most = max(self._held[body.client] for body in above)
        return _costliest([body for body in above if self._held[body.client] == most], now)

    def refuse(self, body: ArrivingBody) -> None:
        """Give up a body, and what it holds."""
        self.release(body)
        body.pieces.clear()
        body.is_refused = True


def _is_slow(body: ArrivingBody, now: float) -> bool:
    age = now - (body.began_s or 0.0)
    is_stalled = now - body.last_s >= STALLED_S
    return is_stalled or (age >= STALLED_S and body.num_received < age * SLOW_RATE)


def _costliest(bodies: Iterable[ArrivingBody], now: float) -> ArrivingBody:
    """Return the body that has held the most for the longest time."""
    return max(bodies, key=lambda body: body.size * (now - (body.began_s or 0.0)))
