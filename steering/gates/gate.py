"""Gates and rules in canonical form: conditions on rows of the stream, and what they turn on. Parsed, not lowered yet.

A condition is a tree of `Leaf`, `ConditionGroup`, `Negation` and `Always`. The leaves compare scores with thresholds; a
`Reading` reads a score off each row. Names of probes, modules and SAEs stand as they are: the engine core, which has
them, looks them up when it lowers (`headgate.steering.gates.lowering`). Numpy only.

The columns of a row's numbers (`columns_of`) follow from the gates alone, before any name in them is looked up, so the
front end that reads a trace and the engine core that lowers the gates need not exchange it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

import msgspec

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import BEFORE_KERNEL, BEFORE_MLP_OUT, MIXER_HOOKS, HookPoint, Site, sort_sites
from headgate.steering.programs.codes import (
    GATE_COLUMNS,
    LEAF_COLUMNS,
    NODE_COLUMNS,
    SCORE_COLUMNS,
    Combine,
    GateScope,
    Mode,
    ScorePooling,
)
from headgate.steering.programs.feature_edits import FeatureEdit, sae_key
from headgate.steering.programs.operations import ModuleVector, Operation, OperationVector, named_modules
from headgate.steering.programs.wire import ContentWire


class NamedProbe(msgspec.Struct, frozen=True, tag=True):
    """A registered probe of one class, by its name; `where` is its path in the client's document."""

    name: str
    where: str = "steering_gates"


class InlineProbe(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """A probe that a request brings.

    Attributes:
        site: Where it reads.
        weight: float32 ``[hidden]``, or the vector of a registered module.
        bias: Added to the product; 0 for a cosine.
        is_cosine: The score is the cosine of row and weight.
        where: Path in the client's document.
    """

    site: Site
    weight: OperationVector
    bias: float = 0.0
    is_cosine: bool = False
    where: str = "steering_gates"


class FeatureReading(msgspec.Struct, frozen=True, tag=True):
    """The activation of a feature of a registered SAE; `where` is its path in the client's document."""

    sae: str
    feature: int
    where: str = "steering_gates"


Reading = NamedProbe | InlineProbe | FeatureReading


class Leaf(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """A comparison of a score with a threshold.

    Attributes:
        reading: Gives the score of a row.
        is_below: Fires below the threshold instead of above.
        threshold: None stands for the probe's own.
        hysteresis: Not negative: once it fires, it does so until the score is that far on the other side.
        pooling: Over which rows the score is pooled.
        alpha: Weight of a row in `ScorePooling.EMA`, in (0, 1].
        where: Path in the client's document.
    """

    reading: Reading
    is_below: bool = False
    threshold: float | None = None
    hysteresis: float = 0.0
    pooling: ScorePooling = ScorePooling.TOKEN
    alpha: float = 0.0
    where: str = "steering_gates"


class GatePhase(str, Enum):
    """Rows on which a condition holds that reads nothing, as clients write it."""

    BOTH = "always"
    PROMPT = "prompt"
    GENERATED = "generated"


class ConditionGroup(msgspec.Struct, frozen=True, tag=True):
    """Several conditions: the largest strength of them (`Combine.ANY`), or the smallest (`Combine.ALL`)."""

    combine: Combine
    conditions: tuple[Condition, ...]


class Negation(msgspec.Struct, frozen=True, tag=True):
    """One less the strength of a condition."""

    condition: Condition


class Always(msgspec.Struct, frozen=True, tag=True):
    """A condition of strength 1, which fires on every row; on rows of another phase than `phase` it has strength 0."""

    phase: GatePhase = GatePhase.BOTH


Condition = Leaf | ConditionGroup | Negation | Always


class ModuleThen(NamedTuple):
    """A registered module, with its scale; `where` is the path of its name."""

    name: str
    scale: float = 1.0
    where: str = "steering_gates"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Then:
    """The effect of a gate: exactly one of these.

    Attributes:
        operations: Operations, vectors among them as `Method.ADDITIVE`; none limited to positions.
        features: Edits of features of SAEs, no reconstruction.
        module: A registered module.
        attenuate: Factor of the request's own static steering at full strength.
        observes: Nothing acts; strengths are traced and counted.
    """

    operations: tuple[Operation, ...] = ()
    features: tuple[FeatureEdit, ...] = ()
    module: ModuleThen | None = None
    attenuate: float | None = None
    observes: bool = False


class Pid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"least": "min", "largest": "max"}):
    """A control loop, which holds the pooled score of a gate's one comparison at a set point: `Mode.PID`.

    Attributes:
        setpoint: The score to hold.
        kp: Proportional gain.
        ki: Integral gain, for each row.
        kd: Differential gain, for each row.
        least: Least strength, 0 at most.
        largest: Largest strength, 0 at least.
    """

    setpoint: float
    kp: float = 0.5
    ki: float = 0.1
    kd: float = 0.0
    least: float = -4.0
    largest: float = 4.0


PID_KEYS = Pid.__struct_encode_fields__
"""The fields of `Pid`, in their order, as clients write them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gate:
    """One gate.

    Attributes:
        name: Unique in its request, at most `headgate.steering.vectors.phase_vectors.MAX_NAME` characters.
        when: The condition.
        then: The steering that it turns on.
        mode: How the strength of each leaf follows from its score.
        amount: Gain of `Mode.PROPORTIONAL`, sharpness of `Mode.SIGMOID`; 1 for the others.
        pid: The control loop of `Mode.PID`; None for the others.
        scope: On which rows it acts.
        conversation: Id of the conversation that `GateScope.REST` goes on in; None if it ends with the request.
        where: Path in the client's document.
    """

    name: str
    when: Condition
    then: Then
    mode: Mode = Mode.BINARY
    amount: float = 1.0
    pid: Pid | None = None
    scope: GateScope = GateScope.THIS
    conversation: str | None = None
    where: str = "steering_gates"

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of its condition, from left to right."""
        return tuple(leaves_of(self.when))

    @property
    def largest_strength(self) -> float:
        """Largest magnitude that its strength can have."""
        if self.pid is not None:
            return max(-self.pid.least, self.pid.largest)
        return self.amount if self.mode is Mode.PROPORTIONAL else 1.0

    @property
    def is_pooled_over_prompt(self) -> bool:
        """Whether it is decided at the end of the prompt."""
        return any(leaf.pooling in (ScorePooling.LAST_PROMPT, ScorePooling.PROMPT_MEAN) for leaf in self.leaves)

    @property
    def is_constant_after_prompt(self) -> bool:
        """Whether all that it compares is known at the end of the prompt: its strength stays from there on."""
        poolings = [leaf.pooling for leaf in self.leaves]
        of_prompt = {ScorePooling.LAST_PROMPT, ScorePooling.PROMPT_MEAN}
        return self.pid is None and bool(poolings) and {*poolings} <= of_prompt

    @property
    def has_state(self) -> bool:
        """Whether its strength at a row depends on other rows: those must be computed, not read from a cache."""
        remembers = any(leaf.pooling is not ScorePooling.TOKEN or leaf.hysteresis > 0 for leaf in self.leaves)
        return self.scope is not GateScope.THIS or self.pid is not None or remembers


def leaves_of(condition: Condition) -> Iterator[Leaf]:
    """Yield the leaves of a condition, from left to right."""
    if isinstance(condition, Leaf):
        yield condition
    elif isinstance(condition, ConditionGroup):
        for each in condition.conditions:
            yield from leaves_of(each)
    elif isinstance(condition, Negation):
        yield from leaves_of(condition.condition)


def probe_key(name: str) -> str:
    """Return the key of a probe among the registered names of an engine core, which no module and no SAE can have."""
    return f"probe\n{name}"


def names_of(gates: Iterable[Gate]) -> dict[str, str]:
    """Return the modules, and the keys of SAEs and probes, that gates name, each with the path that names it first."""
    found: dict[str, str] = {}
    for gate in gates:
        for key, where in _names(gate):
            found.setdefault(key, where)
    return found


def _names(gate: Gate) -> Iterator[tuple[str, str]]:
    for leaf in gate.leaves:
        yield from _read(leaf.reading)
    yield from named_modules(gate.then.operations).items()
    for edit in gate.then.features:
        yield sae_key(edit.sae), edit.sae_at
    if gate.then.module is not None:
        yield gate.then.module.name, gate.then.module.where


def _read(reading: Reading) -> Iterator[tuple[str, str]]:
    if isinstance(reading, NamedProbe):
        yield probe_key(reading.name), reading.where
    elif isinstance(reading, FeatureReading):
        yield sae_key(reading.sae), f"{reading.where}.sae"
    elif isinstance(reading.weight, ModuleVector):
        yield reading.weight.module, f"{reading.where}.{'cosine' if reading.is_cosine else 'weight'}"


_HEADS = {*BEFORE_KERNEL, HookPoint.HOOK_Z} - {HookPoint.ATTN_IN, *MIXER_HOOKS}
_ATTENTION = {*_HEADS, *MIXER_HOOKS, HookPoint.ATTN_IN, HookPoint.ATTN_OUT_PRE, HookPoint.ATTN_OUT}
_MLP = {*BEFORE_MLP_OUT, HookPoint.MLP_OUT}
"""Branches that some models compute side by side, in an order of their own."""


def _are_beside(first: Site, second: Site) -> bool:
    """Whether some models compute the values of two sites side by side, the first before the other in `sort_sites`."""
    if first.layer != second.layer:
        return False
    is_mixer = first.hook in MIXER_HOOKS
    other = second.hook if is_mixer else first.hook
    heads_and_mixer = (is_mixer or second.hook in MIXER_HOOKS) and other in _HEADS
    return heads_and_mixer or (first.hook in _ATTENTION and second.hook in _MLP)


def is_reached(write: Site, read: Site) -> bool:
    """Whether a number that is read at a site can act at another one in the same forward, or at the same.

    It cannot where the forward has been before, nor from a layer's attention in the MLP or the mixer beside it.
    """
    return not _are_beside(read, write) and sort_sites((write, read))[0] == read


def check_this_token(gate: Gate, reads: Collection[Site], writes: Collection[Site]) -> None:
    """Check that a gate of the scope `GateScope.THIS` can act on the row that it reads; others may write anywhere.

    Args:
        gate: The gate.
        reads: Sites that its condition reads, as far as they are known.
        writes: Sites that it writes, likewise.

    Raises:
        RequestError: Naming its scope, and one that works.
    """
    if gate.scope is not GateScope.THIS:
        return
    if all(is_reached(write, read) for read in reads for write in writes):
        return
    for read, write in product(sort_sites(reads), sort_sites(writes)):
        if not is_reached(write, read):
            raise RequestError(
                f"{gate.where}.scope",
                f"this_token cannot act: the gate reads at {read.name} and writes at {write.name}, which must not come "
                "before, nor be in the MLP or the mixer beside a layer's attention; next_token works, or write at "
                "later sites",
            )


def check_reads(gate: Gate, reads: Collection[Site]) -> None:
    """Check that the scores of a gate come in one order in every model, whatever its scope.

    Args:
        gate: The gate.
        reads: Sites that its condition reads, as far as they are known.

    Raises:
        RequestError: Naming its condition, if it reads both in the attention and in the MLP or the mixer of a layer.
    """
    if len(reads) < 2:
        return
    for one, other in product(sort_sites(reads), repeat=2):
        if _are_beside(one, other):
            raise RequestError(
                f"{gate.where}.when",
                f"reads at {one.name} and at {other.name}, which some models compute side by side; read the stream "
                "between them, or use a gate for each",
            )


COLUMNS_PER_GATE = 8
"""Columns that the engine has for each gate of a request, on the average: a gate of one leaf takes 7."""


FOLLOWING = 2
"""Offset of the strength that acts on the next row at earlier sites, among a gate's columns."""


COUNT = 2
"""Offset of the number of rows that it wrote, among a gate's columns in the states."""


class ScoreColumn(NamedTuple):
    """A score's column.

    Attributes:
        name: In traces.
        reading: Gives the score.
        column: Column of the score.
    """

    name: str
    reading: Reading
    column: int


class GateColumn(NamedTuple):
    """A gate's columns.

    Attributes:
        gate: The gate.
        column: Column of the strength that acts; the one that is shown follows, then the one that acts on the next row
            at earlier sites.
        first: First column of its leaves and nodes, which follow one another as `num_columns` counts them.
    """

    gate: Gate
    column: int
    first: int


@dataclass(frozen=True, slots=True)
class GateColumns:
    """The columns of some gates.

    Attributes:
        scores: Each score once: leaves that name one probe share it.
        gates: In their order.
        num_columns: Number of all columns.
    """

    scores: tuple[ScoreColumn, ...]
    gates: tuple[GateColumn, ...]
    num_columns: int

    def score_column(self, reading: Reading) -> int:
        """Return the column of a reading's score.

        Raises:
            AssertionError: If it is none of these gates'.
        """
        for score in self.scores:
            if score.reading is reading or _is_same_probe(score.reading, reading):
                return score.column
        raise AssertionError(f"no column for {reading}")


def columns_of(gates: Sequence[Gate], first: int = 0) -> GateColumns:
    """Lay out the columns of gates, from `first` on: all scores, then each gate's leaves, nodes and itself."""
    scores: list[ScoreColumn] = []
    at = first
    for gate in gates:
        for name, reading in _named_readings(gate):
            if not any(_is_same_probe(score.reading, reading) for score in scores):
                scores.append(ScoreColumn(name, reading, at))
                at += SCORE_COLUMNS
    columns: list[GateColumn] = []
    for gate in gates:
        begins = at
        at += num_columns(gate.when)
        columns.append(GateColumn(gate, at, begins))
        at += GATE_COLUMNS
    return GateColumns(tuple(scores), tuple(columns), at - first)


def num_columns(condition: Condition) -> int:
    """Return the columns of a condition: of its leaves, and of the nodes that combine them two by two."""
    if isinstance(condition, Leaf):
        return LEAF_COLUMNS
    if isinstance(condition, ConditionGroup):
        return sum(map(num_columns, condition.conditions)) + NODE_COLUMNS * (len(condition.conditions) - 1)
    if isinstance(condition, Negation):
        return num_columns(condition.condition) + NODE_COLUMNS
    return NODE_COLUMNS if condition.phase is GatePhase.BOTH else 2 * NODE_COLUMNS


def _named_readings(gate: Gate) -> list[tuple[str, Reading]]:
    """Return the readings of a gate, named: a probe by its name, others by the gate's, counted from the second on."""
    found: list[tuple[str, Reading]] = []
    num_inline = 0
    for leaf in gate.leaves:
        if isinstance(leaf.reading, NamedProbe):
            found.append((leaf.reading.name, leaf.reading))
            continue
        found.append((f"{gate.name}.{num_inline}" if num_inline else gate.name, leaf.reading))
        num_inline += 1
    return found


def _is_same_probe(one: Reading, other: Reading) -> bool:
    return isinstance(one, NamedProbe) and isinstance(other, NamedProbe) and one.name == other.name


Selection = Collection[str] | None
"""The rules that a request names in ``steering_rules``; None if it has no such field."""

_PLACE = "rule[0]."
"""Begins the path of each field of a rule's gate as the parser of gates writes it."""


WHO_KNOWS_RULES = "GET /v1/steering/rules lists the registered ones for clients with the role 'steer'"
"""Stands for rules in errors about requests, whose clients do not learn the names of rules."""


class AppliesTo(str, Enum):
    """The requests that a rule acts on."""

    ALL = "all"
    OPT_IN = "opt_in"
    OPT_OUT = "opt_out"

    def acts(self, name: str, selection: Selection) -> bool:
        """Whether a rule of that name acts on a request with a selection."""
        if self is AppliesTo.ALL:
            return True
        return self is AppliesTo.OPT_OUT if selection is None else name in selection


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rule:
    """A rule: a gate with its name, and whom it acts on."""

    gate: Gate
    applies_to: AppliesTo

    @property
    def name(self) -> str:
        """The name of the rule, and of its gate."""
        return self.gate.name


def rule_key(name: str) -> str:
    """Return the key of a rule among the registered names of an engine core, which nothing else there can have."""
    return f"rule\n{name}"


@contextmanager
def fields_of_rule() -> Iterator[None]:
    """Let errors about a rule's gate name the fields of the rule's own document: ``when`` for ``rule[0].when``."""
    try:
        yield
    except RequestError as error:
        message = str(error).removeprefix(f"{error.field}: ").replace(_PLACE, "")
        raise RequestError(error.field.removeprefix(_PLACE), message) from error


FIELD = "rule"
"""Name of the list of one gate that a rule's document is read as."""


def gates_key(wire: ContentWire) -> bytes:
    """Return the content key of gates in wire form, 32 bytes."""
    return hashlib.sha256(msgspec.msgpack.encode(wire)).digest()
