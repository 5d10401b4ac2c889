"""Logging of what may happen thousands of times a second."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("headgate")

INTERVAL_S = 10.0


class SparseLog:
    """At most one line in `INTERVAL_S`, which says how many were left out. Any thread.

    What it leaves out is counted elsewhere and told to the requests it concerns.

    Args:
        who: Beginning of every line.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._num_left_out = 0

    def error(self, text: str, *, cause: BaseException | None = None) -> None:
        """Log `text`, and the traceback of `cause`, unless something was logged a moment ago."""
        self._log(logging.ERROR, text, cause)

    def warning(self, text: str) -> None:
        """Log `text`, unless something was logged a moment ago."""
        self._log(logging.WARNING, text, None)

    def _log(self, level: int, text: str, cause: BaseException | None) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._next_at:
                self._num_left_out += 1
                return
            self._next_at = now + INTERVAL_S
            left_out, self._num_left_out = self._num_left_out, 0
        more = f" ({left_out} more since the last line)" if left_out else ""
        logger.log(level, "%s: %s%s", self._who, text, more, exc_info=cause)
