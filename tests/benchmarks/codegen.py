"""What inductor makes of a norm with our addition in front, without a GPU: ``python -m tests.benchmarks.codegen``.

Triton code is generated for a GPU that is made up, and not compiled. For two norms of a layer of Gemma and of Llama,
with and without an addition to the stream, this shows of each kernel what inductor's heuristics look at: values it
loads and stores, and reductions. From 10 loads and reductions on, a reduction's blocks are halved, and its additions
come in another order; with up to 8, and if the memory moved says so, a block as long as a row is tried, too ("row").
Blocks that are "scaled" become shorter if the kernel needs many registers; "late" are reads of one value a row behind
the first pass over it, "fetched" weights that are asked for in front of it. The counts of `stock` and `traced` for
Gemma are those found on an H200 (torch 2.11). `ahead` is what headgate does there: `pooled`, and the vector of the mid
stream where the kernel before attention stores the stream; `both` is that, and the capture of ``post_mlp``. `ops_mid`
and `ops_end` have an op site at the mid stream, and at the layer's end; `across` has both, for features that are read
at the first and written at the second.

With ``--squares`` kernels are compiled, and how they add up squares is shown: see `unroll_sum` of
`headgate.capture.engine.compiler.inductor_heuristics`.

Ways to add: see `headgate.steering.worker.site_action` and `program_action`.
"""

from __future__ import annotations

import argparse
import re
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headgate.capture.engine.compiler.inductor_heuristics import excluded, register_exclusion
from headgate.capture.engine.compiler.rewrites import REWRITES
from headgate.steering.worker.gates.step_gates import no_gates
from headgate.steering.worker.program_action import (
    NO_SAE,
    add_selected,
    add_selected_unfused,
    program_deltas,
    program_deltas_and_state,
    register_add_selected,
    register_program_deltas,
)
from headgate.steering.worker.site_action import (
    add_excluded,
    add_pooled,
    gather_rows,
    register_add_excluded,
    register_add_pooled,
)

NUM_TOKENS, NUM_SLOTS = 64, 100
EPS = 1e-6
HIDDEN = {"gemma": 2560, "llama": 4096}
HEAD = "import triton, triton.language as tl\nfrom triton.language.extra.cuda import libdevice\n"
"""What inductor's kernels of norms need beside their text."""
WIDE = 1024
"""Of the product between the norms: any will do."""

Add = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Add] = {
    "stock": lambda carry, pool, slots: carry,
    "traced": lambda carry, pool, slots: carry + pool[slots],
    "excluded": lambda carry, pool, slots: add_excluded(carry, pool[slots]),
    "pooled": lambda carry, pool, slots: add_pooled(carry, pool, slots, 1.0),
    "ahead": lambda carry, pool, slots: add_pooled(carry, pool, slots, 1.0),
    "both": lambda carry, pool, slots: add_pooled(carry, pool, slots, 1.0),
    "ops_mid": lambda carry, pool, slots: carry,
    "ops_end": lambda carry, pool, slots: carry,
    "across": lambda carry, pool, slots: carry,
    "gathered": lambda carry, pool, slots: add_excluded(carry, gather_rows(pool, slots)),
}

REGISTERED = (register_add_excluded, register_add_pooled, register_program_deltas, register_add_selected)


class Driver:
    """Stands for Triton's driver of a GPU; whatever else is asked of it is None."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class Uncompiled:
    """Stands for a compiled kernel, and does nothing."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Not run."""


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's norm."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())).to(x.dtype)


def added_norm(x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the sum, and the sum."""
    total = x.float() + stream.float()
    wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())
    return wide.to(x.dtype), total.to(x.dtype)


def plain_norm(x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's, of the sum, and the sum."""
    total = x.float() + stream.float()
    wide = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return wide.to(x.dtype) * weight, total.to(x.dtype)


class Tables(NamedTuple):
    """The tensors that headgate reads and writes: of vectors, of captured rows, and of operations."""

    pool: Tensor
    slots: Tensor
    ring: Tensor
    places: Tensor
    rows: Tensor
    active: Tensor
    codes: Tensor
    params: Tensor
    changes: Tensor


def tables_of(hidden: int) -> Tables:
    """Tables with nothing in them."""
    pool, ring = torch.zeros(NUM_SLOTS, hidden, dtype=torch.bfloat16), torch.zeros(8192, hidden, dtype=torch.bfloat16)
    slots, places, active = (torch.zeros(8192, dtype=torch.int32) for _ in range(3))
    rows, codes = torch.zeros(8192, 8, dtype=torch.int32), torch.zeros(NUM_SLOTS, 4, dtype=torch.int32)
    params, changes = torch.zeros(NUM_SLOTS, 4), torch.zeros(8192, 64)
    return Tables(pool, slots, ring, places, rows, active, codes, params, changes)


def operated(add: Callable[..., Tensor], value: Tensor, stream: Tensor, tables: Tables, way: str) -> Tensor:
    """The stream behind an op site, whose value is the sum of both."""
    programs = (tables.pool, tables.rows, tables.active, tables.codes, tables.params, None)
    if way == "across":
        deltas = program_deltas_and_state(value, stream, *programs, tables.changes, *no_gates(value.device), *NO_SAE)
    else:
        deltas = program_deltas(value, stream, *programs)
    return add(stream, deltas, tables.active, tables.pool, tables.slots, 1.0)


def layer(family: str, way: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """From the output of attention to the next layer's attention, the stream steered in front of both norms."""
    add, is_gemma = WAYS[way], family == "gemma"
    is_ahead = way in ("ahead", "both")
    at_mid, at_end = (WAYS["stock"], add) if is_ahead else (add, WAYS["stock"])

    def branch_norm(x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight) if is_gemma else x

    def forward(x: Tensor, stream: Tensor, weights: Tensor, up: Tensor, down: Tensor, tables: Tables) -> Any:
        add_norm = added_norm if is_gemma else plain_norm
        pool, used = tables.pool, tables.slots[: x.shape[0]]
        x = branch_norm(x, weights[0])
        if way in ("ops_mid", "across"):
            stream = operated(add_selected_unfused, x, stream, tables, way)
        x, stream = add_norm(x, at_mid(stream, pool, used), weights[1])
        x = branch_norm(torch.nn.functional.gelu(x @ up, approximate="tanh") @ down, weights[2])
        if way == "both":
            places = excluded(tables.places, tables.ring)
            tables.ring.index_put_((places[: x.shape[0]],), (x.float() + stream.float()).to(x.dtype))
        if way in ("ops_end", "across"):
            stream = operated(add_selected, x, stream, tables, way)
        x, stream = add_norm(x, add(stream, pool, used), weights[3])
        return x @ up, at_end(stream, pool, used)

    return forward


def generated(family: str, way: str) -> list[str]:
    """The Triton code of `layer`."""
    import torch._inductor.async_compile as async_compile
    import torch._inductor.config as config
    from triton.runtime import driver

    codes: list[str] = []

    def keep(self: Any, name: str, code: str, *args: Any, **kwargs: Any) -> Uncompiled:
        codes.append(code)
        return Uncompiled()

    driver.set_active(Driver())
    config.cpu_backend, config.compile_threads, config.force_disable_caches = "triton", 1, True
    async_compile.AsyncCompile.triton = keep  # type: ignore[method-assign,assignment]
    made, hidden = {"dtype": torch.bfloat16}, HIDDEN[family]
    x, stream = torch.randn(NUM_TOKENS, hidden, **made), torch.randn(NUM_TOKENS, hidden, **made)
    for tensor in (x, stream):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=4096)
    weights = [torch.randn(*shape, **made) for shape in ((4, hidden), (hidden, WIDE), (WIDE, hidden))]
    with torch.no_grad():
        torch.compile(layer(family, way))(x, stream, *weights, tables_of(hidden))
    return codes


def show(family: str, way: str, code: str) -> None:
    """Print what is counted of a kernel with reductions."""
    kernel = re.search(r"def (triton_red\w+)\(", code)
    if kernel is None:
        return
    found = (re.search(rf"'{what}': (\d+)", code) for what in ("num_load", "num_store", "num_reduction"))
    loads, stores, reductions = (int(count[1]) if count else 0 for count in found)
    counted = loads + reductions
    cut = "halved" if counted >= 10 else "row" if "add_persistent_rblock" in code and counted <= 8 else "whole"
    fate = "scaled" if "'dynamic_scale_rblock': True" in code else "kept"
    passes = code.partition("\n    for r0_offset in ")[2]
    late = len(re.findall(r"\n    tmp\d+ = tl\.load", passes))
    counts = f"loads {loads:2} reductions {reductions} stores {stores}"
    fetched = code.count("prefetch.global")
    print(f"{family} {way:10} {counts}: {cut:7} {fate:7} late {late} fetched {fetched} {kernel[1][11:70]}")


def squares(code: str) -> int:
    """Return how many squares a kernel multiplies by themselves, compiled for blocks of 2048; others are in an FMA."""
    from triton import JITFunction, compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, configs = re.search(r"'signature': (\{.*?\})", code), re.search(r"'configs': (\[\{.*?\}\])", code)
    assert signature is not None
    assert configs is not None
    types, (attrs,) = eval(signature[1]), eval(configs[1])
    names = list(types)
    blocks = {(names.index(name),): size for name, size in (("XBLOCK", 1), ("R0_BLOCK", 2048))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"  # Triton reads the text of a function from its file
        path.write_text(f"{HEAD}{code[code.index('@triton.jit') :]}")
        [kernel] = [value for value in runpy.run_path(str(path)).values() if isinstance(value, JITFunction)]
        source = ASTSource(fn=kernel, signature=types, constexprs=blocks, attrs=attrs)
        ptx: str = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"]
    return len(re.findall(r"mul\.f32\s+%\w+, (%\w+), \1;", ptx))


def main() -> None:
    """Print the counts of the kernels of each way, or the code of the ways that are named."""
    parser = argparse.ArgumentParser(prog="codegen", description=main.__doc__)
    parser.add_argument("ways", nargs="*", metavar="way", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--counts", action="store_true", help="the counts of those that are named, too")
    parser.add_argument("--squares", action="store_true", help="of kernels with two passes alone: see `squares`")
    parser.add_argument("--no-rewrites", action="store_true", help="as with the setting compiler.rewrites off")
    options = parser.parse_args()
    REWRITES.is_on = not options.no_rewrites
    if unknown := [name for name in options.ways if name not in WAYS]:
        parser.error(f"no way {unknown[0]!r}; known: {', '.join(WAYS)}")
    for register in (*REGISTERED, register_exclusion):
        register()
    for family in HIDDEN:
        for name in options.ways or WAYS:
            torch._dynamo.reset()
            for code in generated(family, name):
                if options.squares:
                    if code.count("for r0_offset in") == 2:
                        print(family, name, "squares", squares(code))
                elif options.ways and not options.counts:
                    print(code)
                else:
                    show(family, name, code)
    if options.counts or not options.ways:
        print(" ".join(f"{name}={value}" for name, value in REWRITES.stats().items()))


if __name__ == "__main__":
    main()
