"""The results of requests whose files are on their way to an object store."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from typing import Any

Outcome = Future[dict[str, Any]]


class Answer:
    """A request's result, which is given once: when its files are uploaded, or when it has waited long enough.

    Args:
        outcome: The result.
        payload: Of the files as they lie on this machine.
        urls: Where they will lie, with the path on this machine of each.
    """

    def __init__(self, outcome: Outcome, payload: dict[str, Any], urls: list[str]) -> None:
        self._outcome = outcome
        self._payload = payload
        self._urls = urls

    def tell(self, urls: list[str] | None = None) -> None:
        """Give the result: with `urls`, the files are there; without, they wait on this machine."""
        is_uploaded = urls is not None
        facts = {"paths": urls or self._urls, "uploaded": is_uploaded}
        # Whether the rows survive a power cut is the store's business once it has them.
        durable = None if is_uploaded else self._payload["durable"]
        try:
            self._outcome.set_result({**self._payload, **facts, "durable": durable})
        except InvalidStateError:
            return  # given already

    def fail(self, error: Exception) -> bool:
        """Give an error; False if the result was given already, as it must not be taken back."""
        try:
            self._outcome.set_exception(error)
        except InvalidStateError:
            return False
        return True


class Patience:
    """Gives answers once they have waited for `wait_s` seconds. Any thread may call."""

    def __init__(self, name: str, wait_s: float) -> None:
        self._wait_s = wait_s
        self._waiting: deque[tuple[float, Answer]] = deque()
        self._is_closed = False
        self._changed = threading.Condition()  # guards the two above
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, answer: Answer) -> None:
        """Let an answer wait."""
        with self._changed:
            self._waiting.append((time.monotonic() + self._wait_s, answer))
            self._changed.notify()

    def close(self) -> None:
        """Give all answers now, and wait for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (answer := self._next()) is not None:
            answer.tell()

    def _next(self) -> Answer | None:
        """The next answer whose time has come; None after the last one."""
        with self._changed:
            while not self._is_closed:
                left_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._waiting.popleft()[1] if self._waiting else None
