"""The consumer's side of a lane: every call of one consumer, on one thread, and what its failures mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from headgate.capture.delivery.completeness import ConsumerRequest, failed, result_of
from headgate.capture.delivery.queue_items import Abandon, Finish, Item, Rows, requests_of
from headgate.capture.delivery.row_packets import Packet
from headgate.capture.delivery.spill_file import SpillFile
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.consumer import FinishedRequest, RequestInfo, RowBlock
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import CaptureResult
from headgate.capture.transport.result_sender import DEFERRED

T = TypeVar("T")


class RowSink(Protocol):
    """What a lane feeds: a `StreamingConsumer`, or a `BatchedConsumer` behind an `Assembler`."""

    def begin(self, request: RequestInfo) -> None: ...

    def write(self, blocks: Sequence[RowBlock]) -> None: ...

    def finish(self, finished: FinishedRequest) -> Any: ...

    def abandon(self, request: RequestInfo) -> None: ...

    def close(self, timeout_s: float) -> None: ...


class QueueState(Protocol):
    """What a lane shares with its consumer's thread; every method takes the lane's lock for itself."""

    def take(self) -> Item | None:
        """Wait for the next item; None when the lane is closed and empty."""
        ...

    def free(self, rows: Rows, delivered: tuple[int, int]) -> None:
        """The consumer has returned from taking `rows`; it took so many positions and bytes of them."""
        ...

    def drop(self, packet: Packet, reason: str) -> None:
        """Rows are lost."""
        ...

    def call_begins(self) -> None:
        """From now on the consumer's patience runs."""
        ...

    def call_ends(self) -> None:
        """The consumer has returned."""
        ...

    def fail(self, requests: Sequence[ConsumerRequest], text: str) -> list[ConsumerRequest]:
        """Let `requests` end in an error; return those that had not failed before."""
        ...

    def settle(self, request: ConsumerRequest, result: CaptureResult | None) -> None:
        """The outcome of a request; None if it is reported elsewhere."""
        ...

    def defer(self, request: ConsumerRequest) -> None:
        """The outcome of a request comes later, from a thread of the consumer's own."""
        ...


class Delivery:
    """Calls one consumer, in the order of its queue. `run` is the body of the consumer's thread.

    Args:
        instance: The consumer, for messages.
        sink: The consumer.
        lane: The state that is shared with the other threads.
        spill: Where spilled rows are.
        row_bytes: Bytes of one row at one site.
        log: Where failures go; each is in its request's result too.
    """

    def __init__(
        self,
        instance: str,
        sink: RowSink,
        lane: QueueState,
        *,
        spill: SpillFile | None,
        row_bytes: int,
        log: SparseLog,
    ) -> None:
        self._instance = instance
        self._sink = sink
        self._lane = lane
        self._spill = spill
        self._row_bytes = row_bytes
        self._log = log

    def run(self) -> None:
        """Deliver until the lane is closed and empty."""
        while (item := self._lane.take()) is not None:
            try:
                self._handle(item)
            except Exception as error:  # noqa: BLE001
                # A bug of ours must not end the thread: this consumer's later requests would wait for ever.
                self._log.error("delivery failed inside headgate; please report it", cause=error)
                self._fail(requests_of(item), f"{self._instance}: internal error: {error!r}")
                if isinstance(item, Finish):
                    self._lane.settle(item.request, failed(item.request.failure))

    def close(self, timeout_s: float) -> str | None:
        """Close the consumer; return what it raised, as text."""
        try:
            self._call(partial(self._sink.close, timeout_s))
        except ConsumerError as error:
            return str(error)
        return None

    def _handle(self, item: Item) -> None:
        if isinstance(item, Rows):
            self._write(item)
        elif isinstance(item, Finish):
            self._finish(item.request, item.final)
        elif isinstance(item, Abandon):
            self._abandon([item.request])
        elif item.request.failure is None:
            item.request.is_begun = True
            try:
                self._call(partial(self._sink.begin, item.request.info))
            except ConsumerError as error:
                self._fail([item.request], str(error))

    def _write(self, rows: Rows) -> None:
        delivered = 0, 0
        try:
            packet = self._load(rows)
            live = None if packet is None else packet.without_failed()
            if live is None:
                return
            try:
                self._call(partial(self._sink.write, live.blocks))
            except ConsumerError as error:
                self._fail(live.requests(), str(error))
                return
            delivered = live.deliver(), live.num_bytes
        finally:
            self._lane.free(rows, delivered)

    def _load(self, rows: Rows) -> Packet | None:
        if rows.spilled is None or self._spill is None:
            return rows.packet
        try:
            return Packet(self._spill.load(rows.spilled), rows.packet.owners)
        except (OSError, ConsumerError) as error:
            self._log.error("cannot read back what was spilled", cause=error)
            self._lane.drop(rows.packet, f"reading back from disk failed: {error}")
            return None

    def _finish(self, request: ConsumerRequest, final: FinalState | None) -> None:
        if final is None:
            self._fail([request], f"{self._instance}: nobody knows how the request ended, so its rows are unchecked")
        if final is None or request.failure is not None:
            self._lane.settle(request, failed(request.failure))
            return
        account = request.ledger.close(final)
        result = result_of(request, account, final, instance=self._instance, row_bytes=self._row_bytes)
        if result.status == "error":
            self._fail([request], str(result.error))
            self._lane.settle(request, result)
            return
        finished = FinishedRequest(request=request.info, final=final, dropped_rows=account.dropped)
        request.is_begun = False
        try:
            payload = self._call(partial(self._sink.finish, finished))
        except ConsumerError as error:
            self._lane.settle(request, failed(str(error)))
            return
        if isinstance(payload, Future):
            self._lane.defer(request)
            payload.add_done_callback(partial(self._complete, request, result))
        elif payload is DEFERRED:
            self._lane.settle(request, None)
        else:
            result.payload = payload
            self._lane.settle(request, result)

    def _complete(self, request: ConsumerRequest, result: CaptureResult, future: Future[Any]) -> None:
        """The consumer's own threads are done with a request. Runs on whichever thread completes the future."""
        try:
            result.payload = future.result(timeout=0)
        except BaseException as error:  # noqa: BLE001  whatever happened there is this request's error
            self._log.error("a request failed", cause=error)
            result = failed(_text(self._instance, error))
        self._lane.settle(request, result)

    def _call(self, call: Callable[[], T]) -> T:
        """Call the consumer.

        Raises:
            ConsumerError: Whatever it raised, as text for people.
        """
        self._lane.call_begins()
        try:
            return call()
        except BaseException as error:  # SystemExit too: it would end the thread, and with it every later request
            self._log.error("a call failed", cause=error)
            raise ConsumerError(_text(self._instance, error)) from error
        finally:
            self._lane.call_ends()

    def _fail(self, requests: Sequence[ConsumerRequest], text: str) -> None:
        """Fail `requests`; each gets its result when it ends."""
        self._abandon(self._lane.fail(requests, text))

    def _abandon(self, requests: Sequence[ConsumerRequest]) -> None:
        for request in requests:
            if request.is_begun:
                request.is_begun = False
                try:
                    self._call(partial(self._sink.abandon, request.info))
                except ConsumerError:
                    continue  # logged; the request has failed already


def _text(instance: str, error: BaseException) -> str:
    return f"{instance}: {type(error).__name__}: {error}"
