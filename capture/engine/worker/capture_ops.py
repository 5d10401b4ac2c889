"""The actions that capture: each scatters the value at a site into the staging ring.

Rows that nobody wants go to the ring's trash rows, so the traced code is the same for every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headgate.capture.engine.compiler.unfused_copy import unfused_copy
from headgate.capture.engine.contracts.worker_hooks import SiteValue
from headgate.capture.engine.model.forward_wrappers import tensor_prefix
from headgate.capture.staging.ring import NUM_TRASH_ROWS

ROWS = "rows"
SLOTS = "slots"
RUN_COUNTS = "run_counts"
_ROWS, _SLOTS, _RUN_COUNTS = tensor_prefix(ROWS), tensor_prefix(SLOTS), tensor_prefix(RUN_COUNTS)


def stored_value(site: SiteValue) -> Tensor:
    """Return the site's value, ``[num_tokens, hidden]``, rounded as the norm that consumes it rounds it.

    The sum is taken in fp32 and rounded once to the stream's dtype.
    """
    value = site.value
    if site.addend is not None:
        value = (value.float() + site.addend.float()).to(value.dtype)
    return value if value.ndim == 2 else value.reshape(-1, value.shape[-1])


def capture_plain(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where the forward runs as written, and not on a GPU."""
    _scatter(module, hook, stored_value(site))
    return site.carry


def capture_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where torch.compile fuses the sum and the scatter into the kernel of the following norm.

    That kernel is cut into blocks as it is without us.
    """
    rows, value = getattr(module, _ROWS + hook), stored_value(site)
    slots = torch.ops.headgate.excluded(getattr(module, _SLOTS + hook), rows)
    rows.index_put_((slots[: value.shape[0]],), value)
    return site.carry


def capture_unfused(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture where torch.compile makes C++ of the forward: that computes what it does without us, bit for bit."""
    _scatter(module, hook, unfused_copy(stored_value(site)))
    return site.carry


def _scatter(module: nn.Module, hook: str, value: Tensor) -> None:
    """Write each row of `value`, ``[num_tokens, hidden]``, to its slot of the site's ring."""
    rows = getattr(module, _ROWS + hook)
    slots = getattr(module, _SLOTS + hook)
    rows.index_put_((slots[: value.shape[0]],), value)


def capture_with_kernel(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Capture in one kernel where the forward runs as written on a GPU; only wanted rows are read."""
    from headgate.capture.kernels.scatter_rows import scatter_rows

    value = site.value.reshape(-1, site.value.shape[-1])
    addend = None if site.addend is None else site.addend.reshape(-1, value.shape[-1])
    rows = getattr(module, _ROWS + hook)
    slots = getattr(module, _SLOTS + hook)
    scatter_rows(value, addend, slots[: value.shape[0]], rows, num_trash_rows=NUM_TRASH_ROWS)
    return site.carry


def count_run(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Count on the device that the site ran: one for each forward, also for each graph replay."""
    getattr(module, _RUN_COUNTS + hook).add_(1)
    return site.carry
