"""The messages between an engine core and the process of its controllers.

They are pickled: each side runs the other's code. The process does what they say in their order, and answers each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headgate.steering.controllers.actions import Action
from headgate.steering.controllers.controller_thread import ControllerFigures
from headgate.steering.controllers.hosting.host import LoadedController, SwitchedOff
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.gates.step_table import StepTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSettings:
    """Settings of a process, which it gets at its start.

    Attributes:
        specs: The controllers.
        path: The engine core's `sys.path`.
        log_level: Level of headgate's log.
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
class Start:
    """See `headgate.steering.controllers.hosting.host.ControllerHost.start`."""

    scores: Mapping[str, Mapping[str, int]]


class BegunRequest(NamedTuple):
    """A request that comes in a step for the first time."""

    req_id: str
    num_prompt: int
    acting: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step, with its scores.

    Attributes:
        table: Its signals are the scores alone, float32 ``[rows, K]``.
        discarded: Requests of the step for which it does not count.
        begins: Requests that are new.
        tokens: Further tokens, by request.
    """

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
        actions: Each with its controller's name.
        switched_off: See `headgate.steering.controllers.hosting.host.Answers`.
        figures: Figures of each controller, by its name.
    """

    actions: Sequence[tuple[str, Action]]
    switched_off: Sequence[SwitchedOff]
    figures: Mapping[str, ControllerFigures]
