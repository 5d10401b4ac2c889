"""The action that steers: adds each batch row's vector to the stream at a site.

Rows that nobody steers point to the zero vector, so the traced code is the same for every batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headgate.capture.engine.graph import tensor_attribute
from headgate.capture.engine.seam import SiteValue, WorkerFacts

POOL = "pool"
SLOTS = "pool_slots"
FIRES = "steering_fires"

Run = Callable[[nn.Module, str, SiteValue], Tensor]


def add_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile fuses gather and addition into the kernel of the following norm."""
    pool, slots = _vectors_of_rows(module, hook, site)
    return _added(site, pool[slots])


@torch.library.custom_op("headgate::gather_rows", mutates_args=())
def gather_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """The rows of `pool` that `slots` name, by code that the compiler does not look into."""
    return pool[slots]


@gather_rows.register_fake
def _(pool: Tensor, slots: Tensor) -> Tensor:
    return pool.new_empty(slots.shape[0], pool.shape[1])


def add_gathered(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile makes C++ of the forward: the gather is not traced.

    With a traced one, that C++ rounds a bfloat16 forward differently from stock's although nothing is added. With
    this one, four layers of SmolLM2 give stock's logprobs bit for bit; all thirty still do not, see the README.
    """
    pool, slots = _vectors_of_rows(module, hook, site)
    return _added(site, gather_rows(pool, slots))


def _vectors_of_rows(module: nn.Module, hook: str, site: SiteValue) -> tuple[Tensor, Tensor]:
    """The pool, and the slot of each batch row at the site."""
    slots = getattr(module, tensor_attribute(SLOTS, hook))
    return getattr(module, tensor_attribute(POOL, hook)), slots[: site.carry.shape[-2]]


def _added(site: SiteValue, vectors: Tensor) -> Tensor:
    return site.carry + (vectors if site.gain is None else vectors / site.gain)


def add_with_kernel(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer in one kernel where the forward runs as written on a GPU."""
    from headgate.steering.kernels.add_rows import add_rows

    slots = getattr(module, tensor_attribute(SLOTS, hook))
    rows = site.carry.reshape(-1, site.carry.shape[-1])
    pool = getattr(module, tensor_attribute(POOL, hook))
    scale = 1.0 if site.gain is None else 1.0 / site.gain
    return add_rows(rows, pool, slots[: rows.shape[0]], scale).view(site.carry.shape)


def add_action(facts: WorkerFacts) -> Run:
    """The variant for this worker."""
    if facts.device.type == "cuda":
        return add_traced if facts.is_compiled else add_with_kernel
    return add_gathered if facts.is_compiled and facts.device.type == "cpu" else add_traced


def counted(run: Run) -> Run:
    """`run`, and count on the device that it ran: one for each forward, also for each graph replay."""

    def run_and_count(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        getattr(module, tensor_attribute(FIRES, hook)).add_(1)
        return run(module, hook, site)

    return run_and_count
