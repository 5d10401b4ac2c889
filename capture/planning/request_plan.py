"""The plan of each request: the positions and sites that it wants, as the planner computes with them. Numpy only.

Letters in shape comments: N rows, S sites, C covers, T terms. A term is a distinct selector of a request; consumers
with equal selectors share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from headgate.capture.planning.step_plan import SiteSet, changes
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.config import MAX_CONSUMERS
from headgate.capture.schema.positions import parts_of
from headgate.capture.schema.readouts.readout import ReadoutSite
from headgate.capture.schema.selectors.union import MAX_POSITION
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec

Kind = Literal["run", "stride", "list"]
"""Kind of a term: consecutive positions, evenly spaced ones, or any others."""

MAX_KNOWN = 256

WINDOW = 64
"""Positions of a list that a step looks at, unless it computes more than these."""

_Wanted = range | Int64Array
_Asked = tuple[tuple[int, tuple[Site, ...], _Wanted], ...]
"""``((consumer bit, its sites, wanted positions), ...)``, by bit; of one bit, no position twice."""
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


class SelectedRows(NamedTuple):
    """Wanted rows at a set of sites."""

    site_set: SiteSet
    picks: Int64Array | None
    """Int64 ``[N]``, ascending, into the rows that were offered; None for all of them."""
    masks: Int64Array
    """Int64 ``[N]``: bit i says that consumer i wants the row."""


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

    def choose(self, is_hit: BoolArray) -> Iterator[SelectedRows]:
        """Yield what is wanted of N rows, at most once for each cover.

        Args:
            is_hit: bool ``[T, N]``: which rows each term selects.
        """
        # A consumer is in one term only, or in terms without a common position: the sum over terms is the union.
        for site_set, masks in zip(self.covers, self.bits @ is_hit, strict=True):
            picks = np.flatnonzero(masks)
            if len(picks):
                yield SelectedRows(site_set, picks, masks[picks])

    def choose_all(self, num_rows: int) -> Iterator[SelectedRows]:
        """The same where `is_run`, for rows between the first and the last that are wanted."""
        for site_set, consumers in zip(self.covers, self.bits[:, 0].tolist(), strict=True):
            yield SelectedRows(site_set, None, np.full(num_rows, consumers, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """Positions and sites that one request wants. Shared with other requests that want the same.

    Attributes:
        shape: Shared with all requests of that shape.
        first: First position that is wanted.
        end: The one behind the last.
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
        sites: Those that this worker owns, in ring order.
        readouts: Sites of them that consumers get read out; numbered behind the sites.
    """

    def __init__(self, sites: Sequence[Site], readouts: Sequence[ReadoutSite] = ()) -> None:
        self._sites = (*sites, *(each.site for each in readouts))
        self._num_outputs = (*[0] * len(sites), *(each.facts.num_outputs for each in readouts))
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
                (bit, spec.sites, part.wanted(num_prompt))
                for bit, spec in sorted(specs.items())
                for part in parts_of(spec.positions)
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
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # rows of different widths cannot share a group
        for site_id in sorted(set().union(*(consumers for _, consumers in terms.values()))):
            bits = tuple(consumers.get(site_id, 0) for _, consumers in terms.values())
            found.setdefault((self._num_outputs[site_id], bits), []).append(site_id)
        kinds = tuple(_kind(wanted) for wanted, _ in terms.values())
        key = kinds, tuple((bits, tuple(ids)) for (_, bits), ids in found.items())
        shape = self._shapes.get(key)
        if shape is None:
            covers = tuple(self._site_set(tuple(ids)) for ids in found.values())
            shape = SelectionShape(kinds, covers, _constant([bits for _, bits in found]), next(self._numbers))
            self._shapes[key] = shape
        return shape

    def _site_set(self, ids: tuple[int, ...]) -> SiteSet:
        site_set = self._site_sets.get(ids)
        if site_set is None:
            sites = tuple(self._sites[index] for index in ids)
            site_set = SiteSet(sites, _constant(ids), self._num_outputs[ids[0]])
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
