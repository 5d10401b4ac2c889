"""Calls a controller on a thread of its own, so that one that hangs, raises or floods costs the engine next to nothing.

The engine hands a step's readings over and waits for the actions, for a budget of time at most. What comes later is
taken at a later step; readings that come while the controller is busy are skipped, and counted. One that says that it
never waits is called at once, without a thread, until a step of it is over its budget. Standard library only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from threading import Event, Thread
from weakref import finalize, ref

from headgate.steering.controllers.actions import Action, SetGlobal, SetScale, SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.controller import Controller, StepReadings

logger = logging.getLogger("headgate")

MAX_ACTIONS, MAX_ACTIONS_EACH = 64, 4
"""Actions that one step may return, in all and for each of its rows beside; those beyond are dropped, and counted."""
MAX_OVER_BUDGET = 10
"""So many steps one after the other over its budget, or with too many actions, switch a controller off."""
HANGS_S = 10.0
"""A step that takes so long switches it off, too."""
_LOOK_S = 1.0
"""Seconds that the time between two looks counts at most, see `Standstill`."""


@dataclass(slots=True)
class ControllerFigures:
    """Figures of a controller.

    Attributes:
        steps: Steps that were sent to it.
        skipped: Steps that came while it was busy, or after it was switched off.
        over_budget: Steps that took longer than its budget.
        seconds: Seconds that it took in total.
        dropped: Steps that returned too many actions; the rest, which may have no end, is not counted.
        error: Why it was switched off; None while it is on.
    """

    steps: int = 0
    skipped: int = 0
    over_budget: int = 0
    seconds: float = 0.0
    dropped: int = 0
    error: str | None = None


class Standstill:
    """How long a thread or process has made no progress, by looks at a number that changes with its progress.

    Between two looks at most one second counts: in a longer time the observer itself may have stood still, stopped or
    on a machine that was suspended, and what it watches as well.
    """

    def __init__(self) -> None:
        self._progress = -1
        self._seconds = self._looked = 0.0

    def look(self, progress: int) -> float:
        """Return the seconds since `progress` changed, which are 0 at the first look."""
        now = time.perf_counter()
        is_further = progress != self._progress
        self._seconds = 0.0 if is_further else self._seconds + min(now - self._looked, _LOOK_S)
        self._progress, self._looked = progress, now
        return self._seconds


class ControllerThread:
    """Runs one controller. Engine thread only, but for what the controller's own thread does.

    Args:
        name: The controller's.
        controller: Called on the thread alone; or on the engine's, if it never waits.
        budget_s: Seconds that the engine waits for the actions of a step.

    Attributes:
        figures: Read them at any time.
        controller: As given.
    """

    def __init__(self, name: str, controller: Controller, budget_s: float) -> None:
        self.figures = ControllerFigures()
        self.controller = controller
        self._name = name
        self._budget_s = budget_s
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done = Event()
        self._actions: list[Action] = []
        """Actions of the last step, when it is done."""
        self._began = math.inf
        """When the step that the controller is busy with was handed over; infinite if it is not busy."""
        self._standstill = Standstill()
        self._is_late = False
        """Whether that step has been counted as over budget."""
        self._num_over = 0
        self._num_flooded = 0
        self._is_called_at_once = bool(controller.never_waits)
        if self._is_called_at_once:
            self._done.set()
        else:
            self._start_thread()

    @property
    def is_on(self) -> bool:
        """Whether it was not switched off."""
        return self.figures.error is None

    def tell(self, call: Callable[[], object]) -> None:
        """Have the thread do `call`, after the calls before; does not wait."""
        if self.is_on and self._is_called_at_once:
            _guarded(call, self)
        elif self.is_on:
            self._inbox.put(call)

    def step(self, readings: StepReadings) -> None:
        """Hand the readings of a step over."""
        if not self.is_on or self._began < math.inf:
            self.figures.skipped += 1
            return
        self.figures.steps += 1
        self._began, self._is_late, self._actions = time.perf_counter(), False, []
        self._standstill.look(self.figures.steps)
        if not self._is_called_at_once:
            self._done.clear()
            self._inbox.put(lambda: self._step(readings))
            return
        _guarded(lambda: self._step(readings), self)
        if time.perf_counter() - self._began > self._budget_s:
            self.figures.over_budget += 1
            self._is_called_at_once = False
            self._start_thread()

    def take(self) -> list[Action]:
        """Return the actions of the last step, waiting for the budget at most; of a late step, once it is done."""
        if self._began == math.inf:
            return []
        if not self._done.is_set() and not self._done.wait(0.0 if self._is_late else self._budget_s):
            self._wait_on()
            return []
        if not self._is_late:
            self._num_over = 0
        self._began = math.inf
        return self._actions if self.is_on else []

    def switch_off(self, error: str) -> None:
        """Give the controller nothing more, for a reason that the status shows."""
        if self.is_on:
            self.figures.error = error
            logger.error("headgate: controller %s is switched off: %s", self._name, error)

    def _start_thread(self) -> None:
        Thread(
            target=_work, args=(self._inbox, ref(self)), name=f"headgate-controller-{self._name}", daemon=True
        ).start()
        finalize(self, self._inbox.put, None)

    def _wait_on(self) -> None:
        """Note that the step is late; switch the controller off if that was so too often, or if it hangs."""
        if not self._is_late:
            self._is_late = True
            self.figures.over_budget += 1
            self._num_over += 1
        if self._num_over >= MAX_OVER_BUDGET:
            self.switch_off(
                f"it took longer than budget_ms={1000 * self._budget_s:g} in {self._num_over} steps one after the other"
            )
        elif (busy_s := self._standstill.look(self.figures.steps)) > HANGS_S:
            self.switch_off(f"it has not returned from a step for {busy_s:.0f} s")

    def _step(self, readings: StepReadings) -> None:
        start = time.perf_counter()
        try:
            limit = MAX_ACTIONS + MAX_ACTIONS_EACH * len(readings)
            actions, count = [], 0
            for action in islice(self.controller.step(readings), limit + 1):
                if not isinstance(action, _ACTIONS):
                    raise TypeError(f"step returned {action!r}, which is no action of headgate.steering.controllers")
                count += len(action) if isinstance(action, SetSteeringEach) else 1
                if count > limit:
                    break
                actions.append(action)
            self._num_flooded = self._num_flooded + 1 if count > limit else 0
            self.figures.dropped += count > limit
            self._actions = actions
            if self._num_flooded >= MAX_OVER_BUDGET:
                self.switch_off(
                    f"it returned more than {limit} actions in {self._num_flooded} steps one after the other"
                )
        finally:
            self.figures.seconds += time.perf_counter() - start
        if not self._is_called_at_once:
            self._done.set()

    def failed(self, error: BaseException) -> None:
        """Take note of an error of the controller, whose thread ends with it."""
        self.switch_off(f"it raised {type(error).__name__}: {error}")
        self._done.set()


_ACTIONS = (SetSteering, SetSteeringEach, SetGlobal, SetScale, Stop)


def _guarded(call: Callable[[], object], owner: ControllerThread) -> None:
    try:
        call()
    except (Exception, SystemExit) as error:
        logger.exception("headgate: a controller raised")
        owner.failed(error)


def _work(inbox: SimpleQueue[Callable[[], object] | None], owner: ref[ControllerThread]) -> None:
    """Do what comes, until None or something raises; `owner` is kept by what comes alone."""
    while (call := inbox.get()) is not None:
        try:
            call()
        except (Exception, SystemExit) as error:
            logger.exception("headgate: a controller raised")
            if (found := owner()) is not None:
                found.failed(error)
            return
        del call
