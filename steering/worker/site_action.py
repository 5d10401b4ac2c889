"""The action that steers: adds each batch row's vector to the stream at a site, in the way that suits the compiler.

Unsteered rows point to the zero vector, so the traced code is the same for every batch. The code around the
addition has to compute the same bits that it computes without it. Two decisions of inductor would change them:

* Inductor inlines a value into the code that reads it, and stores it once it has accumulated enough reads. On a CPU,
  the place where the stream is stored decides how the following norm adds up its squares: 16 wide over the stored
  float32, or in 32 over the bfloat16 that it loads otherwise. A vector read at each site would move the places of
  storage (30 layers of SmolLM2: 15 of 61 norms), and by that the last bit of norms, also where the vector is zero.
* On a GPU, the number of values that a norm's kernel loads decides how a row is cut into blocks, and so the order of
  additions (at 10 loads and reductions the blocks are halved), and which blocks are tried.

So neither the read of a vector is counted nor the read of the slot that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from headgate.capture.engine.compiler.inductor import Inductor
from headgate.capture.engine.compiler.inductor_heuristics import exclude_buffers, install_exclusion
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts
from headgate.capture.engine.model.forward_wrappers import tensor_prefix
from headgate.capture.engine.site_action import SiteValue
from headgate.steering.worker.rows.vector_pool import ZERO_SLOT

if TYPE_CHECKING:
    from headgate.capture.engine.compiler.inductor import TensorBox

POOL = "pool"
SLOTS = "pool_slots"
RUN_COUNTS = "steering_run_counts"
_POOL, _SLOTS, _RUN_COUNTS = tensor_prefix(POOL), tensor_prefix(SLOTS), tensor_prefix(RUN_COUNTS)

Run = Callable[[nn.Module, str, SiteValue], Tensor]
"""A way to add: called with a module, its hook point and the value there, it returns the steered carry."""


def add_plain(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where the forward runs as written, and not on a GPU."""
    pool, slots = _vectors_of_rows(module, hook, site)
    return site.carry + _to_carry(pool[slots], site)


def add_traced(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile fuses gather and addition into the kernel of the following norm.

    Idle, that kernel computes the same bits as without steering.
    """
    pool, slots = getattr(module, _POOL + hook), getattr(module, _SLOTS + hook)
    # not reshaped: with sizes that are computed, inductor's cache would not find one layer's code for the next
    steered: Tensor = torch.ops.headgate.add_pooled(site.carry, pool, slots, _scale(site))
    return steered


def add_opaque(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where a fused addition would have the compiler make another kernel of the norm, also where it adds nothing.

    A norm of a branch and the norm of the following sum are one kernel (Gemma); with another value to load, its loops
    are unrolled otherwise, and products contracted otherwise: the last bit of three rows in a hundred differs.
    """
    pool, slots = getattr(module, _POOL + hook), getattr(module, _SLOTS + hook)
    steered: Tensor = torch.ops.headgate.add_unfused(site.carry, pool, slots, _scale(site))
    return steered


def add_gathered(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer where torch.compile makes C++ of the forward; idle, it computes the same bits as without steering."""
    pool, slots = _vectors_of_rows(module, hook, site)
    steered: Tensor = add_excluded(site.carry, _to_carry(gather_rows(pool, slots), site))
    return steered


def _vectors_of_rows(module: nn.Module, hook: str, site: SiteValue) -> tuple[Tensor, Tensor]:
    """Return the pool, and the slot of each batch row at the site."""
    slots = getattr(module, _SLOTS + hook)
    return getattr(module, _POOL + hook), slots[: site.carry.shape[-2]]


def _to_carry(vectors: Tensor, site: SiteValue) -> Tensor:
    """Return the vectors to add to the carry, so that the site's value moves by `vectors`."""
    return vectors if site.gain is None else vectors / site.gain


def _scale(site: SiteValue) -> float:
    """Return the factor that `_to_carry` multiplies by."""
    return 1.0 if site.gain is None else 1.0 / site.gain


def add_with_kernel(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
    """Steer in one kernel where the forward runs as written on a GPU."""
    from headgate.steering.kernels.add_rows import add_rows

    pool, slots = _vectors_of_rows(module, hook, site)
    rows = site.carry.reshape(-1, site.carry.shape[-1])
    return add_rows(rows, pool, slots, _scale(site)).view(site.carry.shape)


class Addition(NamedTuple):
    """The ways to add in one worker; see `headgate.capture.engine.contracts.worker_hooks.SiteAction`."""

    run: Run
    before_attention: Run | None = None
    unfused: Run | None = None
    run_and_keep: Run | None = None
    reapply: Run | None = None

    def counted(self) -> Addition:
        """Return the same ways, each with its runs counted; what is reapplied ran before."""
        ways = Addition(counted(self.run), *(each and counted(each) for each in self[1:]))
        return ways._replace(reapply=self.reapply)


def addition(facts: WorkerFacts) -> Addition:
    """Return the ways to add in this worker; registers their lowerings where the forward is compiled."""
    is_cuda = facts.device.type == "cuda"
    if not facts.is_compiled:
        return Addition(add_with_kernel if is_cuda else add_plain)
    if is_cuda:
        register_add_pooled()
        return Addition(add_traced, before_attention=add_traced, unfused=add_opaque)
    register_add_excluded()
    return Addition(add_gathered, before_attention=add_gathered)


def counted(run: Run) -> Run:
    """Return `run` with its runs counted on the device: one for each forward, also for each graph replay."""

    def run_and_count(module: nn.Module, hook: str, site: SiteValue) -> Tensor:
        getattr(module, _RUN_COUNTS + hook).add_(1)
        return run(module, hook, site)

    return run_and_count


@torch.library.custom_op("headgate::gather_rows", mutates_args=())
def gather_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of `pool` that `slots` name, by code that the compiler does not look into."""
    return pool[slots]


@gather_rows.register_fake
def _(pool: Tensor, slots: Tensor) -> Tensor:
    return pool.new_empty(slots.shape[0], pool.shape[1])


@torch.library.custom_op("headgate::add_excluded", mutates_args=())
def add_excluded(carry: Tensor, vectors: Tensor) -> Tensor:
    """Return ``carry + vectors``; `register_add_excluded` must have been called before inductor meets it."""
    return carry + vectors


@add_excluded.register_fake
def _(carry: Tensor, vectors: Tensor) -> Tensor:
    return torch.empty_like(carry)


@torch.library.custom_op("headgate::add_pooled", mutates_args=())
def add_pooled(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Return ``carry + scale * pool[slots]``, ``[..., num_tokens, hidden]``; `slots` may be longer.

    `ZERO_SLOT` adds nothing. `register_add_pooled` must have been called before inductor meets it.
    """
    return carry + pool[slots[: carry.shape[-2]]] * scale


@add_pooled.register_fake
def _(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)


@torch.library.custom_op("headgate::add_unfused", mutates_args=())
def add_unfused(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Return the same as `add_pooled`, by code that the compiler does not look into: a kernel of its own."""
    rows = carry.reshape(-1, carry.shape[-1])
    used = slots[: rows.shape[0]]
    if carry.device.type != "cuda":
        return (rows + pool[used] * scale).view(carry.shape)
    from headgate.steering.kernels.add_rows import add_rows

    return add_rows(rows, pool, used, scale).view(carry.shape)


@add_unfused.register_fake
def _(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)


def register_add_excluded() -> None:
    """Let inductor, in this process, fuse `add_excluded` but decide where to store values as if they were `carry`.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = Inductor("steering")
    add = inductor.lowerings[torch.ops.aten.add.Tensor]

    @inductor.register_lowering(torch.ops.headgate.add_excluded.default, type_promotion_kind=None)
    def lower(carry: TensorBox, vectors: TensorBox) -> TensorBox:
        return inductor.counted_as(carry, add(carry, vectors).make_loader())


def register_add_pooled() -> None:
    """Do the same for `add_pooled`, in kernels for a GPU, whose blocks stay as they are without it.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = Inductor("steering")
    install_exclusion("steering")
    ops = inductor.ops

    @inductor.register_lowering(torch.ops.headgate.add_pooled.default, type_promotion_kind=None)
    def lower(carry: TensorBox, pool: TensorBox, slots: TensorBox, scale: float) -> TensorBox:
        value_at, vector_at, slot_at = (one.make_loader() for one in (carry, pool, slots))
        exclude_buffers(pool, slots)

        def steered(index: Any) -> Any:
            *_, token, column = index
            slot = slot_at([token])
            row = ops.indirect_indexing(slot, pool.get_size()[0], check=False, wrap_neg=False)
            is_steered = ops.ne(slot, ops.constant(ZERO_SLOT, slots.get_dtype()))
            vector = ops.masked(is_steered, lambda: vector_at([row, column]), 0.0)  # type: ignore[arg-type]
            if scale != 1:
                vector = ops.mul(vector, ops.constant(scale, torch.float32))
            return ops.add(value_at(index), vector)

        return inductor.counted_as(carry, steered)
