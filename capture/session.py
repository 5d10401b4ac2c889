"""Capture in one worker: plans each step, stages its rows, and has them delivered, from start to close."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from headgate.capture.delivery.consumer_thread import ConsumerThread, UnfinishedWork
from headgate.capture.delivery.dispatcher import (
    Dispatched,
    Dispatcher,
    Handoff,
    MemoryWanted,
    RequestBegins,
    RequestEnds,
)
from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.monitoring.stats import CaptureStats
from headgate.capture.planning.planner import StepPlanner
from headgate.capture.planning.step_plan import StepPlan
from headgate.capture.request_origin import ResultReporter, consumer_requests
from headgate.capture.schema.actions.action_sink import NOWHERE, ActionTarget
from headgate.capture.schema.batch import WIRE_VERSION, BatchView, FinalState, NewRequest
from headgate.capture.schema.batching import HELD_SHARE
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import BatchedConsumer, ConsumerContext, ModelInfo
from headgate.capture.schema.registry import OpenConsumer, close_consumers, load_configured, open_consumers
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import SpecReader
from headgate.capture.staging.batching_window import BatchingWindow
from headgate.capture.staging.host_rows import StagedRows
from headgate.capture.staging.ring import StagingRing

if TYPE_CHECKING:
    from torch import Tensor

    from headgate.capture.transport.result_sender import ResultSender

logger = logging.getLogger("headgate")

STAGING_GRACE_S = 60.0
"""Patience with the dispatch thread beyond that with all consumers together: copies, and the GPU."""

DISPATCH_SHARE, CONSUMER_SHARE = 0.5, 0.9
"""Parts of the time to close after which the dispatch thread, then the consumers, must be through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseReport:
    """Work that was unfinished when capture was closed.

    Attributes:
        consumers: Unfinished work of each consumer, by instance.
        is_dispatch_stuck: Rows were still being dispatched when time was up.
        num_unsent: Results and messages that their front end did not acknowledge.
    """

    consumers: Mapping[str, UnfinishedWork] = field(default_factory=dict)
    is_dispatch_stuck: bool = False
    num_unsent: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether everything was delivered."""
        return not self.is_dispatch_stuck and not self.num_unsent and set(self.consumers.values()) <= {UnfinishedWork()}


class CaptureSession:
    """Follows the steps of one worker and delivers what its requests want.

    The step thread calls `request_added`, `request_finished`, `step_begins` and `step_ends`, in the engine's order.
    It never waits for a consumer there, except under ``overload="block"`` and then through the staging memory alone,
    whose lock no consumer ever holds. `stats` is for any other thread, and so is `close`, if need be.

    Args:
        config: As configured.
        model: The model being served.
        sites: Those that this worker owns, in the order of the ring.
        consumers: In any order; their bits are their places in ``config.consumers``.
        staging: The memory that the forward pass writes to.
        sender: Where results go.
        close_sender: Called last, with the seconds it may take; returns how many messages did not arrive.
        pp_rank: Pipeline stage of this worker.
        pp_size: Number of stages.

    Raises:
        ConfigError: If a spill file cannot be made.
    """

    def __init__(
        self,
        *,
        config: CaptureConsumersConfig,
        model: ModelInfo,
        sites: Sequence[Site],
        consumers: Sequence[OpenConsumer],
        staging: StagingRing,
        sender: ResultSender,
        close_sender: Callable[[float], int] | None = None,
        pp_rank: int = 0,
        pp_size: int = 1,
    ) -> None:
        self.model = model
        self._specs = SpecReader(sites)
        self._bits = {consumer.spec.instance: consumer.bit for consumer in consumers}
        self._staging = staging
        self._sender = sender
        self._reporter = ResultReporter(sender, pp_rank, pp_size)
        self._close_sender = close_sender
        self._keys: dict[str, str] = {}
        self._window = BatchingWindow({each.bit: _linger_s(each, config) for each in consumers})
        self._urgent = set[str]()  # requests whose clients wait for what consumers make of their rows
        self._ends: dict[str, RequestEnds] = {}  # requests that have ended, while rows are left in the ring
        self._plan: StepPlan | None = None
        self._step_thread: int | None = None
        self._planner = StepPlanner(sites)
        self._patience_s = _patience_s(consumers)
        self._consumers = {opened.bit: self._make_consumer(opened, config) for opened in consumers}
        self._handoff: Handoff[Dispatched] = Handoff()
        staging.on_wait = lambda: self._handoff.put(MemoryWanted())
        size = staging.host_bytes
        queues = {bit: consumer.queue for bit, consumer in self._consumers.items()}
        self._dispatcher = Dispatcher(
            self._handoff, queues, keep_bytes=size, hold_bytes=int(HELD_SHARE * size), linger_s=self._window.least
        )
        self._close_report: CloseReport | None = None
        for consumer in self._consumers.values():
            consumer.start()
        self._dispatcher.start()

    def request_added(self, new: NewRequest) -> None:
        """Take a request; one that is known under its id is given up for it.

        Raises:
            RuntimeError: If it names a consumer that this worker does not have: front end and worker disagree.
        """
        capture = None if new.wire is None else new.wire.get("capture")
        if capture is None and new.req_id not in self._keys:
            return
        key = "" if capture is None else capture["key"]
        if new.req_id in self._keys or new.req_id in self._ends:
            self._collect()  # what belongs to the request that was known under this id
        if new.wire is not None and new.wire.get("v") != WIRE_VERSION:
            raise RuntimeError(f"request {new.req_id}: expected wire version {WIRE_VERSION}, got {new.wire}")
        wanted = {} if capture is None else capture["specs"]
        specs = {self._bit(instance): self._specs.read(raw) for instance, raw in wanted.items()}
        self._step_thread = threading.get_ident()
        is_same_client = self._keys.get(new.req_id) == key
        # The dispatch thread puts together what consumers need to know: every step waits for this thread.
        requests = partial(consumer_requests, new, specs)
        begins = RequestBegins(new.req_id, new.num_prompt_tokens, requests, is_same_client)
        if self._handoff.put(begins):
            self._keys[new.req_id] = key
            self._window.begin(new.req_id, specs)
            if capture is not None and capture["wait"]:
                self._urgent.add(new.req_id)
            self._planner.add(new.req_id, new.num_prompt_tokens, specs)

    def request_stopped(self, req_id: str) -> None:
        """The request gets no further step; how it ended is said later."""
        self._window.stop(req_id)
        self._collect_if_last()

    def request_finished(self, req_id: str, final: FinalState | None) -> None:
        """The request has got its last step, and this is how it ended. One that asked for nothing is not known here.

        Args:
            req_id: Internal id.
            final: How it ended; None if nobody knows, which makes its results errors.
        """
        if self._keys.pop(req_id, None) is None:
            return
        self._planner.remove(req_id)
        self._ends[req_id] = RequestEnds(req_id, final)
        self._window.stop(req_id)
        if req_id in self._urgent or self._staging.kept_since is None:
            self._urgent.discard(req_id)
            self._collect()
        self._collect_if_last()

    def step_begins(self, view: BatchView | None, token_ids: Tensor | None = None) -> None:
        """Before the forward of a step.

        Args:
            view: Its layout; None if it computes nothing for requests.
            token_ids: The token of each batch row on the device, as the forward will read it. Where it is known, rows
                that were not computed from their request's own tokens end the request with an error.
        """
        is_idle = view is None or not self._keys or self._close_report is not None
        self._plan = None if is_idle or view is None else self._planner.plan(view)
        if self._plan is not None and self._staging.has_to_collect(self._plan):
            self._collect()
        self._staging.begin(self._plan, token_ids)

    def step_ends(self) -> None:
        """After the forward of the step was launched."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._staging.keep(plan)
        since = self._staging.kept_since
        if since is not None and (self._staging.is_well_filled or time.monotonic() >= since + self._window.seconds):
            self._collect()

    def _collect_if_last(self) -> None:
        """Without a request that runs there may be no step after which to look again."""
        if not self._window.is_anything_running:
            self._collect()

    def _collect(self) -> None:
        """Start the copies of the rows that are left in the ring: some calls for each time, however many steps.

        What ended meanwhile had its last rows among them.
        """
        self._staging.collect(self._hand_over_rows, patience_s=self._patience_s)
        self._window.collected()
        self._hand_over_ends()

    def _hand_over_rows(self, staged: StagedRows) -> None:
        if not self._handoff.put(staged):
            staged.release()

    def _hand_over_ends(self) -> None:
        ends, self._ends = self._ends, {}
        for end in ends.values():
            self._handoff.put(end)

    def stats(self) -> CaptureStats:
        """Counters as of now."""
        return CaptureStats(
            **asdict(self._staging.counters),
            **asdict(self._sender.stats()),
            dispatch_errors=self._dispatcher.num_errors,
            staged_bytes=self._staging.staged_bytes,
            consumers=tuple(self._consumers[bit].queue.stats() for bit in sorted(self._consumers)),
        )

    def close(self, timeout_s: float) -> CloseReport:
        """Take nothing more, deliver what is there, close the consumers, and end every thread.

        What is not through after `timeout_s` seconds is given up: its requests get an error, and a consumer that is
        still in a call keeps its thread, a daemon, until the call returns. Closing again changes nothing.
        """
        if self._close_report is not None:
            return self._close_report
        started = time.monotonic()
        self._end_what_waits()
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
        report = CloseReport(consumers=left, is_dispatch_stuck=is_dispatch_stuck, num_unsent=num_unsent)
        if not report.is_clean:
            logger.warning("capture was closed before everything was delivered: %s", report)
        self._close_report = report
        return report

    def _end_what_waits(self) -> None:
        """Requests that have ended get their last rows; on a thread other than the step thread, an error instead."""
        if threading.get_ident() == self._step_thread:
            self._collect()
        self._hand_over_ends()

    def _make_consumer(self, consumer: OpenConsumer, config: CaptureConsumersConfig) -> ConsumerThread:
        instance = consumer.consumer
        return ConsumerThread(
            consumer.spec,
            Assembler(instance) if isinstance(instance, BatchedConsumer) else instance,
            partial(self._reporter.report, consumer.spec.instance),
            row_bytes=self._staging.row_bytes,
            spill_dir=config.spill_dir,
            accepts_empty=instance.location == "driver",
        )

    def _bit(self, instance: str) -> int:
        bit = self._bits.get(instance)
        if bit is None:
            raise RuntimeError(
                f"a request names the consumer {instance!r}, which this worker does not have; it has "
                f"{', '.join(sorted(self._bits))}. Front end and worker have different configurations: a bug"
            )
        return bit


def open_session(
    *,
    config: CaptureConsumersConfig,
    model: ModelInfo,
    sites: Sequence[Site],
    staging: StagingRing,
    pp_rank: int = 0,
    pp_size: int = 1,
    versions: Mapping[str, str] | None = None,
    actions: ActionTarget = NOWHERE,
) -> CaptureSession:
    """Open the configured consumers and a session that sends results over ZMQ. For the arguments see both.

    Raises:
        ConfigError: If a consumer cannot be opened; those that were are closed.
    """
    from headgate.capture.transport.action_channel import sink_of
    from headgate.capture.transport.result_sender import ZmqResultSender

    make, place = partial(sink_of, actions), {"pp_rank": pp_rank, "pp_size": pp_size}
    opened = open_consumers(config, model=model, location="worker", versions=versions, make_sink=make, **place)
    sender = ZmqResultSender()
    here = {consumer.bit for consumer in opened}
    far = {bit: spec for bit, spec in enumerate(config.consumers) if bit not in here}
    known = dict(versions or {})
    context = ConsumerContext(instance_name="", model=model, pp_rank=pp_rank, pp_size=pp_size, versions=known)
    try:
        return CaptureSession(
            config=config,
            model=model,
            sites=sites,
            consumers=[*opened, *_stand_ins(far, context, sender)],
            staging=staging,
            sender=sender,
            close_sender=sender.close,
            pp_rank=pp_rank,
            pp_size=pp_size,
        )
    except BaseException:
        close_consumers(opened, config.close_timeout_s)
        raise


def _patience_s(consumers: Sequence[OpenConsumer]) -> float:
    """Seconds that the step thread waits for staging memory: all consumers may stall one after the other."""
    return min(sum(each.spec.max_stall_s for each in consumers) + STAGING_GRACE_S, threading.TIMEOUT_MAX)


def _linger_s(opened: OpenConsumer, config: CaptureConsumersConfig) -> float:
    configured = opened.linger_s if config.linger_s is None else config.linger_s
    return type(opened.consumer).linger_s if configured is None else configured


def _stand_ins(
    specs: Mapping[int, CaptureConsumerSpec], context: ConsumerContext, sender: ResultSender
) -> list[OpenConsumer]:
    """Make the senders of rows to driver-located consumers, whose bits are the keys of `specs`."""
    from headgate.capture.transport.result_sender import RowSender

    made = []
    for bit, spec in specs.items():
        sink = RowSender(spec, replace(context, instance_name=spec.instance), sender)
        made.append(OpenConsumer(bit, spec, sink, load_configured(spec).linger_s))
    return made
