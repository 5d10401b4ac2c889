"""The wanted rows of a step, by sites and requests, and of a run of steps that are alike. Numpy only.

Letters in shape comments: N rows of a group, K wanted rows of the step, S sites, T steps of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.capture.schema.sites import Site, SiteShape, sort_sites

RequestSpans = tuple[tuple[str, int, int], ...]
"""``(req_id, start, stop)``, next to each other, in order."""


@dataclass(frozen=True, eq=False)
class SiteSet:
    """Sites of this worker, in ring order. Interned: equal sets are one object.

    Attributes:
        sites: ``S`` sites.
        ids: int64 ``[S]``, read-only: their indices in the worker's list, which has its sites and, after them, its
            readouts of sites.
        shape: Of their rows, or of what readouts make of them; None: that of the stream.
        is_read_out: Whether these are readouts of the sites.
    """

    sites: tuple[Site, ...]
    ids: Int64Array
    shape: SiteShape | None = None
    is_read_out: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PackGroup:
    """Rows of one step that share a set of sites. Each wanted (row, site) pair is in exactly one group.

    Attributes:
        site_set: ``S`` sites. The same object step after step while any request wants exactly these sites, so it can
            serve as a key.
        rows: int64 ``[N]``, offsets into `StepPlan.token_rows`.
        positions: int64 ``[N]``, absolute; ascending within a request.
        masks: int64 ``[N]``; bit i: consumer i wants the row at these sites. Never 0 as planned; what is handed over
            for some of the consumers has no bits of the others.
        spans: ``(req_id, start, stop)``: rows ``start : stop`` of the group are that request's. In batch order,
            one per request, together covering ``0 : N``.
        token_ids: int32 ``[N]``, the token that each row was computed from; None as planned, or if they are not known.
    """

    site_set: SiteSet
    rows: Int64Array
    positions: Int64Array
    masks: Int64Array
    spans: RequestSpans
    token_ids: Int32Array | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """``S`` sites, in ring order."""
        return self.site_set.sites

    @property
    def site_ids(self) -> Int64Array:
        """int64 ``[S]``, read-only: indices of the sites, or of their readouts, in the worker's list."""
        return self.site_set.ids

    @property
    def shape(self) -> SiteShape | None:
        """Values of each row, or of what a readout makes of it; None stands for those of the stream."""
        return self.site_set.shape

    def take(self, index: Int64Array) -> PackGroup:
        """Return the rows at `index`, int64, ascending."""
        return PackGroup(
            site_set=self.site_set,
            rows=self.rows[index],
            positions=self.positions[index],
            masks=self.masks[index],
            spans=take_spans(self.spans, index),
            token_ids=None if self.token_ids is None else self.token_ids[index],
        )


class StepPlan:
    """The rows to keep of one step, from before its forward until they are copied.

    With drafts, it is undecided before the sampling which of these rows count.

    Attributes:
        token_rows: int64 ``[K]``, ascending: the flat batch rows that are wanted, or may be. Staging slot k of the step
            holds batch row ``token_rows[k]``. The same array object in all steps of a run.
        num_copies: Wanted (row, site) pairs; their upper limit while it is undecided.
        base: Slot of the ring that has the first of the rows; the others follow. The ring sets this and the next two.
        has_token_ids: Whether it has the tokens of the rows, too.
        since: When the forward was launched, in seconds of the monotonic clock.

    Args:
        token_rows: See above.
        groups: What is wanted of them; no two have the same sites. If `number` is not 0: of the first step of a run, in
            which every request decodes one token a step.
        number: Of the step in its run: its positions are so many after those of `groups`.
        num_copies: See above, if it is known.
        covers: Of an undecided step, the sites that requests with these rows want; some may share a site.
    """

    __slots__ = ("_covers", "_first", "_number", "base", "has_token_ids", "num_copies", "since", "token_rows")
    base: int
    has_token_ids: bool
    since: float

    def __init__(
        self,
        token_rows: Int64Array,
        groups: tuple[PackGroup, ...],
        number: int = 0,
        num_copies: int | None = None,
        covers: Sequence[SiteSet] | None = None,
    ) -> None:
        self.token_rows = token_rows
        self.num_copies = count_copies(groups) if num_copies is None else num_copies
        self._first = groups
        self._number = number
        self._covers = covers

    def decide(self, groups: tuple[PackGroup, ...], num_copies: int) -> None:
        """Set what is wanted of the rows of an undecided step, and how many (row, site) pairs these are."""
        self._first, self.num_copies, self._covers = groups, num_copies, None

    @property
    def is_decided(self) -> bool:
        """Whether `groups` has what is wanted; without a wanted row it has none."""
        return self._covers is None

    @property
    def end(self) -> int:
        """The slot after the last of the rows."""
        return self.base + len(self.token_rows)

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites that are wanted, or may be, each once, in the same order on all ranks."""
        if self._covers is None:
            return tuple(dict.fromkeys(site for group in self._first for site in group.sites))
        return sort_sites({site for cover in self._covers for site in cover.sites})

    @property
    def groups(self) -> tuple[PackGroup, ...]:
        """The wanted rows, by sites."""
        if not self._number:
            return self._first
        return tuple(replace(group, positions=group.positions + self._number) for group in self._first)

    def later(self, distance: int) -> StepPlan:
        """The step so many steps later in the same run."""
        return StepPlan(self.token_rows, self._first, self._number + distance, self.num_copies)

    def continues(self, before: StepPlan) -> bool:
        """Whether this is the step that follows `before` in its run."""
        return self._first is before._first and self._number == before._number + 1

    def run(self, num_steps: int, distance: int) -> Iterator[PackGroup]:
        """The groups of `num_steps` steps of a run together; this is the first of them.

        Each step's wanted rows follow the last one's, and `distance` other rows come before the first. The rows of a
        request are next to each other.
        """
        if num_steps == 1:
            yield from (replace(group, rows=group.rows + distance) for group in self.groups)
            return
        steps = np.arange(num_steps)
        for group in self.groups:
            if len(group.spans) != len(group.rows):
                raise AssertionError(f"a run in which {len(group.spans)} requests have {len(group.rows)} rows a step")
            yield PackGroup(
                site_set=group.site_set,
                rows=np.add.outer(group.rows + distance, steps * len(self.token_rows)).reshape(-1),
                positions=np.add.outer(group.positions, steps).reshape(-1),
                masks=np.repeat(group.masks, num_steps),
                spans=tuple((req_id, start * num_steps, stop * num_steps) for req_id, start, stop in group.spans),
            )


def count_copies(groups: Sequence[PackGroup]) -> int:
    """Wanted (row, site) pairs of some groups."""
    return sum(len(group.site_ids) * len(group.rows) for group in groups)


def memory_rows(group: PackGroup, row_bytes: int) -> int:
    """Rows of host memory that a group takes whose rows have another shape than the stream; 0 for any other group."""
    if group.shape is None:
        return 0
    return -(-group.shape.row_bytes * len(group.site_ids) * len(group.rows) // row_bytes)


def row_cost(shape: SiteShape | None, row_bytes: int) -> int:
    """Rows of host memory to reckon with for a row at a site or readout: one, or more for a wide one.

    Where parts are cut a narrow row counts as one at least, since its index takes a place, too.

    Args:
        shape: Of the site or readout; None: that of the stream.
        row_bytes: Bytes of a row of host memory.
    """
    return 1 if shape is None else max(-(-shape.row_bytes // row_bytes), 1)


def joined(plans: Sequence[StepPlan]) -> tuple[PackGroup, ...]:
    """The groups of some steps whose wanted rows follow each other; rows count from the first step's first one.

    Steps of one run that follow each other come as one group for each set of sites.
    """
    if len(plans) == 1:
        return plans[0].groups
    found: list[PackGroup] = []
    start = distance = 0
    for stop in range(1, len(plans) + 1):
        if stop < len(plans) and plans[stop].continues(plans[stop - 1]):
            continue
        found.extend(plans[start].run(stop - start, distance))
        distance += sum(len(plan.token_rows) for plan in plans[start:stop])
        start = stop
    return tuple(found)


def unwanted(group: PackGroup) -> PackGroup:
    """The group without a consumer that wants any of its rows."""
    return replace(group, masks=np.zeros_like(group.masks))


def rows_between(group: PackGroup, start: int, stop: int) -> PackGroup | None:
    """The group's rows at offsets ``start : stop`` of the step's wanted rows."""
    index: Int64Array = np.flatnonzero((group.rows >= start) & (group.rows < stop))
    return group.take(index) if len(index) else None


MAX_SHARED = 1 << 21
"""Numbers below this one share one memory of at most 16 MiB; no context is longer today."""

_numbers: Int64Array = np.arange(0)


def count_up(start: int, stop: int) -> Int64Array:
    """Numbers from `start` up to `stop`, exclusive: int64 ``[stop - start]``, read-only, mostly of shared memory."""
    global _numbers
    if stop > MAX_SHARED:
        return _read_only(np.arange(start, stop))
    if stop > len(_numbers):
        _numbers = _read_only(np.arange(max(stop, 2 * len(_numbers))))
    return _numbers[start:stop]


def _read_only(numbers: Int64Array) -> Int64Array:
    numbers.flags.writeable = False
    return numbers


def prolonged(firsts: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
    """Numbers that count up from each entry of `firsts`, one run after the other: int64 ``[N]``.

    Args:
        firsts: Of each run, its first number.
        starts: Where it begins among the ``N``.
        counts: How many numbers it has.
    """
    total = int(starts[-1] + counts[-1])
    if total == len(counts):
        return firsts
    if len(counts) == 1:
        return np.arange(firsts[0], firsts[0] + total)
    return np.repeat(firsts - starts, counts) + count_up(0, total)


def changes(values: Int64Array) -> Int64Array:
    """Where a value differs from the one before it, int64, ascending."""
    found: Int64Array = np.flatnonzero(values[1:] != values[:-1]) + 1
    return found


def spans_of(owners: Int64Array, req_ids: Sequence[str]) -> RequestSpans:
    """The spans of rows that lie next to each other by owner.

    Args:
        owners: int64 ``[N]``, whose each row is: indices into `req_ids`, ascending.
        req_ids: The requests.
    """
    starts = [0, *changes(owners).tolist()]
    stops = [*starts[1:], len(owners)]
    return tuple(zip([req_ids[owner] for owner in owners[starts].tolist()], starts, stops, strict=True))


def take_spans(spans: RequestSpans, index: Int64Array) -> RequestSpans:
    """The spans of the rows that are left when only those at `index` are kept.

    Args:
        spans: Together covering ``0 : N``.
        index: Ascending, each in ``0 : N``.
    """
    starts = np.searchsorted(index, [start for _, start, _ in spans]).tolist()
    stops = np.searchsorted(index, [stop for _, _, stop in spans]).tolist()
    return tuple(
        (req_id, start, stop) for (req_id, _, _), start, stop in zip(spans, starts, stops, strict=True) if start < stop
    )
