"""Slots: each of one owner, never more than there are, all free at the end."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate.capture.schema.batch import Int32Array
from headgate.steering.vectors.dtypes import STORAGE, Rows, StoredType
from headgate.steering.worker.rows.vector_pool import ZERO_SLOT, SlotPool

CAPACITY = 6


def rows_of(values: list[int], dtype: StoredType = "float16") -> Rows:
    return np.array([[value, 1 if value else 0] for value in values], dtype=STORAGE[dtype]).reshape(-1, 2)


def acquire(pool: SlotPool, values: list[int], dtype: StoredType = "float16") -> list[int]:
    slots: list[int] = pool.acquire(rows_of(values, dtype)).tolist()
    return slots


class PoolMachine(RuleBasedStateMachine):
    """Two replicas against a plain model; releases reach the second one in another order."""

    @initialize()
    def start(self) -> None:
        self.pools = [SlotPool(CAPACITY + 1, 2, "float16") for _ in range(2)]
        self.device = np.zeros((CAPACITY + 1, 2), dtype=np.float16)
        self.held: list[tuple[list[int], Int32Array]] = []

    @rule(values=st.lists(st.integers(0, 9), max_size=4))
    def take(self, values: list[int]) -> None:
        vectors = rows_of(values)
        needed = sum(map(bool, values))
        in_use = sum(bool(value) for held, _ in self.held for value in held)
        if in_use + needed > CAPACITY:
            before = self.pools[0].checksum()
            assert not self.pools[0].fits(needed)
            with pytest.raises(AssertionError, match="do not fit"):
                self.pools[0].acquire(vectors)
            assert self.pools[0].checksum() == before
            return
        assert self.pools[0].fits(needed)
        slots = [pool.acquire(vectors) for pool in self.pools]
        assert (slots[0] == slots[1]).all()
        self.held.append((values, slots[0]))

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 3), data=st.data())
    def give_back(self, count: int, data: st.DataObject) -> None:
        leaving = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1))) for _ in range(count) if self.held]
        for pool, order in zip(self.pools, (leaving, leaving[::-1]), strict=True):
            for _, slots in order:
                pool.release(slots)

    @rule()
    def write(self) -> None:
        writes = [pool.take_writes() for pool in self.pools]
        if writes[0] is None:
            assert writes[1] is None
            return
        assert writes[1] is not None
        assert (writes[0].slots == writes[1].slots).all()
        assert len(set(writes[0].slots.tolist())) == len(writes[0].slots)
        self.device[writes[0].slots] = writes[0].vectors
        for values, slots in self.held:
            assert (self.device[slots] == rows_of(values)).all()
        assert not self.device[ZERO_SLOT].any()
        assert self.pools[0].take_writes() is None

    @invariant()
    def counts_are_right(self) -> None:
        taken = [slot for _, slots in getattr(self, "held", []) for slot in slots.tolist() if slot != ZERO_SLOT]
        assert len(set(taken)) == len(taken)
        for pool in getattr(self, "pools", []):
            assert pool.num_used == len(taken)
        if taken:
            assert self.pools[0].checksum() == self.pools[1].checksum()

    def teardown(self) -> None:
        for pool in getattr(self, "pools", []):
            for _, slots in self.held:
                pool.release(slots)
            assert pool.num_used == 0
            assert pool.take_writes() is None


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_vector_has_a_slot_and_zero_vectors_the_first(dtype: StoredType) -> None:
    pool = SlotPool(8, 2, dtype)

    first, second = acquire(pool, [3, 0, 4], dtype), acquire(pool, [4, 5], dtype)

    assert (first, second) == ([1, 0, 2], [3, 4])
    writes = pool.take_writes()
    assert writes is not None
    assert writes.slots.tolist() == [1, 2, 3, 4]
    assert (writes.vectors == rows_of([3, 4, 4, 5], dtype)).all()


def test_a_slot_that_is_used_again_before_the_write_is_written_once() -> None:
    pool = SlotPool(3, 2, "float16")
    slots = pool.acquire(rows_of([7]))
    pool.release(slots)

    assert acquire(pool, [8]) == [1]

    writes = pool.take_writes()
    assert writes is not None
    assert writes.slots.tolist() == [1]
    assert (writes.vectors == rows_of([8])).all()


def test_a_slot_given_back_twice_is_noticed() -> None:
    pool = SlotPool(3, 2, "float16")
    slots = pool.acquire(rows_of([7]))
    pool.release(slots)

    with pytest.raises(AssertionError, match="or twice"):
        pool.release(slots)


def test_slots_that_were_not_acquired_together_are_not_given_back_together() -> None:
    pool = SlotPool(5, 2, "float16")
    one, other = pool.acquire(rows_of([7, 8])), pool.acquire(rows_of([9]))

    for wrong in (one[:1], np.concatenate([one, other])):
        with pytest.raises(AssertionError, match="not acquired together"):
            pool.release(wrong)


def test_vectors_of_another_width_or_type_are_noticed() -> None:
    pool = SlotPool(3, 2, "float16")

    for wrong in (np.zeros((1, 3), dtype=np.float16), np.zeros((1, 2), dtype=np.float32)):
        with pytest.raises(AssertionError, match=r"expected float16 \(n, 2\)"):
            pool.acquire(wrong)


def test_the_checksum_is_the_same_in_every_process() -> None:
    pool = SlotPool(8, 2, "float16")
    acquire(pool, [3, 4, 5])
    program = (
        "from tests.unit.steering.worker.rows.test_vector_pool import *\n"
        "pool = SlotPool(8, 2, 'float16'); acquire(pool, [3, 4, 5]); print(pool.checksum())"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert int(done.stdout) == pool.checksum()
    acquire(pool, [6])
    assert int(done.stdout) != pool.checksum()
