"""Controllers in a process of their own, as the engine core sees them.

Their Python then takes nothing of the interpreter that also schedules and launches steps, and finds its caches warm.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from headgate.capture.engine.contracts.core_part import RequestProgress
from headgate.capture.links.child_process import Connection, start_module
from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.controller_thread import HANGS_S, ControllerFigures, Standstill
from headgate.steering.controllers.hosting.host import Answers, SwitchedOff
from headgate.steering.controllers.hosting.messages import (
    BegunRequest,
    EndedRequest,
    Loaded,
    ProcessSettings,
    Start,
    Step,
    StepAnswer,
)
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable

logger = logging.getLogger("headgate")

MAX_BEHIND = 64
"""Steps that may be under way to the process; further ones are skipped."""
LOADED_S = 300.0
"""Seconds that the start may take: imports from a slow disk, and whatever controllers do when they are made."""
ENDED_S = 5.0
"""Seconds that the process may take to end by itself once its socket is shut."""


class ControllerProcess:
    """Starts the process, speaks to it, waits for it and watches it. Engine thread only, but for `send`.

    Args:
        specs: The controllers.

    Attributes:
        loaded: The first message of the process.
        num_behind: Steps that were sent to it and are not answered.
        lost: Why the process is gone; None while it is there.

    Raises:
        ConfigError: If a controller cannot be made, or the process does not start.
    """

    def __init__(self, specs: Sequence[ControllerSpec]) -> None:
        self.num_behind = 0
        self.lost: str | None = None
        self._budget_s = sum(spec.budget_ms for spec in specs) / 1000
        self._num_late = 0
        """It is late until it has answered so many steps."""
        self._num_answers = 0
        self._standstill = Standstill()
        settings = ProcessSettings(specs=tuple(specs), path=tuple(sys.path), log_level=logger.getEffectiveLevel())
        self._connection, self._child = start_module("headgate.steering.controllers.hosting", settings)
        weakref.finalize(self, _end, self._connection, self._child)
        self.loaded = self._await_loaded()
        self._answers: SimpleQueue[bytes | None] = SimpleQueue()
        receiving = self._connection, self._answers
        threading.Thread(target=_receive, args=receiving, name="headgate-controllers", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message that is not answered. Any thread."""
        self._connection.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def ask(self, step: Step) -> None:
        """Send a step, which is answered."""
        self.num_behind += 1
        self.send(step)

    def take(self) -> list[StepAnswer]:
        """Return the answers that have come, waiting for those to all steps, for the budgets at most.

        When they are over, it is late until it has answered the steps that were waited for: it is not waited for again
        before, which would cost every step the budgets while it is slower than they allow.
        """
        found: list[StepAnswer] = []
        deadline = time.perf_counter() + self._budget_s
        while self.num_behind and self.lost is None:
            wait_s = deadline - time.perf_counter() if self._num_late <= 0 else 0.0
            try:
                data = self._answers.get(timeout=max(wait_s, 0.0))
            except Empty:
                self._num_late = self._num_late if self._num_late > 0 else self.num_behind
                self._wait_on()
                break
            if data is None:
                self._lose_closed()
                break
            found.append(pickle.loads(data))  # noqa: S301  (from the process that was started here)
            self.num_behind -= 1
            self._num_late -= 1
            self._num_answers += 1
        return found

    def _wait_on(self) -> None:
        self._check()
        if self.lost is None and (seconds := self._standstill.look(self._num_answers)) > HANGS_S:
            self._lose(f"its process has not returned from a step for {seconds:.0f} s")

    def _check(self) -> None:
        """Notice its end, also while children of it keep its socket open."""
        if (status := self._child.poll()) is not None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._lose(f"its process {how}")

    def _lose_closed(self) -> None:
        try:
            self._child.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            self._lose("its process has closed its socket")
        else:
            self._check()

    def _lose(self, reason: str) -> None:
        """End it, for a reason that is reported."""
        logger.error("steering: controllers are switched off: %s", reason)
        self.lost = reason
        _end(self._connection, self._child)

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


def _receive(connection: Connection, answers: SimpleQueue[bytes | None]) -> None:
    """Take what the process sends, on a thread of its own; None when it is gone."""
    while (data := connection.receive()) is not None:
        answers.put(data)
    answers.put(None)


def _end(connection: Connection, child: subprocess.Popen[bytes]) -> None:
    """End the process, which ends by itself when its socket is shut."""
    connection.shut()
    try:
        child.wait(ENDED_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@dataclass(slots=True)
class _SentTokens:
    """Tokens of a request, and how many of them the process has."""

    tokens: Sequence[int]
    count: int = 0

    def take_further(self) -> list[int]:
        """Return the tokens that the process does not have; they count as sent."""
        further = list(self.tokens[self.count :])
        self.count += len(further)
        return further


class ProcessHost:
    """Implements `headgate.steering.controllers.hosting.host.ControllerHost`.

    Args:
        specs: The controllers.
        progress: Returns how far requests are; None for one that has ended.
        scores: The columns of all scores in the signals of steps.

    Raises:
        ConfigError: If a controller cannot be made, or the process does not start.
    """

    def __init__(
        self, specs: Sequence[ControllerSpec], progress: Callable[[str], RequestProgress | None], scores: slice
    ) -> None:
        self._progress = progress
        self._score_columns = scores
        self._lock = threading.Lock()
        """Guards the order of messages, and which tokens they bring."""
        self._process = ControllerProcess(specs)
        self.loaded = self._process.loaded.controllers
        self._needs_tokens = any(each.needs_tokens for each in self.loaded.values())
        self._new: dict[str, BegunRequest] = {}
        """Requests whose first step was not sent."""
        self._sent: dict[str, _SentTokens] = {}
        """All others."""
        self._num_skipped = 0
        self._figures: Mapping[str, ControllerFigures] = {name: ControllerFigures() for name in self.loaded}
        self._has_lost = False

    def start(self, scores: Mapping[str, Mapping[str, int]]) -> None:
        """See `ControllerHost.start`."""
        self._process.send(Start(scores={name: dict(numbers) for name, numbers in scores.items()}))

    def add(self, req_id: str, num_prompt: int, acting: Sequence[str]) -> None:
        """See `ControllerHost.add`."""
        self._new[req_id] = BegunRequest(req_id, num_prompt, tuple(acting))

    def end(self, req_id: str) -> None:
        """See `ControllerHost.end`."""
        with self._lock:
            self._new.pop(req_id, None)
            if (sent := self._sent.pop(req_id, None)) is not None and self._process.lost is None:
                self._process.send(EndedRequest(req_id=req_id, tokens=sent.take_further()))

    def read(self, step: StepTable, discarded: Collection[str]) -> None:
        """See `ControllerHost.read`."""
        with self._lock:
            if self._process.lost is not None or self._process.num_behind >= MAX_BEHIND:
                self._num_skipped += 1
                return
            begins = [new for req_id in step.ids if (new := self._new.pop(req_id, None)) is not None]
            for new in begins:
                progress = self._progress(new.req_id)
                self._sent[new.req_id] = _SentTokens(() if progress is None else progress.token_ids)
            awaited = step.ids if self._needs_tokens else [new.req_id for new in begins]
            known = [(req_id, sent) for req_id in awaited if (sent := self._sent.get(req_id)) is not None]
            message = Step(
                table=step._replace(signals=step.signals[:, self._score_columns].copy()),
                discarded=frozenset(discarded),
                begins=begins,
                tokens={req_id: further for req_id, sent in known if (further := sent.take_further())},
            )
            self._process.ask(message)

    def take(self) -> Answers:
        """See `ControllerHost.take`."""
        found = Answers()
        for answer in self._process.take():
            found.actions += answer.actions
            found.switched_off += answer.switched_off
            self._figures = answer.figures
        lost = self._process.lost
        if lost is not None and not self._has_lost:
            self._has_lost = True
            on = [name for name, figures in self._figures.items() if figures.error is None]
            found.switched_off += [SwitchedOff(name, lost, tuple(self._sent)) for name in on]
        return found

    def figures(self) -> dict[str, ControllerFigures]:
        """See `ControllerHost.figures`: as they were after the last step that was answered."""
        skipped, lost = self._num_skipped, self._process.lost
        return {
            name: replace(each, skipped=each.skipped + skipped, error=each.error or lost)
            for name, each in self._figures.items()
        }
