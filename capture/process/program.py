"""The program of a capture process: ``python -m headgate.capture.process``, and how a worker starts it."""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from headgate.capture.local_delivery import Place, open_local_delivery
from headgate.capture.process.connection import Connection, start_module, watch_child, watch_parent
from headgate.capture.process.serving import CaptureServer
from headgate.capture.process.stats_board import StatsBoard
from headgate.capture.schema.sites import Site
from headgate.capture.staging.shared_memory import SharedMemory, SharedRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a capture process, which it is told at its start; pickled.

    Attributes:
        place: The worker whose rows are delivered.
        sites: Those of the worker, in the order of the ring.
        num_rows: Rows of the staging memory.
        num_readers: Those who read it.
        reader: Which of them this process is.
        num_threads: Of torch's, for copies of many rows.
        log_level: Of headgate's log.
        path: The worker's `sys.path`.
    """

    place: Place
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
