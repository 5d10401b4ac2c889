"""The spec of one request, or of one named module: its vectors and programs by phase, and its wire form.

A spec travels from the front end to the engine as a `SteeringWire`: plain values, the rows as raw bytes. It is
the section of a request in its `RequestWire`, and the ``spec`` of calls that register a module or set global vectors.
An absent key stands for nothing. The front end made and checked it: a malformed one is a bug, not bad input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

from headgate.capture.schema.sites import HookPoint, Site, site_map, sort_sites
from headgate.steering.gates.gate import Gate, gates_key
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.operations import Operation
from headgate.steering.programs.program import Program, ProgramWire, joined
from headgate.steering.programs.wire import ContentWire, content_from_wire, content_to_wire
from headgate.steering.vectors.dtypes import Float32Rows, Rows, StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors
from headgate.steering.vectors.sums import Vectors


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A named module and the scale to apply it with. Scale 0 adds nothing, but the name must exist all the same."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SteeringSpec:
    """Vectors, operations and modules that one request, or one named module, steers with.

    Attributes:
        prefill: Vectors at positions of the prompt: base plus prefill tier.
        decode: Vectors at generated positions: base plus decode tier. The same object as `prefill` if they are equal.
        modules: Named modules that act in both phases.
        prefill_program: Operations at positions of the prompt.
        decode_program: Operations at generated positions.
        prefill_ops: Operations in place of `prefill_program`, where some name vectors of modules; the engine core
            lowers them.
        decode_ops: Operations in place of `decode_program`, likewise.
        prefill_features: Edits of features at positions of the prompt, which act after all operations; the engine
            core, which has the SAEs, lowers them.
        decode_features: Edits of features at generated positions, likewise.
        gates: Conditions, and what they turn on; the engine core, which has the probes, lowers them.
        rules: Names of the rules that act beside those for all; None if the rules act that a request can opt out of.
    """

    prefill: PhaseVectors | None = None
    decode: PhaseVectors | None = None
    modules: tuple[ModuleRef, ...] = ()
    prefill_program: Program | None = None
    decode_program: Program | None = None
    prefill_ops: tuple[Operation, ...] = ()
    decode_ops: tuple[Operation, ...] = ()
    prefill_features: tuple[FeatureEdit, ...] = ()
    decode_features: tuple[FeatureEdit, ...] = ()
    gates: tuple[Gate, ...] = ()
    rules: tuple[str, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing acts and no module is named."""
        return not (
            self.modules or self.rules is not None or self.is_to_lower or any(any(phase) for phase in self.phases)
        )

    @property
    def is_to_lower(self) -> bool:
        """Whether the engine core has to make its programs."""
        named = self.prefill_ops or self.decode_ops or self.prefill_features or self.decode_features
        return bool(named or self.gates)

    @property
    def phases(self) -> tuple[PhaseContent, PhaseContent]:
        """Vectors and programs of the prefill and of the decode phase."""
        return (self.prefill, self.prefill_program), (self.decode, self.decode_program)

    @property
    def op_sites(self) -> tuple[Site, ...]:
        """Sites of operations, each once."""
        programs = [program for program in (self.prefill_program, self.decode_program) if program is not None]
        named = [operation.site for operation in (*self.prefill_ops, *self.decode_ops)]
        return tuple(dict.fromkeys([*(site for program in programs for site in program.sites), *named]))

    @property
    def num_vectors(self) -> int:
        """Number of inline vectors, without those of the modules; phases that are alike count once."""
        prefill = len(self.prefill.sites) if self.prefill else 0
        if self.decode is None or (self.prefill and self.decode.key == self.prefill.key):
            return prefill
        return prefill + len(self.decode.sites)


PhaseContent = tuple[PhaseVectors | None, Program | None]
"""Vectors and operations of one phase."""


@dataclass(frozen=True, slots=True)
class Steered:
    """Vectors and a program that act in one phase, as content that is shared by its key.

    It is one of `headgate.steering.vectors.sums.Vectors`, with the vectors' values.

    Attributes:
        vectors: Added between the program's replacements and its operations; None adds nothing.
        program: Operations.
        key: Content key of both.
    """

    vectors: Vectors | None
    program: Program
    key: bytes

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites of the vectors."""
        return self.vectors.sites if self.vectors is not None else ()

    def float32(self) -> Float32Rows:
        """Return the vectors' values, ``[len(sites), hidden]``."""
        if self.vectors is None:
            raise AssertionError("a program without vectors has no values")
        return self.vectors.float32()

    def stored_as(self, dtype: StoredType) -> Rows | None:
        """Return the vectors' rows if they are stored in `dtype`."""
        return None if self.vectors is None else self.vectors.stored_as(dtype)


def steered(vectors: Vectors | None, programs: Sequence[tuple[Program, float]]) -> Vectors | None:
    """Return what acts in one phase: vectors, and programs one after the other, each with its scale.

    None if nothing acts; the vectors themselves if no program does.
    """
    acting = [scaled for program, scale in programs if (scaled := program.scaled(scale)) is not None]
    if not acting:
        return vectors
    key = content_key_of(vectors.key if vectors is not None else None, [(one.key, scale) for one, scale in programs])
    if key is None:
        raise AssertionError("a program without a key")
    return Steered(vectors, joined(acting), key)


_PREFIX = b"headgate steered\n"
"""Keeps the keys of vectors with programs apart from those of vectors and of programs."""


def content_key_of(vectors: bytes | None, programs: Iterable[tuple[bytes, float]]) -> bytes | None:
    """Return the content key of vectors and programs, from the keys of both; None if nothing acts.

    Without programs it is the vectors' own. The order of the programs counts.
    """
    acting = [(key, scale) for key, scale in programs if scale != 0]
    if not acting:
        return vectors
    parts = ",".join(f"{key.hex()}*{scale!r}" for key, scale in acting)
    return hashlib.sha256(_PREFIX + f"{vectors.hex() if vectors else ''};{parts}".encode()).digest()


class VectorsWire(TypedDict):
    """`PhaseVectors` as plain values.

    Attributes:
        key: The content key.
        sites: ``{hook: [layers]}``.
        hidden_size: Values of a row.
        dtype: Element type of the payload.
        payload: The rows, one after the other, little-endian.
        peak: The largest magnitude of any value.
    """

    key: bytes
    sites: dict[str, list[int]]
    hidden_size: int
    dtype: StoredType
    payload: bytes
    peak: float


class SteeringWire(TypedDict, total=False):
    """A `SteeringSpec` as plain values.

    Attributes:
        prefill: The inline vectors of the prefill phase.
        decode: The inline vectors of the decode phase, unless they are the prefill vectors.
        is_shared: True if the decode vectors are the prefill vectors, which travel once.
        modules: ``[name, scale]`` of each named module.
        prefill_parts: ``[content key, scale]`` of each module's prefill vectors: written by the engine core, which
            resolves names, for its workers.
        decode_parts: The same for the decode phase.
        prefill_program: The inline operations of the prefill phase.
        decode_program: The inline operations of the decode phase, unless they are those of the prefill phase.
        is_program_shared: True if the decode operations are the prefill operations, which travel once.
        unlowered: `UnloweredContent` on the way to the engine core, which makes programs of it.
        gates: Gates on the way to the engine core.
        gates_key: `gates_key` of these, which is the same for all requests that bring them.
        rules: Names of rules, as of the spec.
        prefill_programs: As `prefill_parts`, for the modules' operations, in the order in which they act.
        decode_programs: The same for the decode phase.
        trace: True if the request's trace is wanted.
        counted: True if nothing is wanted of its gates but how many rows they wrote: written by the engine core.
        owner: Name of the client's key, if its gates go on in a conversation; absent without a key.
    """

    prefill: VectorsWire
    decode: VectorsWire
    is_shared: bool
    modules: list[list[Any]]
    prefill_parts: list[list[Any]]
    decode_parts: list[list[Any]]
    prefill_program: ProgramWire
    decode_program: ProgramWire
    is_program_shared: bool
    unlowered: ContentWire
    gates: ContentWire
    gates_key: bytes
    rules: list[str]
    prefill_programs: list[list[Any]]
    decode_programs: list[list[Any]]
    trace: bool
    counted: bool
    owner: str


class UnloweredContent(NamedTuple):
    """Operations and edits of features of a `SteeringSpec`; None for those of the prefill phase, which travel once."""

    prefill_ops: tuple[Operation, ...] = ()
    decode_ops: tuple[Operation, ...] | None = None
    prefill_features: tuple[FeatureEdit, ...] = ()
    decode_features: tuple[FeatureEdit, ...] | None = None

    @classmethod
    def of(cls, spec: SteeringSpec) -> UnloweredContent:
        """Return those of a spec."""
        decode_ops = None if spec.decode_ops is spec.prefill_ops else spec.decode_ops
        decode_features = None if spec.decode_features is spec.prefill_features else spec.decode_features
        return cls(spec.prefill_ops, decode_ops, spec.prefill_features, decode_features)


def to_wire(spec: SteeringSpec) -> SteeringWire:
    """Return the wire form of `spec`; payloads are not copied."""
    wire: SteeringWire = {}
    if spec.modules:
        wire["modules"] = [[ref.name, ref.scale] for ref in spec.modules]
    if spec.prefill is not None:
        wire["prefill"] = _vectors_wire(spec.prefill)
    if spec.prefill is not None and spec.decode is not None and spec.prefill.key == spec.decode.key:
        wire["is_shared"] = True
    elif spec.decode is not None:
        wire["decode"] = _vectors_wire(spec.decode)
    wire.update(programs_to_wire(spec.prefill_program, spec.decode_program))
    if spec.prefill_ops or spec.decode_ops or spec.prefill_features or spec.decode_features:
        wire["unlowered"] = content_to_wire(UnloweredContent.of(spec))
    if spec.gates:
        wire["gates"] = content_to_wire(spec.gates)
        wire["gates_key"] = gates_key(wire["gates"])
    if spec.rules is not None:
        wire["rules"] = list(spec.rules)
    return wire


def programs_to_wire(prefill: Program | None, decode: Program | None) -> SteeringWire:
    """Return the wire form of the programs of both phases."""
    wire: SteeringWire = {}
    if prefill is not None:
        wire["prefill_program"] = prefill.to_wire()
    if prefill is not None and decode is not None and prefill.key == decode.key:
        wire["is_program_shared"] = True
    elif decode is not None:
        wire["decode_program"] = decode.to_wire()
    return wire


PROGRAM_KEYS = frozenset(("prefill_program", "decode_program", "is_program_shared", "unlowered", "gates", "gates_key"))
"""Keys of a `SteeringWire` that the engine core replaces where it makes the programs."""


def from_wire(wire: Mapping[str, Any], gates: tuple[Gate, ...] | None = None) -> SteeringSpec:
    """Return the spec that `to_wire` wrote; its rows are views of the received bytes.

    Args:
        wire: As it was written.
        gates: Its gates, if they were read already.
    """
    prefill = _vectors(wire.get("prefill"))
    decode = prefill if wire.get("is_shared") else _vectors(wire.get("decode"))
    modules = tuple(ModuleRef(name, scale) for name, scale in wire.get("modules", ()))
    first = _program(wire.get("prefill_program"))
    second = first if wire.get("is_program_shared") else _program(wire.get("decode_program"))
    if gates is None:
        gates = content_from_wire(tuple[Gate, ...], wire["gates"]) if "gates" in wire else ()
    unlowered = content_from_wire(UnloweredContent, wire["unlowered"]) if "unlowered" in wire else UnloweredContent()
    return SteeringSpec(
        prefill=prefill,
        decode=decode,
        modules=modules,
        prefill_program=first,
        decode_program=second,
        prefill_ops=unlowered.prefill_ops,
        decode_ops=unlowered.prefill_ops if unlowered.decode_ops is None else unlowered.decode_ops,
        prefill_features=unlowered.prefill_features,
        decode_features=unlowered.prefill_features if unlowered.decode_features is None else unlowered.decode_features,
        gates=gates,
        rules=tuple(wire["rules"]) if "rules" in wire else None,
    )


def _program(wire: ProgramWire | None) -> Program | None:
    return None if wire is None else Program.from_wire(wire)


def _vectors_wire(vectors: PhaseVectors) -> VectorsWire:
    return {
        "key": vectors.key,
        "sites": site_map(vectors.sites),
        "hidden_size": vectors.hidden_size,
        "dtype": vectors.dtype,
        "payload": vectors.payload,
        "peak": vectors.peak,
    }


def _vectors(wire: VectorsWire | None) -> PhaseVectors | None:
    if wire is None:
        return None
    sites = _sites(tuple([(hook, tuple(layers)) for hook, layers in wire["sites"].items()]))
    return PhaseVectors(
        sites=sites,
        hidden_size=wire["hidden_size"],
        dtype=wire["dtype"],
        payload=wire["payload"],
        key=wire["key"],
        peak=wire["peak"],
    )


@lru_cache(maxsize=256)
def _sites(by_hook: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Site, ...]:
    """Return sites in order; cached, since most requests of a load steer the same ones."""
    return sort_sites(Site(layer, HookPoint(hook)) for hook, layers in by_hook for layer in (layers or (-1,)))
