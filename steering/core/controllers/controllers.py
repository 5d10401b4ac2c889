"""The controllers of one engine core: how they start, get requests and steps, and how their actions are applied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headgate.capture.engine.contracts.core_part import Actions, CoreFacts, Decided
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import MAX_DRIVEN, MAX_READ, WHERE, SteeringConfig, first_controller_column
from headgate.steering.controllers.actions import GLOBAL
from headgate.steering.controllers.controller_process import ProcessHost
from headgate.steering.controllers.host import ControllerHost, LocalHost
from headgate.steering.core.admission import Reservations
from headgate.steering.core.content import check_programs
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.coefficients import Coefficients
from headgate.steering.core.controllers.contents import Contents, Drives, Static, demand_of_both
from headgate.steering.core.controllers.decisions import APPLIED, DROPPED, SWITCHED_OFF, ActionApplier, Outcomes
from headgate.steering.core.controllers.readers import RunningController, ScoreColumns, running_controllers
from headgate.steering.core.gates import GateContent
from headgate.steering.core.state import SteeringState
from headgate.steering.gates.gate import Selection
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import GateSource
from headgate.steering.vectors.phase_vectors import Steerable

if TYPE_CHECKING:
    from headgate.capture.engine.core.part_services import CoreServices


class _Followed(NamedTuple):
    """A request that was accepted.

    Attributes:
        num_prompt: Tokens of its prompt.
        acting: Controllers that read its rows.
        static: Its steering without them.
    """

    num_prompt: int
    acting: list[RunningController]
    static: Static


class Controllers:
    """Hands controllers the steps, and applies their actions. Engine thread, unless said otherwise.

    Args:
        running: The controllers.
        host: Where they live.
        actuation: Applies actions to requests.
        services: Gives the tokens of requests.
        outcomes: Outcomes of actions.
        submitted: Actions of capture consumers; None if they are not taken.

    Attributes:
        traced: Requests whose traces are wanted, or described: the actions on them are noted. Any thread.
    """

    def __init__(
        self,
        running: Sequence[RunningController],
        host: ControllerHost,
        actuation: Actuation,
        services: CoreServices,
        outcomes: Outcomes,
        submitted: Actions | None = None,
    ) -> None:
        self._submitted = submitted
        self._running = tuple(running)
        self._host = host
        self._actuation = actuation
        self._outcomes = outcomes
        self.traced = self._outcomes.traced
        self._decisions = ActionApplier(actuation, self._outcomes, services)
        self._requests: dict[str, _Followed] = {}
        self._read: set[str] = set()
        """The requests whose rows a controller reads."""
        self._present: Collection[str] = ()
        """Requests of the last step that was read."""
        self._num_steps = 0
        """Steps that were read: the number of the last one."""
        self._since: dict[str, int] = {}
        """The number of the last step before a request began, or began anew, and before the global vectors changed."""
        self._last_since = 0

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
        self._requests[req_id] = _Followed(num_prompt, acting, static)
        if acting:
            self._read.add(req_id)
            self._host.add(req_id, num_prompt, [each.name for each in acting])
        if is_traced:
            self.traced.add(req_id)

    def begin(self, req_id: str) -> None:
        """Let what was set for all act on a request from its first generated row on."""
        self._counts_anew(req_id)
        found = self._requests[req_id]
        for name, action in self._actuation.begin(req_id, found.num_prompt, found.static):
            self._outcomes.note({req_id: found.num_prompt}, name, action, APPLIED)

    def forget(self, req_id: str) -> None:
        """Forget a request that ended, or never ran, if it is known. Any thread."""
        self._requests.pop(req_id, None)
        self._since.pop(req_id, None)
        self._actuation.forget(req_id)
        self._decisions.endings.pop(req_id, None)
        self._outcomes.forget(req_id)
        if req_id in self._read:
            self._read.discard(req_id)
            self._host.end(req_id)

    def begin_again(self, req_id: str) -> None:
        """Let a request end for the controllers that read it, and begin anew: its prompt is computed again.

        What they set on it alone is taken back, since the rows that they decided by do not count any more; what they
        answer to these rows later is dropped.
        """
        self._counts_anew(req_id)
        found = self._requests.get(req_id)
        if found is None or not found.acting:
            return
        self._host.end(req_id)
        self._host.add(req_id, found.num_prompt, [each.name for each in found.acting])
        for name in (each.name for each in found.acting):
            for action, firsts in self._actuation.take_back(name, req_id):
                self._outcomes.note(firsts, name, action, APPLIED)

    def read(self, table: StepTable, discarded: Collection[str]) -> None:
        """Hand a step to the controllers; `decide` takes what they answer."""
        self._present = table.ids
        self._num_steps += 1
        if self._read:
            self._host.read(table, discarded, self._num_steps)

    def decide(self) -> Decided | None:
        """Apply the actions that controllers answered; see `headgate.capture.engine.contracts.core_part`."""
        answers = self._host.take()
        for name, action, step in answers.actions:
            self._decisions.apply(name, action, self._requests, self._begun_after(step))
        for off in answers.switched_off:
            self._outcomes.note(self._read_by(off.controller), off.controller, None, SWITCHED_OFF, off.error)
        for submitted in () if self._submitted is None else self._submitted.take():
            self._decisions.apply_submitted(submitted, self._requests)
        endings, self._decisions.endings = self._decisions.endings, {}
        notes = self._outcomes.take_notes(self._present)
        return Decided(endings, notes) if endings or notes else None

    def orders(self, scheduled: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the coefficients that the workers are to take over with a step; None if there are none."""
        changes = self._actuation.coefficients.take_changes(scheduled)
        return None if changes is None else {"drives": changes}

    def global_changed(self) -> None:
        """Follow a change of the global vectors; what is decided by earlier rows does not scale the new ones."""
        self._counts_anew(GLOBAL)
        self._actuation.global_changed()

    def status(self) -> list[dict[str, Any]]:
        """Return plain values about each controller."""
        figures = self._host.figures()
        return [
            {
                **each.status(figures[each.name]),
                "actions": self._outcomes.counts(each.name, figures[each.name].dropped),
            }
            for each in self._running
        ]

    def _counts_anew(self, target: str) -> None:
        """Let nothing that is decided by the steps so far act on a request, or on the global vectors."""
        self._since[target] = self._last_since = self._num_steps

    def _begun_after(self, step: int) -> Collection[str]:
        """Return the targets on which nothing acts that was decided by a step."""
        if step > self._last_since:  # as in all answers that come in time
            return ()
        return {target for target, last in list(self._since.items()) if step <= last}

    def _read_by(self, controller: str) -> dict[str, None]:
        """Return the requests that a controller reads, without a position."""
        known = list(self._requests.items())  # to which another thread adds
        return {req_id: None for req_id, one in known if any(each.name == controller for each in one.acting)}

    def queue(self) -> dict[str, int] | None:
        """Return how many actions of capture consumers wait, and were dropped; None if none are taken."""
        if self._submitted is None:
            return None
        dropped = sum(self._outcomes.counts(name, 0)[DROPPED] for name in self._decisions.consumers)
        return {"waiting": self._submitted.num_waiting, "dropped": dropped}

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the actions by outcome, and the seconds, of each controller, for the metrics page."""
        found = {
            name: {"actions": self._outcomes.counts(name, figures.dropped), "seconds": figures.seconds}
            for name, figures in self._host.figures().items()
        }
        for name in sorted(self._decisions.consumers):
            found[name] = {"actions": self._outcomes.counts(name, 0), "seconds": 0.0}
        return found


logger = logging.getLogger("headgate")

_PLACE = f"{WHERE}.controllers (--steering-controllers)"


def open_controllers(
    config: SteeringConfig,
    facts: CoreFacts,
    state: SteeringState,
    reservations: Reservations[str],
    set_beside: Callable[[Sequence[Mapping[str, Any]]], None],
    services: CoreServices,
) -> Controllers:
    """Start the configured controllers; the workers know what they read from here on.

    Args:
        config: The configuration, with controllers.
        facts: Facts of the engine core.
        state: The state, with the modules that are registered at start.
        reservations: Reserves slots.
        set_beside: Has the workers know programs beside the rules; see `OperatorCalls.set_beside`.
        services: The engine core's.

    Raises:
        ConfigError: If one cannot run here.
    """
    steerable = _checked(state.steerable, facts)
    modules = {module.name: module for module in state.modules()}
    content = GateContent(steerable, state.probes, state.saes, modules)
    first = first_controller_column(config)
    columns = ScoreColumns(first, MAX_READ)
    try:
        host = _open_host(config, facts, services, columns)
        running = list(running_controllers(config.controllers, host.loaded, content, modules, columns))
        check_programs([each.reader.program for each in running], state.limits, "controllers", "of all controllers")
        for each in running:
            _check_name(each.name, state)
            reservations.keep_module(f"controller\n{each.name}", demand_of_both(each.reader.program), "controllers")
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{_PLACE}: {error}") from error
    readers = [each.reader.to_worker() for each in running]

    def notify(drives: Sequence[Mapping[str, Any]]) -> None:
        set_beside([*readers, *drives])

    notify(())
    state.rules.reserve(each.name for each in running)
    host.start({each.name: each.reader.numbers for each in running})
    driven = range(first + MAX_READ, first + MAX_READ + MAX_DRIVEN)
    drives = Drives(driven, reservations, notify)
    for each in running:
        logger.info("steering: controller %s, for %s", each.name, each.spec.applies_to)
    coefficients = Coefficients(drives, services, state.limits)
    submitted = services.actions if config.from_consumers else None
    return Controllers(running, host, Actuation(Contents(state), coefficients), services, Outcomes(), submitted)


def _open_host(
    config: SteeringConfig, facts: CoreFacts, services: CoreServices, columns: ScoreColumns
) -> ControllerHost:
    """Load the configured controllers, in a process of their own or here.

    Raises:
        ConfigError: If one cannot be made, or the process does not start.
    """

    def tokens_of(req_id: str) -> Any:
        progress = services.progress(req_id)
        return None if progress is None else progress.token_ids

    has_process = facts.has_own_process if config.controller_process is None else config.controller_process
    if config.controllers and has_process:
        scores = slice(columns.first, columns.first + columns.size)
        return ProcessHost(config.controllers, services.progress, scores)
    return LocalHost(config.controllers, tokens_of, columns.first)


def _checked(steerable: Steerable | None, facts: CoreFacts) -> Steerable:
    if facts.has_drafts:
        raise ConfigError(
            f"{_PLACE}: with speculative decoding, scores of rows that do not count would be read; start the engine "
            "without --speculative-config"
        )
    if facts.num_stages > 1:
        raise ConfigError(
            f"{_PLACE}: scores of pipeline stages but the last do not come back to the engine core; start the engine "
            "with tensor parallelism"
        )
    if steerable is None or not steerable.op_sites:
        raise ConfigError(
            f"{_PLACE}: controllers, and consumers that steer, act at op sites, and there are none; declare them with "
            "--steering-op-sites, or with --probes NAME=PATH for the site of a probe"
        )
    return steerable


def _check_name(name: str, state: SteeringState) -> None:
    if state.rules.find(name) is not None:
        raise ConfigError(f"controller {name!r} has the name of a rule; give it an instance_name")
