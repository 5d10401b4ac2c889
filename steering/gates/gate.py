"""Gates in canonical form: conditions on rows of the stream, and what they turn on. Parsed, checked, not lowered yet.

A condition is a tree of `Leaf`, `ConditionGroup`, `Negation` and `Always`. The leaves compare scores with thresholds; a
`Reading` reads a score off each row. Names of probes, modules and SAEs stand as they are: the engine core, which has
them, looks them up when it lowers (`headgate.steering.gates.lowering`). Numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headgate.capture.schema.sites import Site
from headgate.steering.programs.feature_edits import FeatureEdit
from headgate.steering.programs.gate_codes import Combine, GateScope, Mode, Pool
from headgate.steering.programs.operations import Float32Row, ModuleVector, Operation


class NamedProbe(NamedTuple):
    """A registered probe of one class, by its name; `where` is its path in the client's document."""

    name: str
    where: str = "steering_gates"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InlineProbe:
    """A probe that a request brings.

    Attributes:
        site: Where it reads.
        weight: float32 ``[hidden]``, or the vector of a registered module.
        bias: Added to the product; 0 for a cosine.
        is_cosine: The score is the cosine of row and weight.
        where: Path in the client's document.
    """

    site: Site
    weight: Float32Row | ModuleVector
    bias: float = 0.0
    is_cosine: bool = False
    where: str = "steering_gates"


class FeatureReading(NamedTuple):
    """The activation of a feature of a registered SAE; `where` is its path in the client's document."""

    sae: str
    feature: int
    where: str = "steering_gates"


Reading = NamedProbe | InlineProbe | FeatureReading


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leaf:
    """A comparison of a score with a threshold.

    Attributes:
        reading: Gives the score of a row.
        is_below: Fires below the threshold instead of above.
        threshold: None stands for the probe's own.
        hysteresis: Not negative: once it fires, it does so until the score is that far on the other side.
        pool: Over which rows the score is pooled.
        alpha: Weight of a row in `Pool.EMA`, in (0, 1].
        where: Path in the client's document.
    """

    reading: Reading
    is_below: bool = False
    threshold: float | None = None
    hysteresis: float = 0.0
    pool: Pool = Pool.TOKEN
    alpha: float = 0.0
    where: str = "steering_gates"


class ConditionGroup(NamedTuple):
    """Several conditions: the largest strength of them (`Combine.ANY`), or the smallest (`Combine.ALL`)."""

    combine: Combine
    conditions: tuple[Condition, ...]


class Negation(NamedTuple):
    """One less the strength of a condition."""

    condition: Condition


class Always(NamedTuple):
    """A condition of strength 1, which fires on every row."""


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


PID_KEYS = ("setpoint", "kp", "ki", "kd", "min", "max")
"""The fields of `Pid`, in their order, as clients write them."""


class Pid(NamedTuple):
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
        return any(leaf.pool in (Pool.LAST_PROMPT, Pool.PROMPT_MEAN) for leaf in self.leaves)

    @property
    def has_state(self) -> bool:
        """Whether its strength at a row depends on other rows: those must be computed, not read from a cache."""
        remembers = any(leaf.pool is not Pool.TOKEN or leaf.hysteresis > 0 for leaf in self.leaves)
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
