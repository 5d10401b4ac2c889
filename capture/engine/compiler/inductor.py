"""Everything of torch's inductor that headgate uses beyond its documented interface, imported in this one place.

Inductor is torch's own and may change with every release: `Inductor` refuses one that lacks a symbol, and
``headgate doctor`` lists the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from headgate.capture.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from torch._inductor.ir import Pointwise
    from torch._inductor.ir import TensorBox as TensorBox
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import _V as Virtualized
    from torch._inductor.virtualized import OpsValue as OpsValue

_PACKAGE = "torch._inductor"

Lower = Callable[..., "TensorBox"]
"""A lowering: makes the result of an operator from its arguments."""
Index = Sequence[object]
"""Of an element, as symbols."""
Compute = Callable[[Index], "OpsValue"]
"""Makes the code for the element at an index."""

LOWERING = {
    "lowering.register_lowering": "lowerings of headgate's custom operators",
    "lowering.fallback_handler": "a copy that is not fused",
    "lowering.lowerings": "the addition of two tensors, to be lowered as inductor does",
    "ir.Pointwise": "code for each element of a tensor",
    "ops_handler.OpCounterCSE": "tells inductor's counting of reads from its writing of code",
    "virtualized.V": "the graph and the kernel that are being compiled",
    "virtualized.ops": "operations on the elements of a tensor",
}
"""Symbols that lower headgate's custom operators, with their use. A compiled forward cannot do without."""

KERNELS = {
    "codegen.common.CSEProxy.load": "leaves buffers out of a kernel's number of loads",
    "codegen.simd_kernel_features.MemoryEstimator.remove_kernel_local": "leaves them out of the memory that it moves",
    "codegen.triton.TritonKernel.codegen_kernel": "keeps a kernel's blocks and rewrites its text",
    "config.dynamic_scale_rblock": "keeps a kernel's blocks",
}
"""Symbols that keep the kernels for a GPU as stock's, and rewrite their loads, with their use."""


class Inductor:
    """The symbols of this torch's inductor that one part of headgate needs.

    Args:
        part: Whose need it is; errors name it.
        kernels: Whether those of `KERNELS` are needed, too: for a GPU.

    Raises:
        UnsupportedError: If one is missing. The message names it, the torch that works, and the way around.
    """

    def __init__(self, part: str, *, kernels: bool = False) -> None:
        if missing := missing_symbols(kernels=kernels):
            raise UnsupportedError(
                f"{part}: compiled, it needs the inductor of torch 2.11 to 2.13, found torch {torch.__version__} "
                f"(without {_PACKAGE}.{missing[0]}); run with --enforce-eager"
            )
        self.register_lowering: Callable[..., Callable[[Lower], Lower]] = _find("lowering.register_lowering")
        self.fallback_handler: Callable[..., Lower] = _find("lowering.fallback_handler")
        self.lowerings: dict[object, Lower] = _find("lowering.lowerings")
        self.ops: OpsHandler[OpsValue] = _find("virtualized.ops")
        self._virtual: Virtualized = _find("virtualized.V")
        self._pointwise: type[Pointwise] = _find("ir.Pointwise")
        self._counter: type = _find("ops_handler.OpCounterCSE")

    def computed_again(self, value: TensorBox) -> TensorBox:
        """Return the elements of `value`, computed once more where they are read."""
        return self._like(value, value.make_loader())

    def counted_as(self, value: TensorBox, computed: Compute) -> TensorBox:
        """Return `computed` at each index of `value`, but let only the reads and operations of `value` be counted."""
        counted = value.make_loader()

        def inner(index: Index) -> OpsValue:
            is_counting = isinstance(self._virtual.get_ops_handler(), self._counter)  # to decide on storage
            return counted(index) if is_counting else computed(index)

        return self._like(value, inner)

    def _like(self, value: TensorBox, inner: Compute) -> TensorBox:
        device, dtype, ranges = value.get_device(), value.get_dtype(), value.get_size()
        return self._pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=ranges)


def missing_symbols(*, kernels: bool) -> list[str]:
    """Return the symbols that this torch's inductor lacks, below ``torch._inductor``."""
    return [name for name in (*LOWERING, *(KERNELS if kernels else ())) if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        _find(name)
    except (ImportError, AttributeError):
        return False
    return True


def _find(name: str) -> Any:
    """Return the symbol: an attribute of a module, or of a class in it."""
    parts = name.split(".")
    depth = next(at for at, part in enumerate([*parts, "A"]) if part[0].isupper() or at == len(parts) - 1)
    found: Any = import_module(".".join([_PACKAGE, *parts[:depth]]))
    for part in parts[depth:]:
        found = getattr(found, part)
    return found
