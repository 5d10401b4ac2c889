"""Where controllers live: what an engine core knows of it, and controllers in the very process of the engine core."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headgate.capture.probes.probe import Probe
from headgate.steering.controllers.actions import Action
from headgate.steering.controllers.controller import RequestView
from headgate.steering.controllers.controller_thread import ControllerFigures, ControllerThread
from headgate.steering.controllers.hosting.step_reader import ReadStep, StepReader, TokensOf, ToldRows
from headgate.steering.controllers.loading import ControllerSpec, load_controller, read_probes
from headgate.steering.gates.step_table import StepTable


class LoadedController(NamedTuple):
    """A controller that was made.

    Attributes:
        probes: To read, by its own names.
        modules: Names of modules that it will turn on.
        needs_prompts: As of `headgate.steering.controllers.controller.Controller`.
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
        requests: Those that it had been told of, and that have not ended.
    """

    controller: str
    error: str
    requests: tuple[str, ...]


class Repeat(NamedTuple):
    """An action that forwards could have heard by themselves; the next ones are likely to be the same, but for scales.

    Attributes:
        controller: Its name.
        requests: Of all of them; the very tuple of the last one.
        module: Likewise.
        epoch: Of the words to listen to.
    """

    controller: str
    requests: tuple[str, ...]
    module: str
    epoch: int


@dataclass(slots=True)
class Answers:
    """Actions that came of steps.

    Attributes:
        settled: Of all that were heard, the last ones, float64 ``[n]`` for the requests of the `Repeat`, NaN for those
            that were not set. It comes before the actions; the forward must hear none after them. None if that goes on.
        actions: Each with its controller's name, in their order.
        switched_off: Controllers that were switched off since the last answers.
        repeat: What the last action is, if it is alone; None if it is nothing of that kind.
    """

    settled: npt.NDArray[np.float64] | None = None
    actions: list[tuple[str, Action]] = field(default_factory=list)
    switched_off: list[SwitchedOff] = field(default_factory=list)
    repeat: Repeat | None = None


NO_ANSWERS = Answers()
"""Nobody adds to them."""


class HeardAnswers(Protocol):
    """Answers that forwards can hear by themselves, where that is possible. Engine thread only."""

    @property
    def acts_from(self) -> Callable[[str], int | None]:
        """Returns the position of the row of a request on which what is decided behind the last step can be heard."""
        ...

    def begin(self) -> None:
        """Leave the repeats of the last action to the forward from here on: `take` does not return them."""
        ...

    def cancel(self) -> bool:
        """Undo `begin`; returns whether `take` has left nothing to the forward since."""
        ...

    def take_count(self) -> int:
        """Return how many scales were left to the forward since this was asked last."""
        ...

    def settle(self) -> None:
        """Have `take` return `Answers.settled`, as soon as it waits for nothing."""
        ...


class ControllerHost(Protocol):
    """Controllers, and the process in which they run. Engine thread only, but for `end`.

    Attributes:
        loaded: The controllers by their names, in the order of the configuration.
        heard: Lets forwards hear answers; None if they cannot.
    """

    @property
    def loaded(self) -> Mapping[str, LoadedController]: ...

    @property
    def heard(self) -> HeardAnswers | None: ...

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
        """Tell of the end of a request, if it was added. Any thread."""
        ...

    def read(self, step: StepTable, discarded: Collection[str]) -> None:
        """Hand over a step; `take` returns what comes of it. See `StepReader.read`."""
        ...

    def read_quiet(self) -> None:
        """Hand over a step whose scores are in the memory that kernels write (`ToldWords`)."""
        ...

    def take(self) -> Answers:
        """Return what came of the steps so far, waiting for the budgets of the controllers at most."""
        ...

    def figures(self) -> Mapping[str, ControllerFigures]:
        """Return the figures of each controller."""
        ...


class _Followed(ToldRows):
    """A request, as controllers are told of it."""

    __slots__ = ("acting", "begun")

    def __init__(self, num_prompt: int, acting: Collection[str]) -> None:
        super().__init__(num_prompt)
        self.acting = acting
        self.begun: set[str] = set()
        """Controllers that were told that it began."""


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
            needs = bool(made.needs_prompts), bool(made.needs_tokens)
            loaded[spec.instance] = LoadedController(probes, tuple(made.modules()), *needs)
            self._threads[spec.instance] = ControllerThread(spec.instance, made, spec.budget_ms / 1000)
        self.loaded: Mapping[str, LoadedController] = loaded
        self.heard: HeardAnswers | None = None
        self._first_column = first_column
        self._columns: dict[str, dict[str, int]] = {}
        self._requests: dict[str, _Followed] = {}
        self._reader = StepReader(tokens_of)
        self._told_to: tuple[tuple[str, ...], list[_Part]] = ((), [])
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
        self._requests[req_id] = _Followed(num_prompt, acting)

    def acting(self, req_id: str) -> Collection[str]:
        """Return the names of the controllers that act on a request."""
        found = self._requests.get(req_id)
        return () if found is None else found.acting

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
                    thread.tell(partial(thread.controller.request_ends, view))

    def read(self, step: StepTable, discarded: Collection[str]) -> None:
        """See `ControllerHost.read`."""
        read = self._reader.read(step, discarded, self._requests)
        if read is None:
            return
        if read.requests is not self._told_to[0]:
            self._told_to = read.requests, [self._begin_step(name, read) for name in self._threads]
        for (name, thread), part in zip(self._threads.items(), self._told_to[1], strict=True):
            if part is None:
                thread.step(read.of(self._columns[name]))
            elif part[0]:
                thread.step(read.part(*part).of(self._columns[name]))

    def read_quiet(self) -> None:
        """See `ControllerHost.read_quiet`: nobody tells quietly here.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("a worker told quietly, and nobody reads there")

    def skip(self) -> None:
        """Count a step that is lost for all controllers."""
        for thread in self._threads.values():
            thread.figures.skipped += 1

    def drop(self, name: str) -> None:
        """Count an action of a controller that was dropped."""
        self._threads[name].figures.dropped += 1

    def take(self) -> Answers:
        """See `ControllerHost.take`."""
        found = Answers()
        for name, thread in self._threads.items():
            found.actions += [(name, action) for action in thread.take()]
            if not thread.is_on and name not in self._off:
                self._off.add(name)
                known = list(self._requests.items())  # to which another thread adds
                begun = tuple(req_id for req_id, one in known if name in one.begun)
                found.switched_off.append(SwitchedOff(name, thread.figures.error or "", begun))
        return found

    def figures(self) -> dict[str, ControllerFigures]:
        """See `ControllerHost.figures`."""
        return {name: replace(thread.figures) for name, thread in self._threads.items()}

    def _begin_step(self, name: str, step: ReadStep) -> _Part:
        """Tell a controller of requests that are new to it; returns its part of a step of such requests."""
        members = set()
        for req_id in dict.fromkeys(step.requests):
            followed = self._requests[req_id]
            if name not in followed.acting:
                continue
            members.add(req_id)
            if name not in followed.begun:
                followed.begun.add(name)
                thread, view = self._threads[name], _view(req_id, followed)
                thread.tell(partial(thread.controller.request_begins, view))
        if all(req_id in members for req_id in step.requests):
            return None
        at = [index for index, req_id in enumerate(step.requests) if req_id in members]
        return at, tuple(step.requests[index] for index in at)


def _view(req_id: str, followed: _Followed) -> RequestView:
    return RequestView(request=req_id, num_prompt_tokens=followed.num_prompt, token_ids=tuple(followed.tokens))
