"""Controllers in a process of their own: as the engine core sees them, the messages, and the program of the process.

Their Python then takes nothing of the interpreter that also schedules and launches steps, and finds its caches warm.

Messages are pickled: each side runs the other's code, and an action may hold whatever its controller has put into it.
The process does what they say in their order, and answers each step.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np

from headgate.capture.engine.contracts.core_part import RequestProgress
from headgate.capture.links.child_process import Connection, Ready, Supervisor, encode_ready, start_child, watch_parent
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.errors import ConfigError, finite
from headgate.steering.controllers.actions import Action, SetSteering, SetSteeringEach
from headgate.steering.controllers.host import (
    HANGS_S,
    Answers,
    ControllerFigures,
    DecidedAction,
    LoadedController,
    LocalHost,
    Standstill,
    SwitchedOff,
)
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """See `headgate.steering.controllers.host.ControllerHost.start`."""

    scores: Mapping[str, Mapping[str, int]]


class BegunRequest(NamedTuple):
    """A request that is in a step for the first time."""

    req_id: str
    num_prompt: int
    acting: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step, with its scores.

    Attributes:
        number: The step's.
        table: Its signals are the scores alone, float32 ``[rows, K]``.
        discarded: Requests of the step for which it does not count.
        begins: Requests that are new.
        tokens: Further tokens, by request.
    """

    number: int
    table: StepTable
    discarded: frozenset[str]
    begins: Sequence[BegunRequest]
    tokens: Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRequest:
    """A request has ended.

    Attributes:
        req_id: The request.
        tokens: Its further tokens.
    """

    req_id: str
    tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAnswer:
    """The answer to a step: what controllers do about it.

    Attributes:
        actions: Each with its controller, and the step that it was decided by.
        switched_off: See `headgate.steering.controllers.host.Answers`.
        figures: Figures of each controller, by its name.
    """

    actions: Sequence[DecidedAction]
    switched_off: Sequence[SwitchedOff]
    figures: Mapping[str, ControllerFigures]


_UNPICKLED = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError)
"""Raised by what a controller has put into an action, if that cannot be pickled."""


def serve(connection: Connection, specs: Sequence[ControllerSpec]) -> None:
    """Serve the engine core at the other end; see `headgate.capture.links.child_process.start_child`."""
    watch_parent(partial(os._exit, 1))  # also while a controller does not return: nothing here has to be closed
    tokens: dict[str, list[int]] = {}
    try:
        host = LocalHost(specs, tokens.get)
    except ConfigError as error:
        connection.send(encode_ready(Ready(str(error))))
        return
    connection.send(encode_ready(Ready(content=pickle.dumps(host.loaded))))
    _Program(connection, host, tokens).serve()


class _Program:
    """Does what messages say, in their order."""

    def __init__(self, connection: Connection, host: LocalHost, tokens: dict[str, list[int]]) -> None:
        self._connection = connection
        self._host = host
        self._tokens = tokens
        self._log = SparseLog("controllers")

    def serve(self) -> None:
        """Serve until the engine core is gone."""
        while (data := self._connection.receive()) is not None:
            message: Start | Step | EndedRequest = pickle.loads(data)  # noqa: S301
            if isinstance(message, Step):
                self._step(message)
            elif isinstance(message, EndedRequest):
                self._end(message)
            else:
                self._host.start(message.scores)

    def _step(self, message: Step) -> None:
        for new in message.begins:
            self._tokens[new.req_id] = []
            self._host.add(*new)
        for req_id, tokens in message.tokens.items():
            self._tokens[req_id].extend(tokens)
        self._host.read(message.table, message.discarded, message.number)
        answers = self._host.take()
        actions = gathered(answers.actions)
        try:
            data = self._answer(actions, answers)
        except _UNPICKLED:
            actions = [each for each in actions if self._can_travel(each)]
            data = self._answer(actions, answers)
        self._connection.send(data)

    def _answer(self, actions: Sequence[DecidedAction], answers: Answers) -> bytes:
        answer = StepAnswer(actions=actions, switched_off=answers.switched_off, figures=self._host.figures())
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)

    def _can_travel(self, decided: DecidedAction) -> bool:
        """Whether an action can be pickled; one that cannot is dropped, and counted."""
        try:
            pickle.dumps(decided.action, pickle.HIGHEST_PROTOCOL)
        except _UNPICKLED:
            name = decided.controller
            self._log.error(f"controller {name}: an action is dropped: something in it cannot leave the process")
            self._host.drop(name)
            return False
        return True

    def _end(self, message: EndedRequest) -> None:
        self._tokens[message.req_id].extend(message.tokens)
        self._host.end(message.req_id)
        del self._tokens[message.req_id]


def gathered(actions: Iterable[DecidedAction]) -> list[DecidedAction]:
    """Return actions that do the same, in the same order, and are faster to apply.

    Actions `SetSteering` of one controller that are consecutive, and differ in request and scale alone, become a
    `SetSteeringEach`.
    """
    made: list[DecidedAction] = []
    run: dict[str, float] = {}
    of: tuple[str, str, int] | None = None
    for decided in actions:
        name, action, step = decided
        one = _module_at(action)
        if of is not None and (one is None or of != (name, one.module, step) or one.request in run):
            made.append(_joined(*of, run))
            run, of = {}, None
        if one is None:
            made.append(decided)
        else:
            of = name, one.module, step
            run[one.request] = one.scale
    return made if of is None else [*made, _joined(*of, run)]


def _joined(name: str, module: str, step: int, run: Mapping[str, float]) -> DecidedAction:
    if len(run) > 1:
        return DecidedAction(name, SetSteeringEach(tuple(run), module, np.array([*run.values()])), step)
    ((request, scale),) = run.items()
    return DecidedAction(name, SetSteering(request, module=module, scale=scale), step)


class _ModuleAt(NamedTuple):
    """An action that turns a module on for a request, beside what the request has."""

    request: str
    module: str
    scale: float


def _module_at(action: Action) -> _ModuleAt | None:
    if type(action) is not SetSteering or not action.compose or not isinstance(action.request, str):
        return None
    module, scale = action.module, finite(action.scale)
    if scale is None:
        return None
    is_alone = isinstance(module, str) and len(action.given) == 1
    return _ModuleAt(action.request, module, scale) if module is not None and is_alone else None


logger = logging.getLogger("headgate")

MAX_BEHIND = 64
"""Steps that may be under way to the process; further ones are skipped."""


class ControllerProcess:
    """Starts the process, speaks to it, waits for it and watches it. Engine thread only, but for `send`.

    Args:
        specs: The controllers.

    Attributes:
        loaded: The controllers, by their names.
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
        self._answers: SimpleQueue[bytes | str] = SimpleQueue()
        start = partial(start_child, __name__, tuple(specs), label="Controllers")
        # Its thread has the queue, and not this object: the process ends with it.
        self._process = Supervisor(
            "the process of the controllers", start, _Receiver(self._answers), is_restarted=False
        )
        weakref.finalize(self, self._process.close)
        self.loaded: Mapping[str, LoadedController] = pickle.loads(self._process.content)  # noqa: S301
        self._process.watch()

    def send(self, message: object) -> None:
        """Send a message that is not answered. Any thread."""
        self._process.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

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
            if isinstance(data, str):
                self._lose(f"its process {data}")
                break
            found.append(pickle.loads(data))  # noqa: S301  (from the process that was started here)
            self.num_behind -= 1
            self._num_late -= 1
            self._num_answers += 1
        return found

    def _wait_on(self) -> None:
        if (seconds := self._standstill.look(self._num_answers)) > HANGS_S:
            self._lose(f"its process has not returned from a step for {seconds:.0f} s")

    def _lose(self, reason: str) -> None:
        """End it, for a reason that is reported."""
        logger.error("steering: controllers are switched off: %s", reason)
        self.lost = reason
        self._process.close()


class _Receiver:
    """Implements `headgate.capture.links.child_process.Owner`: answers, and how the process ended, go to a queue."""

    def __init__(self, answers: SimpleQueue[bytes | str]) -> None:
        self.received = answers.put
        self.ended = answers.put

    def left(self) -> None:
        """See `Owner`."""

    def serves_again(self) -> None:
        """See `Owner`; it never does."""


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
    """Implements `headgate.steering.controllers.host.ControllerHost`.

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
        self.loaded = self._process.loaded
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

    def read(self, step: StepTable, discarded: Collection[str], number: int) -> None:
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
                number=number,
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
            found.switched_off += [SwitchedOff(name, lost) for name in on]
        return found

    def figures(self) -> dict[str, ControllerFigures]:
        """See `ControllerHost.figures`: as they were after the last step that was answered."""
        skipped, lost = self._num_skipped, self._process.lost
        return {
            name: replace(each, skipped=each.skipped + skipped, error=each.error or lost)
            for name, each in self._figures.items()
        }
