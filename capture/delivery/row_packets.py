"""Rows on their way from the staging memory to the consumers' queues: many steps become one packet for each consumer.

`StepCoalescer` holds the rows of small steps for a moment and copies them out together, each request's rows next to
each other: a decode step brings one row for each of many requests, and dispatching takes some Python calls for each
request, in the process that also runs the engine's steps. `Splitter` then makes a block of each consumer's rows, and
the blocks of a consumer are one `Packet`.

Shapes: S sites, N rows of a group, M rows of all groups with the same sites, W width of their rows.
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, compress
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.planning.step_plan import PackGroup, RequestSpans, SiteSet, spans_of, take_spans
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import HELD_STEPS, KIB, MIB
from headgate.capture.schema.consumer import RowBlock, RowSpan
from headgate.capture.schema.sites import Columns, Site
from headgate.capture.staging.host_rows import StagedRows

MIN_BYTES = 64 * KIB
"""Least size that is kept: clearing fewer new pages costs less than keeping them."""
REGION_BYTES = 64 * MIB
"""Memory is taken from the system in regions of at least this size."""
IDLE_S = 60.0
"""Memory that was unused for so long goes back to the system."""
OWN_BYTES = 64 * KIB
"""Rows of a request that take less come with those of others: a block of their own would cost more than their copy."""

Bytes = npt.NDArray[np.uint8]


class _Extents:
    """Free extents of one kind of memory, for best fit: ``offset: size`` and the same by their ends and sizes."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.num_bytes = 0

    def add(self, start: int, size: int) -> None:
        """Add an extent, and unite it with the free ones next to it."""
        if (before := self._starts.get(start)) is not None:
            size += start - before
            start = before
            self._remove(before)
        if (after := self._sizes.get(start + size)) is not None:
            self._remove(start + size)
            size += after
        self._sizes[start], self._starts[start + size] = size, start
        insort(self._by_size, (size, start))
        self.num_bytes += size

    def take(self, size: int) -> int | None:
        """Take `size` bytes of the smallest extent that is large enough; return where they start, None if none is."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        found, start = self._by_size[at]
        self._remove(start)
        if found > size:
            self.add(start + size, found - size)
        return start

    def take_largest(self) -> tuple[int, int]:
        """Take the largest extent; return its start and size."""
        size, start = self._by_size[-1]
        self._remove(start)
        return start, size

    def _remove(self, start: int) -> None:
        size = self._sizes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.num_bytes -= size


class RowPool:
    """Makes tensors and arrays whose memory comes back here when the last reference to it, or to a view of it, is gone.

    Rows come in packets of any size, and memory of the system is slow at its first use: every page is cleared. So
    memory lies in large regions whose free parts are used again in any size, and what is free for a moment is kept.

    All calls are for one thread. Memory comes back on whichever thread drops the last reference, maybe inside the
    garbage collector, so that path takes no lock.

    Args:
        keep_bytes: Unused memory that is kept, however long it is unused.
        clock: Seconds.
    """

    def __init__(self, keep_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._returned: deque[tuple[int, int]] = deque()
        self._regions: list[tuple[int, mmap.mmap, Bytes]] = []
        """By the offset at which each begins: offsets count through all, with a gap between two."""
        self._next_offset = 0
        self._used, self._vacant = _Extents(), _Extents()
        """Free memory with pages that were used before, and without."""
        self._idle_bytes, self._idle_until = 0, clock() + IDLE_S

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor on the CPU, like ``torch.empty``."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(*shape, dtype=dtype)
        return torch.from_numpy(self._take(num_bytes)).view(dtype).view(*shape)

    def empty_bytes(self, shape: Sequence[int]) -> Bytes:
        """Make an uninitialised array of bytes, like ``np.empty``."""
        num_bytes = prod(shape)
        return np.empty(shape, np.uint8) if num_bytes < MIN_BYTES else self._take(num_bytes).reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Unused bytes that the system does not have. For the thread that takes memory."""
        self._take_back()
        return self._used.num_bytes

    def _take(self, num_bytes: int) -> Bytes:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._take_back()
        start = self._used.take(size)
        if start is None:
            start = self._vacant.take(size)
        if start is None:
            self._add_region(max(size, REGION_BYTES))
            start = self._vacant.take(size)
            assert start is not None  # noqa: S101  (the region is large enough)
        self._give_back_idle()
        first, _, memory = self._regions[bisect_right(self._regions, start, key=itemgetter(0)) - 1]
        held = memory[start - first : start - first + size].view(_RegionView)
        held.give_back = partial(self._returned.append, (start, size))
        return held[:num_bytes].view(np.ndarray)  # whose base is `held`, and not the region

    def _take_back(self) -> None:
        while self._returned:
            self._used.add(*self._returned.popleft())

    def _add_region(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._regions.append((self._next_offset, memory, np.frombuffer(memory, np.uint8)))
        self._vacant.add(self._next_offset, size)
        self._next_offset += size + mmap.PAGESIZE

    def _give_back_idle(self) -> None:
        """Every `IDLE_S`, return what was free all the time to the system: a change of load must not pile it up."""
        self._idle_bytes = min(self._idle_bytes, self._used.num_bytes)
        if self._clock() < self._idle_until:
            return
        num_over = self._idle_bytes - self._keep_bytes
        while num_over > 0:
            start, size = self._used.take_largest()
            if size > (over := -(-num_over // mmap.PAGESIZE) * mmap.PAGESIZE):
                self._used.add(start + over, size - over)
                size = over
            first, memory, _ = self._regions[bisect_right(self._regions, start, key=itemgetter(0)) - 1]
            memory.madvise(mmap.MADV_DONTNEED, start - first, size)
            self._vacant.add(start, size)
            num_over -= size
        self._idle_bytes, self._idle_until = self._used.num_bytes, self._clock() + IDLE_S


class _RegionView(np.ndarray):
    """A part of a region, uint8 ``[bytes]``; tensors and views made of it hold it, and it is given back with the last.

    Attributes:
        give_back: Called when the last of them is gone.
    """

    give_back: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.give_back is not None:
            self.give_back()


BlockPart = tuple[RowBlock, tuple[ConsumerRequest, ...]]
"""A block and the request of each of its spans."""


class StepCoalescer:
    """Rows in the staging memory that wait for those of the next steps. For one thread.

    Args:
        max_bytes: Bytes from which on it is full.
        has_own_blocks: Whether rows of a request that take `OWN_BYTES` or more are copied to memory of their own,
            which is free again as soon as these rows are not needed.
    """

    def __init__(self, max_bytes: int, *, has_own_blocks: bool = False) -> None:
        self._max_bytes = max_bytes
        self._own_bytes = OWN_BYTES if has_own_blocks else None
        self._staged: list[StagedRows] = []
        self._num_bytes = 0
        self._req_ids: set[str] = set()
        self._last_spans: RequestSpans | None = None

    def __len__(self) -> int:
        """Count the device copies that are held."""
        return len(self._staged)

    @property
    def is_full(self) -> bool:
        """Whether it is time to `copy_out`."""
        return self._num_bytes >= self._max_bytes or len(self._staged) >= HELD_STEPS

    def has(self, req_id: str) -> bool:
        """Whether rows of that request are held."""
        return req_id in self._req_ids

    def add(self, staged: StagedRows) -> None:
        """Hold rows; their memory stays leased until `copy_out`."""
        self._staged.append(staged)
        self._num_bytes += staged.num_bytes
        for group in staged.groups:
            if group.spans is not self._last_spans:
                self._last_spans = group.spans
                self._req_ids.update(req_id for req_id, _, _ in group.spans)

    def copy_out(self, pool: RowPool) -> list[tuple[PackGroup, Tensor]]:
        """Copy everything out of the staging memory and release that; nothing is held then, whatever happens.

        Args:
            pool: Memory for the rows.

        Returns:
            Sites, positions, owners and tokens of rows, and the rows, ``[S, M, W]``, or the outputs of their readouts.
        """
        staged, self._staged = self._staged, []
        self._num_bytes, self._last_spans = 0, None
        self._req_ids.clear()
        try:
            for each in staged:
                each.wait()
            found = [_RowsOfSites(parts) for parts in _by_sites(staged)]
            return [rows for each in found for rows in each.copy_out(pool, self._own_bytes)]
        finally:
            for each in staged:
                each.release()


class _GroupPart(NamedTuple):
    """A group of one step, and the place of its rows."""

    group: PackGroup
    staged: StagedRows
    start: int
    """Row of the staging memory at which the first site's first row lies."""


def _by_sites(staged: Iterable[StagedRows]) -> list[list[_GroupPart]]:
    """Collect the groups of all steps; those of the same sites together, in order."""
    found: dict[SiteSet, list[_GroupPart]] = {}
    for each in staged:
        for group, start in each.places:
            if not group.masks.any():
                continue  # its consumers are served elsewhere
            found.setdefault(group.site_set, []).append(_GroupPart(group, each, start))
    return list(found.values())


class _RowsOfSites:
    """Rows of some steps at the same sites, in the staging memory, taken in the order of their requests.

    Args:
        parts: The steps, at least one.
    """

    def __init__(self, parts: Sequence[_GroupPart]) -> None:
        self._parts = parts
        self._order: Int64Array | None = None
        group, staged, _ = parts[0]
        if len(parts) == 1:
            self._group = replace(group, token_ids=staged.token_ids(group))
            return
        owners, req_ids = _owners(parts)
        self._order = order = np.argsort(owners, kind="stable")
        token_ids = [part.staged.token_ids(part.group) for part in parts]
        known = [ids for ids in token_ids if ids is not None]
        self._group = PackGroup(
            site_set=group.site_set,
            rows=np.arange(len(order)),
            positions=np.concatenate([part.group.positions for part in parts])[order],
            masks=np.concatenate([part.group.masks for part in parts])[order],
            spans=spans_of(owners[order], req_ids),
            token_ids=np.concatenate(known)[order] if len(known) == len(token_ids) else None,
        )

    def copy_out(self, pool: RowPool, own_bytes: int | None) -> Iterator[tuple[PackGroup, Tensor]]:
        """Copy the rows; those of a request that take `own_bytes` or more are an item of their own."""
        group, spans = self._group, self._group.spans
        if group.shape is not None:
            yield group, self._shaped(pool)
            return
        row_bytes = len(group.sites) * self._parts[0].staged.memory[0].nbytes
        own = [span for span in spans if own_bytes and row_bytes * (span[2] - span[1]) >= own_bytes]
        yield from self._copied_each(own, pool)
        if len(own) < len(spans):
            is_left = np.ones(len(group.positions), dtype=np.bool_)
            for _, start, stop in own:
                is_left[start:stop] = False
            yield self._copied(np.flatnonzero(is_left), pool)

    def _copied_each(self, spans: Sequence[tuple[str, int, int]], pool: RowPool) -> Iterator[tuple[PackGroup, Tensor]]:
        """Copy the rows of each of `spans` to memory of its own.

        All in one call of torch: each call releases the GIL, and getting it back among busy threads takes
        longer than the copy.
        """
        if not spans:
            return
        group = self._group
        staged = self._staged_rows({req_id for req_id, _, _ in spans})
        copies: list[Tensor] = []
        targets: list[Tensor] = []
        for req_id, start, stop in spans:
            first, at = staged[req_id][0], 0
            rows = pool.empty((first.shape[0], stop - start, first.shape[2]), first.dtype)
            copies.append(rows)
            for source in staged[req_id]:
                targets.append(rows.narrow(1, at, source.shape[1]))
                at += source.shape[1]
        torch._foreach_copy_(targets, [source for req_id, _, _ in spans for source in staged[req_id]])
        for (req_id, start, stop), rows in zip(spans, copies, strict=True):
            of_one = PackGroup(
                site_set=group.site_set,
                rows=np.arange(stop - start),
                positions=group.positions[start:stop],
                masks=group.masks[start:stop],
                spans=((req_id, 0, stop - start),),
                token_ids=None if group.token_ids is None else group.token_ids[start:stop],
            )
            yield of_one, rows

    def _staged_rows(self, req_ids: Set[str]) -> dict[str, list[Tensor]]:
        """Views of the staging memory, ``[S, N, W]`` for each step that has rows of a request, in order."""
        found: dict[str, list[Tensor]] = {req_id: [] for req_id in req_ids}
        for part in self._parts:
            view = part.staged.view(part.group, part.start)
            for req_id, start, stop in part.group.spans:
                if req_id in req_ids:
                    found[req_id].append(view.narrow(1, start, stop - start))
        return found

    def _copied(self, index: Int64Array, pool: RowPool) -> tuple[PackGroup, Tensor]:
        """Copy the rows at `index`, ascending, which are whole spans of the group."""
        group = self._group if len(index) == len(self._group.positions) else self._group.take(index)
        _, staged, start = self._parts[0]
        if self._order is None:
            view = _select(staged.view(self._group, start), index)
            return group, pool.empty(view.shape, view.dtype).copy_(view)
        memory_AD = staged.memory
        index_SM = self._places[:, index]
        rows = pool.empty((*index_SM.shape, memory_AD.shape[1]), memory_AD.dtype)
        torch.index_select(memory_AD, 0, torch.from_numpy(index_SM.reshape(-1)), out=rows.view(-1, memory_AD.shape[1]))
        return group, rows

    @cached_property
    def _places(self) -> Int64Array:
        """Rows of the staging memory, int64 ``[S, M]``."""
        num_sites = len(self._group.sites)
        return np.concatenate([_index(part, num_sites) for part in self._parts], axis=1)[:, self._order]

    def _shaped(self, pool: RowPool) -> Tensor:
        """Copy rows that have another shape than the rows of the staging memory."""
        outputs = [part.staged.view(part.group, part.start) for part in self._parts]
        if self._order is None:
            return pool.empty(outputs[0].shape, outputs[0].dtype).copy_(outputs[0])
        return torch.cat(outputs, dim=1).index_select(1, torch.from_numpy(self._order))


def _index(part: _GroupPart, num_sites: int) -> Int64Array:
    """Make the indices of rows of the staging memory, int64 ``[S, N]``."""
    num_rows = len(part.group.rows)
    return part.start + np.arange(num_sites * num_rows).reshape(num_sites, num_rows)


def _owners(parts: Sequence[_GroupPart]) -> tuple[Int64Array, list[str]]:
    """Number the owner of each row, int64 ``[M]``; return the owners, too, in the order in which they first appear."""
    numbers: dict[str, int] = {}
    owners: list[Int64Array] = []
    last: RequestSpans | None = None
    for part in parts:
        spans = part.group.spans
        if spans is not last and spans != last:
            of_spans = [numbers.setdefault(req_id, len(numbers)) for req_id, _, _ in spans]
            each = np.repeat(of_spans, [stop - start for _, start, stop in spans])
        last = spans
        owners.append(each)
    return np.concatenate(owners), list(numbers)


class Splitter:
    """Makes a block for each consumer from rows that all consumers share. For the dispatch thread.

    While requests neither come nor go, most steps look like the one before: spans and owners are then used again
    instead of being made for each request.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Mapping[int, ConsumerRequest]] = {}
        self._last: dict[tuple[int, SiteSet], _Ownership] = {}
        self._cut_sites: dict[tuple[Site, ...], tuple[Site, ...]] = {}
        """Sites of blocks of columns, each tuple once: consumers know kinds of blocks by it."""

    def begin(self, req_id: str, requests: Mapping[int, ConsumerRequest]) -> None:
        """Give rows of `req_id` to `requests`, by consumer bit, from now on."""
        self._requests[req_id] = requests
        self._last.clear()

    def end(self, req_id: str) -> Mapping[int, ConsumerRequest]:
        """Forget `req_id`, for which no more rows come; return its requests, none if it is not known."""
        self._last.clear()
        return self._requests.pop(req_id, {})

    def split(self, group: PackGroup, rows: Tensor) -> Iterator[tuple[int, BlockPart]]:
        """Yield a block for each consumer that wants any of `rows`, with its bit; more where requests select columns.

        Consumers that want every row share the tensor; so do consecutive rows. Others get a copy of theirs.

        Args:
            group: Sites, positions and owners of the rows.
            rows: ``[S, N, hidden]``.
        """
        wanted = int(np.bitwise_or.reduce(group.masks))
        wanted_of_all = int(np.bitwise_and.reduce(group.masks))
        for bit in range(wanted.bit_length()):
            if not wanted >> bit & 1:
                continue
            if wanted_of_all >> bit & 1:
                positions, spans, chosen = group.positions, group.spans, rows
            else:
                index = np.flatnonzero(group.masks >> bit & 1)
                positions, spans, chosen = group.positions[index], take_spans(group.spans, index), _select(rows, index)
            owned = self._owned(bit, group, spans)
            block = RowBlock(sites=group.sites, rows=chosen, positions=positions, spans=owned.row_spans)
            if owned.has_columns:
                yield from ((bit, part) for part in self._cut(block, owned.owners))
            else:
                yield bit, (block, owned.owners)

    def _cut(self, block: RowBlock, owners: tuple[ConsumerRequest, ...]) -> Iterator[BlockPart]:
        """Yield blocks of a block's rows, each of requests that want the same columns, and of one width."""
        by_columns: dict[tuple[Columns, ...], list[bool]] = {}
        for at, owner in enumerate(owners):
            wanted = tuple(owner.info.spec.columns.get(site, ()) for site in block.sites)
            by_columns.setdefault(wanted, [False] * len(owners))[at] = True
        for wanted, chosen in by_columns.items():
            part = _chosen_spans(block, owners, chosen)
            for columns in dict.fromkeys(wanted):
                alike = [index for index, each in enumerate(wanted) if each == columns]
                rows, sites = part[0].rows, tuple(block.sites[index] for index in alike)
                rows = rows if len(alike) == len(wanted) else rows[alike]
                if columns:
                    rows = torch.cat([rows[:, :, start:stop] for start, stop in columns], dim=2)
                yield replace(part[0], sites=self._cut_sites.setdefault(sites, sites), rows=rows), part[1]

    def _owned(self, bit: int, group: PackGroup, spans: RequestSpans) -> _Ownership:
        last = self._last.get((bit, group.site_set))
        if last is not None and last.spans == spans:
            return last
        owners = tuple(self._requests[req_id][bit] for req_id, _, _ in spans)
        row_spans = tuple(
            RowSpan(request=owner.info, start=start, stop=stop)
            for owner, (_, start, stop) in zip(owners, spans, strict=True)
        )
        has_columns = any(
            owner.info.spec.columns and not owner.info.spec.columns.keys().isdisjoint(group.sites) for owner in owners
        )
        made = self._last[bit, group.site_set] = _Ownership(spans, row_spans, owners, has_columns)
        return made


class _Ownership(NamedTuple):
    """Owners of the rows of a block: as the planner names them, as the consumer does, and as its queue does."""

    spans: RequestSpans
    row_spans: tuple[RowSpan, ...]
    owners: tuple[ConsumerRequest, ...]
    has_columns: bool
    """Whether any of them wants some columns of these sites alone."""


def _select(rows: Tensor, index: Int64Array) -> Tensor:
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return rows[:, first : last + 1]
    return rows.index_select(1, torch.from_numpy(index))


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """The rows of some steps for one consumer."""

    parts: Sequence[BlockPart]

    @property
    def blocks(self) -> tuple[RowBlock, ...]:
        """The rows, as the consumer gets them."""
        return tuple(block for block, _ in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(block.rows.nbytes for block, _ in self.parts)

    @property
    def num_rows(self) -> int:
        """Positions, each once however many sites it has."""
        return sum(
            span.stop - span.start
            for block, owners in self.parts
            for span, request in zip(block.spans, owners, strict=True)
            if request.first_site in block.sites
        )

    def note_delivered(self) -> int:
        """Count the rows in their requests' audits; return how many positions that are."""
        num_rows = 0
        for block, owners in self.parts:
            sites, num_sites, positions = block.sites, len(block.sites), block.positions.tolist()
            for span, request in zip(block.spans, owners, strict=True):
                start, stop = span.start, span.stop
                if request.first_site in sites:
                    num_rows += stop - start
                first, last = positions[start], positions[stop - 1]
                if last - first == stop - start - 1:
                    request.audit.deliver_run(first, last + 1, num_sites)
                else:
                    request.audit.deliver(block.positions[start:stop], num_sites)
        return num_rows

    def note_dropped(self, reason: str) -> None:
        """Count the rows as lost in their requests' audits."""
        for block, owners in self.parts:
            for span, request in zip(block.spans, owners, strict=True):
                request.audit.drop(block.positions[span.start : span.stop])
                request.drop_reason = reason

    def requests(self) -> list[ConsumerRequest]:
        """List the requests that own the rows, each once."""
        return list(dict.fromkeys(request for _, owners in self.parts for request in owners))

    def without_failed(self) -> Packet | None:
        """Leave out the rows of requests that have failed; None if nothing remains."""
        if not any(request.failure for _, owners in self.parts for request in owners):
            return self
        chosen = ((part, [owner.failure is None for owner in part[1]]) for part in self.parts)
        live = [_chosen_spans(*part, are_live) for part, are_live in chosen if any(are_live)]
        return Packet(live) if live else None


def _chosen_spans(block: RowBlock, owners: tuple[ConsumerRequest, ...], chosen: Sequence[bool]) -> BlockPart:
    """Return the rows of some spans of a block, at least one."""
    if all(chosen):
        return block, owners
    return select_spans(block, list(compress(block.spans, chosen))), tuple(compress(owners, chosen))


def select_spans(block: RowBlock, spans: Sequence[RowSpan]) -> RowBlock:
    """Copy the rows of some of a block's spans, at least one, into a block of their own."""
    index = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    stops = accumulate(span.stop - span.start for span in spans)
    moved = (
        replace(span, start=stop - span.stop + span.start, stop=stop) for span, stop in zip(spans, stops, strict=True)
    )
    rows = block.rows.index_select(1, torch.from_numpy(index))
    return replace(block, rows=rows, positions=block.positions[index], spans=tuple(moved))
