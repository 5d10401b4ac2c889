"""The plan of each step: which batch rows are wanted, at which sites, by which consumers. Numpy only.

Letters in shape comments: B requests of the step, N rows of a group, K wanted rows of the step, S sites, T terms
(distinct selectors) of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.planning.request_plan import (
    RequestPlan,
    RequestPlanReader,
    SelectedRows,
    SelectionShape,
    are_listed,
)
from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan, count_up, prolonged
from headgate.capture.planning.wanted_rows import Piece, Rows, WantedRows, consecutive, merged
from headgate.capture.schema.batch import BatchView, BoolArray, Int64Array
from headgate.capture.schema.readouts.readout import ReadoutSite
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec

NOWHERE = 2**62
"""A position that no request reaches."""
FEW = 4
"""So many requests are looked at one by one in a step that is no decode step, however many others run: arrays of all of
them would take ten times as long. Where clients capture a row of each prompt, most steps are like that."""


class StepPlanner:
    """Turns each step's batch into the rows to keep. One thread: the step thread.

    A request's positions count as taken once they are scheduled, wanted or not: what is computed again after a
    preemption is not taken twice. So a request stays known while it is preempted; `add` starts it afresh.
    A request of which nothing more can be wanted (``last_prompt`` after the prompt) is forgotten by itself.

    Cost of a step: numpy over its requests and its wanted tokens, and a Python loop over its distinct shapes
    (`SelectionShape`). Where the same requests decode one token each and all want theirs, step after step, it is a
    comparison.

    Args:
        sites: The sites that this worker owns, in ring order.
        readouts: Sites of them that consumers get read out; see `RequestPlanReader`.
    """

    def __init__(self, sites: Sequence[Site], readouts: Sequence[ReadoutSite] = ()) -> None:
        self._reader = RequestPlanReader(sites, readouts)
        self._table = _RequestTable()
        self._steady: _DecodeRun | None = None

    def add(self, req_id: str, num_prompt: int, specs: Mapping[int, CaptureSpec]) -> None:
        """Take a request, or start a known id afresh.

        Args:
            req_id: Internal id.
            num_prompt: Length of the prompt.
            specs: Consumer bit, below ``MAX_CONSUMERS``, to what that consumer wants; selectors are resolved.
                Sites that this worker does not own are left out; a request with no site left costs nothing.
        """
        self.remove(req_id)
        request_plan = self._reader.read(num_prompt, specs)
        if request_plan is not None:
            self._table.insert(req_id, request_plan)

    def remove(self, req_id: str) -> None:
        """Forget a request. An unknown id is accepted: its request wanted nothing, or nothing more."""
        self._leave_run()
        self._table.remove(req_id)

    def plan(self, view: BatchView) -> StepPlan | None:
        """Plan one step. Called once for each step, in order. Returns None if no row of it is wanted."""
        if self._steady is not None and self._steady.continues(view):
            return self._steady.next()
        self._leave_run()
        if (few := self._table.few_of(view)) is not None:
            return self._plan_few(*few, view)
        slots = self._table.slots_of(view.req_ids)
        if slots is None:
            return None
        fresh = self._table.advance(slots, view)
        shapes = self._table.by_shape(fresh)
        plan = self._assemble(shapes, fresh, slots, view.req_ids)
        for member in fresh.ended:
            self._table.remove(view.req_ids[member])
        if plan is not None and fresh.is_decode and not fresh.ended and all(shape.is_run for shape in shapes):
            self._steady = _DecodeRun(view, slots, plan, fresh.num_alike)
        return plan

    def _plan_few(self, shape: SelectionShape, members: Sequence[int], view: BatchView) -> StepPlan | None:
        """The same for the requests that `_RequestTable.few_of` found."""
        pieces: list[Piece] = []
        for member in members:
            req_id, first = view.req_ids[member], int(view.num_computed[member])
            wanted, has_ended = self._table.take(req_id, first, first + int(view.num_scheduled[member]))
            if wanted:
                pieces.append(Piece(req_id, int(view.starts[member]) + wanted.start - first, wanted))
            if has_ended:
                self._table.remove(req_id)
        return consecutive(pieces, shape) if pieces else None

    def _leave_run(self) -> None:
        """The steps of the run count as taken from now on; they are not asked for while it lasts."""
        steady, self._steady = self._steady, None
        if steady is not None:
            self._table.note_taken(steady.slots, steady.stop)

    def _assemble(
        self,
        shapes: Mapping[SelectionShape, Int64Array],
        fresh: _NewPositions,
        slots: Int64Array,
        req_ids: tuple[str, ...],
    ) -> StepPlan | None:
        if len(shapes) == 1:
            (shape,) = shapes
            if shape.is_run and len(shape.covers) == 1 and (fresh.batch_rows[1:] > fresh.batch_rows[:-1]).all():
                return fresh.contiguous_plan(shape, req_ids)
        parts: dict[SiteSet, list[WantedRows]] = {}
        for shape, picks in shapes.items():
            rows = fresh.rows_of(picks)
            for chosen in self._choose(shape, rows, slots):
                parts.setdefault(chosen.site_set, []).append(rows.select(chosen))
        return merged(req_ids, parts) if parts else None

    def _choose(self, shape: SelectionShape, rows: Rows, slots: Int64Array) -> Iterator[SelectedRows]:
        if shape.is_run:
            return shape.choose_all(len(rows.positions))
        return shape.choose(self._table.hits(shape, slots[rows.owners], rows.positions))


class _DecodeRun:
    """A run: steps in which the same requests decode one token each and all want theirs.

    Args:
        view: Its first step.
        slots: Of the requests, in the planner's table.
        plan: Of that step.
        num_left: How many later steps are wanted likewise.
    """

    def __init__(self, view: BatchView, slots: Int64Array, plan: StepPlan, num_left: int) -> None:
        self.slots = slots
        self._first = view
        self._computed = view.num_computed.tobytes()
        self._plan = plan
        self._num_left = num_left
        self._number = 0

    def continues(self, view: BatchView) -> bool:
        """Whether `view` is the next step."""
        return (
            self._number < self._num_left
            and view.is_laid_out_as(self._first)
            and (view.num_computed - (self._number + 1)).tobytes() == self._computed
        )

    def next(self) -> StepPlan:
        """The next step: the same rows, one position later."""
        self._number += 1
        return self._plan.later(self._number)

    @property
    def stop(self) -> Int64Array:
        """Tokens of each request that are computed after the last step, int64 ``[B]``."""
        return self._first.num_computed + (self._number + 1)


class _NewPositions(NamedTuple):
    """Positions that a step computes for the first time, from each request's first wanted one to its last.

    One entry for each of the ``M`` requests of which there is something, in batch order.

    Attributes:
        members: Index into ``BatchView.req_ids``, int64 ``[M]``.
        slots: In the planner's table, int64 ``[M]``.
        begins: First position, int64 ``[M]``.
        batch_rows: Its batch row, int64 ``[M]``.
        counts: How many positions follow each other from there, int64 ``[M]``.
        ended: Indices into ``BatchView.req_ids`` of the requests that can want nothing after this step.
        num_alike: How many steps of one token each can follow until a request begins or ends to want something.
        is_decode: Each request of the step computes one token.
    """

    members: Int64Array
    slots: Int64Array
    begins: Int64Array
    batch_rows: Int64Array
    counts: Int64Array
    ended: list[int]
    num_alike: int
    is_decode: bool

    def contiguous_plan(self, shape: SelectionShape, req_ids: tuple[str, ...]) -> StepPlan:
        """Plan a step in which all new positions are wanted, at the same sites, by requests of one shape.

        The batch rows of the requests must be in order.
        """
        stops = np.cumsum(self.counts)
        starts, total = stops - self.counts, int(stops[-1])
        (chosen,) = shape.choose_all(total)
        are_all = len(self.members) == len(req_ids)
        found = req_ids if are_all else [req_ids[member] for member in self.members.tolist()]
        group = PackGroup(
            site_set=chosen.site_set,
            rows=count_up(0, total),
            positions=prolonged(self.begins, starts, self.counts),
            masks=chosen.masks,
            spans=tuple(zip(found, starts.tolist(), stops.tolist(), strict=True)),
        )
        first = int(self.batch_rows[0])
        is_dense = self.batch_rows[-1] + self.counts[-1] - first == total
        token_rows = count_up(first, first + total) if is_dense else prolonged(self.batch_rows, starts, self.counts)
        return StepPlan(token_rows, (group,))

    def rows_of(self, picks: Int64Array) -> Rows:
        """The rows of some of them."""
        counts = self.counts[picks]
        starts = np.cumsum(counts) - counts
        batch_rows = prolonged(self.batch_rows[picks], starts, counts)
        return Rows(np.repeat(self.members[picks], counts), batch_rows, prolonged(self.begins[picks], starts, counts))


class _RequestTable:
    """The state of each request, in arrays that a step indexes by slot.

    Slot 0 belongs to no request: it stands for all that want nothing and lies out of any reach.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._plans: dict[int, RequestPlan] = {}
        self._next: Int64Array = np.full(1, NOWHERE, np.int64)
        self._end = self._next.copy()
        self._shapes: Int64Array = np.zeros(1, np.int64)
        """Number of each request's shape."""
        self._bounds: Int64Array = np.zeros((1, 3, 1), dtype=np.int64)
        self._batch: tuple[tuple[str, ...], Int64Array | None] | None = None

    def insert(self, req_id: str, plan: RequestPlan) -> None:
        """Take a request that is not in the table."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[req_id] = slot
        self._plans[slot] = plan
        self._next[slot], self._end[slot], self._shapes[slot] = plan.first, plan.end, plan.shape.number
        if not plan.shape.is_run:  # of a run, nobody asks for the terms' bounds
            num_terms = len(plan.bounds)
            if num_terms > len(self._bounds):
                self._bounds = _enlarged(self._bounds, axis=0, size=num_terms)
            self._bounds[:num_terms, :, slot] = plan.bounds
        self._batch = None

    def remove(self, req_id: str) -> None:
        """Forget a request; nothing happens if it is not in the table."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            del self._plans[slot]
            self._free.append(slot)
            self._batch = None

    def slots_of(self, req_ids: tuple[str, ...]) -> Int64Array | None:
        """Slot of each of the requests, int64 ``[B]``; None if none of them is in the table.

        Decode steps repeat the batch of the step before, so the last answer is kept.
        """
        if not self._slots:
            return None
        if self._batch is None or self._batch[0] != req_ids:
            slots = [self._slots.get(req_id, 0) for req_id in req_ids]
            self._batch = (req_ids, np.array(slots) if any(slots) else None)
        return self._batch[1]

    def few_of(self, view: BatchView) -> tuple[SelectionShape, list[int]] | None:
        """Return those requests of a step that are in the table, and the shape of all: a run, at one set of sites.

        They are ascending indices into its ``req_ids``, as their rows ascend. None if there is none, or if there may be
        more than `FEW`, of several shapes or of one that is no run, if their rows are in another order, or if the step
        may be of a run, which pays only where steps are compared.
        """
        if not 0 < len(self._slots) <= FEW:
            return None
        shape = next(iter(self._plans.values())).shape
        if not shape.is_run or len(shape.covers) > 1 or any(plan.shape is not shape for plan in self._plans.values()):
            return None
        if self._batch is not None and self._batch[1] is None and self._batch[0] == view.req_ids:
            return None
        members = [member for member, req_id in enumerate(view.req_ids) if req_id in self._slots]
        if not members:
            self._batch = (view.req_ids, None)
        if not members or (view.num_scheduled == 1).all():
            return None
        starts = view.starts[members].tolist()
        return (shape, members) if starts == sorted(starts) else None

    def take(self, req_id: str, first: int, stop: int) -> tuple[range, bool]:
        """Count positions ``first : stop`` of a request as taken; its shape is a run.

        Returns:
            Those of the positions that are wanted and were not taken before, and whether the request can want nothing
            more.
        """
        slot = self._slots[req_id]
        taken, end = int(self._next[slot]), int(self._end[slot])
        self._next[slot] = max(stop, taken)
        return range(max(first, taken), min(stop, end)), stop >= end

    def advance(self, slots: Int64Array, view: BatchView) -> _NewPositions:
        """Count the step's positions as taken and return those that were not before."""
        first, taken, end = view.num_computed, self._next[slots], self._end[slots]
        stop, begin = first + view.num_scheduled, np.maximum(first, taken)
        self._next[slots] = np.maximum(stop, taken)
        counts = np.minimum(stop, end) - begin
        is_new = counts > 0
        members = np.flatnonzero(is_new)
        new_begins = begin[members]
        return _NewPositions(
            members=members,
            slots=slots[members],
            begins=new_begins,
            batch_rows=view.starts[members] + new_begins - first[members],
            counts=counts[members],
            ended=np.flatnonzero(stop >= end).tolist(),
            num_alike=int(np.where(is_new, end - stop - 1, begin - stop).min()),
            is_decode=bool((view.num_scheduled == 1).all()),
        )

    def note_taken(self, slots: Int64Array, stops: Int64Array) -> None:
        """Count positions up to these as taken."""
        self._next[slots] = np.maximum(stops, self._next[slots])

    def by_shape(self, fresh: _NewPositions) -> dict[SelectionShape, Int64Array]:
        """Split what a step computes by shape: ascending indices into the arrays of `fresh`."""
        numbers = self._shapes[fresh.slots]
        if (numbers[1:] == numbers[:-1]).all():  # of one shape, or nothing: no need to sort
            return {self._plans[slot].shape: np.arange(len(numbers)) for slot in fresh.slots[:1].tolist()}
        _, firsts = np.unique(numbers, return_index=True)
        return {
            self._plans[int(fresh.slots[first])].shape: np.flatnonzero(numbers == numbers[first])
            for first in np.sort(firsts).tolist()
        }

    def hits(self, shape: SelectionShape, slots: Int64Array, positions: Int64Array) -> BoolArray:
        """Which rows each term of their requests selects, bool ``[T, N]``.

        Args:
            shape: That of all the rows' requests.
            slots: Of each row's request, int64 ``[N]``.
            positions: int64 ``[N]``.
        """
        is_hit = np.empty((len(shape.kinds), len(positions)), dtype=np.bool_)
        for term, kind in enumerate(shape.kinds):
            start, stop, step = self._bounds[term][:, slots]
            if kind == "list":
                is_hit[term] = self._is_listed(term, step, slots, positions)
                continue
            np.logical_and(positions >= start, positions < stop, out=is_hit[term])
            if kind == "stride":
                is_hit[term] &= (positions - start) % step == 0
        return is_hit

    def _is_listed(self, term: int, numbers: Int64Array, slots: Int64Array, positions: Int64Array) -> BoolArray:
        """Whether each row's position is in the list with that row's number."""
        rows = slots.tolist()
        return are_listed(positions, numbers, lambda row: self._plans[rows[row]].lists[term])

    def _grow(self) -> None:
        size = len(self._next)
        self._next, self._end, self._shapes = (
            _enlarged(each, axis=0, size=2 * size) for each in (self._next, self._end, self._shapes)
        )
        self._bounds = _enlarged(self._bounds, axis=2, size=2 * size)
        self._free.extend(range(2 * size - 1, size - 1, -1))


def _enlarged(array: Int64Array, *, axis: int, size: int) -> Int64Array:
    missing = list(array.shape)
    missing[axis] = size - array.shape[axis]
    return np.concatenate([array, np.zeros(missing, dtype=np.int64)], axis=axis)
