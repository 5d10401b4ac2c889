"""Results of requests' values, found by their content: clients send the same operations again and again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

import msgspec

Result = TypeVar("Result")

MAX_BYTES = 32 << 20
"""Content whose results are kept, in all. A result takes once or twice as much memory."""
MAX_ENTRY_BYTES = 512 << 10
_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))


class ContentKey(NamedTuple):
    """A result is found by it.

    Attributes:
        digest: SHA-256 of the content.
        num_bytes: Its length.
    """

    digest: bytes
    num_bytes: int


def content_of(values: Mapping[str, object]) -> ContentKey | None:
    """Return the key of values that are plain, as JSON and MessagePack have them.

    None for others: arrays and tensors, and subclasses of plain types, which may mean something else.
    """
    try:
        if not _are_plain(values.values()):
            return None
        content = msgspec.msgpack.encode(dict(values))
    except (OverflowError, TypeError, ValueError, RecursionError):  # such as an integer of more than 64 bits
        return None
    return ContentKey(hashlib.sha256(content).digest(), len(content)) if len(content) <= MAX_ENTRY_BYTES else None


def _are_plain(values: Iterable[object]) -> bool:
    for one in values:
        kind: type[object] = type(one)
        if kind is dict:
            if not (_are_leaves(one) and _are_plain(one.values())):  # type: ignore[arg-type, attr-defined]
                return False
        elif kind is list:
            if not (_are_leaves(one) or _are_plain(one)):  # type: ignore[arg-type]
                return False
        elif kind not in _LEAVES:
            return False
    return True


def _are_leaves(values: Iterable[object]) -> bool:
    return _LEAVES.issuperset(map(type, values))


class ContentCache(Generic[Result]):
    """Results by the content of what they were made from, those used last. Any thread.

    Args:
        max_bytes: Of content, in all.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[ContentKey, Result] = OrderedDict()
        self._lock = Lock()

    def find(self, key: ContentKey) -> Result | None:
        """Return the result that was kept; None if there is none."""
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key]

    def keep(self, key: ContentKey, result: Result) -> None:
        """Keep a result, at the expense of those that were not used for the longest time."""
        with self._lock:
            if key not in self._results:
                self._num_bytes += key.num_bytes
            self._results[key] = result
            while self._num_bytes > self._max_bytes:
                dropped, _ = self._results.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
