"""A cache that is bounded by bytes: of programs that were made, and of requests that were read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Keeps what was used last. Any thread.

    Args:
        max_bytes: Upper limit for the bytes of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Hashable) -> Value | None:
        """Return what was kept under a key; None if nothing is."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, value: Value, num_bytes: int) -> None:
        """Keep something, at the expense of what was not found for the longest time."""
        with self._lock:
            earlier = self._kept.pop(key, None)
            self._num_bytes += num_bytes - (0 if earlier is None else earlier[1])
            self._kept[key] = value, num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_bytes -= dropped

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0
