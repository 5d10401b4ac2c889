"""Host memory that rows lie in from the device copy until they are dispatched: leased in order, given back in order."""

from __future__ import annotations

import threading
from collections import deque

GRANULARITY = 16
"""Leases are multiples of so many rows."""


def round_up(num_rows: int) -> int:
    """`num_rows`, rounded up to whole granules."""
    return -(-num_rows // GRANULARITY) * GRANULARITY


class Lease:
    """Rows ``start : start + num_rows`` of the arena, until `Arena.release`."""

    __slots__ = ("is_released", "num_rows", "start")

    def __init__(self, start: int, num_rows: int) -> None:
        self.start = start
        self.num_rows = num_rows
        self.is_released = False


class Arena:
    """Hands out consecutive rows of a ring. It owns no memory, only the bookkeeping of it.

    The step thread leases, the dispatch thread releases. The lock guards the bookkeeping alone.

    Args:
        num_rows: Size; a lease can be as large as that.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows - num_rows % GRANULARITY
        self._leases: deque[Lease] = deque()
        self._num_released = 0
        self._freed = threading.Condition(threading.Lock())

    @property
    def num_leased(self) -> int:
        """Rows in use."""
        with self._freed:
            return sum(lease.num_rows for lease in self._leases)

    def try_lease(self, num_rows: int) -> Lease | None:
        """Lease `num_rows`, rounded up; None if there is no room for them now."""
        with self._freed:
            return self._lease(round_up(num_rows))

    def lease(self, num_rows: int, patience_s: float) -> Lease | None:
        """Lease `num_rows`, rounded up, and wait for room.

        Args:
            num_rows: At most `self.num_rows`.
            patience_s: Seconds to wait without any row becoming free.

        Returns:
            None if patience ran out.
        """
        size = round_up(num_rows)
        with self._freed:
            while (lease := self._lease(size)) is None:
                seen = self._num_released
                if not self._freed.wait_for(lambda seen=seen: self._num_released != seen, patience_s):  # type: ignore[misc]
                    return None
            return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back; its rows are free when those leased before it are."""
        with self._freed:
            lease.is_released = True
            while self._leases and self._leases[0].is_released:
                self._leases.popleft()
            self._num_released += 1
            self._freed.notify_all()

    def _lease(self, size: int) -> Lease | None:
        start = self._find(size)
        if start is None:
            return None
        lease = Lease(start, size)
        self._leases.append(lease)
        return lease

    def _find(self, size: int) -> int | None:
        """Where `size` consecutive rows are free."""
        if not self._leases:
            return 0 if size <= self.num_rows else None
        first, last = self._leases[0], self._leases[-1]
        end = last.start + last.num_rows
        if end <= first.start:  # wrapped around: free in between
            return end if first.start - end >= size else None
        if self.num_rows - end >= size:
            return end
        return 0 if first.start >= size else None
