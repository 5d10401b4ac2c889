"""The thread of one consumer: takes requests and rows out of its queue, calls the consumer, and reports results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from headgate.capture.delivery.completeness import ConsumerRequest, SendResult, failed, result_of
from headgate.capture.delivery.consumer_queue import (
    Abandon,
    ConsumerQueue,
    Finish,
    Item,
    QueuedRows,
    SpilledRows,
    SpillFile,
)
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.monitoring.stats import ConsumerStats, figures_of
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    SendPart,
    StreamingConsumer,
    send_nowhere,
)
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import CaptureResult

T = TypeVar("T")


class Deferred:
    """Returned by a consumer's `finish` if the request's result comes from elsewhere: none is reported here."""


DEFERRED: Final = Deferred()


class RowSink(Protocol):
    """The consumer as its thread sees it: a `StreamingConsumer`, or a `BatchedConsumer` fed by an `Assembler`."""

    def begin(self, request: RequestInfo) -> None: ...

    def write(self, blocks: Sequence[RowBlock]) -> None: ...

    def finish(self, finished: FinishedRequest) -> Any: ...

    def abandon(self, request: RequestInfo) -> None: ...

    def close(self, timeout_s: float) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedWork:
    """Work that a consumer leaves when it is closed.

    Attributes:
        unfinished: Requests reported as unfinished, for want of an end or of time.
        is_stuck: The consumer is still in a call; the thread ends when the call does.
        close_error: What the consumer's `close` raised, as text.
    """

    unfinished: int = 0
    is_stuck: bool = False
    close_error: str | None = None


_NO_END = (
    "the engine core reported that the request is over, but not its tokens and why it stopped, as expected at an end. "
    "Without them its rows cannot be checked, so they are discarded; send the request again, and if that ends so, too, "
    "report it with the output of `headgate doctor`"
)


class ConsumerThread:
    """Calls one consumer, in the order of its queue, on one daemon thread.

    A call that raises fails the requests it was for and nothing else.

    Attributes:
        instance: Name of the consumer.
        queue: Where the dispatch thread puts the consumer's requests and rows.

    Args:
        spec: Name, queue size, overload policy and longest stall.
        sink: The consumer.
        send_result: Gets each request's result, once.
        model: The model that is served.
        send_part: Gets parts of results of running requests; see `StreamingConsumer.send_part`.
        spill_dir: Folder of the spill file, for ``overload="spill"``.
        accepts_empty: See `ConsumerQueue`.

    Raises:
        ConfigError: If the spill file cannot be made.
    """

    def __init__(
        self,
        spec: CaptureConsumerSpec,
        sink: RowSink,
        send_result: SendResult,
        *,
        model: ModelInfo,
        send_part: SendPart = send_nowhere,
        spill_dir: str | None = None,
        accepts_empty: bool = False,
    ) -> None:
        self.instance = spec.instance
        self._sink = sink
        if isinstance(sink, StreamingConsumer):
            sink.send_part = send_part
        self._model = model
        self._spill = SpillFile(spill_dir) if spec.overload == "spill" else None
        self._log = SparseLog(f"capture consumer {self.instance}")
        self.queue = ConsumerQueue(spec, send_result, log=self._log, spill=self._spill, accepts_empty=accepts_empty)
        self._close_by = 0.0
        self._close_error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"headgate-{self.instance}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stats(self) -> ConsumerStats:
        """Counters as of now, and the consumer's own figures."""
        try:
            figures = figures_of(self._sink)
        except Exception as error:  # noqa: BLE001  (a consumer may raise what it likes)
            self._log.error("its figures are not told", cause=error)
            figures = ()
        return replace(self.queue.stats(), figures=figures)

    def close(self, close_by: float) -> None:
        """Let the thread deliver what is queued, close the consumer and end; `close_by` is on the monotonic clock."""
        self._close_by = close_by
        self.queue.close()

    def join(self, close_by: float) -> UnfinishedWork:
        """Wait for the thread until `close_by`; after that, every request without a result gets an error."""
        self._thread.join(max(close_by - time.monotonic(), 0))
        is_stuck = self._thread.is_alive()
        unfinished = self.queue.discard_all()
        if self._spill is not None:
            self._spill.close()
        return UnfinishedWork(unfinished=unfinished, is_stuck=is_stuck, close_error=self._close_error)

    def _run(self) -> None:
        while (item := self.queue.next_item()) is not None:
            try:
                self._handle(item)
            except Exception as error:  # noqa: BLE001
                # A bug of ours must not end the thread: this consumer's later requests would wait for ever.
                self._log.error("delivery failed inside headgate; please report it", cause=error)
                about = item.packet.requests() if isinstance(item, QueuedRows) else [item.request]
                self._fail(about, f"{self.instance}: internal error: {error!r}")
                if isinstance(item, Finish):
                    self.queue.requests.report(item.request, failed(item.request.failure))
        try:
            self._call(partial(self._sink.close, max(self._close_by - time.monotonic(), 0)))
        except ConsumerError as error:
            self._close_error = str(error)

    def _handle(self, item: Item) -> None:
        if isinstance(item, QueuedRows):
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

    def _write(self, rows: QueuedRows) -> None:
        num_rows = num_bytes = 0
        lost_to = ""
        try:
            packet = rows.packet
            if isinstance(rows, SpilledRows) and self._spill is not None:
                try:
                    packet = self._spill.load(rows)
                except (OSError, ConsumerError) as error:
                    self._log.error("cannot read back what was spilled", cause=error)
                    lost_to = f"reading back from disk failed: {error}"
                    return
            live = packet.without_failed()
            if live is None:
                return
            try:
                self._call(partial(self._sink.write, live.blocks))
            except ConsumerError as error:
                self._fail(live.requests(), str(error))
                return
            num_rows, num_bytes = live.note_delivered(), live.num_bytes
        finally:
            self.queue.free(rows, num_rows=num_rows, num_bytes=num_bytes, lost_to=lost_to)

    def _finish(self, request: ConsumerRequest, final: FinalState | None) -> None:
        requests = self.queue.requests
        if final is None:
            self._fail([request], f"{self.instance}: {_NO_END}")
        if final is None or request.failure is not None:
            requests.report(request, failed(request.failure))
            return
        totals = request.audit.close(final)
        result = result_of(request, totals, final, instance=self.instance, model=self._model)
        if result.status == "error":
            self._fail([request], str(result.error))
            requests.report(request, result)
            return
        finished = FinishedRequest(request=request.info, final=final, dropped_rows=totals.dropped)
        request.is_begun = False
        try:
            payload = self._call(partial(self._sink.finish, finished))
        except ConsumerError as error:
            requests.report(request, failed(str(error)))
            return
        if isinstance(payload, Future):
            requests.defer(request)
            payload.add_done_callback(partial(self._complete, request, result))
        elif payload is DEFERRED:
            requests.report(request, None)
        else:
            result.payload = payload
            requests.report(request, result)

    def _complete(self, request: ConsumerRequest, result: CaptureResult, future: Future[Any]) -> None:
        """Report a request that the consumer's own threads are done with, on whichever thread completes the future."""
        try:
            result.payload = future.result(timeout=0)
        except BaseException as error:  # noqa: BLE001  whatever happened there is this request's error
            self._log_failure("a request failed", error)
            result = failed(_text(self.instance, error))
        self.queue.requests.report(request, result)

    def _call(self, call: Callable[[], T]) -> T:
        """Call the consumer.

        Raises:
            ConsumerError: Whatever it raised, as text for people.
        """
        with self.queue.calls:
            try:
                return call()
            except BaseException as error:  # SystemExit too: it would end the thread, and with it every later request
                self._log_failure("a call failed", error)
                raise ConsumerError(_text(self.instance, error)) from error

    def _log_failure(self, what: str, error: BaseException) -> None:
        """Log one line for what a consumer refuses, and the traceback of anything else."""
        if isinstance(error, ConsumerError):
            self._log.error(f"{what}: {error}")
        else:
            self._log.error(what, cause=error)

    def _fail(self, requests: Sequence[ConsumerRequest], text: str) -> None:
        """Fail `requests`; each gets its result when it ends."""
        self._abandon(self.queue.requests.fail(requests, text))

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
