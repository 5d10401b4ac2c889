"""Gates of requests in an engine core: what the names in them stand for, and the programs that they become."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from headgate.capture.probe import Probe
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.content import Limits, check_phases, check_programs
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.core.resolved import (
    NO_LATCHES,
    NOTHING_BROUGHT,
    Brought,
    Module,
    Resolved,
    for_prompt,
    resolved_of,
)
from headgate.steering.core.rules.registry import KeptRule, kept_rule
from headgate.steering.core.saes import SaeRegistry
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.gates.conversations import Conversation, ConversationLatches, LatchKey
from headgate.steering.gates.gate import (
    FeatureReading,
    Gate,
    ModuleThen,
    NamedProbe,
    Rule,
    gates_key,
)
from headgate.steering.gates.lowering import GatedPrograms, Own, lower_gates
from headgate.steering.gates.trace import GateSource
from headgate.steering.lru_cache import LruCache
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.operations import Lookup
from headgate.steering.programs.program import MAX_KEPT_BYTES, Program, bytes_of, joined
from headgate.steering.programs.wire import ContentWire, content_from_wire, content_to_wire
from headgate.steering.spec import SteeringSpec, programs_to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable, weighted_sum


class Registered(NamedTuple):
    """Everything that is registered at a moment, for what depends on all of it; compare it by identity.

    Attributes:
        probes: By name; another object after each change.
        saes: Likewise.
        version: `SteeringState.version`, which counts changes of modules.
    """

    probes: Mapping[str, object]
    saes: Mapping[str, object]
    version: int

    def is_same(self, other: Registered) -> bool:
        """Whether nothing changed."""
        return self.probes is other.probes and self.saes is other.saes and self.version == other.version


class LoweredGates(NamedTuple):
    """Programs of gates that depend on nothing but registered names, and a request that has these gates alone.

    Attributes:
        registered: Everything that was registered then.
        made: Their programs.
        alone: A request that has nothing but these gates.
        num_prompt: Tokens of its prompt.
    """

    registered: Registered
    made: GatedPrograms
    alone: Resolved
    num_prompt: int


class KnownGates(NamedTuple):
    """Gates as a request brought them.

    Attributes:
        key: Their content key.
        gates: The gates.
        num_bytes: Length of their wire form, which they hold.
    """

    key: bytes
    gates: tuple[Gate, ...]
    num_bytes: int


class GateCache:
    """The last gates and what they became, by their content: many requests of a load bring the same. Any thread."""

    def __init__(self) -> None:
        self._kept: LruCache[tuple[KnownGates, LoweredGates | None]] = LruCache(MAX_KEPT_BYTES)

    def read(self, wire: ContentWire, key: bytes) -> KnownGates:
        """Return the gates of a wire form, with their content key."""
        if (found := self._kept.find(key)) is not None:
            return found[0]
        known = KnownGates(key, content_from_wire(tuple[Gate, ...], wire), len(msgspec.msgpack.encode(wire)))
        self._kept.keep(key, (known, None), known.num_bytes)
        return known

    def find(self, known: KnownGates, now: Registered) -> LoweredGates | None:
        """Return what gates became with the same registered names; None if that is not known."""
        _, lowered = self._kept.find(known.key) or (known, None)
        return lowered if lowered is not None and lowered.registered.is_same(now) else None

    def keep(self, known: KnownGates, lowered: LoweredGates) -> None:
        """Keep what gates became."""
        # Their programs are there once more in wire form.
        num_bytes = 2 * bytes_of(lowered.made.prefill, lowered.made.decode) + known.num_bytes
        self._kept.keep(known.key, (known, lowered), num_bytes)


class GateContent:
    """Implements `headgate.steering.gates.lowering.Content` for one request.

    Args:
        steerable: The model; None if there can be no gates.
        probes: Probes of the engine core.
        saes: Likewise.
        modules: By name, as they are when the request is taken in.
        version: `SteeringState.version` of the modules.
    """

    def __init__(
        self,
        steerable: Steerable | None,
        probes: ProbeRegistry,
        saes: SaeRegistry,
        modules: Mapping[str, Module],
        version: int = 0,
    ) -> None:
        if steerable is None:
            raise AssertionError("gates in an engine core that does not know its model")
        self._steerable = steerable
        self._probes = probes
        self._saes = saes
        self._modules = modules
        self._version = version

    @property
    def registered(self) -> Registered:
        """Everything that is registered now."""
        return Registered(self._probes.by_name, self._saes.by_name, self._version)

    @property
    def dtype(self) -> StoredType:
        """The model's."""
        return cast("StoredType", self._steerable.dtype)

    @property
    def has_drafts(self) -> bool:
        """Whether the engine verifies drafts."""
        return not self._steerable.knows_positions

    @property
    def max_gates(self) -> int:
        """Gates that a request may have here; 0 if there can be none."""
        return self._steerable.max_gates

    def width(self, site: Site) -> int:
        """See `Content.width`."""
        return self._steerable.width(site)

    def is_in_one_stage(self, sites: Iterable[Site]) -> bool:
        """See `Content.is_in_one_stage`."""
        return self._steerable.is_in_one_stage(sites)

    def why_unread(self, site: Site) -> str | None:
        """See `headgate.steering.vectors.phase_vectors.Steerable.why_unread`."""
        return self._steerable.why_unread(site)

    @property
    def op_sites(self) -> Sequence[Site]:
        """Declared sites, in the order of the forward pass."""
        return self._steerable.op_sites

    def probe(self, reading: NamedProbe) -> Probe:
        """See `Content.probe`."""
        found = self._probes.find(reading.name)
        if found is None:
            known = ", ".join(self._probes.all()) or "none"
            raise RequestError(reading.where, f"unknown probe {reading.name!r}; registered: {known}")
        return found

    def coder(self, reading: FeatureReading) -> tuple[SparseCoder, Site]:
        """See `Content.coder`."""
        sae = self._saes.find(reading.sae)
        if sae is None:
            known = ", ".join(each.name for each in self._saes.all()) or "none"
            raise RequestError(reading.where, f"unknown SAE {reading.sae!r}; registered: {known}")
        facts = sae.facts
        if reading.feature >= facts.num_features:
            raise RequestError(
                reading.where,
                f"SAE {sae.name!r} has the features 0 to {facts.num_features - 1}, got {reading.feature}",
            )
        if facts.decision == "none":
            raise RequestError(
                reading.where,
                f"SAE {sae.name!r} selects the largest activations of a row (top-k) and has no threshold, so one "
                "feature's activation is not known without all others; import it with --threshold",
            )
        return sae.coder, sae.site

    def vectors(self, phase: int) -> Lookup:
        """See `Content.vectors`."""
        return lambda name, site: self._module(name, "steering_gates").vector_at(
            site, self._steerable, is_decode=phase == 1
        )

    def module(self, then: ModuleThen, phase: int) -> tuple[PhaseVectors | None, Program | None]:
        """See `Content.module`."""
        found = self._module(then.name, then.where)
        return (found.decode, found.decode_program) if phase else (found.prefill, found.prefill_program)

    def features(self, edits: Sequence[FeatureEdit]) -> Program | None:
        """See `Content.features`."""
        return self._saes.program(edits)

    def _module(self, name: str, field: str) -> Module:
        found = self._modules.get(name)
        if found is None:
            known = ", ".join(sorted(self._modules)) or "none"
            raise RequestError(field, f"unknown steering module {name!r}; registered: {known}")
        return found


class Owned(NamedTuple):
    """A client's conversations, and what all clients share.

    Attributes:
        owner: Name of its key; empty without one.
        latches: Latches of all conversations; None if they are not served.
        cache: Gates that are no conversation's.
    """

    owner: str
    latches: ConversationLatches | None
    cache: GateCache

    def keys(self, gates: Sequence[Gate], content: GateContent) -> dict[str, LatchKey]:
        """Return the keys of gates that go on in a conversation, by their names.

        Raises:
            RequestError: If conversations are not served here.
        """
        found = {}
        for gate in gates:
            if gate.conversation is not None:
                if self.latches is None:
                    raise RequestError(
                        f"{gate.where}.scope",
                        "conversations are not served with data parallelism: their requests reach engines that know "
                        "nothing of one another; use rest_of_request",
                    )
                alone = lower_gates([gate], content, content.dtype, _NO_OWN, {})
                digest = hashlib.sha256(alone.prefill.key + alone.decode.key).digest()
                found[gate.name] = LatchKey(Conversation(self.owner, gate.conversation), digest)
        return found

    def latched(self, keys: Mapping[str, LatchKey]) -> dict[str, float]:
        """Return the strengths that were latched before, by the names of gates."""
        if self.latches is None:
            return {}
        return {name: found for name, key in keys.items() if (found := self.latches.find(key)) is not None}


_NO_OWN: tuple[Own, Own] = ((None, None), (None, None))


class Ungated(NamedTuple):
    """A request's steering without its gates.

    Attributes:
        spec: As it came, with the gates.
        own: Its own programs for prefill and decode.
        brought: Content of the modules that it names.
    """

    spec: SteeringSpec = SteeringSpec()
    own: tuple[Program | None, Program | None] = (None, None)
    brought: Brought = NOTHING_BROUGHT

    @property
    def is_nothing(self) -> bool:
        """Whether nothing acts but the gates."""
        spec = self.spec
        return spec.prefill is None and spec.decode is None and self.own == (None, None) and not self.brought.named


def gated(
    static: Ungated, known: KnownGates | None, content: GateContent, limits: Limits, num_prompt: int, owned: Owned
) -> Resolved:
    """Return a request's steering with its gates.

    Args:
        static: The request's.
        known: The gates as they came; None if they were not read from a wire form.
        content: Gives probes, modules and SAEs by name.
        limits: Limits of what its programs hold at one site.
        num_prompt: Tokens of its prompt.
        owned: The client's conversations, and the programs of the last gates.

    Raises:
        RequestError: Naming the field of a gate.
    """
    gates = static.spec.gates
    if not content.max_gates:
        raise RequestError(
            gates[0].where,
            "this engine takes no gates: --max-steering-gates is 0",
        )
    keys = owned.keys(gates, content)
    if keys or any(gate.then.attenuate is not None for gate in gates):
        made = lower_gates(gates, content, content.dtype, _own(static), owned.latched(keys))
    else:
        if known is None:
            wire = content_to_wire(gates)
            known = owned.cache.read(wire, gates_key(wire))
        lowered = _lowered(known, content, limits, num_prompt, owned.cache)
        if static.is_nothing:
            alone = lowered.alone if lowered.num_prompt == num_prompt else for_prompt(lowered.alone, num_prompt)
            return _drafted(alone, content, num_prompt)
        made = lowered.made
    if made.takes_own:
        static = Ungated()
    first, second = static.own
    prefill = made.prefill if first is None else joined([first, made.prefill])
    is_alike = second is first and made.decode is made.prefill
    decode = prefill if is_alike else made.decode if second is None else joined([second, made.decode])
    own = prefill, decode
    check_phases(static.brought.acting(own), limits, gates[0].where)
    source, latches = GateSource.of(made.columns, own), keys or NO_LATCHES
    made_of = static.spec, own, static.brought, num_prompt, source
    return _drafted(resolved_of(*made_of, takes_own=made.takes_own, latch_keys=latches), content, num_prompt)


def _lowered(
    known: KnownGates, content: GateContent, limits: Limits, num_prompt: int, cache: GateCache
) -> LoweredGates:
    """Return what gates became that neither attenuate nor go on in a conversation; it depends on nothing else."""
    registered = content.registered
    if (lowered := cache.find(known, registered)) is not None:
        return lowered
    made = lower_gates(known.gates, content, content.dtype, _NO_OWN, {})
    own = made.prefill, made.decode
    check_phases([[program] for program in own], limits, known.gates[0].where)
    source, wire = GateSource.of(made.columns, own), programs_to_wire(*own)
    alone = resolved_of(SteeringSpec(), own, NOTHING_BROUGHT, num_prompt, source, own_wire=wire)
    lowered = LoweredGates(registered, made, alone, num_prompt)
    if content.registered.is_same(registered):
        cache.keep(known, lowered)
    return lowered


def _drafted(resolved: Resolved, content: GateContent, num_prompt: int) -> Resolved:
    """Return a request's steering, if what acts on rows of drafts does not follow from rows computed with them.

    Raises:
        RequestError: Naming the gate's scope.
    """
    if not content.has_drafts or resolved.gates is None:
        return resolved
    early = resolved.gates.decode.early
    for gate in [column.gate for column in resolved.gates.columns.gates if column.column in early]:
        if not gate.is_constant_after_prompt:
            raise RequestError(
                f"{gate.where}.scope",
                "writes at sites before the one where it is evaluated, so what acts there follows from the row before; "
                "this engine decodes speculatively, and computes several rows of an answer together: write at later "
                "sites, or pool all that the gate reads over the prompt",
            )
        if num_prompt == 1:
            raise RequestError(
                f"{gate.where}.scope",
                "writes at sites before the one where it is evaluated; this engine decodes speculatively, and may "
                "compute rows of the answer together with the prompt, whose only token decides what acts on them: "
                "write at later sites, or send a prompt of two tokens or more",
            )
    return resolved


def lowered_rule(
    rule: Rule, content: GateContent, limits: Limits, first: int, others: Collection[KeptRule]
) -> KeptRule:
    """Return a rule with its programs.

    Args:
        rule: As it was read.
        content: Gives probes, modules and SAEs by name.
        limits: Limits of what all rules together turn on at one site.
        first: The first of its columns.
        others: The other rules.

    Raises:
        RequestError: Naming the field of the rule.
    """
    pairs = []
    for column in (first, 0):
        made = lower_gates([rule.gate], content, content.dtype, _NO_OWN, {}, column)
        pairs.append((made.prefill, made.decode))
        if content.has_drafts and GateSource.of(made.columns, pairs[-1]).decode.early:
            raise RequestError(
                "then",
                "writes at sites before the one where the rule is evaluated; this engine decodes speculatively, and "
                "computes several rows of an answer together: write at later sites",
            )
    if any(program.num_changes for program in pairs[0]):
        raise RequestError(
            "then",
            "changes features of a transcoder, whose places on the device belong to requests; use vectors or ops",
        )
    for program, known in zip(pairs[0], ([one.prefill for one in others], [one.decode for one in others]), strict=True):
        try:
            check_programs([*known, program], limits, "then")
        except RequestError as error:
            message = str(error).removeprefix("then: ").replace("modules", "other rules")
            raise RequestError("then", message) from error
    return kept_rule(rule, pairs[0], pairs[1], first)


def _own(static: Ungated) -> tuple[Own, Own]:
    """Return a request's static steering by phase, with that of the modules that it names."""
    spec, own, brought = static
    found = []
    for phase, vectors in enumerate((spec.prefill, spec.decode)):
        parts = brought.vectors[phase]
        programs = [one for program, scale in brought.programs[phase] if (one := program.scaled(scale)) is not None]
        programs += [] if (last := own[phase]) is None else [last]
        found.append((weighted_sum([(vectors, 1.0), *parts]), joined(programs) if programs else None))
    return found[0], found[1]
