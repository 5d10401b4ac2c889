"""The process in which controllers live: ``python -m headgate.steering.controllers.hosting``."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.process.connection import Connection, watch_parent
from headgate.capture.schema.batch import BoolArray, Int32Array, Int64Array
from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.actions import Action
from headgate.steering.controllers.hosting.gathering import Gathering
from headgate.steering.controllers.hosting.host import LocalHost
from headgate.steering.controllers.hosting.messages import (
    ANSWERS,
    DONE,
    SENT,
    STEPS,
    TOKEN_STEPS,
    AskFigures,
    Attach,
    Attached,
    Board,
    End,
    Figures,
    Loaded,
    Settings,
    Start,
    Step,
)
from headgate.steering.controllers.hosting.repeats import Repeats
from headgate.steering.controllers.hosting.told_words import ToldRowsOfStep, ToldWords
from headgate.steering.gates.step_table import StepTable

STEP_POLL_S, PAUSE_POLL_S, IDLE_POLL_S = 50e-6, 1e-3, 0.05
"""Intervals at which the process looks for steps that forwards tell: while one is due, after `PAUSE_S` without one, and
while no request runs. A message wakes it, unless it came together with another one."""
PAUSE_S = 0.1
DUE_SHARE, LONG_STEP_S = 0.6, 0.01
"""A step is due after this share of the shortest of the last intervals, or of so many seconds."""
_UNPICKLED = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError)
"""Raised by what a controller has put into an action, if that cannot be pickled."""


def main(arguments: Sequence[str]) -> None:
    """Serve the engine core at the other end of the socket; the arguments are two numbers of open files."""
    # A terminal and a supervisor signal the whole group: the engine core's end is noticed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    end, board_fd = map(int, arguments)
    theirs = socket.socket(fileno=end)
    connection, board = Connection(theirs), Board(board_fd)
    data = connection.receive()
    if data is None:
        return
    settings: Settings = pickle.loads(data)  # noqa: S301  (from the engine core that has started this process)
    sys.path[:] = settings.path
    _start_logging(settings)
    watch_parent(partial(os._exit, 1))  # also while a controller does not return: nothing here has to be closed
    tokens: dict[str, list[int]] = {}
    try:
        host = LocalHost(settings.specs, tokens.get)
    except ConfigError as error:
        connection.send(pickle.dumps(Loaded(error=str(error))))
        return
    connection.send(pickle.dumps(Loaded(controllers=host.loaded)))
    _Program(connection, theirs, board, host, tokens).serve()


def _start_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format=f"(Controllers pid={os.getpid()}) %(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    logging.getLogger("headgate").setLevel(settings.log_level)


class _ToldSteps:
    """Steps that the forward tells, behind one that came as a message.

    Args:
        step: That one.
        told: The words of its rows.
        is_read: Which numbers are read of each request, ``[G, K]``.
        ahead: How many rows further on a decision behind a step acts.
    """

    def __init__(self, step: StepTable, told: ToldRowsOfStep, is_read: BoolArray, ahead: int) -> None:
        self.step = step
        self.ahead = ahead
        self.running = set(step.ids)
        """Those of its requests that have not ended."""
        self._told = told
        self._is_read = is_read
        self._num_behind = 0

    def next(self, words: ToldWords) -> StepTable | None:
        """Return the next step; None if it was overwritten."""
        self._num_behind += 1
        scores, is_known = words.read(self._told.behind(self._num_behind))
        if not (is_known | ~self._is_read).all():
            return None
        ids, firsts, counts = self.step.ids, self.step.firsts + self._num_behind, self.step.counts
        return StepTable(ids, firsts, counts, np.where(self._is_read, scores, np.float32(0)), has_one_row_each=True)

    def find(self, req_ids: Sequence[str]) -> Int64Array | None:
        """See `headgate.steering.controllers.hosting.repeats.ActingRows`."""
        place_of = {req_id: place for place, req_id in enumerate(self.step.ids)}
        found = [place_of.get(req_id, -1) for req_id in req_ids]
        return None if -1 in found else np.array(found, np.int64)

    def slots(self, places: Int64Array) -> Int32Array:
        """See `headgate.steering.controllers.hosting.repeats.ActingRows`."""
        slots: Int32Array = self._told.slots[places]
        return slots

    def positions(self, places: Int64Array) -> Int64Array:
        """See `headgate.steering.controllers.hosting.repeats.ActingRows`."""
        positions: Int64Array = self.step.firsts[places] + (self._num_behind + self.ahead)
        return positions


class _Pace:
    """Tells when the next step is due, so that nobody looks for it before: processors share caches and cores.

    Steps become shorter when requests end, so that little is relied on.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._intervals: deque[float] = deque(maxlen=8)

    def follow(self) -> None:
        """Follow a step that has come."""
        now = time.monotonic()
        self._intervals.append(now - self._last)
        self._last = now

    def rest(self, end: socket.socket) -> None:
        """Rest until a message comes, or a step may."""
        due = self._last + DUE_SHARE * min(min(self._intervals, default=0.0), LONG_STEP_S)
        select.select([end], [], [], max(due - time.monotonic(), STEP_POLL_S))


class _Program:
    """Does what comes, in the order of the steps."""

    def __init__(
        self,
        connection: Connection,
        end: socket.socket,
        board: Board,
        host: LocalHost,
        tokens: dict[str, list[int]],
    ) -> None:
        self._connection, self._socket = connection, end
        self._pace = _Pace()
        self._board, self._words = board, board.words
        self._host = host
        self._tokens = tokens
        self._needs_tokens = any(each.needs_tokens for each in host.loaded.values())
        self._waker = select.poll()
        self._waker.register(end, select.POLLIN)
        self._numbers: dict[str, list[int]] = {}
        """The numbers of the scores that each controller reads."""
        self._messages: deque[Step | End | Start | Attach | AskFigures] = deque()
        self._num_received = self._num_done = 0
        self._memory: ToldWords | None = None
        self._told: _ToldSteps | None = None
        self._gathering = Gathering()
        self._repeats = Repeats(board)
        self._running: tuple[str, ...] = ()
        """The requests of the last step."""
        self._log = SparseLog("controllers")

    def serve(self) -> None:
        """Serve until the engine core is gone."""
        worked_at = time.monotonic()
        while True:
            # Steps first: the message of one was sent before it was counted.
            num_steps = self._words[STEPS]
            while self._num_received < self._words[SENT]:
                if (data := self._connection.receive()) is None:
                    return
                self._messages.append(pickle.loads(data))  # noqa: S301
                self._num_received += 1
            if self._messages and _behind(self._messages[0]) <= self._num_done:
                self._do(self._messages.popleft())
            elif num_steps > self._num_done:
                self._read_told()
            elif self._is_gone(time.monotonic() - worked_at):
                return
            else:
                continue
            worked_at = time.monotonic()

    def _is_gone(self, idle_s: float) -> bool:
        """Wait a little, having done nothing for some seconds; returns whether the engine core is gone."""
        runs = self._told is not None and bool(self._told.running)
        if runs and idle_s < PAUSE_S:
            self._pace.rest(self._socket)
            return False
        found = self._waker.poll(1e3 * (PAUSE_POLL_S if runs else IDLE_POLL_S))
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in found)

    def _do(self, message: Step | End | Start | Attach | AskFigures) -> None:
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, End):
            self._end(message)
        elif isinstance(message, Start):
            self._host.start(message.scores)
            self._numbers = {name: list(scores.values()) for name, scores in message.scores.items()}
        elif isinstance(message, Attach):
            self._attach(message)
        else:
            self._answer(Figures(figures=self._host.figures()))

    def _attach(self, message: Attach) -> None:
        error = None
        try:
            self._memory = ToldWords(message.place)
        except (OSError, ValueError) as found:
            error = f"{type(found).__name__}: {found}"
        self._answer(Attached(error=error))

    def _step(self, message: Step) -> None:
        for new in message.begins:
            self._tokens[new.req_id] = []
            self._host.add(*new)
        for req_id, tokens in message.tokens.items():
            self._tokens[req_id].extend(tokens)
        self._running = message.table.ids
        self._host.read(message.table, message.discarded)
        self._told = None
        if message.told is not None:
            self._told = _ToldSteps(message.table, message.told, self._is_read(message.table), message.ahead)
        self._finish(message.number)

    def _is_read(self, table: StepTable) -> BoolArray:
        found = np.zeros((len(table.ids), table.signals.shape[1]), np.bool_)
        for at, req_id in enumerate(table.ids):
            for name in self._host.acting(req_id):
                found[at, self._numbers[name]] = True
        return found

    def _read_told(self) -> None:
        """Read the next step where the forward has told it."""
        number = self._num_done + 1
        self._pace.follow()
        if self._told is None or self._memory is None:
            raise AssertionError(f"step {number} was told by the forward, but nothing is known of its requests")
        step = self._told.next(self._memory)
        if self._needs_tokens:
            self._take_tokens(number)
        if step is None:
            self._host.skip()
            self._log.warning("controllers fell behind by several steps; a step was skipped")
        else:
            self._host.read(step, ())
        self._finish(number)

    def _take_tokens(self, number: int) -> None:
        if self._told is not None:
            ids = self._told.step.ids
            row = self._board.tokens[number % TOKEN_STEPS, : len(ids)].tolist()
            for req_id, token in zip(ids, row, strict=True):
                if (tokens := self._tokens.get(req_id)) is not None:
                    tokens.append(token)

    def _end(self, message: End) -> None:
        tokens = self._tokens.get(message.req_id)
        if tokens is not None:
            tokens.extend(message.tokens)
        self._host.end(message.req_id)
        self._tokens.pop(message.req_id, None)
        if self._told is not None:
            self._told.running.discard(message.req_id)

    def _finish(self, number: int) -> None:
        """Tell what came of a step, and then that it is done."""
        answers = self._host.take()
        answers.actions = self._gathering.gather(answers.actions, self._running)
        rows = self._told if self._told is not None and self._told.ahead else None
        said = not answers.switched_off and (
            not answers.actions or self._repeats.say(number, answers.actions, rows, self._memory)
        )
        if not said:
            try:
                self._answer(self._repeats.pack(answers))
            except _UNPICKLED:
                self._repeats.forget()
                answers.actions = [each for each in answers.actions if self._can_travel(*each)]
                self._answer(self._repeats.pack(answers))
        self._num_done = self._words[DONE] = number

    def _can_travel(self, name: str, action: Action) -> bool:
        """Whether an action can be pickled; one that cannot is dropped, and counted."""
        try:
            pickle.dumps(action, pickle.HIGHEST_PROTOCOL)
        except _UNPICKLED:
            self._log.error(f"controller {name}: an action is dropped: something in it cannot leave the process")
            self._host.drop(name)
            return False
        return True

    def _answer(self, message: object) -> None:
        self._connection.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        self._words[ANSWERS] += 1


def _behind(message: object) -> int:
    """Return the number of the step behind which a message is to be done."""
    if isinstance(message, Step):
        return message.number - 1
    return message.behind if isinstance(message, End) else 0
