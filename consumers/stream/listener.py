"""The serving side of a stream: lets one reader in at a time, sends it batches, and hears what it has taken."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from headgate.capture.schema.consumer import ModelInfo
from headgate.consumers.stream.address import Address
from headgate.consumers.stream.backlog import Backlog
from headgate.consumers.stream.errors import StreamRefusedError
from headgate.consumers.stream.wire import (
    ACKNOWLEDGED,
    END,
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


class Listener:
    """Accepts readers on a thread of its own; a reader that was let in has two more.

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
        self._guest: socket.socket | None = None  # who shakes hands
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"headgate-stream-{self.stream}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Let nobody in any more, and end the connection of the reader; it is told the end within `timeout_s`."""
        self._is_closed.set()
        for waited_for in (self._socket, self._guest):
            if waited_for is not None:
                with suppress(OSError):
                    waited_for.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
        self._thread.join()
        self._socket.close()
        if self._session is not None:
            self._session.finish(timeout_s)
            self._session.stop()
        if self._place.path is not None:
            Path(self._place.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed.is_set():
                    return
                logger.exception("the stream at %s cannot accept a reader", self.address)
                self._is_closed.wait(1.0)
                continue
            self._guest = connection
            try:
                self._let_in(connection)
            except (OSError, StreamRefusedError) as error:
                logger.warning("the stream at %s refused a reader: %s", self.address, error)
                connection.close()
            except Exception:  # one reader must not end the thread that lets in the next
                logger.exception("the stream at %s could not let a reader in", self.address)
                connection.close()
            self._guest = None

    def _let_in(self, connection: socket.socket) -> None:
        """Shake hands; begin a session if the reader may have one."""
        deadline = time.monotonic() + HANDSHAKE_S
        connection.settimeout(HANDSHAKE_S)
        keep_alive(connection)
        nonce = secrets.token_hex(16)
        send_text(connection, Greeting(nonce=nonce, needs_token=self._token is not None), None, "")
        try:
            hello = receive_text(connection, Hello, self._token, f"reader {nonce}", deadline)
        except StreamRefusedError as error:
            send_text(connection, Welcome(refusal=str(error)), None, "")
            raise
        answer = self._answer(hello)
        send_text(connection, answer, self._token, f"stream {nonce} {hello.nonce}")
        if answer.refusal is not None:
            raise StreamRefusedError(answer.refusal)
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
