"""Both ends of a one-way connection over ZMQ, and their addresses: a `Channel` sends, an `Inbox` receives.

An inbox acknowledges each message when it is done with it, and a channel keeps at most a window of bytes
unacknowledged. So a slow reader makes its senders wait instead of filling memory anywhere, and when either end dies,
the other notices or is not affected.

Every message is numbered. Between hosts a connection can break while both ends live: the channel makes a new one and
sends again what was not acknowledged, in order, and the inbox drops what it had read already.

Requests carry the address where their front end takes results and rows. One that only workers of the same host reach is
a Unix socket, ``ipc://PATH``. One that others reach, too, is a JSON object: each worker then takes the way that leads
there from its own host.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from headgate.capture.links.messages import Frames, MalformedMessage
from headgate.capture.links.network import DOMAIN, Listening, NetworkKeys
from headgate.capture.schema.errors import UnsupportedError

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


LOSS = "The front end at %s %s: results or rows for it are lost"


class Channel:
    """Messages to one inbox, in order, with at most `window_bytes` of them not yet acknowledged.

    Threads: any. A lock serialises them, and a `send` that waits for room holds it.

    Args:
        context: Of ZMQ.
        endpoint: Of the inbox.
        window_bytes: See above.
        window_messages: So many messages at most, too.
        loss_message: Logged when something is lost for the first time, with the address and the reason.
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
        loss_message: str = LOSS,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.lost = 0
        self._context = context
        self._endpoint = endpoint
        self._window_bytes = window_bytes
        self._window_messages = window_messages
        self._loss_message = loss_message
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
        received = self._link.receive(timeout_s)
        if received.is_connected:
            self._retry = _Retry(self._give_up_s)
        for number in received.numbers:
            self._acknowledge(number)
        if REFUSED in received.numbers:
            self._give_up("was started anew")
        elif received.is_broken:
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
            logger.warning(self._loss_message, self._endpoint.address, self._ended or "does not keep up")
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


class _Received(NamedTuple):
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

    def receive(self, timeout_s: float) -> _Received:
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
        return _Received(numbers, is_connected, is_broken)

    def close(self) -> None:
        """Close it; what was not sent is dropped."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0)


MAX_IPC_PATH = 107
"""Bytes that Linux allows for the path of a Unix socket."""


MAX_FAILURES = 10
"""Failures of an inbox's thread in a row after which it gives up: what is broken then stays so."""


MAX_SENDERS = 65_536
"""Channels whose last number is remembered; senders silent for longest are forgotten first."""


class Inbox:
    """A bound address and the thread that reads it.

    Threads: `handle` runs on the inbox's own thread, one message at a time; each message is acknowledged when
    `handle` returned, whatever came of it. Everything else may be called from anywhere.

    The thread goes on after a failure. When it fails again and again, it ends, and says so through `on_failure`.

    Attributes:
        address: Where it listens.
        path: Of its socket file.
        far_address: Where it listens for other hosts, ``tcp://IP:PORT``; None if it does not.
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
        listening: Listening | None = None,
    ) -> None:
        """Listen at `address` (``ipc://PATH``) and start the thread, called `name`.

        Args:
            address: Where.
            handle: Takes the frames of one message.
            name: Of the thread.
            watch: Called on the thread after each message, and when the time on the monotonic clock has come that
                it returned; None for "after the next message".
            on_failure: Called on the thread with the reason, when it gives up and reads no more.
            listening: Where to listen for other hosts, too.

        Raises:
            UnsupportedError: If an address cannot be bound.
        """
        self.path = address.removeprefix(IPC)
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
        self._last_numbers: OrderedDict[bytes, int] = OrderedDict()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # an acknowledgement that is dropped would close a window for good
        self._authenticator: ThreadAuthenticator | None = None
        self.far_address: str | None = None
        try:
            self._bind(listening)
        except BaseException:
            self._stop_authenticator()
            self._context.destroy(linger=0)
            raise
        self._stop_receiver, self._stop_sender = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stop_receiver.bind("inproc://stop")
        self._stop_sender.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _bind(self, listening: Listening | None) -> None:
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            raise UnsupportedError(f"cannot listen at {self.address}: {error}") from error
        if listening is None:
            return
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN.decode(), listening.keys)
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 1000 * HEARTBEAT_S, 1000 * SILENCE_S
        # Options hold for addresses that are bound after them: the Unix socket stays as it is.
        self.far_address = listening.bind(self._socket)

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()

    def close(self, timeout_s: float) -> bool:
        """Stop listening; False if the handler did not return within `timeout_s` seconds.

        The thread then ends by itself when the handler returns; closing again waits for it again.
        """
        if not self._is_closing:
            self._is_closing = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # ZMQ does not remove it
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
            except BaseException as error:  # noqa: BLE001  (without this thread no result would ever arrive)
                in_a_row += 1
                self._note_failure(error, in_a_row)
        else:
            self._socket.close(linger=0)  # workers then know that no process reads
            self._stop_receiver.recv()
        # Here and not in `close`, which may have given up waiting. No other thread uses the sockets any more.
        for one in (self._socket, self._stop_receiver, self._stop_sender):
            one.close(linger=0)
        self._stop_authenticator()
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
        session, number = _numbered(frames)
        if session is None:
            self._note_malformed("it has no number")
            return
        last = self._last_numbers.get(session, -1)
        if number <= last:  # it came again, over another connection: it was handled
            self._acknowledge(identity, last)
        elif number > last + 1:
            self._acknowledge(identity, REFUSED)
        else:
            self._last_numbers[session] = number
            self._last_numbers.move_to_end(session)
            if len(self._last_numbers) > MAX_SENDERS:
                self._last_numbers.popitem(last=False)
            self._handle_message(frames[1:])
            self._acknowledge(identity, number)

    def _acknowledge(self, identity: zmq.Frame, number: int) -> None:
        self._socket.send_multipart([identity, number.to_bytes(NUMBER_BYTES, "little")])

    def _time_left_ms(self) -> int | None:
        due = None if self._watch is None else self._watch()
        return None if due is None else max(math.ceil((due - time.monotonic()) * 1000), 0)

    def _handle_message(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            self._handle(frames)
        except MalformedMessage as error:
            self._note_malformed(error)
        except Exception:  # this thread must outlive whatever one message does
            self.malformed += 1
            logger.exception("A message at %s could not be handled", self.address)

    def _note_malformed(self, why: object) -> None:
        self.malformed += 1
        level = logging.WARNING if self.malformed == 1 else logging.DEBUG
        logger.log(level, "Ignored a malformed message at %s: %s", self.address, why)


def _numbered(frames: Sequence[zmq.Frame]) -> tuple[bytes | None, int]:
    """Return the sender's name and the message's number; no name if it has none."""
    head = frames[0].bytes if frames else b""
    if len(head) != SESSION_BYTES + NUMBER_BYTES:
        return None, 0
    return head[:SESSION_BYTES], int.from_bytes(head[SESSION_BYTES:], "little")


_HOST_ID = Path("/proc/sys/kernel/random/boot_id")


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return what distinguishes this host from others; containers and network namespaces of one host have the same.

    Raises:
        UnsupportedError: If the kernel does not provide it.
    """
    try:
        return _HOST_ID.read_text().strip()
    except OSError as error:
        raise UnsupportedError(f"this host cannot be told from others: {error}") from error


IPC = "ipc://"


class FarAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an inbox that workers on other hosts reach; `str` gives the text that requests carry.

    Attributes:
        host: `host_id` of its own.
        ipc: For workers there.
        tcp: For workers elsewhere.
        rows: TCP addresses for the rows of driver-located consumers, by `suffix`; their Unix sockets are beside `ipc`.
    """

    host: str
    ipc: str
    tcp: str
    rows: dict[str, str] = {}

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to an inbox.

    Attributes:
        address: Of ZMQ.
        keys: To connect to another host; None for a Unix socket.
    """

    address: str
    keys: NetworkKeys | None = None

    @property
    def is_far(self) -> bool:
        """Whether it leads to another host, where a connection can break and be made anew."""
        return not self.address.startswith(IPC)


def suffix(instance: str) -> str:
    """Return what the addresses of a consumer's rows have in their names, by its instance name."""
    return hashlib.blake2b(instance.encode(), digest_size=6).hexdigest()


def rows_address(reply: str, instance: str) -> str:
    """Return the address of the rows for a driver-located consumer, so that `reply` is all that a request carries.

    Raises:
        ValueError: If `reply` is none, or does not name the consumer.
    """
    if reply.startswith(IPC):
        return f"{reply}.{suffix(instance)}"
    hub, name = _parsed(reply), suffix(instance)
    if name not in hub.rows:
        raise ValueError(f"the front end at {hub.tcp} does not take rows for the consumer {instance}")
    return str(FarAddress(host=hub.host, ipc=f"{hub.ipc}.{name}", tcp=hub.rows[name]))


def endpoint_of(address: str, keys: NetworkKeys | None) -> Endpoint:
    """Return the way to an inbox from here.

    Args:
        address: As a request carries it, or `rows_address` made it.
        keys: Of the engine; None if it is on one host.

    Raises:
        ValueError: If `address` is none, or is on another host and there are no keys.
    """
    if address.startswith(IPC):
        return Endpoint(address)
    far = _parsed(address)
    # Containers of one host may have folders of their own.
    if far.host == host_id() and os.path.exists(far.ipc.removeprefix(IPC)):
        return Endpoint(far.ipc)
    if keys is None:
        raise ValueError(f"the front end at {far.tcp} is on another host, and this worker has no keys")
    return Endpoint(far.tcp, keys)


@lru_cache(maxsize=1024)
def _parsed(address: str) -> FarAddress:
    try:
        return msgspec.json.decode(address, type=FarAddress)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{address!r} is no address of a front end: {error}") from error
