"""Reports of a capture process to its worker, unasked: its counters, and which requests are over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headgate.capture.delivery.delivery import DeliveryStats
from headgate.capture.process.connection import Connection
from headgate.capture.process.messages import Done, encode
from headgate.capture.process.stats_board import StatsBoard

MAX_UNTOLD, UNTOLD_S = 256, 0.25
"""Requests that have ended are told in batches: so many, or after so many seconds."""
SHOWN_S = 0.25
"""Age that counters may reach while no result is sent."""


class Reports:
    """Implements `headgate.capture.request_origin.ResultWatcher`.

    Ended requests are told some at a time, since each message costs the worker a switch of threads. Counters are shown
    in shared memory ahead of each result, so that whoever has a result finds it counted.

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
        """Tell the rest, and end the thread."""
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
