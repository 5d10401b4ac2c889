"""The serving side of a stream: lets one reader in at a time, sends it batches, and hears what it has taken."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.consumer import ModelInfo
from headgate.consumers.stream.address import Address
from headgate.consumers.stream.backlog import Backlog
from headgate.consumers.stream.errors import StreamRefusedError
from headgate.consumers.stream.wire import (
    ACKNOWLEDGED,
    END,
    FIRST_BYTES_S,
    HANDSHAKE_S,
    HEADER,
    VERSION,
    Greeting,
    Hello,
    Welcome,
    keep_alive,
    receive_bytes,
    receive_text,
    send_text,
)

logger = logging.getLogger(__name__)


MAX_GUESTS = 16
"""Connections that shake hands at a time; a reader that has a session is none of them."""


class Listener:
    """Accepts readers on a thread of its own; each shakes hands on another, and one that was let in has two more.

    Whoever connects costs nobody else anything: a connection has `FIRST_BYTES_S` for its first byte and `HANDSHAKE_S`
    for all, and where `MAX_GUESTS` shake hands already, the next one takes the place of one that has said nothing yet.

    Attributes:
        stream: Random: the name of this stream's numbers.
        address: Where it listens; with the port that the machine chose.

    Args:
        place: Where.
        token: What a reader must prove to have; None lets all in.
        backlog: The batches.
        model: What readers are told of the rows.

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
        self._session: Session | None = None
        self._guests: dict[threading.Thread, _Guest] = {}  # in the order in which they came
        self._lock = threading.Lock()  # guards _guests and what they are
        self._entrance = threading.Lock()  # guards _session: one reader is judged and let in at a time
        self._refused = SparseLog(f"the stream at {self.address}")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"headgate-stream-{self.stream}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Let nobody in any more, and end the connection of the reader; it is told the end within `timeout_s`."""
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
        """Drop a guest if there are too many: of the host with the most, the oldest that is silent, or the oldest."""
        guests = [guest for guest in self._guests.values() if guest.is_waiting]
        if len(guests) < MAX_GUESTS:
            return
        ((host, _),) = Counter(guest.host for guest in guests).most_common(1)
        of_host = [guest for guest in guests if guest.host == host]
        next((guest for guest in of_host if not guest.has_spoken), of_host[0]).drop()

    def _receive(self, guest: _Guest) -> None:
        """Shake hands with one guest; the connection stays open if it became a session."""
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
            self._session = Session(connection, self._backlog, hello.reader, answer.first)

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


class Session:
    """The connection of a reader that was let in: one thread sends, one hears acknowledgements.

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
