"""What one front end takes from workers on other hosts: results a second of 1 and of many of them, and bytes of rows.

``python -m tests.benchmarks.bench_hosts [--hosts 100]``: a front end in this process, the workers in another; Unix
sockets beside TCP with keys over the loopback, in one run. ``core`` is how much of a core the front end used: what its
event loop and its tokenizer lack then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import zmq

from headgate.capture.links import peer
from headgate.capture.links.hub import Inboxes, ResultHub
from headgate.capture.links.messages import Result
from headgate.capture.links.network import Listening, NetworkKeys
from headgate.capture.links.peer import Channel, endpoint_of
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.results import CaptureResult

KEYS = NetworkKeys(b"front ends".ljust(32), b"workers".ljust(32))
HERE = Listening(host="127.0.0.1", keys=KEYS)
NUM_RESULTS, NUM_ROWS_MESSAGES, ROWS_BYTES = 20_000, 400, 2 << 20
PAYLOAD = {"paths": ["/data/captures/tag/cmpl-0123456789abcdef-0.safetensors"], "num_rows": 384, "durable": True}
"""Of a result as the filesystem consumer gives it."""


class Taken(NamedTuple):
    """Seconds of the clock, and of this process's processors."""

    seconds: float
    cpu_s: float


def elsewhere() -> None:
    """Make this process one of another host."""
    peer.host_id = lambda: "another host"  # type: ignore[assignment]


def send_results(reply: str, num_hosts: int, is_far: bool, begin: Any) -> None:
    """Send all results, from as many workers as there are hosts, by turns."""
    if is_far:
        elsewhere()
    senders = [ResultSender(keys=KEYS) for _ in range(num_hosts)]
    begin.wait()
    for number in range(NUM_RESULTS):
        senders[number % num_hosts].send_result(
            reply,
            Result(
                key=f"k{number}",
                req_id="r",
                instance="files",
                result=CaptureResult(status="ok", payload=PAYLOAD, num_rows=384),
            ),
        )
    for sender in senders:
        sender.close(60)


def send_rows(address: str, is_far: bool, begin: Any) -> None:
    """Send messages of rows, 32 MiB of them unacknowledged, as a worker does."""
    if is_far:
        elsewhere()
    channel = Channel(zmq.Context(), endpoint_of(address, KEYS), 32 << 20)
    rows = memoryview(bytearray(ROWS_BYTES))
    begin.wait()
    for _ in range(NUM_ROWS_MESSAGES):
        channel.send([b"header", rows], timeout_s=60)
    channel.close(60)


def measure(target: Callable[..., None], arguments: tuple[Any, ...], waits: Sequence[Callable[[], object]]) -> Taken:
    """Run `target` in a process of its own; return what was taken between the first and the last of `waits`."""
    spawning = multiprocessing.get_context("spawn")
    begin = spawning.Event()
    worker = spawning.Process(target=target, args=(*arguments, begin))
    worker.start()
    begin.set()
    waits[0]()
    began, cpu = time.monotonic(), time.process_time()
    for wait in waits[1:]:
        wait()
    taken = Taken(time.monotonic() - began, time.process_time() - cpu)
    worker.join()
    return taken


def results(num_hosts: int, listening: Listening | None, folder: str) -> str:
    """Measure results through a hub."""
    hub = ResultHub(folder=folder, listening=listening)
    for number in range(NUM_RESULTS):
        hub.expect(f"k{number}", instances=["files"])
    waits = [partial(hub.wait, f"k{number}", 60) for number in range(NUM_RESULTS)]
    took = measure(send_results, (hub.address, num_hosts, listening is not None), waits)
    hub.shutdown(10)
    each = took.cpu_s / NUM_RESULTS * 1e6
    return f"{NUM_RESULTS / took.seconds:8.0f} results/s  {took.cpu_s / took.seconds:5.2f} core  {each:4.0f} us each"


def rows(listening: Listening | None, folder: str) -> str:
    """Measure rows through an inbox that does nothing with them."""
    came = threading.Semaphore(0)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        doors = Inboxes(f"ipc://{own}/hub", lambda frames: came.release(), listening=listening, name="rows")
        took = measure(send_rows, (doors.address, listening is not None), [came.acquire] * NUM_ROWS_MESSAGES)
        doors.hub.close(10)
    speed = NUM_ROWS_MESSAGES * ROWS_BYTES / took.seconds / 1e9
    return f"{speed:8.2f} GB/s       {took.cpu_s / took.seconds:5.2f} core"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=100)
    hosts = parser.parse_args().hosts
    with tempfile.TemporaryDirectory() as folder:
        print("results, one worker,  Unix socket", results(1, None, folder))
        print("results, one worker,  TCP        ", results(1, HERE, folder))
        print(f"results, {hosts} workers, TCP       ", results(hosts, HERE, folder))
        print("rows,    one worker,  Unix socket", rows(None, folder))
        print("rows,    one worker,  TCP        ", rows(HERE, folder))


if __name__ == "__main__":
    main()
