"""The pool of steering vectors that all requests share: its slots, and what is in them. Numpy only.

A slot holds the effective vector of a site, or a row that a program reads or writes.

Allocation depends on the calls alone, so every rank that gets the same calls uses the same slots.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.capture.schema.sites import Site
from headgate.steering.programs.program import Program
from headgate.steering.spec import Steered
from headgate.steering.vectors.dtypes import STORAGE, Rows, StoredType
from headgate.steering.vectors.sums import Vectors, effective, is_zero
from headgate.steering.worker.placed_programs import ActingRule, PlacedProgram, RulePrograms, key_of, place

ZERO_SLOT = 0
"""Holds the zero vector for ever."""

UNSTEERED_ROW = 0
"""Table row that points to the zero vector at every site, for ever."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotWrites:
    """Vectors to write to the device's pool before the next forward.

    Attributes:
        slots: int64 ``[K]``, each once.
        vectors: ``[K, hidden]`` in the model's dtype; bfloat16 as uint16 bits.
    """

    slots: Int64Array
    vectors: Rows


_WINDOW = 512
"""Slots among which free ones are looked for first: most of a pool is free, or nothing is."""


class SlotPool:
    """Slots of a ``[num_slots, hidden]`` pool. One thread: the step thread.

    The caller that acquired slots is the only one to release them. Vectors are not compared with those in the pool:
    hashing each of them would take half a millisecond of the step thread for a request that brings a hundred. Requests
    share vectors by the keys of whole sums (`PooledSums`). New vectors get the lowest free slots, so the order of
    releases between two calls of `acquire` does not matter.

    Attributes:
        dtype: The model's.
        row_size: Width of a row.

    Args:
        num_slots: Size of the pool, `ZERO_SLOT` included.
        row_size: Width of a row; a narrower vector is followed by zeros.
        dtype: The model's.
    """

    def __init__(self, num_slots: int, row_size: int, dtype: StoredType) -> None:
        self.dtype = dtype
        self.row_size = row_size
        self._storage = STORAGE[dtype]
        self._is_free = np.ones(num_slots, dtype=np.bool_)
        self._is_free[ZERO_SLOT] = False
        self._held: dict[int, SlotWrites] = {}
        """Acquired slots and their vectors, by the first slot of each call of `acquire`."""
        self._unwritten: dict[int, SlotWrites] = {}
        self._num_used = 0
        self._start = 0
        """All slots below it are in use."""

    @property
    def capacity(self) -> int:
        """Vectors that fit, the zero vector aside."""
        return len(self._is_free) - 1

    @property
    def num_used(self) -> int:
        """Slots in use, `ZERO_SLOT` aside."""
        return self._num_used

    def fits(self, count: int) -> bool:
        """Return whether that many vectors can be acquired."""
        return count <= self.capacity - self.num_used

    def acquire(self, vectors: Rows) -> Int32Array:
        """Return a slot for each of `vectors`: int32 ``[n]``; `ZERO_SLOT` for zero vectors.

        Args:
            vectors: ``[n, hidden]`` in the pool's dtype; kept until they are released, not copied.

        Raises:
            AssertionError: If they do not all fit; nothing has changed then. Admission keeps that from happening.
        """
        if vectors.ndim != 2 or vectors.shape[1] > self.row_size or vectors.dtype != self._storage:
            raise AssertionError(
                f"vectors: {vectors.dtype} {vectors.shape}, expected {self._storage} (n, {self.row_size})"
            )
        if vectors.shape[1] < self.row_size:
            vectors = np.pad(vectors, ((0, 0), (0, self.row_size - vectors.shape[1])))
        kept = np.flatnonzero(np.logical_not(is_zero(vectors)))
        free = self._lowest_free(len(kept))
        if len(free) < len(kept):
            raise AssertionError(
                f"{len(kept)} new vectors do not fit the pool: {self.num_used} of {self.capacity} slots are in use"
            )
        if len(kept):
            self._is_free[free] = False
            self._start = int(free[-1]) + 1
            self._num_used += len(free)
            held = SlotWrites(free, vectors if len(kept) == len(vectors) else vectors[kept])
            self._held[int(free[0])] = self._unwritten[int(free[0])] = held
        slots = np.full(len(vectors), ZERO_SLOT, dtype=np.int32)
        slots[kept] = free
        return slots

    def release(self, slots: Int32Array) -> None:
        """Free `slots`, all that one call of `acquire` returned.

        Raises:
            AssertionError: If they are not held as such.
        """
        given_back = slots[slots != ZERO_SLOT]
        if not len(given_back):
            return
        first = int(given_back[0])
        held = self._held.get(first)
        if held is None or not np.array_equal(held.slots, given_back):
            raise AssertionError(f"slots {given_back.tolist()} were released, but not acquired together, or twice")
        del self._held[first]
        self._unwritten.pop(first, None)
        self._is_free[held.slots] = True
        self._start = min(self._start, first)
        self._num_used -= len(held.slots)

    def _lowest_free(self, count: int) -> Int64Array:
        """Return the lowest free slots, int64: `count` of them, or all if there are fewer."""
        for size in (_WINDOW, len(self._is_free)):
            free = np.flatnonzero(self._is_free[self._start : self._start + size])[:count]
            if len(free) == count:
                break
        return free + self._start

    def take_writes(self) -> SlotWrites | None:
        """Return the vectors that the device lacks, which count as written from here on; None if it lacks none."""
        unwritten, self._unwritten = list(self._unwritten.values()), {}
        if len(unwritten) < 2:
            return unwritten[0] if unwritten else None
        return SlotWrites(
            np.concatenate([held.slots for held in unwritten]), np.concatenate([held.vectors for held in unwritten])
        )

    def checksum(self) -> int:
        """Return the state as a number that is the same in every process, to compare ranks.

        All vectors in use are read, about a millisecond for 1000 of them: for debugging, not for each step.
        """
        total = zlib.crc32(self._is_free.tobytes())
        for first in sorted(self._held):
            total = zlib.crc32(self._held[first].vectors.tobytes(), total)
        return total


_NO_IDS: Int64Array = np.empty(0, dtype=np.int64)

SumKey = tuple[bytes, bytes, bytes]
"""Content keys of the global vectors, of a request's own, and of its rules in one phase; empty where there are none."""

_NO_VECTORS: SumKey = (b"", b"", b"")

Phases = tuple[Vectors | None, Vectors | None]
"""Vectors of the prefill and of the decode phase; None where nothing acts."""


def _no_slots() -> Int32Array:
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class PooledSum:
    """Effective vectors and programs of one phase, with their rows in the pool.

    Attributes:
        key: Key of the global vectors, the request's own, and its rules.
        own: The request's own, kept to compute the sum anew under other global vectors.
        column: Slot at each site, int32 ``[num_sites]``.
        slots: The slots of `column` that this sum acquired; where only global vectors act, the slot is that of the
            global phase.
        programs: The global program, those of rules, and the request's own, as far as there are any.
        program_slots: The slots that the request's own program acquired.
        users: Requests, modules and the global phases that use it.
        row: The table row that stands for it; `UNSTEERED_ROW` while none does.
        base: With rules: the sum without them, whose slots are used; None if nothing acts then.
    """

    key: SumKey
    own: Vectors | None
    column: Int32Array
    slots: Int32Array
    programs: tuple[PlacedProgram, ...] = ()
    program_slots: Int32Array = field(default_factory=_no_slots)
    users: int = 0
    row: int = UNSTEERED_ROW
    base: PooledSum | None = None


SumPair = tuple[PooledSum | None, PooledSum | None]
"""Sums of the prefill and of the decode phase; None where nothing acts."""

NO_SUMS: SumPair = (None, None)


class PooledSums:
    """The sums of global vectors and requests' own, each once in the pool for all its users. Step thread only.

    A sum without users stays in the pool until its slots are needed: used again, it costs nothing.

    Args:
        sites: The sites that this worker owns, in order.
        pool: Used by these sums alone.
        max_unused: Upper limit of sums without users that stay.
        dropped: Called with each sum that leaves the pool.
        op_sites: The sites of `sites` where programs act, in order.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        pool: SlotPool,
        max_unused: int,
        dropped: Callable[[PooledSum], None],
        op_sites: Sequence[Site] = (),
    ) -> None:
        self._site_ids = {site: index for index, site in enumerate(sites)}
        self._op_sites = {site: index for index, site in enumerate(op_sites)}
        self._pool = pool
        self._max_unused = max_unused
        self._dropped = dropped
        self._sums: dict[SumKey, PooledSum] = {}
        self._unused: dict[SumKey, None] = {}
        """Sums without users, the longest unused first."""
        self._global: Phases = (None, None)
        self._global_features: list[dict[int, tuple[Site, bytes]]] = [{}, {}]
        """`Program.written_features` of the global program of each phase."""
        self._global_sums: SumPair = NO_SUMS
        self._rules = RulePrograms(pool, self._op_sites)

    @property
    def has_global(self) -> bool:
        """Whether global vectors act in a phase."""
        return self._global_sums != NO_SUMS

    @property
    def num_live_slots(self) -> int:
        """Slots of sums that have users; the pool may hold more."""
        held = Counter(id(self._sums[key].base) for key in self._unused)
        live = [found for found in self._sums.values() if found.users > held[id(found)]]
        columns = [slots for found in live for slots in (found.column, found.program_slots)] + self._rules.slots
        return len(set(np.concatenate(columns).tolist()) - {ZERO_SLOT}) if columns else 0

    def acquire(self, own: Phases, rules: Sequence[ActingRule] = ()) -> SumPair:
        """Become a user of the sums of a request's own vectors, the global ones and rules; None where nothing acts."""
        return self._acquire_phase(0, own[0], rules), self._acquire_phase(1, own[1], rules)

    def release(self, sums: SumPair) -> None:
        """Stop being a user of sums that `acquire` returned."""
        for found in sums:
            if found is not None:
                found.users -= 1
                if not found.users:
                    self._cache_unused(found)

    def change_global(self, shared: Phases) -> None:
        """Replace the global vectors; every user must have released its sums before, to acquire them anew after."""
        self.release(self._global_sums)
        self.drop_unused()
        self._global = shared
        self._global_features = [one.program.written_features if isinstance(one, Steered) else {} for one in shared]
        self._global_sums = self.acquire((None, None))

    def change_rules(self, rules: Sequence[ActingRule]) -> None:
        """Replace the rules; every user must have released its sums before, to acquire them anew after."""
        self.drop_unused()
        self._rules.change(rules)

    def drop_unused(self) -> None:
        """Free the slots of sums without users."""
        while self._unused:
            self._drop_oldest()

    def _acquire_phase(self, phase: int, own: Vectors | None, rules: Sequence[ActingRule]) -> PooledSum | None:
        shared = self._global[phase]
        key = (b"" if shared is None else shared.key, b"" if own is None else own.key, key_of(rules, phase))
        if key == _NO_VECTORS:
            return None
        found = self._sums.get(key)
        if found is None:
            made = self._with_rules(key, phase, own, rules) if rules else self._compute(key, phase, own)
            found = self._sums[key] = made
        self._unused.pop(key, None)
        found.users += 1
        return found

    def _with_rules(self, key: SumKey, phase: int, own: Vectors | None, rules: Sequence[ActingRule]) -> PooledSum:
        """Return the sum of the same vectors whose programs act beside those of rules; it takes no slots of its own."""
        base = self._acquire_phase(phase, own, ())
        column = np.zeros(len(self._site_ids), dtype=np.int32) if base is None else base.column
        programs = () if base is None else base.programs
        global_sum = self._global_sums[phase]
        num_global = 0 if global_sum is None else len(global_sum.programs)
        # Controllers act on rows as the request's own steering leaves them.
        first, last = ([rule for rule in rules if rule.is_driven == is_last] for is_last in (False, True))
        acting = (
            *programs[:num_global],
            *self._rules.of(first, phase),
            *programs[num_global:],
            *self._rules.of(last, phase),
        )
        return PooledSum(key, own, column, _no_slots(), acting, base=base)

    def _compute(self, key: SumKey, phase: int, own: Vectors | None) -> PooledSum:
        global_sum = None if own is None else self._global_sums[phase]
        shared = self._global[phase]
        new = own if own is not None else shared
        if new is None:
            raise AssertionError("a sum of nothing")
        column = np.zeros(len(self._site_ids), dtype=np.int32) if global_sum is None else global_sum.column.copy()
        site_ids = self._site_ids
        if own is not None:  # elsewhere the slots of the global phase serve
            site_ids = {site: site_ids[site] for site in own.sites if site in site_ids}
        acting = [part for part in (shared, own) if part is not None and part.sites]
        ids, stored = effective(acting, site_ids, self._pool.dtype) if site_ids and acting else (_NO_IDS, None)
        program = new.program if isinstance(new, Steered) else None
        self._make_room(len(ids) + (0 if program is None else program.num_rows))
        slots = _no_slots() if stored is None else self._pool.acquire(stored)
        column[ids] = slots
        made = PooledSum(key, own, column, slots)
        if own is not None and global_sum is not None:
            known = self._global_features[phase]
            made.programs = _beside(own, shared, global_sum, known, self._op_sites)
        if program is not None:
            self._add_program(made, program)
        return made

    def _add_program(self, made: PooledSum, program: Program) -> None:
        made.program_slots = self._pool.acquire(program.rows)
        made.programs = (*made.programs, place(program, made.program_slots, self._op_sites))

    def _make_room(self, count: int) -> None:
        """Drop sums without users until `count` vectors fit, or none is left."""
        while self._unused and not self._pool.fits(count):
            self._drop_oldest()

    def _cache_unused(self, unused: PooledSum) -> None:
        self._unused[unused.key] = None
        if len(self._unused) > self._max_unused:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key = next(iter(self._unused))
        del self._unused[key]
        oldest = self._sums.pop(key)
        for slots in (oldest.slots, oldest.program_slots):
            self._pool.release(slots)
        self._dropped(oldest)
        self.release((oldest.base, None))


def _beside(
    own: Vectors,
    shared: Vectors | None,
    global_sum: PooledSum,
    known: Mapping[int, tuple[Site, bytes]],
    op_sites: Mapping[Site, int],
) -> tuple[PlacedProgram, ...]:
    """Return the global program, as far as there is one, as it acts on a request.

    Features that the request changes itself are left out: together, two edits would set neither's value.

    Args:
        own: Vectors of the request.
        shared: The global ones.
        global_sum: Sum of `shared`.
        known: `Program.written_features` of the global program.
        op_sites: Op sites of the worker.
    """
    if known and isinstance(own, Steered) and isinstance(shared, Steered):
        of_own = set(own.program.written_features.values())
        if without := [index for index, feature in known.items() if feature in of_own]:
            return (place(shared.program, global_sum.program_slots, op_sites, without),)
    return global_sum.programs
