"""Gates become entries of a request's program. Numpy only.

A gate is evaluated at its decision site: the last of the sites that it reads, in the order of the forward. What it
turns on there and later acts on the same row; at earlier sites it acts on the rows after, and on generated ones alone,
since rows of a prompt may share a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from headgate.capture.probe import Activation, Probe, ProbeKind
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.sites import Site, sort_sites
from headgate.steering.features.sparse_coder import SparseCoder
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.gates.gate import (
    Always,
    Condition,
    ConditionGroup,
    FeatureReading,
    Gate,
    GateColumn,
    GateColumns,
    GatePhase,
    InlineProbe,
    Leaf,
    ModuleThen,
    NamedProbe,
    Negation,
    Reading,
    Then,
    check_reads,
    check_this_token,
    columns_of,
    is_reached,
    num_columns,
)
from headgate.steering.programs.codes import (
    CODE_MASK,
    EARLY,
    EVERYWHERE,
    NODE_COLUMNS,
    Code,
    Combine,
    Flag,
    GateFlag,
    ScoreKind,
    UnitFunction,
    change_index,
    gate_column,
    gate_field,
    with_change,
)
from headgate.steering.programs.feature_edits import FeatureEdit, reading_entry
from headgate.steering.programs.lowering import StoredVector, StoredVectors, lower, lower_entries, store, vectors_of
from headgate.steering.programs.operations import Float32Row, Lookup, Method, ModuleVector, Operation
from headgate.steering.programs.program import Entry, Program, entries_of, moved
from headgate.steering.vectors.dtypes import STORAGE, Rows, StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors


class Content(Protocol):
    """The content that names in gates stand for, in an engine core.

    Attributes:
        op_sites: Declared sites, in the order of the forward pass.
    """

    @property
    def op_sites(self) -> Sequence[Site]: ...

    def width(self, site: Site) -> int:
        """Return the values of a row of a site."""
        ...

    def is_in_one_stage(self, sites: Iterable[Site]) -> bool:
        """Whether some op sites lie on one pipeline stage."""
        ...

    def why_unread(self, site: Site) -> str | None:
        """Say why no gate reads at a site, although it is an op site; None if gates do."""
        ...

    def probe(self, reading: NamedProbe) -> Probe:
        """Return a registered probe.

        Raises:
            RequestError: If there is none of that name.
        """
        ...

    def coder(self, reading: FeatureReading) -> tuple[SparseCoder, Site]:
        """Return a registered SAE, and where it reads.

        Raises:
            RequestError: If there is none of that name, or one row does not decide the activation of that feature.
        """
        ...

    def vectors(self, phase: int) -> Lookup:
        """Return the lookup of modules' vectors in a phase: 0 is prefill, 1 decode."""
        ...

    def module(self, then: ModuleThen, phase: int) -> tuple[PhaseVectors | None, Program | None]:
        """Return a module's vectors and operations in a phase.

        Raises:
            RequestError: If there is none of that name.
        """
        ...

    def features(self, edits: Sequence[FeatureEdit]) -> Program | None:
        """Return the program of edits of features.

        Raises:
            RequestError: If an SAE or a feature is not there.
        """
        ...


class Score(NamedTuple):
    """A reading in terms of content.

    Attributes:
        entries: Its entries, without the column: one, or of an MLP those of its units and the one that sums them up.
        threshold: The probe's own; None if it has none.
    """

    entries: tuple[Entry, ...]
    threshold: float | None

    @property
    def site(self) -> Site:
        """The site that is read."""
        return self.entries[-1].site

    def at(self, column: int) -> list[Entry]:
        """Return the entries, which write a column."""
        return [entry._replace(code=with_change(entry.code, column)) for entry in self.entries]


def read_score(reading: Reading, content: Content, vectors: StoredVectors) -> Score:
    """Return the entries of a reading.

    Args:
        reading: Reading of a gate.
        content: Gives probes, modules and SAEs by name.
        vectors: With `weights_of` the gates. Where the model's dtype is narrower than float32, a weight is stored as
            two rows: the rounded one, and what rounding took from it.

    Raises:
        RequestError: Naming the field of the gate, if the reading cannot be made here.
    """
    if isinstance(reading, NamedProbe):
        probe = content.probe(reading)
        _check_probe(probe, reading)
        check_site(probe.site, content, reading.where)
        return Score(probe_entries(probe, vectors.dtype), probe.threshold)
    if isinstance(reading, InlineProbe):
        check_site(reading.site, content, reading.where)
        weight = vectors.of(_weight(reading, content))
        return Score((_score(reading.site, weight, reading.bias, reading.is_cosine),), None)
    coder, site = content.coder(reading)
    check_site(site, content, reading.where)
    try:
        entry = reading_entry(coder, site, reading.feature, vectors.dtype)
    except (FeatureFileError, OSError) as error:
        raise RequestError(reading.where, f"the SAE cannot be read: {error}") from error
    return Score((entry._replace(code=Code.SCORE | ScoreKind.ACTIVATION | entry.code),), None)


def weights_of(gates: Iterable[Gate]) -> list[Float32Row]:
    """Return the weights of probes that gates bring; those of modules are left out."""
    readings = [leaf.reading for gate in gates for leaf in gate.leaves]
    weights = [reading.weight for reading in readings if isinstance(reading, InlineProbe)]
    return [weight for weight in weights if not isinstance(weight, ModuleVector)]


def probe_entries(probe: Probe, dtype: StoredType) -> tuple[Entry, ...]:
    """Return the entries of a probe of one class, without the column."""
    bias = float(probe.biases[0])
    if probe.hidden is None:
        (weight,) = store([probe.weight[0]], dtype)
        return (_score(probe.site, weight, bias, probe.kind is ProbeKind.COSINE),)
    unit = Code.SCORE | ScoreKind.UNIT | _UNITS[probe.hidden.activation]
    entries = []
    for row, shift, factor in zip(
        probe.hidden.weight, probe.hidden.bias.tolist(), probe.weight[0].tolist(), strict=True
    ):
        if factor and row.any():
            (stored,) = store([row], dtype)
            read = _score(probe.site, stored, shift, False)
            entries.append(read._replace(code=unit, params=(*read.params, factor)))
        elif factor:  # Its value is the same for all rows.
            bias += factor * float(probe.hidden.activation.apply(np.array([shift]))[0])
    total = Entry(probe.site, Code.SCORE | ScoreKind.UNIT | UnitFunction.SUM, None, None, (0.0, 0.0, bias))
    return (*entries, total)


_UNITS = {Activation.RELU: UnitFunction.RELU, Activation.GELU: UnitFunction.GELU, Activation.SILU: UnitFunction.SILU}


def _check_probe(probe: Probe, reading: NamedProbe) -> None:
    if len(probe.classes) > 1:
        raise RequestError(
            reading.where,
            f"probe {reading.name!r} has {len(probe.classes)} classes; a gate reads probes of one class",
        )


def check_site(site: Site, content: Content, where: str) -> None:
    """Refuse a site where no gate can read.

    Raises:
        RequestError: Naming `where`.
    """
    if site not in content.op_sites:
        declared = ", ".join(each.name for each in content.op_sites) or "none"
        raise RequestError(
            where,
            f"no gate can read at {site.name}; declared sites: {declared}; the operator declares them with "
            "--steering-op-sites, or by --probes NAME=PATH",
        )
    if why := content.why_unread(site):
        raise RequestError(where, why)


def _weight(reading: InlineProbe, content: Content) -> Float32Row:
    weight = reading.weight
    if not isinstance(weight, ModuleVector):
        return weight
    for phase in (0, 1):
        found = content.vectors(phase)(weight.module, weight.site)
        if found is not None:
            if len(found) != (width := content.width(reading.site)):
                raise RequestError(
                    reading.where,
                    f"the vector of {weight.module!r} at {weight.site.name} has {len(found)} values, rows of "
                    f"{reading.site.name} have {width}",
                )
            return found
    raise RequestError(reading.where, f"module {weight.module!r} has no vector at {weight.site.name}")


def _score(site: Site, weight: StoredVector, bias: float, is_cosine: bool) -> Entry:
    rest = weight.rest()
    scale = 1 / float(np.linalg.norm(weight.values)) if is_cosine else 1.0
    code = Code.SCORE | (ScoreKind.COSINE if is_cosine else ScoreKind.LINEAR)
    lower = None if rest is None else rest.stored
    params = (scale * weight.factor, 0.0 if rest is None else scale * rest.factor, bias)
    return Entry(site, code, weight.stored, lower, params)


PREFILL, DECODE = range(2)

Widths = Callable[[Site], int]
"""Returns the values of a row of a site."""
Own = tuple[PhaseVectors | None, Program | None]
"""A request's static vectors and operations in one phase, modules' included."""


class GatedPrograms(NamedTuple):
    """The programs of a request with gates.

    Attributes:
        prefill: At prompt positions; also if nothing acts there, gates are evaluated.
        decode: At generated positions.
        takes_own: Whether the request's own vectors and operations are among them: a gate attenuates these.
        columns: The columns of the gates.
    """

    prefill: Program
    decode: Program
    takes_own: bool
    columns: GateColumns


def lower_gates(
    gates: Sequence[Gate],
    content: Content,
    dtype: StoredType,
    own: tuple[Own, Own],
    latched: Mapping[str, float],
    first: int = 0,
) -> GatedPrograms:
    """Return the programs of gates, at least one.

    Args:
        gates: Gates of one request.
        content: Gives probes, modules and SAEs by name.
        dtype: The model's.
        own: The request's static steering by phase; it is looked at if a gate attenuates it.
        latched: Strengths that conversations have latched, by the names of gates.
        first: First of their columns.

    Raises:
        RequestError: Naming the field of a gate: a name that is not registered, a site that is not declared, a scope
            that cannot act where the gate writes, a vector that cannot be used, too large a change.
    """
    columns = columns_of(gates, first)
    operations = [operation for gate in gates for operation in gate.then.operations]
    vectors = StoredVectors([*weights_of(gates), *vectors_of(operations)], dtype)
    scores = {score.column: read_score(score.reading, content, vectors) for score in columns.scores}
    made, zeros = _Entries(), np.zeros(1, STORAGE[dtype])
    for column, score in scores.items():
        for entry in score.at(column):
            made.add(entry)
    attenuating: list[_Placed] = []
    for gated in columns.gates:
        placed = _Placed(gated, _reads(gated.gate, columns, scores))
        effects = _effects(placed.gate.then, content, vectors)
        written = sort_sites({entry.site for effect in effects for entry in effect.entries})
        if placed.gate.then.attenuate is not None:
            written = sort_sites({site for vectors, program in own for site in _sites_of(vectors, program)})
            attenuating.append(placed)
        _check(placed, written, content.op_sites)
        placed = placed.decided(written, content.op_sites)
        _check_stages(placed, written, content)
        if attenuating and attenuating[-1].gate is placed.gate:
            attenuating[-1] = placed
        kept = latched.get(placed.gate.name, math.nan)
        evaluations = [_Evaluation(placed, columns, scores, phase).all(kept, zeros) for phase in (PREFILL, DECODE)]
        made.evaluate(*evaluations)
        made.write(placed, effects)
    if attenuating:
        made.attenuate(attenuating, own, dtype, content.width)
    prefill = Program.from_entries(_marked(made.phases[PREFILL].entries), dtype, made.phases[PREFILL].groups)
    if made.are_alike:
        return GatedPrograms(prefill, prefill, bool(attenuating), columns)
    decode = Program.from_entries(_marked(made.phases[DECODE].entries), dtype, made.phases[DECODE].groups)
    return GatedPrograms(prefill, decode, bool(attenuating), columns)


def _marked(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of a phase; gates that turn nothing on there, at sites where they are evaluated, say so."""
    written = {gate_column(entry.group) for entry in entries if not entry.group & EARLY}
    return [
        entry._replace(code=entry.code | GateFlag.UNWRITTEN)
        if entry.code & CODE_MASK == Code.GATE and change_index(entry.code) not in written
        else entry
        for entry in entries
    ]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A gate, the sites that it reads, and where it is evaluated."""

    column: GateColumn
    reads: tuple[Site, ...]
    decision: Site | None = None

    @property
    def gate(self) -> Gate:
        return self.column.gate

    @property
    def site(self) -> Site:
        if self.decision is None:
            raise AssertionError(f"gate {self.gate.name!r} has no site yet")
        return self.decision

    def decided(self, written: Sequence[Site], op_sites: Sequence[Site]) -> _Placed:
        """Return the gate with its decision site; that of `always` is the last that reaches all that it writes.

        Raises:
            RequestError: If there is no such site.
        """
        if self.reads:
            return _Placed(self.column, self.reads, self.reads[-1])
        reaching = [site for site in sort_sites(op_sites) if all(is_reached(write, site) for write in written)]
        if not reaching:
            raise RequestError(
                f"{self.gate.where}.then",
                f"writes at {written[0].name} and in the MLP beside it, with no declared site before both where the "
                "gate could be evaluated; use a gate for each, or the operator declares one with "
                "--steering-op-sites",
            )
        return _Placed(self.column, self.reads, reaching[-1])

    def is_early(self, site: Site) -> bool:
        """Whether a site is computed before the gate is evaluated, or may be."""
        return not is_reached(site, self.site)


def _reads(gate: Gate, columns: GateColumns, scores: Mapping[int, Score]) -> tuple[Site, ...]:
    return sort_sites({scores[columns.score_column(leaf.reading)].site for leaf in gate.leaves})


def _check(placed: _Placed, written: Sequence[Site], op_sites: Sequence[Site]) -> None:
    """Refuse sites that are not declared, and rows that are gone when the gate is evaluated."""
    gate = placed.gate
    where = f"{gate.where}.then"
    for site in written:
        if site not in op_sites:
            declared = ", ".join(each.name for each in op_sites) or "none"
            raise RequestError(
                where,
                f"what a gate changes lies at declared sites; {site.name} is none of them: {declared}; the operator "
                "declares them with --steering-op-sites",
            )
    check_reads(gate, placed.reads)
    check_this_token(gate, placed.reads, written)


def _check_stages(placed: _Placed, written: Sequence[Site], content: Content) -> None:
    """Refuse early sites on other pipeline stages: strengths travel to later stages, with the hidden states."""
    for site in written:
        if placed.is_early(site) and not content.is_in_one_stage((site, placed.site)):
            raise RequestError(
                f"{placed.gate.where}.then",
                f"writes at {site.name}, on an earlier pipeline stage than {placed.site.name}, where the gate is "
                "evaluated; strengths go to later stages only: read at an earlier site, or write at later ones",
            )


def then_programs(then: Then, content: Content, dtype: StoredType) -> list[Program | None]:
    """Return what a gate, or a controller, turns on at full strength, by phase; only what modules bring may differ.

    Raises:
        RequestError: Naming the field: a name that is not registered, or a vector that cannot be used.
    """
    if then.module is not None:
        found = [content.module(then.module, phase) for phase in (PREFILL, DECODE)]
        scale, width = then.module.scale, content.width
        return [joined_entries(vectors, program, scale, dtype, width) for vectors, program in found]
    if then.features:
        return [content.features(then.features)] * 2
    if any(operation.references for operation in then.operations):
        return [lower(then.operations, dtype, content.vectors(phase)) for phase in (PREFILL, DECODE)]
    return [lower(then.operations, dtype) if then.operations else None] * 2


class _Effect(NamedTuple):
    """The steering that a gate turns on in one phase, at full strength."""

    entries: Sequence[Entry] = ()
    groups: Sequence[PositionSelector] = ()
    num_changes: int = 0
    reconstructs: bool = False

    @classmethod
    def of(cls, program: Program | None) -> _Effect:
        if program is None:
            return cls()
        return cls(entries_of(program), program.groups, program.num_changes, program.reconstructs)


def _effects(then: Then, content: Content, vectors: StoredVectors) -> tuple[_Effect, _Effect]:
    """Return what a gate turns on by phase: one object where both phases are alike."""
    if then.operations and not any(operation.references for operation in then.operations):
        # They become entries of the gates' program, and no program of their own before.
        both = _Effect(*lower_entries(then.operations, vectors))
        return both, both
    prefill, decode = then_programs(then, content, vectors.dtype)
    first = _Effect.of(prefill)
    return first, first if decode is prefill else _Effect.of(decode)


def joined_entries(
    vectors: PhaseVectors | None, program: Program | None, scale: float, dtype: StoredType, width: Widths
) -> Program | None:
    """Return vectors, as long as the rows of their sites, and a program as one program, times `scale`."""
    entries = _added(vectors, scale, dtype, width)
    scaled = None if program is None else program.scaled(scale)
    if scaled is not None:
        entries += entries_of(scaled)
    return Program.from_entries(entries, dtype, () if scaled is None else scaled.groups) if entries else None


def _added(vectors: PhaseVectors | None, scale: float, dtype: StoredType, width: Widths) -> list[Entry]:
    """Return the entries that add vectors."""
    if vectors is None or scale == 0:
        return []
    rows = vectors.float32()
    operations = [
        Operation(method=Method.ADDITIVE, site=site, vectors={"vector": row[: width(site)]}, numbers={"scale": scale})
        for site, row in zip(vectors.sites, rows, strict=True)
    ]
    program = lower(operations, dtype)
    return [] if program is None else entries_of(program)


def _sites_of(vectors: PhaseVectors | None, program: Program | None) -> tuple[Site, ...]:
    return (*(vectors.sites if vectors is not None else ()), *(program.sites if program is not None else ()))


class _Evaluation:
    """Makes the entries that evaluate a gate in one phase at its decision site, in their order."""

    def __init__(self, placed: _Placed, columns: GateColumns, scores: Mapping[int, Score], phase: int) -> None:
        self.entries: list[Entry] = []
        self._phase = phase
        self._placed = placed
        self._columns = columns
        self._scores = scores
        self._next = placed.column.first

    def all(self, latched: float, zeros: Rows) -> list[Entry]:
        """Return all entries; `latched` is the strength that the conversation has latched, or NaN."""
        return self._finish(self._put(self._placed.gate.when), latched, zeros)

    def _put(self, condition: Condition) -> int:
        """Add the entries of a condition; return its first column."""
        if isinstance(condition, Leaf):
            column, score = self._take(condition), self._columns.score_column(condition.reading)
            entry = _leaf(self._placed.gate, condition, column, score, self._scores[score], self._placed.site)
            self.entries.append(entry)
            return column
        if isinstance(condition, Always):
            always = self._node(Combine.ALWAYS, 0, 0)
            if condition.phase is GatePhase.BOTH:
                return always
            return self._node(Combine.ANY if self._is_phase(condition) else Combine.NOT, always, always)
        if isinstance(condition, Negation):
            return self._node(Combine.NOT, self._put(condition.condition), 0)
        return self._put_group(condition)

    def _put_group(self, group: ConditionGroup) -> int:
        """Add the entries of several conditions; return the column that has all of them.

        A phase has no strength of its own, which would bound a gain above 1: where it holds, `all` is the others.
        """
        first, *others = group.conditions
        found, is_phase = self._put(first), group.combine is Combine.ALL and self._is_phase(first)
        for other in others:
            column = self._put(other)
            if group.combine is Combine.ALL and self._is_phase(other):
                column = found
            elif is_phase:
                found, is_phase = column, False
            found = self._node(group.combine, found, column)
        return found

    def _is_phase(self, condition: Condition) -> bool:
        """Whether a condition is that rows are of this phase, or not of the other one."""
        this, other = GatePhase.PROMPT, GatePhase.GENERATED
        if self._phase == DECODE:
            this, other = other, this
        if isinstance(condition, Negation):
            condition, this = condition.condition, other
        return isinstance(condition, Always) and condition.phase is this

    def _finish(self, root: int, latched: float, zeros: Rows) -> list[Entry]:
        """Add the entry of the gate, whose condition is at column `root`; return all.

        It writes `zeros`, a stored row: a program has rows.
        """
        gate = self._placed.gate
        code = Code.GATE | gate.scope
        code |= GateFlag.FROM_PROMPT_END if gate.is_pooled_over_prompt else 0
        code |= GateFlag.OBSERVES if gate.then.observes else 0
        params = (0.0, 0.0, latched, 0.0, 0.0, 0.0, float(root), 0.0)
        column = self._placed.column.column
        return [*self.entries, Entry(self._placed.site, with_change(code, column), None, zeros, params)]

    def _node(self, combine: Combine, one: int, other: int) -> int:
        column = self._next
        self._next += NODE_COLUMNS
        params = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, float(one), float(other))
        self.entries.append(Entry(self._placed.site, with_change(Code.NODE | combine, column), None, None, params))
        return column

    def _take(self, condition: Leaf) -> int:
        column = self._next
        self._next += num_columns(condition)
        return column


def _leaf(gate: Gate, leaf: Leaf, column: int, score: int, read: Score, site: Site) -> Entry:
    if gate.pid is not None:
        loop = gate.pid
        shape = loop.setpoint, loop.kp, loop.ki
        params: tuple[float, ...] = (loop.least, loop.largest, *shape, leaf.alpha, float(score), loop.kd)
        return Entry(site, with_change(Code.LEAF | gate.mode | leaf.pooling, column), None, None, params)
    threshold = leaf.threshold if leaf.threshold is not None else read.threshold
    if threshold is None:
        raise RequestError(leaf.where, "the probe has no threshold of its own; give 'above' or 'below'")
    code = Code.LEAF | gate.mode | leaf.pooling | (GateFlag.BELOW if leaf.is_below else 0)
    params = (0.0, 0.0, threshold, leaf.hysteresis, gate.amount, leaf.alpha, float(score))
    return Entry(site, with_change(code, column), None, None, params)


class _Phase:
    """The entries of one phase."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.groups: list[PositionSelector] = []
        self.num_changes = 0

    def take(self, effect: _Effect) -> Sequence[Entry]:
        """Return the entries of an effect, with its groups and changes counted after the ones that are here."""
        entries = moved(effect.entries, len(self.groups), self.num_changes)
        self.groups.extend(effect.groups)
        self.num_changes += effect.num_changes
        return entries


class _Entries:
    """The entries of gates.

    Attributes:
        phases: By phase.
        are_alike: Whether those of both phases are the same.
    """

    def __init__(self) -> None:
        self.phases = (_Phase(), _Phase())
        self.are_alike = True

    def add(self, entry: Entry) -> None:
        """Add an entry to both phases."""
        for phase in self.phases:
            phase.entries.append(entry)

    def evaluate(self, prefill: Sequence[Entry], decode: Sequence[Entry]) -> None:
        """Add the evaluation of a gate to both phases: states of one go on in the other."""
        self.are_alike &= all(one.code == other.code for one, other in zip(prefill, decode, strict=True))
        for phase, entries in zip(self.phases, (prefill, decode), strict=True):
            phase.entries += entries

    def write(self, placed: _Placed, effects: tuple[_Effect, _Effect]) -> None:
        """Add what a gate turns on."""
        self.are_alike &= effects[PREFILL] is effects[DECODE]
        for phase, effect in enumerate(effects):
            if effect.reconstructs:
                raise RequestError(f"{placed.gate.where}.then", "a gate cannot turn a reconstruction on in part")
            for entry in self.phases[phase].take(effect):
                is_early = placed.is_early(entry.site)
                self.are_alike &= not is_early
                if phase == DECODE or not is_early:
                    field = gate_field(entry.group, placed.column.column, is_early=is_early)
                    self.phases[phase].entries.append(entry._replace(group=field))

    def attenuate(self, gates: Sequence[_Placed], own: tuple[Own, Own], dtype: StoredType, width: Widths) -> None:
        """Add the request's own steering, which gates attenuate: as without them, it acts before what gates turn on."""
        self.are_alike = False
        for phase, (vectors, program) in zip(self.phases, own, strict=True):
            entries = _added(vectors, 1.0, dtype, width)
            if program is not None:
                if program.reconstructs:
                    raise RequestError(f"{gates[0].gate.where}.then.attenuate", "there is no part of a reconstruction")
                entries += phase.take(_Effect.of(program))
            is_decode = phase is self.phases[DECODE]
            phase.entries[:0] = [entry._replace(code=entry.code | Flag.ATTENUATED) for entry in entries]
            for site in dict.fromkeys(entry.site for entry in entries):
                phase.entries += self._attenuations(gates, site, is_decode=is_decode)

    def _attenuations(self, gates: Sequence[_Placed], site: Site, *, is_decode: bool) -> Iterator[Entry]:
        for placed in gates:
            is_early = placed.is_early(site)
            if is_decode or not is_early:
                field = gate_field(EVERYWHERE, placed.column.column, is_early=is_early)
                factor = placed.gate.then.attenuate
                yield Entry(site, Code.ATTENUATE, None, None, (0.0, 0.0, 1.0 if factor is None else factor), field)
