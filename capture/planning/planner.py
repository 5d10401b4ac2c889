"""The plan of each step: which batch rows are wanted, at which sites, by which consumers. Numpy only.

A request's plan has the positions and sites that it wants, as the planner computes with them. A term is a distinct
selector of a request; consumers with equal selectors share it.

Letters in shape comments: B requests of the step, N rows of a group, K wanted rows of the step, S sites, C covers, T
terms of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan, changes, count_up, prolonged, spans_of
from headgate.capture.schema.batch import BatchView, BoolArray, Int64Array
from headgate.capture.schema.config import MAX_CONSUMERS
from headgate.capture.schema.consumer import ReadoutSite
from headgate.capture.schema.positions import MAX_POSITION, parts_of
from headgate.capture.schema.sites import NO_SHAPES, Site, SiteShape
from headgate.capture.schema.spec import CaptureSpec

Kind = Literal["run", "stride", "list"]
"""Kind of a term: consecutive positions, evenly spaced ones, or any others."""

MAX_KNOWN = 256

WINDOW = 64
"""Positions of a list that a step looks at, unless it computes more than these."""

_Wanted = range | Int64Array
_Asked = tuple[tuple[int, tuple[Site, ...], _Wanted], ...]
"""``((consumer bit, its sites, wanted positions), ...)``, by bit; of one bit, no position of a site twice."""
_Terms = dict[object, tuple[_Wanted, dict[int, int]]]
"""Wanted positions and ``{site id: bits of the consumers}``, by the range, or by the identity of the list: lists may be
long, and two equal ones of a request cost no more than two different ones."""


class PositionList:
    """Unevenly spaced positions of one request.

    Steps ask for them in ascending order, so that a window of the list serves many steps, and no step pays for the
    length of the list.

    Attributes:
        number: Identifies the list.

    Args:
        number: See above.
        values: int64, ascending.
    """

    __slots__ = ("_begin", "_end", "_keys", "_values", "number")

    def __init__(self, number: int, values: Int64Array) -> None:
        self.number = number
        self._values = values
        self._begin = self._end = 0
        self._keys = values[:0]

    def keys_near(self, first: int, last: int) -> Int64Array:
        """`list_keys`, ascending, of all positions from `first` to `last` that are listed, and of some around them."""
        if first < self._begin or last >= self._end or len(self._keys) > WINDOW:
            low, high = np.searchsorted(self._values, (first, last + 1)).tolist()
            high = max(high, low + WINDOW)
            self._begin, self._end = first, int(self._values[high]) if high < len(self._values) else MAX_POSITION + 1
            self._keys = list_keys(self._values[low:high], self.number)
        return self._keys


def list_keys(positions: Int64Array, numbers: Int64Array | int) -> Int64Array:
    """Each (list, position) as one int64, ordered by the number of the list, then by position."""
    return positions + numbers * (MAX_POSITION + 1)


def are_listed(positions: Int64Array, numbers: Int64Array, list_at: Callable[[int], PositionList | None]) -> BoolArray:
    """Whether each row's position is in its list; one search for all lists.

    Args:
        positions: int64 ``[N]``. Rows of one list are next to each other, ascending.
        numbers: int64 ``[N]``: of each row's list.
        list_at: The list of the row at an index.
    """
    starts = np.concatenate(([0], changes(numbers)))
    ends = np.append(starts[1:], len(numbers)) - 1
    order = np.argsort(numbers[starts])
    starts, ends = starts[order], ends[order]
    spans = zip(starts.tolist(), positions[starts].tolist(), positions[ends].tolist(), strict=True)
    lists = [(list_at(row), first, last) for row, first, last in spans]
    keys = np.concatenate([listed.keys_near(first, last) for listed, first, last in lists if listed])
    if not len(keys):
        return np.zeros(len(positions), dtype=np.bool_)
    wanted = list_keys(positions, numbers)
    found: BoolArray = keys[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)] == wanted
    return found


@dataclass(frozen=True, eq=False)
class SelectionShape:
    """Which consumers want which sites by what kinds of selectors. Interned: requests of one shape share the object.

    The numbers (where a run begins, which list) belong to each request, so requests that differ in the length of
    their prompts, or in the message they point at, are planned together.

    Attributes:
        kinds: One for each of the ``T`` terms.
        covers: ``C`` sets of sites, disjoint; the sites of one are wanted by the same terms.
        bits: int64 ``[C, T]``: the consumers that want these sites by this term.
        number: Identifies the shape.
    """

    kinds: tuple[Kind, ...]
    covers: tuple[SiteSet, ...]
    bits: Int64Array
    number: int

    @cached_property
    def is_run(self) -> bool:
        """Whether everything from the first to the last wanted position is wanted, at all sites."""
        return self.kinds == ("run",)

    def choose(self, is_hit: BoolArray) -> Iterator[tuple[SiteSet, Int64Array, Int64Array]]:
        """Yield what is wanted of N rows, at most once for each cover.

        Args:
            is_hit: bool ``[T, N]``: which rows each term selects.

        Yields:
            The sites, the indices of the wanted rows, ascending, and the mask of each: bit i says that consumer i wants
            it; int64 ``[n]`` both.
        """
        # A consumer wants a site by one term only, or by terms without a common position: their sum is the union.
        for site_set, masks in zip(self.covers, self.bits @ is_hit, strict=True):
            picks = np.flatnonzero(masks)
            if len(picks):
                yield site_set, picks, masks[picks]

    def choose_all(self, num_rows: int) -> Iterator[tuple[SiteSet, Int64Array]]:
        """Yield sites and masks where `is_run`, for rows between the first and the last that are wanted: all are."""
        for site_set, consumers in zip(self.covers, self.bits[:, 0].tolist(), strict=True):
            yield site_set, np.full(num_rows, consumers, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """Positions and sites that one request wants. Shared with other requests that want the same.

    Attributes:
        shape: Shared with all requests of that shape.
        first: First position that is wanted.
        end: The one after the last.
        bounds: int64 ``[T, 3]``: start, stop *(exclusive)* and step of each term; in place of the step, the number
            of a list.
        lists: For each term; None where the kind is not ``list``.
    """

    shape: SelectionShape
    first: int
    end: int
    bounds: Int64Array
    lists: tuple[PositionList | None, ...]


class RequestPlanReader:
    """Reads requests' specs. Equal parts are shared for as long as anybody holds them, and what was wanted lately is
    not worked out again; where a list of positions is wanted, it is.

    Args:
        sites: The sites that this worker owns, in ring order.
        readouts: Sites of them that consumers get read out; numbered after the sites.
        shapes: Of the sites whose rows are not those of the stream.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        readouts: Sequence[ReadoutSite] = (),
        shapes: Mapping[Site, SiteShape] = NO_SHAPES,
    ) -> None:
        self._sites = (*sites, *(each.site for each in readouts))
        self._row_shapes = (*map(shapes.get, sites), *(each.facts.shape for each in readouts))
        self._num_sites = len(sites)
        self._ids = {site: index for index, site in enumerate(sites)}
        if len(self._ids) != len(sites):
            raise AssertionError(f"a site is listed twice: {sites}")
        self._read_out = {(each.bit, each.site): len(sites) + index for index, each in enumerate(readouts)}
        self._site_sets: WeakValueDictionary[tuple[int, ...], SiteSet] = WeakValueDictionary()
        self._shapes: WeakValueDictionary[object, SelectionShape] = WeakValueDictionary()
        self._numbers = count()
        self._known: dict[_Asked, RequestPlan | None] = {}

    def read(self, num_prompt: int, specs: Mapping[int, CaptureSpec]) -> RequestPlan | None:
        """Return the plan of a request on this worker; None if it wants nothing here.

        Args:
            num_prompt: Length of the prompt.
            specs: Consumer bit to resolved spec.
        """
        asked = tuple(
            [
                (bit, sites, part.wanted(num_prompt))
                for bit, spec in sorted(specs.items())
                for sites, positions in spec.selections
                for part in parts_of(positions)
            ]
        )
        if any(not isinstance(wanted, range) for _, _, wanted in asked):
            return self._read(asked)
        try:
            return self._known[asked]
        except KeyError:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            plan = self._known[asked] = self._read(asked)
            return plan

    def _read(self, asked: _Asked) -> RequestPlan | None:
        terms = self._terms(asked)
        if not terms:
            return None
        chosen = [wanted for wanted, _ in terms.values()]
        lists = tuple(
            None if isinstance(wanted, range) else PositionList(next(self._numbers), wanted) for wanted in chosen
        )
        bounds = [
            (int(wanted[0]), int(wanted[-1]) + 1, listed.number if listed else _step(wanted))
            for wanted, listed in zip(chosen, lists, strict=True)
        ]
        first, end = min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds)
        return RequestPlan(self._shape(terms), first, end, _constant(bounds), lists)

    def _terms(self, asked: _Asked) -> _Terms:
        """The distinct selectors, in the order of the lowest consumer of each."""
        terms: _Terms = {}
        for bit, sites, wanted in asked:
            if not 0 <= bit < MAX_CONSUMERS:
                raise AssertionError(f"consumer bit {bit} does not fit a mask")
            owned = [self._read_out.get((bit, site), self._ids[site]) for site in sites if site in self._ids]
            if owned and len(wanted):
                key = wanted if isinstance(wanted, range) else id(wanted)
                _, consumers = terms.setdefault(key, (wanted, {}))
                for site_id in owned:
                    consumers[site_id] = consumers.get(site_id, 0) | 1 << bit
        return terms

    def _shape(self, terms: _Terms) -> SelectionShape:
        # Rows of different shapes cannot share a group, nor can rows and what is read out of them.
        found: dict[tuple[SiteShape | None, bool, tuple[int, ...]], list[int]] = {}
        for site_id in sorted(set().union(*(consumers for _, consumers in terms.values()))):
            bits = tuple(consumers.get(site_id, 0) for _, consumers in terms.values())
            found.setdefault((self._row_shapes[site_id], site_id >= self._num_sites, bits), []).append(site_id)
        kinds = tuple(_kind(wanted) for wanted, _ in terms.values())
        key = kinds, tuple((bits, tuple(ids)) for (*_, bits), ids in found.items())
        shape = self._shapes.get(key)
        if shape is None:
            covers = tuple(self._site_set(tuple(ids)) for ids in found.values())
            shape = SelectionShape(kinds, covers, _constant([bits for *_, bits in found]), next(self._numbers))
            self._shapes[key] = shape
        return shape

    def _site_set(self, ids: tuple[int, ...]) -> SiteSet:
        site_set = self._site_sets.get(ids)
        if site_set is None:
            sites = tuple(self._sites[index] for index in ids)
            site_set = SiteSet(sites, _constant(ids), self._row_shapes[ids[0]], ids[0] >= self._num_sites)
            self._site_sets[ids] = site_set
        return site_set


def _kind(wanted: _Wanted) -> Kind:
    if not isinstance(wanted, range):
        return "list"
    return "run" if _step(wanted) == 1 else "stride"


def _step(wanted: _Wanted) -> int:
    """A single position is a run, whatever the step it was written with."""
    return wanted.step if isinstance(wanted, range) and len(wanted) > 1 else 1


def _constant(values: object) -> Int64Array:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


class WantedRows(NamedTuple):
    """Rows of a step, each array int64 ``[N]``. A request's are next to each other, by ascending position.

    Attributes:
        owners: Index into ``BatchView.req_ids``, ascending.
        batch_rows: Of each row.
        positions: Of each row.
        masks: Bit i says that consumer i wants the row.
    """

    owners: Int64Array
    batch_rows: Int64Array
    positions: Int64Array
    masks: Int64Array


def consecutive(
    shape: SelectionShape, req_ids: Sequence[str], begins: Int64Array, batch_rows: Int64Array, counts: Int64Array
) -> StepPlan:
    """Plan a step whose wanted rows are of requests of one shape, which is a run, at the same sites.

    Args:
        shape: Of the requests.
        req_ids: The ``M`` requests, at least one.
        begins: First wanted position of each, int64 ``[M]``.
        batch_rows: Its batch row, int64 ``[M]``, ascending.
        counts: How many wanted positions follow each other from there, int64 ``[M]``.
    """
    stops = counts.cumsum()
    starts, total = stops - counts, int(stops[-1])
    ((site_set, masks),) = shape.choose_all(total)
    group = PackGroup(
        site_set=site_set,
        rows=count_up(0, total),
        positions=prolonged(begins, starts, counts),
        masks=masks,
        spans=tuple(zip(req_ids, starts.tolist(), stops.tolist(), strict=True)),
    )
    first = int(batch_rows[0])
    is_dense = batch_rows[-1] + counts[-1] - first == total
    token_rows = count_up(first, first + total) if is_dense else prolonged(batch_rows, starts, counts)
    return StepPlan(token_rows, (group,))


def merged(req_ids: tuple[str, ...], parts: Mapping[SiteSet, Sequence[WantedRows]]) -> StepPlan:
    """Plan a step from its wanted `parts`, by their sites; `req_ids` are its requests."""
    packed = {site_set: _in_batch_order(rows) for site_set, rows in parts.items()}
    if len(packed) == 1:
        ((site_set, rows),) = packed.items()
        if (rows.batch_rows[1:] > rows.batch_rows[:-1]).all():  # everybody wants the same sites: nothing to merge
            return StepPlan(rows.batch_rows, (_group(site_set, rows, np.arange(len(rows.batch_rows)), req_ids),))
    is_wanted = np.zeros(1 + max(int(rows.batch_rows.max()) for rows in packed.values()), dtype=np.bool_)
    for rows in packed.values():
        is_wanted[rows.batch_rows] = True
    token_rows = np.flatnonzero(is_wanted)
    offsets = np.cumsum(is_wanted) - 1
    groups = (_group(site_set, rows, offsets[rows.batch_rows], req_ids) for site_set, rows in packed.items())
    return StepPlan(token_rows, tuple(groups))


def _group(site_set: SiteSet, rows: WantedRows, offsets: Int64Array, req_ids: tuple[str, ...]) -> PackGroup:
    return PackGroup(
        site_set=site_set,
        rows=offsets,
        positions=rows.positions,
        masks=rows.masks,
        spans=spans_of(rows.owners, req_ids),
    )


def _in_batch_order(parts: Sequence[WantedRows]) -> WantedRows:
    """Merge the rows of several shapes into one set; each shape is in batch order and has its own requests."""
    if len(parts) == 1:
        return parts[0]
    rows = WantedRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    order = np.argsort(rows.owners, kind="stable")
    return WantedRows(*(array[order] for array in rows))


NOWHERE = 2**62
"""A position that no request reaches."""
FEW = 4
"""So many requests are looked at one by one in a step that is no decode step, however many others run: arrays of all of
them would take ten times as long. Where clients capture a row of each prompt, most steps are like that."""


class StepPlanner:
    """Turns each step's batch into the rows to keep. One thread: the step thread.

    A request's positions count as taken once they are scheduled, wanted or not: what is computed again after a
    preemption is not taken twice. So a request stays known while it is preempted; `add` starts it afresh.
    A request that can want nothing more (``last_prompt`` after the prompt) is forgotten by itself.

    Cost of a step: numpy over its requests and its wanted tokens, and a Python loop over its distinct shapes
    (`SelectionShape`). Where the same requests decode one token each and all want theirs, step after step, it is a
    comparison.

    Args:
        sites: The sites that this worker owns, in ring order.
        readouts: Sites of them that consumers get read out; see `RequestPlanReader`.
        shapes: Of the sites whose rows are not those of the stream.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        readouts: Sequence[ReadoutSite] = (),
        shapes: Mapping[Site, SiteShape] = NO_SHAPES,
    ) -> None:
        self._reader = RequestPlanReader(sites, readouts, shapes)
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
            self._table.insert(req_id, request_plan, num_prompt)

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

    def candidates(self, view: BatchView) -> StepPlan | None:
        """Return the undecided plan of a step: the batch rows that may be wanted, if they count.

        Nothing counts as taken: `settle` or `plan` does that, with the step's outcome. The answer depends on the
        requests and on `view` alone, so that all ranks have the same one. None if no row may be wanted; such a step is
        not settled, so rows below it that a preempted request computes later, for the first time, may be taken.
        """
        slots = self._table.slots_of(view.req_ids)
        return None if slots is None else self._table.candidates(slots, view)

    def settle(self, plan: StepPlan, view: BatchView) -> None:
        """Decide a plan that `candidates` made, now that the step's outcome is known; called in the order of the steps.

        Args:
            plan: Of the step.
            view: Its rows that count.
        """
        counted = self.plan(view)
        if counted is None:
            plan.decide((), 0)
            return
        kept, wanted = plan.token_rows, counted.token_rows
        places = np.searchsorted(kept, wanted)
        if len(kept) <= places[-1] or (kept[places] != wanted).any():
            raise AssertionError(f"rows {wanted} are wanted of a step whose candidates were {kept}")
        groups = tuple(replace(group, rows=places[group.rows]) for group in counted.groups)
        plan.decide(groups, counted.num_copies)

    def _plan_few(self, shape: SelectionShape, members: Sequence[int], view: BatchView) -> StepPlan | None:
        """Plan the requests that `_RequestTable.few_of` found."""
        req_ids: list[str] = []
        ranges: list[tuple[int, int, int]] = []
        for member in members:
            req_id, first = view.req_ids[member], int(view.num_computed[member])
            wanted, has_ended = self._table.take(req_id, first, first + int(view.num_scheduled[member]))
            if wanted:
                req_ids.append(req_id)
                ranges.append((wanted.start, int(view.starts[member]) + wanted.start - first, len(wanted)))
            if has_ended:
                self._table.remove(req_id)
        return consecutive(shape, req_ids, *map(np.array, zip(*ranges, strict=True))) if ranges else None

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
                return consecutive(shape, fresh.req_ids(req_ids), fresh.begins, fresh.batch_rows, fresh.counts)
        parts: dict[SiteSet, list[WantedRows]] = {}
        for shape, picks in shapes.items():
            owners, batch_rows, positions = fresh.rows_of(picks)
            if shape.is_run:
                for site_set, masks in shape.choose_all(len(positions)):
                    parts.setdefault(site_set, []).append(WantedRows(owners, batch_rows, positions, masks))
                continue
            for site_set, at, masks in shape.choose(self._table.hits(shape, slots[owners], positions)):
                parts.setdefault(site_set, []).append(WantedRows(owners[at], batch_rows[at], positions[at], masks))
        return merged(req_ids, parts) if parts else None


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

    One entry for each of the ``M`` requests with something wanted, in batch order.

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

    def req_ids(self, all_ids: tuple[str, ...]) -> Sequence[str]:
        """The ``M`` requests, of all requests of the step."""
        are_all = len(self.members) == len(all_ids)
        return all_ids if are_all else [all_ids[member] for member in self.members.tolist()]

    def rows_of(self, picks: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Owners, batch rows and positions of the rows of some of them, as in `WantedRows`."""
        counts = self.counts[picks]
        starts = np.cumsum(counts) - counts
        batch_rows = prolonged(self.batch_rows[picks], starts, counts)
        return np.repeat(self.members[picks], counts), batch_rows, prolonged(self.begins[picks], starts, counts)


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
        self._first, self._num_prompt = self._next.copy(), self._next.copy()
        """First wanted position of each request, and the length of its prompt."""
        self._shapes: Int64Array = np.zeros(1, np.int64)
        """Number of each request's shape."""
        self._bounds: Int64Array = np.zeros((1, 3, 1), dtype=np.int64)
        self._batch: tuple[tuple[str, ...], Int64Array | None] | None = None

    def insert(self, req_id: str, plan: RequestPlan, num_prompt: int) -> None:
        """Take a request that is not in the table."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[req_id] = slot
        self._plans[slot] = plan
        self._next[slot], self._end[slot], self._shapes[slot] = plan.first, plan.end, plan.shape.number
        self._first[slot], self._num_prompt[slot] = plan.first, num_prompt
        if not plan.shape.is_run:  # a run's terms' bounds are never asked for
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
        """Count the step's positions as taken and return the ones not taken before."""
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

    def candidates(self, slots: Int64Array, view: BatchView) -> StepPlan | None:
        """Return what `StepPlanner.candidates` does.

        Positions within the prompt are exact. Later ones are upper limits, but no smaller than the prompt is long.
        """
        low, stop, num_prompt = view.num_computed, view.num_computed + view.num_scheduled, self._num_prompt[slots]
        first, end = self._first[slots], self._end[slots]
        begin = np.maximum(low, first)
        last = np.where(low <= num_prompt, np.minimum(stop, end), np.where(end > num_prompt, stop, 0))
        members = np.flatnonzero(last > begin)
        if not len(members):
            return None
        counts = (last - begin)[members]
        starts = np.cumsum(counts) - counts
        token_rows = np.sort(prolonged((view.starts + begin - low)[members], starts, counts))
        numbers, num_copies, covers = self._shapes[slots[members]], 0, list[SiteSet]()
        for number, at in zip(*np.unique(numbers, return_index=True), strict=True):
            found = self._plans[int(slots[members[at]])].shape.covers
            num_copies += sum(len(cover.ids) for cover in found) * int(counts[numbers == number].sum())
            covers += found
        return StepPlan(token_rows, (), num_copies=num_copies, covers=covers)

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
        arrays = self._next, self._end, self._shapes, self._first, self._num_prompt
        self._next, self._end, self._shapes, self._first, self._num_prompt = (
            _enlarged(each, axis=0, size=2 * size) for each in arrays
        )
        self._bounds = _enlarged(self._bounds, axis=2, size=2 * size)
        self._free.extend(range(2 * size - 1, size - 1, -1))


def _enlarged(array: Int64Array, *, axis: int, size: int) -> Int64Array:
    missing = list(array.shape)
    missing[axis] = size - array.shape[axis]
    return np.concatenate([array, np.zeros(missing, dtype=np.int64)], axis=axis)
