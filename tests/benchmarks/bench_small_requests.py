"""What many small captures cost: ``python -m tests.benchmarks.bench_small_requests [--rate 100] [--seconds 10]``.

No vLLM and no GPU: so many requests a second come, each captures the last row of its prompt at one site and decodes 32
tokens that nobody captures, in steps of 4 ms. Shown is what the step thread spends on capture, in us a request and as a
share of a core, and the share that the capture process takes, for each layout of `filesystem` on a RAM disk. An idle
session comes first: what it shows is what the load itself takes.

With ``--growth N``, N requests come as fast as they are served, and memory, open files and threads of this process and
of the capture process are shown after each tenth of them. The exit status is 1 if they grow after the first tenth by
more than `GROWTH_MIB`, or by any file or thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from headgate.capture.links.hub import ResultHub
from headgate.capture.schema.batch import BatchView, FinalState, NewRequest
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.positions import Named
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.session import CaptureSession
from tests.benchmarks.bench_step_thread import PROMPT, SITES, STEP_S, open_one, wire

DECODED = 32
LAYOUTS = ("request", "shards")
GROWTH_MIB = 16.0
"""Growth of resident memory that is none: the allocators of Python and of the system keep free memory in pieces."""
MOST_RUNNING = 256


class Load:
    """Requests that come at a steady rate, each with a row to capture; the clock runs while the session is called."""

    def __init__(self, session: CaptureSession, hub: ResultHub, options: dict[str, Any] | None) -> None:
        self._session = session
        self._hub = hub
        self._options = options
        self.running: dict[str, int] = {}
        self.num_begun = 0
        self.spent_s = 0.0

    def step(self, num_new: int) -> None:
        """One step, with so many new requests."""
        ended = [req_id for req_id, done in self.running.items() if done >= PROMPT + DECODED]
        for req_id in ended:
            del self.running[req_id]
        new = [self._new() for _ in range(num_new)]
        computed = np.array(list(self.running.values()), dtype=np.int64)
        count = np.where(computed, 1, PROMPT)
        view = BatchView(tuple(self.running), np.cumsum(count) - count, count, computed)
        tokens = torch.zeros(max(int(count.sum()), 1), dtype=torch.int32)
        token_ids = np.zeros(PROMPT + DECODED + 1, dtype=np.int64)
        start = time.perf_counter()
        for req_id in ended:
            final = FinalState(num_prompt_tokens=PROMPT, token_ids=token_ids, status="length")
            self._session.request_finished(req_id, final)
        for request in new:
            if self._options is not None:
                self._session.request_added(request)
        self._session.step_begins(view if self.running else None, tokens)
        self._session.step_ends()
        self.spent_s += time.perf_counter() - start
        for req_id, added in zip(self.running, count.tolist(), strict=True):
            self.running[req_id] += added

    def _new(self) -> NewRequest:
        self.num_begun += 1
        req_id = f"request-{id(self)}-{self.num_begun}"
        self.running[req_id] = 0
        options = {**(self._options or {}), "name": req_id, "request_id": req_id}
        spec = CaptureSpec(sites=SITES[:1], positions=Named("last_prompt"), options=options)
        made = wire(spec, self.num_begun)
        if self._options is not None:
            made["capture"]["reply"] = self._hub.address
            self._hub.expect(made["capture"]["key"], instances=["it"])
        return NewRequest(req_id=req_id, prompt_token_ids=np.zeros(PROMPT, dtype=np.int64), wire=made)


def run(session: CaptureSession, hub: ResultHub, options: dict[str, Any] | None, rate: float, seconds: float) -> str:
    """Put the load on `session`, and return a line about it."""
    load, process = Load(session, hub, options), psutil.Process().children()[-1]
    before, began = process.cpu_times(), time.monotonic()
    while (now := time.monotonic()) < began + seconds or load.running:
        num_new = int((now - began) * rate) - load.num_begun
        load.step(num_new if now < began + seconds else 0)
        time.sleep(max(now + STEP_S - time.monotonic(), 0))
    after, took_s = process.cpu_times(), time.monotonic() - began
    used_s = after.user + after.system - before.user - before.system
    per_request = 1e6 * load.spent_s / load.num_begun
    return f"{per_request:12.0f} us{100 * load.spent_s / took_s:10.2f} %{100 * used_s / took_s:14.1f} %"


def show_growth(layout: str, number: int) -> bool:
    """See `grow`, for one layout."""
    print(f"{layout}: this process, then the capture process")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        hub, params = ResultHub(folder=folder), {"root": f"{folder}/rows"}
        consumer = CaptureConsumerSpec(name="filesystem", instance_name="it", params=params)
        session = open_one(consumer, is_process=True)
        is_steady = grow(session, hub, Path(folder), {"tag": "t", "layout": layout}, number)
        session.close(60)
        hub.shutdown(1)
    return is_steady


def held(process: psutil.Process) -> tuple[float, int, int]:
    """MiB of resident memory, open files, and threads."""
    return process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()


def grow(session: CaptureSession, hub: ResultHub, folder: Path, options: dict[str, Any], number: int) -> bool:
    """Serve so many requests and show what the processes hold; return whether that has not grown."""
    load, processes = Load(session, hub, options), [psutil.Process(), psutil.Process().children()[-1]]
    after: list[list[tuple[float, int, int]]] = []
    for tenth in range(1, 11):
        while (served := session.stats().consumers[0].requests) < number * tenth // 10:
            room = MOST_RUNNING - (load.num_begun - served)
            load.step(min(max(room, 0), 8, number * tenth // 10 - load.num_begun))
        for path in folder.glob("rows/t/*.safetensors"):
            path.unlink()
        for index in range(number * (tenth - 1) // 10, number * tenth // 10):
            hub.close(f"key-{index + 1}")
        after.append([held(process) for process in processes])
        shown = "   ".join(f"{rss:8.1f} MiB {files:5} files {threads:4} threads" for rss, files, threads in after[-1])
        print(f"{number * tenth // 10:9} requests   {shown}", flush=True)
    pairs = [(first, last) for first, last in zip(after[0], after[-1], strict=True)]
    return all(last[0] < first[0] + GROWTH_MIB and last[1:] <= first[1:] for first, last in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="What many small captures cost.")
    parser.add_argument("--growth", type=int, default=0, metavar="N", help="show what N requests leave instead")
    parser.add_argument("--rate", type=float, default=100, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.growth:
        sys.exit(0 if all(show_growth(layout, given.growth) for layout in LAYOUTS) else 1)
    print(f"{given.rate:g} requests/s   {'step thread':>15}{'of a core':>12}{'the process':>16}")
    for layout in (None, *LAYOUTS):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            hub, params = ResultHub(folder=folder), {"root": f"{folder}/rows"}
            session = open_one(
                CaptureConsumerSpec(name="filesystem", instance_name="it", params=params), is_process=True
            )
            options = None if layout is None else {"tag": "t", "layout": layout}
            text = run(session, hub, options, given.rate, given.seconds)
            session.close(60)
            hub.shutdown(1)
            (counted,) = session.stats().consumers
        print(f"{layout or 'idle':16}{text}", flush=True)
        if counted.errors:
            sys.exit(f"{counted.errors} of {counted.requests} requests failed: nothing was measured")


if __name__ == "__main__":
    main()
