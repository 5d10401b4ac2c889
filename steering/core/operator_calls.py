"""The operator's calls of one engine core: change global vectors and named modules, and report on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.admission import Reservations
from headgate.steering.core.audit import BY, OPERATOR, OWNED, Actor, Audit
from headgate.steering.core.content import demand_of
from headgate.steering.core.controllers.controllers import Controllers
from headgate.steering.core.probes import ProbeCalls
from headgate.steering.core.resolved import Module
from headgate.steering.core.rules.calls import RuleCalls
from headgate.steering.core.rules.step_readings import RequestReadings
from headgate.steering.core.saes import SaeCalls
from headgate.steering.core.state import PROGRAMS, GlobalTiers, SteeringState
from headgate.steering.spec import SteeringSpec, SteeringWire, from_wire, to_wire
from headgate.steering.vectors.phase_vectors import TIERS, Steerable, check_name

if TYPE_CHECKING:
    from headgate.capture.engine.core.part_services import CoreServices

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
    half of it. A change that fails is undone.

    Args:
        state: Holds global vectors and modules.
        reservations: Reservations of the slots.
        services: Calls the workers and restarts requests.
        audit: Notes the changes.
        steerable: The model, for SAEs that are registered; None if none can be.
        readings: Readings of steps; None makes new ones.

    Attributes:
        rules: The calls about rules.
        controllers: Controllers of the engine core; None if there are none.
    """

    def __init__(
        self,
        state: SteeringState,
        reservations: Reservations[str],
        services: CoreServices,
        audit: Audit,
        steerable: Steerable | None = None,
        readings: RequestReadings | None = None,
    ) -> None:
        self._readings = RequestReadings(state.rules) if readings is None else readings
        self._audit = audit
        self._state = state
        self._reservations = reservations
        self._services = services
        self._methods: dict[str, Callable[..., Any]] = {
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
            **SaeCalls(state.saes, steerable, services, lambda: state.version).methods,
            **ProbeCalls(state.probes, lambda: state.version).methods,
        }
        self.rules = RuleCalls(
            state,
            reservations,
            services,
            lambda name, do, undo: self._notify_workers((name, do), undo=(name, undo)),
            self._readings,
        )
        self._methods.update(self.rules.methods)
        self.controllers: Controllers | None = None

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
        by = Actor(**args[BY]) if BY in args else OPERATOR
        given = {key: value for key, value in args.items() if key != BY}
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

    def _export_module(self, name: str) -> SteeringWire:
        """Return a module's spec as ``register`` takes it, to register it again."""
        return to_wire(self._state.module(name).spec)

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
            "rule_rows": self.rules.rule_rows(),
            "gate_rows": self.rules.gate_rows(),
            "controllers": {} if self.controllers is None else self.controllers.figures(),
            "global_vectors": sum(len(vectors.sites) for vectors in (shared.prefill, shared.decode) if vectors),
        }


def _is_registered(state: SteeringState, method: str, name: Any) -> bool:
    """Whether a method that changes what belongs to a client finds it there."""
    if OWNED.get(method) == "probe":
        return state.probes.find(name) is not None
    if OWNED.get(method) == "rule":
        return state.rules.find(name) is not None
    return any(module.name == name for module in state.modules())


def _keep(module: Module) -> _WorkerCall:
    return "keep_module", {"name": module.name, "spec": to_wire(module.spec)}
