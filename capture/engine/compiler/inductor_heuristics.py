"""Buffers that inductor leaves out of account when it decides how a norm's kernel for a GPU cuts a row into blocks.

It counts what a kernel loads, and estimates what it moves, to choose the block sizes that it tries. Other candidates
make other kernels, which add up in another order. What headgate reads and writes there, a row's slot, its vector, a
place in the ring, is little beside the rows themselves.

Where a kernel takes more than 32 registers, inductor tries shorter blocks, and takes what is fastest for as many rows
as a prefill has. Stock's norm in front of attention takes 28 to 32 (Gemma, Llama, Qwen, compiled for sm_90), with us 38
to 53: short blocks make eight passes over a row out of one, and a decode step waits for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headgate.capture.engine.compiler.rewrites import REWRITES
from headgate.capture.engine.compiler.unfused_copy import inductor_for

if TYPE_CHECKING:
    from torch._inductor.ir import TensorBox

_NAMES = "headgate_uncounted"
"""Attribute of a graph of inductor: names of buffers that do not count. Of a kernel: those that it reads. Also of
what is patched, to patch it once."""


@torch.library.custom_op("headgate::uncounted", mutates_args=())
def uncounted(slots: Tensor, rows: Tensor) -> Tensor:
    """`slots`, of which reads do not count, nor do writes to `rows`.

    `register_uncounted` must have been called before inductor meets it.
    """
    return slots.clone()


@uncounted.register_fake
def _(slots: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(slots)


def register_uncounted() -> None:
    """Let inductor, in this process, read `slots` itself for `uncounted`, without counting it.

    Raises:
        UnsupportedError: If this torch has another inductor.
    """
    count_without_named("capture")
    with inductor_for("capture"):
        from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.headgate.uncounted.default, type_promotion_kind=None)
    def lower(slots: TensorBox, rows: TensorBox) -> TensorBox:
        exclude_buffers(slots, rows)
        return slots


def exclude_buffers(*buffers: TensorBox) -> None:
    """Leave reads and writes of `buffers`, inputs of the graph at hand, out of inductor's counts."""
    from torch._inductor.virtualized import V

    vars(V.graph).setdefault(_NAMES, set()).update(buffer.get_name() for buffer in buffers)


def count_without_named(part: str) -> None:
    """Let kernels, in this process, count without the buffers that their graph names. Once, for all parts.

    Raises:
        UnsupportedError: If this torch has another inductor; it names `part`.
    """
    with inductor_for(part):
        from torch._inductor import config
        from torch._inductor.codegen.common import CSEProxy
        from torch._inductor.codegen.simd_kernel_features import MemoryEstimator
        from torch._inductor.codegen.triton import TritonKernel
        from torch._inductor.config import dynamic_scale_rblock as _  # noqa: F401 - it must be there
        from torch._inductor.virtualized import V
    _load_uncounted(CSEProxy, V)
    _estimate_without(MemoryEstimator, V)
    _keep_blocks(TritonKernel, config)


def _load_uncounted(proxy_class: Any, virtual: Any) -> None:
    load = proxy_class.load
    if hasattr(load, _NAMES):
        return

    @wraps(load)
    def load_uncounted(proxy: Any, name: str, index: Any) -> Any:
        num_load = proxy.kernel.num_load
        value = load(proxy, name, index)
        if name in vars(virtual.graph).get(_NAMES, ()):
            proxy.kernel.num_load = num_load
            vars(proxy.kernel).setdefault(_NAMES, set()).add(name)
        return value

    setattr(load_uncounted, _NAMES, True)
    proxy_class.load = load_uncounted


def _estimate_without(estimator_class: Any, virtual: Any) -> None:
    finish = estimator_class.remove_kernel_local
    if hasattr(finish, _NAMES):
        return

    @wraps(finish)
    def finish_without(estimator: Any) -> None:
        if names := vars(virtual.graph).get(_NAMES):
            for name in names | _writing(names, estimator.store_buffer_names, virtual.graph.scheduler.name_to_buf):
                for estimate in (estimator.persistent, estimator.outside_loop, *estimator.loops):
                    estimate.remove(name)
                estimator.store_buffer_names.discard(name)
        finish(estimator)

    setattr(finish_without, _NAMES, True)
    estimator_class.remove_kernel_local = finish_without


def _writing(names: set[str], written: Iterable[str], buffers: Mapping[str, Any]) -> set[str]:
    """Those of the `written` buffers of a kernel by which it writes to `names`."""
    return {name for name in written if name in buffers and not names.isdisjoint(buffers[name].get_mutations())}


def _keep_blocks(kernel_class: Any, config: Any) -> None:
    """Keep stock's blocks for kernels with our buffers, and rewrite their loads where that is switched on."""
    generate = kernel_class.codegen_kernel
    if hasattr(generate, _NAMES):
        return

    @wraps(generate)
    def generate_as_chosen(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names = vars(kernel).get(_NAMES)
        if names is None:
            return generate(kernel, *args, **kwargs)
        with config.patch(dynamic_scale_rblock=False):
            source = generate(kernel, *args, **kwargs)
        pointers = kernel.args.input_buffers  # not of what it writes to
        tables = {pointers[name] for name in names if name in pointers}
        return REWRITES.apply(source, tables, understands_ptx=not torch.version.hip)

    setattr(generate_as_chosen, _NAMES, True)
    kernel_class.codegen_kernel = generate_as_chosen
