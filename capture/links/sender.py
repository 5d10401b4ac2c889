"""The sending end in a worker: results, and rows for driver-located consumers, go to the request's front end.

A dead or stopped front end must not block the worker. Each address has a `Channel`, which keeps at most a window
of bytes that the other end has not acknowledged, and notices at once when the other end is gone. Messages that cannot
be sent are counted and logged once an address; lost rows are also named in the request's result.

The front end puts its address and the request's key on the wire; results carry them back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from headgate.capture.delivery.consumer_queue import DEFERRED, Deferred
from headgate.capture.delivery.row_packets import select_spans
from headgate.capture.links.messages import (
    Frames,
    Result,
    answer_of,
    begin_of,
    encode,
    encode_rows,
    end_of,
    origin_of,
)
from headgate.capture.links.network import NetworkKeys
from headgate.capture.links.peer import GIVE_UP_S, LOSS, Channel, endpoint_of, rows_address
from headgate.capture.schema.batch import FinalState
from headgate.capture.schema.config import MIB, CaptureConsumerSpec
from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, RequestInfo, RowBlock, StreamingConsumer
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import CaptureResult, plain_payload


class ResultWatcher(Protocol):
    """Follows the results that are sent. Any thread."""

    def due(self) -> None:
        """Follow a result that is counted and about to be sent."""
        ...

    def done(self, instance: str, req_id: str, key: str) -> None:
        """Follow a result that was sent: of that consumer, for the request of that internal id and key."""
        ...


class ResultReporter:
    """Sends each consumer's results to the front end that its request came from. Any thread.

    Args:
        sender: Takes the messages.
        stage: Pipeline stage of this worker.
        num_stages: Number of stages.
        watcher: Is notified of each result; None for no notifications.
    """

    def __init__(
        self,
        sender: ResultSender,
        stage: int,
        num_stages: int,
        watcher: ResultWatcher | None = None,
    ) -> None:
        self._sender = sender
        self._stage = stage
        self._num_stages = num_stages
        self._watcher = watcher

    def report(self, instance: str, request: RequestInfo, result: CaptureResult | None) -> None:
        """Send the result of `request` for the consumer that requests call `instance`; None comes from elsewhere."""
        origin = request.origin
        if origin is None:
            raise RuntimeError(f"request {request.request_id} has no origin")
        try:
            if self._watcher is not None:
                self._watcher.due()
            if result is not None:
                message = answer_of(request, instance, result, stage=self._stage, num_stages=self._num_stages)
                self._sender.send_result(origin.reply, message)
        finally:
            if self._watcher is not None:
                self._watcher.done(instance, request.request_id, origin.key)

    def report_part(self, instance: str, request: RequestInfo, payload: Any, num_rows: int) -> None:
        """Send a part of a result that is to come, of positions below `num_rows`: `StreamingConsumer.send_part`."""
        found, stage, num_stages = CaptureResult(status="ok", payload=payload), self._stage, self._num_stages
        part = answer_of(request, instance, found, num_rows=num_rows, stage=stage, num_stages=num_stages)
        self._sender.send_part(origin_of(request).reply, part)


logger = logging.getLogger("headgate")

WINDOW_BYTES = 32 * MIB
"""Bytes on their way to one inbox; one larger message may go alone."""

PART_LOSS = "The front end at %s %s: parts of results for chunks of streams are lost; the last chunk has all of them"
"""Parts have a window of their own: results, which are sent once, never lack room because of them."""

TEND_S = 0.25
"""Interval at which connections to other hosts are looked after: the last message may be lost with one, too."""

WAIT_SHARE = 0.8
"""Part of ``max_stall_s`` that a worker waits for a front end, so that the wait does not count as a hang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStats:
    """Losses of a result sender.

    Attributes:
        lost_results: Results whose front end was gone or did not answer.
        lost_messages: Row messages, likewise; the rows in them are counted in their requests' results.
    """

    lost_results: int
    lost_messages: int


class ResultSender:
    """Sends a worker's results, and the rows for driver-located consumers, over ZMQ.

    Opens a channel when an address is first used.

    Threads: any; the lock guards the table of channels, each channel has its own. While there are channels to other
    hosts, a thread of its own mends their connections.

    Args:
        window_bytes: Bytes on their way to one inbox.
        keys: To reach front ends on other hosts; None if there are none.
        give_up_s: Seconds without a connection after which such a front end counts as gone.
    """

    def __init__(
        self, *, window_bytes: int = WINDOW_BYTES, keys: NetworkKeys | None = None, give_up_s: float = GIVE_UP_S
    ) -> None:
        self._window_bytes = window_bytes
        self._keys = keys
        self._give_up_s = give_up_s
        self._stopping = threading.Event()
        self._tending: threading.Thread | None = None
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._results: dict[str, Channel] = {}
        self._rows: dict[str, Channel] = {}
        self._parts: dict[str, Channel] = {}
        self._num_unreachable: Counter[bool] = Counter()
        """Messages without a known destination, by whether they were results."""
        self._is_closed = False

    def send_result(self, reply: str | None, result: Result) -> None:
        """Send a result without waiting; nowhere if `reply` is None.

        A payload that is not made of plain values becomes an error.
        """
        if reply is not None:
            self._send(self._results, reply, [_encode_result(result)], timeout_s=0)

    def send_part(self, reply: str | None, part: Result) -> None:
        """Send a part of a result without waiting; what has no room is dropped, since the result has it again."""
        if reply is not None:
            self._send(self._parts, reply, [_encode_result(part)], timeout_s=0)

    def send_to_consumer(
        self, request: RequestInfo, instance: str, frames: Frames, *, timeout_s: float | None = None
    ) -> bool:
        """Send a message to the driver-located consumer `instance` of the front end that waits for a request.

        Args:
            request: The request.
            instance: The consumer.
            frames: Of the message: `Begin`, `Rows` or `End`.
            timeout_s: Seconds to wait for room; None sends it whether or not there is room.

        Returns:
            False if it was not sent.

        Raises:
            ConsumerError: If no front end waits for the request.
        """
        address = rows_address(reply_of(request), instance)
        return self._send(self._rows, address, frames, timeout_s=timeout_s)

    def stats(self) -> SenderStats:
        """Counters so far."""
        with self._lock:
            return SenderStats(
                lost_results=sum(channel.lost for channel in self._results.values()) + self._num_unreachable[True],
                lost_messages=sum(channel.lost for channel in self._rows.values()) + self._num_unreachable[False],
            )

    def close(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for what was sent to arrive; return how many messages did not.

        Whatever is sent afterwards is ignored. Close the consumers first.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            channels = self._channels()
        self._stopping.set()
        if self._tending is not None:
            self._tending.join()
        unacknowledged = sum(channel.close(max(deadline - time.monotonic(), 0)) for channel in channels)
        if self._context is not None:
            self._context.term()
        return unacknowledged

    def _send(self, channels: dict[str, Channel], address: str, frames: Frames, *, timeout_s: float | None) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            channel = channels.get(address)
            if channel is None:
                try:
                    channel = channels[address] = self._open(address, PART_LOSS if channels is self._parts else LOSS)
                except ValueError as error:
                    return self._lose(channels, error)
        return channel.send(frames, timeout_s=timeout_s)

    def _open(self, address: str, loss_message: str) -> Channel:
        endpoint = endpoint_of(address, self._keys)
        if self._context is None:
            self._context = zmq.Context()
        if endpoint.is_far and self._tending is None:
            self._tending = threading.Thread(target=self._tend, name="headgate-links", daemon=True)
            self._tending.start()
        return Channel(
            self._context, endpoint, self._window_bytes, loss_message=loss_message, give_up_s=self._give_up_s
        )

    def _channels(self) -> list[Channel]:
        """All that are open; under the lock."""
        return [*self._results.values(), *self._rows.values(), *self._parts.values()]

    def _lose(self, channels: dict[str, Channel], why: ValueError) -> bool:
        if not self._num_unreachable:
            logger.warning("Results or rows cannot be sent: %s", why)
        self._num_unreachable[channels is self._results] += 1
        return False

    def _tend(self) -> None:
        while not self._stopping.wait(TEND_S):
            with self._lock:
                channels = self._channels()
            for channel in channels:
                channel.tend()


def _encode_result(message: Result) -> bytes:
    try:
        payload = message.result.payload
        if (sent := plain_payload(payload)) is not payload:
            plain = msgspec.structs.replace(message.result, payload=sent)
            message = msgspec.structs.replace(message, result=plain)
        return encode(message)
    except Exception as error:  # noqa: BLE001  (payload and summary are the consumer's; any failure is its own)
        result = CaptureResult(
            status="error",
            error=f"consumer {message.instance}: its payload cannot be sent from a worker ({error!r}); "
            "return str, number, bool, None, list or dict, or use location = 'driver'",
            num_rows=message.result.num_rows,
            num_bytes=message.result.num_bytes,
            dropped_rows=message.result.dropped_rows,
        )
        return encode(msgspec.structs.replace(message, result=result))


def reply_of(request: RequestInfo) -> str:
    """Return the address of the front end that waits for a request.

    Raises:
        ConsumerError: If none does.
    """
    reply = origin_of(request).reply
    if reply is None:
        raise ConsumerError(f"request {request.client_request_id} has no front end that waits for its results")
    return reply


class RowSender(StreamingConsumer):
    """A worker's stand-in for a consumer that is located in the driver: sends everything to the request's owner.

    It never fails a request because of rows that it could not send in time: they count as dropped, and the driver's
    consumer learns how many there were when the request finishes. So a front end that hangs or dies costs the
    requests of others nothing.
    """

    location = "driver"

    def __init__(self, spec: CaptureConsumerSpec, context: ConsumerContext, sender: ResultSender) -> None:
        super().__init__(spec.params, context)
        self._sender = sender
        self._timeout_s = WAIT_SHARE * spec.max_stall_s
        self._lost_rows: dict[str, int] = {}

    def begin(self, request: RequestInfo) -> None:
        """Announce the request.

        Raises:
            ConsumerError: If no front end waits for it.
        """
        reply_of(request)  # raises before anything is kept
        self._lost_rows[request.request_id] = 0
        name, stage = self.context.instance_name, self.context.pp_rank
        begin = begin_of(request, instance=name, stage=stage, num_stages=self.context.pp_size)
        self._sender.send_to_consumer(request, name, [encode(begin)])

    def write(self, blocks: Sequence[RowBlock]) -> None:
        """Send the rows, waiting while the front end does not keep up."""
        deadline = time.monotonic() + self._timeout_s
        for part in split_by_reply(blocks).values():
            request, left_s = part[0].spans[0].request, max(deadline - time.monotonic(), 0)
            frames = encode_rows(part, stage=self.context.pp_rank)
            if not self._sender.send_to_consumer(request, self.context.instance_name, frames, timeout_s=left_s):
                self._count_lost(part)

    def finish(self, finished: FinishedRequest) -> Deferred:
        """Pass the end on; the result comes from the front end."""
        lost = self._lost_rows.pop(finished.request.request_id, 0)
        self._end(finished.request, finished.final, finished.dropped_rows + lost)
        return DEFERRED

    def abandon(self, request: RequestInfo) -> None:
        """Pass the failure on; the consumer's thread reports it."""
        if self._lost_rows.pop(request.request_id, None) is not None:
            self._end(request, None)

    def _end(self, request: RequestInfo, final: FinalState | None, dropped_rows: int = 0) -> None:
        frames = [encode(end_of(request, final, self.context.pp_rank, dropped_rows))]
        self._sender.send_to_consumer(request, self.context.instance_name, frames)

    def _count_lost(self, blocks: Sequence[RowBlock]) -> None:
        positions: dict[str, list[int]] = {}
        for block in blocks:
            for span in block.spans:
                lost = positions.setdefault(span.request.request_id, [])
                lost += block.positions[span.start : span.stop].tolist()
        for req_id, lost in positions.items():
            self._lost_rows[req_id] = self._lost_rows.get(req_id, 0) + len(np.unique(lost))


def split_by_reply(blocks: Sequence[RowBlock]) -> dict[str, list[RowBlock]]:
    """Group blocks by reply address; rows are copied only where a block has several."""
    parts: dict[str, list[RowBlock]] = {}
    for block in blocks:
        replies = dict.fromkeys(reply_of(span.request) for span in block.spans)
        for reply in replies:
            spans = [span for span in block.spans if reply_of(span.request) == reply]
            parts.setdefault(reply, []).append(block if len(replies) == 1 else select_spans(block, spans))
    return parts
