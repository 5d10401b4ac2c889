"""Compiles kernels of gates, SAEs and lenses for sm_90, without a GPU: ``python -m tests.kernels.compile_gates``.

Prints a line for each: its name and the instructions that it was compiled to. Triton's interpreter, under which the
other tests run, knows nothing of the types and layouts that a compiler wants.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from headgate.consumers.kernels import block_sums
from headgate.steering.kernels import reconstruct_rows, run_programs, scan_gates, select_features
from headgate.steering.programs.codes import NUM_CODES, NUM_NUMBERS, NUM_PARAMS, NUM_SUMS, InputNorm

TOKENS, WIDTH, ENTRIES, COLUMNS, FEATURES = 64, 256, 16, 64, 512


class Driver:
    """Stands for Triton's driver of an H100; whatever else is asked of it is 0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


class Compiled:
    """Stands for a kernel, and compiles it where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*args: Any, **options: Any) -> None:
            made = self._kernel.run(*args, grid=grid, warmup=True, **options)
            print(made.name, made.asm["ptx"].count(";"), flush=True)

        return compile_only


def run() -> None:
    """Compile what `program_deltas` launches with every optional argument."""
    value = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    numbers = torch.zeros(TOKENS, dtype=torch.int32)
    optional = (torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, 8), torch.zeros(TOKENS, WIDTH))
    given = (value, value, value, numbers, numbers, *entries(), *optional)
    run_programs.program_deltas(*given, gates=gates(), scans=True)


def entries() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and params of programs."""
    return torch.zeros(4, ENTRIES, NUM_CODES, dtype=torch.int32), torch.zeros(4, ENTRIES, NUM_PARAMS)


def gates() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Signals, states and tokens."""
    slots = torch.zeros(TOKENS, 2, dtype=torch.int32)
    return torch.zeros(TOKENS, COLUMNS), torch.zeros(TOKENS, COLUMNS), slots


def reconstruct() -> None:
    """Compile what `reconstruction_deltas` launches with every optional argument."""
    value, shift = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16), torch.zeros(TOKENS, WIDTH)
    tokens, counts = torch.zeros(TOKENS, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    rows = torch.zeros(FEATURES, WIDTH, dtype=torch.bfloat16)
    sums = torch.zeros(NUM_SUMS + WIDTH, dtype=torch.float64)
    coder = (rows, rows, torch.zeros(NUM_NUMBERS, FEATURES), torch.zeros(WIDTH), sums, InputNorm.LAYER_NORM)
    reconstruct_rows.reconstruction_deltas(value, value, shift, tokens, counts, *coder, shift)
    tables = (value, tokens, tokens, *entries(), torch.zeros(TOKENS, dtype=torch.int64))
    edits = (tables, gates())
    reconstruct_rows.reconstruction_deltas(value, value, shift, tokens, counts, *coder, shift, k=50, edits=edits)


def main() -> int:
    """Compile all; returns the exit status."""
    driver.set_active(Driver())
    run_programs._program_deltas_kernel = Compiled(run_programs._program_deltas_kernel)
    for name in ("_scores_kernel", "_scan_kernel"):
        setattr(scan_gates, name, Compiled(getattr(scan_gates, name)))
    for name in ("_norm_kernel", "encode_kernel", "decode_kernel", "_delta_kernel"):
        setattr(reconstruct_rows, name, Compiled(getattr(reconstruct_rows, name)))
    for name in ("_select_kernel", "_decode_kernel", "_edit_kernel"):
        setattr(select_features, name, Compiled(getattr(select_features, name)))
    block_sums._block_sums_kernel = Compiled(block_sums._block_sums_kernel)
    run()
    reconstruct()
    block_sums.block_sums(torch.zeros(TOKENS, 5000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
