"""What one scrape of ``/metrics`` costs: the engine between two steps, and the event loop of the API server.

    .venv/bin/python -m tests.benchmarks.bench_scrape

A worker with three consumers, and an engine core with a hundred modules of 102 vectors. CPU time of the calls, and of
packing their answers; vLLM's own way there and back (a utility call, and one RPC to the workers) is not in it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from headgate.capture.engine.server.metrics_page import Counters, render
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.session import open_session
from headgate.capture.staging.ring import StagingRing
from headgate.steering.config import SteeringConfig
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.spec import SteeringSpec, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors

HIDDEN, NUM_MODULES, REPEATS = 64, 100, 200
HOOKS = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
SITES = tuple(Site(layer, hook) for layer in range(34) for hook in HOOKS)


def timed(call: Callable[[], object]) -> float:
    """Median CPU time in ms."""
    found = []
    for _ in range(REPEATS):
        started = time.thread_time()
        call()
        found.append(1e3 * (time.thread_time() - started))
    return statistics.median(found)


def worker() -> Callable[[], dict[str, Any]]:
    """What ``headgate_stats`` does in a worker that captures."""
    staging = StagingRing(
        sites=SITES,
        num_rows=16,
        max_tokens=16,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        staging_bytes=1 << 20,
    )
    files = CaptureConsumerSpec(name="filesystem", params={"root": tempfile.mkdtemp()})
    others = (CaptureConsumerSpec(name="inline"), CaptureConsumerSpec(name="memory"))
    model = ModelInfo(name="m", num_layers=34, hidden_size=HIDDEN, dtype="bfloat16", sites=SITES)
    config = CaptureConsumersConfig(consumers=(files, *others))
    session = open_session(config=config, model=model, sites=SITES, staging=staging)
    return lambda: {
        "capture": dataclasses.asdict(session.stats()),
        "steering": {"slots_live": 0, "slots_used": 0, "reconstructions": {}},
    }


def core() -> SteeringCore:
    """Steering's half of an engine core, full of modules."""
    services = SimpleNamespace(call_workers=lambda method, args: [])
    made = SteeringCore("bfloat16", 1 << 20, services, SteeringConfig())  # type: ignore[arg-type]
    draw = np.random.default_rng(0)
    for number in range(NUM_MODULES):
        vectors = PhaseVectors.from_rows({site: draw.normal(size=HIDDEN) for site in SITES})
        spec = SteeringSpec(prefill=vectors, decode=vectors)
        made.call("register", {"name": f"module-{number}", "spec": to_wire(spec)})
    return made


def page(stats: dict[str, Any], counts: dict[str, Any]) -> float:
    """Median time in ms that the event loop takes to make our part of the page."""

    class Client:
        core_engines = (b"0",)

        async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
            return [stats] if method == "collective_rpc" else {"ok": counts}

    config = Namespace(additional_config={"headgate": {"capture": {}, "steering": {}}})
    engine = Namespace(vllm_config=config, engine_core=Client())
    return timed(lambda: render(asyncio.run(Counters(lambda: engine).families())))


def main() -> None:
    stats, steering = worker(), core()
    for name, call in (
        ("worker: counters of 3 consumers", stats),
        (f"engine core: counts, {NUM_MODULES} modules", lambda: steering.call("counts", {})),
        (f"engine core: status, {NUM_MODULES} modules (GET /v1/steering)", lambda: steering.call("status", {})),
    ):
        print(f"{name:60} {timed(lambda call=call: msgspec.msgpack.encode(call())):7.3f} ms")  # type: ignore[misc]
    print(f"{'event loop: the page':60} {page(stats(), steering.call('counts', {})):7.3f} ms")


if __name__ == "__main__":
    main()
