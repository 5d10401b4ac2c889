"""The steering tables in the memory of the forward pass, and the copies into them.

Shapes: S sites of this worker, P slots of the pool, R rows of the map, T batch rows, D hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.schema.config import MIB
from headgate.steering.worker.row_table import StepRows, TableWrites
from headgate.steering.worker.vector_pool import SlotWrites

UPLOAD_BYTES = 4 * MIB
NUM_UPLOADS = 4
"""Copies that may be under way before the step thread waits for the oldest."""


class Upload(Protocol):
    """A way to bring arrays to the device. Step thread only."""

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        """Return `array` on the device, in its own dtype; valid until the next call that sends as much."""
        ...


class HostUpload:
    """The way for a forward pass on the CPU, whose memory already holds the array."""

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array))


class CudaUpload:
    """The way for a forward pass on a GPU: through pinned memory, on the compute stream, without waiting for the GPU.

    Args:
        device: The GPU.
        num_bytes: Upper limit of one array.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_UPLOADS)]
        self._events = [torch.cuda.Event() for _ in range(NUM_UPLOADS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, array: npt.NDArray[Any]) -> Tensor:
        at, self._next = self._next, (self._next + 1) % NUM_UPLOADS
        self._events[at].synchronize()  # returns at once unless the GPU is as many copies behind
        pinned = self._pinned[at][: array.nbytes]
        pinned.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = pinned.to(self._device, non_blocking=True)
        self._events[at].record()
        return sent.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)


class DeviceTables:
    """Static memory that the traced forward reads; nothing in it moves. Step thread only.

    Args:
        num_sites: S.
        num_slots: P.
        num_rows: R.
        max_tokens: T, the upper limit.
        hidden_size: D.
        dtype: The model's.
        device: Where the forward runs.

    Attributes:
        pool: ``[P, D]``: the vectors; slot 0 stays zero.
        slots: int32 ``[S, T]``: slot of each batch row at each site, resolved once a step.
    """

    def __init__(
        self,
        *,
        num_sites: int,
        num_slots: int,
        num_rows: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pool = torch.zeros(num_slots, hidden_size, dtype=dtype, device=device)
        self.slots = torch.zeros(num_sites, max_tokens, dtype=torch.int32, device=device)
        self._map = torch.zeros(num_sites, num_rows, dtype=torch.int32, device=device)
        self._rows = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._extent = 0
        row_bytes = hidden_size * dtype.itemsize
        largest = max(UPLOAD_BYTES, row_bytes, 4 * max_tokens, 8 * num_rows, 4 * num_sites * num_rows)
        self._upload: Upload = CudaUpload(device, largest) if device.type == "cuda" else HostUpload()
        self._vectors_at_once = largest // row_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that all tables take."""
        return sum(tensor.nbytes for tensor in (self.pool, self.slots, self._map, self._rows))

    def update(self, writes: TableWrites | None, step: StepRows) -> None:
        """Bring pool and map up to date and resolve the slots of a step, before its forward.

        Unchanged tables are left alone: while a batch decodes, this costs two comparisons.
        """
        count = step.num_changed
        if count:
            self._extent = count
            self._rows[:count].copy_(self._upload.send(step.rows[:count]))
        if writes is not None:
            if writes.slots is not None:
                self._write_slots(writes.slots)
            if len(writes.rows):
                self._write_columns(writes)
                count = self._extent
        if count:
            self.slots[:, :count] = self._map.index_select(1, self._rows[:count])

    def _write_columns(self, writes: TableWrites) -> None:
        rows = self._upload.send(writes.rows)
        self._map.index_copy_(1, rows, self._upload.send(writes.columns))

    def _write_slots(self, writes: SlotWrites) -> None:
        for start in range(0, len(writes.slots), self._vectors_at_once):
            chunk = slice(start, start + self._vectors_at_once)
            vectors = self._upload.send(writes.vectors[chunk])
            self.pool.index_copy_(0, self._upload.send(writes.slots[chunk]), vectors.view(self.pool.dtype))
