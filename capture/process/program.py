"""The program of a capture process: ``python -m headgate.capture.process``, and how a worker starts it."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from headgate.capture.delivery.delivery import Delivery, DeliveryStats, MemoryWanted, RequestBegins
from headgate.capture.links.child_process import Connection, start_module, watch_child, watch_parent
from headgate.capture.links.sender import ResultWatcher
from headgate.capture.links.shared_memory import NumberedCopy, SharedMemory, SharedRows, StatsBoard
from headgate.capture.local_delivery import WorkerPlace, open_local_delivery
from headgate.capture.planning.step_plan import PackGroup, SiteSet
from headgate.capture.process.messages import (
    Begin,
    Close,
    Closed,
    Done,
    End,
    GroupWire,
    NumberedRequests,
    Ready,
    Staged,
    ToProcess,
    copy_part,
    decode_to_process,
    encode,
    new_request,
    numbers,
    pack_group,
    request_ends,
)
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.readout import ReadoutSite, by_consumer
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import SpecReader
from headgate.capture.staging.host_rows import Lease, StagedRows

MAX_UNTOLD, UNTOLD_S = 256, 0.25
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
        self._untold: list[tuple[str, str, str]] = []
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
            self._untold.append((instance, req_id, key))
            self._changed.notify()

    def close(self) -> None:
        """Report the rest, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._tell()

    def _show(self) -> None:
        if self._stats is not None:
            with self._showing:
                self._board.show(self._stats())

    def _tell(self) -> None:
        with self._changed:
            ended, self._untold = self._untold, []
        if ended:
            self._connection.send(encode(Done(ended)))

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._untold or self._is_closed, SHOWN_S):
                    self._changed.wait_for(lambda: len(self._untold) >= MAX_UNTOLD or self._is_closed, UNTOLD_S)
                if self._is_closed:
                    return
            self._tell()
            self._show()


MAX_SITE_SETS = 1024
"""Sets of sites that are known again by their bytes, so that rows of the same sites can be put together."""

OpenDelivery = Callable[[ResultWatcher], Delivery]
"""Opens the consumers; the watcher is notified of their results; raises `ConfigError` if it cannot."""


class CaptureServer:
    """Serves one worker until it closes, or is gone.

    Args:
        sites: Those of the worker, in the order of the ring.
        bits: Of each consumer that is served here, by its instance: its bit in a row's mask.
        rows_AD: The staging memory, ``[A, D]``.
        rows: The same memory's leases and arrivals.
        connection: To the worker.
        board: Where counters are shown.
        readouts: The readouts that the worker computes.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        bits: Mapping[str, int],
        rows_AD: Tensor,
        rows: SharedRows,
        connection: Connection,
        board: StatsBoard,
        *,
        readouts: Sequence[ReadoutSite] = (),
    ) -> None:
        self._sites = (*sites, *(each.site for each in readouts))
        self._num_outputs = (*[0] * len(sites), *(each.facts.num_outputs for each in readouts))
        self._readouts = by_consumer(readouts)
        self._specs = SpecReader(sites)
        self._bits = dict(bits)
        self._rows_AD = rows_AD
        self._rows = rows
        self._connection = connection
        self._site_sets: dict[bytes, SiteSet] = {}
        self._requests = NumberedRequests()
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
            self._connection.send(encode(Ready(str(error))))
            return
        self._reports.open(delivery.stats)
        self._connection.send(encode(Ready()))
        timeout_s = close_timeout_s
        while (data := self._connection.receive()) is not None:
            message = decode_to_process(data)
            if isinstance(message, Close):
                timeout_s = message.timeout_s
                break
            self._take(message, delivery)
        else:
            self._rows.is_over = True
        report = delivery.close(timeout_s)
        self._reports.close()
        self._connection.send(encode(Closed(report, delivery.stats())))

    def _take(self, message: ToProcess, delivery: Delivery) -> None:
        if isinstance(message, Staged):
            delivery.put(self._staged_rows(message))
        elif isinstance(message, Begin):
            self._requests.begin(message.number, message.req_id)
            delivery.put(self._request_begins(message))
        elif isinstance(message, End):
            self._requests.end(message.req_id)
            delivery.put(request_ends(message))
        else:
            delivery.put(MemoryWanted())

    def _request_begins(self, message: Begin) -> RequestBegins:
        wanted = {} if message.capture is None else message.capture["specs"]
        specs = {
            self._bits[instance]: self._specs.read(raw) for instance, raw in wanted.items() if instance in self._bits
        }
        return RequestBegins(new_request(message), specs, message.is_same_client, self._readouts)

    def _staged_rows(self, message: Staged) -> StagedRows:
        lease = Lease(message.start, message.num_leased, message.number)
        part = copy_part(message, [self._pack_group(group) for group in message.groups])
        copied = NumberedCopy(self._rows, message.number)
        return StagedRows(part, self._rows_AD, self._rows, lease, copied, message.since)

    def _pack_group(self, group: GroupWire) -> PackGroup:
        site_set = self._site_sets.get(group.site_ids)
        if site_set is None:
            if len(self._site_sets) >= MAX_SITE_SETS:
                self._site_sets.clear()
            ids = numbers(group.site_ids)
            sites = tuple(self._sites[index] for index in ids)
            site_set = SiteSet(sites, ids, self._num_outputs[ids[0]])
            self._site_sets[group.site_ids] = site_set
        return pack_group(group, site_set, self._requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings that a capture process is given at its start; pickled.

    Attributes:
        place: The worker whose rows are delivered.
        sites: Those of the worker, in the order of the ring.
        num_rows: Rows of the staging memory.
        num_readers: Its readers.
        reader: Which of them this process is.
        num_threads: Of torch's, for copies of many rows.
        log_level: Of headgate's log.
        path: The worker's `sys.path`.
    """

    place: WorkerPlace
    sites: tuple[Site, ...]
    num_rows: int
    num_readers: int
    reader: int
    num_threads: int
    log_level: int
    path: tuple[str, ...]


class Child(Protocol):
    """A process that was started; `subprocess.Popen` is one."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """End it, now."""
        ...


def spawn(settings: Settings, memory: SharedMemory, board: StatsBoard) -> tuple[Connection, Child]:
    """Start a capture process that reads `memory` and shows counters on `board`. It says `Ready` when it serves."""
    fds = memory.memory_fd, memory.freed_fd, board.fd
    connection, child = start_module("headgate.capture.process", settings, *fds)
    watch_child(child.pid, connection)
    return connection, child


def main(arguments: Sequence[str]) -> None:
    """Serve the worker at the other end of the socket; the arguments are four numbers of open files."""
    # A terminal and a supervisor signal the whole group: the worker says when to end, and its end is noticed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    end, memory_fd, freed_fd, board_fd = map(int, arguments)
    connection = Connection(socket.socket(fileno=end))
    data = connection.receive()
    if data is None:
        return
    settings: Settings = pickle.loads(data)  # noqa: S301  (from the worker that has started this process)
    sys.path[:] = settings.path
    _start_logging(settings)
    torch.set_num_threads(settings.num_threads)
    watch_parent(connection.shut)
    place = settings.place
    shared = SharedMemory(settings.num_rows * place.row_bytes, settings.num_readers, (memory_fd, freed_fd))
    rows_AD = shared.rows(place.model.hidden_size, getattr(torch, place.model.dtype))
    board = StatsBoard(place.served, board_fd)
    rows = SharedRows(shared, settings.reader)
    server = CaptureServer(settings.sites, place.served, rows_AD, rows, connection, board, readouts=place.readouts)
    server.serve(partial(open_local_delivery, place), place.config.close_timeout_s)


def _start_logging(settings: Settings) -> None:
    stage = f" {settings.place.pp_rank}" if settings.place.pp_size > 1 else ""
    logging.basicConfig(
        level=logging.WARNING,
        format=f"(Capture{stage} pid={os.getpid()}) %(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    logging.getLogger("headgate").setLevel(settings.log_level)
