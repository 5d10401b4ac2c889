"""What capturing costs the thread that runs the steps: ``python -m tests.benchmarks.bench_step_thread``.

No vLLM and no GPU: the step thread does a fixed amount of small torch operations, as a model runner does before it
launches a forward, and then waits for the rest of the step's time, as it does for a GPU. A real session captures every
row of 34 sites of 64 decoding requests meanwhile. Rows are narrow, since what counts here is the interpreter that all
threads of the process share. Each line is one consumer, on threads of this process or in a capture process, in ms of
the step thread.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.schema.batch import BatchView, FinalState, NewRequest, RequestWire
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.session import CaptureSession, open_session
from headgate.capture.staging.ring import StagingRing

NUM_REQUESTS, PROMPT, OUTPUT, HIDDEN = 64, 32, 96, 64
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(34))
STEP_S = 0.004
STAGING_BYTES = 64 << 20
NUM_OPS = 450
"""Small operations of a step besides capture: about two milliseconds, as a model runner has."""


class Timed:
    """The parts of a step, in seconds."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {"runner": [], "begins": [], "ends": []}

    def __call__(self, name: str, started: float) -> float:
        now = time.perf_counter()
        self.parts[name].append(now - started)
        return now


def runner_work(small: torch.Tensor) -> None:
    for _ in range(NUM_OPS):
        small = small + 1


def wire(spec: CaptureSpec, index: int) -> RequestWire:
    return {
        "v": 1,
        "capture": {
            "id": f"client-{index}",
            "n": 1,
            "reply": "ipc:///tmp/nobody",
            "wait": False,
            "key": f"key-{index}",
            "specs": {"it": spec.to_wire()},
        },
    }


class Load:
    """A batch that is always full: what has ended is replaced by the next request, whose prompt joins the step."""

    def __init__(self, session: CaptureSession | None, options: Mapping[str, Any]) -> None:
        self._session = session
        self._options = options
        self._random = random.Random(0)
        self._num_requests = 0
        self._running: dict[str, list[int]] = {}
        """By id: tokens computed, tokens at the end."""

    def step(self) -> BatchView:
        """The next step; the session hears of what ended and what began."""
        for req_id in [req_id for req_id, (done, total) in self._running.items() if done >= total]:
            _, total = self._running.pop(req_id)
            if self._session is not None:
                tokens = np.zeros(total + 1, dtype=np.int64)
                self._session.request_finished(
                    req_id, FinalState(num_prompt_tokens=PROMPT, token_ids=tokens, status="length")
                )
        while len(self._running) < NUM_REQUESTS:
            self._begin()
        computed = np.array([done for done, _ in self._running.values()], dtype=np.int64)
        count = np.where(computed, 1, PROMPT)
        for (req_id, state), new in zip(self._running.items(), count.tolist(), strict=True):
            self._running[req_id] = [state[0] + new, state[1]]
        return BatchView(tuple(self._running), np.cumsum(count) - count, count, computed)

    def _begin(self) -> None:
        self._num_requests += 1
        req_id = f"request-{id(self)}-{self._num_requests}"
        first = self._num_requests <= NUM_REQUESTS
        self._running[req_id] = [0, PROMPT + self._random.randrange(1 if first else OUTPUT // 2, 3 * OUTPUT // 2)]
        if self._session is not None:
            options = {**self._options, "request_id": req_id, "name": req_id}
            spec = CaptureSpec(sites=SITES, positions=Named("all"), options=options)
            prompt = np.zeros(PROMPT, dtype=np.int64)
            self._session.request_added(
                NewRequest(req_id=req_id, prompt_token_ids=prompt, wire=wire(spec, self._num_requests))
            )


def run(session: CaptureSession | None, options: Mapping[str, Any], seconds: float) -> Timed:
    timed, small, load = Timed(), torch.zeros(8), Load(session, options)
    tokens = torch.zeros(NUM_REQUESTS * PROMPT, dtype=torch.int32)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        due = time.perf_counter() + STEP_S
        view = load.step()
        started = time.perf_counter()
        if session is not None:
            session.step_begins(view, tokens)
            started = timed("begins", started)
        runner_work(small)
        started = timed("runner", started)
        if session is not None:
            session.step_ends()
            timed("ends", started)
        time.sleep(max(due - time.perf_counter(), 0))
    return timed


def open_one(consumer: CaptureConsumerSpec, *, is_process: bool) -> CaptureSession:
    max_tokens, device = NUM_REQUESTS * PROMPT, torch.device("cpu")
    memory = SharedStaging(STAGING_BYTES // (2 * HIDDEN), HIDDEN, torch.bfloat16, device) if is_process else None
    staging = StagingRing(
        sites=SITES,
        num_rows=max_tokens,
        max_tokens=max_tokens,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=device,
        staging_bytes=STAGING_BYTES,
        memory=memory,
    )
    model = ModelInfo(name="m", num_layers=34, hidden_size=HIDDEN, dtype="bfloat16", sites=SITES)
    config = CaptureConsumersConfig(consumers=(consumer,))
    return open_session(config=config, model=model, sites=SITES, staging=staging)


def line(name: str, timed: Timed) -> str:
    def shown(values: list[float]) -> str:
        if not values:
            return f"{'-':>20}"
        ms = [1e3 * value for value in values]
        return f"{statistics.fmean(ms):6.2f} {statistics.median(ms):6.2f} {np.percentile(ms, 99):6.2f}"

    return f"{name:24} " + "   ".join(shown(values) for values in timed.parts.values())


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    print(f"{'mean, median, p99 in ms':24} {'the runner itself':20}   {'step_begins':20}   step_ends")
    print(line("no capture", run(None, {}, seconds)))
    for name in ("memory", "filesystem"):
        options = {"tag": "t", "layout": "request"} if name == "filesystem" else {}
        for kind in ("threads", "process"):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                params = {"root": folder} if name == "filesystem" else {}
                consumer = CaptureConsumerSpec(name=name, instance_name="it", params=params)
                session = open_one(consumer, is_process=kind == "process")
                print(line(f"{name}, {kind}", run(session, options, seconds)), flush=True)
                (counted,) = session.stats().consumers
                session.close(60)
            if counted.errors:
                sys.exit(f"{counted.errors} of {counted.requests} requests failed: nothing was measured")


if __name__ == "__main__":
    main()
