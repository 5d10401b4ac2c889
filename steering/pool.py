"""The pool of steering vectors that all requests share: which slot holds which vector. Numpy only.

Allocation depends on the calls alone, so every rank that is told the same uses the same slots.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headgate.capture.batch import Int64Array
from headgate.steering.compose import is_zero
from headgate.steering.dtypes import STORAGE, Rows, StoredType

Int32Array = npt.NDArray[np.int32]

ZERO_SLOT = 0
"""Holds the zero vector for ever."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotWrites:
    """Rows to write to the device's pool before the next forward.

    Attributes:
        slots: int64 ``[K]``, ascending, each once.
        vectors: ``[K, hidden]`` in the model's dtype, read-only; bfloat16 as uint16 bits.
    """

    slots: Int64Array
    vectors: Rows


class SlotPool:
    """Slots of a ``[num_slots, hidden]`` pool, counted by users. One thread: the step thread.

    Equal vectors share a slot: they are compared by their bytes, so no two different vectors ever do. New vectors take
    the lowest free slots, so the order of releases between two calls of `acquire` does not matter.

    Args:
        num_slots: Size of the pool, `ZERO_SLOT` included.
        hidden_size: Width of a vector.
        dtype: The model's.
    """

    def __init__(self, num_slots: int, hidden_size: int, dtype: StoredType) -> None:
        self._hidden_size = hidden_size
        self._storage = STORAGE[dtype]
        self._users = np.zeros(num_slots, dtype=np.int64)
        self._users[ZERO_SLOT] = 1
        self._slot_of: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}
        self._dirty: set[int] = set()

    @property
    def capacity(self) -> int:
        """Distinct vectors that fit, the zero vector aside."""
        return len(self._users) - 1

    @property
    def num_used(self) -> int:
        """Slots in use, `ZERO_SLOT` aside."""
        return len(self._content)

    def contents_of(self, vectors: Rows) -> list[bytes]:
        """The vectors as the pool compares them; a zero vector is ``b""``.

        Args:
            vectors: ``[n, hidden]`` in the pool's dtype.
        """
        if vectors.shape[1:] != (self._hidden_size,) or vectors.dtype != self._storage:
            raise AssertionError(
                f"vectors: {vectors.dtype} {vectors.shape}, expected {self._storage} (n, {self._hidden_size})"
            )
        return [b"" if zero else row.tobytes() for row, zero in zip(vectors, is_zero(vectors).tolist(), strict=True)]

    def fits(self, contents: Sequence[bytes]) -> bool:
        """Whether `acquire` would succeed."""
        return len(self._fresh(contents)) <= self.capacity - self.num_used

    def acquire(self, contents: Sequence[bytes]) -> Int32Array:
        """Become a user of a slot for each of `contents`: int32 ``[n]``; `ZERO_SLOT` for the zero vector.

        Raises:
            AssertionError: If they do not all fit; nothing has changed then. Admission keeps that from happening.
        """
        fresh = self._fresh(contents)
        free = np.flatnonzero(self._users == 0)[: len(fresh)].tolist()
        if len(free) < len(fresh):
            raise AssertionError(
                f"{len(fresh)} new vectors do not fit the pool: {self.num_used} of {self.capacity} slots are in use"
            )
        for slot, content in zip(free, fresh, strict=True):
            self._slot_of[content] = slot
            self._content[slot] = content
            self._dirty.add(slot)
        slots = np.array([self._slot_of[c] if c else ZERO_SLOT for c in contents], dtype=np.int32)
        np.add.at(self._users, slots[slots != ZERO_SLOT], 1)
        return slots

    def release(self, slots: Int32Array) -> None:
        """Stop being a user of `slots`, as `acquire` returned them."""
        held = slots[slots != ZERO_SLOT]
        np.subtract.at(self._users, held, 1)
        for slot in np.unique(held[self._users[held] <= 0]).tolist():
            if self._users[slot] < 0:
                raise AssertionError(f"slot {slot} was released more often than acquired")
            del self._slot_of[self._content.pop(slot)]
            self._dirty.discard(slot)

    def take_writes(self) -> SlotWrites | None:
        """What the device does not have yet; it counts as written from here on. None if it has everything."""
        if not self._dirty:
            return None
        slots, self._dirty = sorted(self._dirty), set()
        joined = b"".join([self._content[slot] for slot in slots])
        vectors = np.frombuffer(joined, dtype=self._storage).reshape(len(slots), self._hidden_size)
        return SlotWrites(np.array(slots, dtype=np.int64), vectors)

    def checksum(self) -> int:
        """The state as a number that is the same in every process: to compare ranks.

        It reads every vector in use, about a millisecond for 1000 of them: for debugging, not for each step.
        """
        total = zlib.crc32(self._users.tobytes())
        for slot in sorted(self._content):
            total = zlib.crc32(self._content[slot], total)
        return total

    def _fresh(self, contents: Sequence[bytes]) -> list[bytes]:
        """Those that no slot holds, each once, in order."""
        return list(dict.fromkeys(content for content in contents if content and content not in self._slot_of))
