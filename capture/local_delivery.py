"""Delivery on threads of this process: the dispatch thread, a thread for each consumer, and the sender of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from headgate.capture.delivery.consumer_thread import ConsumerThread
from headgate.capture.delivery.delivery import CloseReport, DeliveryStats
from headgate.capture.delivery.dispatcher import Dispatcher
from headgate.capture.delivery.handoff import Dispatched, Handoff
from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.request_origin import ResultReporter, ResultWatcher
from headgate.capture.schema.actions.action_sink import NOWHERE, ActionTarget
from headgate.capture.schema.batching import HELD_SHARE
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, ConsumerContext, ModelInfo
from headgate.capture.schema.readouts.readout import ReadoutSite
from headgate.capture.schema.registry import OpenConsumer, close_consumers, open_consumers
from headgate.capture.transport.network import NetworkKeys

if TYPE_CHECKING:
    from headgate.capture.transport.result_sender import ResultSender

DISPATCH_SHARE, CONSUMER_SHARE = 0.5, 0.9
"""Parts of the time to close after which the dispatch thread, then the consumers, must be through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The worker whose rows are delivered.

    Attributes:
        config: As configured.
        model: The model being served.
        row_bytes: Bytes of one row at one site.
        staging_bytes: Size of the staging memory.
        linger_s: The shortest time that rows of any consumer may wait for others, in seconds.
        pp_rank: Pipeline stage of the worker.
        pp_size: Number of stages.
        bits: Of the consumers that are served here; None if all are.
        versions: Of headgate, vllm and torch.
        actions: Where actions of consumers go.
        keys: To reach front ends on other hosts; None if all are on this one.
        readouts: Those that the worker computes.
    """

    config: CaptureConsumersConfig
    model: ModelInfo
    row_bytes: int
    staging_bytes: int
    linger_s: float = 0.0
    pp_rank: int = 0
    pp_size: int = 1
    bits: frozenset[int] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    actions: ActionTarget = NOWHERE
    keys: NetworkKeys | None = None
    readouts: tuple[ReadoutSite, ...] = ()

    @property
    def served(self) -> dict[str, int]:
        """The consumers that are served here, by instance, each with its bit."""
        return {name: bit for name, bit in self.config.bits.items() if self.bits is None or bit in self.bits}


class LocalDelivery:
    """Delivers on threads of this process. Implements `headgate.capture.delivery.delivery.Delivery`.

    Args:
        place: Whose rows.
        consumers: In any order; their bits are their places in ``config.consumers``.
        sender: Where results go.
        close_sender: Called last, with the seconds it may take; returns how many messages did not arrive.
        watcher: Is told of each result; None if nobody is.

    Raises:
        ConfigError: If a spill file cannot be made.
    """

    is_lost = False

    def __init__(
        self,
        place: Place,
        consumers: Sequence[OpenConsumer],
        sender: ResultSender,
        *,
        close_sender: Callable[[float], int] | None = None,
        watcher: ResultWatcher | None = None,
    ) -> None:
        self._sender = sender
        self._reporter = ResultReporter(sender, place.pp_rank, place.pp_size, watcher)
        self._close_sender = close_sender
        self._consumers = {opened.bit: self._make_consumer(opened, place) for opened in consumers}
        self._handoff: Handoff[Dispatched] = Handoff()
        self._dispatcher = Dispatcher(
            self._handoff,
            {bit: consumer.queue for bit, consumer in self._consumers.items()},
            keep_bytes=place.staging_bytes,
            hold_bytes=int(HELD_SHARE * place.staging_bytes),
            linger_s=place.linger_s,
        )
        for consumer in self._consumers.values():
            consumer.start()
        self._dispatcher.start()

    def recover(self) -> None:
        """See `Delivery.recover`; nothing is ever lost here."""

    def put(self, item: Dispatched) -> bool:
        """See `Delivery.put`."""
        return self._handoff.put(item)

    def flush(self) -> None:
        """See `Delivery.flush`; nothing lies here."""

    def stats(self) -> DeliveryStats:
        """Counters as of now."""
        return DeliveryStats(
            **asdict(self._sender.stats()),
            dispatch_errors=self._dispatcher.num_errors,
            consumers=tuple(self._consumers[bit].stats() for bit in sorted(self._consumers)),
        )

    def close(self, timeout_s: float) -> CloseReport:
        """See `Delivery.close`.

        What is not through after `timeout_s` seconds is given up: its requests get an error, and a consumer that is
        still in a call keeps its thread, a daemon, until the call returns.
        """
        started = time.monotonic()
        self._handoff.close()
        if not self._dispatcher.join(started + DISPATCH_SHARE * timeout_s):
            for consumer in self._consumers.values():
                consumer.queue.stop_blocking()
        close_by = started + CONSUMER_SHARE * timeout_s
        is_dispatch_stuck = not self._dispatcher.join(close_by)
        for consumer in self._consumers.values():
            consumer.close(close_by)
        left = {consumer.instance: consumer.join(close_by) for consumer in self._consumers.values()}
        left_s = max(started + timeout_s - time.monotonic(), 0)
        num_unsent = 0 if self._close_sender is None else self._close_sender(left_s)
        return CloseReport(consumers=left, is_dispatch_stuck=is_dispatch_stuck, num_unsent=num_unsent)

    def _make_consumer(self, consumer: OpenConsumer, place: Place) -> ConsumerThread:
        instance = consumer.consumer
        return ConsumerThread(
            consumer.spec,
            Assembler(instance) if isinstance(instance, BatchedConsumer) else instance,
            partial(self._reporter.report, consumer.spec.instance),
            row_bytes=place.row_bytes,
            spill_dir=place.config.spill_dir,
            accepts_empty=instance.location == "driver",
        )


def open_local_delivery(place: Place, watcher: ResultWatcher | None = None) -> LocalDelivery:
    """Open the configured consumers, and a delivery that sends results over ZMQ.

    Raises:
        ConfigError: If a consumer cannot be opened; those that were are closed.
    """
    from headgate.capture.transport.action_channel import sink_of
    from headgate.capture.transport.result_sender import ZmqResultSender

    config, model = place.config, place.model
    rank, size, versions = place.pp_rank, place.pp_size, dict(place.versions)
    opened = open_consumers(
        config,
        model=model,
        location="worker",
        pp_rank=rank,
        pp_size=size,
        versions=versions,
        make_sink=partial(sink_of, place.actions),
        only=place.bits,
    )
    sender = ZmqResultSender(keys=place.keys)
    far = {bit: config.consumers[bit] for bit in set(place.served.values()) - {consumer.bit for consumer in opened}}
    context = ConsumerContext(instance_name="", model=model, pp_rank=rank, pp_size=size, versions=versions)
    try:
        consumers = [*opened, *_stand_ins(far, context, sender)]
        return LocalDelivery(place, consumers, sender, close_sender=sender.close, watcher=watcher)
    except BaseException:
        close_consumers(opened, config.close_timeout_s)
        raise


def _stand_ins(
    specs: Mapping[int, CaptureConsumerSpec], context: ConsumerContext, sender: ResultSender
) -> list[OpenConsumer]:
    """Make the senders of rows to driver-located consumers, whose bits are the keys of `specs`."""
    from headgate.capture.transport.result_sender import RowSender

    made = []
    for bit, spec in specs.items():
        sink = RowSender(spec, replace(context, instance_name=spec.instance), sender)
        made.append(OpenConsumer(bit, spec, sink))
    return made
