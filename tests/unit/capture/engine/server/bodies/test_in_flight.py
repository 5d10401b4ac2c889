"""The budget of bytes for all bodies that are on their way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from headgate.capture.engine.server.bodies.in_flight import STALLED_S, ArrivingBody, BytesInFlight
from headgate.capture.engine.server.bodies.middleware import Bodies
from tests.fakes.body_site import MAX_BYTES, Inner, bodies


class Sender:
    """A client that sends a body piece by piece, when it is told to."""

    def __init__(self, middleware: Bodies) -> None:
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.answer: list[Any] = []
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        self._call = asyncio.ensure_future(middleware(scope, self._pieces.get, self._take))

    async def _take(self, message: Any) -> None:
        self.answer.append(message)

    async def send(self, size: int) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": True})
        while not self._pieces.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self) -> Any:
        self._pieces.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await self._call
        return self.answer[0]["status"]

    async def hang_up(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})
        await self._call


def test_bodies_beyond_the_budget_are_refused_until_others_have_been_read() -> None:
    async def run() -> None:
        middleware = bodies(Inner(), max_buffered=MAX_BYTES)
        first, gone, late = (Sender(middleware) for _ in range(3))
        await first.send(MAX_BYTES // 2)
        await gone.send(MAX_BYTES // 2)
        await late.send(1)

        assert await late.end() == 503
        assert (b"retry-after", b"1") in late.answer[0]["headers"]
        error = json.loads(late.answer[1]["body"])["error"]
        assert (error["code"], "max_buffered_bytes" in error["message"]) == (503, True)
        await gone.hang_up()
        for _ in range(3):
            again = Sender(middleware)
            await again.send(MAX_BYTES // 2)
            assert await again.end() == 200
        assert await first.end() == 200

    asyncio.run(run())


def test_a_body_is_in_nobodys_way_while_its_answer_is_made() -> None:
    async def run() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await may_end.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        middleware = bodies(slow, max_buffered=MAX_BYTES)
        first, second = Sender(middleware), Sender(middleware)
        await first.send(MAX_BYTES)
        ending = asyncio.ensure_future(first.end())
        await begun.wait()
        await second.send(MAX_BYTES)
        may_end.set()
        assert await second.end() == await ending == 200

    asyncio.run(run())


def test_a_body_that_stalls_makes_way() -> None:
    now = [0.0]
    budget = BytesInFlight(100, clock=lambda: now[0])
    stalled, slow, fast = ArrivingBody(), ArrivingBody(), ArrivingBody()
    budget.add(stalled, b"x" * 60)
    budget.add(slow, b"x" * 40)
    now[0] = STALLED_S - 1
    budget.add(slow, b"")
    budget.add(fast, b"x")
    assert (stalled.is_refused, slow.is_refused, fast.is_refused) == (False, False, True)

    now[0] = STALLED_S + 1
    another = ArrivingBody()
    budget.add(another, b"x" * 60)

    assert (stalled.is_refused, slow.is_refused, another.is_refused) == (True, False, False)
    assert (stalled.pieces, budget.used) == ([], 100)
    budget.add(stalled, b"x")
    assert budget.used == 100
    budget.complete(slow)
    now[0] = 5 * STALLED_S
    third = ArrivingBody()
    budget.add(third, b"x" * 50)
    assert (another.is_refused, slow.is_refused) == (True, False)
    for body in (stalled, slow, fast, another, third, third):
        budget.release(body)
    assert budget.used == 0
