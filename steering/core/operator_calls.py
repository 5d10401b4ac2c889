"""The operator's calls of one engine core: change global vectors and what has a name, and report on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headgate.capture.probe import Probe
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.config import cross_stages
from headgate.steering.core.admission import Reservations
from headgate.steering.core.audit import ACTIONS, BY, OPERATOR, OWNED, Actor, Audit
from headgate.steering.core.content import demand_of
from headgate.steering.core.gates import GateContent, lowered_rule
from headgate.steering.core.probes import described, refuse_unfit
from headgate.steering.core.resolved import Module
from headgate.steering.core.rules.registry import KeptRule
from headgate.steering.core.rules.step_readings import RequestReadings
from headgate.steering.core.saes import NO_SAES, Sae, open_sae
from headgate.steering.core.state import PROGRAMS, GlobalTiers, SteeringState
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.gates.gate import Rule, fields_of_rule, rule_key
from headgate.steering.gates.step_table import ReportedCounts
from headgate.steering.programs.wire import ContentWire, content_from_wire, content_to_wire
from headgate.steering.spec import SteeringSpec, SteeringWire, from_wire, to_wire
from headgate.steering.vectors.phase_vectors import TIERS, check_name

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.core_part import CoreServices
    from headgate.steering.core.controllers.controllers import Controllers

_PROBE = "headgate-probe"
"""Stands for the id of a request that is not there."""

_ANY_LENGTH = 1 << 30
"""Length of a prompt in which every position exists; the real one is looked at when the request comes."""

SiteNames = Sequence[str]

_NONE: Mapping[str, SiteNames] = {}

_WorkerCall = tuple[str, Mapping[str, Any]]
"""A method of steering's workers, and its arguments."""


class OperatorCalls:
    """The methods that front ends call by name. Engine thread only.

    Each change reserves slots first, then notifies the workers, and last changes the state, so that no request finds
    half of it. A change that fails is undone. Workers hold no SAEs: the programs that requests and modules bring hold
    the rows of their features.

    Args:
        state: Holds global vectors, modules, SAEs, probes and rules.
        reservations: Reservations of the slots.
        services: Calls the workers and restarts requests.
        audit: Notes the changes.
        readings: Readings of steps, for which a change of rules counts from the next step on; None makes new ones.

    Attributes:
        controllers: Controllers of the engine core; None if there are none.
    """

    def __init__(
        self,
        state: SteeringState,
        reservations: Reservations[str],
        services: CoreServices,
        audit: Audit,
        readings: RequestReadings | None = None,
    ) -> None:
        self._readings = RequestReadings(state.rules) if readings is None else readings
        self._audit = audit
        self._state = state
        self._reservations = reservations
        self._services = services
        self._methods = self._by_name()
        self._beside: Sequence[Mapping[str, Any]] = ()
        self.controllers: Controllers | None = None

    def _by_name(self) -> dict[str, Callable[..., Any]]:
        state, audit = self._state, self._audit
        return {
            "set_global": self._set_global,
            "clear_global": lambda: self._set_global({}, replace=True),
            "register": self._register,
            "unregister": self._unregister,
            "modules": self._modules,
            "names": self._names,
            "status": self._status,
            "counts": self._counts,
            "check": self._check,
            "export_global": self._export_global,
            "export_module": self._export_module,
            "audit": audit.entries,
            "owner": audit.owner_of,
            "register_sae": self._register_sae,
            "unregister_sae": self._unregister_sae,
            "saes": lambda: [sae.described() for sae in state.saes.all()],
            "register_probe": self._register_probe,
            "unregister_probe": self._unregister_probe,
            "probes": lambda: [described(name, probe) for name, probe in state.probes.all().items()],
            "export_probe": self._export_probe,
            "register_rule": self._register_rule,
            "unregister_rule": self._unregister_rule,
            "rules": lambda: [rule.described() for rule in state.rules.all()],
            "export_rule": self._export_rule,
            "dynamic": self._dynamic,
        }

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Run one of the methods by its name, such as ``register``; plain values and bytes go in and come out.

        The argument `BY` says who asks.

        Raises:
            ForbiddenError: If a change is not this client's to make. Nothing has changed.
            RequestError: If the method is unknown, or refuses. Nothing has changed.
            Exception: What a worker raised. Nothing has changed.
        """
        if method not in self._methods:
            raise RequestError("method", f"steering has no method {method!r}; known: {', '.join(self._methods)}")
        self.forget_unused()
        given = {key: value for key, value in args.items() if key != BY}
        if method not in ACTIONS:
            return self._methods[method](**given)
        by = Actor(**args[BY]) if BY in args else OPERATOR
        name = given.get("name")
        self._audit.check(method, name, by, is_registered=_is_registered(self._state, method, name))
        answer = self._methods[method](**given)
        self._audit.note(method, name, by, answer)
        return answer

    def register(self, name: str, spec: SteeringSpec) -> Module:
        """Register a module, in place of an earlier one of its name.

        Raises:
            RequestError: If it cannot be one, or its slots are not free. Nothing has changed.
            Exception: What a worker raised. Nothing has changed.
        """
        module = self._state.read_module(name, spec)
        earlier = next((one for one in self._state.modules() if one.name == name), None)
        self._reservations.keep_module(name, module.demand, "module")
        try:
            undo = ("release_module", {"name": name}) if earlier is None else _keep(earlier)
            self._notify_workers(_keep(module), undo=undo)
        except BaseException:
            if earlier is None:
                self._reservations.release_module(name)
            else:
                self._reservations.keep_module(name, earlier.demand, "module")
            raise
        self._state.register(module)
        self.forget_unused()
        return module

    def forget_unused(self) -> None:
        """Let the workers forget contents without a reference."""
        if keys := self._state.take_unused():
            self._services.call_workers("forget", {"keys": list(keys)})

    def _notify_workers(self, order: _WorkerCall, *, undo: _WorkerCall) -> None:
        """Have every worker do `order`; if one fails, `undo` it in all, and if that fails, let the engine end."""
        try:
            self._services.call_workers(*order)
        except BaseException as error:
            try:
                self._services.call_workers(*undo)
            except BaseException:
                self._services.fail(f"steering: workers may differ after {order[0]!r} failed in one: {error}")
                raise
            raise

    def _set_global(
        self,
        tiers: Mapping[str, Any],
        replace: bool,
        cleared: Mapping[str, SiteNames] = _NONE,
        programs: Sequence[str] = PROGRAMS,
    ) -> dict[str, Any]:
        """Set `tiers`, as `GlobalTiers.spec_of` and `to_wire` make them, or None; `replace`: in place of all there are.

        Vectors at sites in `cleared`, names by tier, are taken back; those of the programs `PROGRAMS` that are named in
        `programs` are replaced.

        Everybody's KV is computed anew, also for a decode-only change: a block must not mix old and new vectors.
        """
        specs = {name: from_wire(tiers.get(name) or {}) for name in PROGRAMS}
        for spec in specs.values():
            self._state.saes.check_shared((*spec.prefill_features, *spec.decode_features))
        given = GlobalTiers(
            **{name: specs[name].prefill for name in TIERS},
            programs={name: self._state.lowered(specs[name]) for name in programs},
        )
        sites = {tier: frozenset(map(Site.parse, names)) for tier, names in cleared.items()}
        changed = self._state.tiers.updated(given, sites, replace=replace)
        field = next((name for name in programs if name not in TIERS), "global")
        before, after = self._state.shared, self._state.global_phases(changed, field)
        is_same = demand_of(before) == demand_of(after)
        if not is_same:
            self._services.prepare_change("global")
            self._reservations.set_global(demand_of(after), "global")
            try:
                self._notify_workers(
                    ("set_global", {"spec": to_wire(after)}), undo=("set_global", {"spec": to_wire(before)})
                )
            except BaseException:
                self._reservations.set_global(demand_of(before), "global")
                raise
        self._state.set_global(changed)
        if not is_same:
            if self.controllers is not None:
                self.controllers.global_changed()
            self._services.restart_running()
        return self._status()

    def _register(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Register ``to_wire(spec)`` as `name`; returns `headgate.steering.core.state.Module.described`."""
        return self.register(check_name(name, "name"), from_wire(spec)).described()

    def _unregister(self, name: str) -> dict[str, Any]:
        """Forget a module; requests that use it already keep its vectors."""
        module = self._state.module(name)
        self._notify_workers(("release_module", {"name": name}), undo=_keep(module))
        self._state.unregister(name)
        self._reservations.release_module(name)
        self.forget_unused()
        return module.described()

    def _check(self, spec: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Refuse, for `field`, a ``to_wire(spec)`` that a request would be refused for now."""
        resolved = self._state.resolve(_PROBE, from_wire(spec), _ANY_LENGTH, field)
        self._state.release(_PROBE)
        self._reservations.check(resolved.demand, field)
        return {}

    def _modules(self) -> list[dict[str, Any]]:
        """Return the registered modules."""
        return [module.described() for module in self._state.modules()]

    def _names(self) -> list[dict[str, Any]]:
        """Return names for front ends: modules, each with its largest magnitude as ``peak``, SAEs, probes and rules."""
        modules = [{"name": module.name, "peak": module.peak} for module in self._state.modules()]
        return [*modules, *self._state.saes.names(), *self._state.probes.names(), *self._state.rules.names()]

    def _export_global(self) -> dict[str, Any]:
        """Return the tiers as ``set_global`` takes them, to set them again."""
        specs = {name: self._state.tiers.spec_of(name) for name in PROGRAMS}
        return {name: None if spec is None else to_wire(spec) for name, spec in specs.items()}

    def _export_module(self, name: str) -> SteeringWire | None:
        """Return a module's spec as ``register`` takes it, to register it again; None if there is none of that name."""
        return next((to_wire(module.spec) for module in self._state.modules() if module.name == name), None)

    def _status(self) -> dict[str, Any]:
        """Return global vectors, modules, slots, and the numbers of requests that have slots and that wait for them."""
        return {
            "global": self._state.global_status(),
            "modules": self._modules(),
            "saes": {sae.name: sae.sha256 for sae in self._state.saes.all()},
            "probes": {name: probe.sha256 for name, probe in self._state.probes.all().items()},
            "rules": {rule.name: rule.sha256 for rule in self._state.rules.all()},
            "slots": {"capacity": self._reservations.capacity, "reserved": self._reservations.num_reserved},
            "configs": self._reservations.num_configs,
            "running": self._reservations.num_admitted,
            "waiting": self._reservations.num_waiting,
        }

    def _counts(self) -> dict[str, Any]:
        """Return the numbers of the metrics page, without lists: they are asked for while the engine waits."""
        shared = self._state.shared
        return {
            "slots": self._reservations.capacity,
            "slots_reserved": self._reservations.num_reserved,
            "configs": self._reservations.num_configs,
            "requests_running": self._reservations.num_admitted,
            "requests_waiting": self._reservations.num_waiting,
            "modules": len(self._state.modules()),
            "rule_rows": self._rule_rows(),
            "gate_rows": self._gate_rows(),
            "controllers": {} if self.controllers is None else self.controllers.figures(),
            "global_vectors": sum(len(vectors.sites) for vectors in (shared.prefill, shared.decode) if vectors),
        }

    def _register_sae(self, name: str, path: str, site: str | None, sha256: str | None) -> dict[str, Any]:
        """Open the SAE at a path, whose checksum the front end computed; earlier requests keep what they read."""
        check_name(name, "name", "an SAE")
        steerable = self._state.steerable
        if steerable is None or not steerable.max_sae_features:
            raise RequestError("name", NO_SAES)
        earlier = self._state.saes.find(name)
        if earlier is not None and earlier.is_encoded:
            raise RequestError(
                "name", f"SAE {name!r} is encoded in full (--sae-encode), which is settled at start; use another name"
            )
        try:
            sae = open_sae(name, Path(path), None if site is None else Site.parse(site), steerable, sha256)
        except (OSError, FeatureFileError) as error:
            raise RequestError("path", str(error)) from error
        self._check_stages(sae)
        self._state.saes.put(sae)
        return {**sae.described(), **self._audited(sae.sha256)}

    def _check_stages(self, sae: Sae) -> None:
        facts, steerable = sae.facts, self._state.steerable
        if facts.is_transcoder and steerable is not None and not steerable.is_in_one_stage(facts.sites):
            raise RequestError("path", cross_stages(facts.sites))

    def _unregister_sae(self, name: str) -> dict[str, Any]:
        """Forget an SAE, if it is there: where one engine core could not register it, the others take it back."""
        self._state.saes.remove(name)
        return self._audited(None)

    def _register_probe(self, name: str, probe: ContentWire) -> dict[str, Any]:
        """Register a `Probe` in its wire form; requests that run keep what they read."""
        made = content_from_wire(Probe, probe)
        if self._state.steerable is not None:
            refuse_unfit(made, self._state.steerable)
        self._state.probes.put(check_name(name, "name", "a probe"), made)
        return {**described(name, made), **self._audited(made.sha256)}

    def _unregister_probe(self, name: str) -> dict[str, Any]:
        """Forget a probe; requests that run keep what they read."""
        found = self._state.probes.find(name)
        if found is None:
            known = ", ".join(self._state.probes.all()) or "none"
            raise RequestError("name", f"unknown probe {name!r}; registered: {known}")
        self._state.probes.remove(name)
        return {**described(name, found), **self._audited(found.sha256)}

    def _export_probe(self, name: str) -> ContentWire | None:
        """Return a probe as ``register_probe`` takes it, to register it again; None if there is none of that name."""
        found = self._state.probes.find(name)
        return None if found is None else content_to_wire(found)

    def register_rule(self, rule: Rule) -> KeptRule:
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
            self._change_rules(rules.with_rule(made))
        except BaseException:
            if earlier is None:
                self._reservations.release_module(key)
            else:
                self._reservations.keep_module(key, earlier.demand, "then", is_rule=True)
            raise
        return made

    def _register_rule(self, name: str, rule: ContentWire) -> dict[str, Any]:
        """Register a `Rule` in its wire form; requests that run are steered by it from their next row on."""
        read = content_from_wire(Rule, rule)
        if read.name != check_name(name, "name", "a rule"):
            raise AssertionError(f"a rule {read.name!r} as {name!r}")
        made = self.register_rule(read)
        return {**made.described(), **self._audited(made.sha256)}

    def _unregister_rule(self, name: str) -> dict[str, Any]:
        """Forget a rule; it acts on nothing from the next step on."""
        rules = self._state.rules
        found = rules.find(name)
        if found is None:
            known = ", ".join(rule.name for rule in rules.all()) or "none"
            raise RequestError("name", f"unknown rule {name!r}; registered: {known}")
        self._services.prepare_change("name")
        self._change_rules(rules.without(name))
        self._reservations.release_module(rule_key(name))
        return {**found.described(), **self._audited(found.sha256)}

    def _change_rules(self, rules: Mapping[str, KeptRule]) -> None:
        """Have the workers and the state change to `rules`, between two steps; no step is in flight."""
        self._readings.settle()
        earlier = self._state.rules.all()
        self._set_rules(self._to_workers(rules.values()), undo=self._to_workers(earlier))
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
        self._set_rules(self._to_workers(rules, programs), undo=self._to_workers(rules))
        self._beside = tuple(programs)

    def _gate_rows(self) -> dict[str, int]:
        """Return the rows that the gates of requests wrote, by name; workers are asked what they have counted."""
        if self._readings.awaits_counts:
            for counts in self._services.call_workers("ask_counts", {}):
                self._readings.take_counts(cast("list[ReportedCounts]", counts))
        return dict(self._readings.counts.gates)

    def _rule_rows(self) -> dict[str, int]:
        """Return the rows that each rule wrote, those of rules that are off now included."""
        known = dict.fromkeys((rule.name for rule in self._state.rules.all()), 0)
        return {**known, **self._readings.counts.rules}

    def _dynamic(self) -> dict[str, Any]:
        """Return what reads and acts now, with the rows that it wrote so far."""
        rows = self._rule_rows()
        return {
            "probes": list(self._state.probes.all()),
            "rules": [{**rule.described(), "rows": rows[rule.name]} for rule in self._state.rules.all()],
            "gates": self._gate_rows(),
            "requests_with_gates": self._readings.num_gated,
            "controllers": [] if self.controllers is None else list(self.controllers.status()),
            "latches": self._readings.latches,
            "queue": None if self.controllers is None else self.controllers.queue(),
        }

    def _export_rule(self, name: str) -> ContentWire | None:
        """Return a rule as ``register_rule`` takes it, to register it again; None if there is none of that name."""
        found = self._state.rules.find(name)
        return None if found is None else content_to_wire(found.rule)

    def _set_rules(self, rules: Mapping[str, Any], *, undo: Mapping[str, Any]) -> None:
        self._notify_workers(("set_rules", rules), undo=("set_rules", undo))

    def _to_workers(
        self, rules: Iterable[KeptRule], beside: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        return {"rules": [*(rule.to_worker() for rule in rules), *(self._beside if beside is None else beside)]}

    def _audited(self, sha256: str | None) -> dict[str, Any]:
        """Return what the audit notes of a change of an SAE, a probe or a rule."""
        return {"hash": {"prefill": sha256, "decode": sha256}, "version": self._state.version}


def made_rule(state: SteeringState, rule: Rule) -> KeptRule:
    """Return a rule with its programs, to reserve its slots before it is registered.

    Raises:
        RequestError: If something that it names is not there, there is no room for its columns or entries, or the
            engine takes no rules.
    """
    if state.steerable is not None and not state.steerable.max_rules:
        raise RequestError(
            "name",
            "this engine takes no rules: --max-steering-rules is 0",
        )
    first = state.rules.place(rule)
    others = [each for each in state.rules.all() if each.name != rule.name]
    modules = {module.name: module for module in state.modules()}
    with fields_of_rule():
        content = GateContent(state.steerable, state.probes, state.saes, modules)
        return lowered_rule(rule, content, state.limits, first, others)


def _is_registered(state: SteeringState, method: str, name: Any) -> bool:
    """Whether a method that changes what belongs to a client finds it there."""
    if OWNED.get(method) == "probe":
        return state.probes.find(name) is not None
    if OWNED.get(method) == "rule":
        return state.rules.find(name) is not None
    return any(module.name == name for module in state.modules())


def _keep(module: Module) -> _WorkerCall:
    return "keep_module", {"name": module.name, "spec": to_wire(module.spec)}
