"""A request's steering in terms of content: its spec with the names in it looked up; and the keys of its KV blocks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import check_known
from headgate.capture.schema.sites import Site
from headgate.steering.core.admission import Demand, Load
from headgate.steering.core.content import demand_of, described, load_of
from headgate.steering.core.rules.registry import NO_RULES, RuleKeys
from headgate.steering.gates.conversations import LatchKey
from headgate.steering.gates.trace import GateSource
from headgate.steering.programs.operations import Float32Row
from headgate.steering.programs.program import Program
from headgate.steering.spec import SteeringSpec, SteeringWire
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A registered module.

    Attributes:
        name: Its name in requests.
        prefill: Its vectors at positions of the prompt.
        decode: Its vectors at generated positions.
        peak: Largest magnitude of any value of its vectors.
        version: `SteeringState.version` when it was registered.
        prefill_program: Its operations at positions of the prompt.
        decode_program: Its operations at generated positions.
    """

    name: str
    prefill: PhaseVectors | None
    decode: PhaseVectors | None
    peak: float
    version: int
    prefill_program: Program | None = None
    decode_program: Program | None = None
    _about: Mapping[str, object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: a list of many modules is made while the engine waits.
        object.__setattr__(self, "_about", described(self.spec))

    @property
    def spec(self) -> SteeringSpec:
        """Vectors and operations, as they were registered."""
        return SteeringSpec(
            prefill=self.prefill,
            decode=self.decode,
            prefill_program=self.prefill_program,
            decode_program=self.decode_program,
        )

    @property
    def demand(self) -> Demand:
        """The slots that the module holds while it is registered."""
        return demand_of(self.spec)

    def vector_at(self, site: Site, steerable: Steerable | None, *, is_decode: bool) -> Float32Row | None:
        """Return the module's vector at a site: that of the phase, or else of the other one; None if it has none."""
        for vectors in (self.decode, self.prefill) if is_decode else (self.prefill, self.decode):
            if vectors is not None and site in vectors.sites:
                row: Float32Row = vectors.float32()[vectors.sites.index(site)]
                return row if steerable is None else row[: steerable.width(site)]
        return None

    def described(self) -> dict[str, object]:
        """Return plain values for the list of modules."""
        return {"name": self.name, "version": self.version, **self._about}


class ModuleRegistry:
    """Registered modules by name, and who uses their content, which outlives them. The caller holds `lock`.

    Attributes:
        lock: Guards everything here.
        by_name: All modules; another object after each change.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.by_name: Mapping[str, Module] = {}
        self._users: Counter[bytes] = Counter()
        self._of_request: dict[str, frozenset[bytes]] = {}
        self._unused: set[bytes] = set()

    def put(self, module: Module) -> None:
        """Register a module, in place of an earlier one of its name."""
        earlier = self.by_name.get(module.name)
        self.by_name = {**self.by_name, module.name: module}
        self._use(_contents(module))
        if earlier is not None:
            self._disuse(_contents(earlier))

    def remove(self, name: str, field: str) -> Module:
        """Forget a module; requests that hold its content keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        module = self.find(name, field)
        self.by_name = {other: kept for other, kept in self.by_name.items() if other != name}
        self._disuse(_contents(module))
        return module

    def all(self) -> tuple[Module, ...]:
        """Return all modules, in the order of their names."""
        return tuple(self.by_name[name] for name in sorted(self.by_name))

    def find(self, name: str, field: str) -> Module:
        """Return the module of that name.

        Raises:
            RequestError: If there is none of that name.
        """
        module = self.by_name.get(name)
        if module is None:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise RequestError(field, f"unknown steering module {name!r}; registered: {known}")
        return module

    def hold(self, req_id: str, keys: frozenset[bytes]) -> None:
        """Keep content for a request until `release`."""
        if not keys:
            return
        if req_id in self._of_request:
            raise AssertionError(f"request {req_id!r} was taken already")
        self._of_request[req_id] = keys
        self._use(keys)

    def release(self, req_id: str) -> None:
        """Undo `hold`, if the request holds anything."""
        self._disuse(self._of_request.pop(req_id, frozenset()))

    @property
    def has_unused(self) -> bool:
        """Whether there are contents without a reference."""
        return bool(self._unused)

    def take_unused(self) -> tuple[bytes, ...]:
        """Return the keys of contents without a reference, sorted, each once."""
        unused, self._unused = tuple(sorted(self._unused)), set()
        return unused

    def _use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._users[key] += 1
            self._unused.discard(key)

    def _disuse(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._unused.add(key)


def _contents(module: Module) -> frozenset[bytes]:
    return frozenset(part.key for phase in module.spec.phases for part in phase if part)


Parts = tuple[tuple[bytes, float], ...]
"""Content keys of modules' vectors or programs, and their scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A request's steering in terms of content.

    Attributes:
        prefill: Content key of what acts in the prefill phase, for its KV; None if nothing of its own acts there.
        decode: The same for the decode phase.
        prefill_parts: Modules' vectors that workers add to its inline prefill vectors.
        decode_parts: Modules' vectors that workers add to its inline decode vectors.
        demand: The slots to reserve.
        prefill_programs: Modules' programs that act before its inline prefill program.
        decode_programs: The same for the decode phase.
        own: Its inline programs, with the names of modules resolved.
        takes_own: Whether its vectors, and what its modules bring, are in its programs: a gate attenuates them.
        latch_keys: Keys of its gates that go on in a conversation, by their names.
        named: The modules that it names, with the scale of each, for controllers that scale them.
        gates: Its gates; None if it has none.
        own_wire: `programs_to_wire` of `own`, where that was made already.
    """

    prefill: bytes | None
    decode: bytes | None
    prefill_parts: Parts
    decode_parts: Parts
    demand: Demand
    prefill_programs: Parts = ()
    decode_programs: Parts = ()
    own: tuple[Program | None, Program | None] = (None, None)
    takes_own: bool = False
    latch_keys: Mapping[str, LatchKey] = field(default_factory=dict)
    named: tuple[tuple[Module, float], ...] = field(default=(), compare=False)
    gates: GateSource | None = field(default=None, compare=False)
    own_wire: SteeringWire | None = field(default=None, compare=False)

    @property
    def parts(self) -> tuple[Parts, Parts, Parts, Parts]:
        """Everything of modules."""
        return self.prefill_parts, self.decode_parts, self.prefill_programs, self.decode_programs


Named = Sequence[tuple[Module, float]]
"""Modules that a request names, with the scale of each."""

NO_LATCHES: Mapping[str, LatchKey] = {}


class Brought(NamedTuple):
    """Content that modules bring which a request names, by phase and in the order of their names, with its scales.

    Attributes:
        named: The modules.
        vectors: Vectors of the prefill and of the decode phase.
        programs: The same.
    """

    named: Named = ()
    vectors: tuple[Sequence[tuple[PhaseVectors, float]], Sequence[tuple[PhaseVectors, float]]] = ((), ())
    programs: tuple[Sequence[tuple[Program, float]], Sequence[tuple[Program, float]]] = ((), ())

    @classmethod
    def by(cls, named: Named) -> Brought:
        """Return what modules bring; those of scale 0 bring nothing."""
        if not named:
            return NOTHING_BROUGHT
        acting = [(module, scale) for module, scale in named if scale != 0]
        vectors = (
            [(module.prefill, scale) for module, scale in acting if module.prefill],
            [(module.decode, scale) for module, scale in acting if module.decode],
        )
        programs = (
            [(module.prefill_program, scale) for module, scale in acting if module.prefill_program],
            [(module.decode_program, scale) for module, scale in acting if module.decode_program],
        )
        return cls(named, vectors, programs)

    @property
    def is_alike(self) -> bool:
        """Whether it is the same in both phases."""
        return not self.named or all(phases[0] == phases[1] for phases in (self.vectors, self.programs))

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys of all contents."""
        return frozenset(content.key for phases in self[1:] for phase in phases for content, _ in phase)

    def acting(self, own: tuple[Program | None, Program | None]) -> list[list[Program]]:
        """Return the programs that act together in each phase: these, and a request's own."""
        pairs = zip(own, self.programs, strict=True)
        return [[*(one for one, _ in others), *([program] if program else [])] for program, others in pairs]


NOTHING_BROUGHT = Brought()


def resolved_of(
    spec: SteeringSpec,
    own: tuple[Program | None, Program | None],
    brought: Brought,
    num_prompt: int,
    gates: GateSource | None = None,
    *,
    takes_own: bool = False,
    latch_keys: Mapping[str, LatchKey] = NO_LATCHES,
    own_wire: SteeringWire | None = None,
) -> Resolved:
    """Return the request's share of slots and its block keys, with what it takes from the modules that it names.

    Args:
        spec: The request's vectors.
        own: Its own programs for prefill and decode; `check_positions` has seen their positions.
        brought: Content of the modules that it names.
        num_prompt: Tokens of its prompt, which decide the rows of operations that are limited to positions.
        gates: See `Resolved`.
        takes_own: See `Resolved`.
        latch_keys: See `Resolved`.
        own_wire: See `Resolved`.
    """
    (prefill, decode), (programs, later_programs) = brought.vectors, brought.programs
    first = second = _load_of(spec.prefill, own[0], prefill, programs)
    if not (spec.decode is spec.prefill and own[1] is own[0] and brought.is_alike):
        second = _load_of(spec.decode, own[1], decode, later_programs)
    return Resolved(
        prefill=_block_key(first, own[0], num_prompt, is_decode=False),
        decode=_block_key(second, own[1], num_prompt, is_decode=True),
        prefill_parts=_parts(prefill),
        decode_parts=_parts(decode),
        demand=Demand(first, second),
        prefill_programs=_parts(programs),
        decode_programs=_parts(later_programs),
        own=own,
        takes_own=takes_own,
        latch_keys=latch_keys,
        named=tuple(brought.named),
        gates=gates,
        own_wire=own_wire,
    )


def for_prompt(resolved: Resolved, num_prompt: int) -> Resolved:
    """Return the steering of a request whose prompt has another length."""
    demand, own = resolved.demand, resolved.own
    return replace(
        resolved,
        prefill=_block_key(demand.prefill, own[0], num_prompt, is_decode=False),
        decode=_block_key(demand.decode, own[1], num_prompt, is_decode=True),
    )


def _load_of(
    vectors: PhaseVectors | None,
    program: Program | None,
    parts: Sequence[tuple[PhaseVectors, float]],
    programs: Sequence[tuple[Program, float]],
) -> Load | None:
    return load_of(vectors, parts, programs if program is None else [*programs, (program, 1.0)])


def _parts(contents: Sequence[tuple[PhaseVectors | Program, float]]) -> Parts:
    return tuple([(content.key, scale) for content, scale in contents])


def check_positions(
    own: tuple[Program | None, Program | None], num_prompt: int, steerable: Steerable | None = None
) -> None:
    """Check the positions to which operations of a request are limited.

    Args:
        own: Its programs, by phase.
        num_prompt: Tokens of its prompt.
        steerable: The model, if it limits them.

    Raises:
        RequestError: If there are none such in its prompt, or some in the answer where an engine decodes speculatively.
    """
    field = "steering_ops.positions"
    is_limited = steerable is not None and not steerable.knows_positions
    for program in own:
        for selector in () if program is None else program.groups:
            selected = selector.resolve(num_prompt, field)
            if is_limited:
                check_known(selected, num_prompt, field)


def check_scales(named: Named, field: str) -> None:
    """Check the scales of modules that let SAEs reconstruct rows: there is no part of a reconstruction.

    Raises:
        RequestError: Names `field`.
    """
    for module, scale in named:
        programs = [program for program in (module.prefill_program, module.decode_program) if program is not None]
        if scale not in (0, 1) and any(program.reconstructs for program in programs):
            raise RequestError(
                field, f"module {module.name!r} lets an SAE reconstruct rows, so its scale is 1 or 0, not {scale:g}"
            )


def _block_key(load: Load | None, program: Program | None, num_prompt: int, *, is_decode: bool) -> bytes | None:
    """Return the cache key of the KV that a phase makes.

    Positions count from the prompt's end, so its length is part of the key; likewise for gates that are decided there,
    and on generated rows, where gates act at sites at which they do not act in prompts.
    """
    if load is None or program is None:
        return None if load is None else load.key
    is_gated = is_decode and program.has_gates
    if not (is_gated or program.groups or program.is_decided_at_prompt_end):
        return load.key
    return hashlib.sha256(load.key + num_prompt.to_bytes(8, "little") + (b"decode" if is_gated else b"")).digest()


BLOCK_KEY_TAG = "headgate"
"""First half of each extra key. The same for both phases: a steered answer can become the prompt of the next turn."""


class SteeredBlocks(NamedTuple):
    """Extra keys of one request's KV blocks; implements `headgate.capture.engine.contracts.core_part.BlockKeys`.

    A block of the prompt is keyed by the vectors of the prefill phase, a generated one by those of the decode phase,
    and the block with tokens of both phases by both and by where the prompt ends in it. Blocks on which nothing acts
    have no extra key, so they are shared with requests of an engine without steering.

    Attributes:
        prefill: Name of the content that acts in the prefill phase; None if nothing does.
        decode: The same for the decode phase.
        skips_reading: See `BlockKeys`.
    """

    prefill: str | None
    decode: str | None
    skips_reading: bool = False

    @classmethod
    def join(
        cls,
        *,
        global_prefill: bytes | None,
        global_decode: bytes | None,
        prefill: bytes | None,
        decode: bytes | None,
        rules: RuleKeys = NO_RULES,
        driven: bytes | None = None,
    ) -> SteeredBlocks:
        """Join the content keys of global vectors, of rules, of a request's own and of controllers, phase by phase."""
        return cls(
            _joined(global_prefill, rules.prefill, prefill),
            _joined(global_decode, rules.decode, decode, driven),
            rules.has_state,
        )

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        """Return the extra keys of the block of tokens ``start : end``: none, or one pair of a tag and a name.

        Args:
            start: Position of the block's first token.
            end: Position after its last.
            num_prompt: Length of the request's prompt.
        """
        if self.prefill == self.decode or end <= num_prompt:
            name = self.prefill
        elif start >= num_prompt:
            name = self.decode
        else:
            name = f"{self.prefill or ''}:{self.decode or ''}@{num_prompt - start}"
        return ((BLOCK_KEY_TAG, name),) if name else ()


def _joined(*acting: bytes | None) -> str | None:
    """Return the name of all; one alone has the same name wherever it comes from: equal vectors make equal KV."""
    names = [key.hex() for key in acting if key]
    return "+".join(names) or None
