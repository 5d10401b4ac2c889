"""Copies of values, compiled for a CPU without changing the code that makes and reads the values.

A scatter into the staging ring takes other loops than the norm that reads the same value. Fused with it, it changes
which of the norm's reductions read the value as stored, rounded, and which read it from a register, not yet rounded.
So idle answers equal stock's bit for bit only with a copy that is not fused; no switch turns it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headgate.capture.engine.compiler.inductor import Inductor

if TYPE_CHECKING:
    from headgate.capture.engine.compiler.inductor import TensorBox


@torch.library.custom_op("headgate::unfused_copy", mutates_args=())
def unfused_copy(value: Tensor) -> Tensor:
    """Return a contiguous copy of `value`; `register_unfused_copy` must have been called before inductor meets it."""
    return value.clone(memory_format=torch.contiguous_format)


@unfused_copy.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def register_unfused_copy() -> None:
    """Let inductor, in this process, compute the value once more for `unfused_copy`, and not look into that.

    So the value itself need not be stored, and nothing that reads the copy is fused with what reads the value.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    inductor = Inductor("capture")
    copy = torch.ops.headgate.unfused_copy.default
    call: Callable[[TensorBox], TensorBox] = inductor.fallback_handler(copy, add_to_fallback_set=False)

    @inductor.register_lowering(copy, type_promotion_kind=None)
    def lower(value: TensorBox) -> TensorBox:
        return call(inductor.computed_again(value))
