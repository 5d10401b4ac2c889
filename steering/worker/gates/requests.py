"""The requests of a worker whose programs have gates: their slots of states, and where each batch row lies. Numpy only.

Letters in shape comments: G requests with gates in a step, N their rows, T batch rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import BatchView, BoolArray, Int32Array, Int64Array
from headgate.capture.schema.sites import Site
from headgate.steering.gates.gate import Selection
from headgate.steering.programs.codes import (
    CODE,
    CODE_MASK,
    EARLY,
    GATE_COLUMNS,
    NUM_CODES,
    Code,
    TokenFlag,
    change_index,
    gate_column,
)
from headgate.steering.programs.program import Program
from headgate.steering.worker.placed_programs import ActingRule

NO_SLOT = 0
"""Slot of batch rows without gates."""


def slots_needed(max_num_seqs: int) -> int:
    """Return the number of slots with which requests that run keep theirs, also beside preempted ones."""
    return 2 * max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class OwnGates:
    """A request with respect to gates; it may have none.

    Attributes:
        num_prompt: Tokens of its prompt.
        programs: Its own programs, of both phases.
        selection: The rules that it selects.
        is_traced: Whether its trace is wanted, which has all its rows.
        is_captured: Whether it captures: what is captured is described by how its rows were steered.
        is_counted: Whether the engine core needs no more of its rows than how many its gates wrote.
    """

    num_prompt: int
    programs: tuple[Program, ...] = ()
    selection: Selection = None
    is_traced: bool = False
    is_captured: bool = False
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class GatedRequest:
    """A request with gates, of its own or of rules; or without gates, if its rows are to be sent to the host.

    Attributes:
        num_prompt: Tokens of its prompt.
        early: First columns of gates that act, in this worker, at sites before they are evaluated.
        of_rules: The columns of `early` that belong to rules: they may not have been there on earlier rows.
        reported: Columns of its rows that the host reads.
        is_counted: Whether the count in its states is all that the host reads of it, when it ends or on request.
        sites: Where its gates are evaluated.
    """

    num_prompt: int
    early: tuple[int, ...]
    of_rules: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()
    is_counted: bool = False
    sites: frozenset[Site] = frozenset()


def gated_request(
    own: OwnGates, rules: Sequence[ActingRule], sites: Collection[Site] | None = None
) -> GatedRequest | None:
    """Return what the programs that act on a request say about its gates; None if there are none, and no trace.

    Args:
        own: The request's own gates.
        rules: The rules that act on it.
        sites: Op sites of the worker; None if it has all. After the pipeline stage of a gate's early entries, its
            column has what the gate decided on the row, which nothing may overwrite.
    """
    gated = [*{id(program): program for program in own.programs if program.has_gates}.values()]
    if not gated and not rules and not own.is_traced:
        return None
    # What controllers drive follows from no row before.
    evaluated = [program for rule in rules if not rule.is_driven for program in rule.programs]
    has_scores = own.is_traced or own.is_captured
    of_own = [_columns_of(program, sites, has_scores=has_scores) for program in gated]
    of_rules = [_columns_of(program, sites, has_scores=has_scores) for program in evaluated]
    columns = _Columns.joined([*of_own, *of_rules])
    early = tuple(sorted(columns.early))
    is_counted = own.is_counted and not (own.is_captured or rules or early)
    of_rules_early, sites = _Columns.joined(of_rules).early, _sites_of([*gated, *evaluated])
    return GatedRequest(own.num_prompt, early, of_rules_early, columns.reported, is_counted, sites)


def _sites_of(programs: Sequence[Program]) -> frozenset[Site]:
    """Return the sites at which gates of programs are evaluated."""
    kinds = [(program.sites, (program.codes[:, CODE] & CODE_MASK).tolist()) for program in programs]
    return frozenset(site for sites, codes in kinds for site, kind in zip(sites, codes, strict=True) if kind == _GATE)


class _Columns(NamedTuple):
    """Columns of programs.

    Attributes:
        early: The first ones of gates that act, in this worker, at sites before they are evaluated.
        reported: The ones that the host reads: the strengths of gates, to count and to pass on; and scores, if they are
            passed on, or for the controller whose program has nothing but them.
    """

    early: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()

    @classmethod
    def joined(cls, each: Sequence[_Columns]) -> _Columns:
        """Return the columns of all."""
        if len(each) == 1:
            return each[0]
        return cls(*(frozenset().union(*columns) for columns in zip(*each, strict=True)))


_GATE, _SCORE = int(Code.GATE), int(Code.SCORE)
"""Python compares members of an enumeration several times as slowly as numbers."""


def _columns_of(program: Program, sites: Collection[Site] | None, *, has_scores: bool) -> _Columns:
    is_here = None if sites is None else tuple([site in sites for site in program.sites])
    return _columns_in(program.codes.tobytes(), is_here, has_scores=has_scores or not program.has_gates)


@lru_cache(maxsize=256)
def _columns_in(codes: bytes, is_here: tuple[bool, ...] | None, *, has_scores: bool) -> _Columns:
    """Return the columns of programs with these codes; cached, since gates of one form have the same.

    Args:
        codes: `Program.codes`, of n entries.
        is_here: Whether each of the n entries acts in this worker; None if all do.
        has_scores: Whether the host reads scores.
    """
    early: set[int] = set()
    reported: set[int] = set()
    entries = np.frombuffer(codes, np.int32).reshape(-1, NUM_CODES).tolist()
    acting = (True,) * len(entries) if is_here is None else is_here
    for (code, _, _, field), acts in zip(entries, acting, strict=True):
        kind = code & CODE_MASK
        if kind == _GATE:
            reported.update(range(change_index(code), change_index(code) + GATE_COLUMNS))
        elif kind == _SCORE and has_scores:
            reported.add(change_index(code))
        if field & EARLY and acts:
            early.add(gate_column(field))
    return _Columns(frozenset(early), frozenset(reported))


class GateRows(NamedTuple):
    """The batch rows of the requests with gates in a step, one request after the other.

    Attributes:
        req_ids: The requests, G.
        starts: int64 ``[G]``: first batch row of each.
        firsts: int64 ``[G]``: position of that row.
        counts: int64 ``[G]``: rows of each.
        has_one_each: Whether each request has one row.
    """

    req_ids: tuple[str, ...]
    starts: Int64Array
    firsts: Int64Array
    counts: Int64Array
    has_one_each: bool

    def counted(self, view: BatchView) -> tuple[GateRows, BoolArray]:
        """Return the rows that count, and for each of these rows, ``[N]``, whether it does.

        Args:
            view: Of the step, as its outcome has it. Requests without a row that counts are left out.
        """
        place_of = {req_id: at for at, req_id in enumerate(view.req_ids)}
        at = np.array([place_of[req_id] for req_id in self.req_ids], np.int64)
        firsts, counts = view.num_computed[at], view.num_scheduled[at]
        counted = GateRows(self.req_ids, self.starts, firsts, counts, has_one_each=bool((counts == 1).all()))
        counts_row: BoolArray = self.offsets < counts.repeat(self.counts)
        return counted.part(counts.nonzero()[0]), counts_row

    def part(self, at: Int64Array) -> GateRows:
        """Return the rows of some of the requests, by their places; all are ascending."""
        if len(at) == len(self.req_ids):
            return self
        req_ids = tuple(self.req_ids[each] for each in at.tolist())
        counts = self.counts[at]
        return GateRows(req_ids, self.starts[at], self.firsts[at], counts, has_one_each=bool((counts == 1).all()))

    @property
    def batch_rows(self) -> Int64Array:
        """The batch row of each of their rows, int64 ``[N]``."""
        return self.starts if self.has_one_each else self.starts.repeat(self.counts) + self.offsets

    @property
    def offsets(self) -> Int64Array:
        """How many rows of its request come before each of their rows in this step, int64 ``[N]``."""
        ends = self.counts.cumsum()
        found: Int64Array = np.arange(int(ends[-1])) - (ends - self.counts).repeat(self.counts)
        return found


class GateSlots:
    """Which request has which slot. Step thread only.

    A request has a slot from its first step on. One that has no step for long is preempted and begins anew; so where
    slots are short, the one that had no step for the longest time loses its.

    Args:
        num_slots: `NO_SLOT` included.

    Attributes:
        on_loss: All are called with a request before another one gets its slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.on_loss: list[Callable[[str], object]] = []
        self._free = list(range(num_slots - 1, NO_SLOT, -1))
        self._slots: dict[str, int] = {}
        self._last_taken: Int64Array = np.zeros(num_slots, np.int64)
        """When each slot was taken last, by the number of the call."""
        self._num_calls = 0

    def take(self, req_ids: Sequence[str]) -> tuple[Int32Array, BoolArray]:
        """Return the slot of each of the requests that have a step, int32 ``[n]``, and whether it is a new one.

        None of them loses its slot to another.
        """
        self._num_calls += 1
        slots = np.array([*map(self._slots.get, req_ids, repeat(NO_SLOT))], np.int32)
        is_new: BoolArray = slots == NO_SLOT
        self._last_taken[slots] = self._num_calls
        for at in is_new.nonzero()[0].tolist():
            if not self._free:
                self._take_away()
            slots[at] = self._slots[req_ids[at]] = slot = self._free.pop()
            self._last_taken[slot] = self._num_calls
        return slots, is_new

    def _take_away(self) -> None:
        loser = min(self._slots, key=lambda req_id: self._last_taken[self._slots[req_id]])
        for call in self.on_loss:
            call(loser)
        self._free.append(self._slots.pop(loser))

    def release(self, req_id: str) -> None:
        """Free the slot of a request, if it has one."""
        if (slot := self._slots.pop(req_id, None)) is not None:
            self._free.append(slot)

    def find(self, req_id: str) -> int | None:
        """Return the slot of a request; None if it has none."""
        return self._slots.get(req_id)

    @property
    def num_used(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)


_RESETS, _ENDS_PROMPT, _IS_GENERATED, _IS_REPLAYED, _IS_SCANNED = (np.int32(flag) for flag in TokenFlag)
"""Numpy takes ten times as long to multiply by a member of an enumeration."""


def flags_of(rows: GateRows, num_prompt: Int64Array, is_new: BoolArray, *, has_drafts: bool = False) -> Int32Array:
    """Return the `TokenFlag` of each row of a step, int32 ``[N]``.

    Args:
        rows: The rows.
        num_prompt: int64 ``[G]``: tokens of each request's prompt.
        is_new: ``[G]``: requests that got a slot for this step.
        has_drafts: Whether generated rows may be of drafts. Gates that act early hand the same on from each generated
            row then, so rows find it in the states, unless the prompt's are among the rows.
    """
    flags: Int32Array
    if rows.has_one_each:
        flags = _RESETS * (is_new | (rows.firsts == 0))
        flags |= _ENDS_PROMPT * (rows.firsts == num_prompt - 1)
        flags |= _IS_GENERATED * (rows.firsts >= num_prompt)
        return flags
    offsets, counts = rows.offsets, rows.counts
    left = (num_prompt - rows.firsts).repeat(counts) - offsets  # rows of the prompt from here on
    behind, is_generated = offsets > 0, left <= 0
    begins = (is_new | (rows.firsts == 0)).repeat(counts) & ~behind
    # The states that rows after the first would find are made by this forward, too late for earlier sites.
    flags = _RESETS * begins
    flags |= _ENDS_PROMPT * (left == 1)
    flags |= _IS_GENERATED * is_generated
    is_replayed = is_generated & behind
    if has_drafts:
        is_replayed &= (rows.firsts < num_prompt).repeat(counts)
    flags |= _IS_REPLAYED * is_replayed
    flags |= _IS_SCANNED * (counts > 1).repeat(counts)
    return flags


_NUM_PROMPT, _EARLY, _IS_COUNTED = map(attrgetter, ("num_prompt", "early", "is_counted"))
_NO_DRAFTS: Int64Array = np.empty((3, 0), np.int64)


class GatedBatch:
    """The requests with gates of one batch, while its composition stays.

    Args:
        req_ids: Requests of the batch, in its order.
        requests: The requests with gates, by id.
        slots: Requests get slots from it.
    """

    def __init__(self, req_ids: tuple[str, ...], requests: dict[str, GatedRequest], slots: GateSlots) -> None:
        self.req_ids = req_ids
        found = [*map(requests.get, req_ids)]
        places = range(len(found)) if all(found) else [at for at, request in enumerate(found) if request is not None]
        self.gated_ids = req_ids if len(places) == len(found) else tuple([req_ids[at] for at in places])
        self._places = np.array(places, np.int64)
        self.slots, self._is_new = slots.take(self.gated_ids)
        self.requests = tuple([request for request in found if request is not None])
        self._num_prompt = np.array([*map(_NUM_PROMPT, self.requests)], np.int64)
        self.has_early = any(map(_EARLY, self.requests))
        is_counted = [*map(_IS_COUNTED, self.requests)]
        at = [] if all(is_counted) else [place for place, counts in enumerate(is_counted) if not counts]
        self.reported_at = np.array(at, np.int64)
        """Places of the requests whose rows are sent to the host."""
        self.reported_requests = tuple(self.requests[place] for place in at)
        reported = frozenset[int]().union(*(request.reported for request in self.reported_requests))
        self.reported = np.array(sorted(reported), np.int64)
        """Columns of their rows that the host reads."""

    def rows(self, view: BatchView) -> GateRows:
        """Return the rows of a step of this batch."""
        starts, firsts, counts = map(self._of_ours, (view.starts, view.num_computed, view.num_scheduled))
        return GateRows(self.gated_ids, starts, firsts, counts, has_one_each=bool((counts == 1).all()))

    def firsts(self, view: BatchView) -> Int64Array:
        """Return the position of the first row of each request in a step of this batch, int64 ``[G]``."""
        return self._of_ours(view.num_computed)

    def restarted(self, rows: GateRows) -> list[int]:
        """Return the places of requests that begin anew in a step, with the slot that they had."""
        found: list[int] = np.flatnonzero((rows.firsts == 0) & ~self._is_new).tolist()
        return found

    def _of_ours(self, values: Int64Array) -> Int64Array:
        # Copies: they are read when the step's output is there, and the runner may write to its own before.
        return values.copy() if len(self.gated_ids) == len(self.req_ids) else values[self._places]

    def cleared(self, rows: GateRows) -> Int32Array:
        """Return the slots of requests that begin, or begin anew, in a step: nothing of before may be found there."""
        cleared: Int32Array = self.slots[self._is_new | (rows.firsts == 0)]
        return cleared

    def is_decoding(self, rows: GateRows) -> bool:
        """Whether each request has one generated row that goes on from its states."""
        return not self._is_new.any() and rows.has_one_each and bool((rows.firsts >= self._num_prompt).all())

    def drafted(self, rows: GateRows) -> Int64Array:
        """Return those rows of a step of this batch that may be of drafts, and the rows before them of each request.

        Drafts come after generated tokens; or after the last row of a prompt: vLLM gives a request that begins with one
        row as many as others have.

        Returns:
            int64 ``[3, n]``: the batch row, the place of its request in the batch, and how many of its request's rows
            come after it.
        """
        may_be = (rows.counts > 1) & (rows.firsts + rows.counts > self._num_prompt)
        if not may_be.any():
            return _NO_DRAFTS
        place, after = self._places.repeat(rows.counts), rows.counts.repeat(rows.counts) - 1 - rows.offsets
        return np.stack([rows.batch_rows, place, after])[:, may_be.repeat(rows.counts)]

    def take_flags(self, rows: GateRows, *, has_drafts: bool = False) -> Int32Array:
        """Return the flags of a step's rows, int32 ``[N]``; new slots count as known from here on."""
        flags = flags_of(rows, self._num_prompt, self._is_new, has_drafts=has_drafts)
        self._is_new = np.zeros_like(self._is_new)
        return flags
