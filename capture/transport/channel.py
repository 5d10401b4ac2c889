"""Both ends of a one-way connection over ZMQ: a worker sends through a `Channel`, a front end reads an `Inbox`.

An inbox acknowledges each message when it is done with it, and a channel keeps at most a window of bytes
unacknowledged. So a slow reader makes its senders wait instead of filling memory anywhere, and when either end dies,
the other notices or is not affected.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.transport.messages import Frames, MalformedMessage

logger = logging.getLogger("headgate")

MAX_IPC_PATH = 107
"""Bytes that Linux allows for the path of a Unix socket."""

MAX_FAILURES = 10
"""Failures of an inbox's thread in a row after which it gives up: what is broken then stays so."""

CLOSING_INTERVAL_S = 0.1
"""Interval at which a waiting channel looks whether it is being closed, and how much time is left."""


class Channel:
    """Messages to one inbox, in order, with at most `window_bytes` of them not yet acknowledged.

    Threads: any. A lock serialises them, and a `send` that waits for room holds it.

    Args:
        context: Of ZMQ.
        address: Of the inbox.
        window_bytes: See above.
        window_messages: So many messages at most, too.
        told: Logged when something is lost for the first time, with the address and the reason.

    Attributes:
        lost: Messages that were not sent, or whose receiver died before it acknowledged them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        window_bytes: int,
        window_messages: float = math.inf,
        told: str = "The front end at %s %s: results or rows for it are lost",
    ) -> None:
        self.lost = 0
        self._window_messages = window_messages
        self._told = told
        self._address = address
        self._window_bytes = window_bytes
        self._bytes_on_the_way = 0
        self._messages_on_the_way = 0
        self._is_stuck = False
        self._is_dead = False
        self._is_closing = False
        self._lock = threading.Lock()
        self._socket = context.socket(zmq.DEALER)
        # The window is the limit, not ZMQ's high-water marks, which would also drop acknowledgements.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A hub's address is never used twice: once the other end is gone, it is gone for good.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._peer_gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._peer_gone, zmq.POLLIN)
        self._socket.connect(address)

    def send(self, frames: Frames, *, timeout_s: float | None) -> bool:
        """Send one message; False, and counted as lost, if it could not be.

        Args:
            frames: Their memory is not copied and must not change.
            timeout_s: Seconds to wait for room; 0 for none. None: send it although the window is full, for small
                messages that must not be lost while the other end lives.
        """
        num_bytes = sum(len(frame) for frame in frames)
        with self._lock:
            self._receive(0)
            if not self._has_room(num_bytes, timeout_s):
                self._lose(1)
                return False
            self._socket.send_multipart(frames, copy=False)
            self._bytes_on_the_way += num_bytes
            self._messages_on_the_way += 1
            return True

    def close(self, timeout_s: float) -> int:
        """Wait until everything sent was acknowledged; return how many messages never were. Ends a waiting `send`."""
        deadline = time.monotonic() + timeout_s
        self._is_closing = True
        with self._lock:
            while self._messages_on_the_way and not self._is_dead and (left := deadline - time.monotonic()) > 0:
                self._receive(min(left, CLOSING_INTERVAL_S))
            unacknowledged = self._messages_on_the_way
            self._disconnect()
            return unacknowledged

    def _has_room(self, num_bytes: int, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            # One timeout is enough: until it moves again, nobody waits for it.
            deadline = time.monotonic() + (0 if self._is_stuck else timeout_s)
            while self._is_full(num_bytes) and not self._is_dead:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_closing:
                    self._is_stuck = True
                    return False
                self._receive(min(left, CLOSING_INTERVAL_S))
        return not self._is_dead

    def _is_full(self, num_bytes: int) -> bool:
        """One message that is larger than the window goes alone."""
        is_over = self._bytes_on_the_way > 0 and self._bytes_on_the_way + num_bytes > self._window_bytes
        return is_over or self._messages_on_the_way >= self._window_messages

    def _receive(self, timeout_s: float) -> None:
        """Read acknowledgements, and whether the other end is gone, waiting for the first."""
        if self._is_dead:
            return
        ready = self._poller.poll(math.ceil(timeout_s * 1000))
        while ready:
            if any(socket is self._peer_gone for socket, _ in ready):
                num_lost = self._messages_on_the_way
                self._disconnect()
                self._lose(num_lost)
                return
            self._bytes_on_the_way -= acknowledged(self._socket.recv())
            self._messages_on_the_way -= 1
            self._is_stuck = False
            ready = self._poller.poll(0)

    def _lose(self, num_messages: int) -> None:
        if num_messages and not self.lost:
            why = "is gone" if self._is_dead else "does not keep up"
            logger.warning(self._told, self._address, why)
        self.lost += num_messages

    def _disconnect(self) -> None:
        if self._is_dead:
            return
        self._is_dead = True
        self._bytes_on_the_way = self._messages_on_the_way = 0
        self._poller = zmq.Poller()
        self._socket.disable_monitor()
        self._peer_gone.close(linger=0)
        self._socket.close(linger=0)


class Inbox:
    """A bound address and the thread that reads it.

    Threads: `handle` runs on the inbox's own thread, one message at a time; each message is acknowledged when
    `handle` returned, whatever came of it. Everything else may be called from anywhere.

    The thread goes on after a failure. When it fails again and again, it ends, and says so through `on_failure`.

    Attributes:
        address: Where it listens.
        path: Of its socket file.
        malformed: Messages that `handle` refused or failed on; each was dropped.
        failures: Times that the thread itself failed, outside of `handle`.
    """

    def __init__(
        self,
        address: str,
        handle: Callable[[Sequence[zmq.Frame]], None],
        *,
        name: str,
        watch: Callable[[], float | None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Listen at `address` (``ipc://PATH``) and start the thread, called `name`.

        Args:
            address: Where.
            handle: Takes the frames of one message.
            name: Of the thread.
            watch: Called on the thread after each message, and when the time on the monotonic clock has come that
                it returned; None for "after the next message".
            on_failure: Called on the thread with the reason, when it gives up and reads no more.

        Raises:
            UnsupportedError: If the address cannot be bound.
        """
        self.path = address.removeprefix("ipc://")
        if len(self.path.encode()) > MAX_IPC_PATH:
            raise UnsupportedError(
                f"socket path {self.path!r} is longer than {MAX_IPC_PATH} bytes; set TMPDIR to a shorter folder"
            )
        self.address = address
        self.malformed = 0
        self.failures = 0
        self._is_closing = False
        self._handle = handle
        self._watch = watch
        self._on_failure = on_failure
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # an acknowledgement that is dropped would close a window for good
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UnsupportedError(f"cannot listen at {address}: {error}") from error
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_receiver.bind("inproc://stop")
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop listening; False if the handler did not return within `timeout_s` seconds.

        The thread then ends by itself when the handler returns; closing again waits for it again.
        """
        if not self._is_closing:
            self._is_closing = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # ZMQ leaves it behind
            self._stop_sender.send(b"")
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_receiver, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        in_a_row = 0
        while in_a_row < MAX_FAILURES:
            try:
                if not self._turn(poller):
                    break
                in_a_row = 0
            except BaseException as error:  # noqa: BLE001  (without this thread nobody would ever get a result)
                in_a_row += 1
                self._note_failure(error, in_a_row)
        else:
            self._socket.close(linger=0)  # workers then know that nobody reads
            self._stop_receiver.recv()
        # Here and not in `close`, which may have given up waiting. Nobody else uses the sockets any more.
        for socket in (self._socket, self._stop_receiver, self._stop_sender):
            socket.close(linger=0)
        self._context.term()

    def _turn(self, poller: zmq.Poller) -> bool:
        """Wait for one message and read it; False if the inbox is being closed."""
        ready = [socket for socket, _ in poller.poll(self._time_left_ms())]
        if self._stop_receiver in ready:
            return False
        if ready:
            self._read()
        return True

    def _note_failure(self, error: BaseException, in_a_row: int) -> None:
        self.failures += 1
        is_last = in_a_row == MAX_FAILURES
        then = "it gives up" if is_last else "it goes on"
        level = logging.ERROR if in_a_row in (1, MAX_FAILURES) else logging.DEBUG
        logger.log(level, "The thread %s failed, %s", self._thread.name, then, exc_info=error)
        if is_last and self._on_failure is not None:
            self._on_failure(f"the thread {self._thread.name}, which receives from the workers, ended: {error!r}")

    def _read(self) -> None:
        identity, *frames = self._socket.recv_multipart(copy=False)
        self._handle_message(frames)
        self._socket.send_multipart([identity, acknowledgement(sum(len(frame) for frame in frames))])

    def _time_left_ms(self) -> int | None:
        due = None if self._watch is None else self._watch()
        return None if due is None else max(math.ceil((due - time.monotonic()) * 1000), 0)

    def _handle_message(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            self._handle(frames)
        except MalformedMessage as error:
            self.malformed += 1
            level = logging.WARNING if self.malformed == 1 else logging.DEBUG
            logger.log(level, "Ignored a malformed message at %s: %s", self.address, error)
        except Exception:  # this thread must outlive whatever one message does
            self.malformed += 1
            logger.exception("A message at %s could not be handled", self.address)


def acknowledgement(num_bytes: int) -> bytes:
    """Make the frame that acknowledges a message of `num_bytes` bytes."""
    return num_bytes.to_bytes(8, "little")


def acknowledged(frame: bytes) -> int:
    """Read `acknowledgement`."""
    return int.from_bytes(frame, "little")
