"""Delivery on threads of this process: the dispatch thread, a thread for each consumer, and the sender of results.

The dispatch thread takes rows, begins and ends of requests out of a `Handoff`, in order. It waits for the device
copies, copies rows out of the staging memory, splits them by consumer and puts them into the consumers' queues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from headgate.capture.delivery.completeness import ConsumerRequestReader, TokenCheck
from headgate.capture.delivery.consumer_queue import ConsumerQueue, ConsumerThread
from headgate.capture.delivery.delivery import CloseReport, DeliveryStats, Dispatched
from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.delivery.row_packets import BlockPart, Packet, RowPool, Splitter, StepCoalescer
from headgate.capture.links.network import NetworkKeys
from headgate.capture.links.sender import ResultReporter, ResultSender, ResultWatcher
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.planning.step_plan import PackGroup
from headgate.capture.schema.batch import Begin, End, MemoryWanted
from headgate.capture.schema.config import (
    END_LINGER_S,
    HELD_BYTES,
    HELD_SHARE,
    CaptureConsumersConfig,
    CaptureConsumerSpec,
)
from headgate.capture.schema.consumer import (
    NOWHERE,
    ActionSink,
    ActionTarget,
    BatchedConsumer,
    ConsumerContext,
    ModelInfo,
    ReadoutSite,
)
from headgate.capture.schema.registry import OpenConsumer, close_consumers, open_consumers
from headgate.capture.schema.sites import Site
from headgate.capture.staging.host_rows import StagedRows

T = TypeVar("T")


class Handoff(Generic[T]):
    """First in, first out: the step thread puts, and the one dispatch thread takes.

    It has no bound of its own: rows are bounded by the staging memory that they lie in, and everything else is small.
    The lock keeps items from being put after the end; nothing else runs under it, so the step thread never waits for a
    consumer here. A `SimpleQueue` wakes the other thread without running Python for it.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None follows the last item
        self._lock = threading.Lock()
        self._is_closed = self._is_exhausted = False

    def put(self, item: T) -> bool:
        """Append `item`; False once closed."""
        with self._lock:
            if self._is_closed:
                return False
            self._items.put(item)
            return True

    def next_item(self, timeout_s: float | None) -> T | None:
        """Wait for the next item and remove it.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, which `close` ends.

        Returns:
            None when the time is up, or when it is closed and empty.
        """
        if self._is_exhausted:
            return None
        try:
            item = self._items.get(timeout=timeout_s)
        except Empty:
            return None
        self._is_exhausted = item is None
        return item

    def close(self) -> None:
        """Refuse further items; `next_item` still returns the items that were put."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)

    @property
    def is_done(self) -> bool:
        """Whether it is closed and everything was taken. For the thread that takes."""
        with self._lock:  # without it, the end might not be put yet, and the last item be mistaken for it
            return self._is_exhausted or (self._is_closed and self._items.qsize() == 1)


class Dispatcher:
    """Distributes rows and requests from the hand-off to the consumers' queues on one daemon thread, in order.

    Rows are copied out of the staging memory once, into memory that all consumers share read-only, and the staging
    memory is free again before the thread waits for any consumer. Queues with room are served before it waits for one
    without. Rows of small steps are held for a moment and dispatched together; see `StepCoalescer`.

    Args:
        requests: Makes the consumers' requests.
        handoff: Where the step thread puts; closing it ends the thread, once it is empty.
        queues: Consumer bit to queue.
        keep_bytes: Memory that may be kept for later rows while it is unused.
        hold_bytes: Staging memory from which on rows are held no longer.
        linger_s: Seconds after their forward that rows are held at most.
        end_linger_s: Seconds that the end of a request waits for rows of others at most.
        has_own_blocks: See `StepCoalescer`.
    """

    def __init__(
        self,
        requests: ConsumerRequestReader,
        handoff: Handoff[Dispatched],
        queues: Mapping[int, ConsumerQueue],
        *,
        keep_bytes: int,
        hold_bytes: int = 0,
        linger_s: float = 0.0,
        end_linger_s: float = 0.0,
        has_own_blocks: bool = False,
    ) -> None:
        self._requests = requests
        self._handoff = handoff
        self._queues = queues
        self._splitter = Splitter()
        self._pool = RowPool(keep_bytes)
        self._held = StepCoalescer(hold_bytes, has_own_blocks=has_own_blocks)
        self._held_ends: list[End] = []
        self._held_until = 0.0
        self._linger_s = linger_s
        self._end_linger_s = end_linger_s
        self._token_checks: dict[str, TokenCheck] = {}
        self._log = SparseLog("capture dispatch")
        self._thread = threading.Thread(target=self._run, name="headgate-dispatch", daemon=True)
        self.num_errors = 0
        """Items that could not be dispatched; a bug of ours, logged. Their requests miss the rows and say so."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, close_by: float) -> bool:
        """Wait for the thread until `close_by` on the monotonic clock; False if it still runs."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            for queue in self._queues.values():
                queue.fail_hung()
            item = self._handoff.next_item(self._timeout_s())
            is_done = item is None and self._handoff.is_done
            if item is not None:
                self._guard(self._accept, item)
            if self._held and (is_done or self._held.is_full or time.monotonic() >= self._held_until):
                self._release_held()
            if is_done:
                return

    def _guard(self, dispatch: Callable[..., None], *arguments: Any) -> None:
        try:
            dispatch(*arguments)
        except Exception as error:  # noqa: BLE001  the thread must live: staging memory is freed here alone
            self.num_errors += 1
            self._log.error("rows could not be dispatched; report it as a bug", cause=error)

    def _timeout_s(self) -> float | None:
        """Compute the seconds until held rows are due or a consumer's call takes too long; None if neither can be."""
        due = [at for queue in self._queues.values() if (at := queue.due_at()) is not None]
        if self._held:
            due.append(self._held_until)
        return max(min(due) - time.monotonic(), 0) if due else None

    def _accept(self, item: Dispatched) -> None:
        if isinstance(item, StagedRows):
            if not self._held:
                self._held_until = item.since + self._linger_s
            self._held.add(item)
        elif isinstance(item, MemoryWanted):
            self._held_until = 0.0
        elif isinstance(item, Begin):
            if item.req_id in self._token_checks:
                self._release_held()
            self._begin(item)
        elif self._held.has(item.req_id):
            self._held_ends.append(item)
            has_others = len(self._token_checks) > len(self._held_ends)
            self._held_until = min(self._held_until, time.monotonic() + self._end_linger_s if has_others else 0.0)
        else:
            self._end(item)

    def _release_held(self) -> None:
        """Dispatch held rows, then the ends of requests whose last rows were among them."""
        ends, self._held_ends = self._held_ends, []
        if self._held:
            self._guard(self._dispatch_rows)
        for end in ends:
            self._guard(self._end, end)

    def _begin(self, item: Begin) -> None:
        requests = self._requests.read(item)
        for bit, request in self._splitter.end(item.req_id).items():
            self._queues[bit].replace(request, is_silent=bit in requests and item.is_same_client)
        self._splitter.begin(item.req_id, requests)
        self._token_checks[item.req_id] = TokenCheck(len(item.prompt_token_ids))
        for bit, request in requests.items():
            self._queues[bit].begin(request)

    def _end(self, item: End) -> None:
        check = self._token_checks.pop(item.req_id)
        mismatch = None if item.final is None else check.mismatch(item.final)
        for bit, request in self._splitter.end(item.req_id).items():
            self._queues[bit].finish(request, item.final, mismatch=mismatch)

    def _note_tokens(self, group: PackGroup) -> None:
        if (token_ids := group.token_ids) is not None:
            positions, ids = group.positions, token_ids.tolist()
            for req_id, start, stop in group.spans:
                if (check := self._token_checks.get(req_id)) is None:
                    continue  # none of its consumers is served here
                if stop - start == 1:
                    check.note_one(int(positions[start]), ids[start])
                else:
                    check.note(positions[start:stop], token_ids[start:stop])

    def _dispatch_rows(self) -> None:
        parts: dict[int, list[BlockPart]] = {}
        for group, rows in self._held.copy_out(self._pool):
            self._note_tokens(group)
            for bit, part in self._splitter.split(group, rows):
                parts.setdefault(bit, []).append(part)
        packets = [(self._queues[bit], Packet(found)) for bit, found in parts.items()]
        waiting: list[tuple[ConsumerQueue, Packet]] = [
            (queue, packet) for queue, packet in packets if not queue.offer(packet, may_wait=False)
        ]
        for queue, packet in waiting:
            queue.offer(packet, may_wait=True)


DISPATCH_SHARE, CONSUMER_SHARE = 0.5, 0.9
"""Parts of the time to close after which the dispatch thread, then the consumers, must be through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlace:
    """The worker whose rows are delivered.

    Attributes:
        config: As configured.
        model: The model being served.
        sites: Those of the worker, in the order of the ring.
        staging_bytes: Size of the staging memory.
        linger_s: The shortest time that rows of any consumer may wait for others, in seconds.
        pp_rank: Pipeline stage of the worker.
        pp_size: Number of stages.
        bits: Of the consumers that are served here; None if all are.
        versions: Of headgate, vllm and torch.
        actions: Where actions of consumers go.
        keys: To reach front ends on other hosts; None if all are on this one.
        readouts: The readouts that the worker computes.
    """

    config: CaptureConsumersConfig
    model: ModelInfo
    sites: tuple[Site, ...]
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
        watcher: Is notified of each result, in a capture process; None in the worker's own.

    Raises:
        ConfigError: If a spill file cannot be made.
    """

    is_lost = False

    def __init__(
        self,
        place: WorkerPlace,
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
            ConsumerRequestReader(place.sites, {each.spec.instance: each.bit for each in consumers}, place.readouts),
            self._handoff,
            {bit: consumer.queue for bit, consumer in self._consumers.items()},
            keep_bytes=min(place.staging_bytes, HELD_BYTES),
            hold_bytes=min(int(HELD_SHARE * place.staging_bytes), HELD_BYTES),
            linger_s=place.linger_s,
            # In a capture process, whose work does not hold up the step thread, clients need not wait.
            end_linger_s=END_LINGER_S if watcher is None else 0.0,
            has_own_blocks=all(opened.consumer.keeps_rows for opened in consumers),
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

    def _make_consumer(self, consumer: OpenConsumer, place: WorkerPlace) -> ConsumerThread:
        instance = consumer.consumer
        return ConsumerThread(
            consumer.spec,
            Assembler(instance) if isinstance(instance, BatchedConsumer) else instance,
            partial(self._reporter.report, consumer.spec.instance),
            model=place.model,
            send_part=partial(self._reporter.report_part, consumer.spec.instance),
            spill_dir=place.config.spill_dir,
            accepts_empty=instance.location == "driver",
        )


def open_local_delivery(place: WorkerPlace, watcher: ResultWatcher | None = None) -> LocalDelivery:
    """Open the configured consumers, and a delivery that sends results over ZMQ.

    Raises:
        ConfigError: If a consumer cannot be opened; consumers opened before it are closed.
    """
    from headgate.capture.links.actions import ActionSender, sink_of

    actions: list[ActionSender] = []

    def make_sink(instance: str) -> ActionSink:
        sink = sink_of(place.actions, instance)
        if isinstance(sink, ActionSender):
            actions.append(sink)
        return sink

    def close_links(timeout_s: float) -> int:
        for sink in actions:
            sink.close(timeout_s)
        return sender.close(timeout_s)

    config, model = place.config, place.model
    rank, size, versions = place.pp_rank, place.pp_size, dict(place.versions)
    opened = open_consumers(
        config,
        model=model,
        location="worker",
        pp_rank=rank,
        pp_size=size,
        versions=versions,
        make_sink=make_sink,
        only=place.bits,
    )
    sender = ResultSender(keys=place.keys)
    far = {bit: config.consumers[bit] for bit in set(place.served.values()) - {consumer.bit for consumer in opened}}
    context = ConsumerContext(instance_name="", model=model, pp_rank=rank, pp_size=size, versions=versions)
    try:
        consumers = [*opened, *_stand_ins(far, context, sender)]
        return LocalDelivery(place, consumers, sender, close_sender=close_links, watcher=watcher)
    except BaseException:
        close_consumers(opened, config.close_timeout_s)
        raise


def _stand_ins(
    specs: Mapping[int, CaptureConsumerSpec], context: ConsumerContext, sender: ResultSender
) -> list[OpenConsumer]:
    """Make the senders of rows to driver-located consumers, whose bits are the keys of `specs`."""
    from headgate.capture.links.sender import RowSender

    made = []
    for bit, spec in specs.items():
        sink = RowSender(spec, replace(context, instance_name=spec.instance), sender)
        made.append(OpenConsumer(bit, spec, sink))
    return made
