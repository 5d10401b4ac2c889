"""Results as the front end collects them: requests announce which they expect, workers and driver consumers answer.

Keys are random and secret between a request's front end and its worker: what comes with another key is ignored.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import zmq

from headgate.capture.schema.results import CaptureResult, CaptureResults
from headgate.capture.transport.expected_results import ExpectedRequest, ExpectedResults
from headgate.capture.transport.listener import Listener, Opener
from headgate.capture.transport.messages import MalformedMessage, ResultMessage, decode
from headgate.capture.transport.network import Listening

logger = logging.getLogger("headgate")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubStats:
    """Counters of a hub.

    Attributes:
        results: Answers that a request was waiting for.
        unknown: Answers that no request waited for: too late, of an aborted request, or with a wrong key.
        malformed: Messages that could not be read.
        waiting: Now: requests that expect results.
        problem: The reason why no more results can come; None while they can.
    """

    results: int = 0
    unknown: int = 0
    malformed: int = 0
    waiting: int = 0
    problem: str | None = None


class ResultHub:
    """Collects the results of this process's requests.

    It listens on a Unix socket in a folder that only this user may enter, from the first use of `address` until
    `shutdown` or the end of the process. After `shutdown` it stays closed, and nobody waits. A forked child starts
    afresh, with an address of its own.

    Threads: any. Answers arrive on the hub's own thread or, from consumers
    that are located in this process, through `deliver` on theirs; callbacks run there, without the lock.

    Args:
        folder: Where the private folder is made; the system's folder for temporary files if None.
        listening: Where to listen for workers on other hosts, too.
    """

    def __init__(self, *, folder: str | None = None, listening: Listening | None = None) -> None:
        self._listener = Listener(folder, self.fail, listening)
        self._table = ExpectedResults()
        self._reset()
        os.register_at_fork(after_in_child=functools.partial(_reset_forked, weakref.ref(self)))

    @property
    def address(self) -> str:
        """Address that requests carry as ``reply``; the first use starts listening.

        Raises:
            UnsupportedError: If the socket cannot be made, or after `shutdown`.
        """
        return self._listener.open(self._handle)

    def on_open(self, opener: Opener) -> None:
        """Call ``opener(doors)`` whenever the hub starts to listen, before anybody learns the address.

        It opens inboxes beside the hub's with `Doors.rows`. The function that it returns is called when the hub is shut
        down, with the seconds that are left, and tells whether it was done in time.
        """
        self._listener.on_open(opener)

    def answers_once(self, instances: Iterable[str]) -> None:
        """Expect one answer for each sample from these consumers, however many stages there are."""
        self._table.single.update(instances)

    def expect(self, key: str, *, instances: Sequence[str], num_samples: int = 1, num_stages: int = 1) -> None:
        """Begin to collect the results of a request, before it is sent to the engine.

        Args:
            key: The request's random key.
            instances: Consumers that will answer.
            num_samples: The request's ``n``.
            num_stages: Pipeline stages of the engine; each answer says how many of them do answer.
        """
        self._table.add(key, ExpectedRequest(instances, num_samples, num_stages))

    def knows(self, key: str) -> bool:
        """Whether `key` is, or was lately, the key of a request of this process."""
        return self._table.knows(key)

    def deliver(
        self, *, key: str, sample_index: int, instance: str, stage: int, num_stages: int, result: CaptureResult
    ) -> bool:
        """Take one answer; False if no request waits for it."""
        return self._table.deliver(key, sample_index, instance, stage, num_stages, result)

    def wait(self, key: str, timeout_s: float) -> CaptureResults:
        """Wait until all results are there, for `timeout_s` seconds at most; those that are not are ``pending``.

        After `fail`, they are errors; neither then nor after `shutdown` does anybody wait.

        Raises:
            KeyError: If the request is not expected, or was closed.
        """
        done = threading.Event()
        with self._table.watching(key, done.set) as expected:
            done.wait(timeout_s)
            return self._table.results(expected)

    async def wait_async(self, key: str, timeout_s: float) -> CaptureResults:
        """`wait` without blocking the event loop."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        with self._table.watching(key, functools.partial(_set_from_thread, loop, done)) as expected:
            if timeout_s > 0:
                # No `asyncio.wait_for`, which makes a task of what it waits for.
                timer = loop.call_later(timeout_s, _set, done)
                try:
                    await done
                finally:
                    timer.cancel()
            return self._table.results(expected)

    def close(self, key: str) -> None:
        """Stop collecting for a request, whether or not everything is there; idempotent. Ends its waits."""
        self._table.remove(key)

    def stats(self) -> HubStats:
        """Counters so far."""
        return HubStats(
            results=self._table.num_results,
            unknown=self._table.num_unknown,
            malformed=self._listener.num_malformed,
            waiting=len(self._table),
            problem=self._table.missing.error,
        )

    def shutdown(self, timeout_s: float) -> bool:
        """Stop listening and remove the socket; False if something did not end within `timeout_s` seconds.

        Results that did not come by then never will: it ends their waits.
        """
        is_closed = self._listener.close(timeout_s)
        self._table.end_waits()
        return is_closed

    def fail(self, reason: str) -> None:
        """Report errors from now on for results that are missing, since none can come any more; ends all waits."""
        self._table.end_waits(CaptureResult(status="error", error=f"{reason}; restart the server"))

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        message = decode(frames)
        if not isinstance(message, ResultMessage):
            raise MalformedMessage(f"{type(message).__name__} is not for a hub")
        self.deliver(
            key=message.key,
            sample_index=message.sample_index,
            instance=message.instance,
            stage=message.stage,
            num_stages=message.num_stages,
            result=message.result,
        )

    def _reset(self) -> None:
        """Start with nothing: new locks too, since a fork may copy them while another thread holds them."""
        self._listener.reset()
        self._table = ExpectedResults(self._table.single)


def _reset_forked(hub: weakref.ref[ResultHub]) -> None:
    alive = hub()
    if alive is not None:
        alive._reset()


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _set_from_thread(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_set, done)
    except RuntimeError:  # the loop was closed: its waiter is gone
        logger.debug("Results came for a closed event loop")
