"""Capture processes: what a worker sees of them, the program that they run, and how consumers are dealt out to them.

A worker gives its capture process rows and requests, watches it, and has another started when it dies.

With several readers of the same rows, capture processes and threads of the worker, each serves some of the consumers.
It gets their requests alone, and rows that one of them wants, with their bits only. If a process is lost, the others go
on; requests that it knew get nothing from the one in its place.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headgate.capture.delivery.completeness import ConsumerRequestReader
from headgate.capture.delivery.consumer_queue import UnfinishedWork
from headgate.capture.delivery.delivery import CloseReport, Delivery, DeliveryStats, Dispatched
from headgate.capture.links.child_process import (
    END_S,
    Connection,
    Ready,
    Started,
    Supervisor,
    encode_ready,
    start_child,
    watch_parent,
)
from headgate.capture.links.messages import (
    Close,
    Closed,
    Done,
    GroupWire,
    Staged,
    decode,
    encode,
    end_of,
    numbers,
    pack_group,
    staged,
    staged_rows,
)
from headgate.capture.links.sender import ResultReporter, ResultSender, ResultWatcher
from headgate.capture.links.shared_memory import NumberedCopy, SharedMemory, SharedRows, SharedStaging, StatsBoard
from headgate.capture.local_delivery import WorkerPlace, open_local_delivery
from headgate.capture.monitoring.stats import ConsumerStats, added_figures
from headgate.capture.planning.step_plan import PackGroup, SiteSet
from headgate.capture.schema.batch import Begin, End, MemoryWanted
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ReadoutSite
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import NO_SHAPES, Site, SiteShape
from headgate.capture.staging.host_rows import Lease, StagedRows, StagingMemory

MAX_UNREPORTED, UNREPORTED_S = 256, 0.25
"""Requests that have ended are reported in batches: so many, or after so many seconds."""
SHOWN_S = 0.25
"""Age that counters may reach while no result is sent."""


class Reports:
    """Implements `headgate.capture.links.sender.ResultWatcher`.

    Ended requests are reported some at a time, since each message costs the worker a switch of threads. Counters are
    shown in shared memory ahead of each result, so that a received result is always counted.

    Args:
        connection: To the worker.
        board: Where counters are shown.
    """

    def __init__(self, connection: Connection, board: StatsBoard) -> None:
        self._connection = connection
        self._board = board
        self._stats: Callable[[], DeliveryStats] | None = None
        self._showing = threading.Lock()
        self._changed = threading.Condition()
        self._unreported: list[tuple[str, str, str]] = []
        self._is_closed = False

    def open(self, stats: Callable[[], DeliveryStats]) -> None:
        """Show what `stats` returns from now on."""
        self._stats = stats
        self._show()
        threading.Thread(target=self._run, name="headgate-reports", daemon=True).start()

    def due(self) -> None:
        """See `ResultWatcher.due`."""
        self._show()

    def done(self, instance: str, req_id: str, key: str) -> None:
        """See `ResultWatcher.done`."""
        with self._changed:
            self._unreported.append((instance, req_id, key))
            self._changed.notify()

    def close(self) -> None:
        """Report the rest, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._notify()

    def _show(self) -> None:
        if self._stats is not None:
            with self._showing:
                self._board.show(self._stats())

    def _notify(self) -> None:
        with self._changed:
            ended, self._unreported = self._unreported, []
        if ended:
            self._connection.send(encode(Done(ended)))

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._unreported or self._is_closed, SHOWN_S):
                    self._changed.wait_for(
                        lambda: len(self._unreported) >= MAX_UNREPORTED or self._is_closed, UNREPORTED_S
                    )
                if self._is_closed:
                    return
            self._notify()
            self._show()


MAX_SITE_SETS = 1024
"""Sets of sites that are known again by their bytes, so that rows of the same sites can be put together."""

OpenDelivery = Callable[[ResultWatcher], Delivery]
"""Opens the consumers; the watcher is notified of their results; raises `ConfigError` if it cannot."""


class CaptureServer:
    """Serves one worker until it closes, or is gone.

    Args:
        sites: Those of the worker, in the order of the ring.
        rows_AD: The staging memory, ``[A, D]``.
        rows: The same memory's leases and arrivals.
        connection: To the worker.
        board: Where counters are shown.
        readouts: The readouts that the worker computes.
        shapes: Of the sites whose rows are not those of the stream.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        rows_AD: Tensor,
        rows: SharedRows,
        connection: Connection,
        board: StatsBoard,
        *,
        readouts: Sequence[ReadoutSite] = (),
        shapes: Mapping[Site, SiteShape] = NO_SHAPES,
    ) -> None:
        self._sites = (*sites, *(each.site for each in readouts))
        self._num_sites = len(sites)
        self._row_shapes = (*map(shapes.get, sites), *(each.facts.shape for each in readouts))
        self._rows_AD = rows_AD
        self._rows = rows
        self._connection = connection
        self._site_sets: dict[bytes, SiteSet] = {}
        self._reports = Reports(connection, board)

    def serve(self, open_delivery: OpenDelivery, close_timeout_s: float) -> None:
        """Open the consumers, say so, and deliver what comes; returns when everything is closed.

        Args:
            open_delivery: Opens them.
            close_timeout_s: Seconds to close them in once the worker is gone; if it closes, it says how many.
        """
        try:
            delivery = open_delivery(self._reports)
        except ConfigError as error:
            self._connection.send(encode_ready(Ready(str(error))))
            return
        self._reports.open(delivery.stats)
        gc.collect()
        gc.freeze()  # torch's modules are half a million objects, which each full collection would look at
        self._connection.send(encode_ready(Ready()))
        timeout_s = close_timeout_s
        while (data := self._connection.receive()) is not None:
            message = decode(data)
            if isinstance(message, Close):
                timeout_s = message.timeout_s
                break
            if isinstance(message, Staged):
                delivery.put(self._staged_rows(message))
            elif isinstance(message, Begin | End | MemoryWanted):
                delivery.put(message)
        else:
            self._rows.is_over = True
        report = delivery.close(timeout_s)
        self._reports.close()
        self._connection.send(encode(Closed(report, delivery.stats())))

    def _staged_rows(self, message: Staged) -> StagedRows:
        lease = Lease(message.start, message.num_leased, message.number)
        rows = staged_rows(message, [self._pack_group(group) for group in message.groups])
        return rows.placed(lease, NumberedCopy(self._rows, message.number), self._rows_AD, self._rows)

    def _pack_group(self, group: GroupWire) -> PackGroup:
        site_set = self._site_sets.get(group.site_ids)
        if site_set is None:
            if len(self._site_sets) >= MAX_SITE_SETS:
                self._site_sets.clear()
            ids = numbers(group.site_ids)
            sites = tuple(self._sites[index] for index in ids)
            site_set = SiteSet(sites, ids, self._row_shapes[ids[0]], bool(ids[0] >= self._num_sites))
            self._site_sets[group.site_ids] = site_set
        return pack_group(group, site_set)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that a capture process is given at its start; pickled.

    Attributes:
        place: The worker whose rows are delivered.
        num_rows: Rows of the staging memory.
        num_readers: Its readers.
        reader: Which of them this process is.
        num_threads: Of torch's, for copies of many rows.
    """

    place: WorkerPlace
    num_rows: int
    num_readers: int
    reader: int
    num_threads: int


def serve(connection: Connection, settings: Settings, memory_fd: int, freed_fd: int, board_fd: int) -> None:
    """Serve the worker at the other end of the connection; see `headgate.capture.links.child_process.start_child`."""
    sys.setswitchinterval(SWITCH_S)
    torch.set_num_threads(settings.num_threads)
    watch_parent(connection.shut)
    place = settings.place
    shared = SharedMemory(settings.num_rows * place.model.stream.row_bytes, settings.num_readers, (memory_fd, freed_fd))
    rows_AD = shared.rows(place.model.hidden_size, getattr(torch, place.model.dtype))
    board = StatsBoard(place.served, board_fd)
    rows = SharedRows(shared, settings.reader)
    about = place.sites, rows_AD, rows, connection, board
    server = CaptureServer(*about, readouts=place.readouts, shapes=place.model.stored_shapes)
    server.serve(partial(open_local_delivery, place), place.config.close_timeout_s)


@dataclass(slots=True)
class _Open:
    """A request, and how many results each consumer owes it."""

    request: Begin
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
        self._served = frozenset(bits)
        self._requests = ConsumerRequestReader(place.sites, bits, place.readouts)
        self._far = {spec.instance for spec in far}
        self._make_sender = make_sender
        self._sender: ResultSender | None = None
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def begin(self, request: Begin) -> None:
        """A request is given to the process."""
        if request.capture is None:
            return
        with self._lock:
            found = self._open.setdefault((request.req_id, request.capture["key"]), _Open(request))
            found.request = request
            found.owed.update(self._served.intersection(request.capture["specs"]))

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
            failed += self._fail(each.request, set(each.owed), reason)
        return failed

    def fail(self, request: Begin, reason: str) -> Counter[str]:
        """Send an error for a request that the process did not get; return how many of each consumer."""
        if request.capture is None:
            return Counter()
        with self._lock:
            self._open.pop((request.req_id, request.capture["key"]), None)
        return self._fail(request, self._served, reason)

    def close(self, timeout_s: float) -> None:
        """Let the errors arrive that were sent."""
        if self._sender is not None:
            self._sender.close(timeout_s)

    def _fail(self, begin: Begin, instances: Collection[str], reason: str) -> Counter[str]:
        sender = self._sender = self._sender or self._make_sender()
        reporter = ResultReporter(sender, self._place.pp_rank, self._place.pp_size)
        failed = Counter[str]()
        for bit, request in self._requests.read(begin).items():
            instance = self._instances[bit]
            if instance not in instances:
                continue
            is_far = instance in self._far
            if not request.info.spec.sites and not is_far:
                reporter.report(instance, request.info, CaptureResult(status="ok"))  # another stage has its rows
                continue
            failed[instance] += 1
            if is_far:
                end = end_of(request.info, None, self._place.pp_rank)
                sender.send_to_consumer(request.info, instance, [encode(end)])
            reporter.report(instance, request.info, CaptureResult(status="error", error=f"{instance}: {reason}"))
        return failed


logger = logging.getLogger("headgate")

MAX_UNSENT = 256
"""Items that wait to be sent together: each call of the system wakes the process, and takes the step thread 0.1 ms."""
MAX_THREADS = 4
SWITCH_S = 0.0005
"""Python gives the GIL to another thread after so many seconds. With the usual 0.005 the thread that frees the staging
memory waits longer for the GIL, after each copy, than the copy takes."""


class CaptureProcess:
    """Implements `headgate.capture.delivery.delivery.Delivery`: what is put goes to a process beside the worker.

    Args:
        memory: The staging memory that the process reads. The caller that made it closes it, after this.
        ledger: Of open requests.
        board: Where the process shows its counters.
        start: Starts a process.
        reader: Which reader of the memory the process is.
    """

    def __init__(
        self,
        memory: SharedStaging,
        ledger: Ledger,
        board: StatsBoard,
        start: Callable[[], Started],
        *,
        reader: int = 0,
    ) -> None:
        self._arena = memory.arena
        self._reader = reader
        self._ledger = ledger
        self._lock = threading.Lock()
        self.is_lost = False
        self._serving = threading.Event()
        self._is_asked = False
        self._report: CloseReport | None = None
        self._board = board
        self._counters = _Counters(board)
        self._unsent: list[bytes] = []
        self._process = Supervisor("the capture process", start, self, is_restarted=True)
        self._serving.set()
        self._process.watch()

    def put(self, item: Dispatched) -> bool:
        """See `Delivery.put`."""
        with self._lock:
            is_open = self._serving.is_set() and not self.is_lost
            if is_open and isinstance(item, Begin):
                self._ledger.begin(item)
            if is_open:
                self._unsent.append(encode(staged(item) if isinstance(item, StagedRows) else item))
                return len(self._unsent) < MAX_UNSENT or self._send_unsent()
        if isinstance(item, Begin) and not self._process.is_closing.is_set():
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
        return not unsent or self._process.send(*unsent)

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
        if self._process.is_closing.is_set():
            return
        self._process.is_closing.set()
        with self._lock:
            if self._serving.is_set() and self._send_unsent():
                self._is_asked = self._process.send(encode(Close(timeout_s)))
            self._serving.clear()

    def close(self, timeout_s: float) -> CloseReport:
        """See `Delivery.close`."""
        self.stop(timeout_s)
        self._process.close(timeout_s + END_S if self._is_asked else 0)
        lost = self._ledger.fail_all("capture was shut down before the request had ended and was delivered")
        self._ledger.close(min(timeout_s, END_S))
        self._board.close()
        return replace(self._report or CloseReport(), num_lost=sum(lost.values()))

    def received(self, data: bytes) -> None:
        """See `Owner`."""
        message = decode(data)
        if isinstance(message, Done):
            self._ledger.end(message.ended)
        elif isinstance(message, Closed):
            self._report = message.report
            self._counters.close(message.stats)
            self._process.done()

    def left(self) -> None:
        """See `Owner`: nothing is taken until another process is there."""
        with self._lock:
            self._serving.clear()
            self._unsent.clear()
            self.is_lost = True
            self._arena.leave(self._reader)

    def ended(self, how: str) -> None:
        """See `Owner`: the requests of a process that is gone end with an error."""
        reason = f"the capture process {how}: what it had of the request is lost"
        failed = self._ledger.fail_all(reason)
        logger.error("%s, for %d requests; it is started again", reason, sum(failed.values()))
        self._counters.lose(failed)

    def serves_again(self) -> None:
        """See `Owner`."""
        self._serving.set()


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


def open_capture_process(place: WorkerPlace, memory: SharedStaging, reader: int = 0) -> CaptureProcess:
    """Start a capture process for a worker, and wait until its consumers are open.

    Args:
        place: The worker, and the consumers that the process serves.
        memory: What the process reads.
        reader: Which of its readers the process is.

    Raises:
        ConfigError: If one of them cannot be opened, or the process cannot be started.
    """
    settings = Settings(
        place=place,
        num_rows=memory.num_rows,
        num_readers=memory.shared.num_readers,
        reader=reader,
        num_threads=min(torch.get_num_threads(), MAX_THREADS),
    )
    far = [spec for spec in place.config.consumers if load_configured(spec).location == "driver"]
    ledger = Ledger(place, place.served, far, partial(ResultSender, keys=place.keys))
    board = StatsBoard(place.served)
    label = f"Capture {place.pp_rank}" if place.pp_size > 1 else "Capture"
    fds = memory.shared.memory_fd, memory.shared.freed_fd, board.fd
    start = partial(start_child, __name__, settings, *fds, label=label)
    return CaptureProcess(memory, ledger, board, start, reader=reader)


class ConsumerPlacement(NamedTuple):
    """Which consumers are served where, by their bits.

    Attributes:
        processes: Those of each capture process.
        threads: The consumers that threads of the worker serve.
    """

    processes: tuple[frozenset[int], ...]
    threads: frozenset[int]

    @property
    def num_readers(self) -> int:
        """Readers of shared staging memory; 0 if there is no process to share it with."""
        return len(self.processes) + bool(self.threads) if self.processes else 0


def deal_out(config: CaptureConsumersConfig) -> ConsumerPlacement:
    """Deal the consumers out among the processes that are configured; those of the location ``engine`` stay here.

    Raises:
        ConfigError: If a consumer cannot be loaded.
    """
    beside = [bit for bit, spec in enumerate(config.consumers) if load_configured(spec).location != "engine"]
    count = min(config.processes, len(beside))
    processes = tuple(frozenset(beside[index::count]) for index in range(count))
    return ConsumerPlacement(processes, frozenset(range(len(config.consumers))).difference(*processes))


class DeliveryTarget:
    """One delivery (capture process or worker threads) and the requests and leases it has. Step thread only.

    Args:
        delivery: Its own.
        bits: Of the consumers that it serves, by their instances.
        index: Which reader of the staging memory it is.
        memory: The staging memory.
    """

    def __init__(self, delivery: Delivery, bits: Mapping[str, int], index: int, memory: SharedStaging) -> None:
        self.delivery = delivery
        self._instances = frozenset(bits)
        self._mask = sum(1 << bit for bit in bits.values())
        self._index = index
        self._memory = memory
        self._rows = SharedRows(memory.shared, index)
        self._known: set[str] = set()
        """Requests that it was given and that have not ended."""
        self._missed: set[str] = set()
        """Requests that run and that it did not get, or has lost: rows of theirs would mean nothing to it."""

    def recover(self) -> None:
        """Go on with new requests if what it had is lost."""
        if self.delivery.is_lost:
            self._missed |= self._known
            self._known.clear()
            self.delivery.recover()

    def begin(self, item: Begin) -> bool:
        """Give it a request; False if it did not take it, or has nothing to do with it."""
        self._missed.discard(item.req_id)
        is_wanted = item.capture is not None and not self._instances.isdisjoint(item.capture["specs"])
        if not is_wanted and item.req_id not in self._known:
            return False
        is_taken = self.delivery.put(item)
        (self._known if is_taken else self._missed).add(item.req_id)
        return is_taken

    def end(self, item: End) -> None:
        """Send it the end of a request that it was given."""
        self._missed.discard(item.req_id)
        if item.req_id in self._known:
            self._known.remove(item.req_id)
            self.delivery.put(item)

    def forget(self, req_id: str) -> None:
        """Forget a request that no delivery took: its end is not sent."""
        self._missed.discard(req_id)

    def put_rows(self, staged: StagedRows) -> None:
        """Give it those rows, or give them back for it."""
        lease, own = staged.lease, copy(staged)
        own.groups = tuple(self._own(group) for group in staged.groups)
        if any(group.masks.any() for group in own.groups):
            copied = NumberedCopy(self._rows, lease.number)
            if self.delivery.put(own.placed(lease, copied, self._memory.rows_AD, self._rows)):
                return
        self._memory.arena.release_for(lease, self._index)

    def _own(self, group: PackGroup) -> PackGroup:
        masks = group.masks & self._mask
        if self._missed:
            for req_id, start, stop in group.spans:
                if req_id in self._missed:
                    masks[start:stop] = 0
        return replace(group, masks=masks)


class SpreadDelivery:
    """Delivers by several readers. Implements `headgate.capture.delivery.delivery.Delivery`.

    Args:
        readers: They serve different consumers.
        instances: All consumers, in the order of the configuration.
    """

    is_lost = False

    def __init__(self, readers: Sequence[DeliveryTarget], instances: Sequence[str]) -> None:
        self._readers = tuple(readers)
        self._places = {instance: place for place, instance in enumerate(instances)}

    def recover(self) -> None:
        """See `Delivery.recover`; each reader recovers by itself."""

    def put(self, item: Dispatched) -> bool:
        """See `Delivery.put`."""
        for reader in self._readers:
            reader.recover()
        if isinstance(item, Begin):
            are_taken = [reader.begin(item) for reader in self._readers]
            if not any(are_taken):
                self._forget(item.req_id)
            return any(are_taken)
        for reader in self._readers:
            if isinstance(item, StagedRows):
                reader.put_rows(item)
            elif isinstance(item, End):
                reader.end(item)
            else:
                reader.delivery.put(item)
        return True

    def _forget(self, req_id: str) -> None:
        for reader in self._readers:
            reader.forget(req_id)

    def flush(self) -> None:
        """See `Delivery.flush`."""
        for reader in self._readers:
            reader.delivery.flush()

    def stats(self) -> DeliveryStats:
        """Counters of all."""
        found = [reader.delivery.stats() for reader in self._readers]
        consumers = [each for stats in found for each in stats.consumers]
        return DeliveryStats(
            dispatch_errors=sum(stats.dispatch_errors for stats in found),
            lost_results=sum(stats.lost_results for stats in found),
            lost_messages=sum(stats.lost_messages for stats in found),
            restarts=sum(stats.restarts for stats in found),
            consumers=tuple(sorted(consumers, key=lambda each: self._places[each.instance])),
        )

    def close(self, timeout_s: float) -> CloseReport:
        """See `Delivery.close`; all at the same time."""
        close_by = time.monotonic() + timeout_s
        for reader in self._readers:
            if isinstance(reader.delivery, CaptureProcess):
                reader.delivery.stop(timeout_s)  # no thread for each: at the end of Python none can be started
        reports = [reader.delivery.close(max(close_by - time.monotonic(), 0)) for reader in self._readers]
        left: Mapping[str, UnfinishedWork] = {name: work for each in reports for name, work in each.consumers.items()}
        return CloseReport(
            consumers={name: left[name] for name in self._places if name in left},
            is_dispatch_stuck=any(each.is_dispatch_stuck for each in reports),
            num_unsent=sum(each.num_unsent for each in reports),
            num_lost=sum(each.num_lost for each in reports),
        )


def open_delivery(place: WorkerPlace, memory: StagingMemory) -> Delivery:
    """Open the configured consumers, in processes beside the worker and on threads of it.

    Args:
        place: The worker.
        memory: The staging memory; with as many readers as `deal_out` says, if there are any.

    Raises:
        ConfigError: If one of them cannot be opened, or a process cannot be started; consumers opened before it are
            closed.
    """
    if not isinstance(memory, SharedStaging):
        return open_local_delivery(place)
    served = deal_out(place.config)
    assert memory.shared.num_readers == served.num_readers  # noqa: S101  (who made it has asked the same)
    places = [replace(place, bits=bits) for bits in (*served.processes, *filter(None, [served.threads]))]

    def open_one(index: int) -> Delivery:
        if index < len(served.processes):
            return open_capture_process(places[index], memory, index)
        return open_local_delivery(places[index])

    if len(places) == 1:
        return open_one(0)
    with ThreadPoolExecutor(len(places)) as pool:
        opening = [pool.submit(open_one, index) for index in range(len(places))]
    if any(each.exception() for each in opening):
        for each in opening:
            if each.exception() is None:
                each.result().close(place.config.close_timeout_s)
    opened = [each.result() for each in opening]
    readers = [DeliveryTarget(opened[index], own.served, index, memory) for index, own in enumerate(places)]
    return SpreadDelivery(readers, list(place.config.bits))
