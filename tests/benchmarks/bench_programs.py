"""What programs cost at one site: ``python -m tests.benchmarks.bench_programs [--widths 2560 4096] [--out FILE]``.

Microseconds of one launch of `program_deltas`, from CUDA graphs of launches one behind the other, as a forward has
them, beside two floors: what a launch takes that does nothing, and what the bytes take that it must move, at the
bandwidth of a copy. Each launch has rows and vectors of its own, together more than the L2 cache holds, so what is read
comes from memory, as between the layers of a model. Cases with gates have servers where gates are enabled: idle, with a
gate for each row, and with one gate for all rows of a prompt, which takes three launches. Prints the table and one line
of JSON. Needs a GPU with torch and Triton, and no engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headgate.steering.kernels.run_programs import program_deltas
from headgate.steering.programs.codes import (
    CODE,
    GROUP,
    NUM_CODES,
    NUM_PARAMS,
    P4,
    READ,
    WRITE,
    Code,
    Edit,
    FeatureActivation,
    Flag,
    InputNorm,
    TokenFlag,
    gate_field,
    with_change,
)
from headgate.steering.worker.gates.reference import GateTensors

CACHE_BYTES = 128 * 2**20
COPIED_BYTES = 2**30
MIN_LAUNCHES, MAX_LAUNCHES = 2, 64
TIMED_LAUNCHES = 256
REPLAYS = 7
ROWS = (1, 16, 64, 256, 2048)
GATE_ENTRIES = (with_change(Code.SCORE, 0), with_change(Code.LEAF, 1), with_change(Code.GATE, 4))
"""A score, compared with a threshold that it passes, and the gate of that."""
GATE_NUMBERS = ((1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, -1e9, 0.0, 1.0), (0.0, 0.0, float("nan"), 0.0, 0.0))
GATE_COLUMN, GATE_COLUMNS = 4, 64


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        tokens: Rows of the stream.
        entries: Of each row's program, without those of gates; 0 is idle.
        code: Of every entry.
        is_shared: Whether all rows have one program, as those of a prompt have.
        has_gates: Whether gates are enabled; then each program has one, and its other entries have that.
        is_scanned: Whether all rows are those of one request.
    """

    name: str
    tokens: int
    entries: int
    code: int = Code.LINEAR
    is_shared: bool = False
    has_gates: bool = False
    is_scanned: bool = False


JUMP_RELU = Code.FEATURE | FeatureActivation.JUMP_RELU | Edit.SET
LAYER_NORM = JUMP_RELU | InputNorm.LAYER_NORM

CASES = (
    *(Case("idle", rows, 0) for rows in (*ROWS, 8192)),
    *(Case("LINEAR", rows, 4) for rows in ROWS),
    *(Case("FEATURE", rows, 16, JUMP_RELU) for rows in ROWS),
    *(Case("FEATURE", rows, 64, JUMP_RELU) for rows in ROWS),
    Case("LINEAR", 64, 1),
    Case("LINEAR", 64, 8),
    Case("LINEAR, norm kept", 64, 4, Code.LINEAR | Flag.KEEP_NORM_FROM | Flag.KEEP_NORM_TO),
    Case("ROTATE", 64, 4, Code.ROTATE),
    Case("FEATURE, layer norm", 64, 16, LAYER_NORM),
    Case("LINEAR, one program", 2048, 4, is_shared=True),
    Case("FEATURE, one program", 2048, 16, JUMP_RELU, is_shared=True),
    Case("FEATURE, one program", 2048, 64, JUMP_RELU, is_shared=True),
    *(Case("idle, gates", rows, 0, has_gates=True) for rows in (64, 8192)),
    *(Case("LINEAR, gated", rows, 1, has_gates=True) for rows in (1, 64, 256)),
    Case("LINEAR, one program", 8192, 1, is_shared=True),
    Case("LINEAR, gated prompt", 8192, 1, is_shared=True, has_gates=True, is_scanned=True),
)

Launch = Callable[[], Tensor]


def num_slots_of(case: Case) -> int:
    """Vectors that one launch reads; of an entry of gates there are two, though a score reads one, and others none."""
    return 2 * (1 if case.is_shared else case.tokens) * num_entries_of(case)


def num_entries_of(case: Case) -> int:
    """Entries of each program, those of gates included."""
    return case.entries + (len(GATE_ENTRIES) if case.has_gates and case.entries else 0)


def moved_bytes(case: Case, width: int, dtype: torch.dtype, has_addend: bool) -> int:
    """Bytes that one launch has to read or write: vectors, rows of the stream, and fp32 deltas."""
    if not case.entries:
        return 4 * case.tokens
    num_programs = 1 if case.is_shared else case.tokens
    rows = case.tokens * (1 + has_addend) + num_programs * (2 * case.entries + case.has_gates)
    return width * (rows * dtype.itemsize + 4 * case.tokens)


def launches(case: Case, width: int, dtype: torch.dtype, has_addend: bool) -> list[Launch]:
    """Calls on rows and vectors of their own, enough of them to fill the cache."""
    num_programs = 1 if case.is_shared else case.tokens
    num_slots = num_slots_of(case)
    moved = moved_bytes(case, width, dtype, has_addend)
    count = max(MIN_LAUNCHES, min(MAX_LAUNCHES, CACHE_BYTES // moved))
    pool = torch.empty(count * num_slots + 1, width, device="cuda", dtype=dtype).normal_(std=width**-0.5)
    rows = torch.zeros(case.tokens, dtype=torch.int32, device="cuda")
    if case.entries:
        rows += 1 if case.is_shared else torch.randperm(case.tokens, device="cuda").int() + 1
    num_entries = num_entries_of(case)
    capacity = max(num_entries, 8)
    params = torch.full((num_programs + 1, capacity, NUM_PARAMS), 0.5, device="cuda")
    groups = torch.zeros(case.tokens, dtype=torch.int64, device="cuda")

    def launch(index: int) -> Launch:
        counts = torch.full((case.tokens,), num_entries, dtype=torch.int32, device="cuda")
        codes = torch.zeros(num_programs + 1, capacity, NUM_CODES, dtype=torch.int32, device="cuda")
        slots = torch.randperm(num_slots, device="cuda").int().view(num_programs, num_entries, 2)
        codes[1:, :num_entries, [READ, WRITE]] = slots + 1 + index * num_slots
        codes[..., CODE], codes[..., GROUP] = case.code, 0
        gates = with_gates(case, codes, params) if case.has_gates else None
        value = torch.randn(case.tokens, width, device="cuda", dtype=dtype)
        addend = torch.randn_like(value) if has_addend else None
        tables = (pool, rows, counts, codes, params, groups)
        return lambda: program_deltas(value, addend, *tables, gates=gates, scans=case.is_scanned)

    return [launch(index) for index in range(count)]


def with_gates(case: Case, codes: Tensor, params: Tensor) -> GateTensors:
    """Write the entries of gates into programs, in front of all others; return their tensors."""
    if case.entries:
        codes[1:, :, GROUP] = gate_field(0, GATE_COLUMN, is_early=False)
        for at, (code, numbers) in enumerate(zip(GATE_ENTRIES, GATE_NUMBERS, strict=True)):
            codes[1:, at, CODE], codes[1:, at, WRITE] = code, 0
            params[1:, at] = 0
            params[1:, at, : len(numbers)] = torch.tensor(numbers, device="cuda")
        params[1:, 2, P4] = 1  # the gate is that of the leaf
    tokens = torch.zeros(case.tokens, 2, dtype=torch.int32, device="cuda")
    tokens[:, 0] = 0 if case.is_scanned else torch.arange(case.tokens, device="cuda")
    tokens[:, 1] = TokenFlag.IS_SCANNED if case.is_scanned else TokenFlag.IS_GENERATED
    signals = torch.zeros(case.tokens, GATE_COLUMNS, device="cuda")
    return GateTensors(signals, torch.zeros_like(signals), tokens)


def microseconds(calls: Sequence[Launch]) -> float:
    """Median time of one launch within a replay of all of them."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    repeats = max(1, TIMED_LAUNCHES // len(calls))
    found = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the clock starts while the GPU is busy
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / repeats / len(calls))
    return statistics.median(found)


def floors() -> tuple[float, float]:
    """Microseconds of a launch that does nothing, and bytes that a copy moves in a microsecond."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, nothing = torch.empty_like(source), torch.zeros(1, device="cuda")
    copy = microseconds([lambda: target.copy_(source)] * MIN_LAUNCHES)
    return microseconds([nothing.zero_] * MAX_LAUNCHES), 2 * COPIED_BYTES / copy


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench_programs", description=__doc__)
    parser.add_argument("--widths", nargs="*", type=int, default=[2560, 4096, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--value", action="store_true", help="the stream is one tensor, not a sum of two")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--out", type=Path, help="file for the JSON (default: none)")
    return parser.parse_args(arguments)


def main() -> int:
    """Print the table and the JSON; returns the exit status."""
    options = read_options()
    dtype, has_addend = getattr(torch, options.dtype), not options.value
    launch_us, bytes_per_us = floors()
    torch.cuda.empty_cache()
    about: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "dtype": options.dtype,
        "addend": has_addend,
        "launch_us": launch_us,
        "copy_tb_s": bytes_per_us / 1e6,
        "cases": [],
    }
    print({name: value for name, value in about.items() if name != "cases"}, "us per launch (floor)")
    print(f"{'programs':22} {'rows':>6} {'entries':>8}", *(f"{f'D={width}':>18}" for width in options.widths))
    for number in range(len(CASES)) if options.cases is None else options.cases:
        case, cells = CASES[number], []
        for width in options.widths:
            taken = microseconds(launches(case, width, dtype, has_addend))
            floor = max(launch_us, moved_bytes(case, width, dtype, has_addend) / bytes_per_us)
            about["cases"].append(
                {**case._asdict(), "width": width, "us": round(taken, 2), "floor_us": round(floor, 2)}
            )
            cells.append(f"{taken:9.2f} ({floor:6.1f})")
            torch.cuda.empty_cache()
        print(f"{case.name:22} {case.tokens:6} {case.entries:8}", *cells, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(about))
    print(json.dumps(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
