"""The messages between an engine core and the process of its controllers, and the words that they share.

Messages are pickled: each side runs the other's code. Between a step that brings a message and the next such, all is
told by `Board`: the engine core counts steps there, and the process says which it has done with.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.steering.controllers.actions import Action
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.host import LoadedController, SwitchedOff
from headgate.steering.controllers.hosting.told_words import ToldPlace, ToldRowsOfStep
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a process, which it is told at its start.

    Attributes:
        specs: The controllers.
        path: The engine core's `sys.path`.
        log_level: Of headgate's log.
    """

    specs: tuple[ControllerSpec, ...]
    path: tuple[str, ...]
    log_level: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The first word of a process: its controllers, or why it has none."""

    controllers: Mapping[str, LoadedController] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attach:
    """Read scores in the memory of a worker from here on, if that can be done."""

    place: ToldPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """The answer to `Attach`.

    Attributes:
        error: Why not; None if it can.
    """

    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """See `headgate.steering.controllers.hosting.host.ControllerHost.start`."""

    scores: Mapping[str, Mapping[str, int]]


class NewRequest(NamedTuple):
    """A request that comes in a step for the first time."""

    req_id: str
    num_prompt: int
    acting: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step, with its scores.

    Attributes:
        number: Of the step.
        table: Its signals are the scores alone, float32 ``[rows, K]``.
        discarded: As of `StepReader.read`.
        told: The words that the forward wrote, if steps that are told there alone may follow; else None.
        begins: Requests that are new.
        tokens: Further tokens, by request.
        ahead: How many rows further on a decision behind the step acts, if it is told and they can hear it; else 0.
    """

    number: int
    table: StepTable
    discarded: frozenset[str]
    told: ToldRowsOfStep | None
    begins: Sequence[NewRequest]
    tokens: Mapping[str, Sequence[int]]
    ahead: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A request has ended.

    Attributes:
        behind: The number of the last step before that.
        req_id: The request.
        tokens: Its further tokens.
    """

    behind: int
    req_id: str
    tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFigures:
    """Answer with `Figures`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """See `headgate.steering.controllers.hosting.host.ControllerHost.figures`."""

    figures: Mapping[str, ControllerFigures]


class SameRequests(NamedTuple):
    """`SetSteeringEach`, for the requests of the last `Answer` that had some."""

    module: str
    scales: Any
    at: Any


class Repeated(NamedTuple):
    """How often the last `SameRequests` was said once more.

    Attributes:
        num_repeats: Repeats of all that there were, so far.
        scales: float64: of its requests, as they were said last; NaN for those that were not.
    """

    num_repeats: int
    scales: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Actions that came of a step.

    Attributes:
        requests: Of `SameRequests`, from here on; None if they stay.
        actions: Each with its controller's name.
        switched_off: See `headgate.steering.controllers.hosting.host.Answers`.
        before: The repeats of the last answer; None if there was none.
    """

    requests: tuple[str, ...] | None
    actions: Sequence[tuple[str, Action | SameRequests]]
    switched_off: Sequence[SwitchedOff]
    before: Repeated | None = None


MAX_REQUESTS = 4096
"""Requests of a step whose tokens a board has room for."""
TOKEN_STEPS = 4
"""Steps whose tokens, or scales, stand there at a time."""
_WORDS = 8
STEPS, SENT, DONE, ANSWERS, REPEATS = range(5)
"""Words of a `Board`: steps so far, and messages, of the engine core; and of the process, steps that it is done with,
messages and repeats. Each is written by one side, after what it counts."""
HAS_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether another processor sees what was written before a word once it sees that word. Elsewhere all is sent."""


class Board:
    """Words in anonymous memory that both processes map.

    Args:
        fd: Of memory that the other process has made; None to make it.

    Attributes:
        fd: Of the memory.
        words: int64, by `STEPS` and so on.
        tokens: int64 ``[TOKEN_STEPS, MAX_REQUESTS]``: the tokens of the rows of a step that is told by the forward, in
            the row of its number modulo `TOKEN_STEPS`.
        repeats: int64 ``[TOKEN_STEPS, 5]``: the last `SameRequests` once more, of the same controller and module, with
            other scales: how many there are, whether they are for some of the requests alone, the messages before it,
            the epoch of those who can hear them, 0 if nobody can, and the scales in all repeats so far. Likewise in the
            row of its number, as `scales` and `places`.
        scales: float64 ``[TOKEN_STEPS, MAX_REQUESTS]``.
        places: int64 ``[TOKEN_STEPS, MAX_REQUESTS]``.
        current: float64 ``[MAX_REQUESTS]``: the scales of its requests, as they were said last in this epoch; NaN for
            those that were not. Read it when the process is done with all steps.
    """

    def __init__(self, fd: int | None = None) -> None:
        num_words = _WORDS + MAX_REQUESTS + TOKEN_STEPS * (3 * MAX_REQUESTS + 5)
        if fd is None:
            fd = os.memfd_create("headgate-controllers")
            os.ftruncate(fd, 8 * num_words)
        self.fd = fd
        self._mapped = mmap.mmap(fd, 8 * num_words)
        # A view of plain integers: a word of an array would be made a numpy scalar each time.
        self.words = memoryview(self._mapped).cast("q")
        self.current: npt.NDArray[np.float64] = np.frombuffer(self._mapped, np.float64, MAX_REQUESTS, 8 * _WORDS)
        rows = np.frombuffer(self._mapped, np.int64, offset=8 * (_WORDS + MAX_REQUESTS)).reshape(TOKEN_STEPS, -1)
        parts = np.split(rows, [MAX_REQUESTS, 2 * MAX_REQUESTS, 3 * MAX_REQUESTS], axis=1)
        self.tokens: Int64Array
        self.places: Int64Array
        self.repeats: Int64Array
        self.tokens, self.places, scales, self.repeats = parts
        self.scales: npt.NDArray[np.float64] = scales.view(np.float64)
