"""Where controllers live: what an engine core knows of it, and controllers in the engine core's process.

Calls a controller on a thread of its own, so that one that hangs, raises or floods costs the engine next to nothing.

The engine hands a step's readings over and waits for the actions, for a budget of time at most. What comes later is
taken at a later step; readings that come while the controller is busy are skipped, and counted. One that says that it
never waits is called at once, without a thread, until a step of it is over its budget. Standard library only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol
from weakref import finalize, ref

import numpy as np

from headgate.capture.probe import Probe
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.steering.controllers.actions import Action, SetGlobal, SetScale, SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.controller import Controller, RequestView, StepReadings
from headgate.steering.controllers.loading import ControllerSpec, load_controller, read_probes
from headgate.steering.gates.step_table import StepTable
from headgate.steering.vectors.dtypes import Float32Rows

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
        number: The number of the last step that it got, whose actions `take` returns.
    """

    def __init__(self, name: str, controller: Controller, budget_s: float) -> None:
        self.figures = ControllerFigures()
        self.controller = controller
        self._name = name
        self._budget_s = budget_s
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._done = Event()
        self.number = 0
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

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread do `call`, after the calls before; does not wait."""
        if self.is_on and self._is_called_at_once:
            _guarded(call, self)
        elif self.is_on:
            self._inbox.put(call)

    def step(self, readings: StepReadings, number: int = 0) -> None:
        """Hand the readings of a step over, which has a number."""
        if not self.is_on or self._began < math.inf:
            self.figures.skipped += 1
            return
        self.figures.steps += 1
        self.number = number
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


class LoadedController(NamedTuple):
    """A controller that was made.

    Attributes:
        probes: To read, by its own names.
        modules: Names of modules that it will turn on.
        needs_prompts: As in `headgate.steering.controllers.controller.Controller`.
        needs_tokens: Likewise.
    """

    probes: Mapping[str, Probe]
    modules: tuple[str, ...]
    needs_prompts: bool
    needs_tokens: bool


class SwitchedOff(NamedTuple):
    """A controller that was switched off.

    Attributes:
        controller: Its name.
        error: Why.
    """

    controller: str
    error: str


class DecidedAction(NamedTuple):
    """An action that a controller decided.

    Attributes:
        controller: Its name.
        action: What is to be done.
        step: The number of the step whose rows it was decided by; the answer may come several steps later.
    """

    controller: str
    action: Action
    step: int


@dataclass(slots=True)
class Answers:
    """Actions that came of steps.

    Attributes:
        actions: In their order.
        switched_off: Controllers that were switched off since the last answers.
    """

    actions: list[DecidedAction] = field(default_factory=list)
    switched_off: list[SwitchedOff] = field(default_factory=list)


class ControllerHost(Protocol):
    """Controllers, and the process in which they run. Engine thread only, but for `end`.

    Attributes:
        loaded: The controllers by their names, in the order of the configuration.
    """

    @property
    def loaded(self) -> Mapping[str, LoadedController]: ...

    def start(self, scores: Mapping[str, Mapping[str, int]]) -> None:
        """Take requests and steps from here on.

        Args:
            scores: The number of each score, by controller and its name of a probe.
        """
        ...

    def add(self, req_id: str, num_prompt: int, acting: Sequence[str]) -> None:
        """Add a request on which controllers act, by their names. Input thread."""
        ...

    def end(self, req_id: str) -> None:
        """Report the end of a request, if it was added. Any thread."""
        ...

    def read(self, step: StepTable, discarded: Collection[str], number: int) -> None:
        """Hand over a step, which has a number; `take` returns what comes of it. See `StepReader.read`."""
        ...

    def take(self) -> Answers:
        """Return what came of the steps so far, waiting for the budgets of the controllers at most."""
        ...

    def figures(self) -> Mapping[str, ControllerFigures]:
        """Return the figures of each controller."""
        ...


TokensOf = Callable[[str], Sequence[int] | None]
"""Returns the tokens of a request, the prompt's first, which grow with it; None if it has ended."""


class ReadStep(NamedTuple):
    """The new rows of one step, one request after the other.

    Attributes:
        requests: Id of the request of each row, ``[n]``; the same tuple object as in the step before if equal.
        positions: int64 ``[n]``.
        is_prompt: bool ``[n]``.
        tokens: Tokens of the request of each row, ``[n]``.
        signals: float32 ``[n, columns]``.
    """

    requests: tuple[str, ...]
    positions: Int64Array
    is_prompt: BoolArray
    tokens: Sequence[Sequence[int]]
    signals: Float32Rows

    def of(self, scores: Mapping[str, int]) -> StepReadings:
        """Return the rows for a controller, whose scores are in columns by their names."""
        return StepReadings(
            requests=self.requests,
            positions=self.positions,
            is_prompt=self.is_prompt,
            scores={name: self.signals[:, column].copy() for name, column in scores.items()},
            tokens=self.tokens,
        )

    def part(self, at: Sequence[int], requests: tuple[str, ...]) -> ReadStep:
        """Return some of the rows, by their indices, whose requests are given."""
        index = np.array(at, np.int64)
        tokens = [self.tokens[each] for each in at]
        return ReadStep(requests, self.positions[index], self.is_prompt[index], tokens, self.signals[index])


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """A request on which controllers act, and how far they have its rows: one that is computed again comes once.

    Attributes:
        num_prompt: Tokens of its prompt.
        acting: Names of the controllers.
        begun: Names of the controllers that know that it began.
        end: The position after the last row that they got.
        tokens: All of its tokens, which grow with it.
    """

    num_prompt: int
    acting: Collection[str]
    begun: set[str] = field(default_factory=set)
    end: int = 0
    tokens: Sequence[int] = ()


@dataclass(slots=True)
class _Decoding:
    """A step of one generated row of each of some requests; steps of the same ones are likely to follow.

    Attributes:
        step: As controllers got it.
        requests: The requests of its rows.
        has_ended: Whether one of them has ended since.
    """

    step: ReadStep
    requests: list[FollowedRequest]
    has_ended: bool = False


class StepReader:
    """Finds the rows of steps that are new. One thread only, but for `forget`.

    Args:
        tokens_of: Gives the tokens of requests.
    """

    def __init__(self, tokens_of: TokensOf) -> None:
        self._tokens_of = tokens_of
        self._decoding: _Decoding | None = None

    def forget(self) -> None:
        """Follow the end of a request. Any thread."""
        if (known := self._decoding) is not None:
            known.has_ended = True

    def read(
        self, step: StepTable, discarded: Collection[str], requests: Mapping[str, FollowedRequest]
    ) -> ReadStep | None:
        """Return the rows of a step that are new; None if there are none.

        Args:
            step: As workers read it.
            discarded: Requests of the step for which it does not count.
            requests: The requests that are followed.
        """
        known = self._decoding
        if known is not None:
            requests_before, last, is_prompt, tokens, _ = known.step
            is_next = not (discarded or known.has_ended) and step.has_one_row_each and step.ids == requests_before
            if is_next and not np.count_nonzero(step.firsts <= last):
                known.step = ReadStep(requests_before, step.firsts, is_prompt, tokens, step.signals)
                return known.step
            for request, position in zip(known.requests, last.tolist(), strict=True):
                request.end = position + 1
        self._decoding = None
        return self._read_rows(step, discarded, requests)

    def _read_rows(
        self, step: StepTable, discarded: Collection[str], requests: Mapping[str, FollowedRequest]
    ) -> ReadStep | None:
        found: list[tuple[str, FollowedRequest, range]] = []
        is_new = np.zeros(len(step.signals), np.bool_)
        start = 0
        for req_id, first, count in zip(step.ids, step.firsts.tolist(), step.counts.tolist(), strict=True):
            begin, start = start, start + count
            request = requests.get(req_id)
            if request is None or req_id in discarded:
                continue
            if not request.tokens:
                request.tokens = self._tokens_of(req_id) or ()
            new = max(first, request.end)
            request.end = max(request.end, first + count)
            if new < first + count:
                found.append((req_id, request, range(new, first + count)))
                is_new[begin + new - first : start] = True
        if not found:
            return None
        positions = np.fromiter(chain.from_iterable(rows for *_, rows in found), np.int64)
        lengths = np.repeat([request.num_prompt for _, request, _ in found], [len(rows) for *_, rows in found])
        names = tuple(chain.from_iterable(repeat(req_id, len(rows)) for req_id, _, rows in found))
        tokens = list(chain.from_iterable(repeat(request.tokens, len(rows)) for _, request, rows in found))
        is_prompt = positions < lengths
        read = ReadStep(names, positions, is_prompt, tokens, step.signals[is_new])
        if len(found) == len(step.ids) and step.has_one_row_each and not is_prompt.any():
            self._decoding = _Decoding(read, [request for _, request, _ in found])
        return read


_Part = tuple[list[int], tuple[str, ...]] | None
"""Indices of a controller's rows in a step, and the request of each; None for all."""


class LocalHost:
    """Implements `ControllerHost`: controllers in this process, each on a thread of its own if it may wait.

    Args:
        specs: The controllers.
        tokens_of: Gives the tokens of requests.
        first_column: Of the signals of steps: that of the score that `start` calls 0.

    Raises:
        ConfigError: If one cannot be made, or has no probes that can be read.
    """

    def __init__(self, specs: Sequence[ControllerSpec], tokens_of: TokensOf, first_column: int = 0) -> None:
        loaded: dict[str, LoadedController] = {}
        self._threads: dict[str, ControllerThread] = {}
        for spec in specs:
            made = load_controller(spec)
            probes = read_probes(spec.instance, made)
            loaded[spec.instance] = LoadedController(
                probes=probes,
                modules=tuple(made.modules()),
                needs_prompts=bool(made.needs_prompts),
                needs_tokens=bool(made.needs_tokens),
            )
            self._threads[spec.instance] = ControllerThread(spec.instance, made, spec.budget_ms / 1000)
        self.loaded: Mapping[str, LoadedController] = loaded
        self._first_column = first_column
        self._columns: dict[str, dict[str, int]] = {}
        self._requests: dict[str, FollowedRequest] = {}
        self._reader = StepReader(tokens_of)
        self._parts: tuple[tuple[str, ...], list[_Part]] = ((), [])
        """The requests of the rows of the last step, and each controller's part of them."""
        self._off: set[str] = set()
        """Controllers that were found switched off."""

    def start(self, scores: Mapping[str, Mapping[str, int]]) -> None:
        """See `ControllerHost.start`."""
        first = self._first_column
        self._columns = {
            controller: {name: first + number for name, number in of_it.items()} for controller, of_it in scores.items()
        }

    def add(self, req_id: str, num_prompt: int, acting: Sequence[str]) -> None:
        """See `ControllerHost.add`."""
        self._requests[req_id] = FollowedRequest(num_prompt, acting)

    def end(self, req_id: str) -> None:
        """See `ControllerHost.end`."""
        found = self._requests.pop(req_id, None)
        if found is None:
            return
        self._reader.forget()
        if found.begun:
            view = _view(req_id, found)
            for name in self._threads:
                if name in found.begun:
                    thread = self._threads[name]
                    thread.post(partial(thread.controller.request_ends, view))

    def read(self, step: StepTable, discarded: Collection[str], number: int) -> None:
        """See `ControllerHost.read`."""
        read = self._reader.read(step, discarded, self._requests)
        if read is None:
            return
        if read.requests is not self._parts[0]:
            self._parts = read.requests, [self._begin_step(name, read) for name in self._threads]
        for (name, thread), part in zip(self._threads.items(), self._parts[1], strict=True):
            if part is None:
                thread.step(read.of(self._columns[name]), number)
            elif part[0]:
                thread.step(read.part(*part).of(self._columns[name]), number)

    def drop(self, name: str) -> None:
        """Count an action of a controller that was dropped."""
        self._threads[name].figures.dropped += 1

    def take(self) -> Answers:
        """See `ControllerHost.take`."""
        found = Answers()
        for name, thread in self._threads.items():
            found.actions += [DecidedAction(name, action, thread.number) for action in thread.take()]
            if not thread.is_on and name not in self._off:
                self._off.add(name)
                found.switched_off.append(SwitchedOff(name, thread.figures.error or ""))
        return found

    def figures(self) -> dict[str, ControllerFigures]:
        """See `ControllerHost.figures`."""
        return {name: replace(thread.figures) for name, thread in self._threads.items()}

    def _begin_step(self, name: str, step: ReadStep) -> _Part:
        """Begin requests that are new to a controller; returns its part of a step of such requests."""
        members = set()
        for req_id in dict.fromkeys(step.requests):
            followed = self._requests[req_id]
            if name not in followed.acting:
                continue
            members.add(req_id)
            if name not in followed.begun:
                followed.begun.add(name)
                thread, view = self._threads[name], _view(req_id, followed)
                thread.post(partial(thread.controller.request_begins, view))
        if all(req_id in members for req_id in step.requests):
            return None
        at = [index for index, req_id in enumerate(step.requests) if req_id in members]
        return at, tuple(step.requests[index] for index in at)


def _view(req_id: str, followed: FollowedRequest) -> RequestView:
    return RequestView(request=req_id, num_prompt_tokens=followed.num_prompt, token_ids=tuple(followed.tokens))
