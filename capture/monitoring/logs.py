"""headgate's log: lines shown where vLLM's own are shown, and few of what may happen thousands of times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headgate.capture.schema.errors import ForbiddenError, OverloadedError, RequestError

logger = logging.getLogger("headgate")

INTERVAL_S = 10.0
REASON_S = 1.0
"""Seconds for which the same reason is not logged again."""
MAX_REASONS = 64
"""Reasons that are distinguished; further ones count as one."""


class SparseLog:
    """At most one line in `INTERVAL_S`, which says how many were left out. Any thread.

    What it leaves out is counted elsewhere and reported to the requests it concerns.

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


class ReasonLog:
    """At most one line in `REASON_S` for each reason, which says how many were left out. Any thread.

    Args:
        who: Beginning of every line.
        clock: Seconds.
    """

    def __init__(self, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._who = who
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, int]] = {}
        """By reason: when it may be logged again, and how often it was left out."""

    def info(self, reason: str, text: str) -> None:
        """Log `text`, unless the same reason was logged a moment ago."""
        self._write(logging.INFO, reason, text)

    def warning(self, reason: str, text: str) -> None:
        """Log `text` as a warning, unless the same reason was logged a moment ago."""
        self._write(logging.WARNING, reason, text)

    def _write(self, level: int, reason: str, text: str) -> None:
        now = self._clock()
        with self._lock:
            if reason not in self._seen and len(self._seen) >= MAX_REASONS:
                reason = ""
            next_at, left_out = self._seen.get(reason, (now, 0))
            if now < next_at:
                self._seen[reason] = (next_at, left_out + 1)
                return
            self._seen[reason] = (now + REASON_S, 0)
        more = f" ({left_out} more for that reason since the last line)" if left_out else ""
        logger.log(level, "%s: %s%s", self._who, text, more)


class RefusalFilter(logging.Filter):
    """Logs a request that headgate refuses in one line, and counts further ones that have the same reason.

    vLLM answers a refused stream with the error, as it should, and logs a traceback for each.

    Args:
        log: Where the lines go.
    """

    def __init__(self, log: ReasonLog) -> None:
        super().__init__()
        self._log = log

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is shown."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, RequestError | ForbiddenError | OverloadedError):
            return True
        field = getattr(error, "field", "")
        self._log.info(f"{type(error).__name__} {field.partition('[')[0]}", str(error))
        return False


_REFUSALS = RefusalFilter(ReasonLog("headgate: requests are refused"))


def speak_through_vllm() -> None:
    """Give headgate's logger vLLM's handlers and level, unless the application has set up either itself.

    vLLM configures its own logger only; without this, what a server's sites cost and that they passed the self-test
    would not be seen. Tracebacks of refused requests are not shown by those handlers. Idempotent.
    """
    ours, theirs = logging.getLogger("headgate"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        handler.addFilter(_REFUSALS)
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
