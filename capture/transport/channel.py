"""The sending end of a one-way connection over ZMQ: a worker sends through a `Channel`, a front end reads an `Inbox`.

An inbox acknowledges each message when it is done with it, and a channel keeps at most a window of bytes
unacknowledged. So a slow reader makes its senders wait instead of filling memory anywhere, and when either end dies,
the other notices or is not affected.

Every message is numbered. Between hosts a connection can break while both ends live: the channel makes a new one and
sends again what was not acknowledged, in order, and the inbox drops what it had read already.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from headgate.capture.transport.messages import Frames
from headgate.capture.transport.network import Endpoint

logger = logging.getLogger("headgate")

CLOSING_INTERVAL_S = 0.1
"""Interval at which a waiting channel looks whether it is being closed, and how much time is left."""

GIVE_UP_S = 60.0
"""Seconds without a connection to another host after which its front end counts as gone."""

PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""Pause before a connection is made again, doubled each time up to the latter."""

HEARTBEAT_S, SILENCE_S = 5, 15
"""Between hosts each end reports so often that it lives; a connection that is silent for longer is broken."""

SESSION_BYTES, NUMBER_BYTES = 8, 8
REFUSED = (1 << 8 * NUMBER_BYTES) - 1
"""An acknowledgement of this number: the inbox does not have what came before, so it is another than it was."""


def numbering(session: bytes, number: int) -> bytes:
    """Make the first frame of a message: the channel's random name, and how many of its messages went before."""
    return session + number.to_bytes(NUMBER_BYTES, "little")


class Channel:
    """Messages to one inbox, in order, with at most `window_bytes` of them not yet acknowledged.

    Threads: any. A lock serialises them, and a `send` that waits for room holds it.

    Args:
        context: Of ZMQ.
        endpoint: Of the inbox.
        window_bytes: See above.
        window_messages: So many messages at most, too.
        told: Logged when something is lost for the first time, with the address and the reason.
        give_up_s: Seconds without a connection to another host after which it counts as gone.

    Attributes:
        lost: Messages that were not sent, or whose receiver died before it acknowledged them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        window_bytes: int,
        window_messages: float = math.inf,
        told: str = "The front end at %s %s: results or rows for it are lost",
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.lost = 0
        self._context = context
        self._endpoint = endpoint
        self._window_bytes = window_bytes
        self._window_messages = window_messages
        self._told = told
        self._give_up_s = give_up_s
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._next_number = 0
        self._sent: deque[_Sent] = deque()
        self._bytes_on_the_way = 0
        self._is_stuck = False
        self._is_closing = False
        self._ended: str | None = None
        self._lock = threading.Lock()
        self._link: _Link | None = _Link(context, endpoint)
        self._retry = _Retry(give_up_s)

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
            numbered = [numbering(self._session, self._next_number), *frames]
            self._sent.append(_Sent(self._next_number, num_bytes, numbered if self._endpoint.is_far else ()))
            self._next_number += 1
            self._bytes_on_the_way += num_bytes
            if self._link is not None:
                self._link.send(numbered)
            return True

    def tend(self) -> None:
        """Read acknowledgements and mend the connection, unless a thread is at it; does not wait."""
        if self._lock.acquire(blocking=False):
            try:
                if self._sent:
                    self._receive(0)
            finally:
                self._lock.release()

    def close(self, timeout_s: float) -> int:
        """Wait until everything sent was acknowledged; return how many messages never were. Ends a waiting `send`."""
        deadline = time.monotonic() + timeout_s
        self._is_closing = True
        with self._lock:
            while self._sent and self._ended is None and (left := deadline - time.monotonic()) > 0:
                self._receive(min(left, CLOSING_INTERVAL_S))
            unacknowledged = len(self._sent)
            self._end("was left")
            return unacknowledged

    def _has_room(self, num_bytes: int, timeout_s: float | None) -> bool:
        if timeout_s is not None:
            # One timeout is enough: until it moves again, no thread waits for it.
            deadline = time.monotonic() + (0 if self._is_stuck else timeout_s)
            while self._is_full(num_bytes) and self._ended is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_closing:
                    self._is_stuck = True
                    return False
                self._receive(min(left, CLOSING_INTERVAL_S))
        return self._ended is None

    def _is_full(self, num_bytes: int) -> bool:
        """One message that is larger than the window goes alone."""
        is_over = self._bytes_on_the_way > 0 and self._bytes_on_the_way + num_bytes > self._window_bytes
        return is_over or len(self._sent) >= self._window_messages

    def _receive(self, timeout_s: float) -> None:
        """Read acknowledgements, waiting for the first; notice whether the other end is gone; connect anew."""
        if self._ended is not None:
            return
        if self._link is None:
            self._connect_again(timeout_s)
            return
        heard = self._link.receive(timeout_s)
        if heard.is_connected:
            self._retry = _Retry(self._give_up_s)
        for number in heard.numbers:
            self._acknowledge(number)
        if REFUSED in heard.numbers:
            self._give_up("was started anew")
        elif heard.is_broken:
            self._link.close()
            self._link = None
            if not self._endpoint.is_far:
                # A hub's socket is never made twice: once the other end is gone, it is gone for good.
                self._give_up("is gone")
            elif not self._retry.again():
                self._give_up(f"has not been reached for {self._give_up_s:g} s, or has other keys")

    def _acknowledge(self, number: int) -> None:
        while self._sent and self._sent[0].number <= number != REFUSED:
            self._bytes_on_the_way -= self._sent.popleft().num_bytes
            self._is_stuck = False

    def _connect_again(self, timeout_s: float) -> None:
        pause_s = self._retry.at - time.monotonic()
        if pause_s > timeout_s:
            time.sleep(timeout_s)
            return
        time.sleep(max(pause_s, 0))
        self._link = _Link(self._context, self._endpoint)
        for sent in self._sent:
            self._link.send(sent.frames)

    def _give_up(self, why: str) -> None:
        num_lost = len(self._sent)
        self._end(why)
        self._lose(num_lost)

    def _lose(self, num_messages: int) -> None:
        if num_messages and not self.lost:
            logger.warning(self._told, self._endpoint.address, self._ended or "does not keep up")
        self.lost += num_messages

    def _end(self, why: str) -> None:
        self._ended = why
        self._sent.clear()
        self._bytes_on_the_way = 0
        if self._link is not None:
            self._link.close()
            self._link = None


class _Sent(NamedTuple):
    """A message that was not acknowledged yet.

    Attributes:
        number: Its own.
        num_bytes: Of its frames.
        frames: To be sent again; none where a broken connection is the end.
    """

    number: int
    num_bytes: int
    frames: Frames


class _Retry:
    """When to connect again, counted from the first failure in a row."""

    def __init__(self, give_up_s: float) -> None:
        self._give_up_s = give_up_s
        self._pause_s = PAUSE_S
        self._since: float | None = None
        self.at = 0.0

    def again(self) -> bool:
        """Note a failure; False if there were enough of them."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self.at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        return now - self._since < self._give_up_s


class _Heard(NamedTuple):
    """News of a connection.

    Attributes:
        numbers: Acknowledged, or `REFUSED`.
        is_connected: Whether the other end has let it in.
        is_broken: Whether it is of no use any more.
    """

    numbers: list[int]
    is_connected: bool
    is_broken: bool


_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Link:
    """One connection, and what watches over it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        socket = self._socket = context.socket(zmq.DEALER)
        # The window is the limit, not ZMQ's high-water marks, which would also drop acknowledgements.
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.reconnect_ivl = -1  # the channel does so itself, and sends again what was lost with the connection
        if endpoint.keys is not None:
            endpoint.keys.secure_connecting(socket)
            socket.ipv6 = "[" in endpoint.address
            socket.heartbeat_ivl, socket.heartbeat_timeout = 1000 * HEARTBEAT_S, 1000 * SILENCE_S
            socket.connect_timeout = socket.handshake_ivl = 1000 * SILENCE_S
        self._events = socket.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._is_gone = False
        socket.connect(endpoint.address)

    def send(self, frames: Frames) -> None:
        """Send a message; does not wait. Where it cannot, the connection is lost, as the next receive reports."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # a connection that failed leaves a socket without any, and a send to that never returns
            self._is_gone = True

    def receive(self, timeout_s: float) -> _Heard:
        """Return the messages that have come, waiting for the first."""
        numbers: list[int] = []
        is_connected, is_broken = False, self._is_gone
        ready = dict(self._poller.poll(0 if is_broken else math.ceil(timeout_s * 1000)))
        while ready:
            if self._events in ready:
                event = recv_monitor_message(self._events)["event"]
                is_connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                is_broken |= event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            while self._socket in ready and self._socket.poll(0):  # all: what came before it broke was handled
                numbers.append(int.from_bytes(self._socket.recv(), "little"))
            ready = dict(self._poller.poll(0))
        return _Heard(numbers, is_connected, is_broken)

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0)
