"""Rows on their way from the staging memory to the consumers' queues: many steps become one packet for each consumer.

`StepCoalescer` holds the rows of small steps for a moment and copies them out together, each request's rows next to
each other: a decode step brings one row for each of many requests, and dispatching takes some Python calls for each
request, in the process that also runs the engine's steps. `Splitter` then makes a block of each consumer's rows, and
the blocks of a consumer are one `Packet`.

Shapes: S sites, N rows of a group, M rows of all groups with the same sites, W width of their rows.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.planning.step_plan import PackGroup, RequestSpans, SiteSet, spans_of, take_spans
from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.capture.schema.config import HELD_STEPS, MIB
from headgate.capture.schema.consumer import RowBlock, RowSpan
from headgate.capture.staging.host_rows import StagedRows

MIN_BYTES = MIB
"""Least size that is kept: the system's allocator reuses smaller memory by itself."""
MOST_TIMES = 4
"""Memory is used again for what takes at least this part of it."""

Slab = npt.NDArray[np.uint8]


class _Free(NamedTuple):
    """An unused slab; `turn` counts up from one that came back to the next."""

    size: int
    turn: int
    slab: Slab


class RowPool:
    """Makes tensors and arrays whose memory comes back here when the last reference to it, or to a view of it, is gone.

    Rows come in packets of any size, so memory is used again for smaller ones, too.

    All calls are for one thread. Memory comes back on whichever thread drops the last reference, maybe inside the
    garbage collector, so that path takes no lock.

    Args:
        keep_bytes: Unused memory that is kept.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._returned: deque[Slab] = deque()
        self._free: list[_Free] = []
        """Sorted by size."""
        self._turn = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make an uninitialised tensor on the CPU, like ``torch.empty``."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(*shape, dtype=dtype)
        return torch.from_numpy(self._take(num_bytes)).view(dtype).view(*shape)

    def empty_bytes(self, shape: Sequence[int]) -> Slab:
        """Make an uninitialised array of bytes, like ``np.empty``."""
        num_bytes = prod(shape)
        return np.empty(shape, np.uint8) if num_bytes < MIN_BYTES else self._take(num_bytes).reshape(shape)

    def _take(self, num_bytes: int) -> Slab:
        slab = self._find(num_bytes)
        if slab is None:
            self._trim()
            slab = np.empty(_size_class(num_bytes), dtype=np.uint8)
        held = slab.view(_SlabView)
        weakref.finalize(held, self._returned.append, slab).atexit = False
        return held[:num_bytes].view(np.ndarray)  # whose base is `held`, and not the slab

    def _find(self, num_bytes: int) -> Slab | None:
        """Take the smallest unused slab that is large enough, unless it is much too large."""
        self._take_back()
        at = bisect_left(self._free, num_bytes, key=lambda each: each.size)
        if at == len(self._free) or self._free[at].size > MOST_TIMES * num_bytes:
            return None
        return self._free.pop(at).slab

    def _take_back(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._turn += 1
            insort(self._free, _Free(slab.nbytes, self._turn, slab))

    @property
    def free_bytes(self) -> int:
        """Unused bytes. For the thread that takes memory."""
        self._take_back()
        return sum(each.size for each in self._free)

    def _trim(self) -> None:
        """Give the memory that was not used for longest back to the system: a change of load must not pile it up."""
        num_over = self.free_bytes - self._keep_bytes
        for each in sorted(self._free, key=lambda each: each.turn):
            if num_over <= 0:
                break
            num_over -= each.size
            self._free.remove(each)


class _SlabView(np.ndarray):
    """A view of a slab that can be referred to weakly; tensors and views made of it hold it."""


def _size_class(num_bytes: int) -> int:
    """Round `num_bytes` up to a quarter of a power of two."""
    step = 1 << (num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step


BlockPart = tuple[RowBlock, tuple[ConsumerRequest, ...]]
"""A block and the request of each of its spans."""


class CoalescedRows(NamedTuple):
    """Rows that have left the staging memory."""

    group: PackGroup
    """Sites, positions and owners of the rows; its `rows` count through them."""
    rows: Tensor
    """``[S, M, W]``: rows of the sites, or outputs of readouts."""
    token_ids: Int32Array | None
    """Token that each row was computed from, int32 ``[M]``; None if that is not known."""


class StepCoalescer:
    """Rows in the staging memory that wait for those of the next steps. For one thread.

    Args:
        max_bytes: Bytes from which on it is full.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
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
        for group in staged.contents:
            if group.spans is not self._last_spans:
                self._last_spans = group.spans
                self._req_ids.update(req_id for req_id, _, _ in group.spans)

    def copy_out(self, pool: RowPool) -> list[CoalescedRows]:
        """Copy everything out of the staging memory and release that; nothing is held then, whatever happens.

        Args:
            pool: Memory for the rows.
        """
        staged, self._staged = self._staged, []
        self._num_bytes, self._last_spans = 0, None
        self._req_ids.clear()
        try:
            for each in staged:
                each.wait()
            return [_copy_out(parts, pool) for parts in _by_sites(staged)]
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


def _copy_out(parts: Sequence[_GroupPart], pool: RowPool) -> CoalescedRows:
    group, staged, start = parts[0]
    memory_AD = staged.memory
    num_sites = len(group.sites)
    if len(parts) == 1:
        rows = staged.view(group, start)
        return CoalescedRows(group, pool.empty(rows.shape, rows.dtype).copy_(rows), staged.token_ids(group))
    owners, req_ids = _owners(parts)
    order = np.argsort(owners, kind="stable")
    if group.shape is not None:
        outputs = torch.cat([part.staged.view(part.group, part.start) for part in parts], dim=1)
        rows = outputs.index_select(1, torch.from_numpy(order))
    else:
        index_SM = np.concatenate([_index(part, num_sites) for part in parts], axis=1)[:, order]
        shape = (num_sites, len(order), memory_AD.shape[1])
        rows = pool.empty(shape, memory_AD.dtype)
        torch.index_select(memory_AD, 0, torch.from_numpy(index_SM.reshape(-1)), out=rows.view(-1, shape[2]))
    merged = PackGroup(
        site_set=group.site_set,
        rows=np.arange(len(order)),
        positions=np.concatenate([part.group.positions for part in parts])[order],
        masks=np.concatenate([part.group.masks for part in parts])[order],
        spans=spans_of(owners[order], req_ids),
    )
    token_ids = [part.staged.token_ids(part.group) for part in parts]
    known = [ids for ids in token_ids if ids is not None]
    return CoalescedRows(merged, rows, np.concatenate(known)[order] if len(known) == len(token_ids) else None)


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

    def begin(self, req_id: str, requests: Mapping[int, ConsumerRequest]) -> None:
        """Give rows of `req_id` to `requests`, by consumer bit, from now on."""
        self._requests[req_id] = requests
        self._last.clear()

    def end(self, req_id: str) -> Mapping[int, ConsumerRequest]:
        """Forget `req_id`, for which no more rows come; return its requests, none if it is not known."""
        self._last.clear()
        return self._requests.pop(req_id, {})

    def split(self, group: PackGroup, rows: Tensor) -> Iterator[tuple[int, BlockPart]]:
        """Yield a block for each consumer that wants any of `rows`, with its bit.

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
            yield (
                bit,
                (
                    RowBlock(sites=group.sites, rows=chosen, positions=positions, spans=owned.row_spans),
                    owned.owners,
                ),
            )

    def _owned(self, bit: int, group: PackGroup, spans: RequestSpans) -> _Ownership:
        last = self._last.get((bit, group.site_set))
        if last is not None and last.spans == spans:
            return last
        owners = tuple(self._requests[req_id][bit] for req_id, _, _ in spans)
        row_spans = tuple(
            RowSpan(request=owner.info, start=start, stop=stop)
            for owner, (_, start, stop) in zip(owners, spans, strict=True)
        )
        made = self._last[bit, group.site_set] = _Ownership(spans, row_spans, owners)
        return made


class _Ownership(NamedTuple):
    """Owners of the rows of a block: as the planner names them, as the consumer does, and as its queue does."""

    spans: RequestSpans
    row_spans: tuple[RowSpan, ...]
    owners: tuple[ConsumerRequest, ...]


def _select(rows: Tensor, index: Int64Array) -> Tensor:
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return rows[:, first : last + 1]
    return rows.index_select(1, torch.from_numpy(index))


class Portion(NamedTuple):
    """The rows of one request in one block."""

    request: ConsumerRequest
    positions: Int64Array
    num_sites: int
    num_new: int
    """Positions that no other block of the packet counts."""


@dataclass(frozen=True, slots=True)
class Packet:
    """The rows of some steps for one consumer.

    Attributes:
        blocks: The rows.
        owners: One request for each span of each block.
    """

    blocks: tuple[RowBlock, ...]
    owners: tuple[tuple[ConsumerRequest, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(block.rows.nbytes for block in self.blocks)

    @property
    def num_rows(self) -> int:
        """Positions, each once however many sites it has."""
        return sum(portion.num_new for portion in self.portions())

    def portions(self) -> Iterator[Portion]:
        """Iterate over every request's part of every block."""
        for block, owners in zip(self.blocks, self.owners, strict=True):
            for span, request in zip(block.spans, owners, strict=True):
                num_new = span.stop - span.start if request.first_site in block.sites else 0
                yield Portion(request, block.positions[span.start : span.stop], len(block.sites), num_new)

    def note_delivered(self) -> int:
        """Count the rows in their requests' audits; return how many positions that are."""
        num_rows = 0
        for block, owners in zip(self.blocks, self.owners, strict=True):
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

    def requests(self) -> list[ConsumerRequest]:
        """List the requests that own the rows, each once."""
        return list(dict.fromkeys(request for owners in self.owners for request in owners))

    def without_failed(self) -> Packet | None:
        """Leave out the rows of requests that have failed; None if nothing remains."""
        if not any(request.failure for owners in self.owners for request in owners):
            return self
        parts = [
            part
            for block, owners in zip(self.blocks, self.owners, strict=True)
            if (part := _keep_spans(block, owners)) is not None
        ]
        return join(parts) if parts else None


def join(parts: list[BlockPart]) -> Packet:
    """Make a packet of `parts`."""
    return Packet(tuple(block for block, _ in parts), tuple(owners for _, owners in parts))


def _keep_spans(block: RowBlock, owners: tuple[ConsumerRequest, ...]) -> BlockPart | None:
    kept = [(span, owner) for span, owner in zip(block.spans, owners, strict=True) if owner.failure is None]
    if not kept:
        return None
    index = np.concatenate([np.arange(span.start, span.stop) for span, _ in kept])
    spans, stop = [], 0
    for span, _ in kept:
        start, stop = stop, stop + span.stop - span.start
        spans.append(replace(span, start=start, stop=stop))
    rows = block.rows.index_select(1, torch.from_numpy(index))
    kept_block = replace(block, rows=rows, positions=block.positions[index], spans=tuple(spans))
    return kept_block, tuple(owner for _, owner in kept)
