"""Load on a server from processes of their own, so that no client's work delays another's clock.

Bodies are made before the clock starts, and answers are read after it has stopped: in between a process sends bytes,
receives bytes, and notes when.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from tests.benchmarks.figures import Answer
from tests.benchmarks.machine import keep_on
from tests.benchmarks.workload import Asked

TIMEOUT_S = 300


class Share(NamedTuple):
    """What one process has to do: requests ``first, first + step, ...``, so many at once, or each at its time."""

    url: str
    asked: Asked
    first: int
    step: int
    in_flight: int
    arrivals: Sequence[float] = ()


class Done(NamedTuple):
    """What came of it.

    Attributes:
        answers: Of the requests.
        cpu_s: CPU time of the process from the first request to the last answer.
        wall_s: That time.
    """

    answers: list[Answer]
    cpu_s: float
    wall_s: float


class Raw(NamedTuple):
    """A response as it came: status, and its bytes with the times of their arrival."""

    sent: float
    status: int
    chunks: list[tuple[float, bytes]]
    end: float


class Load:
    """Processes that send requests; a context manager.

    Args:
        num_processes: How many.
    """

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes, self._connections = [], []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(5)
            process.kill()

    def keep_on(self, cpus: list[int]) -> None:
        """Run the processes on `cpus` only."""
        for process in self._processes:
            keep_on(process.pid, cpus)

    def run(self, url: str, asked: Asked) -> tuple[list[Answer], float]:
        """Send all requests of `asked`.

        Returns:
            The answers, and the CPU share of the busiest process, 0 to 1.

        Raises:
            TimeoutError: If a process does not answer.
        """
        num = min(len(self._connections), asked.shape.in_flight)
        used = self._connections[:num]
        for index, connection in enumerate(used):
            in_flight = asked.shape.in_flight // num + (index < asked.shape.in_flight % num)
            arrivals = asked.shape.arrivals(asked.seed // 1000)[index::num]  # the same for all modes of a round
            connection.send(Share(url, asked, index, num, in_flight, arrivals))
        for connection in used:
            receive(connection)
        for connection in used:
            connection.send("go")
        done: list[Done] = [receive(connection) for connection in used]
        busiest = max(one.cpu_s / max(one.wall_s, 1e-9) for one in done)
        return [answer for one in done for answer in one.answers], busiest


def receive(connection: Connection) -> Any:
    """The next message.

    Raises:
        TimeoutError: If none comes in time.
    """
    if not connection.poll(TIMEOUT_S):
        raise TimeoutError(f"a process of the load generator says nothing for {TIMEOUT_S} s")
    return connection.recv()


def work(connection: Connection) -> None:
    """A process: answer shares until the other end is closed."""
    while True:
        try:
            share: Share = connection.recv()
            numbers = range(share.first, share.asked.shape.requests, share.step)
            bodies = [(share.asked.shape.tokens_of(index), *share.asked.body(index)) for index in numbers]
            connection.send("ready")
            connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        began, cpu = time.monotonic(), time.process_time()
        found = asyncio.run(send_all(share, bodies))
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        connection.send(Done([read(raw, tokens) for tokens, raw in found], cpu_s, wall_s))


async def send_all(share: Share, bodies: Sequence[tuple[int, str, bytes]]) -> list[tuple[int, Raw]]:
    """Send `bodies` as the share says; each goes with the number of tokens to expect."""
    import aiohttp

    left, began = iter(bodies), time.monotonic()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S - 20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        if share.arrivals:
            due = [began + seconds for seconds in share.arrivals]
            sending = [send_at(session, share.url, *one) for one in zip(due, left, strict=True)]
            return [*await asyncio.gather(*sending)]
        each = await asyncio.gather(*(send_some(session, share.url, left) for _ in range(share.in_flight)))
    return [one for some in each for one in some]


async def send_some(session: Any, url: str, left: Iterator[tuple[int, str, bytes]]) -> list[tuple[int, Raw]]:
    """Send one after the other of what is left."""
    return [await send_one(session, url, time.monotonic(), *request) for request in left]


async def send_at(session: Any, url: str, due: float, request: tuple[int, str, bytes]) -> tuple[int, Raw]:
    """Send a request at `due`; its times count from then, so that a late client does not look like a fast server."""
    await asyncio.sleep(max(due - time.monotonic(), 0))
    return await send_one(session, url, due, *request)


async def send_one(session: Any, url: str, sent: float, tokens: int, media_type: str, body: bytes) -> tuple[int, Raw]:
    """Send a request, and receive its answer."""
    status, chunks = 0, []
    try:
        async with session.post(url, data=body, headers={"Content-Type": media_type}) as response:
            status = response.status
            async for data in response.content.iter_any():
                chunks.append((time.monotonic(), data))
    except Exception as error:  # noqa: BLE001  whatever it is, it is shown as the request's error
        chunks.append((time.monotonic(), f"\n\ndata: {{}}\n\n{error!r}".encode()))
        status = status if status >= 400 else 0
    return tokens, Raw(sent, status, chunks, time.monotonic())


def events(chunks: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    """The documents of a stream, each with the time at which it was complete."""
    rest = b""
    for when, data in chunks:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data:").strip()
            if event.startswith(b"data:") and text != b"[DONE]":
                yield when, msgspec.json.decode(text)


def read(raw: Raw, tokens: int) -> Answer:
    """What a client saw; an error if it is not a whole answer of `tokens` tokens."""
    failed = Answer(raw.sent, math.nan, math.nan, raw.end, 0)
    if raw.status != 200:
        return failed._replace(error=f"HTTP {raw.status}: {b''.join(data for _, data in raw.chunks)[-300:]!r}")
    times: list[float] = []
    usage: Any = None
    results: dict[str, Any] = {}
    for when, document in events(raw.chunks):
        if "error" in document:
            return failed._replace(error=str(document["error"])[:300])
        if document.get("choices"):
            times.append(when)
        usage = document.get("usage") or usage
        results = document.get("capture_results") or results
    num = usage["completion_tokens"] if usage else 0
    wrong = [f"{name}: {found['error']}" for name, found in results.items() if found["status"] not in ("ok", "pending")]
    if wrong or num != tokens or not times:
        return failed._replace(error="; ".join(wrong) or f"{num} tokens in {len(times)} chunks, expected {tokens}")
    dropped = sum(found.get("dropped_rows") or 0 for found in results.values())
    gaps = [after - before for before, after in pairwise(times)]
    return Answer(raw.sent, times[0], times[-1], raw.end, num, dropped_rows=dropped, gaps=gaps)
