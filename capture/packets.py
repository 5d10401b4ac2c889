"""The rows of one step for one consumer, and how they are cut out of what everybody shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.batch import Int64Array
from headgate.capture.consumer import RowBlock, RowSpan
from headgate.capture.ledger import LaneRequest
from headgate.capture.spans import RequestSpans, take_spans
from headgate.capture.stepplan import PackGroup


class Portion(NamedTuple):
    """The rows of one request in one block."""

    request: LaneRequest
    positions: Int64Array
    num_sites: int
    num_new: int
    """How many of the positions no other block of the packet counts."""


@dataclass(frozen=True, slots=True)
class Packet:
    """The rows of one step for one consumer.

    Attributes:
        blocks: The rows.
        owners: Whose they are: one request for each span of each block.
    """

    blocks: tuple[RowBlock, ...]
    owners: tuple[tuple[LaneRequest, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(block.rows.nbytes for block in self.blocks)

    @property
    def num_rows(self) -> int:
        """Positions, each once however many sites it has."""
        return sum(portion.num_new for portion in self.portions())

    def portions(self) -> Iterator[Portion]:
        """Every request's part of every block."""
        for block, owners in zip(self.blocks, self.owners, strict=True):
            for span, request in zip(block.spans, owners, strict=True):
                num_new = span.stop - span.start if request.first_site in block.sites else 0
                yield Portion(request, block.positions[span.start : span.stop], len(block.sites), num_new)

    def deliver(self) -> int:
        """Note in the ledgers that the consumer has the rows; return how many positions that are."""
        num_rows = 0
        for block, owners in zip(self.blocks, self.owners, strict=True):
            sites, num_sites, positions = block.sites, len(block.sites), block.positions.tolist()
            for span, request in zip(block.spans, owners, strict=True):
                start, stop = span.start, span.stop
                if request.first_site in sites:
                    num_rows += stop - start
                first, last = positions[start], positions[stop - 1]
                if last - first == stop - start - 1:
                    request.ledger.deliver_run(first, last + 1, num_sites)
                else:
                    request.ledger.deliver(block.positions[start:stop], num_sites)
        return num_rows

    def requests(self) -> list[LaneRequest]:
        """Whose rows these are, each once."""
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


BlockPart = tuple[RowBlock, tuple[LaneRequest, ...]]
"""A block and the request of each of its spans."""


def join(parts: list[BlockPart]) -> Packet:
    """Make a packet of `parts`."""
    return Packet(tuple(block for block, _ in parts), tuple(owners for _, owners in parts))


def _keep_spans(block: RowBlock, owners: tuple[LaneRequest, ...]) -> BlockPart | None:
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


class Splitter:
    """Cuts what everybody shares into blocks for each consumer. For the dispatch thread.

    While requests neither come nor go, most steps look like the one before: what belongs to the requests in it is
    then taken over instead of being made again for each of them.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Mapping[int, LaneRequest]] = {}
        self._last: dict[tuple[int, int], _Ownership] = {}

    def begin(self, req_id: str, requests: Mapping[int, LaneRequest]) -> None:
        """From now on, rows of `req_id` are those of `requests`, by consumer bit."""
        self._requests[req_id] = requests
        self._last.clear()

    def end(self, req_id: str) -> Mapping[int, LaneRequest]:
        """No more rows of `req_id` come; return its requests, none if it is not known."""
        self._last.clear()
        return self._requests.pop(req_id, {})

    def split(self, group: PackGroup, rows: Tensor) -> Iterator[tuple[int, BlockPart]]:
        """Yield a block for each consumer that wants any of `rows`, with its bit.

        Consumers that want every row share the tensor; so do consecutive rows. Others get a copy of theirs.

        Args:
            group: What the rows are.
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
        last = self._last.get((bit, id(group.site_ids)))
        if last is not None and last.spans == spans and last.site_ids is group.site_ids:
            return last
        owners = tuple(self._requests[req_id][bit] for req_id, _, _ in spans)
        row_spans = tuple(
            RowSpan(request=owner.info, start=start, stop=stop)
            for owner, (_, start, stop) in zip(owners, spans, strict=True)
        )
        made = self._last[bit, id(group.site_ids)] = _Ownership(group.site_ids, spans, row_spans, owners)
        return made


class _Ownership(NamedTuple):
    """Whose the rows of a block are, in the planner's words, in the consumer's and in the lane's."""

    site_ids: Int64Array
    spans: RequestSpans
    row_spans: tuple[RowSpan, ...]
    owners: tuple[LaneRequest, ...]


def _select(rows: Tensor, index: Int64Array) -> Tensor:
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return rows[:, first : last + 1]
    return rows.index_select(1, torch.from_numpy(index))
