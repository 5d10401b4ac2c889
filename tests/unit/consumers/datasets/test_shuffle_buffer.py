"""The shuffle buffer of rows that are mixed: each row that was put in comes out once, with its bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from headgate.consumers.datasets.mixing import Numbers, ShuffleBuffer

SITES = ("1.post_mlp", "2.post_mlp")


def bytes_of(numbers: Numbers, site: str) -> npt.NDArray[np.uint8]:
    """Rows that say which they are."""
    return (numbers * (1 + SITES.index(site))).astype(np.int64).view(np.uint8).reshape(len(numbers), 8)


class _Refill:
    """Rows that are reserved, and arrive later; the last of them are dropped."""

    def __init__(self, buffer: ShuffleBuffer, first: int, count: int, num_dropped: int, spared: int) -> None:
        self._numbers = np.arange(first, first + count, dtype=np.int64)
        self._memory = buffer.reserve(count, spared=spared)
        self._kept = self._numbers[: max(count - num_dropped, 0)]
        self._buffer = buffer

    def arrive(self) -> Numbers:
        for site, slots in self._memory.items():
            slots.put(bytes_of(self._numbers, site))
        self._buffer.commit(self._kept)
        return self._kept


@given(
    capacity=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=25),
    seed=st.integers(0, 9),
)
def test_each_row_comes_once_with_its_bytes(capacity: int, steps: list[tuple[int, int, int, bool]], seed: int) -> None:
    """Refills overlap with draws: one is reserved behind a draw, and its rows arrive before that draw is copied."""
    random = np.random.default_rng(seed)
    buffer = ShuffleBuffer(SITES, 8, capacity)
    given_rows, found, first = 0, list[int](), 0
    refill: _Refill | None = None

    for num_taken, num_read, num_dropped, arrives in steps:
        numbers, slots = buffer.take(random, num_taken)
        if refill is None:
            refill = _Refill(buffer, first, num_read, num_dropped, spared=len(slots))
            first += num_read
        for site, rows in buffer.copies(slots).items():
            assert np.array_equal(rows, bytes_of(numbers, site))
        found += numbers.tolist()
        if arrives:
            given_rows += len(refill.arrive())
            refill = None
    last, _ = buffer.draw(random, len(steps) * 10)

    found += last.tolist()
    assert len(found) == len(set(found)) == given_rows
    assert buffer.count == 0


def test_what_is_reserved_is_none_of_what_was_taken_out_last() -> None:
    buffer = ShuffleBuffer(SITES, 8, 10)
    buffer.add(np.arange(10), {site: bytes_of(np.arange(10), site) for site in SITES})
    numbers, slots = buffer.take(np.random.default_rng(0), 10)

    memory = buffer.reserve(10, spared=10)
    for site in SITES:
        memory[site].put(bytes_of(np.arange(10, 20), site))

    for site, rows in buffer.copies(slots).items():
        assert np.array_equal(rows, bytes_of(numbers, site))
