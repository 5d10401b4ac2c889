"""How numbers come to places on the device that it knows: the only write of most steps that a controller follows.

Each call into the driver costs the host 20 to 50 us once other work has pushed its code out of the processor's caches.
So there is one: a kernel that reads the numbers in the memory of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.host_memory import seen_by_gpu

NUM_BUFFERS = 16
_HALF = NUM_BUFFERS // 2


class ValueUpload(Protocol):
    """A way to write numbers to places on the device. Step thread only."""

    def write(self, places: Tensor, values: Float32Rows) -> None:
        """Write `values`, float32 ``[n]``, to `places`, int64 ``[n]`` on the device; they are the caller's again."""
        ...


class HostValues:
    """The way for a forward pass on the CPU.

    Args:
        flat: float32 ``[N]``: where they are written.
    """

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def write(self, places: Tensor, values: Float32Rows) -> None:
        self._flat.index_copy_(0, places, torch.from_numpy(values))


class Event(Protocol):
    """As far as `torch.cuda.Event` is used: it has happened when all is done that was launched before `record`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PinnedValues:
    """The way for a forward pass on a GPU, which reads the numbers in pinned memory, on the compute stream.

    A buffer must not be written as long as the GPU may still read what it had. Steps overlap by two or three, but
    nothing here relies on that: there are `NUM_BUFFERS` buffers, used in turn, and two events, one for each half of
    them. A half's event is recorded behind the kernel that reads its last buffer, so that it has happened once all
    kernels that read the half are done; before its first buffer is written again the event is waited for. Between the
    two lie as many writes as the other half has buffers, so that waiting takes no time unless the GPU is that many
    steps behind; and of two calls into the driver for each write it became two for each half.

    Args:
        flat: float32 ``[N]``, on the device: where they are written.
        pinned: float32 ``[NUM_BUFFERS, n]``: the buffers, each as large as what is written at once, at most.
        seen: The same memory, as a tensor of the device.
        events: Of the two halves.
    """

    def __init__(self, flat: Tensor, pinned: Tensor, seen: Tensor, events: Sequence[Event]) -> None:
        self._flat, self._seen, self._events = flat, seen, events
        self._hosts: list[Float32Rows] = list(pinned.numpy())
        self._sources = [(0, seen[at, :0]) for at in range(NUM_BUFFERS)]
        """Of each buffer the part that was read last, behind its size: mostly it is read again."""
        self._next = 0

    def write(self, places: Tensor, values: Float32Rows) -> None:
        at, count = self._next, len(values)
        self._next = (at + 1) % NUM_BUFFERS
        half, place = divmod(at, _HALF)
        if place == 0:
            self._events[half].synchronize()
        self._hosts[at][:count] = values
        size, source = self._sources[at]
        if size != count:
            source = self._seen[at, :count]
            self._sources[at] = count, source
        self._flat.index_copy_(0, places, source)
        if place == _HALF - 1:
            self._events[half].record()


def value_upload(flat: Tensor, num_values: int) -> ValueUpload | None:
    """Return the way to write to some places of `flat`, float32 ``[N]``, `num_values` at once at most.

    None if this torch cannot have the GPU read the memory of the host: then there is no other way than for all writes.
    """
    if flat.device.type != "cuda":
        return HostValues(flat)
    pinned = torch.empty(NUM_BUFFERS, num_values, dtype=torch.float32, pin_memory=True)
    seen = seen_by_gpu(pinned.numpy(), flat.device)
    if seen is None:
        return None
    return PinnedValues(flat, pinned, seen, [torch.cuda.Event() for _ in range(2)])  # type: ignore[no-untyped-call]
