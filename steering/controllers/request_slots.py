"""Numbers of running requests in arrays, for controllers that act on all requests of a step at once. Numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_AT_FIRST = 64


class RequestSlots:
    """A slot for each request, and arrays with a number in each.

    Args:
        initial: Names of the arrays, with the number of a request that begins.

    Attributes:
        version: Another number whenever a request has got a slot, or lost it.
    """

    def __init__(self, **initial: float) -> None:
        self._initial = initial
        self._arrays = {name: np.full(_AT_FIRST, value) for name, value in initial.items()}
        self._slots: dict[str, int] = {}
        self._free = list(range(_AT_FIRST - 1, -1, -1))
        self.version = 0

    def __getitem__(self, name: str) -> npt.NDArray[np.float64]:
        """Return an array, float64 by slot."""
        return self._arrays[name]

    def add(self, request: str) -> None:
        """Give a request a slot."""
        if not self._free:
            size = len(next(iter(self._arrays.values())))
            self._free = list(range(2 * size - 1, size - 1, -1))
            for name, value in self._initial.items():
                self._arrays[name] = np.concatenate([self._arrays[name], np.full(size, value)])
        slot = self._slots[request] = self._free.pop()
        for name, value in self._initial.items():
            self._arrays[name][slot] = value
        self.version += 1

    def remove(self, request: str) -> None:
        """Take its slot back, if it has one."""
        if (slot := self._slots.pop(request, None)) is not None:
            self._free.append(slot)
            self.version += 1

    def all(self) -> npt.NDArray[np.int64]:
        """Return the slots of all requests, int64."""
        return np.array(list(self._slots.values()), np.int64)

    def of(self, requests: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """Return the slot of each request, int64 ``[n]``; -1 for those without."""
        return np.array([self._slots.get(each, -1) for each in requests], np.int64)
