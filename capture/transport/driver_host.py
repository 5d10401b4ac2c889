"""Consumers that run in the front end, next to live Python objects: rows come to them from the workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import msgspec

from headgate.capture.delivery.consumer_queue import ConsumerQueue
from headgate.capture.delivery.consumer_thread import ConsumerThread, UnfinishedWork
from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.monitoring.stats import ConsumerStats
from headgate.capture.schema.actions.action_sink import NOWHERE, ActionTarget
from headgate.capture.schema.config import CaptureConsumersConfig
from headgate.capture.schema.consumer import BatchedConsumer, ModelInfo, RequestInfo, StreamingConsumer
from headgate.capture.schema.registry import OpenConsumer, close_consumers, load_configured, open_consumers
from headgate.capture.schema.results import CaptureResult
from headgate.capture.transport.action_channel import sink_of
from headgate.capture.transport.listener import Closer, Doors
from headgate.capture.transport.messages import DTYPES, origin_of
from headgate.capture.transport.result_hub import ResultHub
from headgate.capture.transport.row_receiver import RowReceiver

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
    full, the reading thread waits, which blocks the workers' queues for this consumer and nobody else. The overload
    policy is the worker's.

    Args:
        config: Worker-located consumers are left out.
        model: The model being served.
        hub: Opens and closes the consumers with itself, in a forked child anew.
        versions: See `ConsumerContext`.
        actions: Where their actions go.

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
    ) -> None:
        self._config = config
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

    def _open(self, doors: Doors) -> Closer:
        opened = open_consumers(
            self._config,
            model=self._model,
            location="driver",
            versions=self._versions,
            make_sink=self._make_sink,
        )
        row_bytes = self._model.hidden_size * DTYPES[self._model.dtype].itemsize
        feeds: list[_Feed] = []
        try:
            for consumer in opened:
                feeds.append(_Feed(consumer, self._hub, doors, row_bytes))
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
) -> DriverHost:
    """Put the driver-located consumers of `config` to work beside `hub`, now.

    Raises:
        ConfigError: If one cannot be loaded or opened.
        UnsupportedError: If the hub cannot listen.
    """
    host = DriverHost(config, model=model, hub=hub, versions=versions, actions=actions)
    _ = hub.address
    return host


class _Feed:
    """One consumer, its thread, and the inbox and receiver that fill its queue."""

    def __init__(self, consumer: OpenConsumer, hub: ResultHub, doors: Doors, row_bytes: int) -> None:
        instance, opened = consumer.spec.instance, consumer.consumer
        self.consumer = consumer
        self.thread = ConsumerThread(
            msgspec.structs.replace(consumer.spec, overload="block"),
            Assembler(opened) if isinstance(opened, BatchedConsumer) else opened,
            partial(_deliver, hub, instance),
            row_bytes=row_bytes,
            accepts_empty=True,
        )
        self.receiver = RowReceiver(self.thread.queue, hub.knows)
        self.inbox = doors.rows(
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
    if result is None:
        return
    hub.deliver(
        key=origin_of(request).key,
        sample_index=request.sample_index,
        instance=instance,
        stage=0,
        num_stages=1,
        result=result,
    )


def _close(feeds: Sequence[_Feed], timeout_s: float) -> bool:
    """Read no more, deliver what was read, close the consumers; False if a thread had to be left behind."""
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
