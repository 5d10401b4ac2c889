"""The consumer that sends rows to another process, which takes them at its own pace."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

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
    parse_client_spec,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.sites import parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.storage.store import check_name
from headgate.consumers.stream.listener import Backlog, StreamListener
from headgate.consumers.stream.wire import TOKEN_VARIABLE, Address, parse_address, read_token

DEFAULT_TAG = "default"
HOW_TO_INSTALL = "pip install 'headgate[stream]'"


class StreamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the stream consumer.

    Attributes:
        address: Where the reader connects: ``tcp://HOST:PORT`` or ``unix:///PATH``.
        token_file: File with the token that the reader must prove to have; the environment's ``HEADGATE_STREAM_TOKEN``
            if None. Required for an address that other machines can reach.
        max_bytes: Bytes of batches that the reader has not acknowledged; one request may have half of it.
        running_bytes: Bytes of rows of running requests; they are sent when their request has ended.
        batch_rows: Largest number of rows in a batch; each batch has rows of one request.
        wait_s: Seconds that the rows of a request wait for room. Keep it below the consumer's ``max_stall_s``.
        max_away_s: Seconds without a reader after which all kept rows are discarded if there is no room for new ones.
        tag: Tag of requests that name none.
        hooks: ``{hook point: layers}`` to stream for every request.
        positions: Which positions to stream with `hooks`.
    """

    address: str
    token_file: str | None = None
    max_bytes: int = 256 << 20
    running_bytes: int = 1 << 30
    batch_rows: int = 4096
    wait_s: float = 20.0
    max_away_s: float = 300.0
    tag: str = DEFAULT_TAG
    hooks: dict[str, Any] | None = None
    positions: Any = "all"

    @property
    def place(self) -> Address:
        """The address, parsed."""
        return parse_address(self.address)


def parse_params(params: Mapping[str, Any]) -> StreamParams:
    """Read and check the parameters; the token is looked at, no socket is made.

    Raises:
        ConfigError: Naming the parameter; also if pyarrow is not installed.
    """
    plain = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in params.items()}
    try:
        parsed = msgspec.convert(plain, StreamParams)
        check_name(parsed.tag, "tag")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
        place = parsed.place
        token = read_token(parsed.token_file)
    except (msgspec.ValidationError, RequestError, ConfigError) as error:
        raise ConfigError(f"stream: {error}") from error
    if token is None and not place.is_local:
        raise ConfigError(
            f"stream: address {parsed.address} can be reached from other machines: name a token_file, or set "
            f"{TOKEN_VARIABLE}, on both sides"
        )
    for name in ("max_bytes", "running_bytes", "batch_rows"):
        if getattr(parsed, name) < 1:
            raise ConfigError(f"stream: {name} must be at least 1, got {getattr(parsed, name)}")
    for name in ("wait_s", "max_away_s"):
        if not 0 <= getattr(parsed, name) < 1e9:
            raise ConfigError(f"stream: {name} must be 0 or more seconds, got {getattr(parsed, name)}")
    if find_spec("pyarrow") is None:
        raise ConfigError(f"stream: pyarrow is not installed: {HOW_TO_INSTALL}")
    return parsed


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"hooks", "positions", "tag"}``; only ``hooks`` is required. The spec's option ``tag`` is always there.

    Raises:
        RequestError: Naming the field.
    """
    spec = parse_client_spec(raw, context, options=("tag",))
    tag = check_name(spec.options.get("tag", context.params.get("tag", DEFAULT_TAG)), f"{context.field}.tag")
    return CaptureSpec(sites=spec.sites, positions=spec.positions, options={"tag": tag})


def parse_global(context: SpecContext) -> CaptureSpec | None:
    """The spec of every request, if the parameters have ``hooks``."""
    hooks = context.params.get("hooks")
    if hooks is None:
        return None
    return parse_request({"hooks": hooks, "positions": context.params.get("positions", "all")}, context)


logger = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""Seconds in which a reader that has acknowledged everything is sent the end of the stream."""


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
            self._listener = StreamListener(
                settings.place, read_token(settings.token_file), self._backlog, context.model
            )
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
