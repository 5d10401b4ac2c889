"""The serving side of a stream: lets one reader in at a time, sends it batches, and receives its acknowledgements."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.stream.wire import (
    ACKNOWLEDGED,
    END,
    FIRST_BYTES_S,
    HANDSHAKE_S,
    HEADER,
    VERSION,
    Address,
    Greeting,
    Hello,
    StreamRefusedError,
    Welcome,
    keep_alive,
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


MAX_GUESTS = 16
"""Connections that shake hands at a time; a reader that has a session is none of them."""


class StreamListener:
    """Accepts readers on a thread of its own; each shakes hands on another, and one that was let in has two more.

    A connection costs other connections nothing: a connection has `FIRST_BYTES_S` for its first byte and `HANDSHAKE_S`
    for all, and where `MAX_GUESTS` shake hands already, the next one takes the place of one that has said nothing yet.

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
        self._guests: dict[threading.Thread, _Guest] = {}  # in the order in which they came
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
            threads = list(self._guests)
            for guest in self._guests.values():
                guest.drop()
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
            guest = _Guest(connection, peer[0] if peer else "")
            thread = threading.Thread(target=self._receive, args=(guest,), name="headgate-stream-guest", daemon=True)
            with self._lock:
                self._make_room()
                self._guests[thread] = guest
            thread.start()

    def _make_room(self) -> None:
        """If too many connections wait, drop one of the host with the most: the oldest silent one, or the oldest."""
        guests = [guest for guest in self._guests.values() if guest.is_waiting]
        if len(guests) < MAX_GUESTS:
            return
        ((host, _),) = Counter(guest.host for guest in guests).most_common(1)
        of_host = [guest for guest in guests if guest.host == host]
        next((guest for guest in of_host if not guest.has_spoken), of_host[0]).drop()

    def _receive(self, guest: _Guest) -> None:
        """Shake hands on one connection; it stays open if it became a session."""
        try:
            self._let_in(guest)
        except (OSError, StreamRefusedError) as error:
            self._refused.warning(f"a reader was refused: {error}")
            guest.connection.close()
        except Exception:
            logger.exception("the stream at %s could not let a reader in", self.address)
            guest.connection.close()
        finally:
            with self._lock:
                del self._guests[threading.current_thread()]

    def _let_in(self, guest: _Guest) -> None:
        """Shake hands; begin a session if the reader may have one."""
        connection, deadline = guest.connection, time.monotonic() + HANDSHAKE_S
        connection.settimeout(FIRST_BYTES_S)
        keep_alive(connection)
        nonce = secrets.token_hex(16)
        send_text(connection, Greeting(nonce=nonce, needs_token=self._token is not None), None, "")
        guest.has_spoken = bool(connection.recv(1, socket.MSG_PEEK))
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
                if not guest.is_waiting:
                    raise ConnectionAbortedError("others came in its place")
                guest.is_waiting = False
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


class _Guest:
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
        self._sender, self._hearer = (
            threading.Thread(target=target, name=f"headgate-stream-{reader}", daemon=True)
            for target in (self._send, self._hear)
        )
        self._sender.start()
        self._hearer.start()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent of a backlog that has ended, and the word that it has."""
        self._sender.join(timeout_s)

    def stop(self) -> None:
        """End the connection and wait for its threads."""
        self._end()
        self._sender.join()
        self._hearer.join()
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

    def _hear(self) -> None:
        with suppress(OSError):
            while True:
                (number,) = ACKNOWLEDGED.unpack(receive_bytes(self._connection, ACKNOWLEDGED.size))
                if number > self._end_sent:
                    logger.error("a reader acknowledged batch %d, which it was not sent; it is let go", number)
                    break
                self._backlog.acknowledge(number)
        self._end()
