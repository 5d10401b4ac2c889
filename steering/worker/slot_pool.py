"""The pool of steering vectors that all requests share: which slot holds which vector. Numpy only.

Allocation depends on the calls alone, so every rank that is told the same uses the same slots.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.vectors.dtypes import STORAGE, Rows, StoredType
from headgate.steering.vectors.sums import is_zero

ZERO_SLOT = 0
"""Holds the zero vector for ever."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotWrites:
    """Rows to write to the device's pool before the next forward.

    Attributes:
        slots: int64 ``[K]``, each once.
        vectors: ``[K, hidden]`` in the model's dtype; bfloat16 as uint16 bits.
    """

    slots: Int64Array
    vectors: Rows


class SlotPool:
    """Slots of a ``[num_slots, hidden]`` pool. One thread: the step thread.

    Whoever acquires slots is the only one to release them. Vectors are not compared with those that are there: that
    would mean to hash each of them, half a millisecond of the step thread for a request that brings a hundred; what
    requests share, they share by the keys of whole configs (`RowTable`). New vectors take the lowest free slots, so
    the order of releases between two calls of `acquire` does not matter.

    Args:
        num_slots: Size of the pool, `ZERO_SLOT` included.
        hidden_size: Width of a vector.
        dtype: The model's.
    """

    def __init__(self, num_slots: int, hidden_size: int, dtype: StoredType) -> None:
        self._hidden_size = hidden_size
        self._storage = STORAGE[dtype]
        self._is_free = np.ones(num_slots, dtype=np.bool_)
        self._is_free[ZERO_SLOT] = False
        self._held: dict[int, SlotWrites] = {}
        """What was acquired, by its first slot."""
        self._unwritten: dict[int, SlotWrites] = {}
        self._num_used = 0

    @property
    def capacity(self) -> int:
        """Vectors that fit, the zero vector aside."""
        return len(self._is_free) - 1

    @property
    def num_used(self) -> int:
        """Slots in use, `ZERO_SLOT` aside."""
        return self._num_used

    def fits(self, count: int) -> bool:
        """Whether that many vectors can be acquired."""
        return count <= self.capacity - self.num_used

    def acquire(self, vectors: Rows) -> Int32Array:
        """A slot for each of `vectors`: int32 ``[n]``; `ZERO_SLOT` for zero vectors.

        Args:
            vectors: ``[n, hidden]`` in the pool's dtype; kept until they are released, not copied.

        Raises:
            AssertionError: If they do not all fit; nothing has changed then. Admission keeps that from happening.
        """
        if vectors.shape[1:] != (self._hidden_size,) or vectors.dtype != self._storage:
            raise AssertionError(
                f"vectors: {vectors.dtype} {vectors.shape}, expected {self._storage} (n, {self._hidden_size})"
            )
        kept = np.flatnonzero(np.logical_not(is_zero(vectors)))
        free = np.flatnonzero(self._is_free)[: len(kept)]
        if len(free) < len(kept):
            raise AssertionError(
                f"{len(kept)} new vectors do not fit the pool: {self.num_used} of {self.capacity} slots are in use"
            )
        if len(kept):
            self._is_free[free] = False
            self._num_used += len(free)
            held = SlotWrites(free, vectors if len(kept) == len(vectors) else vectors[kept])
            self._held[int(free[0])] = self._unwritten[int(free[0])] = held
        slots = np.full(len(vectors), ZERO_SLOT, dtype=np.int32)
        slots[kept] = free
        return slots

    def release(self, slots: Int32Array) -> None:
        """Give `slots` back, all that one call of `acquire` returned.

        Raises:
            AssertionError: If they are not held as such.
        """
        given_back = slots[slots != ZERO_SLOT]
        if not len(given_back):
            return
        first = int(given_back[0])
        held = self._held.get(first)
        if held is None or not np.array_equal(held.slots, given_back):
            raise AssertionError(f"slots {given_back.tolist()} were released, but not acquired together, or twice")
        del self._held[first]
        self._unwritten.pop(first, None)
        self._is_free[held.slots] = True
        self._num_used -= len(held.slots)

    def take_writes(self) -> SlotWrites | None:
        """What the device does not have yet; it counts as written from here on. None if it has everything."""
        unwritten, self._unwritten = list(self._unwritten.values()), {}
        if len(unwritten) < 2:
            return unwritten[0] if unwritten else None
        return SlotWrites(
            np.concatenate([held.slots for held in unwritten]), np.concatenate([held.vectors for held in unwritten])
        )

    def checksum(self) -> int:
        """The state as a number that is the same in every process: to compare ranks.

        It reads every vector in use, about a millisecond for 1000 of them: for debugging, not for each step.
        """
        total = zlib.crc32(self._is_free.tobytes())
        for first in sorted(self._held):
            total = zlib.crc32(self._held[first].vectors.tobytes(), total)
        return total
