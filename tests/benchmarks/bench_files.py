"""What files of captured rows cost: ``python -m tests.benchmarks.bench_files FOLDER [--requests 256]``.

No vLLM and no GPU: requests that capture every token at 34 sites of 2560 bfloat16 run side by side, as in a server that
decodes; whenever one ends, the next begins. A session plans their rows and copies them to staging memory, and a capture
process writes them as `filesystem` does. Shown is the CPU time of that process for a gigabyte, beside that of writing
the same bytes to a plain file, which the file system takes from everybody. Files are removed as they appear.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from headgate.capture.links.hub import ResultHub
from headgate.capture.links.shared_memory import SharedStaging
from headgate.capture.schema.batch import BatchView, FinalState, NewRequest
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.session import CaptureSession, open_session
from headgate.capture.staging.ring import StagingRing
from tests.benchmarks.bench_step_thread import wire

HIDDEN, ROW_BYTES = 2560, 5120
LAYOUTS = ("request", "raw", "shards")


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        folder: For the files, on the disk to measure.
        layout: Of the files.
        requests: That run at once.
        num_sites: Layers that each captures.
        prompt: Tokens of each prompt.
        output: Rows of decoding, on average.
        step_tokens: Tokens of a step at most.
        gigabytes: Rows to write.
        memory_bytes: Parameter of the consumer.
        staging_bytes: Staging memory.
        fsync: Parameter of the consumer.
        is_profiled: Whether py-spy shows where the time goes.
    """

    folder: Path
    layout: str
    requests: int
    num_sites: int
    prompt: int
    output: int
    step_tokens: int
    gigabytes: float
    memory_bytes: int
    staging_bytes: int
    fsync: bool
    is_profiled: bool


class Load:
    """Requests of a server that is always full; each step takes the prompts that fit and a token of every other."""

    def __init__(self, session: CaptureSession, hub: ResultHub, options: Options) -> None:
        self._session, self._hub, self._options = session, hub, options
        self._sites = sites_of(options)
        self._random = random.Random(0)
        self.num_begun = 0
        self._running: dict[str, list[int]] = {}
        """By id: tokens computed, rows at the end."""

    def step(self, *, can_begin: bool) -> int:
        """One step; returns the bytes of its rows, 0 if nothing is left to do."""
        for req_id in [req_id for req_id, (done, total) in self._running.items() if done >= total]:
            _, total = self._running.pop(req_id)
            tokens = np.zeros(total + 1, dtype=np.int64)
            final = FinalState(num_prompt_tokens=self._options.prompt, token_ids=tokens, status="length")
            self._session.request_finished(req_id, final)
        room = (self._options.step_tokens - len(self._running)) // self._options.prompt
        while can_begin and room > 0 and len(self._running) < self._options.requests:
            self._begin()
            room -= 1
        if not self._running:
            return 0
        computed = np.array([done for done, _ in self._running.values()], dtype=np.int64)
        count = np.where(computed, 1, self._options.prompt)
        view = BatchView(tuple(self._running), np.cumsum(count) - count, count, computed)
        self._session.step_begins(view, torch.zeros(int(count.sum()), dtype=torch.int32))
        self._session.step_ends()
        for state, new in zip(self._running.values(), count.tolist(), strict=True):
            state[0] += new
        return int(count.sum()) * len(self._sites) * ROW_BYTES

    def _begin(self) -> None:
        self.num_begun += 1
        req_id, output = f"request-{self.num_begun}", self._options.output
        is_first = self.num_begun <= self._options.requests
        self._running[req_id] = [
            0,
            self._options.prompt + self._random.randrange(1 if is_first else output // 2, 3 * output // 2),
        ]
        named = {"tag": "t", "layout": self._options.layout, "request_id": req_id, "name": req_id}
        made = wire(CaptureSpec(sites=self._sites, positions=Named("all"), options=named), self.num_begun)
        made["capture"]["reply"] = self._hub.address
        self._hub.expect(made["capture"]["key"], instances=["it"])
        prompt = np.zeros(self._options.prompt, dtype=np.int64)
        self._session.request_added(NewRequest(req_id=req_id, prompt_token_ids=prompt, wire=made))


class Sweeper:
    """Removes files as they appear, so that they need not all fit."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            for path in self._root.glob("t/*"):
                if path.is_dir() and path.name != "_shards":
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_file():
                    path.unlink()


def sites_of(options: Options) -> tuple[Site, ...]:
    """What is captured."""
    return tuple(Site(layer, HookPoint.POST_MLP) for layer in range(options.num_sites))


def open_one(options: Options, root: Path) -> CaptureSession:
    """A session whose capture process writes to `root`."""
    device, sites = torch.device("cpu"), sites_of(options)
    staging = StagingRing(
        sites=sites,
        num_rows=2 * options.step_tokens,
        max_tokens=options.step_tokens,
        hidden_size=HIDDEN,
        dtype=torch.bfloat16,
        device=device,
        staging_bytes=options.staging_bytes,
        memory=SharedStaging(options.staging_bytes // ROW_BYTES, HIDDEN, torch.bfloat16, device),
    )
    model = ModelInfo(name="m", num_layers=len(sites), hidden_size=HIDDEN, dtype="bfloat16", sites=sites)
    params = {"root": str(root), "fsync": options.fsync, "memory_bytes": options.memory_bytes}
    spec = CaptureConsumerSpec(name="filesystem", instance_name="it", params=params, max_stall_s=600)
    return open_session(config=CaptureConsumersConfig(consumers=(spec,)), model=model, sites=sites, staging=staging)


def floor_s(folder: Path, num_bytes: int = 1 << 29, file_bytes: int = 1 << 26) -> float:
    """CPU seconds of a gigabyte in plain files of new pages, which are removed."""
    data, started = os.urandom(file_bytes), time.thread_time()
    for _ in range(num_bytes // file_bytes):
        with (folder / "plain").open("wb", buffering=0) as file:
            file.write(data)
        (folder / "plain").unlink()
    return (time.thread_time() - started) * 1e9 / num_bytes


class Clock(NamedTuple):
    """What the capture process has used so far."""

    user: float
    system: float
    wall: float

    @classmethod
    def now(cls, process: psutil.Process) -> Clock:
        """Read it."""
        times = process.cpu_times()
        return cls(times.user, times.system, time.monotonic())


def run(session: CaptureSession, hub: ResultHub, options: Options, process: psutil.Process) -> tuple[int, Clock]:
    """Put the load on `session`.

    Returns:
        Bytes of rows after the first files, when memory was touched once, and what the process used for them.
    """
    load, num_bytes, warm_bytes, began = Load(session, hub, options), 0, 0, Clock.now(process)
    while new := load.step(can_begin=num_bytes - warm_bytes < options.gigabytes * 1e9):
        num_bytes += new
        if not warm_bytes and load.num_begun >= 4 * options.requests:
            warm_bytes, began = num_bytes, Clock.now(process)
    while (counted := session.stats().consumers[0]).requests < load.num_begun:
        time.sleep(0.01)
    if counted.errors or counted.dropped_rows:
        sys.exit(f"{counted.errors} of {counted.requests} requests failed: nothing was measured")
    return num_bytes - warm_bytes, Clock(*(b - a for a, b in zip(began, Clock.now(process), strict=True)))


def measure(options: Options) -> str:
    """One line about a load."""
    root = options.folder / "bench-files"
    shutil.rmtree(root, ignore_errors=True)
    hub, session = ResultHub(folder=str(options.folder)), open_one(options, root)
    (process,) = psutil.Process().children()
    sweeper = Sweeper(root)
    if options.is_profiled:
        profile = psutil.Popen(["py-spy", "record", "-p", str(process.pid), "-d", "20", "-f", "raw", "-o", "files.txt"])
    num_bytes, used = run(session, hub, options, process)
    memory = process.memory_info().rss - options.staging_bytes
    if options.is_profiled:
        profile.wait()
    session.close(60)
    hub.shutdown(1)
    sweeper.close()
    shutil.rmtree(root, ignore_errors=True)
    user, system = used.user * 1e9 / num_bytes, used.system * 1e9 / num_bytes
    return (
        f"{options.layout:9}{user:8.3f}{system:9.3f}{user + system:9.3f}{1 / (user + system):9.2f}"
        f"{num_bytes / used.wall / 1e9:9.2f}{memory / 2**20:9.0f}"
    )


def main() -> None:
    """Measure each layout."""
    parser = argparse.ArgumentParser(description="CPU time of the capture process for files of rows.")
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--layouts", nargs="*", default=["request"], help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--requests", type=int, default=256, help="at once")
    parser.add_argument("--sites", type=int, default=34)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--memory-mib", type=int, default=6144, help="parameter memory_bytes")
    parser.add_argument("--staging-mib", type=int, default=1024)
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    print(f"{'layout':9}{'user':>8}{'system':>9}{'CPU s/GB':>9}{'GB/s/CPU':>9}{'GB/s':>9}{'RSS MiB':>9}", flush=True)
    for layout in given.layouts:
        floor = floor_s(given.folder)
        options = Options(
            folder=given.folder,
            layout=layout,
            requests=given.requests,
            num_sites=given.sites,
            prompt=given.prompt,
            output=given.output,
            step_tokens=given.step_tokens,
            gigabytes=given.gigabytes,
            memory_bytes=given.memory_mib << 20,
            staging_bytes=given.staging_mib << 20,
            fsync=not given.no_fsync,
            is_profiled=given.profile,
        )
        print(measure(options), f"  a plain file {(floor + floor_s(given.folder)) / 2:.3f} s/GB", flush=True)


if __name__ == "__main__":
    main()
