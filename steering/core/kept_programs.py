"""Programs that were made before, for requests that bring the same content again; bounded by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

from headgate.steering.programs.program import Program

Made = TypeVar("Made")

MAX_BYTES = 64 << 20
"""Programs of one kind that an engine core keeps: some 400 of 16 features of a model of width 2560."""


class KeptPrograms(Generic[Made]):
    """Keeps what was made last, by what it was made of. Any thread.

    Args:
        max_bytes: Of all together.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Made, int]] = OrderedDict()
        self._lock = Lock()

    def find(self, key: Hashable) -> Made | None:
        """Return what was kept under a key; None if nothing is."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def keep(self, key: Hashable, made: Made, num_bytes: int) -> None:
        """Keep something, at the expense of what was not found for the longest time."""
        with self._lock:
            earlier = self._kept.pop(key, None)
            self._num_bytes += num_bytes - (0 if earlier is None else earlier[1])
            self._kept[key] = made, num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_bytes -= dropped

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0


def bytes_of(*programs: Program) -> int:
    """Return the bytes of programs; one that comes twice counts once."""
    each = {id(program): program for program in programs}.values()
    return sum(array.nbytes for program in each for array in (program.rows, program.codes, program.params))
