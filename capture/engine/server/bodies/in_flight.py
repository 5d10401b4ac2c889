"""A budget of bytes for bodies that are on their way, over all connections of a server.

A body that does not fit is refused at once, with an error 503 that says when to try again. Waiting for room would not
do: bodies that hold a part of the budget each could wait for one another for ever, and a client that waits holds a
connection. One that has sent nothing for a while makes way for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STALLED_S = 10.0
"""A body of which nothing has come for so long loses what it holds, if others need the room."""


class ArrivingBody:
    """One body on its way.

    Attributes:
        pieces: Its bytes so far.
        is_refused: Whether there was no room for it; then it has no pieces.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_refused = False
        self.size = 0
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
        """Bodies that are not complete; the one that has waited longest for its next piece comes first."""

    def add(self, body: ArrivingBody, piece: bytes) -> None:
        """Add a piece to a body, or refuse it."""
        if body.is_refused:
            return
        now = self._clock()
        self._arriving.pop(body, None)
        while self.used + len(piece) > self.max_bytes:
            slowest = next(iter(self._arriving), body)
            if slowest is body or now - slowest.last_s < STALLED_S:
                self._refuse(body)
                return
            self._refuse(slowest)
        self._arriving[body] = None
        body.pieces.append(piece)
        body.size += len(piece)
        body.last_s = now
        self.used += len(piece)

    def complete(self, body: ArrivingBody) -> None:
        """Nothing more will come; what it holds stays taken until `release`."""
        self._arriving.pop(body, None)

    def release(self, body: ArrivingBody) -> None:
        """Give back what a body holds. A second call does nothing."""
        self._arriving.pop(body, None)
        self.used -= body.size
        body.size = 0

    def _refuse(self, body: ArrivingBody) -> None:
        self.release(body)
        body.pieces.clear()
        body.is_refused = True
