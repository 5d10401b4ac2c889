"""Calls of the engine cores about rules: register, forget and list them. No transport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from headgate.capture.engine.contracts.request_part import CoreCall, Operation
from headgate.steering.control.operations import agreed, with_actor
from headgate.steering.core.audit import OPERATOR, Actor
from headgate.steering.requests.rules.rule_fields import read_rule
from headgate.steering.vectors.phase_vectors import Steerable, check_name


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleStatus:
    """A registered rule.

    Attributes:
        name: Its name in requests and traces.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        scope: On which rows it acts: ``this_token``, ``next_token`` or ``rest_of_request``.
        strength: ``"binary"``, ``{"proportional": gain}``, ``{"sigmoid": sharpness}`` or ``{"pid": {...}}``.
        probes: Names of the scores that it reads, as in traces.
        sites: That it reads and writes.
        observes: Whether nothing acts: it is traced and counted.
        sha256: Hex, of its content.
    """

    name: str
    applies_to: str
    scope: str
    strength: str | Mapping[str, float | Mapping[str, float]]
    probes: tuple[str, ...]
    sites: tuple[str, ...]
    observes: bool
    sha256: str

    @classmethod
    def from_plain(cls, described: Mapping[str, Any]) -> RuleStatus:
        """Make it from an engine core's description, which may say more."""
        values = {field.name: described[field.name] for field in fields(cls)}
        return cls(**{**values, "probes": tuple(described["probes"]), "sites": tuple(described["sites"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleActivity:
    """A registered rule, and the rows that it wrote so far.

    Attributes:
        name: The rule's.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        observes: Whether nothing acts.
        rows: Rows that it wrote; if it observes, rows on which it would have.
    """

    name: str
    applies_to: str
    observes: bool
    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerActivity:
    """A controller, with its figures of all engine cores.

    Attributes:
        name: Its name in traces and metrics.
        entry_point: In the group ``headgate.controllers``.
        applies_to: ``all``, ``opt_in`` or ``opt_out``.
        probes: Names of the scores that it reads, as in traces.
        budget_ms: Milliseconds that a step waits for it.
        steps: Steps that it was given.
        skipped: Steps that came while it was busy, or after it was switched off.
        over_budget: Steps that took longer than `budget_ms`.
        seconds: Time that it took.
        actions: Its actions by outcome: those that were ``submitted``, and what came of them, which is ``applied``,
            ``rejected`` or ``dropped``.
        error: Why it was switched off; None while it is on everywhere.
    """

    name: str
    entry_point: str
    applies_to: str
    probes: tuple[str, ...]
    budget_ms: float
    steps: int
    skipped: int
    over_budget: int
    seconds: float
    actions: Mapping[str, int]
    error: str | None

    @classmethod
    def joined(cls, told: Sequence[Mapping[str, Any]]) -> ControllerActivity:
        """Make it of what each engine core tells of it."""
        first, actions = told[0], Counter[str]()
        for each in told:
            actions.update(each["actions"])
        summed = ("steps", "skipped", "over_budget", "seconds")
        sums = {name: sum(each[name] for each in told) for name in summed}
        error = next((each["error"] for each in told if each["error"] is not None), None)
        kept = {name: first[name] for name in ("name", "entry_point", "applies_to", "budget_ms")}
        return cls(**kept, probes=tuple(first["probes"]), actions=dict(actions), error=error, **sums)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicStatus:
    """Probes, gates, rules and controllers of all engine cores, with the rows and actions that these came to.

    Attributes:
        probes: Names of registered probes.
        rules: Registered rules.
        gates: Rows that gates of requests wrote, by their names; beyond 256 names all others are counted as
            ``(others)``.
        requests_with_gates: Requests with gates of their own, now.
        controllers: Those that were started.
        latches: ``conversations`` in which gates are latched, and the ``bytes`` that they take.
        queue: Actions of capture consumers that are ``waiting``, and that were ``dropped``; None if none are taken.
    """

    probes: tuple[str, ...]
    rules: tuple[RuleActivity, ...]
    gates: Mapping[str, int]
    requests_with_gates: int
    controllers: tuple[ControllerActivity, ...] = ()
    latches: Mapping[str, int] = field(default_factory=dict)
    queue: Mapping[str, int] | None = None


def dynamic() -> Operation[DynamicStatus]:
    """Ask for the activity of gates, rules and controllers."""
    answers: Sequence[Mapping[str, Any]] = yield CoreCall(method="dynamic", args={})
    rows, gates = Counter[str](), Counter[str]()
    for answer in answers:
        rows.update({rule["name"]: rule["rows"] for rule in answer["rules"]})
        gates.update(answer["gates"])
    rules = tuple(
        RuleActivity(
            name=rule["name"], applies_to=rule["applies_to"], observes=rule["observes"], rows=rows[rule["name"]]
        )
        for rule in answers[0]["rules"]
    )
    return DynamicStatus(
        probes=tuple(answers[0]["probes"]),
        rules=rules,
        gates=dict(gates),
        requests_with_gates=sum(answer["requests_with_gates"] for answer in answers),
        controllers=tuple(
            ControllerActivity.joined(told) for told in zip(*(answer["controllers"] for answer in answers), strict=True)
        ),
        latches=_summed([answer["latches"] for answer in answers]),
        queue=_summed(queues) if (queues := [answer["queue"] for answer in answers if answer["queue"]]) else None,
    )


def _summed(figures: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in figures) for name in figures[0]}


def register_rule(
    name: str, document: Mapping[str, Any], steerable: Steerable, num_engines: int, by: Actor = OPERATOR
) -> Operation[RuleStatus]:
    """Register a rule; an earlier one of the name is replaced."""
    wire = read_rule(name, document, steerable).to_wire()

    def attempt() -> Operation[RuleStatus]:
        undo: tuple[str, Mapping[str, Any]] = ("unregister_rule", with_actor(by.undo(None), name=name))
        if num_engines > 1 and (again := (yield from _restoring(name, by))) is not None:
            undo = again
        answers = yield CoreCall(method="register_rule", args=with_actor(by, name=name, rule=wire), undo=undo)
        return RuleStatus.from_plain(answers[0])

    return (yield from agreed(attempt, num_engines))


def unregister_rule(name: str, num_engines: int, by: Actor = OPERATOR) -> Operation[RuleStatus]:
    """Forget a rule."""
    check_name(name, "name", "a rule")
    undo = (yield from _restoring(name, by)) if num_engines > 1 else None
    answers = yield CoreCall(method="unregister_rule", args=with_actor(by, name=name), undo=undo)
    return RuleStatus.from_plain(answers[0])


def rules() -> Operation[dict[str, RuleStatus]]:
    """Ask for the registered rules, by name."""
    answers: Sequence[Sequence[Mapping[str, Any]]] = yield CoreCall(method="rules", args={})
    return {found["name"]: RuleStatus.from_plain(found) for found in answers[0]}


def _restoring(name: str, by: Actor) -> Operation[tuple[str, Mapping[str, Any]] | None]:
    """Make the call that registers a rule again as it is now, for its client; None if there is none."""
    (earlier, *_) = yield CoreCall(method="export_rule", args={"name": name})
    if earlier is None:
        return None
    (owner, *_) = yield CoreCall(method="owner", args={"name": name, "of": "rule"})
    return "register_rule", with_actor(by.undo(owner), name=name, rule=earlier)
