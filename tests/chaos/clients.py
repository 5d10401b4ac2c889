"""Clients that keep a server busy, and note what came of each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from headgate.steering.client.calls import Lines
from tests.chaos.workload import Mix, Shot, Workload

LONGEST_S = 90.0
"""No request takes longer on a quiet machine: it would be one that hangs."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a request.

    Attributes:
        shot: The request.
        began: On the monotonic clock, as is `ended`.
        end: ``answered``; ``vanished``: the client went away; ``broken``: the connection did; ``late``: no answer came
            in the time that a request may take.
        status: HTTP status, 0 without an answer.
        error: Text of an error, in the answer or in the stream.
        tokens: Of each sample.
        results: ``capture_results``.
    """

    shot: Shot
    began: float
    ended: float = 0.0
    end: str = "answered"
    status: int = 0
    error: str = ""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    results: dict[str, Any] | None = None

    def take(self, document: Any) -> None:
        """Take an answer, or a chunk of one."""
        if "error" in document:
            self.error = json.dumps(document["error"])[:2000]
        for choice in document.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        self.results = document.get("capture_results") or self.results

    def __str__(self) -> str:
        shot = self.shot
        wanted = {name: (job.hooks, job.positions) for name, job in shot.jobs.items()}
        about = f"{shot.key} {shot.path} n={shot.num_samples} tokens={shot.max_tokens} prompt={shot.prompt.index}"
        about += f" steering={shot.steering} stream={shot.stream} waits={shot.waits} moods={shot.moods} {wanted}"
        results = {name: {**one, "payload": None} for name, one in (self.results or {}).items()}
        return f"{about}\n    {self.end} {self.status} {self.error} {results}"


async def send(client: httpx.AsyncClient, shot: Shot, longest_s: float) -> Outcome:
    """Send a request, and see what comes of it in so many seconds."""
    outcome = Outcome(shot=shot, began=time.monotonic())
    try:
        async with asyncio.timeout(longest_s):
            if shot.stream:
                await _stream(client, outcome)
            else:
                response = await client.post(shot.path, json=shot.body)
                outcome.status = response.status_code
                outcome.take(response.json())
    except TimeoutError:
        outcome.end = "late"
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        outcome.end, outcome.error = "broken", repr(error)
    outcome.ended = time.monotonic()
    return outcome


async def _stream(client: httpx.AsyncClient, outcome: Outcome) -> None:
    left = outcome.shot.vanish_after
    async with client.stream("POST", outcome.shot.path, json=outcome.shot.body) as response:
        outcome.status = response.status_code
        if response.status_code != 200:
            outcome.take(json.loads(await response.aread()))
            return
        async for document in _documents(response):
            outcome.take(document)
            if left is not None:
                left -= 1
                if left < 0:
                    outcome.end = "vanished"
                    return
        if left is not None:
            outcome.end = "answered"


async def _documents(response: httpx.Response) -> AsyncIterator[Any]:
    """The chunks of a stream; an `httpx.HTTPError` if it has no end."""
    lines = Lines()
    async for piece in response.aiter_bytes():
        for line in lines.cut(piece):
            if line.startswith("data: [DONE]"):
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


class Crowd:
    """Clients that send one request after the other until they are told to stop.

    Args:
        url: Of the server.
        workload: The requests.
        mix: How they are chosen.
        count: Clients.
        note: Takes what came of each request.
        longest_s: Seconds that the next request may take.
    """

    def __init__(
        self,
        url: str,
        workload: Workload,
        mix: Mix,
        count: int,
        note: Callable[[Outcome], None],
        longest_s: Callable[[], float],
    ) -> None:
        self._limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=self._limits, trust_env=False)
        self._workload, self._note, self._longest_s = workload, note, longest_s
        self.mix = mix
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(count)]

    async def _run(self) -> None:
        while not self._is_over:
            outcome = await send(self._client, self._workload.next(self.mix), self._longest_s())
            self._note(outcome)
            if outcome.end == "broken":
                await asyncio.sleep(0.2)  # as clients do, before they try again

    async def stop(self) -> None:
        """Let every client end its request."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()
