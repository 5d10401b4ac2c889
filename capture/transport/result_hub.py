"""Results as the front end collects them: requests announce which they expect, workers and driver consumers answer.

Keys are random and secret between a request's front end and its worker: what comes with another key is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from headgate.capture.schema.results import CaptureResult, CaptureResults, merge_samples, merge_stages
from headgate.capture.transport.channel import Inbox
from headgate.capture.transport.messages import MalformedMessage, ResultMessage, decode

logger = logging.getLogger("headgate")

MAX_CLOSED_KEYS = 65536
"""Keys of past requests that are remembered: rows for driver-located consumers may arrive late."""

UNDO_TIMEOUT_S = 1.0
"""Seconds that each part gets to close when the hub could not be opened as a whole."""

Closer: TypeAlias = Callable[[float], bool]
Opener: TypeAlias = Callable[[str], Closer]
Handle: TypeAlias = Callable[[Sequence[zmq.Frame]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubStats:
    """Counters of a hub.

    Attributes:
        results: Answers that a request was waiting for.
        unknown: Answers that no request waited for: too late, of an aborted request, or with a wrong key.
        malformed: Messages that could not be read.
        waiting: Now: requests that expect results.
    """

    results: int = 0
    unknown: int = 0
    malformed: int = 0
    waiting: int = 0


class _Expected:
    """One request: the answers so far, and the callbacks for when all are there. Guarded by the hub's lock."""

    def __init__(self, instances: Sequence[str], num_samples: int, num_stages: int) -> None:
        self.instances = tuple(dict.fromkeys(instances))
        self.num_samples = num_samples
        self.num_stages = num_stages
        self.callbacks: list[Callable[[], None]] = []
        self._answers: dict[tuple[int, str], dict[int, CaptureResult]] = {}
        self._complete: set[tuple[int, str]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every consumer answered for every sample."""
        return len(self._complete) == self.num_samples * len(self.instances)

    def is_missing(self, sample: int, instance: str, stage: int, num_stages: int) -> bool:
        """Whether this is an answer that did not come yet."""
        return (
            0 <= sample < self.num_samples
            and instance in self.instances
            and 0 <= stage < num_stages <= self.num_stages
            and (sample, instance) not in self._complete
            and stage not in self._answers.get((sample, instance), {})
        )

    def add(self, sample: int, instance: str, stage: int, num_answers: int, result: CaptureResult) -> None:
        """Keep an answer; `num_answers` make the result complete."""
        answers = self._answers.setdefault((sample, instance), {})
        answers[stage] = result
        if len(answers) >= num_answers:
            self._complete.add((sample, instance))

    def results(self) -> CaptureResults:
        """Merge the answers so far; a consumer that did not answer for a sample is ``pending``."""
        samples = [{name: self._result(sample, name) for name in self.instances} for sample in range(self.num_samples)]
        merged = {name: merge_samples([sample[name] for sample in samples]) for name in self.instances}
        return CaptureResults(samples, merged)

    def _result(self, sample: int, instance: str) -> CaptureResult:
        if (sample, instance) not in self._complete:
            return CaptureResult(status="pending")
        return merge_stages(self._answers[sample, instance])


class ResultHub:
    """Collects the results of this process's requests.

    It listens on a Unix socket in a folder that only this user may enter, from the first use of `address` until
    `shutdown` or the end of the process. A forked child starts afresh, with an address of its own.

    Threads: any. The lock guards the table of requests. Answers arrive on the hub's own thread or, from consumers
    that are located in this process, through `deliver` on theirs; callbacks run there, without the lock.

    Args:
        folder: Where the private folder is made; the system's folder for temporary files if None.
    """

    def __init__(self, *, folder: str | None = None) -> None:
        self._listener = _Listener(folder)
        self._single: set[str] = set()
        self._reset()
        os.register_at_fork(after_in_child=functools.partial(_reset_forked, weakref.ref(self)))

    @property
    def address(self) -> str:
        """Address that requests carry as ``reply``; the first use starts listening.

        Raises:
            UnsupportedError: If the socket cannot be made.
        """
        return self._listener.open(self._handle)

    def on_open(self, opener: Opener) -> None:
        """Call ``opener(address)`` whenever the hub starts to listen, before anybody learns the address.

        The function that it returns is called when the hub is shut down, with the seconds that are left, and tells
        whether it was done in time.
        """
        self._listener.on_open(opener)

    def answers_once(self, instances: Iterable[str]) -> None:
        """Expect one answer for each sample from these consumers, however many stages there are."""
        with self._lock:
            self._single.update(instances)

    def expect(self, key: str, *, instances: Sequence[str], num_samples: int = 1, num_stages: int = 1) -> None:
        """Begin to collect the results of a request, before it is sent to the engine.

        Args:
            key: The request's random key.
            instances: Consumers that will answer.
            num_samples: The request's ``n``.
            num_stages: Pipeline stages of the engine; each answer says how many of them do answer.
        """
        with self._lock:
            self._expected[key] = _Expected(instances, num_samples, num_stages)

    def knows(self, key: str) -> bool:
        """Whether `key` is, or was lately, the key of a request of this process."""
        with self._lock:
            return key in self._expected or key in self._closed

    def deliver(
        self, *, key: str, sample_index: int, instance: str, stage: int, num_stages: int, result: CaptureResult
    ) -> bool:
        """Take one answer; False if no request waits for it."""
        with self._lock:
            expected = self._expected.get(key)
            if expected is None or not expected.is_missing(sample_index, instance, stage, num_stages):
                self._num_unknown += 1
                return False
            self._num_results += 1
            num_answers = 1 if instance in self._single else num_stages
            expected.add(sample_index, instance, stage, num_answers, result)
            callbacks = tuple(expected.callbacks) if expected.is_complete else ()
        for callback in callbacks:
            callback()
        return True

    def wait(self, key: str, timeout_s: float) -> CaptureResults:
        """Wait until all results are there, for `timeout_s` seconds at most; those that are not are ``pending``.

        Raises:
            KeyError: If the request is not expected, or was closed.
        """
        done = threading.Event()
        with self._watching(key, done.set) as expected:
            done.wait(timeout_s)
            with self._lock:
                return expected.results()

    async def wait_async(self, key: str, timeout_s: float) -> CaptureResults:
        """`wait` without blocking the event loop."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        with self._watching(key, functools.partial(_set_from_thread, loop, done)) as expected:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), timeout_s)
            with self._lock:
                return expected.results()

    def close(self, key: str) -> None:
        """Stop collecting for a request, whether or not everything is there; idempotent. Ends its waits."""
        with self._lock:
            expected = self._expected.pop(key, None)
            if expected is None:
                return
            self._closed[key] = None
            if len(self._closed) > MAX_CLOSED_KEYS:
                del self._closed[next(iter(self._closed))]
            callbacks = tuple(expected.callbacks)
        for callback in callbacks:
            callback()

    def stats(self) -> HubStats:
        """Counters so far."""
        with self._lock:
            return HubStats(
                results=self._num_results,
                unknown=self._num_unknown,
                malformed=self._listener.num_malformed,
                waiting=len(self._expected),
            )

    def shutdown(self, timeout_s: float) -> bool:
        """Stop listening and remove the socket; False if something did not end within `timeout_s` seconds.

        A later use of `address` starts afresh.
        """
        return self._listener.close(timeout_s)

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

    @contextlib.contextmanager
    def _watching(self, key: str, callback: Callable[[], None]) -> Iterator[_Expected]:
        """Have `callback` called when the results of `key` are complete, or at once."""
        with self._lock:
            if key not in self._expected:
                raise KeyError("no request with this key expects results: call expect() first, and close() last")
            expected = self._expected[key]
            expected.callbacks.append(callback)
            is_complete = expected.is_complete
        if is_complete:
            callback()
        try:
            yield expected
        finally:
            with self._lock:
                expected.callbacks.remove(callback)

    def _reset(self) -> None:
        """Start with nothing: new locks too, since a fork may copy them while another thread holds them."""
        self._lock = threading.Lock()
        self._listener.reset()
        self._expected: dict[str, _Expected] = {}
        self._closed: dict[str, None] = {}
        self._num_results = 0
        self._num_unknown = 0


class _Listener:
    """The inbox of a hub, in a private folder, and everything that opens and closes with it.

    Threads: any. The lock guards opening and closing.

    Args:
        parent_folder: Where the private folder is made; the system's folder for temporary files if None.
    """

    def __init__(self, parent_folder: str | None) -> None:
        self._parent_folder = parent_folder
        self._openers: list[Opener] = []
        self._of_parent: list[object] = []
        self._inbox: Inbox | None = None
        self._closers: list[Closer] = []
        self.reset()

    def reset(self) -> None:
        """Start closed, in a forked child, and with a new lock, since another thread may have held the old one."""
        self._lock = threading.Lock()
        if self._inbox is not None:
            # Their sockets are the parent's: never closed here, nor collected.
            self._of_parent += [self._inbox, *self._closers]
        self._inbox = None
        self._closers = []

    @property
    def num_malformed(self) -> int:
        """Messages that could not be read, since it was opened."""
        inbox = self._inbox
        return 0 if inbox is None else inbox.malformed

    def on_open(self, opener: Opener) -> None:
        """Call ``opener(address)`` whenever it opens; at once, too, if it is open."""
        with self._lock:
            self._openers.append(opener)
            if self._inbox is not None:
                self._closers.append(opener(self._inbox.address))

    def open(self, handle: Handle) -> str:
        """Start listening unless it does; return the address.

        Args:
            handle: Takes the frames of one message, on the inbox's thread.

        Raises:
            UnsupportedError: If the socket cannot be made.
        """
        with self._lock:
            if self._inbox is None:
                self._inbox = self._make_inbox(handle)
            return self._inbox.address

    def close(self, timeout_s: float) -> bool:
        """Stop listening and remove the socket; False if something did not end within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            inbox, closers = self._inbox, self._closers
            self._inbox, self._closers = None, []
            if inbox is None:
                return True
            ended = [close(max(deadline - time.monotonic(), 0)) for close in [*closers, inbox.close]]
            _remove_own(os.path.dirname(inbox.path), os.getpid())
        return all(ended)

    def _make_inbox(self, handle: Handle) -> Inbox:
        folder = tempfile.mkdtemp(prefix="headgate-", dir=self._parent_folder)  # mode 0700
        remove = weakref.finalize(self, _remove_own, folder, os.getpid())
        with contextlib.ExitStack() as undo:
            undo.callback(remove)
            inbox = Inbox(f"ipc://{folder}/hub", handle, name="headgate-results")
            undo.callback(inbox.close, UNDO_TIMEOUT_S)
            closers = []
            for opener in self._openers:
                closers.append(opener(inbox.address))
                undo.callback(closers[-1], UNDO_TIMEOUT_S)
            undo.pop_all()
        self._closers = closers
        return inbox


def _reset_forked(hub: weakref.ref[ResultHub]) -> None:
    alive = hub()
    if alive is not None:
        alive._reset()


def _remove_own(folder: str, pid: int) -> None:
    """Remove the private folder, unless this process is a child of the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # the loop was closed: its waiter is gone
        logger.debug("Results came for a closed event loop")
