"""Gates of requests in an engine core: what the names in them stand for, and the programs that they become."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from headgate.capture.probe import Probe
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.content import Limits, check_phases, check_programs
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.core.resolved import NO_LATCHES, NOTHING_BROUGHT, Brought, Module, Resolved, resolved_of
from headgate.steering.core.rules.registry import KeptRule, kept_rule
from headgate.steering.core.saes import KeptPrograms, SaeRegistry, bytes_of
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.gates.conversations import Conversation, ConversationLatches, LatchKey
from headgate.steering.gates.gate import FeatureReading, Gate, GatesWire, ModuleThen, NamedProbe, Rule, gates_to_wire
from headgate.steering.gates.lowering import GatedPrograms, Own, lower_gates
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.operations import Lookup
from headgate.steering.programs.program import Program, joined
from headgate.steering.spec import SteeringSpec
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


class LoweredGates:
    """Programs of the last gates, by their content: many requests of a load bring the same. Any thread."""

    def __init__(self) -> None:
        self._kept: KeptPrograms[tuple[Registered, GatedPrograms]] = KeptPrograms()

    def find(self, key: bytes, now: Registered) -> GatedPrograms | None:
        """Return programs that were made with the same registered names; None if there are none."""
        found = self._kept.find(key)
        return found[1] if found is not None and found[0].is_same(now) else None

    def keep(self, key: bytes, registered: Registered, made: GatedPrograms) -> None:
        """Keep programs that were made with these registered names."""
        self._kept.keep(key, (registered, made), bytes_of(made.prefill, made.decode))


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
    def max_gates(self) -> int:
        """Gates that a request may have here; 0 if there can be none."""
        return self._steerable.max_gates

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self._steerable.hidden_size

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
        return lambda name, site: self._module(name, "steering_gates").vector_at(site, is_decode=phase == 1)

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
        lowered: Programs of gates that are no conversation's.
    """

    owner: str
    latches: ConversationLatches | None
    lowered: LoweredGates

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


def gated(
    static: Ungated, wire: GatesWire | None, content: GateContent, limits: Limits, num_prompt: int, owned: Owned
) -> Resolved:
    """Return a request's steering with its gates.

    Args:
        static: The request's.
        wire: The gates as they came; None if they did not.
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
            "this engine takes no gates: its layers lie on several pipeline stages; start it with tensor parallelism",
        )
    keys = owned.keys(gates, content)
    made = _lowered(static, gates_to_wire(gates) if wire is None else wire, content, owned, keys)
    if made.takes_own:
        static = Ungated()
    first, second = static.own
    prefill = made.prefill if first is None else joined([first, made.prefill])
    is_alike = second is first and made.decode is made.prefill
    decode = prefill if is_alike else made.decode if second is None else joined([second, made.decode])
    own = prefill, decode
    check_phases(static.brought.acting(own), limits, gates[0].where)
    return resolved_of(
        static.spec, own, static.brought, num_prompt, takes_own=made.takes_own, latch_keys=keys or NO_LATCHES
    )


def _lowered(
    static: Ungated, wire: GatesWire, content: GateContent, owned: Owned, keys: Mapping[str, LatchKey]
) -> GatedPrograms:
    """Return the programs of a request's gates, found by their content if nothing else decides what they are."""
    gates = static.spec.gates
    if keys or any(gate.then.attenuate is not None for gate in gates):
        return lower_gates(gates, content, content.dtype, _own(static), owned.latched(keys))
    key = hashlib.sha256(msgspec.msgpack.encode(wire)).digest()
    registered = content.registered
    made = owned.lowered.find(key, registered)
    if made is None:
        made = lower_gates(gates, content, content.dtype, _NO_OWN, {})
        if content.registered.is_same(registered):
            owned.lowered.keep(key, registered, made)
    return made


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
