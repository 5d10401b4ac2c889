"""The action that steers: adds each batch row's vector to the stream at a site.

Rows that nobody steers point to the zero vector, so the traced code is the same for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headgate.capture.engine.contracts.worker_hooks import SiteValue, WorkerFacts
from headgate.capture.engine.model.forward_wrappers import tensor_prefix
from headgate.steering.worker.lowering import add_uncounted, gather_rows, register_add_pooled, register_add_uncounted

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


def add_opaque(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where a fused addition would have the compiler make another kernel of the norm, also where it adds nothing.

    A norm of a branch and the norm of the sum behind it are one kernel (Gemma); with another value to load, its loops
    are unrolled otherwise, and products contracted otherwise: the last bit of three rows in a hundred.
    """
    pool, slots = getattr(module, _POOL + hook), getattr(module, _SLOTS + hook)
    steered: Tensor = torch.ops.headgate.add_apart(
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


class Addition(NamedTuple):
    """The ways to add in one worker: see `SiteAction`."""

    run: Run
    ahead: Run | None = None
    apart: Run | None = None

    def counted(self) -> Addition:
        """The same, each counted."""
        return Addition(counted(self.run), *(each and counted(each) for each in self[1:]))


def addition(facts: WorkerFacts) -> Addition:
    """The ways for this worker."""
    is_cuda = facts.device.type == "cuda"
    if not facts.is_compiled:
        return Addition(add_with_kernel if is_cuda else add_plain)
    if is_cuda:
        register_add_pooled()
        return Addition(add_traced, ahead=add_traced, apart=add_opaque)
    register_add_uncounted()
    return Addition(add_gathered, ahead=add_gathered)


def counted(run: Run) -> Run:
    """`run`, and count on the device that it ran: one for each forward, also for each graph replay."""

    def run_and_count(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        getattr(module, _FIRES + hook).add_(1)
        return run(module, hook, site)

    return run_and_count
