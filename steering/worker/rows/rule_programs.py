"""The programs of rules in the pool of one worker, each once for all requests on which it acts. Numpy only.

What controllers read, and what they turn on, are programs of that kind: the first act on requests as rules do that only
observe, the others on those requests that a controller drives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headgate.capture.schema.batch import Int32Array
from headgate.capture.schema.sites import Site
from headgate.steering.gates.gate import AppliesTo, Selection
from headgate.steering.programs.program import Program
from headgate.steering.vectors.dtypes import Rows
from headgate.steering.worker.placed_programs import PlacedProgram, place


class ProgramSlots(Protocol):
    """A pool of vectors, as far as it is needed here; see `headgate.steering.worker.rows.vector_pool.SlotPool`."""

    def acquire(self, vectors: Rows) -> Int32Array:
        """Return a slot for each of `vectors`: int32 ``[n]``."""
        ...

    def release(self, slots: Int32Array) -> None:
        """Free slots that one call of `acquire` returned."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ActingRule:
    """A rule as workers know it.

    Attributes:
        name: The rule's.
        applies_to: The requests that it acts on; None for requests that a controller drives in its first column.
        columns: Its first column, and the one after its last.
        programs: Programs of the prefill and of the decode phase.
    """

    name: str
    applies_to: AppliesTo | None
    columns: tuple[int, int]
    programs: tuple[Program, Program]

    @property
    def is_driven(self) -> bool:
        """Whether a controller turns it on: nothing in it is evaluated."""
        return self.applies_to is None

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ActingRule:
        """Return the rule that `headgate.steering.core.rules.registry.KeptRule.to_worker` wrote, or one of its kind."""
        first, end = wire["columns"]
        programs = Program.from_wire(wire["prefill"]), Program.from_wire(wire["decode"])
        whom = wire["applies_to"]
        return cls(wire["name"], None if whom is None else AppliesTo(whom), (first, end), programs)

    def acts(self, selection: Selection, driven: Collection[int]) -> bool:
        """Whether it acts on a request with a selection that controllers drive in some columns."""
        if self.applies_to is None:
            return self.columns[0] in driven
        return self.applies_to.acts(self.name, selection)


def acting_of(
    rules: Sequence[ActingRule], selection: Selection, driven: Collection[int] = ()
) -> tuple[ActingRule, ...]:
    """Return the rules that act on a request, in their order; see `ActingRule.acts`."""
    return tuple(rule for rule in rules if rule.acts(selection, driven))


class RulePrograms:
    """The programs of rules in a pool. Step thread only.

    Args:
        pool: Where their rows are.
        op_sites: Index of each site of this worker where programs act.
    """

    def __init__(self, pool: ProgramSlots, op_sites: Mapping[Site, int]) -> None:
        self._pool = pool
        self._op_sites = op_sites
        self._slots: dict[bytes, Int32Array] = {}
        """By the key of the program."""
        self._placed: dict[bytes, PlacedProgram] = {}

    @property
    def slots(self) -> list[Int32Array]:
        """The slots of each program."""
        return list(self._slots.values())

    def change(self, rules: Sequence[ActingRule]) -> None:
        """Place the programs of `rules` in place of those of earlier ones, which nothing uses any more."""
        for slots in self._slots.values():
            self._pool.release(slots)
        self._slots.clear()
        self._placed.clear()
        for program in (program for rule in rules for program in rule.programs):
            if program.key not in self._slots:
                self._slots[program.key] = self._pool.acquire(program.rows)
                self._placed[program.key] = place(program, self._slots[program.key], self._op_sites)

    def of(self, rules: Sequence[ActingRule], phase: int) -> tuple[PlacedProgram, ...]:
        """Return the programs of some rules in a phase: 0 is prefill, 1 decode."""
        return tuple(self._placed[rule.programs[phase].key] for rule in rules)


def key_of(rules: Sequence[ActingRule], phase: int) -> bytes:
    """Return the content key of the rules that act in a phase; empty if none does."""
    return b"".join(rule.programs[phase].key for rule in rules)
