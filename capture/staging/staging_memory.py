"""Host memory that device copies go to, as the staging ring needs it.

Shapes: A rows of the arena, D hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headgate.capture.staging.device_copy import Copied, DeviceCopier
from headgate.capture.staging.host_rows import Arena, Lease


class StagingMemory(Protocol):
    """Memory, the bookkeeping of it, and how its reader learns that a copy has arrived.

    Attributes:
        rows_AD: ``[A, D]``, pinned where a GPU copies into it.
    """

    rows_AD: Tensor

    @property
    def arena(self) -> Arena:
        """Leases rows of it."""
        ...

    def announce(self, lease: Lease, copied: Copied, copier: DeviceCopier) -> Copied:
        """Say that the copies into `lease` were all enqueued; return what to wait for."""
        ...

    def prove(self, copier: DeviceCopier) -> None:
        """Refuse if copies do not arrive; before anything is leased."""
        ...

    def close(self) -> None:
        """Give back what must not stay behind; nothing is copied any more, and nobody else is told of rows."""
        ...


class PinnedMemory:
    """Memory of this process."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, *, is_pinned: bool) -> None:
        self.arena = Arena(num_rows)
        self.rows_AD = torch.empty(self.arena.num_rows, hidden_size, dtype=dtype, pin_memory=is_pinned)

    def announce(self, lease: Lease, copied: Copied, copier: DeviceCopier) -> Copied:
        """See `StagingMemory.announce`: an event stands behind the copies."""
        return copied

    def prove(self, copier: DeviceCopier) -> None:
        """See `StagingMemory.prove`: an event tells."""

    def close(self) -> None:
        """See `StagingMemory.close`; it goes with the last reference to it."""
