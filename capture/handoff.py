"""The way from the step thread to the dispatch thread: first in, first out, and nothing else."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """FIFO between the step thread, which puts, and the dispatch thread, which takes.

    It is not bounded itself: rows are, by the staging memory that they lie in, and everything else in it is small.
    The lock guards the queue only and is never held while anything else runs, so the step thread never waits for a
    consumer here.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())

    def put(self, item: T) -> bool:
        """Append `item`; False once closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._items.append(item)
            self._changed.notify()
            return True

    def take(self, timeout_s: float | None) -> T | None:
        """Wait for the next item and remove it.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, which `close` ends.

        Returns:
            None when the time is up, or when it is closed and empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout_s)
            return self._items.popleft() if self._items else None

    def close(self) -> None:
        """Refuse further items and let `take` go through what is left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Closed, and everything was taken."""
        with self._changed:
            return self._is_closed and not self._items

    def __len__(self) -> int:
        """Items that wait to be taken."""
        with self._changed:
            return len(self._items)
