"""Time of one `StepPlanner.plan`: ``python tests/benchmarks/bench_plan.py``. Needs numpy only; takes seconds.

Each line is the median and the 99th percentile over the steps of one batch, each step planned once. The last lines are
of the longest selectors that a client may send: what the event loop pays for one, what the step thread pays for each
request that has one, and a step of eight such requests.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping

import numpy as np

from headgate.capture.planning.planner import StepPlanner
from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.positions import MAX_LISTED, Indices, Named, PositionSelector, Span, parse_positions
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec, SpecReader

LAYERS = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(34))
NUM_STEPS = 2000
PROMPT = 64


def spec(positions: PositionSelector, sites: tuple[Site, ...] = LAYERS) -> CaptureSpec:
    return CaptureSpec(sites=sites, positions=positions)


def same(positions: PositionSelector) -> Callable[[int], Mapping[int, CaptureSpec]]:
    return lambda _: {0: spec(positions)}


CASES: dict[str, tuple[int, Callable[[int], Mapping[int, CaptureSpec]]]] = {
    "256 decode, nobody captures": (1, lambda _: {}),
    "256 decode, all done (last_prompt)": (1, same(Named("last_prompt"))),
    "256 decode, one captures": (1, lambda i: {} if i else {0: spec(Named("all"))}),
    "256 decode, one profile": (1, same(Named("all"))),
    "256 decode, 3 consumers alike": (1, lambda _: {bit: spec(Named("all")) for bit in range(3)}),
    "256 decode, own start each": (1, lambda i: {0: spec(Span(start=i))}),
    "256 decode, 2 consumers, own start": (1, lambda i: {0: spec(Named("all"), LAYERS[:4]), 1: spec(Span(start=i))}),
    "256 decode, every 7th position": (1, same(Span(step=7))),
    "256 decode, 8 site sets": (1, lambda i: {0: spec(Named("all"), LAYERS[i % 8 : i % 8 + 2])}),
    "256 decode, own uneven list each": (1, lambda i: {0: spec(Indices.of((i, PROMPT + i, PROMPT + 9000 + 2 * i)))}),
    "8192 prefill in 256 chunks": (32, same(Named("all"))),
    "8192 prefill, 2 consumers": (32, lambda i: {0: spec(Named("all")), 1: spec(Span(start=i, step=3))}),
}


def batch(num_scheduled: int, computed: int, req_ids: tuple[str, ...]) -> BatchView:
    count = np.full(len(req_ids), num_scheduled, dtype=np.int64)
    return BatchView(req_ids, np.cumsum(count) - count, count, np.full(len(req_ids), computed, dtype=np.int64))


def measure(num_scheduled: int, specs: Callable[[int], Mapping[int, CaptureSpec]]) -> tuple[float, float]:
    """Median and 99th percentile of a step, in microseconds."""
    planner, req_ids = StepPlanner(LAYERS), tuple(f"request-{i}" for i in range(256))
    for i, req_id in enumerate(req_ids):
        planner.add(req_id, PROMPT, specs(i))
    planner.plan(batch(PROMPT, 0, req_ids))
    times = []
    for step in range(NUM_STEPS):
        view = batch(num_scheduled, PROMPT + step * num_scheduled, req_ids)
        start = time.perf_counter_ns()
        planner.plan(view)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return float(np.median(times)), float(np.percentile(times, 99))


def longest_lists() -> dict[str, list[float]]:
    """Times in microseconds."""
    raw = [*range(2 * MAX_LISTED - 4, 0, -2), 2 * MAX_LISTED + 1, -1]
    reader, planner = SpecReader(LAYERS), StepPlanner(LAYERS)
    wire = CaptureSpec(sites=LAYERS, positions=parse_positions(raw, "positions").resolve(PROMPT, "positions")).to_wire()
    received = [{**wire, "positions": bytes(bytearray(wire["positions"]))} for _ in range(50)]
    req_ids = tuple(f"request-{i}" for i in range(8))
    views = iter([batch(PROMPT, 0, req_ids), *(batch(1, PROMPT + step, req_ids) for step in range(NUM_STEPS))])
    return {
        "event loop: parse, resolve": timed(
            50, lambda _: parse_positions(raw, "positions").resolve(PROMPT, "positions")
        ),
        "step thread: read, add": timed(
            50, lambda i: planner.add(f"request-{i % 8}", PROMPT, {0: reader.read(received[i])})
        ),
        "8 decode, longest lists": timed(NUM_STEPS, lambda _: planner.plan(next(views))),
    }


def timed(count: int, call: Callable[[int], object]) -> list[float]:
    times = []
    for index in range(count):
        start = time.thread_time_ns()  # what others on the machine take is not theirs
        call(index)
        times.append((time.thread_time_ns() - start) / 1e3)
    return times


def main() -> None:
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {NUM_STEPS} steps each")
    for name, (num_scheduled, specs) in CASES.items():
        median, p99 = measure(num_scheduled, specs)
        print(f"{name:36}  {median:8.1f} us   p99 {p99:8.1f} us")
    planner, add = StepPlanner(LAYERS), []
    for i in range(NUM_STEPS):
        start = time.perf_counter_ns()
        planner.add(f"request-{i}", PROMPT, {0: spec(Named("all"))})
        add.append((time.perf_counter_ns() - start) / 1e3)
    print(f"{'add, 34 sites':36}  {np.median(add):8.1f} us   p99 {np.percentile(add, 99):8.1f} us")
    for name, times in longest_lists().items():
        print(f"{name:36}  {np.median(times):8.1f} us   p99 {np.percentile(times, 99):8.1f} us")


if __name__ == "__main__":
    main()
