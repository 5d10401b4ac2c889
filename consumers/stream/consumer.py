"""The consumer that sends rows to another process, which takes them at its own pace.

One reader at a time is let in, gets batches, and acknowledges them.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headgate.capture.delivery.request_assembler import RequestCollector
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.consumer import (
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
    read_params,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.positions import parse_positions
from headgate.capture.schema.sites import parse_hook
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem.storage.store import check_name
from headgate.consumers.stream.wire import (
    ACKNOWLEDGED,
    END,
    FIRST_BYTES_S,
    HANDSHAKE_S,
    HEADER,
    TOKEN_VARIABLE,
    VERSION,
    Address,
    Greeting,
    Hello,
    StreamRefusedError,
    Welcome,
    keep_alive,
    parse_address,
    read_token,
    receive_bytes,
    receive_text,
    send_text,
)

logger = logging.getLogger(__name__)


class Backlog:
    """Batches of one stream, from the first that is not acknowledged to the last that was put in.

    Threads: any; one lock. Only `put`, `get` and `wait_until_taken` wait.

    Args:
        max_bytes: Of all batches. One `put` takes half of it at most, so that a reader which acknowledges no later than
            after the other half is never waited for in vain.
        wait_s: Seconds for which `put` waits for room.
        max_away_s: Seconds without a reader after which all batches are given up once there is no room.
        clock: Seconds that only grow.
    """

    def __init__(
        self, max_bytes: int, *, wait_s: float, max_away_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._wait_s = wait_s
        self._max_away_s = max_away_s
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: deque[memoryview] = deque()
        self._num_bytes = 0
        self._first = 0
        self._is_ended = False
        self._left_at: float | None = clock()
        """When the last reader left, or the stream began; None while one is connected."""
        self._has_given_up = False

    @property
    def span(self) -> tuple[int, int]:
        """Number of the first batch that is kept, and the number that the next one will get."""
        with self._changed:
            return self._first, self._end

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def put(self, batches: Sequence[memoryview]) -> tuple[int, int]:
        """Add batches, all or none; return the number of the first one, and the end.

        Raises:
            ConsumerError: If there is no room for them in time, or ever.
        """
        num_bytes = sum(batch.nbytes for batch in batches)
        if num_bytes > self.max_bytes // 2:
            raise ConsumerError(
                f"the rows take {num_bytes} bytes; one request may have half of max_bytes, {self.max_bytes // 2}: "
                "capture less, or raise max_bytes"
            )
        with self._changed:
            patience = self._wait_s if self._left_at is None else min(self._wait_s, max(self._away_left(), 0.0))
            has_room = self._changed.wait_for(
                lambda: self._is_ended or self._num_bytes + num_bytes <= self.max_bytes, patience
            )
            if self._is_ended:
                raise ConsumerError("the stream is being closed")
            if self._has_given_up or not has_room:
                self._refuse()
            first = self._end
            self._kept.extend(batches)
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return first, self._end

    def _away_left(self) -> float:
        """Seconds until a reader that is away has been away for too long."""
        return self._max_away_s - (self._clock() - self._left_at) if self._left_at is not None else self._max_away_s

    def _refuse(self) -> None:
        """Raise for want of room; give everything up if no reader has come for too long."""
        if self._left_at is None:
            raise ConsumerError(
                f"the reader is too slow: there was no room for these rows in max_bytes, {self.max_bytes}, for "
                f"{self._wait_s:g} s"
            )
        if self._away_left() > 0:
            raise ConsumerError(
                f"no reader is connected, and there was no room for these rows in max_bytes, {self.max_bytes}, for "
                f"{self._wait_s:g} s"
            )
        if self._kept:
            logger.error("no reader for %g s: %d batches are given up", self._max_away_s, len(self._kept))
            self._forget(self._end)
        self._has_given_up = True
        raise ConsumerError(f"no reader has been connected for {self._max_away_s:g} s (parameter max_away_s)")

    def get(self, number: int, is_wanted: Callable[[], bool]) -> memoryview | None:
        """Wait for a batch; None if the stream has ended before it, or it is not wanted any more.

        `is_wanted` is asked again when a reader has left.

        Raises:
            LookupError: If it is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: number < self._end or self._is_ended or not is_wanted())
            if not is_wanted():
                return None
            if number < self._first:
                raise LookupError(f"batch {number} is gone; the first that is kept is {self._first}")
            return self._kept[number - self._first] if number < self._end else None

    def acknowledge(self, number: int) -> None:
        """Forget the batches below `number`."""
        with self._changed:
            self._forget(min(number, self._end))
            self._changed.notify_all()

    def _forget(self, number: int) -> None:
        while self._first < number:
            self._num_bytes -= self._kept.popleft().nbytes
            self._first += 1

    def reader_came(self) -> None:
        """A reader is connected."""
        with self._changed:
            self._left_at = None
            self._has_given_up = False

    def reader_left(self) -> None:
        """No reader is connected any more."""
        with self._changed:
            self._left_at = self._clock()
            self._changed.notify_all()

    def end(self) -> None:
        """Take no more batches."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def wait_until_taken(self, timeout_s: float) -> int:
        """Wait until a reader has acknowledged everything; return how many batches are not, when time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._kept, timeout_s)
            return len(self._kept)


MAX_HANDSHAKES = 16
"""Connections that shake hands at a time; a reader that has a session is none of them."""


class StreamListener:
    """Accepts readers on a thread of its own; each shakes hands on another, and one that was let in has two more.

    A connection costs other connections nothing: a connection has `FIRST_BYTES_S` for its first byte and `HANDSHAKE_S`
    for all, and where `MAX_HANDSHAKES` do so already, the next one takes the place of one that has sent nothing yet.

    Attributes:
        stream: Random: the name of this stream's numbers.
        address: Where it listens; with the port that the machine chose.

    Args:
        place: Where.
        token: What a reader must prove to have; None lets all in.
        backlog: The batches.
        model: The model that readers are sent.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, place: Address, token: bytes | None, backlog: Backlog, model: ModelInfo) -> None:
        self.stream = secrets.token_hex(8)
        self._token = token
        self._backlog = backlog
        self._model = model
        self._place = place
        self._socket = place.listen()
        self.address = place.text if place.path else f"tcp://{_host(place.host)}:{self._socket.getsockname()[1]}"
        self._session: ReaderSession | None = None
        self._candidates: dict[threading.Thread, _Candidate] = {}  # in the order in which they came
        self._lock = threading.Lock()  # guards _guests and what they are
        self._entrance = threading.Lock()  # guards _session: one reader is judged and let in at a time
        self._refused = SparseLog(f"the stream at {self.address}")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"headgate-stream-{self.stream}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Accept no more readers, and end the reader's connection; it is sent the end within `timeout_s`."""
        self._is_closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
        self._thread.join()
        self._socket.close()
        with self._lock:
            threads = list(self._candidates)
            for candidate in self._candidates.values():
                candidate.drop()
        for thread in threads:
            thread.join()
        if self._session is not None:
            self._session.finish(timeout_s)
            self._session.stop()
        if self._place.path is not None:
            Path(self._place.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if self._is_closed.is_set():
                    return
                logger.exception("the stream at %s cannot accept a reader", self.address)
                self._is_closed.wait(1.0)
                continue
            candidate = _Candidate(connection, peer[0] if peer else "")
            thread = threading.Thread(
                target=self._receive, args=(candidate,), name="headgate-stream-candidate", daemon=True
            )
            with self._lock:
                self._make_room()
                self._candidates[thread] = candidate
            thread.start()

    def _make_room(self) -> None:
        """If too many connections wait, drop one of the host with the most: the oldest silent one, or the oldest."""
        candidates = [candidate for candidate in self._candidates.values() if candidate.is_waiting]
        if len(candidates) < MAX_HANDSHAKES:
            return
        ((host, _),) = Counter(candidate.host for candidate in candidates).most_common(1)
        of_host = [candidate for candidate in candidates if candidate.host == host]
        next((candidate for candidate in of_host if not candidate.has_spoken), of_host[0]).drop()

    def _receive(self, candidate: _Candidate) -> None:
        """Shake hands on one connection; it stays open if it became a session."""
        try:
            self._admit(candidate)
        except (OSError, StreamRefusedError) as error:
            self._refused.warning(f"a reader was refused: {error}")
            candidate.connection.close()
        except Exception:
            logger.exception("the stream at %s could not let a reader in", self.address)
            candidate.connection.close()
        finally:
            with self._lock:
                del self._candidates[threading.current_thread()]

    def _admit(self, candidate: _Candidate) -> None:
        """Shake hands; begin a session if the reader may have one."""
        connection, deadline = candidate.connection, time.monotonic() + HANDSHAKE_S
        connection.settimeout(FIRST_BYTES_S)
        keep_alive(connection)
        nonce = secrets.token_hex(16)
        send_text(connection, Greeting(nonce=nonce, needs_token=self._token is not None), None, "")
        candidate.has_spoken = bool(connection.recv(1, socket.MSG_PEEK))
        try:
            hello = receive_text(connection, Hello, self._token, f"reader {nonce}", deadline)
        except StreamRefusedError as error:
            send_text(connection, Welcome(refusal=str(error)), None, "")
            raise
        with self._entrance:
            answer = self._answer(hello)
            send_text(connection, answer, self._token, f"stream {nonce} {hello.nonce}")
            if answer.refusal is not None:
                raise StreamRefusedError(answer.refusal)
            with self._lock:
                if not candidate.is_waiting:
                    raise ConnectionAbortedError("others came in its place")
                candidate.is_waiting = False
            if self._session is not None:
                self._session.stop()
            connection.settimeout(None)
            self._session = ReaderSession(connection, self._backlog, hello.reader, answer.first)

    def _answer(self, hello: Hello) -> Welcome:
        first, end = self._backlog.span
        running = self._session
        if hello.version != VERSION:
            return Welcome(refusal=f"this stream speaks version {VERSION} of its protocol, not {hello.version}")
        if running is not None and running.is_running and running.reader != hello.reader:
            return Welcome(is_busy=True, refusal="another reader is connected; a stream has one at a time")
        if hello.stream is not None and hello.stream != self.stream:
            return Welcome(
                is_gap=True,
                refusal="the server was started anew: what it had not sent by then is gone. A new reader begins with "
                "what is kept now",
            )
        number = first if hello.stream is None else hello.next
        if not first <= number <= end:
            return Welcome(
                is_gap=True,
                refusal=f"batch {number} is not there; the first that is kept is {first}. Those before it were "
                "acknowledged, or given up while no reader was connected for max_away_s. A new reader begins with "
                "what is kept",
            )
        model = self._model
        return Welcome(
            stream=self.stream,
            first=number,
            max_bytes=self._backlog.max_bytes,
            model=model.name,
            dtype=model.dtype,
            hidden_size=model.hidden_size,
        )


class _Candidate:
    """A connection that shakes hands.

    Attributes:
        connection: Its socket.
        host: Where it comes from; empty on a Unix socket.
        has_spoken: Whether a byte of it came.
        is_waiting: Until it is let in or dropped.
    """

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection = connection
        self.host = host
        self.has_spoken = False
        self.is_waiting = True

    def drop(self) -> None:
        """End the connection, which wakes the thread that waits for it, unless it was let in."""
        if self.is_waiting:
            self.is_waiting = False
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class ReaderSession:
    """The connection of a reader that was let in: one thread sends, one receives acknowledgements.

    Attributes:
        reader: Its random name.
        is_running: Until the connection ends.
    """

    def __init__(self, connection: socket.socket, backlog: Backlog, reader: str, first: int) -> None:
        self.reader = reader
        self.is_running = True
        self._connection = connection
        self._backlog = backlog
        self._end_sent = first
        self._lock = threading.Lock()  # guards is_running
        backlog.reader_came()
        self._sender, self._receiver = (
            threading.Thread(target=target, name=f"headgate-stream-{reader}", daemon=True)
            for target in (self._send, self._receive_acknowledged)
        )
        self._sender.start()
        self._receiver.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent of a backlog that has ended, and the word that it has."""
        self._sender.join(timeout_s)

    def stop(self) -> None:
        """End the connection and wait for its threads."""
        self._end()
        self._sender.join()
        self._receiver.join()
        self._connection.close()

    def _end(self) -> None:
        with self._lock:
            was_running, self.is_running = self.is_running, False
        if was_running:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            self._backlog.reader_left()

    def _send(self) -> None:
        with suppress(OSError, LookupError):
            while (batch := self._backlog.get(self._end_sent, lambda: self.is_running)) is not None:
                self._end_sent += 1  # before: an acknowledgement may come while the call returns
                self._connection.sendall(HEADER.pack(self._end_sent - 1, batch.nbytes))
                self._connection.sendall(batch)
            if self.is_running:
                self._connection.sendall(HEADER.pack(END, 0))
            return
        self._end()

    def _receive_acknowledged(self) -> None:
        with suppress(OSError):
            while True:
                (number,) = ACKNOWLEDGED.unpack(receive_bytes(self._connection, ACKNOWLEDGED.size))
                if number > self._end_sent:
                    logger.error("a reader acknowledged batch %d, which it was not sent; it is let go", number)
                    break
                self._backlog.acknowledge(number)
        self._end()


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
    parsed = read_params(StreamParams, params, "stream", max_bytes=1, running_bytes=1, batch_rows=1)
    try:
        check_name(parsed.tag, "tag")
        parse_positions(parsed.positions, "positions")
        for hook in parsed.hooks or ():
            parse_hook(hook, f"hooks.{hook}")
        place = parsed.place
        token = read_token(parsed.token_file)
    except (RequestError, ConfigError) as error:
        raise ConfigError(f"stream: {error}") from error
    if token is None and not place.is_local:
        raise ConfigError(
            f"stream: address {parsed.address} can be reached from other machines: name a token_file, or set "
            f"{TOKEN_VARIABLE}, on both sides"
        )
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
    return replace(spec, options={"tag": tag})


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
    takes_columns = True
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
        self._rows = RequestCollector(context.model, self._send)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

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

    def _send(self, captured: CapturedRequest) -> dict[str, Any]:
        from headgate.consumers.stream.wire import encode  # imports pyarrow

        num_rows, batch_rows = len(captured.positions), self._settings.batch_rows
        batches = [
            encode(captured, self.context.model, start, min(start + batch_rows, num_rows))
            for start in range(0, num_rows, batch_rows)
        ]
        span = self._backlog.put(batches)
        num_bytes = sum(batch.nbytes for batch in batches)
        return {"stream": self._listener.stream, "batches": list(span), "num_rows": num_rows, "num_bytes": num_bytes}
