"""Pageable host memory for rows that is used again: fresh memory costs several times the copy into it."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.config import MIB

MIN_BYTES = MIB
"""Least size that is kept: the system's allocator reuses smaller memory by itself."""
MOST_TIMES = 4
"""Memory is used again for what takes at least this part of it."""

Slab = npt.NDArray[np.uint8]


class _Free(NamedTuple):
    """A slab that nobody uses; `turn` counts up from one that came back to the next."""

    size: int
    turn: int
    slab: Slab


class RowPool:
    """Makes tensors and arrays whose memory comes back here when the last reference to it, or to a view of it, is gone.

    Rows come in packets of any size, so memory is used again for smaller ones, too.

    All calls are for one thread. Memory comes back on whichever thread drops the last reference, maybe inside the
    garbage collector, so that path takes no lock.

    Args:
        keep_bytes: Memory that is kept while nobody uses it.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._returned: deque[Slab] = deque()
        self._free: list[_Free] = []
        """Sorted by size."""
        self._turn = 0

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
        slab = self._find(num_bytes)
        if slab is None:
            self._trim()
            slab = np.empty(_size_class(num_bytes), dtype=np.uint8)
        held = slab.view(_SlabView)
        weakref.finalize(held, self._returned.append, slab).atexit = False
        return held[:num_bytes].view(np.ndarray)  # whose base is `held`, and not the slab

    def _find(self, num_bytes: int) -> Slab | None:
        """Take the smallest slab that nobody uses and that is large enough, unless it is much too large."""
        self._take_back()
        at = bisect_left(self._free, num_bytes, key=lambda each: each.size)
        if at == len(self._free) or self._free[at].size > MOST_TIMES * num_bytes:
            return None
        return self._free.pop(at).slab

    def _take_back(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._turn += 1
            insort(self._free, _Free(slab.nbytes, self._turn, slab))

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody uses now. For the thread that takes memory."""
        self._take_back()
        return sum(each.size for each in self._free)

    def _trim(self) -> None:
        """Give the memory that was not used for longest back to the system: a change of load must not pile it up."""
        num_over = self.free_bytes - self._keep_bytes
        for each in sorted(self._free, key=lambda each: each.turn):
            if num_over <= 0:
                break
            num_over -= each.size
            self._free.remove(each)


class _SlabView(np.ndarray):
    """A view of a slab that can be referred to weakly; tensors and views made of it hold it."""


def _size_class(num_bytes: int) -> int:
    """Round `num_bytes` up to a quarter of a power of two."""
    step = 1 << (num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
