"""How arrays come to the device: packed, so that all that a step changes is mostly one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.config import MIB
from headgate.steering.programs.codes import NUM_CODES, NUM_PARAMS

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
        self._events[at].synchronize()  # returns at once unless the GPU is as many copies behind
        pinned = self._pinned[at]
        size = pack(arrays, pinned.numpy())
        sent = pinned[:size].to(self._device, non_blocking=True)
        self._events[at].record()
        return unpack(sent, arrays)


def packed_size(arrays: Iterable[npt.NDArray[Any]]) -> int:
    """Return the bytes that `pack` takes."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Iterable[npt.NDArray[Any]], buffer: npt.NDArray[np.uint8]) -> int:
    """Copy arrays one behind the other into a buffer, aligned; return the bytes that they take.

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
