"""How the addition is compiled for a CPU: so that the code around it computes what it computes without the addition.

Inductor inlines a value into what reads it, and stores it once it has accumulated enough reads. Where the stream is
stored decides how the norm behind it adds up its squares: in 16 lanes over the stored float32, in 32 over the bfloat16
that it loads otherwise. A vector read at each site would move the places of storage (30 layers of SmolLM2: 15 of 61
norms), and by that the last bit of norms, also where the vector is zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headgate.capture.engine.apart import inductor_for

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


def register_add_uncounted() -> None:
    """Let inductor, in this process, fuse `add_uncounted` but decide where to store values as if it were `carry`.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    with inductor_for("steering"):
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import lowerings, register_lowering
        from torch._inductor.ops_handler import OpCounterCSE
        from torch._inductor.virtualized import V

    add = lowerings[torch.ops.aten.add.Tensor]

    @register_lowering(torch.ops.headgate.add_uncounted.default, type_promotion_kind=None)
    def lower(carry: TensorBox, vectors: TensorBox) -> TensorBox:
        counted, computed = carry.make_loader(), add(carry, vectors).make_loader()

        def inner(index: Any) -> Any:
            is_counting = isinstance(V.get_ops_handler(), OpCounterCSE)  # of reads and operations, to decide on storage
            return counted(index) if is_counting else computed(index)

        return Pointwise.create(
            device=carry.get_device(), dtype=carry.get_dtype(), inner_fn=inner, ranges=carry.get_size()
        )
