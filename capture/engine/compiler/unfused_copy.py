"""Copies of values, compiled for a CPU without changing the code that makes and reads the values.

A scatter into the staging ring takes other loops than the norm that reads the same value. Fused with it, it changes
which of the norm's reductions read the value as stored, rounded, and which read it from a register, not yet rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headgate.capture.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from torch._inductor.ir import TensorBox


@torch.library.custom_op("headgate::copy_apart", mutates_args=())
def copy_apart(value: Tensor) -> Tensor:
    """A contiguous copy of `value`; `register_copy_apart` must have been called before inductor meets it."""
    return value.clone(memory_format=torch.contiguous_format)


@copy_apart.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def register_copy_apart() -> None:
    """Let inductor, in this process, compute the value once more for `copy_apart`, and not look into that.

    So the value itself need not be stored, and nothing that reads the copy is fused with what reads the value.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    with inductor_for("capture"):
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import fallback_handler, register_lowering

    copy = torch.ops.headgate.copy_apart.default
    call: Callable[[TensorBox], TensorBox] = fallback_handler(copy, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    @register_lowering(copy, type_promotion_kind=None)
    def lower(value: TensorBox) -> TensorBox:
        again = Pointwise.create(
            device=value.get_device(), dtype=value.get_dtype(), inner_fn=value.make_loader(), ranges=value.get_size()
        )
        return call(again)


@contextmanager
def inductor_for(part: str) -> Iterator[None]:
    """Refuse an inductor that lacks what is imported here for `part`: it is torch's own, and may change.

    Raises:
        UnsupportedError: Naming the torch that works, and the way around.
    """
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            f"{part}: compiled, it needs the inductor of torch 2.11 to 2.13, found torch {torch.__version__} "
            f"({error}); run with --enforce-eager"
        ) from error
