"""The budget of bytes for all bodies that are on their way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from headgate.capture.engine.server.bodies.middleware import (
    GRACE_S,
    LEAST_RATE,
    MAX_S,
    SLOW_RATE,
    STALLED_S,
    ArrivingBody,
    Bodies,
    BytesInFlight,
)
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
        for _ in range(5):  # a task of its own waits for each piece
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


def test_one_byte_now_and_then_keeps_nothing_from_others() -> None:
    """Eight clients, each with a body nearly as large as an eighth of the budget, that send a byte every 9 s."""
    now = [0.0]
    budget = BytesInFlight(1 << 30, clock=lambda: now[0])
    slow = [ArrivingBody(f"slow {number}") for number in range(8)]
    for body in slow:
        budget.add(body, bytes(128 << 20))
    now[0] = 9.0
    for body in slow[1:]:
        body.num_received = 128 << 10  # as if it had come byte by byte
    now[0] = 18.0
    for body in slow:
        budget.add(body, b"")

    fast = ArrivingBody("fast")
    budget.add(fast, bytes(1 << 20))

    assert not fast.is_refused
    assert [body.is_refused for body in slow].count(True) == 1
    assert not slow[0].is_refused  # 128 MiB in 18 s: it is large, and not slow


def test_a_client_with_more_than_its_share_makes_way_for_others_and_not_for_itself() -> None:
    now = [0.0]
    budget = BytesInFlight(100, clock=lambda: now[0])
    small, large, other = ArrivingBody("greedy"), ArrivingBody("greedy"), ArrivingBody("other")
    budget.add(small, bytes(10))
    budget.add(large, bytes(70))
    budget.add(other, bytes(20))
    now[0] = 1.0

    again = ArrivingBody("greedy")
    budget.add(again, bytes(1))
    beyond = ArrivingBody("other")
    budget.add(beyond, bytes(6))  # with what it holds, more than its own share of 25
    assert (again.is_refused, beyond.is_refused) == (True, True)
    third = ArrivingBody("third")
    budget.add(third, bytes(25))

    assert (small.is_refused, large.is_refused, other.is_refused, third.is_refused) == (False, True, False, False)
    assert budget.used == 10 + 20 + 25
    for body in (small, large, other, again, beyond, third):
        budget.release(body)
    assert (budget.used, budget._held) == (0, {})


def test_a_body_has_so_much_time_for_what_has_come() -> None:
    now = [100.0]
    budget = BytesInFlight(1 << 30, clock=lambda: now[0])
    body = ArrivingBody()
    budget.begin(body)
    assert budget.seconds_left(body) == GRACE_S

    budget.add(body, bytes(5 * LEAST_RATE))
    now[0] += 4.0
    assert budget.seconds_left(body) == GRACE_S + 5 - 4
    budget.refuse(body)
    budget.add(body, bytes(2 * LEAST_RATE))
    assert budget.seconds_left(body) == GRACE_S + 7 - 4  # one that is refused is received no longer than others
    body.num_received = 1 << 40
    assert budget.seconds_left(body) == MAX_S - 4
    assert SLOW_RATE > LEAST_RATE


def test_a_body_that_comes_too_slowly_is_a_408_and_gives_back_what_it_held() -> None:
    now = [0.0]

    async def run() -> None:
        middleware = bodies(Inner(), max_buffered=MAX_BYTES)
        middleware._in_flight = budget = BytesInFlight(MAX_BYTES, clock=lambda: now[0])
        slow = Sender(middleware)
        await slow.send(1000)
        assert budget.used == 1000
        now[0] = GRACE_S + 1
        await slow.send(1)
        await slow._call

        assert slow.answer[0]["status"] == 408
        assert (b"connection", b"close") in slow.answer[0]["headers"]
        error = json.loads(slow.answer[1]["body"])["error"]
        assert (error["code"], error["message"].startswith("the body came too slowly: 16 KiB a second")) == (408, True)
        assert (budget.used, budget._held) == (0, {})

    asyncio.run(run())
