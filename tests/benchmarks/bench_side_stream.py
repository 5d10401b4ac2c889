"""What the use of a second stream costs the steps that come after: ``python -m tests.benchmarks.bench_side_stream``.

On an H200, once kernels of two streams of a process have overlapped, every kernel of a CUDA graph starts later from
then on, until another process uses the GPU. So headgate's side stream runs no kernel (`staging.device_copy`). Here
steps run as vLLM runs them: a graph of small kernels, the token's copy on a stream of its own, two steps in flight. A
job collects rows in one of several ways after every fifth step; shown is the time of a step before, during and after
it, in ms: medians. It does not happen each time, so each way has several jobs. Between jobs another process uses the
GPU.

Needs a GPU and no engine; half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing

NUM_SITES, HIDDEN = 48, 2048
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(NUM_SITES))
JOB_STEPS = 129
EVERY = 5
OTHERS_S = 0.3

Hook = Callable[[int], object]


class Way(NamedTuple):
    """What a job does before the graph of step i, after it, and at its end."""

    before: Hook = lambda _: None
    after: Hook = lambda _: None
    end: Callable[[], object] = lambda: None


def use_gpu(connection: Connection) -> None:
    """Another process: works for a moment whenever it is told to."""
    import torch

    values = torch.zeros(1 << 22, device="cuda")
    while connection.recv():
        until = time.monotonic() + OTHERS_S
        while time.monotonic() < until:
            values.add_(1)
            torch.cuda.synchronize()
        connection.send(True)


class Steps:
    """Steps like those of an engine, with a graph of `num_kernels` small kernels."""

    def __init__(self, num_kernels: int) -> None:
        import torch

        self._torch, device = torch, torch.device("cuda", torch.cuda.current_device())
        self._copies = torch.cuda.Stream()
        self._inputs = torch.zeros(64, dtype=torch.int32, device=device)
        self._on_host = torch.zeros(64, dtype=torch.int32, pin_memory=True)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._small, self._large = torch.zeros(2048, device=device), torch.zeros(1 << 19, device=device)
        self._small.add_(1)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for number in range(num_kernels):
                (self._large if number % 2 else self._small).add_(1)

    def run(self, count: int, way: Way | None = None) -> float:
        """Milliseconds of a step: the median of `count`."""
        way, under_way, ends = way or Way(), list[tuple[Any, Any]](), list[float]()
        for number in range(count):
            self._inputs.copy_(self._on_host, non_blocking=True)
            way.before(number)
            self._graph.replay()
            way.after(number)
            under_way.append(self._fetch_token())
            if len(under_way) == 2:
                copied, token = under_way.pop(0)
                copied.synchronize()
                token.tolist()
                ends.append(time.perf_counter())
        way.end()
        self._torch.cuda.synchronize()
        return 1e3 * statistics.median(after - before for before, after in pairwise(ends[3:]))

    def _fetch_token(self) -> tuple[Any, Any]:
        cuda = self._torch.cuda
        self._token.add_(1)
        copied, compute = cuda.Event(blocking=True), cuda.current_stream()
        with cuda.stream(self._copies):
            self._copies.wait_stream(compute)
            token = self._token.to("cpu", non_blocking=True)
            copied.record()
        return copied, token


def raw_way(*, has_kernel: bool, has_copy: bool) -> Way:
    """A gather, a copy to the host, or both, on a stream of their own that waits for the step."""
    import torch

    side, launched = torch.cuda.Stream(), torch.cuda.Event()
    ring = torch.zeros(96_000, HIDDEN, dtype=torch.bfloat16, device="cuda")
    index = torch.arange(240, device="cuda")
    packed, host = ring[:240].clone(), torch.zeros(240, HIDDEN, dtype=torch.bfloat16, pin_memory=True)

    def collect() -> None:
        launched.record(torch.cuda.current_stream())
        side.wait_event(launched)
        with torch.cuda.stream(side):
            if has_kernel:
                torch.index_select(ring, 0, index, out=packed)
            if has_copy:
                host.copy_(packed, non_blocking=True)

    return Way(after=lambda number: collect() if number % EVERY == EVERY - 1 else None, end=collect)


def headgate_way(num_sites: int) -> Way:
    """headgate's ring: prompt and decode steps of one request that captures so many layers."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    ring = StagingRing(
        sites=SITES,
        num_rows=8192,
        max_tokens=8192,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=device,
        staging_bytes=1 << 30,
    )
    prompt, decode = plan_of(num_sites, 64), plan_of(num_sites, 1)
    plan, under_way = prompt, list[StagedRows]()

    def before(number: int) -> None:
        nonlocal plan
        plan = (decode if number else prompt).later(0)  # of this step: the ring writes to it where its rows lie
        ring.begin(plan)

    def after(number: int) -> None:
        ring.keep(plan)
        if number % EVERY == EVERY - 1:
            ring.collect(under_way.append, patience_s=5)

    def end() -> None:
        ring.collect(under_way.append, patience_s=5)
        for staged in under_way:
            staged.wait()
            staged.release()
        under_way.clear()

    return Way(before, after, end)


def plan_of(num_sites: int, num_rows: int) -> StepPlan:
    """One request that wants the first `num_rows` batch rows at the first sites."""
    rows, masks = np.arange(num_rows), np.ones(num_rows, dtype=np.int64)
    group = PackGroup(SiteSet(SITES[:num_sites], np.arange(num_sites)), rows, rows, masks, (("request", 0, num_rows),))
    return StepPlan(rows, (group,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each way; returns the exit status: 1 if steps are slower after headgate's."""
    parser = argparse.ArgumentParser(prog="bench_side_stream", description=__doc__)
    parser.add_argument("--kernels", type=int, default=895, help="of a step (default: those of Qwen3-30B-A3B)")
    parser.add_argument("--jobs", type=int, default=4, help="for each way")
    options = parser.parse_args(arguments)
    ours, theirs = get_context("spawn").Pipe()
    other = get_context("spawn").Process(target=use_gpu, args=(theirs,), daemon=True)
    other.start()
    steps, worst = Steps(options.kernels), 0.0
    ways = {
        "nothing": Way(),
        "kernels and copies": raw_way(has_kernel=True, has_copy=True),
        "kernels": raw_way(has_kernel=True, has_copy=False),
        "copies": raw_way(has_kernel=False, has_copy=True),
        "headgate, 1 layer": headgate_way(1),
        "headgate, 48 layers": headgate_way(NUM_SITES),
    }
    for name, way in ways.items():
        cells = []
        for _ in range(options.jobs):
            ours.send(True)
            ours.recv()
            before, during, after = steps.run(60), steps.run(JOB_STEPS, way), steps.run(100)
            cells.append(f"{before:.3f} {during:.3f} {after:.3f}")
            worst = max(worst, after / before) if name.startswith("headgate") else worst
        print(f"{name:20} before, during, after: " + "   ".join(cells), flush=True)
    ours.send(False)
    return int(worst > 1.05)


if __name__ == "__main__":
    sys.exit(main())
