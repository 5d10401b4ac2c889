"""What inductor makes of a norm with our addition in front, without a GPU: ``python -m tests.benchmarks.codegen``.

Triton code is generated for a GPU that is made up, and not compiled. For two norms of a Gemma layer, with and without
an addition to the stream, this shows of each kernel what inductor's heuristics look at: values it loads and stores,
and reductions. From 10 loads and reductions on, a reduction's blocks are halved, and its additions come in another
order. The counts of `stock` and `traced` are those found on an H200 (torch 2.11). `ahead` is what headgate does there:
`pooled`, and the vector of the mid stream where the kernel before attention stores the stream.

Ways to add: see `headgate.steering.lowering`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headgate.steering.lowering import (
    add_pooled,
    add_uncounted,
    gather_rows,
    register_add_pooled,
    register_add_uncounted,
)

NUM_TOKENS, HIDDEN, WIDE, NUM_SLOTS = 64, 2560, 10240, 100
EPS = 1e-6

Add = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Add] = {
    "stock": lambda carry, pool, slots: carry,
    "traced": lambda carry, pool, slots: carry + pool[slots],
    "uncounted": lambda carry, pool, slots: add_uncounted(carry, pool[slots]),
    "pooled": lambda carry, pool, slots: add_pooled(carry, pool, slots, 1.0),
    "ahead": lambda carry, pool, slots: add_pooled(carry, pool, slots, 1.0),
    "gathered": lambda carry, pool, slots: add_uncounted(carry, gather_rows(pool, slots)),
}


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


def layer(way: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """From the output of attention to the next layer's attention, the stream steered in front of both norms."""
    add = WAYS[way]
    at_mid, at_end = (WAYS["stock"], add) if way == "ahead" else (add, WAYS["stock"])

    def forward(
        x: Tensor, stream: Tensor, weights: Tensor, up: Tensor, down: Tensor, pool: Tensor, slots: Tensor
    ) -> Any:
        used = slots[: x.shape[0]]
        x, stream = added_norm(norm(x, weights[0]), at_mid(stream, pool, used), weights[1])
        x = norm(torch.nn.functional.gelu(x @ up, approximate="tanh") @ down, weights[2])
        x, stream = added_norm(x, add(stream, pool, used), weights[3])
        return x @ up, at_end(stream, pool, used)

    return forward


def generated(way: str) -> list[str]:
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
    made = {"dtype": torch.bfloat16}
    x, stream = torch.randn(NUM_TOKENS, HIDDEN, **made), torch.randn(NUM_TOKENS, HIDDEN, **made)
    for tensor in (x, stream):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=4096)
    weights = [torch.randn(*shape, **made) for shape in ((4, HIDDEN), (HIDDEN, WIDE), (WIDE, HIDDEN))]
    tables = torch.zeros(NUM_SLOTS, HIDDEN, **made), torch.zeros(8192, dtype=torch.int32)
    with torch.no_grad():
        torch.compile(layer(way))(x, stream, *weights, *tables)
    return codes


def main() -> None:
    """Print the counts of the kernels of each way, or the code of the ways that are named."""
    parser = argparse.ArgumentParser(prog="codegen", description=main.__doc__)
    parser.add_argument("ways", nargs="*", metavar="way", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--counts", action="store_true", help="the counts of those that are named, too")
    options = parser.parse_args()
    if unknown := [name for name in options.ways if name not in WAYS]:
        parser.error(f"no way {unknown[0]!r}; known: {', '.join(WAYS)}")
    register_add_uncounted()
    register_add_pooled()
    for name in options.ways or WAYS:
        torch._dynamo.reset()
        for code in generated(name):
            if options.ways and not options.counts:
                print(code)
            elif (kernel := re.search(r"def (triton_red\w+)\(", code)) is not None:
                counts = (re.search(rf"'{what}': (\d+)", code) for what in ("num_load", "num_store", "num_reduction"))
                loads, stores, reductions = (int(found[1]) if found else 0 for found in counts)
                halved = "halved" if loads + reductions >= 10 else "whole"
                print(f"{name:10} loads {loads:2} stores {stores} reductions {reductions}: {halved:7} {kernel[1][:70]}")


if __name__ == "__main__":
    main()
