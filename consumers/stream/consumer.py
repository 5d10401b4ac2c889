"""The consumer that sends rows to another process, which takes them at its own pace."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.stream.address import read_token
from headgate.consumers.stream.backlog import Backlog
from headgate.consumers.stream.listener import Listener
from headgate.consumers.stream.params import parse_global, parse_params, parse_request

logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds in which a reader that has acknowledged everything is told that the stream has ended."""


class StreamConsumer(StreamingConsumer):
    """Listens for one `StreamReader`, and sends it the rows of each request that has ended.

    `StreamParams` lists the parameters. A request asks with ``{"hooks", "positions", "tag"}``; only ``hooks`` is
    required. Its payload is ``{"stream", "batches": [first, end], "num_rows", "num_bytes"}``: its rows are kept under
    these numbers until the reader has acknowledged them. While the reader is slow, requests wait for room and the
    consumer's overload policy decides.

    Attributes:
        address: Where it listens; with the port that the machine chose.

    Raises:
        ConfigError: If it cannot listen, or the engine has several pipeline stages.
    """

    location = "worker"
    takes_tag = True
    global_spec_param = "hooks"
    linger_s = 0.25  # rows are sent when a request has ended, not before

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        settings = self._settings = parse_params(params)
        if context.pp_size > 1:
            raise ConfigError(
                f"stream: with {context.pp_size} pipeline stages, each would listen at {settings.address}; add "
                "location=driver, where their rows come together"
            )
        self._backlog = Backlog(settings.max_bytes, wait_s=settings.wait_s, max_away_s=settings.max_away_s)
        try:
            self._listener = Listener(settings.place, read_token(settings.token_file), self._backlog, context.model)
        except OSError as error:
            raise ConfigError(
                f"stream: cannot listen at {settings.address}: {error}. With data parallelism or several API servers, "
                "one process alone can: add location=driver, and --api-server-count 1"
            ) from error
        self.address = self._listener.address
        logger.info("rows for a reader at %s", self.address)
        self._running: dict[str, int] = {}  # bytes of each running request
        self._too_large: set[str] = set()
        self._rows = Assembler(_Send({}, context, self._backlog, self._listener.stream, settings.batch_rows))

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        return parse_global(context)

    def begin(self, request: RequestInfo) -> None:
        self._running[request.request_id] = 0
        self._rows.begin(request)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        self._rows.write(blocks, self._reserve)

    def finish(self, finished: FinishedRequest) -> Any:
        request_id = finished.request.request_id
        if request_id in self._too_large:
            self._too_large.discard(request_id)
            raise ConsumerError(
                f"the rows of requests that run do not fit: running_bytes is {self._settings.running_bytes}; capture "
                "less, or raise it"
            )
        try:
            return self._rows.finish(finished)
        finally:
            self._running.pop(request_id, None)

    def abandon(self, request: RequestInfo) -> None:
        self._too_large.discard(request.request_id)
        self._running.pop(request.request_id, None)
        self._rows.abandon(request)

    def close(self, timeout_s: float) -> None:
        """Wait until the reader has acknowledged everything, for `timeout_s` seconds at most."""
        self._rows.close(timeout_s)
        self._backlog.end()
        left = self._backlog.wait_until_taken(timeout_s)
        if left:
            logger.error("%d batches had not been acknowledged by a reader of %s; they are gone", left, self.address)
        self._listener.close(0.0 if left else FAREWELL_S)

    def _reserve(self, span: RowSpan, block: RowBlock) -> bool:
        """Count the rows of `span`; if they are too many, let go of all that the request has."""
        request_id = span.request.request_id
        if request_id in self._too_large:
            return False
        num_bytes = block.rows[:, span.start : span.stop].nbytes
        if sum(self._running.values()) + num_bytes > self._settings.running_bytes:
            self._too_large.add(request_id)
            self._running.pop(request_id)
            self._rows.abandon(span.request)
            return False
        self._running[request_id] += num_bytes
        return True


class _Send(BatchedConsumer):
    """Receives whole requests from the assembler and puts them into the backlog."""

    def __init__(
        self, params: Mapping[str, Any], context: ConsumerContext, backlog: Backlog, stream: str, batch_rows: int
    ) -> None:
        super().__init__(params, context)
        self._backlog = backlog
        self._stream = stream
        self._batch_rows = batch_rows

    def on_capture(self, captured: CapturedRequest) -> dict[str, Any]:
        from headgate.consumers.stream.arrow_rows import encode  # imports pyarrow

        num_rows = len(captured.positions)
        batches = [
            encode(captured, self.context.model.dtype, start, min(start + self._batch_rows, num_rows))
            for start in range(0, num_rows, self._batch_rows)
        ]
        span = self._backlog.put(batches)
        num_bytes = sum(batch.nbytes for batch in batches)
        return {"stream": self._stream, "batches": list(span), "num_rows": num_rows, "num_bytes": num_bytes}
