"""Leases of host memory: never two of the same row, in order, and waiting ends."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.staging.host_rows import GRANULARITY, Arena, Lease
from tests.fakes.pipeline import TIMEOUT_S, when_it_waits

NEVER_S = 0.0


@given(
    st.integers(GRANULARITY, 40 * GRANULARITY),
    st.lists(st.tuples(st.integers(1, 12 * GRANULARITY), st.integers(0, 3)), max_size=60),
)
def test_rows_are_leased_to_one_at_a_time_and_all_are_free_in_the_end(
    num_rows: int, demands: list[tuple[int, int]]
) -> None:
    arena, leased = Arena(num_rows), deque[Lease]()

    for size, num_releases in demands:
        lease = arena.try_lease(size) if size <= arena.num_rows else None
        if lease is not None:
            rows = set(range(lease.start, lease.start + lease.num_rows))
            assert lease.num_rows >= size
            assert max(rows) < num_rows
            assert all(rows.isdisjoint(range(other.start, other.start + other.num_rows)) for other in leased)
            leased.append(lease)
        else:
            assert leased or size > arena.num_rows
        for _ in range(min(num_releases, len(leased))):
            arena.release(leased.popleft())

    while leased:
        arena.release(leased.popleft())
    assert arena.num_leased == 0
    assert arena.try_lease(arena.num_rows) is not None


def test_leases_are_rounded_up_to_the_granularity() -> None:
    arena = Arena(3 * GRANULARITY + 5)

    lease = arena.try_lease(GRANULARITY + 1)

    assert lease is not None
    assert lease.num_rows == arena.num_leased == 2 * GRANULARITY
    assert arena.num_rows == 3 * GRANULARITY


def test_rows_that_are_given_back_early_are_free_when_those_before_them_are() -> None:
    arena = Arena(2 * GRANULARITY)
    first, second = arena.try_lease(GRANULARITY), arena.try_lease(GRANULARITY)
    assert first is not None
    assert second is not None

    arena.release(second)
    assert arena.try_lease(1) is None
    arena.release(first)

    assert arena.try_lease(2 * GRANULARITY) is not None


def test_waiting_ends_when_patience_does() -> None:
    arena = Arena(GRANULARITY)
    arena.try_lease(1)

    assert arena.lease(1, NEVER_S) is None


def test_waiting_ends_when_rows_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, got = Arena(GRANULARITY), []
    waits = when_it_waits(arena._freed, monkeypatch)
    first = arena.try_lease(1)
    assert first is not None
    thread = threading.Thread(target=lambda: got.append(arena.lease(GRANULARITY, TIMEOUT_S)))

    thread.start()
    assert waits.wait(TIMEOUT_S)
    arena.release(first)
    thread.join(TIMEOUT_S)

    assert [lease.num_rows for lease in got] == [GRANULARITY]
