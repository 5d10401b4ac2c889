"""The way from the step thread to the dispatch thread: first in, first out, and nothing else."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Handoff(Generic[T]):
    """FIFO between the step thread, which puts, and the one dispatch thread, which takes.

    It is not bounded itself: rows are, by the staging memory that they lie in, and everything else in it is small.
    The lock keeps items from coming behind the end; it is never held while anything else runs, so the step thread never
    waits for a consumer here. A `SimpleQueue` wakes the other thread without running Python for it.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None stands behind the last item
        self._lock = threading.Lock()
        self._is_closed = self._is_through = False

    def put(self, item: T) -> bool:
        """Append `item`; False once closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._items.put(item)
            return True

    def take(self, timeout_s: float | None) -> T | None:
        """Wait for the next item and remove it.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, which `close` ends.

        Returns:
            None when the time is up, or when it is closed and empty.
        """
        if self._is_through:
            return None
        try:
            item = self._items.get(timeout=timeout_s)
        except Empty:
            return None
        self._is_through = item is None
        return item

    def close(self) -> None:
        """Refuse further items and let `take` go through what is left."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)

    @property
    def is_done(self) -> bool:
        """Closed, and everything was taken. For the thread that takes."""
        with self._lock:  # else what is closed might not have its end yet, and one item be taken for it
            return self._is_through or (self._is_closed and self._items.qsize() == 1)
