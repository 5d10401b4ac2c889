"""The receiving end of one driver-located consumer: messages of all workers become requests and rows in its queue.

Under pipeline parallelism each stage sends the rows of its own layers. The stages compute the same positions, but not
at the same time, and each may lose some to overload. A consumer is promised that all sites of a request have the same
positions, so `StageJoin` passes a position on when every stage has sent it, and leaves it out if one never will.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch
import zmq

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.consumer_queue import ConsumerQueue
from headgate.capture.delivery.row_packets import BlockPart, Packet, join
from headgate.capture.schema.batch import FinalState, Int64Array
from headgate.capture.schema.consumer import RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.sites import sort_sites
from headgate.capture.transport.messages import (
    AbandonMessage,
    BeginMessage,
    FinishMessage,
    MalformedMessage,
    RowsMessage,
    decode,
    origin_of,
    read_begin,
    read_final,
    read_rows,
)

NO_LIMIT = np.iinfo(np.int64).max

RequestKey = tuple[str, str]
"""``(key, req_id)``: nobody can write to a request without its key."""


def join_requests(stages: Mapping[int, RequestInfo]) -> RequestInfo:
    """Make the request that a consumer sees, with the sites of all stages."""
    first = stages[min(stages)]
    sites = sort_sites({site for stage in stages.values() for site in stage.spec.sites})
    readouts = {site: facts for stage in stages.values() for site, facts in stage.readouts.items()}
    return replace(first, spec=replace(first.spec, sites=sites), readouts=readouts)


class StageJoin:
    """Rows of one request that stages have sent and that were not passed on yet. Nothing is, until `start`."""

    def __init__(self) -> None:
        self._request: RequestInfo | None = None
        self._waiting: dict[int, list[RowBlock]] = {}
        self._reached: dict[int, int] = {}

    def start(self, request: RequestInfo, stages: Sequence[int]) -> list[RowBlock]:
        """Begin to pass rows on, now that every stage has announced the request.

        Args:
            request: Owner of the joined rows.
            stages: Stages that have sites of the request.

        Returns:
            The rows that every stage has sent already.
        """
        self._request = request
        for stage in stages:
            self._waiting.setdefault(stage, [])
            self._reached.setdefault(stage, -1)
        return self._take_up_to(min(self._reached.values()), request)

    def add(self, stage: int, blocks: Sequence[RowBlock]) -> list[RowBlock]:
        """Take the blocks of one write of `stage`, all of whose rows are this request's.

        Returns:
            The rows that every stage has sent now.
        """
        self._waiting.setdefault(stage, []).extend(blocks)
        last = max(int(block.positions[-1]) for block in blocks)
        self._reached[stage] = max(self._reached.get(stage, -1), last)
        return [] if self._request is None else self._take_up_to(min(self._reached.values()), self._request)

    def end(self) -> list[RowBlock]:
        """Return the rows that every stage has sent, now that none will send more; the rest is thrown away."""
        return [] if self._request is None else self._take_up_to(NO_LIMIT, self._request)

    def _take_up_to(self, last: int, request: RequestInfo) -> list[RowBlock]:
        """Remove and return the positions up to `last` that every stage has; those after it go on waiting."""
        everywhere = reduce(np.intersect1d, (_positions(blocks, last) for blocks in self._waiting.values()))
        taken = []
        for stage, blocks in self._waiting.items():
            for block in blocks:
                taken += _part(block, np.isin(block.positions, everywhere), request)
            self._waiting[stage] = [part for block in blocks for part in _part(block, block.positions > last, request)]
        return taken


def _positions(blocks: Sequence[RowBlock], last: int) -> Int64Array:
    """Collect the positions up to `last`, ascending, each once."""
    positions = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(block.positions for block in blocks)]))
    return positions[: np.searchsorted(positions, last, side="right")]


def _part(block: RowBlock, is_kept: npt.NDArray[np.bool_], request: RequestInfo) -> list[RowBlock]:
    """Make a block of the rows that are kept, if there are any; copied unless all are."""
    index = np.flatnonzero(is_kept)
    if len(index) == 0:
        return []
    spans = (RowSpan(request=request, start=0, stop=len(index)),)
    if len(index) == len(block.positions):
        return [replace(block, spans=spans)]
    rows = block.rows.index_select(1, torch.from_numpy(index))
    return [replace(block, rows=rows, positions=block.positions[index], spans=spans)]


@dataclass(kw_only=True, slots=True)
class _Arriving:
    """A request of which some stage has begun to send, and not all have ended.

    Attributes:
        begun: By stage, the request with the sites of that stage.
        ended: By stage, how it ended, and how many of its rows were lost on the way.
        request: The request in the consumer's queue, once all stages have begun.
        join: Rows that wait for those of other stages.
        received: Positions that were passed on.
    """

    begun: dict[int, RequestInfo] = field(default_factory=dict)
    ended: dict[int, tuple[FinalState, int]] = field(default_factory=dict)
    request: ConsumerRequest | None = None
    join: StageJoin = field(default_factory=StageJoin)
    received: list[Int64Array] = field(default_factory=list)


class RowReceiver:
    """Reads the messages of all workers for one consumer and fills its queue.

    `handle` is for one thread. It may wait in the queue's `offer`, which makes the workers wait.

    Attributes:
        num_unknown: Parts of messages about requests that are not, or no longer, this process's.

    Args:
        queue: The consumer's.
        knows: Whether a key is one of this process's requests.
    """

    def __init__(self, queue: ConsumerQueue, knows: Callable[[str], bool]) -> None:
        self._queue = queue
        self._knows = knows
        self._num_stages = 0
        self._arriving: dict[RequestKey, _Arriving] = {}
        self._begun: dict[int, dict[RequestKey, RequestInfo]] = {}
        self.num_unknown = 0

    def handle(self, frames: Sequence[zmq.Frame]) -> None:
        """Take one message.

        Raises:
            MalformedMessage: If it is none, or comes out of turn.
        """
        message = decode(frames)
        if isinstance(message, BeginMessage):
            self._begin(message, frames)
        elif isinstance(message, RowsMessage):
            self._rows(message, frames)
        elif isinstance(message, FinishMessage):
            self._finish(message, frames)
        elif isinstance(message, AbandonMessage):
            self._abandon(message)
        else:
            raise MalformedMessage(f"{type(message).__name__} is not for a consumer")

    def _begin(self, message: BeginMessage, frames: Sequence[zmq.Frame]) -> None:
        if not self._knows(message.key):
            self.num_unknown += 1
            return
        info = read_begin(message, frames)
        self._num_stages = self._num_stages or message.num_stages
        arriving = self._arriving.get((message.key, message.req_id)) or _Arriving()
        if message.num_stages != self._num_stages or message.stage in arriving.begun:
            raise MalformedMessage(f"request {message.req_id} begins twice, or with another number of stages")
        self._arriving[message.key, message.req_id] = arriving
        arriving.begun[message.stage] = info
        self._begun.setdefault(message.stage, {})[message.key, message.req_id] = info
        if len(arriving.begun) == self._num_stages:
            self._begin_in_queue(arriving)

    def _begin_in_queue(self, arriving: _Arriving) -> None:
        joined = join_requests(arriving.begun)
        arriving.request = ConsumerRequest(joined if self._num_stages > 1 else arriving.begun[0])
        self._queue.begin(arriving.request)
        if self._num_stages > 1:
            with_sites = [stage for stage, info in arriving.begun.items() if info.spec.sites]
            self._offer(self._owned(arriving, arriving.join.start(joined, with_sites)))

    def _rows(self, message: RowsMessage, frames: Sequence[zmq.Frame]) -> None:
        blocks = read_rows(message, frames, self._begun.get(message.stage, {}))
        num_known = sum(len(block.spans) for block in blocks)
        self.num_unknown += sum(len(header.spans) for header in message.blocks) - num_known
        if self._num_stages == 1:
            self._offer([(block, self._owners(block)) for block in blocks])
            return
        single: dict[RequestKey, list[RowBlock]] = {}
        for block in blocks:
            for span in block.spans:
                rows, positions = block.rows[:, span.start : span.stop], block.positions[span.start : span.stop]
                single.setdefault(_key(span.request), []).append(replace(block, rows=rows, positions=positions))
        parts: list[BlockPart] = []
        for key, own in single.items():
            arriving = self._arriving[key]
            parts += self._owned(arriving, arriving.join.add(message.stage, own))
        self._offer(parts)

    def _finish(self, message: FinishMessage, frames: Sequence[zmq.Frame]) -> None:
        key = (message.key, message.req_id)
        arriving = self._arriving.get(key)
        if arriving is None or message.stage not in arriving.begun:
            self.num_unknown += 1
            return
        arriving.ended[message.stage] = (read_final(message, frames), message.dropped_rows)
        if len(arriving.ended) < self._num_stages or arriving.request is None:
            return
        if self._num_stages > 1:
            self._offer(self._owned(arriving, arriving.join.end()))
        final, _ = arriving.ended[0]
        _note_lost(arriving, arriving.request, final)
        self._queue.finish(arriving.request, final)
        self._forget(key)

    def _abandon(self, message: AbandonMessage) -> None:
        key = (message.key, message.req_id)
        arriving = self._arriving.get(key)
        if arriving is None or message.stage not in arriving.begun:
            self.num_unknown += 1
            return
        if arriving.request is not None:
            # The worker reports the failure itself, and knows more of it.
            self._queue.replace(arriving.request, is_silent=True)
        self._forget(key)

    def _forget(self, key: RequestKey) -> None:
        del self._arriving[key]
        for requests in self._begun.values():
            requests.pop(key, None)

    def _owners(self, block: RowBlock) -> tuple[ConsumerRequest, ...]:
        requests = (self._arriving[_key(span.request)].request for span in block.spans)
        return tuple(request for request in requests if request is not None)

    def _owned(self, arriving: _Arriving, blocks: Sequence[RowBlock]) -> list[BlockPart]:
        return [] if arriving.request is None else [(block, (arriving.request,)) for block in blocks]

    def _offer(self, parts: list[BlockPart]) -> None:
        if not parts:
            return
        packet: Packet = join(parts)
        for portion in packet.portions():
            if portion.num_new:
                self._arriving[_key(portion.request.info)].received.append(portion.positions)
        self._queue.offer(packet, may_wait=True)


def _key(request: RequestInfo) -> RequestKey:
    return origin_of(request).key, request.request_id


def _note_lost(arriving: _Arriving, request: ConsumerRequest, final: FinalState) -> None:
    """Count the rows that stages have lost on the way as dropped in the request's audit.

    Stages tell how many rows they lost, not which: the missing ones, unless some were never computed.
    """
    num_lost = sum(count for _, count in arriving.ended.values())
    if not num_lost:
        return
    positions = np.arange(final.num_rows, dtype=np.int64)
    num_prompt = np.full(final.num_rows, final.num_prompt_tokens, dtype=np.int64)
    wanted = positions[request.info.spec.positions.mask(positions, num_prompt)]
    missing = np.setdiff1d(wanted, np.concatenate([wanted[:0], *arriving.received]))
    request.audit.drop(missing[:num_lost])
    request.drop_reason = "they did not reach the front end in time"
