"""Threads that do an event loop's long work, and end with the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")
_Queue = SimpleQueue[tuple[Callable[[], object], asyncio.Future[Any]] | None]

PAUSE_S = 20e-6
"""Long enough for the event loop's thread to wake up and take the GIL."""
_LONG_S = 1e-3
"""Work after which the loop comes first."""
_TURN = Lock()
_NUM_THREADS = 4
"""Threads of each loop. The GIL is free while a body is hashed and its numbers are checked; parsing holds it."""


async def run_in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` on a thread and return or raise its outcome. `work` must compute and never wait: threads are few.

    As ``asyncio.to_thread``, for half of what that costs the event loop: there, an executor has a future of its own
    that settles the loop's, and the loop runs twice. Context variables do not come along.

    Raises:
        Exception: What `work` raises.
    """
    loop = asyncio.get_running_loop()
    threads = _threads.get(loop) or await _start(loop)
    future: asyncio.Future[Result] = loop.create_future()
    threads.queue.put((work, future))
    try:
        return await future
    finally:
        del work, future  # an error refers to this frame: a long body would stay until cycles are looked for


def in_turn(work: Callable[[], Result]) -> Result:
    """Run `work`, which holds the GIL, on a thread beside the loop, while no other thread runs any.

    Several at a time would be no faster, and hand the lock to one another: the loop would wait for all of them.
    """
    with _TURN:
        began = time.perf_counter()
        try:
            return work()
        finally:
            if time.perf_counter() - began > _LONG_S:
                time.sleep(PAUSE_S)


def _run(work: Callable[[], object], future: asyncio.Future[Any]) -> None:
    settle: Callable[[Any], None]
    outcome: object
    try:
        settle, outcome = future.set_result, work()
    except Exception as error:  # noqa: BLE001  (it is raised where the future is awaited)
        settle, outcome = future.set_exception, error
    with suppress(RuntimeError):  # the loop is closed: no task waits any more
        future.get_loop().call_soon_threadsafe(_settle, future, settle, outcome)
    del work, future, settle, outcome  # for the same reason


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    if not future.cancelled():
        settle(outcome)


class _Threads(NamedTuple):
    queue: _Queue
    life: AsyncGenerator[_Queue, None]
    """A loop that ends closes the generators that it began."""


_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = WeakKeyDictionary()


async def _start(loop: asyncio.AbstractEventLoop) -> _Threads:
    life = _live(loop)
    _threads[loop] = threads = _Threads(await anext(life), life)
    return threads


async def _live(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Queue, None]:
    """Threads that end with their loop, and what they take their work from."""
    queue: _Queue = SimpleQueue()
    for number in range(_NUM_THREADS):
        Thread(target=_serve, args=(queue,), name=f"headgate-beside-{number}", daemon=True).start()
    try:
        yield queue
    finally:
        _threads.pop(loop, None)
        for _ in range(_NUM_THREADS):
            queue.put(None)


def _serve(queue: _Queue) -> None:
    while (task := queue.get()) is not None:
        work, future = task
        del task
        _run(work, future)
        del work, future
