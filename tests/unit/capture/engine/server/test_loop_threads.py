"""Work on threads beside the event loop, which end with the loop: every test is looked at for threads it leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest

from headgate.capture.engine.server.loop_threads import run_in_thread
from headgate.capture.schema.errors import RequestError
from tests.deadlines import patience


def test_a_result_comes_from_another_thread() -> None:
    assert asyncio.run(run_in_thread(threading.get_ident)) != threading.get_ident()


def test_an_error_is_raised_where_the_work_is_awaited() -> None:
    async def scenario() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await run_in_thread(partial(int, "x"))
        assert await run_in_thread(partial(int, "7")) == 7

    asyncio.run(scenario())


def test_works_run_at_once_and_the_loop_goes_on() -> None:
    meeting = threading.Barrier(3)

    async def scenario() -> None:
        works = [asyncio.ensure_future(run_in_thread(partial(meeting.wait, 10))) for _ in range(2)]
        await asyncio.to_thread(meeting.wait, 10)
        await asyncio.gather(*works)

    asyncio.run(scenario())


def test_nobody_minds_work_whose_waiter_was_cancelled() -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    told: list[object] = []

    def work() -> None:
        has_begun.set()
        may_end.wait(patience(10))

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        waiting = asyncio.ensure_future(run_in_thread(work))
        await asyncio.to_thread(has_begun.wait, 10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_end.set()
        assert [await run_in_thread(partial(int, "1")) for _ in range(20)] == [1] * 20

    asyncio.run(scenario())
    assert told == []


def test_work_that_outlives_its_loop_ends_quietly() -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        may_end.wait(patience(10))

    async def leave() -> None:
        task = asyncio.ensure_future(run_in_thread(work))
        await asyncio.to_thread(has_begun.wait, 10)
        task.cancel()

    asyncio.run(leave())
    may_end.set()
    assert asyncio.run(run_in_thread(partial(int, "1"))) == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_nothing_is_kept_of_what_was_done(is_refused: bool) -> None:
    class Body:
        def read(self) -> None:
            if is_refused:
                raise RequestError("body", "is wrong")

    gone = threading.Event()

    async def ask() -> None:
        body = Body()
        weakref.finalize(body, gone.set)
        with pytest.raises(RequestError) if is_refused else nullcontext():
            await run_in_thread(body.read)

    async def scenario() -> None:
        await ask()
        assert await asyncio.to_thread(gone.wait, 10)

    gc.disable()  # what is in a cycle stays
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
