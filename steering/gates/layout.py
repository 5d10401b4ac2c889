"""The columns of a request's gates: where a row's numbers lie, and what a trace calls them.

The layout follows from the gates alone, before any name in them is looked up, so the front end that reads a trace and
the engine core that lowers the gates agree without telling each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headgate.steering.gates.gate import Condition, ConditionGroup, Gate, Leaf, NamedProbe, Negation, Reading
from headgate.steering.programs.gate_codes import GATE_COLUMNS, LEAF_COLUMNS, NODE_COLUMNS, SCORE_COLUMNS

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
class GateLayout:
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


def layout_of(gates: Sequence[Gate], first: int = 0) -> GateLayout:
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
    return GateLayout(tuple(scores), tuple(columns), at - first)


def num_columns(condition: Condition) -> int:
    """Return the columns of a condition: of its leaves, and of the nodes that combine them two by two."""
    if isinstance(condition, Leaf):
        return LEAF_COLUMNS
    if isinstance(condition, ConditionGroup):
        return sum(map(num_columns, condition.conditions)) + NODE_COLUMNS * (len(condition.conditions) - 1)
    if isinstance(condition, Negation):
        return num_columns(condition.condition) + NODE_COLUMNS
    return NODE_COLUMNS


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
