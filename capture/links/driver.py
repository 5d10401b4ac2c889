"""Consumers that run in the front end, next to live Python objects: rows come to them from the workers.

Each driver-located consumer has a receiving end, which makes requests and rows in its queue of the messages of all
workers. Under pipeline parallelism each stage sends the rows of its own layers. The stages compute the same positions,
but not at the same time, and each may lose some to overload. A consumer is promised that all sites of a request have
the same positions, so `StageJoin` passes a position on when every stage has sent it, and leaves it out if one never
will.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.consumer_queue import ConsumerQueue, ConsumerThread, UnfinishedWork
from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.delivery.row_packets import BlockPart, Packet
from headgate.capture.links.actions import sink_of
from headgate.capture.links.hub import Closer, Inboxes, ResultHub
from headgate.capture.links.messages import (
    MalformedMessage,
    Rows,
    answer_of,
    decode_frames,
    origin_of,
    read_begin,
    read_rows,
)
from headgate.capture.monitoring.stats import ConsumerStats
from headgate.capture.schema.batch import Begin, End, FinalState, Int64Array
from headgate.capture.schema.config import CaptureConsumersConfig
from headgate.capture.schema.consumer import (
    NOWHERE,
    ActionTarget,
    BatchedConsumer,
    ModelInfo,
    RequestInfo,
    RowBlock,
    RowSpan,
    StreamingConsumer,
)
from headgate.capture.schema.registry import OpenConsumer, close_consumers, load_configured, open_consumers
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import sort_sites
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.schema.vocabulary import Vocabulary

NO_LIMIT = np.iinfo(np.int64).max

RequestKey = tuple[str, str]
"""``(key, req_id)``: no process can write to a request without its key."""


def join_requests(stages: Mapping[int, RequestInfo]) -> RequestInfo:
    """Make the request that a consumer sees, with the sites of all stages."""
    first = stages[min(stages)]
    sites = sort_sites({site for stage in stages.values() for site in stage.spec.sites})
    readouts = {site: facts for stage in stages.values() for site, facts in stage.readouts.items()}
    return replace(first, spec=replace(first.spec, sites=sites), readouts=readouts)


class StageJoin:
    """Rows of one request that stages have sent and that were not passed on yet. Nothing is, until `start`.

    A position is passed on when every stage that wants it has sent it.
    """

    def __init__(self) -> None:
        self._request: RequestInfo | None = None
        self._waiting: dict[int, list[RowBlock]] = {}
        self._reached: dict[int, int] = {}
        self._specs: dict[int, CaptureSpec] = {}

    def start(self, request: RequestInfo, stages: Mapping[int, RequestInfo]) -> list[RowBlock]:
        """Begin to pass rows on, now that every stage has announced the request.

        Args:
            request: Owner of the joined rows.
            stages: The request as each stage has it that has sites of it.

        Returns:
            The rows that every stage has sent already.
        """
        self._request = request
        # Stages want the same positions, unless hook points have positions of their own.
        self._specs = {stage: info.spec for stage, info in stages.items() if info.spec.hook_positions}
        for stage in stages:
            self._waiting.setdefault(stage, [])
            self._reached.setdefault(stage, -1)
        return self._take_up_to(self._last_sent(request), request)

    def add(self, stage: int, blocks: Sequence[RowBlock]) -> list[RowBlock]:
        """Take the blocks of one write of `stage`, all of whose rows are this request's.

        Returns:
            The rows that every stage has sent now.
        """
        self._waiting.setdefault(stage, []).extend(blocks)
        last = max(int(block.positions[-1]) for block in blocks)
        self._reached[stage] = max(self._reached.get(stage, -1), last)
        return [] if self._request is None else self._take_up_to(self._last_sent(self._request), self._request)

    def end(self) -> list[RowBlock]:
        """Return the rows that every stage has sent, now that none will send more; the rest is thrown away."""
        return [] if self._request is None else self._take_up_to(NO_LIMIT, self._request)

    def _last_sent(self, request: RequestInfo) -> int:
        """Return the last position up to which no stage has anything to send any more."""
        if not self._specs:
            return min(self._reached.values())
        last = max(self._reached.values())
        for stage, reached in self._reached.items():
            if len(left := self._wanted(stage, np.arange(reached + 1, last + 1), request)):
                last = int(left[0]) - 1
        return last

    def _wanted(self, stage: int, positions: Int64Array, request: RequestInfo) -> Int64Array:
        """Return those of some positions that a stage wants at any of its sites."""
        if stage not in self._specs:
            return positions
        num_prompt = np.full(len(positions), request.num_prompt_tokens, dtype=np.int64)
        chosen = [each.mask(positions, num_prompt) for sites, each in self._specs[stage].selections if sites]
        return positions[np.any(chosen, axis=0)]

    def _take_up_to(self, last: int, request: RequestInfo) -> list[RowBlock]:
        """Remove and return the positions up to `last` that every stage that wants them has; others go on waiting."""
        sent = {stage: _positions(blocks, last) for stage, blocks in self._waiting.items()}
        everywhere = reduce(np.union1d, sent.values())
        for stage, positions in sent.items():
            everywhere = np.setdiff1d(everywhere, np.setdiff1d(self._wanted(stage, everywhere, request), positions))
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
    """A request that some stage has begun to send, and not all have ended.

    Attributes:
        begun: By stage, the request with the sites of that stage.
        ended: By stage, how it ended, and how many of its rows were lost on the way.
        request: The request in the consumer's queue, once all stages have begun.
        join: Rows that wait for those of other stages.
    """

    begun: dict[int, RequestInfo] = field(default_factory=dict)
    ended: dict[int, tuple[FinalState, int]] = field(default_factory=dict)
    request: ConsumerRequest | None = None
    join: StageJoin = field(default_factory=StageJoin)


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
        message = decode_frames(frames)
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Rows):
            self._rows(message, frames)
        elif isinstance(message, End):
            self._end(message)
        else:
            raise MalformedMessage(f"{type(message).__name__} is not for a consumer")

    def _begin(self, message: Begin) -> None:
        info = read_begin(message)
        key = _key(info)
        if not self._knows(key[0]):
            self.num_unknown += 1
            return
        self._num_stages = self._num_stages or message.num_stages
        arriving = self._arriving.get(key) or _Arriving()
        if message.num_stages != self._num_stages or message.stage in arriving.begun:
            raise MalformedMessage(f"request {message.req_id} begins twice, or with another number of stages")
        self._arriving[key] = arriving
        arriving.begun[message.stage] = info
        self._begun.setdefault(message.stage, {})[key] = info
        if len(arriving.begun) == self._num_stages:
            self._begin_in_queue(arriving)

    def _begin_in_queue(self, arriving: _Arriving) -> None:
        joined = join_requests(arriving.begun)
        arriving.request = ConsumerRequest(joined if self._num_stages > 1 else arriving.begun[0])
        self._queue.begin(arriving.request)
        if self._num_stages > 1:
            with_sites = {stage: info for stage, info in arriving.begun.items() if info.spec.sites}
            self._offer(self._owned(arriving, arriving.join.start(joined, with_sites)))

    def _rows(self, message: Rows, frames: Sequence[zmq.Frame]) -> None:
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

    def _end(self, message: End) -> None:
        key = (message.key, message.req_id)
        arriving = self._arriving.get(key)
        if arriving is None or message.stage not in arriving.begun:
            self.num_unknown += 1
            return
        if message.final is None:
            if arriving.request is not None:
                # The worker reports the failure itself, and knows more of it.
                self._queue.replace(arriving.request, is_silent=True)
            self._forget(key)
            return
        arriving.ended[message.stage] = (message.final, message.dropped_rows)
        if len(arriving.ended) < self._num_stages or arriving.request is None:
            return
        if self._num_stages > 1:
            self._offer(self._owned(arriving, arriving.join.end()))
        final, _ = arriving.ended[0]
        if num_lost := sum(count for _, count in arriving.ended.values()):
            # The stages report how many rows they lost, and not which.
            arriving.request.audit.lose(num_lost)
            arriving.request.drop_reason = "they did not reach the front end in time"
        self._queue.finish(arriving.request, final)
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
        if parts:
            self._queue.offer(Packet(parts), may_wait=True)


def _key(request: RequestInfo) -> RequestKey:
    return origin_of(request).key, request.request_id


logger = logging.getLogger("headgate")

INBOX_SHARE = 0.5
"""Part of the time to close after which rows that still arrive are dropped, so that those before are delivered."""

STOP_GRACE_S = 1.0
"""Least time that the reading threads get to end once their consumers are closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverStats:
    """Driver-located consumers in this process.

    Attributes:
        consumers: One for each, in the order of the configuration.
        unknown: Parts of messages about requests that are not, or no longer, this process's.
        malformed: Messages that were none.
    """

    consumers: tuple[ConsumerStats, ...] = ()
    unknown: int = 0
    malformed: int = 0


class DriverHost:
    """The driver-located consumers of a configuration, at work whenever the hub listens.

    Results go to the hub as they are: a payload may be any object. Under pipeline parallelism each consumer sees
    the sites of all stages as if there were one.

    Threads: any. Each consumer has one thread for its calls and one that reads what workers send; when its queue is
    full, the reading thread waits, which blocks the workers' queues for this consumer alone. The overload
    policy is the worker's.

    Args:
        config: Worker-located consumers are left out.
        model: The model being served.
        hub: Opens and closes the consumers with itself, in a forked child anew.
        versions: See `ConsumerContext`.
        actions: Where their actions go.
        vocabulary: See `ConsumerContext`.

    Raises:
        ConfigError: If a consumer cannot be loaded. If one cannot be opened, ``hub.address`` raises it.
    """

    def __init__(
        self,
        config: CaptureConsumersConfig,
        *,
        model: ModelInfo,
        hub: ResultHub,
        versions: Mapping[str, str] | None = None,
        actions: ActionTarget = NOWHERE,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._model = model
        self._hub = hub
        self._versions = dict(versions or {})
        self._make_sink = partial(sink_of, actions)
        self._feeds: list[_Feed] = []
        self.instances = tuple(spec.instance for spec in config.consumers if load_configured(spec).location == "driver")
        if self.instances:
            hub.answers_once(self.instances)
            hub.on_open(self._open)

    @property
    def consumers(self) -> Mapping[str, BatchedConsumer | StreamingConsumer]:
        """The consumers by instance; none before the hub was opened. Closed ones stay, so that they can be read."""
        return MappingProxyType({feed.consumer.spec.instance: feed.consumer.consumer for feed in self._feeds})

    def stats(self) -> DriverStats:
        """Counters as of now; waits for no consumer."""
        return DriverStats(
            consumers=tuple(feed.thread.stats() for feed in self._feeds),
            unknown=sum(feed.receiver.num_unknown for feed in self._feeds),
            malformed=sum(feed.inbox.malformed for feed in self._feeds),
        )

    def _open(self, inboxes: Inboxes) -> Closer:
        opened = open_consumers(
            self._config,
            model=self._model,
            location="driver",
            versions=self._versions,
            make_sink=self._make_sink,
            vocabulary=self._vocabulary,
        )
        feeds: list[_Feed] = []
        try:
            for consumer in opened:
                feeds.append(_Feed(consumer, self._hub, inboxes, self._model))
        except BaseException:
            close_consumers(opened[len(feeds) :], self._config.close_timeout_s)
            _close(feeds, self._config.close_timeout_s)
            raise
        self._feeds = feeds
        return partial(_close, feeds)


def open_drivers(
    hub: ResultHub,
    *,
    config: CaptureConsumersConfig,
    model: ModelInfo,
    versions: Mapping[str, str] | None = None,
    actions: ActionTarget = NOWHERE,
    vocabulary: Vocabulary | None = None,
) -> DriverHost:
    """Put the driver-located consumers of `config` to work beside `hub`, now.

    Raises:
        ConfigError: If one cannot be loaded or opened.
        UnsupportedError: If the hub cannot listen.
    """
    host = DriverHost(config, model=model, hub=hub, versions=versions, actions=actions, vocabulary=vocabulary)
    _ = hub.address
    return host


class _Feed:
    """One consumer, its thread, and the inbox and receiver that fill its queue."""

    def __init__(self, consumer: OpenConsumer, hub: ResultHub, inboxes: Inboxes, model: ModelInfo) -> None:
        instance, opened = consumer.spec.instance, consumer.consumer
        self.consumer = consumer
        self.thread = ConsumerThread(
            msgspec.structs.replace(consumer.spec, overload="block"),
            Assembler(opened) if isinstance(opened, BatchedConsumer) else opened,
            partial(_deliver, hub, instance),
            model=model,
            send_part=partial(_deliver_part, hub, instance),
            accepts_empty=True,
        )
        self.receiver = RowReceiver(self.thread.queue, hub.knows)
        self.inbox = inboxes.rows(
            instance,
            self.receiver.handle,
            name=f"headgate-{instance}-rows",
            watch=partial(_fail_hung, self.thread.queue),
            on_failure=hub.fail,
        )
        self.thread.start()


def _fail_hung(queue: ConsumerQueue) -> float | None:
    """Fail the requests of a hung consumer; return when to look again."""
    queue.fail_hung()
    return queue.due_at()


def _deliver(hub: ResultHub, instance: str, request: RequestInfo, result: CaptureResult | None) -> None:
    if result is not None:
        hub.deliver(answer_of(request, instance, result))


def _deliver_part(hub: ResultHub, instance: str, request: RequestInfo, payload: Any, num_rows: int) -> None:
    hub.deliver_part(answer_of(request, instance, CaptureResult(status="ok", payload=payload), num_rows=num_rows))


def _close(feeds: Sequence[_Feed], timeout_s: float) -> bool:
    """Read no more, deliver what was read, close the consumers; False if a thread still runs."""
    started = time.monotonic()
    close_by = started + timeout_s
    for feed in feeds:
        if not feed.inbox.close(max(started + INBOX_SHARE * timeout_s - time.monotonic(), 0)):
            feed.thread.queue.stop_blocking()
    for feed in feeds:
        feed.thread.close(close_by)
    left = {feed.consumer.spec.instance: feed.thread.join(close_by) for feed in feeds}
    for instance, work in left.items():
        if work != UnfinishedWork():
            logger.warning("capture consumer %s was closed with something left: %s", instance, work)
    # An inbox that was waiting for room is free by now: the queue discards everything.
    is_stopped = [feed.inbox.close(max(close_by - time.monotonic(), STOP_GRACE_S)) for feed in feeds]
    return all(is_stopped) and not any(work.is_stuck for work in left.values())
