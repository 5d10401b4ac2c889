"""The process of the controllers as the engine core reaches it: started, spoken to, waited for, and watched."""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from headgate.capture.process.connection import Connection, start_module
from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.controller_thread import HANGS_S, Standstill
from headgate.steering.controllers.hosting.messages import ANSWERS, DONE, SENT, STEPS, Board, Loaded, Settings
from headgate.steering.controllers.loading import ControllerSpec

logger = logging.getLogger("headgate")

LOADED_S = 300.0
"""Seconds that the start may take: imports from a slow disk, and whatever controllers do when they are made."""
ENDED_S = 5.0
"""Seconds that the process may take to end by itself once its socket is shut."""
_SPIN_S, _POLL_S = 300e-6, 20e-6
"""The engine core looks without a pause for so long, and then at this interval: a pause takes 70 us at the least."""


class ControllerProcess:
    """Starts the process. Engine thread only, but for `send`, which is for any thread.

    Args:
        specs: The controllers.

    Attributes:
        board: Words that both share.
        loaded: The first word of the process.
        num_steps: Steps that it was told of.
        num_answers: Answers that were received.
        lost: Why the process is gone; None while it is there.

    Raises:
        ConfigError: If a controller cannot be made, or the process does not start.
    """

    def __init__(self, specs: Sequence[ControllerSpec]) -> None:
        self.board = Board()
        self.num_steps = self.num_answers = 0
        self.lost: str | None = None
        self._words = self.board.words
        self._budget_s = sum(spec.budget_ms for spec in specs) / 1000
        self._late_until = 0
        """It is late until it is done with so many steps."""
        self._standstill = Standstill()
        self._sending = threading.Lock()
        settings = Settings(specs=tuple(specs), path=tuple(sys.path), log_level=logger.getEffectiveLevel())
        module = "headgate.steering.controllers.hosting"
        self._connection, self._child = start_module(module, settings, self.board.fd)
        weakref.finalize(self, _end, self._connection, self._child)
        self.loaded = self._await_loaded()

    @property
    def num_behind(self) -> int:
        """Steps that it was told of and is not done with."""
        return self.num_steps - self._words[DONE]

    @property
    def has_answers(self) -> bool:
        """Whether `receive` returns at once."""
        return self.num_answers < self._words[ANSWERS]

    def send(self, message: object) -> None:
        """Send a message, and count it: two threads that did so at once could count one for both."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            self._connection.send(data)
            self._words[SENT] += 1

    def count_step(self) -> None:
        """Tell of a step, whose message was sent if it has one."""
        self.num_steps += 1
        self._words[STEPS] = self.num_steps

    def receive(self) -> Any:
        """Wait for the next answer and return it; None if the process is gone."""
        data = self._connection.receive()
        self.num_answers += 1
        if data is None:
            try:
                self._child.wait(ENDED_S)
            except subprocess.TimeoutExpired:
                self.lose("its process has closed its socket")
            self.check()
            return None
        return pickle.loads(data)  # noqa: S301  (from the process that was started here)

    def await_done(self) -> None:
        """Wait until it is done with all steps, for the budgets at most.

        When they are over, it is late until it is done with the steps that were waited for: it is not waited for again
        before, which would cost every step the budgets while it is slower than they allow.
        """
        words, began = self._words, time.perf_counter()
        while words[DONE] < self.num_steps and self.lost is None:
            waited_s = time.perf_counter() - began
            is_late = words[DONE] < self._late_until
            if is_late or waited_s > self._budget_s:
                self._late_until = self._late_until if is_late else self.num_steps
                self._wait_on()
                return
            time.sleep(0 if waited_s < _SPIN_S else _POLL_S)

    def await_answer(self, seconds: float) -> bool:
        """Wait for an answer; returns whether there is one."""
        deadline = time.monotonic() + seconds
        while not self.has_answers and self.lost is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.check()
        return self.has_answers

    def check(self) -> None:
        """Notice its end."""
        if self.lost is None and (status := self._child.poll()) is not None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self.lose(f"its process {how}")

    def lose(self, reason: str) -> None:
        """End it, for a reason that is told."""
        logger.error("steering: controllers are switched off: %s", reason)
        self.lost = reason
        _end(self._connection, self._child)

    def _wait_on(self) -> None:
        self.check()
        if self.lost is None and (seconds := self._standstill.look(self._words[DONE])) > HANGS_S:
            self.lose(f"its process has not returned from a step for {seconds:.0f} s")

    def _await_loaded(self) -> Loaded:
        timer = threading.Timer(LOADED_S, self._connection.shut)
        timer.start()
        try:
            data = self._connection.receive()
        finally:
            timer.cancel()
        message = None if data is None else pickle.loads(data)  # noqa: S301
        if isinstance(message, Loaded) and message.error is None:
            return message
        _end(self._connection, self._child)
        error = message.error if isinstance(message, Loaded) else None
        raise ConfigError(error or "the process of the controllers did not start; its log says why")


def _end(connection: Connection, child: subprocess.Popen[bytes]) -> None:
    """End the process, which ends by itself when its socket is shut."""
    connection.shut()
    try:
        child.wait(ENDED_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
