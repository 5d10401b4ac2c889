"""Programs whose rows have slots of the vector pool, and the entries of a table row as the device has them. Numpy only.

Letters in shape comments: P op sites of this worker, R table rows, E entries of a table row at a site, at most.

The programs of rules are in the pool once for all requests on which they act. What controllers read, and what they turn
on, are programs of that kind: the first act on requests as rules do that only observe, the others on those requests
that a controller drives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headgate.capture.schema.batch import BoolArray, Int32Array, Int64Array
from headgate.capture.schema.sites import Site
from headgate.steering.gates.gate import AppliesTo, Selection
from headgate.steering.programs.codes import (
    CODE,
    CODE_MASK,
    NO_ROW,
    NUM_CODES,
    NUM_PARAMS,
    READ,
    WRITE,
    WRITE_SCALE,
    Code,
)
from headgate.steering.programs.program import NUM_PASSES, Program, pass_of
from headgate.steering.vectors.dtypes import Float32Rows, Rows


class PlacedProgram(NamedTuple):
    """The entries of a program at a worker's op sites, those of a site in the order in which they act.

    Attributes:
        sites: int64 ``[n]``, ascending: the index of each entry's op site.
        codes: int32 ``[n, NUM_CODES]``; rows are slots of the vector pool.
        params: float32 ``[n, NUM_PARAMS]``.
    """

    sites: Int64Array
    codes: Int32Array
    params: Float32Rows


def place(
    program: Program, slots: Int32Array, op_sites: Mapping[Site, int], without: Sequence[int] = ()
) -> PlacedProgram:
    """Return the entries of a program at a worker's op sites.

    Args:
        program: Sites that the worker does not own are left out.
        slots: int32 ``[program.num_rows]``: where its rows are in the pool.
        op_sites: The worker's, with their indices, which ascend in the order of the forward pass.
        without: Indices of entries to leave out.
    """
    runs = [(op_sites.get(site, -1), count) for site, count in program.runs]
    sites = np.array([at for at, count in runs for _ in range(count)], np.int64)
    if without:
        sites[list(without)] = -1
    codes, params = program.codes, program.params
    if without or any(at < 0 for at, _ in runs):
        is_here = sites >= 0
        sites, codes, params = sites[is_here], codes[is_here], params[is_here]
    else:
        codes = codes.copy()
    slot_of = np.full(len(slots) + 1, NO_ROW, np.int32)
    slot_of[1:] = slots
    rows = slice(READ, WRITE + 1)
    codes[:, rows] = slot_of[codes[:, rows]]
    return PlacedProgram(sites, codes, params)


def acting(programs: Sequence[PlacedProgram], vector_slots: Int32Array) -> PlacedProgram:
    """Return all entries of one table row.

    Args:
        programs: At least one; the global vectors' first.
        vector_slots: int32 ``[P]``: of the sum of the additive vectors at each op site, which act after replacements
            and before other operations; 0 for none. They are entries where a program acts.
    """
    together = np.zeros(len(vector_slots), np.bool_)
    for program in programs:
        together[program.sites] = True
    adding = np.flatnonzero(together & (vector_slots != 0))
    if len(programs) == 1 and not len(adding):
        return programs[0]
    added = np.zeros((len(adding), NUM_CODES), np.int32)
    added[:, CODE], added[:, WRITE] = Code.ADD, vector_slots[adding]
    ones = np.zeros((len(adding), NUM_PARAMS), np.float32)
    ones[:, WRITE_SCALE] = 1.0
    parts = [PlacedProgram(adding, added, ones), *programs]
    sites, codes, params = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(sites * NUM_PASSES + _PASS_OF[codes[:, CODE] & CODE_MASK], kind="stable")
    return PlacedProgram(sites[order], codes[order], params[order])


_PASS_OF = np.array([pass_of(code) for code in range(max(Code) + 1)], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ProgramWrites:
    """Changes of the programs of table rows, to write to the device before the next forward.

    Attributes:
        counts: int32 ``[P, K]``: entries of each changed row at each op site; 0 where no program acts.
        places: int64 ``[n]``: ``(site * R + row) * E + index`` of each entry of the changed rows. What follows a
            row's entries is not read, and stays.
        codes: int32 ``[n, NUM_CODES]``.
        params: float32 ``[n, NUM_PARAMS]``.
    """

    counts: Int32Array
    places: Int64Array
    codes: Int32Array
    params: Float32Rows


class _Bound(NamedTuple):
    """A table row's entries.

    Attributes:
        counts: int32 ``[P]``.
        places: int64 ``[n]``: of its entries.
        program: The entries.
    """

    counts: Int32Array
    places: Int64Array
    program: PlacedProgram


class ProgramTable:
    """The programs of table rows, on the host. Step thread only.

    Args:
        num_sites: P.
        num_rows: R.
        max_entries: E.

    Attributes:
        acts: bool ``[R, P]``: whether the program of a row has entries at a site.
    """

    def __init__(self, num_sites: int, num_rows: int, max_entries: int) -> None:
        self.max_entries = max_entries
        self.acts: BoolArray = np.zeros((num_rows, num_sites), dtype=np.bool_)
        self._num_sites = num_sites
        self._num_rows = num_rows
        self._bound: dict[int, _Bound] = {}
        """The program of each row that has one."""

    def bind(self, row: int, programs: Sequence[PlacedProgram], vector_slots: Int32Array) -> None:
        """Make `programs` those of a table row.

        Args:
            row: Below R.
            programs: In the order in which they act; there may be none.
            vector_slots: int32 ``[P]``: slot of the row's additive vectors at each op site.

        Raises:
            AssertionError: If a site gets more than E entries. The engine core refuses such requests.
        """
        if self._bound.pop(row, None) is not None:
            self.acts[row] = False
        if not programs:
            return
        program = acting(programs, vector_slots)
        counts = np.bincount(program.sites, minlength=self._num_sites)
        if counts.max(initial=0) > self.max_entries:
            raise AssertionError(f"a program has more than {self.max_entries} entries at a site")
        self.acts[row] = counts > 0
        first = np.cumsum(counts) - counts
        index = np.arange(len(program.sites)) - first[program.sites]
        places = (program.sites * self._num_rows + row) * self.max_entries + index
        self._bound[row] = _Bound(counts.astype(np.int32), places, program)

    def writes(self, rows: Sequence[int]) -> ProgramWrites:
        """Return what the device needs to know of `rows`, which changed."""
        counts = np.zeros((self._num_sites, len(rows)), np.int32)
        found = []
        for at, row in enumerate(rows):
            if (bound := self._bound.get(row)) is not None:
                counts[:, at] = bound.counts
                found.append(bound)
        if len(found) == 1:
            program = found[0].program
            return ProgramWrites(counts=counts, places=found[0].places, codes=program.codes, params=program.params)
        return ProgramWrites(
            counts,
            np.concatenate([_NO_PLACES, *(one.places for one in found)]),
            np.concatenate([_NO_CODES, *(one.program.codes for one in found)]),
            np.concatenate([_NO_PARAMS, *(one.program.params for one in found)]),
        )


_NO_PLACES = np.empty(0, np.int64)
_NO_CODES = np.empty((0, NUM_CODES), np.int32)
_NO_PARAMS = np.empty((0, NUM_PARAMS), np.float32)


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
