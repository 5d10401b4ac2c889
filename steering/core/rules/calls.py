"""The operator's calls about rules. A change reserves slots first, then notifies the workers, and last takes effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from headgate.capture.schema.errors import RequestError
from headgate.steering.core.admission import Reservations
from headgate.steering.core.content import Limits
from headgate.steering.core.gates import GateContent, lowered_rule
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.core.resolved import Module
from headgate.steering.core.rules.registry import KeptRule, RuleRegistry
from headgate.steering.core.rules.step_readings import RequestReadings
from headgate.steering.core.saes import SaeRegistry
from headgate.steering.gates.gate import Rule, fields_of_rule, rule_key
from headgate.steering.gates.step_table import ReportedCounts
from headgate.steering.vectors.phase_vectors import Steerable, check_name

if TYPE_CHECKING:
    from headgate.capture.engine.core.part_services import CoreServices

Notify = Callable[[str, Mapping[str, Any], Mapping[str, Any]], None]
"""Has all workers do a method with arguments, or undo it with others."""


class RuleState(Protocol):
    """As much of `headgate.steering.core.state.SteeringState` as is used here."""

    rules: RuleRegistry
    probes: ProbeRegistry
    saes: SaeRegistry
    limits: Limits
    steerable: Steerable | None
    version: int

    def modules(self) -> tuple[Module, ...]: ...


def made_rule(state: RuleState, rule: Rule) -> KeptRule:
    """Return a rule with its programs, to reserve its slots before it is registered.

    Raises:
        RequestError: If something that it names is not there, there is no room for its columns or entries, or the
            engine takes no rules.
    """
    if state.steerable is not None and not state.steerable.max_rules:
        raise RequestError(
            "name",
            "this engine takes no rules: --max-steering-rules is 0, it decodes speculatively, or its layers lie on "
            "several pipeline stages, where what a rule did would not come back; start it without "
            "--speculative-config, and with tensor parallelism",
        )
    first = state.rules.place(rule)
    others = [each for each in state.rules.all() if each.name != rule.name]
    modules = {module.name: module for module in state.modules()}
    with fields_of_rule():
        content = GateContent(state.steerable, state.probes, state.saes, modules)
        return lowered_rule(rule, content, state.limits, first, others)


class RuleCalls:
    """The methods that front ends call by name. Engine thread only.

    Args:
        state: The engine core's.
        reservations: Reserves slots.
        services: Asks for block keys anew.
        notify: Notifies the workers.
        readings: Readings of steps, for which a change counts from the next step on.

    Attributes:
        controller_status: Returns plain values about each controller.
        queue_status: Returns plain values about the actions of capture consumers; None if none are taken.
    """

    def __init__(
        self,
        state: RuleState,
        reservations: Reservations[str],
        services: CoreServices,
        notify: Notify,
        readings: RequestReadings,
    ) -> None:
        self._readings = readings
        self._state = state
        self._reservations = reservations
        self._services = services
        self._notify = notify
        self._beside: Sequence[Mapping[str, Any]] = ()
        self.controller_status: Callable[[], Sequence[Mapping[str, Any]]] = lambda: ()
        self.queue_status: Callable[[], Mapping[str, int] | None] = lambda: None

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """The methods by their names."""
        return {
            "register_rule": self._register,
            "unregister_rule": self._unregister,
            "rules": lambda: [rule.described() for rule in self._state.rules.all()],
            "export_rule": self._export,
            "dynamic": self._dynamic,
        }

    def register(self, rule: Rule) -> KeptRule:
        """Register a rule, in place of an earlier one of its name.

        Raises:
            RequestError: If something that it names is not there, or there is no room. Nothing has changed.
            Exception: What a worker raised. Nothing has changed.
        """
        rules, name = self._state.rules, rule.name
        if rules.is_reserved(name):
            raise RequestError("name", f"{name!r} is a controller's; give the rule another name")
        self._services.prepare_change("name")
        made, earlier = made_rule(self._state, rule), rules.find(name)
        key = rule_key(name)
        self._reservations.keep_module(key, made.demand, "then", is_rule=True)
        try:
            self._change(rules.with_rule(made))
        except BaseException:
            if earlier is None:
                self._reservations.release_module(key)
            else:
                self._reservations.keep_module(key, earlier.demand, "then", is_rule=True)
            raise
        return made

    def _register(self, name: str, rule: dict[str, Any]) -> dict[str, Any]:
        """Register what `Rule.to_wire` made; requests that run are steered by it from their next row on."""
        read = Rule.from_wire(rule)
        if read.name != check_name(name, "name", "a rule"):
            raise AssertionError(f"a rule {read.name!r} as {name!r}")
        return self._audited(self.register(read))

    def _unregister(self, name: str) -> dict[str, Any]:
        """Forget a rule; it acts on nothing from the next step on."""
        rules = self._state.rules
        found = rules.find(name)
        if found is None:
            known = ", ".join(rule.name for rule in rules.all()) or "none"
            raise RequestError("name", f"unknown rule {name!r}; registered: {known}")
        self._services.prepare_change("name")
        self._change(rules.without(name))
        self._reservations.release_module(rule_key(name))
        return self._audited(found)

    def _change(self, rules: Mapping[str, KeptRule]) -> None:
        """Have the workers and the state change to `rules`, between two steps; no step is in flight."""
        self._readings.settle()
        earlier = self._state.rules.all()
        self._notify("set_rules", self._to_workers(rules.values()), self._to_workers(earlier))
        self._state.rules.put(rules)
        self._state.version += 1
        self._readings.change_rules(self._services.rekey_running())

    def set_beside(self, programs: Sequence[Mapping[str, Any]]) -> None:
        """Have the workers know programs of controllers beside the rules, in place of earlier ones.

        Args:
            programs: Each as `headgate.steering.worker.placed_programs.ActingRule.from_wire` reads it.

        Raises:
            Exception: What a worker raised. Nothing has changed.
        """
        rules = self._state.rules.all()
        self._notify("set_rules", self._to_workers(rules, programs), self._to_workers(rules))
        self._beside = tuple(programs)

    def gate_rows(self) -> dict[str, int]:
        """Return the rows that the gates of requests wrote, by name; workers are asked what they have counted."""
        if self._readings.awaits_counts:
            for counts in self._services.call_workers("ask_counts", {}):
                self._readings.take_counts(cast("list[ReportedCounts]", counts))
        return dict(self._readings.counts.gates)

    def rule_rows(self) -> dict[str, int]:
        """Return the rows that each rule wrote, those of rules that are off now included."""
        known = dict.fromkeys((rule.name for rule in self._state.rules.all()), 0)
        return {**known, **self._readings.counts.rules}

    def _dynamic(self) -> dict[str, Any]:
        """Return what reads and acts now, with the rows that it wrote so far."""
        rows = self.rule_rows()
        return {
            "probes": list(self._state.probes.all()),
            "rules": [{**rule.described(), "rows": rows[rule.name]} for rule in self._state.rules.all()],
            "gates": self.gate_rows(),
            "requests_with_gates": self._readings.num_gated,
            "controllers": list(self.controller_status()),
            "latches": self._readings.latches,
            "queue": self.queue_status(),
        }

    def _export(self, name: str) -> dict[str, Any] | None:
        """Return a rule as ``register_rule`` takes it, to register it again; None if there is none of that name."""
        found = self._state.rules.find(name)
        return None if found is None else found.rule.to_wire()

    def _audited(self, rule: KeptRule) -> dict[str, Any]:
        hashes = {"prefill": rule.sha256, "decode": rule.sha256}
        return {**rule.described(), "hash": hashes, "version": self._state.version}

    def _to_workers(
        self, rules: Iterable[KeptRule], beside: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        return {"rules": [*(rule.to_worker() for rule in rules), *(self._beside if beside is None else beside)]}
