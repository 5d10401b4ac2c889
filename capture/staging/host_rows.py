"""Host memory that rows lie in from their device copy until they are dispatched.

The memory is one ring, the arena: rows are leased in order and become free in order. `StagedRows` says what lies where.

Shapes: S sites, N rows of a group, D hidden size, W width of a group's rows, A rows of the arena. A row of the arena is
as large as one of the stream; groups of another shape take the bytes of as many of these as they need.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headgate.capture.planning.step_plan import PackGroup, StepPlan, joined, memory_rows, row_cost, rows_between
from headgate.capture.schema.batch import Int32Array
from headgate.capture.staging.device_copy import Copied, DeviceCopier

GRANULARITY = 16
"""Leases are multiples of so many rows."""


def round_up(num_rows: int) -> int:
    """`num_rows`, rounded up to whole granules."""
    return -(-num_rows // GRANULARITY) * GRANULARITY


class Lease:
    """Rows ``start : start + num_rows`` of the arena, until `Arena.release`.

    Attributes:
        number: Counts leases whose memory another process reads; 0 for others.
    """

    __slots__ = ("is_released", "num_rows", "number", "start")

    def __init__(self, start: int, num_rows: int, number: int = 0) -> None:
        self.start = start
        self.num_rows = num_rows
        self.number = number
        self.is_released = False


class Lessor(Protocol):
    """Takes leases back."""

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        ...


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
            self._reclaim()
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
            self._reclaim()
            self._num_released += 1
            self._freed.notify_all()

    def _reclaim(self) -> None:
        """Take back what was released, in the order in which it was leased."""
        while self._leases and self._leases[0].is_released:
            self._leases.popleft()

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


@dataclass(slots=True, eq=False, repr=False)
class StagedRows:
    """Rows of some steps, or of a part of one, at all their sites, which are copied at once into host memory.

    The step thread leases the memory and starts the copy. From then on they are for the dispatch thread: `wait`, read
    the `places`, copy out, `release`.

    Attributes:
        groups: Sites with rows of the stream's shape first, then other sites, then readouts.
        start: Index of the first row among the wanted rows of the steps.
        num_rows: Number of rows from there on; with speculative decoding, rows that turned out to be unwanted count
            too.
        num_copies: Rows of the stream's shape to copy, over all their sites; rows that are read out are none of them.
        num_token_rows: Rows of the arena that hold the tokens of the rows, ahead of the rows; 0 if the tokens are not
            known.
        num_output_rows: Rows of the arena that hold rows of other shapes and the outputs of readouts, after the rows of
            the stream.
        since: When the forward of the first of the steps was launched, in seconds of the monotonic clock.
        lease: Their memory, once they are `placed`.
        memory: ``[A, D]``: all of the staging memory, in which `places` says what lies where; likewise.
    """

    groups: tuple[PackGroup, ...]
    start: int
    num_rows: int
    num_copies: int
    num_token_rows: int = 0
    num_output_rows: int = 0
    since: float = 0.0
    lease: Lease = field(init=False)
    memory: Tensor = field(init=False)
    _copied: Copied = field(init=False)
    _arena: Lessor = field(init=False)
    _token_ids: Int32Array | None = field(init=False, default=None)

    def placed(self, lease: Lease, copied: Copied, memory_AD: Tensor, arena: Lessor) -> StagedRows:
        """Note where the rows lie once `copied` says so, in which memory, and what takes the lease back."""
        self.lease, self.memory, self._copied, self._arena = lease, memory_AD, copied, arena
        return self

    @property
    def num_wanted(self) -> int:
        """Wanted rows; one at several sites counts once."""
        if any(len(group.rows) == self.num_rows for group in self.groups):
            return self.num_rows
        return len(np.unique(np.concatenate([group.rows for group in self.groups])))

    @property
    def num_leased(self) -> int:
        """Rows of the arena that they need."""
        return self.num_token_rows + self.num_copies + self.num_output_rows

    def wait(self) -> None:
        """Wait until the rows have arrived."""
        self._copied.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of the leased memory."""
        return self.lease.num_rows * self.memory.shape[1] * self.memory.element_size()

    @property
    def places(self) -> list[tuple[PackGroup, int]]:
        """Each group, and the row of `memory` at which its first site's first row lies.

        The rows of a site follow each other, and so do the sites: ``[S, N, W]`` from there on.
        """
        found, start = [], self.lease.start + self.num_token_rows
        row_bytes = self.memory.shape[1] * self.memory.element_size()
        for group in self.groups:
            found.append((group, start))
            start += memory_rows(group, row_bytes) or len(group.site_ids) * len(group.rows)
        return found

    def view(self, group: PackGroup, start: int) -> Tensor:
        """The rows of a group, ``[S, N, W]``, or their outputs, that begin at `start`; see `places`."""
        return rows_at(self.memory, start, group).view(len(group.site_ids), len(group.rows), -1)

    def token_ids(self, group: PackGroup) -> Int32Array | None:
        """The token that each row of `group` was computed from, int32 ``[N]``; None if unknown."""
        if not self.num_token_rows:
            return None
        if self._token_ids is None:
            self._token_ids = numbers_at(self.memory, self.lease.start, self.num_rows, torch.int32).numpy()
        found: Int32Array = self._token_ids[group.rows - self.start]
        return found

    def release(self) -> None:
        """Give the memory back. Views of it are void from here on."""
        self._copied.release()
        self._arena.release(self.lease)


def cut_into_parts(plans: Sequence[StepPlan], *, max_copies: int, row_bytes: int) -> list[StagedRows]:
    """Cut the wanted rows of steps into parts of a limited size; all sites of a row are in one part.

    Args:
        plans: Of the steps, whose rows follow each other in the ring.
        max_copies: Upper limit of (row, site) pairs in a part, at least as many as one row can have; see `row_cost`.
        row_bytes: Bytes of a row of the arena.
    """
    has_token_ids = all(plan.has_token_ids for plan in plans)

    def part(groups: tuple[PackGroup, ...], start: int, stop: int) -> StagedRows:
        num_token_rows = -(-4 * (stop - start) // row_bytes) if has_token_ids else 0
        num_copies = sum(len(group.site_ids) * len(group.rows) for group in groups if group.shape is None)
        num_output_rows = sum(memory_rows(group, row_bytes) for group in groups)
        return StagedRows(groups, start, stop - start, num_copies, num_token_rows, num_output_rows, plans[0].since)

    num_rows = plans[-1].end - plans[0].base
    groups = tuple(sorted(joined(plans), key=lambda group: (group.site_set.is_read_out, group.shape is not None)))
    costs = [len(group.site_ids) * row_cost(group.shape, row_bytes) for group in groups]
    if sum(cost * len(group.rows) for cost, group in zip(costs, groups, strict=True)) <= max_copies:
        return [part(groups, 0, num_rows)]
    num_copies = np.zeros(num_rows, dtype=np.int64)
    for cost, group in zip(costs, groups, strict=True):
        num_copies[group.rows] += cost
    total = np.cumsum(num_copies)
    parts, start = [], 0
    while start < len(total):
        before = int(total[start - 1]) if start else 0
        stop = int(np.searchsorted(total, before + max_copies, side="right"))
        between = tuple(found for group in groups if (found := rows_between(group, start, stop)) is not None)
        parts.append(part(between, start, stop))
        start = stop
    return parts


def numbers_at(arena_AD: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers in the arena, from row `start` on."""
    first = start * arena_AD.shape[1] * arena_AD.element_size()
    return arena_AD.view(-1).view(torch.uint8)[first : first + dtype.itemsize * count].view(dtype)


def rows_at(arena_AD: Tensor, start: int, group: PackGroup) -> Tensor:
    """The rows of a group, ``[S * N, W]``, or their outputs, in the arena from row `start` on."""
    count, shape = len(group.site_ids) * len(group.rows), group.shape
    if shape is None:
        return arena_AD[start : start + count]
    return numbers_at(arena_AD, start, count * shape.width, getattr(torch, shape.dtype)).view(count, shape.width)


class StagingMemory(Protocol):
    """Memory, the bookkeeping of it, and how its reader learns that a copy has arrived.

    Attributes:
        rows_AD: ``[A, D]``, pinned where a GPU copies into it.
    """

    rows_AD: Tensor

    @property
    def arena(self) -> Arena:
        """Leases rows of it."""
        ...

    def announce(self, lease: Lease, copied: Copied, copier: DeviceCopier) -> Copied:
        """Say that the copies into `lease` were all enqueued; return what to wait for."""
        ...

    def prove(self, copier: DeviceCopier) -> None:
        """Refuse if copies do not arrive; before anything is leased."""
        ...

    def close(self) -> None:
        """Give back what must not outlive the process; nothing is copied any more, and no rows are handed out."""
        ...


class PinnedMemory:
    """Memory of this process."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, *, is_pinned: bool) -> None:
        self.arena = Arena(num_rows)
        self.rows_AD = torch.empty(self.arena.num_rows, hidden_size, dtype=dtype, pin_memory=is_pinned)

    def announce(self, lease: Lease, copied: Copied, copier: DeviceCopier) -> Copied:
        """See `StagingMemory.announce`: an event is recorded after the copies."""
        return copied

    def prove(self, copier: DeviceCopier) -> None:
        """See `StagingMemory.prove`: an event shows it."""

    def close(self) -> None:
        """See `StagingMemory.close`; it goes with the last reference to it."""
