"""Batches that wait until the reader has acknowledged them: numbered, in order, in bounded memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headgate.capture.schema.errors import ConsumerError

logger = logging.getLogger(__name__)


class Backlog:
    """Batches of one stream, from the first that is not acknowledged to the last that was put in.

    Threads: any; one lock. Only `put`, `get` and `wait_until_taken` wait.

    Args:
        max_bytes: Of all batches. One `put` takes half of it at most, so that a reader which acknowledges no later than
            after the other half is never waited for in vain.
        wait_s: Seconds for which `put` waits for room.
        max_away_s: Seconds without a reader after which all batches are given up once there is no room.
        clock: Seconds that only grow.
    """

    def __init__(
        self, max_bytes: int, *, wait_s: float, max_away_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._max_away_s = max_away_s
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: deque[memoryview] = deque()
        self._num_bytes = 0
        self._first = 0
        self._is_ended = False
        self._left_at: float | None = clock()
        """When the last reader left, or the stream began; None while one is connected."""
        self._has_given_up = False

    @property
    def span(self) -> tuple[int, int]:
        """Number of the first batch that is kept, and the number that the next one will get."""
        with self._changed:
            return self._first, self._end

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def put(self, batches: Sequence[memoryview]) -> tuple[int, int]:
        """Add batches, all or none; return the number of the first one, and the end.

        Raises:
            ConsumerError: If there is no room for them in time, or ever.
        """
        num_bytes = sum(batch.nbytes for batch in batches)
        if num_bytes > self.max_bytes // 2:
            raise ConsumerError(
                f"the rows take {num_bytes} bytes; one request may have half of max_bytes, {self.max_bytes // 2}: "
                "capture less, or raise max_bytes"
            )
        with self._changed:
            patience = self._wait_s if self._left_at is None else min(self._wait_s, max(self._away_left(), 0.0))
            has_room = self._changed.wait_for(
                lambda: self._is_ended or self._num_bytes + num_bytes <= self.max_bytes, patience
            )
            if self._is_ended:
                raise ConsumerError("the stream is being closed")
            if self._has_given_up or not has_room:
                self._refuse()
            first = self._end
            self._kept.extend(batches)
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return first, self._end

    def _away_left(self) -> float:
        """Seconds until a reader that is away has been away for too long."""
        return self._max_away_s - (self._clock() - self._left_at) if self._left_at is not None else self._max_away_s

    def _refuse(self) -> None:
        """Raise for want of room; give everything up if no reader has come for too long."""
        if self._left_at is None:
            raise ConsumerError(
                f"the reader is too slow: there was no room for these rows in max_bytes, {self.max_bytes}, for "
                f"{self._wait_s:g} s"
            )
        if self._away_left() > 0:
            raise ConsumerError(
                f"no reader is connected, and there was no room for these rows in max_bytes, {self.max_bytes}, for "
                f"{self._wait_s:g} s"
            )
        if self._kept:
            logger.error("no reader for %g s: %d batches are given up", self._max_away_s, len(self._kept))
            self._forget(self._end)
        self._has_given_up = True
        raise ConsumerError(f"no reader has been connected for {self._max_away_s:g} s (parameter max_away_s)")

    def get(self, number: int, is_wanted: Callable[[], bool]) -> memoryview | None:
        """Wait for a batch; None if the stream has ended before it, or it is not wanted any more.

        `is_wanted` is asked again when a reader has left.

        Raises:
            LookupError: If it is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: number < self._end or self._is_ended or not is_wanted())
            if not is_wanted():
                return None
            if number < self._first:
                raise LookupError(f"batch {number} is gone; the first that is kept is {self._first}")
            return self._kept[number - self._first] if number < self._end else None

    def acknowledge(self, number: int) -> None:
        """Forget the batches below `number`."""
        with self._changed:
            self._forget(min(number, self._end))
            self._changed.notify_all()

    def _forget(self, number: int) -> None:
        while self._first < number:
            self._num_bytes -= self._kept.popleft().nbytes
            self._first += 1

    def reader_came(self) -> None:
        """A reader is connected."""
        with self._changed:
            self._left_at = None
            self._has_given_up = False

    def reader_left(self) -> None:
        """No reader is connected any more."""
        with self._changed:
            self._left_at = self._clock()
            self._changed.notify_all()

    def end(self) -> None:
        """Take no more batches."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def wait_until_taken(self, timeout_s: float) -> int:
        """Wait until a reader has acknowledged everything; return how many batches are not, when time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept, timeout_s)
            return len(self._kept)
