"""Time of the steering host path in a worker: ``python tests/benchmarks/bench_steering_step.py``. Numpy only; seconds.

Each line is the median and the 99th percentile. A step is `RowResolver.resolve` and `RowTable.take_writes`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from headgate.capture.schema.batch import BatchView
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors, WeightedSum
from headgate.steering.worker.rows.row_table import RowTable, rows_needed
from headgate.steering.worker.rows.step_rows import RowResolver
from headgate.steering.worker.rows.vector_pool import SlotPool

HIDDEN = 2560
HOOKS = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
PROMPT = 64
NUM_STEPS = 2000
REQ_IDS = tuple(f"request-{i}" for i in range(256))


def sites_of(num_layers: int) -> tuple[Site, ...]:
    return tuple(Site(layer, hook) for layer in range(num_layers) for hook in HOOKS)


def config(sites: tuple[Site, ...], seed: int, *, is_rounded: bool = False) -> PhaseVectors:
    rows = np.random.default_rng(seed).standard_normal((len(sites), HIDDEN), dtype=np.float32)
    if is_rounded:  # to the model's dtype
        rows = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    made = PhaseVectors.from_rows(dict(zip(sites, rows, strict=True)))
    assert made is not None
    return made


def table(sites: tuple[Site, ...], num_slots: int = 8500) -> RowTable:
    pool = SlotPool(num_slots, HIDDEN, "bfloat16")
    return RowTable(sites=sites, num_rows=rows_needed(256), pool=pool)


def batch(num_scheduled: int, computed: int, req_ids: tuple[str, ...] = REQ_IDS) -> BatchView:
    counts = np.full(len(req_ids), num_scheduled, dtype=np.int64)
    return BatchView(req_ids, np.cumsum(counts) - counts, counts, np.full(len(req_ids), computed, dtype=np.int64))


def show(name: str, times: list[float]) -> None:
    print(f"{name:58}  {np.median(times):8.1f} us   p99 {np.percentile(times, 99):8.1f} us")


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def steps(name: str, num_configs: int, num_layers: int, num_scheduled: int = 1, *, turns: bool = False) -> None:
    """256 requests that share `num_configs` configs; with `turns` the batch has another order in every step."""
    sites = sites_of(num_layers)
    rows = table(sites)
    resolver = RowResolver(rows, 8192)
    configs = [config(sites[: 3 * min(num_layers, 8)], seed) for seed in range(num_configs)]
    for i, req_id in enumerate(REQ_IDS):
        own = configs[i % num_configs] if configs else None
        rows.add(req_id, PROMPT, own, own)
    times = []
    for step in range(NUM_STEPS):
        turn = step % 256 if turns else 0
        view = batch(num_scheduled, PROMPT + step * num_scheduled, REQ_IDS[turn:] + REQ_IDS[:turn])
        times.append(timed(lambda: (resolver.resolve(view), rows.take_writes())))  # noqa: B023
    show(f"{name}, {num_layers} layers", times)


def requests(num_layers: int) -> None:
    """What a request costs the worker."""
    sites = sites_of(num_layers)
    rows, number = table(sites), count()
    known, fresh = config(sites, 0), [config(sites, seed) for seed in range(1, 41)]
    rounded = [config(sites, seed, is_rounded=True) for seed in range(41, 81)]
    where = f"{num_layers} layers x 3 hooks x {HIDDEN}"

    def add(make: Callable[[], Vectors | None]) -> float:
        def take() -> None:
            own = make()
            rows.add(f"r{next(number)}", PROMPT, own, own)

        return timed(take)

    rows.keep_module("module", known, known)
    rows.apply_changes()
    show(f"add, unsteered, {where}", [add(lambda: None) for _ in range(1000)])
    show(f"add, named module, {where}", [add(lambda: known) for _ in range(1000)])
    show(
        f"add, named module times 2, again, {where}",
        [add(lambda: WeightedSum([(known, 2.0)])) for _ in range(1000)][1:],
    )
    show(f"add, new config in float32, {where}", [add(lambda: own) for own in fresh])  # noqa: B023
    show(f"add, new config in bfloat16, {where}", [add(lambda: own) for own in rounded])  # noqa: B023
    rows.batch([f"r{at}" for at in range(next(number))])
    show(f"writes of {2 * len(fresh)} such configs, per config", [timed(rows.take_writes) / (2 * len(fresh))])
    rows.set_global(known, known)
    show("global change with those live", [timed(rows.apply_changes)])


def main() -> None:
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {NUM_STEPS} steps each")
    steps("256 decode, nobody steered", 0, 34)
    for num_layers in (8, 34, 80):
        steps("256 decode, 16 configs", 16, num_layers)
    steps("256 decode, 256 configs", 256, 34)
    steps("256 decode, 16 configs, other order in each step", 16, 34, turns=True)
    steps("8192 prefill in 256 chunks, 16 configs", 16, 34, 32)
    for num_layers in (1, 34):
        requests(num_layers)
    sites = sites_of(34)
    table_map = np.zeros((len(sites), rows_needed(256)), dtype=np.int32)
    for num_tokens in (256, 8192):
        tokens = np.arange(num_tokens, dtype=np.int32) % 500
        times = [timed(lambda: table_map[:, tokens]) for _ in range(50)]  # noqa: B023
        show(f"slots of {num_tokens} tokens at {len(sites)} sites, in numpy", times)


if __name__ == "__main__":
    main()
