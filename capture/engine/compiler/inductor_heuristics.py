"""Buffers that inductor leaves out when it decides how a norm's kernel for a GPU cuts a row into blocks.

It counts the values that a kernel loads, and estimates the memory that it moves, to choose the block sizes that it
tries. Other candidates make other kernels, which add up in another order. headgate's own reads and writes there (a
row's slot, its vector, a place in the ring) are little beside the rows themselves, and are excluded from both.

Where a kernel takes more than 32 registers, inductor tries shorter blocks, and takes the fastest for as many rows as a
prefill has. Stock's norm in front of attention takes 28 to 32 (Gemma, Llama, Qwen, compiled for sm_90), with headgate
38 to 53: short blocks make eight passes over a row out of one, and a decode step waits for each.

Last, LLVM unrolls a loop over two blocks of a row if its body is short: stock's is, ours is not always. Unrolled,
a square of the first block is multiplied and added to one of the second in one operation, which rounds once; in a loop
it is the other way round. So the loop is unrolled here, before LLVM decides.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headgate.capture.engine.compiler.inductor import Inductor
from headgate.capture.engine.compiler.rewrites import REWRITES

if TYPE_CHECKING:
    from types import ModuleType

    from torch._inductor.codegen.common import CSEProxy, CSEVariable
    from torch._inductor.codegen.simd_kernel_features import MemoryEstimator
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.scheduler import SchedulerBuffer
    from torch._inductor.virtualized import _V as Virtualized

    from headgate.capture.engine.compiler.inductor import TensorBox


logger = logging.getLogger("headgate")

_PASS = re.compile(r"(?<=    for r0_offset in )(?:tl\.)?range\(0, r0_numel, R0_BLOCK\)(?=:)")
_WIDTH = re.compile(r"^    r0_numel = (\d+)$", re.MULTILINE)

_NAMES = "headgate_excluded"
"""Attribute of one of inductor's graphs: names of the excluded buffers. Of a kernel: the excluded ones that it reads.
Also of replaced methods, to replace each once."""


@torch.library.custom_op("headgate::excluded", mutates_args=())
def excluded(slots: Tensor, rows: Tensor) -> Tensor:
    """Return `slots`; its reads are excluded from the heuristics, as are writes to `rows`.

    `register_exclusion` must have been called before inductor meets it.
    """
    return slots.clone()


@excluded.register_fake
def _(slots: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(slots)


def register_exclusion() -> None:
    """Let inductor, in this process, read `slots` itself for `excluded`, without counting it.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    install_exclusion("capture")

    @Inductor("capture").register_lowering(torch.ops.headgate.excluded.default, type_promotion_kind=None)
    def lower(slots: TensorBox, rows: TensorBox) -> TensorBox:
        exclude_buffers(slots, rows)
        return slots


def exclude_buffers(*buffers: TensorBox) -> None:
    """Exclude reads of `buffers`, inputs of the graph at hand, and writes to them."""
    from torch._inductor.virtualized import V

    names = vars(V.graph).setdefault(_NAMES, set())
    num_before = len(names)
    names.update(buffer.get_name() for buffer in buffers)
    REWRITES.counts.excluded += len(names) - num_before


def install_exclusion(part: str) -> None:
    """Let inductor, in this process, decide without the buffers that a graph excludes. Once, for all parts.

    Raises:
        UnsupportedError: If this torch has another inductor; it names `part`.
    """
    Inductor(part, kernels=True)
    from torch._inductor import config
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.codegen.simd_kernel_features import MemoryEstimator
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    _exclude_loads(CSEProxy, V)
    _exclude_from_estimate(MemoryEstimator, V)
    _keep_blocks(TritonKernel, config)


def unroll_sum(source: str) -> str:
    """Return `source` with the first of two passes over a row unrolled, where that pass goes over two blocks.

    Stock's passes are short enough for LLVM to unroll them in this form, by the Triton of torch 2.11 and of 2.14 for a
    row of 2049 to 4096 values in blocks of 2048. Gemma's, with a third pass, are not, nor are ours in their place. Of
    three or four blocks some of stock's are and others are not, so idle bits of wider rows may differ.

    Args:
        source: Of one kernel: the first pass makes a norm's sums, the second the normed row.
    """
    width = _WIDTH.search(source)
    if width is None or len(_PASS.findall(source)) != 2:
        return source
    factor = f"2 if R0_BLOCK < {width[1]} and {width[1]} <= 2 * R0_BLOCK else 1"
    return _PASS.sub(f"tl.range(0, r0_numel, R0_BLOCK, loop_unroll_factor={factor})", source, count=1)


def _exclude_loads(proxy_class: type[CSEProxy], virtual: Virtualized) -> None:
    load = proxy_class.load
    if hasattr(load, _NAMES):
        return

    @wraps(load)
    def load_excluded(proxy: CSEProxy, name: str, index: object) -> CSEVariable:
        num_load = proxy.kernel.num_load
        value = load(proxy, name, index)
        if name in vars(virtual.graph).get(_NAMES, ()):
            proxy.kernel.num_load = num_load
            vars(proxy.kernel).setdefault(_NAMES, set()).add(name)
        return value

    setattr(load_excluded, _NAMES, True)
    proxy_class.load = load_excluded  # type: ignore[method-assign, assignment]


def _exclude_from_estimate(estimator_class: type[MemoryEstimator], virtual: Virtualized) -> None:
    finish = estimator_class.remove_kernel_local
    if hasattr(finish, _NAMES):
        return

    @wraps(finish)
    def finish_without(estimator: MemoryEstimator) -> None:
        if names := vars(virtual.graph).get(_NAMES):
            for name in names | _writing(names, estimator.store_buffer_names, virtual.graph.scheduler.name_to_buf):
                for estimate in (estimator.persistent, estimator.outside_loop, *estimator.loops):
                    estimate.remove(name)
                estimator.store_buffer_names.discard(name)
        finish(estimator)

    setattr(finish_without, _NAMES, True)
    estimator_class.remove_kernel_local = finish_without  # type: ignore[method-assign, assignment]


def _writing(names: set[str], written: Iterable[str], buffers: Mapping[str, SchedulerBuffer]) -> set[str]:
    """Return those of the `written` buffers of a kernel by which it writes to `names`."""
    return {name for name in written if name in buffers and not names.isdisjoint(buffers[name].get_mutations())}


def _keep_blocks(kernel_class: type[TritonKernel], config: ModuleType) -> None:
    """Keep stock's blocks and sums for kernels that read excluded buffers, and rewrite their loads where that is on."""
    generate = kernel_class.codegen_kernel
    if hasattr(generate, _NAMES):
        return

    @wraps(generate)
    def generate_as_chosen(kernel: TritonKernel, *args: object, **kwargs: object) -> str:
        names = vars(kernel).get(_NAMES)
        if names is None:
            return generate(kernel, *args, **kwargs)
        with config.patch(dynamic_scale_rblock=False):
            source = generate(kernel, *args, **kwargs)
        pointers = kernel.args.input_buffers  # the kernel does not write to these
        is_looped = kernel.features.is_reduction() and not kernel.persistent_reduction
        tables = {pointers[name] for name in names if name in pointers}
        return REWRITES.apply(unroll_sum(source), tables, is_looped=is_looped, understands_ptx=not torch.version.hip)

    setattr(generate_as_chosen, _NAMES, True)
    kernel_class.codegen_kernel = generate_as_chosen  # type: ignore[method-assign, assignment]
