"""Small copies to the host and back through pinned memory, which is used again on the way to the host.

Pinned memory and an event for each step would cost the step thread some ten calls into the driver, whose code other
work has pushed out of the processor's caches by then.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.steering.vectors.dtypes import Float32Rows

_MAX_KEPT = 8
"""Buffers of each size that wait to be used again; steps overlap by two or three."""
_MAX_KEPT_NUMBERS = 1 << 18
"""Numbers in the largest buffer that is kept: one for a prompt's rows comes seldom."""


def sent(index: Int64Array, device: torch.device) -> Tensor:
    """Return an index on a device. From memory that is not pinned, the copy would wait for all that was launched."""
    if device.type != "cuda":
        return torch.from_numpy(index)
    return torch.from_numpy(index).pin_memory().to(device, non_blocking=True)


class PinnedCopies:
    """Buffers in pinned memory, each with an event. One thread starts copies, any thread takes them."""

    def __init__(self) -> None:
        self._free: dict[int, deque[_PinnedBuffer]] = {}

    def start(self, source: Tensor) -> PinnedCopy:
        """Start to copy float32 `source`, in the memory of a GPU, on the current stream."""
        size = 1 << max(source.numel() - 1, 0).bit_length()
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = deque(maxlen=_MAX_KEPT if size <= _MAX_KEPT_NUMBERS else 0)
        try:
            buffer = free.popleft()
        except IndexError:
            buffer = _PinnedBuffer(size)
        view = buffer.view(source)
        view.copy_(source, non_blocking=True)
        buffer.done.record()
        return PinnedCopy(buffer, view, free)


class _PinnedBuffer:
    """Pinned memory for `size` numbers."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.float32, pin_memory=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._view = self._memory[:0]

    def view(self, source: Tensor) -> Tensor:
        """Return the memory in the shape of `source`; mostly that is the shape of the last one."""
        if self._view.shape != source.shape:
            self._view = self._memory[: source.numel()].view(source.shape)
        return self._view


class PinnedCopy:
    """A copy that was started."""

    def __init__(self, buffer: _PinnedBuffer, view: Tensor, free: deque[_PinnedBuffer]) -> None:
        self._buffer = buffer
        self._view = view
        self._free = free

    @property
    def is_there(self) -> bool:
        """Whether `take` waits for nothing."""
        return bool(self._buffer.done.query())  # type: ignore[no-untyped-call]

    def take(self) -> Float32Rows:
        """Return the numbers, which are the caller's, and give the buffer back. To be called once; waits for them."""
        self._buffer.done.synchronize()
        found: Float32Rows = self._view.numpy().copy()
        self._free.append(self._buffer)
        return found
