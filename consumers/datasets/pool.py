"""Rows in memory that are mixed: put in in any order, drawn uniformly, each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        # Of rows, in the order that draws refer to; then free ones; then reserved ones.
        self._slots = np.arange(capacity)
        self._num_reserved = 0
        self.count = 0

    @property
    def free(self) -> int:
        """Rows that can be added without taking more memory."""
        return len(self._slots) - self._num_reserved - self.count

    @property
    def numbers(self) -> Numbers:
        """The rows' numbers, in the order that draws refer to."""
        found: Numbers = self._numbers[self._slots[: self.count]]
        return found

    def clear(self) -> None:
        """Take all rows out; nothing is reserved any more."""
        self.count = self._num_reserved = 0
        self._slots.sort()

    def add(self, numbers: Numbers, data: Mapping[str, Bytes]) -> None:
        """Add rows: uint8 ``[rows, row_bytes]`` by site, which are copied."""
        for site, slots in self.reserve(len(numbers)).items():
            slots.put(data[site])
        self.commit(numbers)

    def reserve(self, count: int, *, spared: int = 0) -> dict[str, Slots]:
        """Memory for rows that the next `commit` adds, by site. Rows may be taken out meanwhile, but none be added.

        Args:
            count: Rows.
            spared: Rows taken out last, whose slots are not to be given yet, since `copies` needs them.
        """
        if self.free < count + spared:
            self._grow(max(self.count + count + spared, len(self._slots) * 5 // 4))
        self._num_reserved = count
        slots = self._slots[len(self._slots) - count :].copy()
        return {
            site: Slots(rows.view(np.uint8).reshape(-1, self._row_bytes), slots) for site, rows in self._rows.items()
        }

    def commit(self, numbers: Numbers) -> None:
        """Add rows, whose bytes are in the first of the slots that are reserved; the others are free again."""
        count = len(numbers)
        reserved = self._slots[len(self._slots) - self._num_reserved :].copy()
        displaced = self._slots[self.count : self.count + min(self.free, count)].copy()
        self._slots[self.count : self.count + count] = reserved[:count]
        free = np.concatenate([displaced, reserved[count:]])
        self._slots[len(self._slots) - len(free) :] = free
        self._numbers[reserved[:count]] = numbers
        self.count += count
        self._num_reserved = 0

    def draw(self, random: np.random.Generator, count: int) -> tuple[Numbers, dict[str, Bytes]]:
        """Take rows out at random, all if there are not more than `count`: their numbers and, by site, their bytes."""
        numbers, slots = self.take(random, count)
        return numbers, self.copies(slots)

    def take(self, random: np.random.Generator, count: int) -> tuple[Numbers, Numbers]:
        """The same, but for the bytes the slots where `copies` finds them, until rows are added."""
        before, count = self.count, min(count, self.count)
        chosen = random.choice(before, count, replace=False)
        slots = self._slots[chosen]
        left = before - count
        is_taken = np.zeros(count, dtype=np.bool_)
        is_taken[chosen[chosen >= left] - left] = True
        self._slots[chosen[chosen < left]] = self._slots[left:before][~is_taken]
        self._slots[left:before] = slots
        self.count = left
        return self._numbers[slots], slots

    def copies(self, slots: Numbers) -> dict[str, Bytes]:
        """Copies of what lies in slots: uint8 ``[slots, row_bytes]`` by site."""
        width = self._row_bytes
        return {site: rows.take(slots).view(np.uint8).reshape(-1, width) for site, rows in self._rows.items()}

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
