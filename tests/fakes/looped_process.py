"""A capture process that is a thread of the test: messages, leases and arrivals are real, consumers are the test's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import torch

from headgate.capture.capture_process import CaptureProcess, CaptureServer, Ledger
from headgate.capture.links.child_process import Connection, Started
from headgate.capture.links.sender import ResultSender
from headgate.capture.links.shared_memory import SharedRows, SharedStaging, StatsBoard
from headgate.capture.local_delivery import LocalDelivery, WorkerPlace
from headgate.capture.schema.registry import OpenConsumer


class Looped:
    """A `Child` that is a thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")


def looped_process(
    place: WorkerPlace,
    consumers: Sequence[OpenConsumer],
    sender: ResultSender,
    memory: SharedStaging,
    close_sender: Callable[[float], int] | None = None,
    reader: int = 0,
) -> CaptureProcess:
    """A delivery over a socket and shared memory to consumers in this process."""
    bits = {each.spec.instance: each.bit for each in consumers}
    rows_AD = memory.shared.rows(place.model.hidden_size, getattr(torch, place.model.dtype))

    board = StatsBoard(bits)

    def start() -> Started:
        ours, theirs = socket.socketpair()
        connection = Connection(theirs)
        rows = SharedRows(memory.shared, reader)
        server = CaptureServer(place.sites, rows_AD, rows, connection, board, readouts=place.readouts)

        def serve() -> None:
            server.serve(
                lambda watcher: LocalDelivery(place, consumers, sender, close_sender=close_sender, watcher=watcher), 1
            )
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        return Connection(ours), Looped(thread)

    far = [each.spec for each in consumers if each.consumer.location == "driver"]
    return CaptureProcess(memory, Ledger(place, bits, far, lambda: sender), board, start, reader=reader)
