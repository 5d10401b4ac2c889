"""The process in which controllers live: ``python -m headgate.steering.controllers.hosting``."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from headgate.capture.links.child_process import Connection, watch_parent
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers.actions import Action, SetSteering, SetSteeringEach
from headgate.steering.controllers.hosting.host import Answers, LocalHost
from headgate.steering.controllers.hosting.messages import (
    EndedRequest,
    Loaded,
    ProcessSettings,
    Start,
    Step,
    StepAnswer,
)

_UNPICKLED = (pickle.PickleError, TypeError, AttributeError, ValueError, RecursionError)
"""Raised by what a controller has put into an action, if that cannot be pickled."""


def main(arguments: Sequence[str]) -> None:
    """Serve the engine core at the other end of the socket, whose number as an open file is the argument."""
    # A terminal and a supervisor signal the whole group: the engine core's end is noticed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    (end,) = map(int, arguments)
    connection = Connection(socket.socket(fileno=end))
    data = connection.receive()
    if data is None:
        return
    settings: ProcessSettings = pickle.loads(data)  # noqa: S301  (from the engine core that has started this process)
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
    _Program(connection, host, tokens).serve()


def _start_logging(settings: ProcessSettings) -> None:
    logging.basicConfig(
        level=logging.WARNING,
        format=f"(Controllers pid={os.getpid()}) %(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    logging.getLogger("headgate").setLevel(settings.log_level)


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
        self._host.read(message.table, message.discarded)
        answers = self._host.take()
        actions = gathered(answers.actions)
        try:
            data = self._answer(actions, answers)
        except _UNPICKLED:
            actions = [each for each in actions if self._can_travel(*each)]
            data = self._answer(actions, answers)
        self._connection.send(data)

    def _answer(self, actions: Sequence[Named], answers: Answers) -> bytes:
        answer = StepAnswer(actions=actions, switched_off=answers.switched_off, figures=self._host.figures())
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)

    def _can_travel(self, name: str, action: Action) -> bool:
        """Whether an action can be pickled; one that cannot is dropped, and counted."""
        try:
            pickle.dumps(action, pickle.HIGHEST_PROTOCOL)
        except _UNPICKLED:
            self._log.error(f"controller {name}: an action is dropped: something in it cannot leave the process")
            self._host.drop(name)
            return False
        return True

    def _end(self, message: EndedRequest) -> None:
        self._tokens[message.req_id].extend(message.tokens)
        self._host.end(message.req_id)
        del self._tokens[message.req_id]


Named = tuple[str, Action]
"""An action with its controller's name."""


def gathered(actions: Iterable[Named]) -> list[Named]:
    """Return actions that do the same, in the same order, and are faster to apply.

    Actions `SetSteering` that are consecutive, and differ in request and scale alone, become a
    `SetSteeringEach`.
    """
    made: list[Named] = []
    run: dict[str, float] = {}
    of: tuple[str, str] | None = None
    for name, action in actions:
        one = _module_at(action)
        if of is not None and (one is None or of != (name, one.module) or one.request in run):
            made.append(_joined(*of, run))
            run, of = {}, None
        if one is None:
            made.append((name, action))
        else:
            of = name, one.module
            run[one.request] = one.scale
    return made if of is None else [*made, _joined(*of, run)]


def _joined(name: str, module: str, run: Mapping[str, float]) -> Named:
    if len(run) > 1:
        return name, SetSteeringEach(tuple(run), module, np.array([*run.values()]))
    ((request, scale),) = run.items()
    return name, SetSteering(request, module=module, scale=scale)


class _ModuleAt(NamedTuple):
    """An action that turns a module on for a request, beside what the request has."""

    request: str
    module: str
    scale: float


def _module_at(action: Action) -> _ModuleAt | None:
    if type(action) is not SetSteering or not action.compose or not isinstance(action.request, str):
        return None
    module, scale = action.module, action.scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        return None
    is_alone = isinstance(module, str) and len(action.given) == 1
    return _ModuleAt(action.request, module, float(scale)) if module is not None and is_alone else None
