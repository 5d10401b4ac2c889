"""Forwards that hear the coefficients of a controller by themselves, past the engine core. Engine thread only.

A controller that sets a scale of each request behind each row says the same again and again, but for the scales. Where
its process can write these to where forwards look (`Code.HEAR`), nothing of it has to be decided here, told to workers
or copied by them, as long as nothing else happens: the same requests go on, and nobody else acts on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError
from headgate.steering.controllers.hosting.host import Answers, HeardAnswers, Repeat
from headgate.steering.core.controllers.contents import Contents
from headgate.steering.core.controllers.driving.coefficients import Coefficients
from headgate.steering.core.controllers.driving.drives import Drive
from headgate.steering.core.controllers.outcomes import Outcomes
from headgate.steering.gates.coefficient_changes import NOBODY_HEARS, Hears
from headgate.steering.programs.gate_codes import HEARD_ROWS

FEW_REPEATS = 4
"""So many repeats, one behind the other, make it likely that more follow."""
MAX_STEPS = HEARD_ROWS // 2
"""Steps after which what was heard is settled: forwards keep what acted on so many rows, and some more."""


class _Run(NamedTuple):
    """Actions that are heard.

    Attributes:
        repeat: Whose they are.
        drive: Of their content.
        version: Of all names when it began.
    """

    repeat: Repeat
    drive: Drive
    version: int


class Hearing:
    """Says when workers hear, and what is to hold when they stop.

    Args:
        heard: Of the controllers' host; None if nothing can be heard.
        contents: Finds modules.
        coefficients: Of the requests.
        outcomes: Told what was heard.
    """

    def __init__(
        self, heard: HeardAnswers | None, contents: Contents, coefficients: Coefficients, outcomes: Outcomes
    ) -> None:
        self._outcomes = outcomes
        self._heard = heard
        self._contents = contents
        self._coefficients = coefficients
        self._run: _Run | None = None
        self._num_steps = 0
        self._is_broken = False
        self._order: Hears | None = None
        self._last: Repeat | None = None
        self._num_repeats = 0

    @property
    def controller(self) -> str | None:
        """Whose actions are heard; None if nobody's are."""
        return None if self._run is None else self._run.repeat.controller

    def count(self) -> None:
        """Count what was heard since this was called last."""
        if self._run is not None and self._heard is not None:
            self._outcomes.count_heard(self._run.repeat.controller, self._heard.take_count())

    def break_off(self) -> None:
        """Have it settled with the next answers: other requests run, or something else is to happen. Any thread."""
        self._is_broken = True

    def prepare(self) -> None:
        """Follow a step, before its answers are taken."""
        run = self._run
        if run is None or self._heard is None:
            return
        self._num_steps += 1
        if self._is_broken or self._num_steps >= MAX_STEPS or run.version != self._contents.version:
            self._heard.settle()

    def settle(self, scales: npt.NDArray[np.float64]) -> None:
        """Take over what was heard last, before anything else happens: `Answers.settled`."""
        if self._run is None:
            raise AssertionError("steering: controllers were heard, and nobody was to hear")
        self.count()
        repeat, drive, _ = self._run
        self._coefficients.settle_each(repeat.requests, (repeat.controller,), drive, scales)
        self._run, self._last, self._num_repeats = None, None, 0
        self._order = NOBODY_HEARS

    def follow(self, answers: Answers, *, is_applied: bool) -> None:
        """Follow the answers of a step, and let workers hear further ones if that is worth while.

        Args:
            answers: That were applied.
            is_applied: Whether the last action was, to all of its requests.
        """
        repeat = answers.repeat
        if self._run is not None or self._heard is None:
            return
        if repeat is None or not is_applied:
            self._last, self._num_repeats = None, 0
            return
        last, self._last = self._last, repeat
        is_same = last is not None and last.requests is repeat.requests and last[::2] == repeat[::2]
        self._num_repeats = self._num_repeats + 1 if is_same else 0
        if self._num_repeats >= FEW_REPEATS:
            self._begin(repeat, self._heard)

    def take_order(self, scheduled: Mapping[str, int]) -> Hears | None:
        """Return who is to hear from a step on that was just scheduled; None if that stays."""
        order = self._order
        if order is None or self._heard is None or (not order.epoch and not scheduled):
            return None  # nobody would follow it
        self._order = None
        if not order.epoch or all(scheduled.get(req_id) == 1 for req_id in order.req_ids):
            return order
        if self._heard.cancel():
            self._run = None
        else:
            self._is_broken = True
        return None

    def _begin(self, repeat: Repeat, heard: HeardAnswers) -> None:
        self._num_steps, self._is_broken = 0, False
        try:
            content = self._contents.of_module(repeat.module)
        except RequestError:
            return
        found = self._coefficients.hearers(repeat.requests, (repeat.controller,), content)
        if found is None or heard.acts_from(repeat.requests[0]) != int(found[1][0]):
            return
        drive, firsts = found
        self._run = _Run(repeat, drive, self._contents.version)
        self._order = Hears(drive.column, drive.listener, repeat.epoch, repeat.requests, firsts)
        heard.begin()
