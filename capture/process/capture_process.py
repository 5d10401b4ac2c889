"""A capture process as its worker sees it: given rows and requests, watched, started again when it dies."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch

from headgate.capture.delivery.delivery import CloseReport, DeliveryStats, Dispatched, RequestBegins
from headgate.capture.links.child_process import Connection
from headgate.capture.links.sender import ResultReporter, ResultSender
from headgate.capture.links.shared_memory import SharedStaging, StatsBoard
from headgate.capture.local_delivery import WorkerPlace
from headgate.capture.monitoring.stats import ConsumerStats, added_figures
from headgate.capture.process.messages import (
    Close,
    Closed,
    Done,
    Ready,
    RequestNumbers,
    decode_to_worker,
    encode,
    message_of,
)
from headgate.capture.process.program import Child, Settings, spawn
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import Site


@dataclass(slots=True)
class _Open:
    """A request, and how many results each consumer owes it."""

    begins: RequestBegins
    owed: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Keeps book of open requests. Threads: any.

    Args:
        place: The worker that they run on.
        bits: Of each consumer, by its instance: its bit in a row's mask.
        far: Consumers that are located in the driver.
        make_sender: Makes what errors are sent with, when the first has to be sent.
    """

    def __init__(
        self,
        place: WorkerPlace,
        bits: Mapping[str, int],
        far: Iterable[CaptureConsumerSpec],
        make_sender: Callable[[], ResultSender],
    ) -> None:
        self._place = place
        self._instances = {bit: instance for instance, bit in bits.items()}
        self._far = {spec.instance for spec in far}
        self._make_sender = make_sender
        self._sender: ResultSender | None = None
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def begin(self, begins: RequestBegins) -> None:
        """A request is given to the process."""
        if (key := _key_of(begins)) is None:
            return
        with self._lock:
            found = self._open.setdefault((begins.req_id, key), _Open(begins))
            found.begins = begins
            found.owed.update(self._instances[bit] for bit in begins.specs)

    def end(self, ended: Iterable[tuple[str, str, str]]) -> None:
        """Consumers have ended requests; see `ResultWatcher.done`."""
        with self._lock:
            for instance, req_id, key in ended:
                found = self._open.get((req_id, key))
                if found is not None:
                    found.owed[instance] -= 1
                    if found.owed[instance] <= 0:
                        del found.owed[instance]
                    if not found.owed:
                        del self._open[req_id, key]

    def fail_all(self, reason: str) -> Counter[str]:
        """Send an error for whatever is open; return how many of each consumer."""
        with self._lock:
            found, self._open = list(self._open.values()), {}
        failed = Counter[str]()
        for each in found:
            failed += self._fail(each.begins, set(each.owed), reason)
        return failed

    def fail(self, begins: RequestBegins, reason: str) -> Counter[str]:
        """Send an error for a request that the process did not get; return how many of each consumer."""
        if (key := _key_of(begins)) is None:
            return Counter()
        with self._lock:
            self._open.pop((begins.req_id, key), None)
        return self._fail(begins, set(self._instances.values()), reason)

    def _fail(self, begins: RequestBegins, instances: set[str], reason: str) -> Counter[str]:
        sender = self._sender = self._sender or self._make_sender()
        reporter = ResultReporter(sender, self._place.pp_rank, self._place.pp_size)
        failed = Counter[str]()
        for bit, request in begins.requests().items():
            instance = self._instances[bit]
            if instance not in instances:
                continue
            is_far = instance in self._far
            if not request.info.spec.sites and not is_far:
                reporter.report(instance, request.info, CaptureResult(status="ok"))  # another stage has its rows
                continue
            failed[instance] += 1
            if is_far:
                sender.send_abandon(request.info, instance=instance, stage=self._place.pp_rank)
            reporter.report(instance, request.info, CaptureResult(status="error", error=f"{instance}: {reason}"))
        return failed


def _key_of(begins: RequestBegins) -> str | None:
    """The key of a request; None if it captures nothing."""
    capture = None if begins.new.wire is None else begins.new.wire.get("capture")
    return None if capture is None else capture["key"]


logger = logging.getLogger("headgate")

START_S = 300.0
"""Seconds that the start may take: imports from a slow disk, and whatever consumers do when they are opened."""
END_S = 5.0
"""Seconds that it may take to end by itself once it has closed everything, or is gone."""
MAX_UNSENT = 256
"""Items that wait to be sent together: each call of the system wakes the process, and takes the step thread 0.1 ms."""
MAX_THREADS = 4
QUICK_S, MAX_PAUSE_S = 60.0, 60.0
"""One that dies sooner after its start is started again after a pause, doubled each time up to the latter."""

Spawn = Callable[[], tuple[Connection, Child]]


class CaptureProcess:
    """Implements `headgate.capture.delivery.delivery.Delivery`: what is put goes to a process beside the worker.

    One thread waits for what the process says; it costs nothing while that is silent.

    Args:
        memory: The staging memory that the process reads. The caller that made it closes it, after this.
        ledger: Of open requests.
        board: Where the process shows its counters.
        start: Starts a process.
        reader: Which reader of the memory the process is.
    """

    def __init__(
        self, memory: SharedStaging, ledger: Ledger, board: StatsBoard, start: Spawn, *, reader: int = 0
    ) -> None:
        self._arena = memory.arena
        self._reader = reader
        self._ledger = ledger
        self._start = start
        self._lock = threading.Lock()
        self.is_lost = False
        self._serving = threading.Event()
        self._is_closing = threading.Event()
        self._ended = threading.Event()
        self._is_asked = False
        self._report: CloseReport | None = None
        self._board = board
        self._counters = _Counters(board)
        self._unsent: list[bytes] = []
        self._requests = RequestNumbers()
        self._connection, self._child = start()
        self._await_ready()
        self._started_at = time.monotonic()
        self._num_quick = 0
        self._thread = threading.Thread(target=self._watch, name="headgate-capture-process", daemon=True)
        self._thread.start()

    def put(self, item: Dispatched) -> bool:
        """See `Delivery.put`."""
        with self._lock:
            is_open = self._serving.is_set() and not self.is_lost
            if is_open and isinstance(item, RequestBegins):
                self._ledger.begin(item)
            if is_open:
                self._unsent.append(encode(message_of(item, self._requests)))
                return len(self._unsent) < MAX_UNSENT or self._send_unsent()
        if isinstance(item, RequestBegins) and not self._is_closing.is_set():
            reason = "the capture process has ended and is being started again; send the request again in a moment"
            self._counters.fail(self._ledger.fail(item, reason))
        return False

    def flush(self) -> None:
        """See `Delivery.flush`."""
        with self._lock:
            self._send_unsent()

    def _send_unsent(self) -> bool:
        """Under the lock."""
        unsent, self._unsent = self._unsent, []
        return not unsent or self._connection.send(*unsent)

    def recover(self) -> None:
        """See `Delivery.recover`."""
        with self._lock:
            self._arena.enter(self._reader)
            self.is_lost = False

    def stats(self) -> DeliveryStats:
        """Counters as the process has shown them last."""
        return self._counters.total()

    def stop(self, timeout_s: float) -> None:
        """Take nothing more, and let the process close what it has within that time; `close` waits for it."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        with self._lock:
            if self._serving.is_set() and self._send_unsent():
                self._is_asked = self._connection.send(encode(Close(timeout_s)))
            self._serving.clear()

    def close(self, timeout_s: float) -> CloseReport:
        """See `Delivery.close`."""
        self.stop(timeout_s)
        if self._is_asked:
            self._ended.wait(timeout_s + END_S)
        self._connection.shut()
        self._end_child()
        self._thread.join(END_S)
        lost = self._ledger.fail_all("capture was shut down before the request had ended and was delivered")
        self._board.close()
        return replace(self._report or CloseReport(), num_lost=sum(lost.values()))

    def _await_ready(self) -> None:
        """Wait for the first word of a process.

        Raises:
            ConfigError: If it cannot serve; the reason is that of a consumer, or how it has ended.
        """
        timer = threading.Timer(START_S, self._connection.shut)
        timer.start()
        try:
            data = self._connection.receive()
        finally:
            timer.cancel()
        message = None if data is None else decode_to_worker(data)
        if isinstance(message, Ready) and message.error is None:
            self._serving.set()
            return
        self._connection.close()
        ended = self._end_child()
        text = message.error if isinstance(message, Ready) else None
        raise ConfigError(text or f"the capture process did not start: it {ended}; its log says why")

    def _watch(self) -> None:
        while True:
            while (data := self._connection.receive()) is not None:
                self._take(data)
            self._connection.close()
            if self._is_closing.is_set() or not self._start_again():
                self._ended.set()
                return

    def _take(self, data: bytes) -> None:
        message = decode_to_worker(data)
        if isinstance(message, Done):
            self._ledger.end(message.ended)
        elif isinstance(message, Closed):
            self._report = message.report
            self._counters.close(message.stats)
            self._ended.set()

    def _start_again(self) -> bool:
        """End the requests of a process that is gone, and start another; False if it is closed meanwhile."""
        with self._lock:
            self._serving.clear()
            self._unsent.clear()
            self._requests.clear()
            self.is_lost = True
            self._arena.leave(self._reader)
        reason = f"the capture process {self._end_child()}: what it had of the request is lost"
        failed = self._ledger.fail_all(reason)
        logger.error("%s, for %d requests; it is started again", reason, sum(failed.values()))
        self._counters.lose(failed)
        is_quick = time.monotonic() - self._started_at < QUICK_S
        self._num_quick = self._num_quick + 1 if is_quick else 0
        while not self._is_closing.wait(min(2.0**self._num_quick - 1, MAX_PAUSE_S)):
            try:
                self._connection, self._child = self._start()
                self._started_at = time.monotonic()
                self._await_ready()
            except (ConfigError, OSError) as error:
                self._num_quick += 1
                logger.error("the capture process could not be started again: %s", error)  # noqa: TRY400  (no bug)
            else:
                return True
        return False

    def _end_child(self) -> str:
        """Wait for the end of a process that has nothing more to say, and say how it ended."""
        try:
            status = self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return f"said nothing more for {END_S:g} s and was killed"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"


class _Counters:
    """The counters of a process, and of those before it. Threads: any.

    Args:
        board: Where the process shows its own.
    """

    def __init__(self, board: StatsBoard) -> None:
        self._lock = threading.Lock()
        self._board = board
        self._before = DeliveryStats()
        self._now = DeliveryStats()
        self._is_closed = False

    def close(self, stats: DeliveryStats) -> None:
        """The process has ended, and `stats` were its last words."""
        with self._lock:
            self._now, self._is_closed = stats, True

    def fail(self, failed: Counter[str]) -> None:
        """Count results of requests that the process did not get or end: all are errors."""
        errors = tuple(ConsumerStats(instance=name, requests=count, errors=count) for name, count in failed.items())
        with self._lock:
            self._before = added(self._before, DeliveryStats(consumers=errors))

    def lose(self, failed: Counter[str]) -> None:
        """The process is gone: its counters stay as they were shown last."""
        self.fail(failed)
        with self._lock:
            self._read()
            self._before = added(self._before, replace(self._now, restarts=1))
            self._now = DeliveryStats()
            self._board.clear()

    def total(self) -> DeliveryStats:
        """All together."""
        with self._lock:
            self._read()
            return added(self._before, self._now)

    def _read(self) -> None:
        if not self._is_closed:
            self._now = self._board.read() or self._now


_GAUGES = ("queued_bytes", "spilled_bytes", "is_hung")


def added(before: DeliveryStats, now: DeliveryStats) -> DeliveryStats:
    """Counters of two processes together; gauges are those of `now`. Consumers in the order of `now`, then others."""
    names = list(dict.fromkeys(each.instance for each in (*now.consumers, *before.consumers)))
    old, new = ({each.instance: each for each in stats.consumers} for stats in (before, now))
    blank = {name: ConsumerStats(instance=name) for name in names}
    return DeliveryStats(
        dispatch_errors=before.dispatch_errors + now.dispatch_errors,
        lost_results=before.lost_results + now.lost_results,
        lost_messages=before.lost_messages + now.lost_messages,
        restarts=before.restarts + now.restarts,
        consumers=tuple(_added(old.get(name, blank[name]), new.get(name, blank[name])) for name in names),
    )


def _added(before: ConsumerStats, now: ConsumerStats) -> ConsumerStats:
    others = ("instance", "result_counts", "figures", *_GAUGES)
    counters = [each.name for each in fields(now) if each.name not in others]
    sums = {name: getattr(before, name) + getattr(now, name) for name in counters}
    counts = tuple(one + other for one, other in zip(before.result_counts, now.result_counts, strict=True))
    return replace(now, **sums, result_counts=counts, figures=added_figures(before.figures, now.figures))


def open_capture_process(
    place: WorkerPlace, sites: Sequence[Site], memory: SharedStaging, reader: int = 0
) -> CaptureProcess:
    """Start a capture process for a worker, and wait until its consumers are open.

    Args:
        place: The worker, and the consumers that the process serves.
        sites: Of the worker, in the order of the ring.
        memory: What the process reads.
        reader: Which of its readers the process is.

    Raises:
        ConfigError: If one of them cannot be opened, or the process cannot be started.
    """
    from headgate.capture.links.sender import ZmqResultSender

    settings = Settings(
        place=place,
        sites=tuple(sites),
        num_rows=memory.num_rows,
        num_readers=memory.shared.num_readers,
        reader=reader,
        num_threads=min(torch.get_num_threads(), MAX_THREADS),
        log_level=logger.getEffectiveLevel(),
        path=tuple(sys.path),
    )
    far = [spec for spec in place.config.consumers if load_configured(spec).location == "driver"]
    ledger = Ledger(place, place.served, far, partial(ZmqResultSender, keys=place.keys))
    board = StatsBoard(place.served)
    return CaptureProcess(memory, ledger, board, lambda: spawn(settings, memory.shared, board), reader=reader)
