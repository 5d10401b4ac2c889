"""How the addition is compiled: so that the code around it computes what it computes without the addition.

Inductor inlines a value into what reads it, and stores it once it has accumulated enough reads. On a CPU, where the
stream is stored decides how the norm behind it adds up its squares: in 16 lanes over the stored float32, in 32 over the
bfloat16 that it loads otherwise. A vector read at each site would move the places of storage (30 layers of SmolLM2: 15
of 61 norms), and by that the last bit of norms, also where the vector is zero. On a GPU, the number of values that a
norm's kernel loads decides how a row is cut into blocks, and so the order of additions (at 10 loads and reductions the
blocks are halved), and which blocks are tried. So neither is counted: not the read of a vector, not the read of the
slot that says which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headgate.capture.engine.compiler.inductor_heuristics import count_without_named, exclude_buffers
from headgate.capture.engine.compiler.unfused_copy import inductor_for
from headgate.steering.worker.slot_pool import ZERO_SLOT

if TYPE_CHECKING:
    from torch._inductor.ir import TensorBox


@torch.library.custom_op("headgate::gather_rows", mutates_args=())
def gather_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """The rows of `pool` that `slots` name, by code that the compiler does not look into."""
    return pool[slots]


@gather_rows.register_fake
def _(pool: Tensor, slots: Tensor) -> Tensor:
    return pool.new_empty(slots.shape[0], pool.shape[1])


@torch.library.custom_op("headgate::add_uncounted", mutates_args=())
def add_uncounted(carry: Tensor, vectors: Tensor) -> Tensor:
    """``carry + vectors``; `register_add_uncounted` must have been called before inductor meets it."""
    return carry + vectors


@add_uncounted.register_fake
def _(carry: Tensor, vectors: Tensor) -> Tensor:
    return torch.empty_like(carry)


@torch.library.custom_op("headgate::add_pooled", mutates_args=())
def add_pooled(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """``carry + scale * pool[slots]``, ``[..., num_tokens, hidden]``; `slots` may be longer. `ZERO_SLOT` adds nothing.

    `register_add_pooled` must have been called before inductor meets it.
    """
    return carry + pool[slots[: carry.shape[-2]]] * scale


@add_pooled.register_fake
def _(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)


@torch.library.custom_op("headgate::add_apart", mutates_args=())
def add_apart(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    """`add_pooled` by code that the compiler does not look into: a kernel of its own."""
    rows = carry.reshape(-1, carry.shape[-1])
    used = slots[: rows.shape[0]]
    if carry.device.type != "cuda":
        return (rows + pool[used] * scale).view(carry.shape)
    from headgate.steering.kernels.add_rows import add_rows

    return add_rows(rows, pool, used, scale).view(carry.shape)


@add_apart.register_fake
def _(carry: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
    return torch.empty_like(carry)


def register_add_uncounted() -> None:
    """Let inductor, in this process, fuse `add_uncounted` but decide where to store values as if it were `carry`.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = _Inductor()
    add = inductor.lowerings[torch.ops.aten.add.Tensor]

    @inductor.register_lowering(torch.ops.headgate.add_uncounted.default, type_promotion_kind=None)
    def lower(carry: TensorBox, vectors: TensorBox) -> TensorBox:
        return inductor.counted_as(carry, add(carry, vectors).make_loader())


def register_add_pooled() -> None:
    """The same for `add_pooled`, in kernels for a GPU: these are cut into blocks as they are without it, too.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = _Inductor()
    count_without_named("steering")
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
            vector = ops.masked(is_steered, lambda: vector_at([row, column]), 0.0)
            if scale != 1:
                vector = ops.mul(vector, ops.constant(scale, torch.float32))
            return ops.add(value_at(index), vector)

        return inductor.counted_as(carry, steered)


class _Inductor:
    """What is used of inductor beyond its documented interface.

    Raises:
        UnsupportedError: If this torch's inductor lacks it.
    """

    def __init__(self) -> None:
        with inductor_for("steering"):
            from torch._inductor.ir import Pointwise
            from torch._inductor.lowering import lowerings, register_lowering
            from torch._inductor.ops_handler import OpCounterCSE
            from torch._inductor.virtualized import V, ops
        self.V, self.ops, self.lowerings, self.register_lowering = V, ops, lowerings, register_lowering
        self._pointwise, self._counter = Pointwise, OpCounterCSE

    def counted_as(self, value: TensorBox, computed: Callable[[Any], Any]) -> TensorBox:
        """What `computed` gives at an index, in `value`'s shape; counted are only `value`'s reads and operations."""
        counted = value.make_loader()

        def inner(index: Any) -> Any:
            is_counting = isinstance(self.V.get_ops_handler(), self._counter)  # to decide on storage
            return counted(index) if is_counting else computed(index)

        device, dtype, ranges = value.get_device(), value.get_dtype(), value.get_size()
        return self._pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=ranges)
