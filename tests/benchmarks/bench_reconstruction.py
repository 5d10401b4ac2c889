"""What full reconstruction costs at one site: ``python -m tests.benchmarks.bench_reconstruction [--out FILE]``.

Microseconds of `reconstruction_deltas`, all of its launches, from CUDA graphs of one behind the other, as a forward has
them; with listed rows, and with none (idle); with k, of a top-k SAE. ``--read`` shows instead what the consumer
`features` takes for the top 20 of as many rows, of float32 and of bfloat16, by the clock. Beside it the floor: the
bytes of the coder at the bandwidth of a copy, or the products of all operands at `PRODUCTS_PER_US`. Prints the table
and one line of JSON. Needs a GPU with torch and Triton, and no engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headgate.capture.schema.consumer import RowArguments
from headgate.steering.features.consumer import FeaturesReadout
from headgate.steering.features.importing import open_coder
from headgate.steering.kernels.reconstruct_rows import reconstruction_deltas
from headgate.steering.programs.codes import NUM_NUMBERS, NUM_SUMS, InputNorm
from tests.benchmarks.bench_programs import Launch, floors, microseconds
from tests.benchmarks.models import ModelSize
from tests.benchmarks.saes import write_sae

PRODUCTS_PER_US = 790e6 / 2
"""Multiplications with additions in bfloat16, measured on an H200 with large matrices."""

PARTS = 2
"""Operands of rows and activations: each product is done for a value and for what its rounding lost."""


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        width: Hidden size.
        features: Of the coder.
        tokens: Rows of the step; all of them can be listed.
        listed: How many are.
        k: Of a top-k SAE; 0 for others.
    """

    width: int
    features: int
    tokens: int
    listed: int
    k: int = 0

    def floor_us(self, bytes_per_us: float) -> float:
        """What the coder's bytes take, or the products."""
        if not self.listed:
            return 0.0
        values = self.features * self.width * 2
        passes = 1 if self.k else 2  # few rows of the decoder are read
        return max(passes * values / bytes_per_us, PARTS * passes * values * self.listed / 2 / PRODUCTS_PER_US)


DTYPES = ("float32", "bfloat16")
"""Of the rows that are read."""
SIZES = ((2560, 16384), (2560, 65536), (4096, 32768), (4096, 65536))
STEPS = ((64, 0), (2048, 0), (1, 1), (16, 16), (64, 64), (256, 256), (2048, 64), (2048, 2048))
CASES = tuple(Case(*size, *step) for size in SIZES for step in STEPS)
CASES += tuple(Case(*size, *step, k=100) for size in ((2560, 32768), (2560, 81920)) for step in STEPS)


def launch_of(case: Case, coder: tuple[Any, ...]) -> Launch:
    """A call on rows of its own."""
    value, addend = (torch.randn(case.tokens, case.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tokens = torch.randperm(case.tokens, device="cuda").int()
    count = torch.tensor([case.listed] * 3, dtype=torch.int32, device="cuda")
    return lambda: reconstruction_deltas(value, addend, None, tokens, count, *coder, k=case.k)


def read_us(cases: Sequence[Case]) -> Iterator[tuple[Case, str, float]]:
    """Microseconds in which the consumer `features` encodes rows and finds the 20 strongest of each.

    Yields each case with the dtype of its rows; cases of one SAE follow one another.
    """
    for (width, features, k), some in groupby(cases, key=lambda case: (case.width, case.features, case.k)):
        size, listed = ModelSize(num_layers=2, hidden=width, vocabulary=2), list(some)
        with tempfile.TemporaryDirectory() as folder:
            coder = open_coder(write_sae(Path(folder) / "sae", features, size, layer=1, k=k))
            functions = {name: FeaturesReadout([coder], 20, name).on(torch.device("cuda")) for name in DTYPES}
        for case in listed:
            for name, function in functions.items():
                yield case, name, reading_us(function, case)


def reading_us(function: Callable[..., Any], case: Case) -> float:
    """Microseconds of one reading."""
    rows = torch.randn(case.tokens, case.width, device="cuda", dtype=torch.bfloat16).double()
    host = np.full((case.tokens, 21), -1, np.int64)
    arguments = RowArguments(host, torch.from_numpy(host).cuda())
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(rows, arguments)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def random_coder(width: int, features: int) -> tuple[Any, ...]:
    """A coder whose features are seldom active."""
    rows = torch.empty(2, features, width, device="cuda", dtype=torch.bfloat16).normal_(std=width**-0.5)
    numbers = torch.zeros(NUM_NUMBERS, features, device="cuda")
    numbers[1], numbers[2] = 3.0, 1.0
    sums = torch.zeros(NUM_SUMS + width, dtype=torch.float64, device="cuda")
    return rows[0], rows[1], numbers, torch.zeros(width, device="cuda"), sums, InputNorm.NONE


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_reconstruction", description=__doc__)
    parser.add_argument("--read", action="store_true", help="the consumer features in place of reconstruction")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--out", type=Path, help="file for the JSON (default: none)")
    return parser.parse_args(arguments)


def main() -> int:
    """Print the table and the JSON; returns the exit status."""
    options = read_options()
    if options.read:
        chosen = [one for number, one in enumerate(CASES) if options.cases is None or number in options.cases]
        for case, name, taken in read_us([one for one in chosen if one.listed == one.tokens]):
            about_case = f"{case.width:6} {case.features:9} {case.tokens:6} k {case.k:4}"
            print(f"{about_case} {name:>9} {taken:10.1f} us", flush=True)
        return 0
    launch_us, bytes_per_us = floors()
    about: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "launch_us": launch_us, "cases": []}
    about["copy_tb_s"] = bytes_per_us / 1e6
    print(f"{'D':>6} {'features':>9} {'rows':>6} {'listed':>7} {'k':>4} {'us':>10} {'floor us':>10}")
    coder: tuple[Any, ...] = ()
    for number in range(len(CASES)) if options.cases is None else options.cases:
        case = CASES[number]
        if not coder or tuple(coder[0].shape) != (case.features, case.width):
            coder = ()
            torch.cuda.empty_cache()
            coder = random_coder(case.width, case.features)
        taken, floor = microseconds([launch_of(case, coder)] * 2), case.floor_us(bytes_per_us)
        about["cases"].append({**case._asdict(), "us": round(taken, 2), "floor_us": round(floor, 2)})
        print(
            f"{case.width:6} {case.features:9} {case.tokens:6} {case.listed:7} {case.k:4} {taken:10.2f} {floor:10.2f}",
            flush=True,
        )
        if options.out is not None:
            options.out.write_text(json.dumps(about))
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
