"""Everything of torch's inductor that headgate uses beyond its documented interface, imported in this one place.

Inductor is torch's own and may change with every release: `Inductor` refuses one that lacks a symbol, and
``headgate doctor`` lists the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from headgate.capture.schema.errors import UnsupportedError

if TYPE_CHECKING:
    from torch._inductor.ir import BaseView, Buffer, IRNode, Pointwise, Reduction
    from torch._inductor.ir import TensorBox as TensorBox
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import _V as Virtualized
    from torch._inductor.virtualized import OpsValue as OpsValue

_PACKAGE = "torch._inductor"

Lower = Callable[..., "TensorBox"]
"""A lowering: makes the result of an operator from its arguments."""
Index = Sequence[object]
"""Index of an element, as symbols."""
Compute = Callable[[Index], "OpsValue"]
"""Makes the code for the element at an index."""

LOWERING = {
    "lowering.register_lowering": "lowerings of headgate's custom operators",
    "lowering.fallback_handler": "a copy that is not fused",
    "lowering.lowerings": "the addition of two tensors, to be lowered as inductor does",
    "ir.BaseView": "distinguishes stored values from others",
    "ir.Buffer": "distinguishes stored values from others",
    "ir.Reduction": "distinguishes sums from other stored values",
    "ir.TensorBox": "sums that are computed once more",
    "ir.Pointwise": "code for each element of a tensor",
    "ops_handler.OpCounterCSE": "distinguishes inductor's counting of reads from its writing of code",
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
                f"{part}: compiled, it needs the inductor of torch 2.11 to 2.14, found torch {torch.__version__} "
                f"(without {_PACKAGE}.{missing[0]}); run with --enforce-eager"
            )
        self.register_lowering: Callable[..., Callable[[Lower], Lower]] = _find("lowering.register_lowering")
        self.fallback_handler: Callable[..., Lower] = _find("lowering.fallback_handler")
        self.lowerings: dict[object, Lower] = _find("lowering.lowerings")
        self.ops: OpsHandler[OpsValue] = _find("virtualized.ops")
        self._virtual: Virtualized = _find("virtualized.V")
        self._pointwise: type[Pointwise] = _find("ir.Pointwise")
        self._view: type[BaseView] = _find("ir.BaseView")
        self._reduction: type[Reduction] = _find("ir.Reduction")
        self._tensor: type[TensorBox] = _find("ir.TensorBox")
        self._buffer: type[Buffer] = _find("ir.Buffer")
        self._counter: type = _find("ops_handler.OpCounterCSE")

    def computed_again(self, value: TensorBox) -> TensorBox:
        """Return the elements of `value`, computed once more where they are read."""
        return self._like(value, value.make_loader())

    def stored_or_apart(self, value: TensorBox) -> TensorBox:
        """Return `value`, or its elements computed once more, so that the code that makes it stays as it is.

        A value that is stored anyway is taken. Any other is computed once more with its reductions, unless a kernel in
        front reads them: a sum that kernels before us and after us read would be a kernel of its own, in other
        blocks than those of the kernel that makes it otherwise.
        """
        if isinstance(self._behind_views(value), self._buffer):
            return value
        return self._like(value, self._with_own_sums(value.make_loader(), value.get_read_names(), value.get_size(), {}))

    def _with_own_sums(self, inner: Any, reads: Iterable[str], size: Index, made: dict[str, str]) -> Any:
        """Return the code `inner`, but let it read sums that are made for it alone, each by a kernel of its own.

        Args:
            inner: Makes the code for an element.
            reads: Names of the buffers that it reads.
            size: Of the value; what has its width is no sum along it.
            made: Names of the sums made so far, by the names of the sums that they replace.
        """
        graph = self._virtual.graph
        for name in reads:
            reduction: Any = getattr(graph.get_buffer(name), "data", None)
            is_sum = type(reduction) is self._reduction and list(reduction.ranges)[-1:] != [size[-1]]
            if is_sum and name not in made and not self._has_reader(name):
                own = self._with_own_sums(reduction.inner_fn, reduction.get_read_names(), size, made)
                box = self._tensor.create(replace(reduction, inner_fn=own))
                box.realize()
                made[name] = box.get_name()
                graph.no_fuse_buffer_names.add(made[name])

        def renamed(*index: Index) -> Any:
            handler: Any = _Renamed(self._virtual.get_ops_handler(), made)
            with self._virtual.set_ops_handler(handler):
                return inner(*index)

        return renamed if made else inner

    def is_first_argument_of(self, op: object) -> bool:
        """Whether `op` also gets the first argument of the operator that is being lowered, as its first."""
        first: Any = self._virtual.graph.current_node.args[0]
        return any(user.target is op and user.args[0] is first for user in first.users)

    def _has_reader(self, name: str) -> bool:
        """Whether a value that is stored is computed from the buffer."""
        readers = self._virtual.graph.name_to_users[name]
        return any(isinstance(self._behind_views(reader), self._buffer) for reader in readers)

    def _behind_views(self, value: IRNode) -> object:
        box: Any = getattr(value, "data", None)
        while isinstance(box, self._view):
            box = box.data
        return getattr(box, "data", None)

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


class _Renamed:
    """Hands operations on, but loads from other buffers."""

    def __init__(self, inner: Any, names: Mapping[str, str]) -> None:
        self._inner = inner
        self._names = names

    def load(self, name: str, index: object) -> Any:
        return self._inner.load(self._names.get(name, name), index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


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
