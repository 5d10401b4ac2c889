"""Global vectors and named modules of one engine core, which is the authority for both.

Requests name modules; here the names are resolved to content, once, when the engine core takes the request. So a name
that is registered anew steers later requests only, and never shares KV or vectors with its earlier content.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.content import (
    NO_ENTRIES,
    Limits,
    check_limit,
    check_phases,
    check_shared,
    demand_of,
    described,
)
from headgate.steering.core.gates import GateCache, GateContent, KnownGates, Owned, Ungated, gated
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.core.resolved import (
    Brought,
    Module,
    ModuleRegistry,
    Resolved,
    check_positions,
    check_scales,
    resolved_of,
)
from headgate.steering.core.rules.registry import RuleRegistry
from headgate.steering.core.saes import SaeRegistry
from headgate.steering.documents.features import MODULE_FEATURES
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.gate import COLUMNS_PER_GATE
from headgate.steering.programs.lowering import lower
from headgate.steering.programs.operations import Lookup
from headgate.steering.programs.program import Program, joined
from headgate.steering.spec import SteeringSpec
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import TIERS, PhaseVectors, Steerable, weighted_sum
from headgate.steering.vectors.sums import merge_over, peak, without

Programs = tuple[Program | None, Program | None]
"""Programs of the prefill and of the decode phase."""

NO_PROGRAMS: Programs = (None, None)

PROGRAMS = (*TIERS, *MODULE_FEATURES.all)
"""Names of the global programs, in the order in which they act: operations by tier, features and reconstructions by the
fields that set them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTiers:
    """Vectors, operations and features that act on every request. Immutable: a change makes new ones.

    Attributes:
        base: In both phases.
        prefill: Added to it at positions of the prompt.
        decode: Added to it at generated positions.
        programs: By names of `PROGRAMS`.
    """

    base: PhaseVectors | None = None
    prefill: PhaseVectors | None = None
    decode: PhaseVectors | None = None
    programs: Mapping[str, Programs] = field(default_factory=dict)

    def updated(self, update: GlobalTiers, cleared: Mapping[str, Collection[Site]], *, replace: bool) -> GlobalTiers:
        """Return these tiers with `update` in place of what they had; with `replace`, `update` alone.

        Vectors take the place of those at the same site, programs that of those of their name.

        Args:
            update: To set.
            cleared: Sites whose vectors to take back, by tier.
            replace: Take back everything that `update` does not set.
        """
        if replace:
            return update
        kept = {name: without(getattr(self, name), cleared.get(name, ())) for name in TIERS}
        vectors = {name: merge_over(kept[name], getattr(update, name)) for name in TIERS}
        return GlobalTiers(**vectors, programs={**self.programs, **update.programs})

    def spec_of(self, name: str) -> SteeringSpec | None:
        """Return one of `PROGRAMS`, and a tier's vectors as those of the prefill phase; None if there is nothing."""
        prefill, decode = self.programs.get(name, NO_PROGRAMS)
        vectors = getattr(self, name) if name in TIERS else None
        spec = SteeringSpec(prefill=vectors, prefill_program=prefill, decode_program=decode)
        return None if spec.is_empty else spec

    def phases(self, dtype: StoredType, field: str) -> SteeringSpec:
        """Return the sums, and the programs, that act in each phase.

        Raises:
            RequestError: If a sum leaves what `dtype`, the model's, can hold beside a request's vectors.
        """
        try:
            prefill = weighted_sum([(self.base, 1.0), (self.prefill, 1.0)])
            decode = weighted_sum([(self.base, 1.0), (self.decode, 1.0)])
        except OverflowError as error:
            raise RequestError(field, str(error)) from error
        check_limit(max(peak(prefill), peak(decode)), dtype, field)
        return SteeringSpec(
            prefill=prefill,
            decode=decode,
            prefill_program=self._program(0),
            decode_program=self._program(1),
        )

    def _program(self, phase: int) -> Program | None:
        acting = [found for name in PROGRAMS if (found := self.programs.get(name, NO_PROGRAMS)[phase]) is not None]
        return joined(acting) if acting else None


class GlobalKeys(NamedTuple):
    """The global vectors of one moment.

    Attributes:
        version: `SteeringState.version` when they were set; block hashes made under another one are stale.
        prefill: Content key of the vectors of the prefill phase; None if there are none.
        decode: The same for the decode phase.
    """

    version: int = 0
    prefill: bytes | None = None
    decode: bytes | None = None


class SteeringState:
    """Global vectors, named modules, and the content that requests still refer to.

    Requests are resolved on the thread that takes them in, and everything else happens on the engine core's own: the
    lock guards the modules and who refers to their content. `global_keys` is replaced as a whole, so any thread reads
    a consistent one.

    Args:
        dtype: The model's.
        limits: What a request's programs may hold at one site.
        steerable: The model; None if there can be no gates.
        latches: Latches of gates in conversations; None if these are not served.

    Attributes:
        limits: As given.
        steerable: As given.
        saes: The SAEs whose features can be changed.
        probes: The probes that gates can name.
        latches: As given.
        rules: Gates that act on requests which did not ask.
        gates: The gates that requests brought last.
        tiers: The global vectors.
        shared: The sums of `tiers` that act in each phase.
        version: Counts changes, of global vectors and of modules.
        global_keys: Content keys of the global vectors, and the version they date from.
    """

    def __init__(
        self,
        dtype: StoredType,
        limits: Limits = NO_ENTRIES,
        steerable: Steerable | None = None,
        latches: ConversationLatches | None = None,
    ) -> None:
        self.limits = limits
        self.steerable = steerable
        self.saes = SaeRegistry(dtype, limits.features)
        self.probes = ProbeRegistry()
        self.latches = latches
        self.rules = _rule_registry(steerable)
        self.tiers = GlobalTiers()
        self.shared = SteeringSpec()
        self.version = 0
        self.global_keys = GlobalKeys()
        self._dtype: StoredType = dtype
        self._registry = ModuleRegistry()
        self.gates = GateCache()

    def global_phases(self, tiers: GlobalTiers, field: str = "global") -> SteeringSpec:
        """Return what acts of `tiers` in each phase, to reserve its slots before `set_global`.

        Raises:
            RequestError: As `GlobalTiers.phases`, and on operations that cannot act on everybody.
        """
        spec = tiers.phases(self._dtype, field)
        for program in (spec.prefill_program, spec.decode_program):
            check_shared([program] if program else [], self.limits, "the global state", field)
        return spec

    def lowered(self, spec: SteeringSpec) -> Programs:
        """Return a spec's programs of both phases, with vectors of modules looked up.

        Raises:
            RequestError: On an unknown module, or a site at which it has no vector.
        """
        features = self._features(spec)
        with self._registry.lock:
            return self._programs(spec, features)

    def set_global(self, tiers: GlobalTiers) -> None:
        """Make `tiers` the global vectors; ``GlobalTiers()`` clears them."""
        self.shared = self.global_phases(tiers)
        self.tiers = tiers
        with self._registry.lock:
            self.version += 1
        demand = demand_of(self.shared)
        prefill, decode = (load.key if load else None for load in (demand.prefill, demand.decode))
        self.global_keys = GlobalKeys(self.version, prefill, decode)

    def global_status(self) -> dict[str, object]:
        """Return sites and content keys of the global vectors, plain values."""
        specs = {name: spec for name in TIERS if (spec := self.tiers.spec_of(name)) is not None}
        return {
            "version": self.global_keys.version,
            "tiers": {name: [site.name for site in spec.prefill.sites] for name, spec in specs.items() if spec.prefill},
            **described(self.shared),
        }

    def read_module(self, name: str, spec: SteeringSpec, field: str = "module") -> Module:
        """Return the module that `name` would be, to reserve its slots before `register`.

        Raises:
            RequestError: If it names other modules, holds nothing but zeros, or is too large for the model's dtype.
        """
        if spec.modules:
            raise RequestError(field, f"module {name!r} refers to other modules; give their vectors instead")
        programs = self.lowered(spec)
        if not any((spec.prefill, spec.decode, *programs)):
            raise RequestError(field, f"module {name!r} has no vector other than zero, no operation and no feature")
        for program in programs:
            check_shared([program] if program else [], self.limits, f"module {name!r}", field)
        largest = max(peak(spec.prefill), peak(spec.decode))
        check_limit(largest, self._dtype, field)
        return Module(
            name=name,
            prefill=spec.prefill,
            decode=spec.decode,
            peak=largest,
            version=self.version + 1,
            prefill_program=programs[0],
            decode_program=programs[1],
        )

    def register(self, module: Module) -> None:
        """Register a module, in place of an earlier one of its name."""
        with self._registry.lock:
            self._registry.put(module)
            self.version += 1

    def unregister(self, name: str, field: str = "name") -> Module:
        """Forget a module; requests that were resolved keep its content.

        Raises:
            RequestError: If there is none of that name.
        """
        with self._registry.lock:
            module = self._registry.remove(name, field)
            self.version += 1
        return module

    def modules(self) -> tuple[Module, ...]:
        """Return all modules, in the order of their names."""
        with self._registry.lock:
            return self._registry.all()

    def module(self, name: str, field: str = "name") -> Module:
        """Return the module of that name.

        Raises:
            RequestError: If there is none of that name.
        """
        with self._registry.lock:
            return self._registry.find(name, field)

    def resolve(
        self,
        req_id: str,
        spec: SteeringSpec,
        num_prompt: int,
        field: str = "steering_module_ref",
        owner: str = "",
        gates: KnownGates | None = None,
    ) -> Resolved:
        """Resolve the names in a request's spec to content, and keep that content until `release`.

        Args:
            req_id: The request's.
            spec: With names.
            num_prompt: Length of its prompt, for positions of operations.
            field: The field's name in errors about modules.
            owner: Name of the client's key; empty without one. Conversations of gates are its own.
            gates: Those of the spec, if `gates` has read them.

        Raises:
            RequestError: On an unknown name, if the sum could leave what the model's dtype can hold, on operations that
                cannot act on such a prompt, or on too many at one site.
        """
        largest = max(peak(spec.prefill), peak(spec.decode))
        features = self._features(spec)
        with self._registry.lock:
            named = [(self._registry.find(ref.name, field), ref.scale) for ref in spec.modules]
            check_limit(largest + sum(abs(scale) * module.peak for module, scale in named), self._dtype, field)
            check_scales(named, field)
            own = self._programs(spec, features)
            check_positions(own, num_prompt, self.steerable)
            brought = Brought.by(named)
            check_phases(brought.acting(own), self.limits, field)
            self._registry.hold(req_id, brought.keys)
            modules, version = self._registry.by_name, self.version
        if not spec.gates:
            return resolved_of(spec, own, brought, num_prompt)
        try:
            content = GateContent(self.steerable, self.probes, self.saes, modules, version)
            owned = Owned(owner, self.latches, self.gates)
            return gated(Ungated(spec, own, brought), gates, content, self.limits, num_prompt, owned)
        except BaseException:
            self.release(req_id)
            raise

    def release(self, req_id: str) -> None:
        """Stop keeping the content of a request that was freed or refused, if it refers to any."""
        with self._registry.lock:
            self._registry.release(req_id)

    @property
    def has_unused(self) -> bool:
        """Whether there are contents without a reference."""
        return self._registry.has_unused

    def take_unused(self) -> tuple[bytes, ...]:
        """Return the keys of contents without a reference, sorted, each once: workers can forget them."""
        with self._registry.lock:
            return self._registry.take_unused()

    def _features(self, spec: SteeringSpec) -> Programs:
        """Return the programs of a spec's edits of features; they may be read from a disk, so without the lock."""
        if not spec.prefill_features and not spec.decode_features:
            return NO_PROGRAMS
        prefill = self.saes.program(spec.prefill_features)
        if spec.decode_features is spec.prefill_features:
            return prefill, prefill
        return prefill, self.saes.program(spec.decode_features)

    def _programs(self, spec: SteeringSpec, features: Programs) -> Programs:
        """Return a spec's programs of both phases, with vectors of modules looked up; the lock is held."""

        def vectors_of(phase: int) -> Lookup:
            return lambda name, site: self._registry.find(name, "steering_ops").vector_at(
                site, self.steerable, is_decode=phase == 1
            )

        prefill = lower(spec.prefill_ops, self._dtype, vectors_of(0)) if spec.prefill_ops else spec.prefill_program
        decode = lower(spec.decode_ops, self._dtype, vectors_of(1)) if spec.decode_ops else spec.decode_program
        own = zip((prefill, decode), features, strict=True)
        first, second = ([program for program in pair if program is not None] for pair in own)
        return joined(first) if first else None, joined(second) if second else None


def _rule_registry(steerable: Steerable | None) -> RuleRegistry:
    """Return the registry of an engine core's rules, whose columns come after those of requests."""
    if steerable is None or not steerable.op_sites:
        return RuleRegistry()
    max_rules = steerable.max_rules
    return RuleRegistry(COLUMNS_PER_GATE * steerable.max_gates, COLUMNS_PER_GATE * max_rules, max_rules)
