"""Rows in memory that are mixed: put in in any order, drawn uniformly, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headgate.consumers.datasets.reading import Bytes, Slots

Numbers = npt.NDArray[np.int64]


class RowPool:
    """Rows of some sites, each with a number. Each lies in a slot; a row that is drawn leaves its slot to a later one.

    Attributes:
        count: Rows.

    Args:
        sites: Their names.
        row_bytes: Bytes of a row at one site.
        capacity: Rows that there is memory for; it grows where more are added.
    """

    def __init__(self, sites: Sequence[str], row_bytes: int, capacity: int) -> None:
        self._row_bytes = row_bytes
        self._numbers = np.empty(capacity, dtype=np.int64)  # by slot
        self._rows = {site: self._empty_rows(capacity) for site in sites}  # by slot
        self._slots = np.arange(capacity)  # those of rows, in the order that draws refer to, then the free ones
        self.count = 0

    @property
    def free(self) -> int:
        """Rows that can be added without taking more memory."""
        return len(self._slots) - self.count

    @property
    def numbers(self) -> Numbers:
        """The rows' numbers, in the order that draws refer to."""
        found: Numbers = self._numbers[self._slots[: self.count]]
        return found

    def clear(self) -> None:
        """Take all rows out."""
        self.count = 0
        self._slots.sort()

    def add(self, numbers: Numbers, data: Mapping[str, Bytes]) -> None:
        """Add rows: uint8 ``[rows, row_bytes]`` by site, which are copied."""
        slots = self._free_slots(numbers)
        for site, rows in data.items():
            self._rows[site][slots] = _as_items(rows)
        self.count += len(numbers)

    def read(self, numbers: Numbers, fill: Callable[[Mapping[str, Slots]], None]) -> None:
        """Add rows that `fill` reads to where they are to lie; if it raises, none is added."""
        slots = self._free_slots(numbers)
        fill({site: Slots(rows.view(np.uint8).reshape(len(rows), -1), slots) for site, rows in self._rows.items()})
        self.count += len(numbers)

    def _free_slots(self, numbers: Numbers) -> Numbers:
        """Slots for rows that are about to be added."""
        needed = self.count + len(numbers)
        if needed > len(self._slots):
            self._grow(max(needed, len(self._slots) * 5 // 4))
        slots = self._slots[self.count : needed].copy()
        self._numbers[slots] = numbers
        return slots

    def draw(self, random: np.random.Generator, count: int) -> tuple[Numbers, dict[str, Bytes]]:
        """Take rows out at random, all if there are not more than `count`: their numbers and, by site, their bytes."""
        count = min(count, self.count)
        chosen = random.choice(self.count, count, replace=False)
        slots = self._slots[chosen]
        numbers = self._numbers[slots]
        data = {site: rows.take(slots).view(np.uint8).reshape(count, -1) for site, rows in self._rows.items()}
        left = self.count - count
        is_taken = np.zeros(count, dtype=np.bool_)
        is_taken[chosen[chosen >= left] - left] = True
        self._slots[chosen[chosen < left]] = self._slots[left : self.count][~is_taken]
        self._slots[left : self.count] = slots
        self.count = left
        return numbers, data

    def _grow(self, size: int) -> None:
        old = len(self._slots)
        self._slots = np.concatenate([self._slots, np.arange(old, size)])
        self._numbers = np.concatenate([self._numbers, np.empty(size - old, dtype=np.int64)])
        for site, rows in self._rows.items():
            larger = self._empty_rows(size)
            larger[:old] = rows
            self._rows[site] = larger

    def _empty_rows(self, count: int) -> npt.NDArray[np.void]:
        return np.empty(count, dtype=np.dtype((np.void, self._row_bytes)))


def _as_items(rows: Bytes) -> npt.NDArray[np.void]:
    """uint8 ``[rows, row_bytes]`` as one item for each row, which numpy copies as a whole."""
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)
