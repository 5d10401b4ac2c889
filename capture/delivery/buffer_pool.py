"""Pageable host memory for rows that is used again: fresh memory costs several times the copy into it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.config import MIB

MIN_BYTES = MIB
"""Least size that is kept: the system's allocator reuses smaller memory by itself."""

Slab = npt.NDArray[np.uint8]


class RowPool:
    """Makes tensors and arrays whose memory comes back here when the last reference to it, or to a view of it, is gone.

    `empty` and `empty_bytes` are for one thread. Memory comes back on whichever thread drops the last reference, maybe
    inside the garbage collector, so that path takes no lock.

    Args:
        keep_bytes: Memory that is kept while nobody uses it.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: dict[int, deque[Slab]] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor on the CPU, like ``torch.empty``."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(*shape, dtype=dtype)
        return torch.from_numpy(self._take(num_bytes)).view(dtype).view(*shape)

    def empty_bytes(self, shape: Sequence[int]) -> Slab:
        """Make an uninitialised array of bytes, like ``np.empty``."""
        num_bytes = prod(shape)
        return np.empty(shape, np.uint8) if num_bytes < MIN_BYTES else self._take(num_bytes).reshape(shape)

    def _take(self, num_bytes: int) -> Slab:
        size = _size_class(num_bytes)
        free = self._free.setdefault(size, deque())
        try:
            slab = free.pop()
        except IndexError:
            self._trim()
            slab = np.empty(size, dtype=np.uint8)
        held = slab.view(_SlabView)
        weakref.finalize(held, free.append, slab).atexit = False
        return held[:num_bytes].view(np.ndarray)  # whose base is `held`, and not the slab

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses now."""
        return sum(size * len(free) for size, free in self._free.items())

    def _trim(self) -> None:
        """Give memory of other sizes back to the system, so that a change of load does not pile it up."""
        while self.free_bytes > self._keep_bytes:
            largest = max(size for size, free in self._free.items() if free)
            self._free[largest].popleft()


class _SlabView(np.ndarray):
    """A view of a slab that can be referred to weakly; tensors and views made of it hold it."""


def _size_class(num_bytes: int) -> int:
    """Round `num_bytes` up to a quarter of a power of two."""
    step = 1 << (num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
