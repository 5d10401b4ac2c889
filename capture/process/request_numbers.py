"""Numbers that stand for requests in messages about rows, where a step has hundreds of long ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headgate.capture.planning.step_plan import RequestSpans

UNKNOWN = -1
"""Of a request that the process was not given: its rows have no consumer there."""
NOBODY = ""
"""Stands for the id of such a request; no request has it."""


class RequestNumbers:
    """The worker's side: numbers the requests that a process is given."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last = 0

    def begin(self, req_id: str) -> int:
        """Number a request; one of the same id before it has its number no longer."""
        self._last += 1
        self._numbers[req_id] = self._last
        return self._last

    def end(self, req_id: str) -> None:
        """Forget a request, of which no more rows come."""
        self._numbers.pop(req_id, None)

    def clear(self) -> None:
        """Forget all requests: another process takes the place of the one that knew them."""
        self._numbers.clear()

    def of(self, spans: RequestSpans) -> bytes:
        """Return the number of each span's request, int64."""
        number_of = self._numbers.get
        return np.array([number_of(req_id, UNKNOWN) for req_id, _, _ in spans], np.int64).tobytes()


class NumberedRequests:
    """The process's side: the ids behind the numbers."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}

    def begin(self, number: int, req_id: str) -> None:
        """Take a request; one of the same id before it is forgotten."""
        self.end(req_id)
        self._ids[number] = req_id
        self._numbers[req_id] = number

    def end(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        number = self._numbers.pop(req_id, None)
        if number is not None:
            del self._ids[number]

    def ids(self, numbers: Iterable[int]) -> list[str]:
        """Return the id of each request."""
        id_of = self._ids.get
        return [id_of(number, NOBODY) for number in numbers]
