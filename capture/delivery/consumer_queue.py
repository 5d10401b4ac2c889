"""A lane: the thread of one consumer, its queue, and what happens when it is slow, fails or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from headgate.capture.delivery.completeness import ConsumerRequest, failed
from headgate.capture.delivery.consumer_thread import Delivery, RowSink
from headgate.capture.delivery.queue_items import Abandon, Backlog, Begin, Finish, Item, Rows
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.delivery.spill_file import SpillFile
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.monitoring.stats import ConsumerStats, QueueCounters
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.consumer import RequestInfo
from headgate.capture.schema.results import CaptureResult

Report = Callable[[RequestInfo, CaptureResult], None]
"""Sends the result of one request. Called by several threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedWork:
    """What a lane leaves when it is closed.

    Attributes:
        unfinished: Requests that were told so, for want of an end or of time.
        is_stuck: The consumer is still in a call; the thread ends when the call does.
        close_error: What the consumer's `close` raised, as text.
    """

    unfinished: int = 0
    is_stuck: bool = False
    close_error: str | None = None


class ConsumerQueue:
    """One consumer's queue, bounded in bytes, and the one thread that its calls run on.

    `begin`, `offer`, `finish`, `replace` and `watch` are the dispatch thread's; `stop_holding_up`, `close`, `cut` and
    `join` the closing thread's; `stats` is anybody's. The lock guards the queue and the requests' state; no call of
    the consumer, no report and no disk access runs under it.

    A call that takes longer than `max_stall_s`, or a queue that stays full for so long under ``block``, ends every
    request the lane knows with an error. Rows are then dropped until the call returns; requests that begin after
    that are served again.

    Args:
        spec: Queue size, overload policy and patience.
        sink: The consumer.
        report: Gets each request's result, once.
        row_bytes: Bytes of one row at one site.
        spill_dir: Folder of the spill file, for ``overload="spill"``.
        takes_siteless: Whether the consumer is to hear of requests none of whose sites are on this worker. The
            others' result is blank: other pipeline stages have the rows.

    Raises:
        ConfigError: If the spill file cannot be made.
    """

    def __init__(
        self,
        spec: CaptureConsumerSpec,
        sink: RowSink,
        report: Report,
        *,
        row_bytes: int,
        spill_dir: str | None = None,
        takes_siteless: bool = False,
    ) -> None:
        self.instance = spec.instance
        self._spec = spec
        self._report = report
        self._takes_siteless = takes_siteless
        self._spill = SpillFile(spill_dir) if spec.overload == "spill" else None
        self._changed = threading.Condition(threading.Lock())
        self._backlog = Backlog(spec, self._spill)
        self._log = SparseLog(f"capture consumer {self.instance}")
        self._delivery = Delivery(self.instance, sink, self, spill=self._spill, row_bytes=row_bytes, log=self._log)
        self._open: dict[ConsumerRequest, None] = {}  # in order of arrival
        self._deferred: set[ConsumerRequest] = set()
        self._call_started: float | None = None
        self._is_hung = False
        self._is_cut = False
        self._may_hold_up = spec.overload == "block"
        self._close_by: float | None = None
        self._close_error: str | None = None
        self._counters = QueueCounters()
        self._thread = threading.Thread(target=self._run, name=f"headgate-{self.instance}", daemon=True)

    def start(self) -> None:
        """Start the consumer's thread."""
        self._thread.start()

    def begin(self, request: ConsumerRequest) -> None:
        """Announce a request."""
        with self._changed:
            self._open[request] = None
            if self._is_left_out(request):
                return
            if self._is_serving:
                self._append(Begin(request))
            else:
                request.failure = f"{self.instance}: was hung or shut down when the request began"

    def offer(self, packet: Packet, *, may_wait: bool) -> bool:
        """Queue `packet`, or do with it what the overload policy says.

        Returns:
            False if it has to wait for room and `may_wait` is False; offer it again then.
        """
        num_bytes = packet.num_bytes
        overdue: list[ConsumerRequest] | None = None
        lost_to = ""
        with self._changed:
            if not self._is_ready(num_bytes):
                if not may_wait:
                    return False
                overdue = self._wait_for_room(num_bytes)
            is_queued = self._is_serving and self._backlog.admit(packet, num_bytes)
            must_spill = not is_queued and self._is_serving and self._spill is not None
            if is_queued:
                self._changed.notify_all()
            elif not must_spill:
                lost_to = f"its queue of {self._spec.queue_bytes} bytes was full" if self._is_serving else "it was hung"
                self._backlog.drop(packet, lost_to)
        if overdue is not None:
            self._log.error(f"{self._held_up}; its requests end with an error")
            self._settle_failed(overdue)
        elif lost_to:
            self._log.error(f"rows were dropped: {lost_to}")
        if must_spill and self._spill is not None:
            self._spill_over(packet, self._spill)
        return True

    def finish(self, request: ConsumerRequest, final: FinalState | None, *, contradiction: str | None = None) -> None:
        """Say that `request` got its last row; its result follows the rows that are queued.

        Args:
            request: The request.
            final: How it ended; None if nobody knows.
            contradiction: Why its rows must not be used, if so: the consumer is to let go of them.
        """
        with self._changed:
            request.ended_at = time.monotonic()
            is_left_out = self._is_left_out(request)
            if not is_left_out and request.failure is None:
                if contradiction is None:
                    self._append(Finish(request, final))
                    return
                request.failure = f"{self.instance}: {contradiction}"
                self._append(Abandon(request))
        self.settle(request, CaptureResult(status="ok") if is_left_out else failed(request.failure))

    def replace(self, request: ConsumerRequest, *, is_silent: bool) -> None:
        """Give `request` up for another that took its id.

        Args:
            request: The one that was there before.
            is_silent: Report nothing: the other one's result stands for both.
        """
        with self._changed:
            request.failure = request.failure or f"{self.instance}: another request took over the id"
            if request.is_begun or not self._is_left_out(request):
                self._append(Abandon(request))
        self.settle(request, None if is_silent else failed(request.failure))

    def watch(self) -> float | None:
        """Take note of a call that takes too long.

        Returns:
            When to look again, on the monotonic clock; None if nothing is under way.
        """
        with self._changed:
            if self._is_hung:
                return None
            if self._call_started is None:
                return time.monotonic() + self._spec.max_stall_s if self._backlog else None
            due_at = self._call_started + self._spec.max_stall_s
            if time.monotonic() < due_at:
                return due_at
            reason = f"one call took longer than {self._spec.max_stall_s:g} s"
            overdue = self._give_up(reason)
        self._log.error(f"{reason}; its requests end with an error")
        self._settle_failed(overdue)
        return None

    def close(self, close_by: float) -> None:
        """Let the thread deliver what is queued, close the consumer and end; `close_by` is on the monotonic clock."""
        with self._changed:
            self._close_by = close_by
            self._changed.notify_all()

    def stop_holding_up(self) -> None:
        """Drop what does not fit from now on, whatever the policy, so that the dispatch thread can come to an end."""
        with self._changed:
            self._may_hold_up = False
            self._changed.notify_all()

    def cut(self) -> None:
        """Drop what is queued and what is still offered, so that nobody waits for this lane any more."""
        with self._changed:
            self._is_cut = True
            self._backlog.discard("capture was shut down")
            self._changed.notify_all()

    def join(self, close_by: float) -> UnfinishedWork:
        """Wait for the thread until `close_by`; after that, every request without a result gets an error."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        is_stuck = self._thread.is_alive()
        self.cut()
        with self._changed:
            unfinished = list(self._open)
            for request in unfinished:
                request.failure = request.failure or (
                    f"{self.instance}: capture was shut down before the request had ended and was delivered"
                )
        self._settle_failed(unfinished)
        if self._spill is not None:
            self._spill.close()
        return UnfinishedWork(unfinished=len(unfinished), is_stuck=is_stuck, close_error=self._close_error)

    def stats(self) -> ConsumerStats:
        """Counters as of now; waits for no consumer."""
        with self._changed:
            return ConsumerStats(
                instance=self.instance,
                dropped_rows=self._backlog.dropped_rows,
                spilled_rows=self._backlog.spilled_rows,
                queued_bytes=self._backlog.queued_bytes,
                spilled_bytes=0 if self._spill is None else self._spill.pending_bytes,
                is_hung=self._is_hung,
                **asdict(self._counters),
            )

    def _append(self, item: Begin | Finish | Abandon) -> None:
        self._backlog.append(item)
        self._changed.notify_all()

    @property
    def _is_serving(self) -> bool:
        return not self._is_hung and not self._is_cut

    @property
    def _held_up(self) -> str:
        return f"held up the engine for longer than {self._spec.max_stall_s:g} s"

    def _is_left_out(self, request: ConsumerRequest) -> bool:
        return not request.info.spec.sites and not self._takes_siteless

    def _is_ready(self, num_bytes: int) -> bool:
        return not self._may_hold_up or not self._is_serving or self._backlog.has_room(num_bytes)

    def _wait_for_room(self, num_bytes: int) -> list[ConsumerRequest] | None:
        """Hold up the dispatch thread, and with it in the end the engine.

        Returns:
            None if there is room now; the requests whose result is due if it took too long.
        """
        started = time.monotonic()
        overdue: list[ConsumerRequest] | None = None
        while not self._is_ready(num_bytes):
            since = started if self._call_started is None else min(started, self._call_started)
            left_s = since + self._spec.max_stall_s - time.monotonic()
            if left_s > 0:
                self._changed.wait(left_s)
            else:
                overdue = self._give_up(self._held_up)
                break
        self._counters.stalls += 1
        self._counters.stall_s += time.monotonic() - started
        return overdue

    def _spill_over(self, packet: Packet, spill: SpillFile) -> None:
        try:
            spilled = spill.store(packet.blocks)
        except OSError as error:
            self._log.error("rows are dropped: cannot spill to disk", cause=error)
            self.drop(packet, f"spilling to disk failed: {error}")
            return
        with self._changed:
            if self._is_cut:
                self._backlog.drop(packet, "capture was shut down")
                spill.discard(spilled)
            else:
                self._backlog.append_spilled(packet, spilled)
                self._changed.notify_all()

    def _give_up(self, reason: str) -> list[ConsumerRequest]:
        """Under the lock: fail every request and drop all rows; return the requests whose result is due."""
        self._is_hung = self._call_started is not None
        self._counters.hangs += 1
        self._backlog.discard(reason)
        waiting = [request for request in self._open if request not in self._deferred]
        for request in waiting:
            request.failure = request.failure or f"{self.instance}: hung: {reason}"
            if request.is_begun:
                self._append(Abandon(request))
        return [request for request in waiting if request.ended_at is not None]

    # What the consumer's thread shares: see `LaneState`.

    def take(self) -> Item | None:
        with self._changed:
            self._is_hung = False
            self._changed.wait_for(lambda: self._backlog or self._close_by is not None)
            return self._backlog.pop() if self._backlog else None

    def free(self, rows: Rows, delivered: tuple[int, int]) -> None:
        with self._changed:
            self._counters.rows += delivered[0]
            self._counters.bytes += delivered[1]
            self._backlog.free(rows)
            self._changed.notify_all()

    def drop(self, packet: Packet, reason: str) -> None:
        with self._changed:
            self._backlog.drop(packet, reason)

    def call_begins(self) -> None:
        with self._changed:
            self._call_started = time.monotonic()

    def call_ends(self) -> None:
        with self._changed:
            if self._call_started is not None:
                self._counters.call_s += time.monotonic() - self._call_started
            self._call_started = None
            self._is_hung = False

    def fail(self, requests: Sequence[ConsumerRequest], text: str) -> list[ConsumerRequest]:
        with self._changed:
            fresh = [request for request in requests if request.failure is None]
            for request in fresh:
                request.failure = text
        return fresh

    def defer(self, request: ConsumerRequest) -> None:
        with self._changed:
            self._deferred.add(request)

    def settle(self, request: ConsumerRequest, result: CaptureResult | None) -> None:
        """Report a result, unless an error was reported while the consumer hung."""
        with self._changed:
            if request.is_reported:
                return
            request.is_reported = True
            self._open.pop(request, None)
            self._deferred.discard(request)
            self._counters.requests += 1
            self._counters.errors += result is not None and result.status == "error"
            if request.ended_at is not None:
                self._counters.note_result(time.monotonic() - request.ended_at)
        if result is None:
            return
        try:
            self._report(request.info, result)
        except Exception as error:  # noqa: BLE001  the outlet's failure must not end the thread; it is counted
            self._log.error("a result could not be sent", cause=error)
            with self._changed:
                self._counters.lost_reports += 1

    def _settle_failed(self, requests: Sequence[ConsumerRequest]) -> None:
        for request in requests:
            self.settle(request, failed(request.failure))

    def _run(self) -> None:
        """The consumer's thread."""
        self._delivery.run()
        with self._changed:
            left_s = 0 if self._close_by is None else max(self._close_by - time.monotonic(), 0)
        self._close_error = self._delivery.close(left_s)
