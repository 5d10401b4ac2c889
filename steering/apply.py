"""The action that steers: adds each batch row's vector to the stream at a site.

Rows that nobody steers point to the zero vector, so the traced code is the same for every batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headgate.capture.engine.graph import tensor_prefix
from headgate.capture.engine.seam import SiteValue, WorkerFacts
from headgate.steering.lowering import (
    add_uncounted,
    gather_rows,
    register_add_pooled,
    register_add_uncounted,
)

POOL = "pool"
SLOTS = "pool_slots"
FIRES = "steering_fires"
_POOL, _SLOTS, _FIRES = tensor_prefix(POOL), tensor_prefix(SLOTS), tensor_prefix(FIRES)

Run = Callable[[nn.Module, str, SiteValue], Tensor]


def add_plain(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where the forward runs as written, and not on a GPU."""
    pool, slots = _vectors_of_rows(module, hook, site)
    return site.carry + _fit(pool[slots], site)


def add_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile fuses gather and addition into the kernel of the following norm.

    Idle, that kernel computes what it does without us.
    """
    pool, slots = getattr(module, _POOL + hook), getattr(module, _SLOTS + hook)
    # not reshaped: with sizes that are computed, inductor's cache would not find one layer's code for the next
    steered: Tensor = torch.ops.headgate.add_pooled(
        site.carry, pool, slots, 1.0 if site.gain is None else 1.0 / site.gain
    )
    return steered


def add_gathered(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile makes C++ of the forward: idle, that too computes what it does without us."""
    pool, slots = _vectors_of_rows(module, hook, site)
    steered: Tensor = add_uncounted(site.carry, _fit(gather_rows(pool, slots), site))
    return steered


def _vectors_of_rows(module: nn.Module, hook: str, site: SiteValue) -> tuple[Tensor, Tensor]:
    """The pool, and the slot of each batch row at the site."""
    slots = getattr(module, _SLOTS + hook)
    return getattr(module, _POOL + hook), slots[: site.carry.shape[-2]]


def _fit(vectors: Tensor, site: SiteValue) -> Tensor:
    """What to add to the carry, so that the site's value moves by `vectors`."""
    return vectors if site.gain is None else vectors / site.gain


def add_with_kernel(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer in one kernel where the forward runs as written on a GPU."""
    from headgate.steering.kernels.add_rows import add_rows

    pool, slots = _vectors_of_rows(module, hook, site)
    rows = site.carry.reshape(-1, site.carry.shape[-1])
    scale = 1.0 if site.gain is None else 1.0 / site.gain
    return add_rows(rows, pool, slots, scale).view(site.carry.shape)


def add_action(facts: WorkerFacts) -> Run:
    """The variant for this worker."""
    if facts.is_compiled:
        is_cpu = facts.device.type == "cpu"
        register_add_uncounted() if is_cpu else register_add_pooled()
        return add_gathered if is_cpu else add_traced
    return add_with_kernel if facts.device.type == "cuda" else add_plain


def counted(run: Run) -> Run:
    """`run`, and count on the device that it ran: one for each forward, also for each graph replay."""

    def run_and_count(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        getattr(module, _FIRES + hook).add_(1)
        return run(module, hook, site)

    return run_and_count
