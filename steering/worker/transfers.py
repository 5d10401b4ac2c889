"""How arrays travel between the host and the device: what a step changes comes packed, mostly as one copy, and small
results return through pinned memory that is used again.

Numbers for places that the device knows come without a copy (`ValueUpload`): they are the only write of most steps that
a controller follows. Each call into the driver costs the host 20 to 50 us once other work has pushed its code out of
the processor's caches. So there is one: a kernel that reads the numbers in the memory of the host. For the same reason,
steps allocate no pinned memory and make no event for what returns: that would cost some ten such calls.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import MIB
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS
from headgate.steering.vectors.dtypes import Float32Rows

logger = logging.getLogger("headgate")


class _PinnedArray:
    """An array as one of the GPU, whose address space has it at the same place.

    Args:
        array: Contiguous, in pinned memory.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None,
            "version": 3,
        }


def seen_by_gpu(array: np.ndarray[Any, Any], device: torch.device) -> Tensor | None:
    """Return a contiguous array in pinned memory as a tensor of a GPU, which keeps it alive.

    None, with a line in the log, if this torch or this GPU cannot have that.
    """
    try:
        seen: Tensor = torch.as_tensor(_PinnedArray(array), device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    else:
        if seen.data_ptr() == array.ctypes.data and device.index in (None, seen.device.index):
            return seen
        reason = "it copied the memory"
    logger.info("steering: torch %s cannot have the GPU use pinned memory (%s)", torch.__version__, reason)
    return None


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
    them. A half's event is recorded after the kernel that reads its last buffer, so that it has happened once all
    kernels that read the half are done; before its first buffer is written again the event is waited for. Between the
    two lie as many writes as the other half has buffers, so that waiting takes no time unless the GPU is that many
    steps late; and of two calls into the driver for each write it became two for each half.

    Args:
        flat: float32 ``[N]``, on the device: where they are written.
        pinned: float32 ``[NUM_BUFFERS, n]``: the buffers, each as large as what is written at once, at most.
        seen: The same memory, as a tensor of the device.
        events: The events of the two halves.
    """

    def __init__(self, flat: Tensor, pinned: Tensor, seen: Tensor, events: Sequence[Event]) -> None:
        self._flat, self._seen, self._events = flat, seen, events
        self._hosts: list[Float32Rows] = list(pinned.numpy())
        self._sources = [(0, seen[at, :0]) for at in range(NUM_BUFFERS)]
        """The part of each buffer that was read last, after its size: mostly it is read again."""
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


UPLOAD_BYTES = 4 * MIB
NUM_UPLOADS = 4
"""Copies that may be under way before the step thread waits for the oldest."""
ALIGNMENT = 16
ENTRIES = UPLOAD_BYTES // (8 + 4 * NUM_CODES + 4 * NUM_PARAMS + 3 * ALIGNMENT)
"""Entries that are sent together, at most."""


class Upload(Protocol):
    """A way to bring arrays to the device. Step thread only."""

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Return `arrays` on the device, each in its own dtype and shape; no larger than the limit together."""
        ...


class HostUpload:
    """The way for a forward pass on the CPU, whose memory already holds the arrays."""

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(np.array(array)) for array in arrays]


class CudaUpload:
    """The way for a forward pass on a GPU: through pinned memory, on the compute stream, without waiting for the GPU.

    Arrays that are sent together travel in one copy: a copy costs the host some 15 us whatever its size.

    Args:
        device: The GPU.
        num_bytes: Upper limit of what is sent together.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_UPLOADS)]
        self._events = [torch.cuda.Event() for _ in range(NUM_UPLOADS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        at, self._next = self._next, (self._next + 1) % NUM_UPLOADS
        self._events[at].synchronize()  # returns at once unless the GPU is that many copies late
        pinned = self._pinned[at]
        size = pack(arrays, pinned.numpy())
        sent = pinned[:size].to(self._device, non_blocking=True)
        self._events[at].record()
        return unpack(sent, arrays)


def packed_size(arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Return the bytes that `pack` takes."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Iterable[npt.NDArray[Any]], buffer: npt.NDArray[np.uint8]) -> int:
    """Copy arrays one after the other into a buffer, aligned; return the bytes that they take.

    Raises:
        AssertionError: If they do not fit.
    """
    start = 0
    for array in arrays:
        end = start + array.nbytes
        if end > len(buffer):
            raise AssertionError(f"arrays of more than {end} bytes for a buffer of {len(buffer)}")
        buffer[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)
    return start


def unpack(sent: Tensor, arrays: Iterable[npt.NDArray[Any]]) -> list[Tensor]:
    """Return views of packed bytes, uint8 ``[n]``, in the dtypes and shapes of the arrays that `pack` was given."""
    found, start = [], 0
    for array in arrays:
        one = sent[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype])
        found.append(one.view(array.shape))
        start += _padded(array.nbytes)
    return found


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_TORCH_TYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "uint16", "float16", "float32")}


class Write(NamedTuple):
    """A change of the tables: what is done with arrays once they are on the device."""

    apply: Callable[..., object]
    arrays: tuple[npt.NDArray[Any], ...]


def inference_mode() -> AbstractContextManager[object]:
    """Return a context in which tensors may be written that were made in inference mode; nothing if it is on."""
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()


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
