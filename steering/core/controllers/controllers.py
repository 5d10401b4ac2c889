"""The controllers of one engine core: how they are told of requests and steps, and how their actions are applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from headgate.capture.engine.contracts.core_part import Actions, CoreServices, Decided
from headgate.steering.controllers.controller import RequestView
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.contents import Static
from headgate.steering.core.controllers.decisions import Decisions
from headgate.steering.core.controllers.outcomes import APPLIED, DROPPED, SWITCHED_OFF, Outcomes
from headgate.steering.core.controllers.readers import ReadStep, StepReader, ToldRows
from headgate.steering.core.controllers.running import RunningController
from headgate.steering.gates.rule import Selection
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import GateSource


class _Followed(ToldRows):
    """A request, as controllers are told of it."""

    __slots__ = ("acting", "begun", "static")

    def __init__(self, num_prompt: int, acting: list[RunningController], static: Static) -> None:
        super().__init__(num_prompt)
        self.acting = acting
        """Controllers that read its rows."""
        self.static = static
        self.begun: dict[str, RunningController] = {}
        """Controllers that were told that it began, by name."""


_Part = tuple[list[int], tuple[str, ...]] | None
"""Indices of a controller's rows in a step, and the request of each; None for all."""


class Controllers:
    """Hands controllers the steps, and applies their actions. Engine thread, unless said otherwise.

    Args:
        running: The controllers.
        actuation: Applies actions to requests.
        services: Gives the tokens of requests.
        submitted: Actions of capture consumers; None if they are not taken.

    Attributes:
        traced: Requests whose traces are wanted, or described: the actions on them are noted. Any thread.
    """

    def __init__(
        self,
        running: Sequence[RunningController],
        actuation: Actuation,
        services: CoreServices,
        submitted: Actions | None = None,
    ) -> None:
        self._submitted = submitted
        self._running = tuple(running)
        self._actuation = actuation
        self._outcomes = Outcomes()
        self.traced = self._outcomes.traced
        self._decisions = Decisions(actuation, self._outcomes, services)
        self._requests: dict[str, _Followed] = {}
        self._read: dict[str, _Followed] = {}
        """Those among them whose rows a controller reads."""
        self._reader = StepReader(services)
        self._told_to: tuple[tuple[str, ...], list[_Part]] = ((), [])
        """The requests of the rows of the last step, and each controller's part of them."""
        self._present: Collection[str] = ()
        """Requests of the last step that was read."""
        self._off: set[str] = set()
        """Controllers that were found switched off."""

    def acting(self, req_id: str) -> list[RunningController]:
        """Return the controllers that act on a request that was added. Any thread."""
        found = self._requests.get(req_id)
        return [] if found is None else found.acting

    def sources(self, req_id: str) -> list[GateSource]:
        """Return the scores that are read of a request's rows, for its trace."""
        return [each.reader.source for each in self.acting(req_id)]

    def key(self, req_id: str) -> bytes | None:
        """Return the content key of all that controllers set on a request. Any thread."""
        return self._actuation.coefficients.key(req_id)

    def add(
        self, req_id: str, num_prompt: int, selection: Selection, static: Static, *, is_traced: bool = False
    ) -> None:
        """Add a request that was accepted. Input thread."""
        acting = [each for each in self._running if each.reader.acts(selection)]
        followed = self._requests[req_id] = _Followed(num_prompt, acting, static)
        if acting:
            self._read[req_id] = followed
        if is_traced:
            self.traced.add(req_id)

    def begin(self, req_id: str) -> None:
        """Let what was set for all act on a request from its first generated row on."""
        found = self._requests[req_id]
        for name, action in self._actuation.begin(req_id, found.num_prompt, found.static):
            self._outcomes.note({req_id: found.num_prompt}, name, action, APPLIED)

    def forget(self, req_id: str) -> None:
        """Forget a request that ended, or never ran, if it is known. Any thread."""
        found = self._requests.pop(req_id, None)
        if self._read.pop(req_id, None) is not None:
            self._reader.forget()
        self._actuation.forget(req_id)
        self._decisions.endings.pop(req_id, None)
        self._outcomes.forget(req_id)
        if found is not None and found.begun:
            view = _view(req_id, found)
            for each in found.begun.values():
                each.thread.tell(_call(each.thread.controller.request_ends, view))

    def read(self, table: StepTable, discarded: Collection[str]) -> None:
        """Hand a step to the controllers; `decide` takes what they answer."""
        self._present = table.ids
        step = self._reader.read(table, discarded, self._read) if self._read else None
        if step is None:
            return
        if step.requests is not self._told_to[0]:
            self._told_to = step.requests, [self._begin_step(each, step) for each in self._running]
        for each, part in zip(self._running, self._told_to[1], strict=True):
            if part is None:
                each.thread.step(step.of(each.reader))
            elif part[0]:
                each.thread.step(step.part(*part).of(each.reader))

    def _begin_step(self, controller: RunningController, step: ReadStep) -> _Part:
        """Tell a controller of requests that are new to it; returns its part of a step of such requests."""
        members = set()
        for req_id in dict.fromkeys(step.requests):
            followed = self._requests[req_id]
            if not any(each is controller for each in followed.acting):
                continue
            members.add(req_id)
            if controller.name not in followed.begun:
                followed.begun[controller.name] = controller
                begins = controller.thread.controller.request_begins
                controller.thread.tell(_call(begins, _view(req_id, followed)))
        if all(req_id in members for req_id in step.requests):
            return None
        at = [index for index, req_id in enumerate(step.requests) if req_id in members]
        return at, tuple(step.requests[index] for index in at)

    def decide(self) -> Decided | None:
        """Apply the actions that controllers answered; see `headgate.capture.engine.contracts.core_part`."""
        for each in self._running:
            for action in each.thread.take():
                self._decisions.apply(each.name, action, self._requests)
            if not each.thread.is_on and each.name not in self._off:
                self._off.add(each.name)
                known = list(self._requests.items())  # to which another thread adds
                firsts = {req_id: None for req_id, one in known if each.name in one.begun}
                self._outcomes.note(firsts, each.name, None, SWITCHED_OFF, each.thread.figures.error)
        if self._submitted is not None:
            for submitted in self._submitted.take():
                self._decisions.apply_submitted(submitted, self._requests)
        endings, self._decisions.endings = self._decisions.endings, {}
        notes = self._outcomes.take_notes(self._present)
        return Decided(endings, notes) if endings or notes else None

    def orders(self, scheduled: Collection[str]) -> dict[str, Any] | None:
        """Return the coefficients that the workers are to take over with a step; None if there are none."""
        changes = self._actuation.coefficients.take_changes(scheduled)
        return None if changes is None else {"drives": changes}

    def global_changed(self) -> None:
        """Follow a change of the global vectors."""
        self._actuation.global_changed()

    def status(self) -> list[dict[str, Any]]:
        """Return plain values about each controller."""
        return [{**each.status(), "actions": _counts(self._outcomes, each)} for each in self._running]

    def queue(self) -> dict[str, int] | None:
        """Return how many actions of capture consumers wait, and were dropped; None if none are taken."""
        if self._submitted is None:
            return None
        dropped = sum(self._outcomes.counts(name, 0)[DROPPED] for name in self._decisions.consumers)
        return {"waiting": self._submitted.num_waiting, "dropped": dropped}

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the actions by outcome, and the seconds, of each controller, for the metrics page."""
        found = {
            each.name: {"actions": _counts(self._outcomes, each), "seconds": each.thread.figures.seconds}
            for each in self._running
        }
        for name in sorted(self._decisions.consumers):
            found[name] = {"actions": self._outcomes.counts(name, 0), "seconds": 0.0}
        return found


def _counts(outcomes: Outcomes, controller: RunningController) -> dict[str, int]:
    return outcomes.counts(controller.name, controller.thread.figures.dropped)


def _view(req_id: str, followed: _Followed) -> RequestView:
    return RequestView(request=req_id, num_prompt_tokens=followed.num_prompt, token_ids=tuple(followed.tokens))


def _call(method: Callable[[RequestView], object], view: RequestView) -> Callable[[], object]:
    return lambda: method(view)
