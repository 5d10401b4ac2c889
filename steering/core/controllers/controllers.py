"""The controllers of one engine core: how they start, get requests and steps, and how their actions are applied.

`ActionApplier` applies each action by itself: one that cannot be applied changes nothing else. `Outcomes` counts what
became of them and notes it for the traces of requests.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headgate.capture.engine.contracts.core_part import Actions, CoreFacts, Decided
from headgate.capture.monitoring.logs import ReasonLog, SparseLog
from headgate.capture.probe import Probe
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.consumer import Submitted
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import MAX_DRIVEN, MAX_READ, WHERE, SteeringConfig, first_controller_column
from headgate.steering.controllers.actions import (
    GLOBAL,
    Action,
    SetGlobal,
    SetScale,
    SetSteering,
    SetSteeringEach,
    SingleAction,
    Stop,
    are_places,
    described,
    read_action,
)
from headgate.steering.controllers.controller_process import ProcessHost
from headgate.steering.controllers.host import ControllerFigures, ControllerHost, LoadedController, LocalHost
from headgate.steering.controllers.loading import ControllerSpec
from headgate.steering.core.admission import Reservations
from headgate.steering.core.content import check_programs
from headgate.steering.core.controllers.coefficients import Actuation, Coefficients
from headgate.steering.core.controllers.contents import FIELD, Contents, Drives, Static, demand_of_both
from headgate.steering.core.gates import GateContent
from headgate.steering.core.state import SteeringState
from headgate.steering.gates.gate import AppliesTo, GateColumns, InlineProbe, ScoreColumn, Selection
from headgate.steering.gates.lowering import Score, check_site, probe_entries
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import GateSource, Note, Writes
from headgate.steering.programs.program import Entry, Program
from headgate.steering.vectors.phase_vectors import Steerable

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.core_part import CoreServices


_NOTHING = Writes(frozenset(), frozenset())


class ControllerProbes(NamedTuple):
    """The probes of one controller.

    Attributes:
        name: The controller's.
        applies_to: Whose rows are read.
        scores: Their columns, by the controller's names.
        numbers: Which of all scores each is, by the same names.
        program: Computes them, in both phases.
        source: Their columns for traces, where they are called ``CONTROLLER.PROBE``.
    """

    name: str
    applies_to: AppliesTo
    scores: Mapping[str, int]
    numbers: Mapping[str, int]
    program: Program
    source: GateSource

    def acts(self, selection: Selection) -> bool:
        """Whether it reads the rows of a request with a selection of rules and controllers."""
        return self.applies_to.acts(self.name, selection)

    def to_worker(self) -> dict[str, Any]:
        """Return plain values for `headgate.steering.worker.placed_programs.ActingRule`."""
        wire, columns = self.program.to_wire(), sorted(self.scores.values())
        return {
            "name": self.name,
            "applies_to": self.applies_to.value,
            "columns": [columns[0], columns[-1] + 1],
            "prefill": wire,
            "decode": wire,
        }


class ScoreColumns(NamedTuple):
    """Columns for the scores of all controllers.

    Attributes:
        first: First column of the scores; score number k has the column ``first + k``.
        size: How many there are.
    """

    first: int
    size: int


def make_reader(
    name: str,
    applies_to: AppliesTo,
    probes: Mapping[str, Probe],
    content: GateContent,
    columns: ScoreColumns,
    first: int,
) -> ControllerProbes:
    """Make the reader of a controller.

    Args:
        name: The controller's.
        applies_to: Whose rows are read.
        probes: Checked (`headgate.steering.controllers.loading.read_probes`).
        content: Content of the engine core.
        columns: Columns of all controllers.
        first: The number of its first score; those before are taken.

    Raises:
        ConfigError: If there are too few columns, or a probe does not fit the model or reads at no op site.
    """
    if len(probes) > columns.size - first:
        raise ConfigError(
            f"controller {name!r}: {len(probes)} probes, but columns for {columns.size - first} more are left"
        )
    entries: list[Entry] = []
    scores: list[ScoreColumn] = []
    for number, (probe_name, probe) in enumerate(probes.items(), first):
        column = columns.first + number
        where = f"controller {name!r}: probe {probe_name!r}"
        if probe.hidden_size != (width := content.width(probe.site)):
            raise ConfigError(f"{where}: has the width {probe.hidden_size}, rows of {probe.site.name} have {width}")
        try:
            check_site(probe.site, content, where)
        except RequestError as error:
            raise ConfigError(str(error)) from error
        score = Score(probe_entries(probe, content.dtype), None)
        entries += score.at(column)
        # No name that a request's own probe may share.
        reading = InlineProbe(site=probe.site, weight=probe.weight[0], bias=0.0, is_cosine=False, where=where)
        scores.append(ScoreColumn(f"{name}.{probe_name}", reading, column))
    program = Program.from_entries(entries, content.dtype)
    source = GateSource(GateColumns(tuple(scores), (), len(scores)), frozenset(), _NOTHING, program.key)
    named = dict(zip(probes, (score.column for score in scores), strict=True))
    numbers = dict(zip(probes, range(first, columns.size), strict=False))
    return ControllerProbes(name, applies_to, named, numbers, program, source)


class RunningController(NamedTuple):
    """A controller that was started.

    Attributes:
        spec: As configured.
        reader: Reader of its probes.
        needs_prompts: Whether every row of a prompt is to be read for it.
    """

    spec: ControllerSpec
    reader: ControllerProbes
    needs_prompts: bool

    @property
    def name(self) -> str:
        """Its name in traces and metrics."""
        return self.reader.name

    def status(self, figures: ControllerFigures) -> dict[str, Any]:
        """Return plain values about it."""
        return {
            "name": self.name,
            "entry_point": self.spec.name,
            "applies_to": self.spec.applies_to,
            "probes": [score.name for score in self.reader.source.columns.scores],
            "budget_ms": self.spec.budget_ms,
            "steps": figures.steps,
            "skipped": figures.skipped,
            "over_budget": figures.over_budget,
            "seconds": figures.seconds,
            "error": figures.error,
        }


def running_controllers(
    specs: Sequence[ControllerSpec],
    loaded: Mapping[str, LoadedController],
    content: GateContent,
    modules: Collection[str],
    columns: ScoreColumns,
) -> Iterator[RunningController]:
    """Make the readers of controllers that were loaded.

    Args:
        specs: Specs of the configuration.
        loaded: The controllers, by their names.
        content: Content of the engine core.
        modules: Names of the registered modules.
        columns: For scores.

    Raises:
        ConfigError: If one reads what cannot be read, or needs a module that is not there.
    """
    first = 0
    for spec in specs:
        made = loaded[spec.instance]
        reader = make_reader(spec.instance, AppliesTo(spec.applies_to), made.probes, content, columns, first)
        first += len(made.probes)
        for name in made.modules:
            if name not in modules:
                known = ", ".join(sorted(modules)) or "none"
                raise ConfigError(
                    f"controller {spec.instance!r}: needs module {name!r}; registered at start (--steering-modules): "
                    f"{known}"
                )
        yield RunningController(spec, reader, made.needs_prompts)


SUBMITTED, APPLIED, REJECTED, DROPPED = "submitted", "applied", "rejected", "dropped"
SWITCHED_OFF = "switched off"
OUTCOMES = (SUBMITTED, APPLIED, REJECTED, DROPPED)
"""Each action is submitted, and then one of the other three. One that cannot be done is rejected; one for a request
that has ended is dropped, and so are too many."""


class Outcomes:
    """The outcomes of all actions. Engine thread, but for `forget`.

    Attributes:
        traced: Requests whose traces are wanted; nothing is noted for others. Any thread.
    """

    def __init__(self) -> None:
        self.traced: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._notes: dict[str, list[Mapping[str, Any]]] = {}
        """Outcomes by request that were not reported yet."""

    def counts(self, controller: str, num_flooded: int) -> dict[str, int]:
        """Return how many actions of a controller came to what; `num_flooded` of its steps returned too many."""
        found = {outcome: self._counts[controller, outcome] for outcome in OUTCOMES}
        return {**found, SUBMITTED: found[SUBMITTED] + num_flooded, DROPPED: found[DROPPED] + num_flooded}

    def count(self, controller: str, outcome: str, number: int = 1) -> None:
        """Count an action, or several."""
        self._counts[controller, outcome] += number

    def note(
        self,
        firsts: Mapping[str, int | None],
        controller: str,
        action: SingleAction | None,
        outcome: str,
        reason: str | None = None,
    ) -> None:
        """Note an action for the traces of requests.

        Args:
            firsts: The first position on which it acts, by request; None if it acts on none.
            controller: Whose it is.
            action: None if the note is about the controller.
            outcome: What came of it.
            reason: Why; None if it was applied.
        """
        noted = [(req_id, first) for req_id, first in firsts.items() if req_id in self.traced]
        done = described(action) if noted and action is not None else None
        for req_id, first in noted:
            note = {"position": first, "controller": controller, "action": done, "outcome": outcome}
            self._notes.setdefault(req_id, []).append(note if reason is None else {**note, "reason": reason})

    def note_each(self, controller: str, action: SetSteeringEach, done: BoolArray, firsts: Int64Array) -> None:
        """Note what an action was applied to, for the traces of those requests.

        Args:
            controller: Whose it is.
            action: With scales as an array.
            done: To which of its requests it was applied, ``[n]``.
            firsts: The first position on which it acts, of each of those, int64 ``[n]``.
        """
        rows = zip(action.named, action.scales.tolist(), done.tolist(), firsts.tolist(), strict=True)
        for req_id, scale, is_done, first in rows:
            if is_done and req_id in self.traced:
                set_each = {"set_steering": {"module": action.module, "scale": scale}, "compose": True}
                note = {"position": first, "controller": controller, "action": set_each, "outcome": APPLIED}
                self._notes.setdefault(req_id, []).append(note)

    def take_notes(self, present: Collection[str]) -> dict[str, Note]:
        """Return the notes of requests of a step, as pieces of their traces; they count as reported."""
        if not self._notes:
            return {}
        return {
            req_id: {"actions": self._notes.pop(req_id)}
            for req_id in [known for known in list(self._notes) if known in present]
        }

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known. Any thread."""
        self.traced.discard(req_id)
        self._notes.pop(req_id, None)


_rejected = ReasonLog("headgate: actions are rejected")
_failed = SparseLog("headgate")

MAX_REASON = 256
"""Characters of the reason of `Stop`; a longer one is cut."""


class ActionApplier:
    """Applies actions.

    Args:
        actuation: Applies the actions that steer.
        outcomes: Records the outcome of each action.
        services: The engine core's.

    Attributes:
        endings: Requests that are to end, with the reasons, until they are taken.
        consumers: Names of capture consumers that have submitted actions.
    """

    def __init__(self, actuation: Actuation, outcomes: Outcomes, services: CoreServices) -> None:
        self.endings: dict[str, str] = {}
        self.consumers: set[str] = set()
        self._actuation = actuation
        self._outcomes = outcomes
        self._services = services
        self._named: tuple[str, ...] = ()
        """The last requests that were found to be names."""

    def apply(self, controller: str, action: Action, known: Container[str], begun_after: Collection[str] = ()) -> None:
        """Apply an action of a controller.

        Args:
            controller: Its name.
            action: To apply.
            known: The requests that have not ended.
            begun_after: Requests that began, or began anew, after the rows by which it was decided, and `GLOBAL` if the
                global vectors have changed: it is dropped for them.
        """
        if isinstance(action, SetSteeringEach):
            self._outcomes.count(controller, SUBMITTED, len(action))
            self._apply_each(controller, action, known, begun_after)
            return
        self._outcomes.count(controller, SUBMITTED)
        if begun_after and _target(action) in begun_after:
            self._outcomes.count(controller, DROPPED)
        else:
            self._apply_one(controller, action, known)

    def apply_submitted(self, submitted: Submitted, known: Container[str]) -> None:
        """Apply an action that a capture consumer submitted, under the name ``consumer:INSTANCE``.

        Args:
            submitted: As it came.
            known: The requests that have not ended.
        """
        name = f"consumer:{submitted.consumer}"
        self.consumers.add(name)
        if submitted.num_dropped:
            self._outcomes.count(name, SUBMITTED, submitted.num_dropped)
            self._outcomes.count(name, DROPPED, submitted.num_dropped)
        try:
            action = read_action(submitted.action)
        except ValueError as error:
            self._outcomes.count(name, SUBMITTED)
            self._outcomes.count(name, REJECTED)
            _rejected.warning(name, f"{name}: {error}")
            return
        self.apply(name, action, known)

    def _apply_one(self, controller: str, action: SingleAction, known: Container[str]) -> None:
        try:
            firsts = self._act(controller, action)
        except RequestError as error:
            self._refuse(controller, action, known, str(error).removeprefix(f"{FIELD}: "))
        except Exception as error:  # noqa: BLE001  (a worker's, whatever it is)
            # A worker could not take the content over, and nothing has changed: everybody else goes on.
            _failed.error(f"controller {controller}: an action failed", cause=error)
            self._refuse(controller, action, known, f"{type(error).__name__}: {error}")
        else:
            self._outcomes.count(controller, APPLIED)
            if self._outcomes.traced:
                self._outcomes.note(firsts, controller, action, APPLIED)

    def _apply_each(
        self, controller: str, action: SetSteeringEach, known: Container[str], begun_after: Collection[str]
    ) -> None:
        """Apply an action for several requests, as `apply` does what it stands for; a malformed one is refused."""
        try:
            action = self._checked(action)
            if begun_after:
                num_given, action = len(action), _without(action, begun_after)
                self._outcomes.count(controller, DROPPED, num_given - len(action))
            done, firsts = self._actuation.steer_each(controller, action)
        except (TypeError, ValueError) as error:
            self._outcomes.count(controller, REJECTED, len(action))
            _rejected.warning(controller, f"controller {controller}: {error}")
            return
        num_done = int(np.count_nonzero(done))
        self._outcomes.count(controller, APPLIED, num_done)
        if self._outcomes.traced:
            self._outcomes.note_each(controller, action, done, firsts)
        if num_done < len(done):
            for one, is_done in zip(action.each(), done.tolist(), strict=True):
                if not is_done:
                    self._apply_one(controller, one, known)

    def _refuse(self, controller: str, action: SingleAction, known: Container[str], reason: str) -> None:
        target = action.request if isinstance(action, SetSteering | Stop) and isinstance(action.request, str) else None
        if target is not None and target not in known:
            self._outcomes.count(controller, DROPPED)
            return
        self._outcomes.count(controller, REJECTED)
        if target is not None:
            self._outcomes.note({target: None}, controller, action, REJECTED, reason)
        else:
            _rejected.warning(controller, f"controller {controller}: {reason}")

    def _act(self, controller: str, action: SingleAction) -> Mapping[str, int]:
        if isinstance(action, SetSteering | Stop) and not isinstance(action.request, str):
            raise RequestError(FIELD, f"request: expected the id of one, got {action.request!r}")
        if isinstance(action, SetSteering):
            return self._actuation.steer(controller, action)
        if isinstance(action, SetGlobal):
            return self._actuation.steer_all(controller, action)
        if isinstance(action, SetScale):
            return self._actuation.scale(controller, action)
        progress = self._services.progress(action.request)
        if progress is None:
            raise RequestError(FIELD, f"request {action.request!r} has ended")
        self.endings.setdefault(action.request, str(action.reason)[:MAX_REASON])
        return {action.request: progress.position}

    def _checked(self, action: SetSteeringEach) -> SetSteeringEach:
        """Return an action with a tuple and arrays as they are expected.

        Raises:
            ValueError: If there is not a number for each request, or a place for each number.
            TypeError: If something in it is of another kind.
        """
        requests, at, scales = action.requests, action.at, np.asarray(action.scales, np.float64)
        if requests is not self._named:
            requests = tuple(requests)
            if not all(isinstance(each, str) for each in requests):
                raise TypeError(f"requests: expected names, got {requests[:3]!r}")
            self._named = requests = self._named if requests == self._named else requests
        if not isinstance(action.module, str):
            raise TypeError(f"module: expected a name, got {action.module!r}")
        if at is not None:
            at = _checked_places(np.asarray(at), len(requests))
        expected = len(requests) if at is None else len(at)
        if scales.shape != (expected,):
            raise ValueError(f"scales: expected {expected} numbers, got the shape {list(scales.shape)}")
        if requests is action.requests and at is action.at and scales is action.scales:
            return action
        return SetSteeringEach(requests, action.module, scales, at)


def _target(action: SingleAction) -> str | None:
    """Return the request, module or `GLOBAL` that an action names; None if it names none, or something odd."""
    if isinstance(action, SetGlobal):
        return None
    named = action.target if isinstance(action, SetScale) else action.request
    return named if isinstance(named, str) else None


def _without(action: SetSteeringEach, left_out: Collection[str]) -> SetSteeringEach:
    """Return a checked action for its other requests alone."""
    stays = np.array([request not in left_out for request in action.named], np.bool_)
    at = np.arange(len(action.requests)) if action.at is None else action.at
    return SetSteeringEach(action.requests, action.module, action.scales[stays], at[stays])


def _checked_places(at: np.ndarray[Any, Any], num_requests: int) -> Int64Array:
    if at.ndim != 1 or at.dtype.kind not in "iu":
        raise TypeError(f"at: expected a list of places among the requests, got {at.dtype} {list(at.shape)}")
    found: Int64Array = at.astype(np.int64, copy=False)
    if not are_places(found, num_requests):
        raise ValueError(f"at: expected ascending places below {num_requests}, got {found[:8].tolist()}")
    return found


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
    if steerable is None or not steerable.op_sites:
        raise ConfigError(
            f"{_PLACE}: controllers, and consumers that steer, act at op sites, and there are none; declare them with "
            "--steering-op-sites, or with --probes NAME=PATH for the site of a probe"
        )
    return steerable


def _check_name(name: str, state: SteeringState) -> None:
    if state.rules.find(name) is not None:
        raise ConfigError(f"controller {name!r} has the name of a rule; give it an instance_name")
