"""Results as the front end collects them, and the private folder with the socket where it listens.

Requests announce which results they expect; workers, and consumers in the front end, answer. Keys are random and secret
between a request's front end and its worker: what comes with another key is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq
from msgspec.structs import replace

from headgate.capture.links.messages import MalformedMessage, Result, decode_frames
from headgate.capture.links.network import Listening
from headgate.capture.links.peer import (
    FarAddress,
    Inbox,
    host_id,
    suffix,
)
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.results import (
    CHUNK_BYTES,
    CaptureResult,
    CaptureResults,
    merge_samples,
    merge_stages,
    size_of,
)

logger = logging.getLogger("headgate")


UNDO_TIMEOUT_S = 1.0
"""Seconds that each part gets to close when the listener could not be opened as a whole."""

PREFIX = "headgate-"
"""How the names of private folders begin."""

SOCKET = "hub"
"""Name of the listener's own socket in its folder; those of others that open with it are beside it."""

OLD_S = 60.0
"""Age from which a folder without a listener is a leftover: a new one is made before its sockets are."""

Closer: TypeAlias = Callable[[float], bool]
Handle: TypeAlias = Callable[[Sequence[zmq.Frame]], None]


class Inboxes:
    """The inboxes of one hub: its own, and the ones opened beside it for rows.

    Attributes:
        hub: The hub's own, open from the beginning.

    Args:
        address: Of the hub's own Unix socket.
        handle: Takes the frames of one message, on the thread of the hub's inbox.
        listening: Where all of them listen for other hosts, too.
        settings: Further ones of the hub's `Inbox`.
    """

    def __init__(self, address: str, handle: Handle, *, listening: Listening | None, **settings: Any) -> None:
        self._listening = listening
        self._rows: dict[str, Inbox] = {}
        self.hub = Inbox(address, handle, listening=listening, **settings)

    @property
    def address(self) -> str:
        """The text that requests carry; see `headgate.capture.links.network`."""
        if self.hub.far_address is None:
            return self.hub.address
        rows = {name: inbox.far_address for name, inbox in self._rows.items() if inbox.far_address is not None}
        return str(FarAddress(host=host_id(), ipc=self.hub.address, tcp=self.hub.far_address, rows=rows))

    def rows(self, instance: str, handle: Handle, **settings: Any) -> Inbox:
        """Open the inbox of a driver-located consumer, by its instance name; see `Inbox`."""
        name = suffix(instance)
        inbox = self._rows[name] = Inbox(f"{self.hub.address}.{name}", handle, listening=self._listening, **settings)
        return inbox


Opener: TypeAlias = Callable[[Inboxes], Closer]


class HubListener:
    """The inbox of a hub, in a private folder, and everything that opens and closes with it. Opened once.

    Threads: any. The lock guards opening and closing.

    Args:
        parent_folder: Where the private folder is made; the system's folder for temporary files if None.
        on_failure: Called with the reason when the inbox gives up.
        listening: Where to listen for other hosts, too.
    """

    def __init__(
        self, parent_folder: str | None, on_failure: Callable[[str], None], listening: Listening | None = None
    ) -> None:
        self._parent_folder = parent_folder
        self._on_failure = on_failure
        self._listening = listening
        self._openers: list[Opener] = []
        self._of_parent: list[object] = []
        self._inboxes: Inboxes | None = None
        self._closers: list[Closer] = []
        self.reset()

    def reset(self) -> None:
        """Start closed, in a forked child, and with a new lock, since another thread may have held the old one."""
        self._lock = threading.Lock()
        if self._inboxes is not None:
            # Their sockets are the parent's: never closed here, nor collected.
            self._of_parent += [self._inboxes, *self._closers]
        self._inboxes = None
        self._closers = []
        self._is_closed = False

    @property
    def num_malformed(self) -> int:
        """Messages that could not be read, since it was opened."""
        inboxes = self._inboxes
        return 0 if inboxes is None else inboxes.hub.malformed

    def on_open(self, opener: Opener) -> None:
        """Call ``opener(inboxes)`` whenever it opens; at once, too, if it is open."""
        with self._lock:
            self._openers.append(opener)
            if self._inboxes is not None:
                self._closers.append(opener(self._inboxes))

    def open(self, handle: Handle) -> str:
        """Start listening unless it does; return the address that requests carry.

        Args:
            handle: Takes the frames of one message, on the inbox's thread.

        Raises:
            UnsupportedError: If the socket cannot be made, or if it was closed.
        """
        with self._lock:
            if self._is_closed:
                raise UnsupportedError("this front end was shut down, and takes no captures any more: start another")
            if self._inboxes is None:
                self._inboxes = self._open_inboxes(handle)
            return self._inboxes.address

    def close(self, timeout_s: float) -> bool:
        """Stop listening for good and remove the socket; False if something did not end within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            inboxes, closers = self._inboxes, self._closers
            self._inboxes, self._closers, self._is_closed = None, [], True
            if inboxes is None:
                return True
            ended = [close(max(deadline - time.monotonic(), 0)) for close in [*closers, inboxes.hub.close]]
            _remove_own(os.path.dirname(inboxes.hub.path), os.getpid())
        return all(ended)

    def _open_inboxes(self, handle: Handle) -> Inboxes:
        parent = self._parent_folder or tempfile.gettempdir()
        sweep(parent)
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # mode 0700
        remove = weakref.finalize(self, _remove_own, folder, os.getpid())
        with contextlib.ExitStack() as undo:
            undo.callback(remove)
            inboxes = Inboxes(
                f"ipc://{folder}/{SOCKET}",
                handle,
                listening=self._listening,
                name="headgate-results",
                on_failure=self._on_failure,
            )
            undo.callback(inboxes.hub.close, UNDO_TIMEOUT_S)
            closers = []
            for opener in self._openers:
                closers.append(opener(inboxes))
                undo.callback(closers[-1], UNDO_TIMEOUT_S)
            undo.pop_all()
        self._closers = closers
        return inboxes


def _remove_own(folder: str, pid: int) -> None:
    """Remove the private folder, unless this process is a child of the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: str) -> None:
    """Remove the private folders in `parent` of this user's processes that were killed."""
    with os.scandir(parent) as entries:
        folders = [entry.path for entry in entries if entry.name.startswith(PREFIX)]
    for folder in folders:
        with contextlib.suppress(OSError):  # another process may sweep it, too
            if _is_left_over(folder):
                shutil.rmtree(folder)


def _is_left_over(folder: str) -> bool:
    """Whether a folder is of our making, and no process listens there any more."""
    about = os.lstat(folder)
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    if not is_own or time.time() - about.st_mtime < OLD_S:
        return False
    with os.scandir(folder) as entries:
        sockets = {entry.name: stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) for entry in entries}
    return SOCKET in sockets and all(sockets.values()) and not any(_listens(f"{folder}/{name}") for name in sockets)


def _listens(path: str) -> bool:
    """Whether a process listens at a Unix socket; one that is stopped or busy does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its queue of connections is full
            return True
    return True


MAX_CLOSED_KEYS = 65536
"""Keys of past requests that are remembered: rows for driver-located consumers may arrive late."""


class ExpectedRequest:
    """One request: the answers so far, and the callbacks for when all are there. Guarded by the table's lock."""

    def __init__(self, instances: Sequence[str], num_samples: int, num_stages: int) -> None:
        self.instances = tuple(dict.fromkeys(instances))
        self.num_samples = num_samples
        self.num_stages = num_stages
        self.callbacks: list[Callable[[], None]] = []
        self._answers: dict[tuple[int, str], dict[int, CaptureResult]] = {}
        self._complete: set[tuple[int, str]] = set()
        self._parts: dict[tuple[int, str], list[Result]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every consumer answered for every sample."""
        return len(self._complete) == self.num_samples * len(self.instances)

    def is_missing(self, answer: Result) -> bool:
        """Whether this is an answer that did not come yet."""
        whose = answer.sample_index, answer.instance
        return (
            0 <= answer.sample_index < self.num_samples
            and answer.instance in self.instances
            and 0 <= answer.stage < answer.num_stages <= self.num_stages
            and whose not in self._complete
            and answer.stage not in self._answers.get(whose, {})
        )

    def add(self, answer: Result, num_answers: int) -> None:
        """Keep an answer; `num_answers` make the result complete."""
        whose = answer.sample_index, answer.instance
        answers = self._answers.setdefault(whose, {})
        answers[answer.stage] = answer.result
        if len(answers) >= num_answers:
            self._complete.add(whose)

    def add_part(self, part: Result) -> None:
        """Keep a part of a result for the chunks of a stream; parts of a consumer that has answered are of no use."""
        if self.is_missing(part):
            self._parts.setdefault((part.sample_index, part.instance), []).append(part)

    def take_parts(self, sample_index: int, instance: str, num_rows: int) -> list[Any]:
        """See `ResultHub.take_parts`."""
        parts = self._parts.get((sample_index, instance), [])
        # They come from several threads: the order of their positions is not that of their arrival.
        parts.sort(key=lambda part: (part.num_rows, part.stage))
        num_taken = num_bytes = 0
        for part in parts:
            if part.num_rows > num_rows:
                break
            num_bytes += size_of(part.result.payload)
            if num_taken and num_bytes > CHUNK_BYTES:
                break
            num_taken += 1
        taken = parts[:num_taken]
        del parts[:num_taken]
        return [part.result.payload for part in taken]

    def results(self, missing: CaptureResult) -> CaptureResults:
        """Merge the answers so far; `missing` stands for those of consumers that did not answer for a sample."""
        samples = [
            {name: replace(self._result(sample, name, missing), key=name) for name in self.instances}
            for sample in range(self.num_samples)
        ]
        merged = {
            name: replace(merge_samples([sample[name] for sample in samples]), key=name) for name in self.instances
        }
        return CaptureResults(samples, merged)

    def _result(self, sample: int, instance: str, missing: CaptureResult) -> CaptureResult:
        if (sample, instance) not in self._complete:
            return missing
        return merge_stages(self._answers[sample, instance])


class ExpectedResults:
    """The table of a hub's requests, by their keys; `ResultHub` describes what its methods do.

    Threads: any. Callbacks run on the thread that completes a request, without the lock.

    Attributes:
        num_results: Answers that a request was waiting for.
        num_unknown: Other answers.
        missing: Stands for a result that did not come.
    """

    def __init__(self, single: Iterable[str] = ()) -> None:
        self.single = set(single)
        self.num_results = 0
        self.num_unknown = 0
        self.missing = CaptureResult(status="pending")
        self._lock = threading.Lock()
        self._requests: dict[str, ExpectedRequest] = {}
        self._closed: dict[str, None] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, key: str, request: ExpectedRequest) -> None:
        """See `ResultHub.expect`."""
        with self._lock:
            self._requests[key] = request

    def knows(self, key: str) -> bool:
        """See `ResultHub.knows`."""
        with self._lock:
            return key in self._requests or key in self._closed

    def deliver(self, answer: Result) -> bool:
        """See `ResultHub.deliver`."""
        with self._lock:
            expected = self._requests.get(answer.key)
            if expected is None or not expected.is_missing(answer):
                self.num_unknown += 1
                return False
            self.num_results += 1
            expected.add(answer, 1 if answer.instance in self.single else answer.num_stages)
            callbacks = tuple(expected.callbacks) if expected.is_complete else ()
        for callback in callbacks:
            callback()
        return True

    def add_part(self, part: Result) -> None:
        """Keep a part of a result that a request waits for."""
        with self._lock:
            if (expected := self._requests.get(part.key)) is not None:
                expected.add_part(part)

    def take_parts(self, key: str, sample_index: int, instance: str, num_rows: int) -> list[Any]:
        """See `ResultHub.take_parts`."""
        with self._lock:
            expected = self._requests.get(key)
            return [] if expected is None else expected.take_parts(sample_index, instance, num_rows)

    def results(self, request: ExpectedRequest) -> CaptureResults:
        """Results of a request as they are now."""
        with self._lock:
            return request.results(self.missing)

    def remove(self, key: str) -> None:
        """See `ResultHub.close`."""
        with self._lock:
            expected = self._requests.pop(key, None)
            if expected is None:
                return
            self._closed[key] = None
            if len(self._closed) > MAX_CLOSED_KEYS:
                del self._closed[next(iter(self._closed))]
            callbacks = tuple(expected.callbacks)
        for callback in callbacks:
            callback()

    def end_waits(self, missing: CaptureResult | None = None) -> None:
        """Wake every waiting thread: from now on `missing` stands for a result that did not come."""
        with self._lock:
            self.missing, self._is_over = missing or self.missing, True
            callbacks = [callback for expected in self._requests.values() for callback in expected.callbacks]
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def watching(self, key: str, callback: Callable[[], None]) -> Iterator[ExpectedRequest]:
        """Have `callback` called when the results of `key` are complete or no more can come, or at once.

        Raises:
            KeyError: If the request is not expected, or was closed.
        """
        with self._lock:
            if key not in self._requests:
                raise KeyError("no request with this key expects results: call expect() first, and close() last")
            expected = self._requests[key]
            expected.callbacks.append(callback)
            is_complete = expected.is_complete or self._is_over
        if is_complete:
            callback()
        try:
            yield expected
        finally:
            with self._lock:
                expected.callbacks.remove(callback)


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
    `shutdown` or the end of the process. After `shutdown` it stays closed, and no thread waits. A forked child starts
    afresh, with an address of its own.

    Threads: any. Answers arrive on the hub's own thread or, from consumers
    that are located in this process, through `deliver` on theirs; callbacks run there, without the lock.

    Args:
        folder: Where the private folder is made; the system's folder for temporary files if None.
        listening: Where to listen for workers on other hosts, too.
    """

    def __init__(self, *, folder: str | None = None, listening: Listening | None = None) -> None:
        self._listener = HubListener(folder, self.fail, listening)
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
        """Call ``opener(inboxes)`` whenever the hub starts to listen, before the address is known to any process.

        It opens inboxes beside the hub's with `Inboxes.rows`. The function that it returns is called when the hub is
        shut down, with the seconds that are left, and returns whether it was done in time.
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

    def deliver(self, answer: Result) -> bool:
        """Take one answer; False if no request waits for it."""
        return self._table.deliver(answer)

    def deliver_part(self, part: Result) -> None:
        """Take a part of an answer that is to come, for `take_parts`."""
        self._table.add_part(part)

    def take_parts(self, key: str, instance: str, sample_index: int, num_rows: int) -> list[Any]:
        """Return the payloads of parts of a running request's result that were not returned before, by position.

        Together they take `CHUNK_BYTES` at most, or are one.

        Args:
            key: Of the request.
            instance: The consumer.
            sample_index: Which of the ``n`` samples.
            num_rows: Positions below it belong to tokens that the client has; a part with others is left for later.
        """
        return self._table.take_parts(key, sample_index, instance, num_rows)

    def wait(self, key: str, timeout_s: float) -> CaptureResults:
        """Wait until all results are there, for `timeout_s` seconds at most; missing results are ``pending``.

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
        message = decode_frames(frames)
        if not isinstance(message, Result):
            raise MalformedMessage(f"{type(message).__name__} is not for a hub")
        if message.num_rows:
            self.deliver_part(message)
        else:
            self.deliver(message)

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
