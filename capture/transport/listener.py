"""The place where a front end listens: a socket in a private folder, and everything that opens and closes with it.

An `Inbox` is the receiving end of one-way connections over ZMQ: a bound address and the thread that reads it.
`headgate.capture.transport.channel` is the other end. What a sender has numbered is handled once and in order, also
when its connection broke and what was not acknowledged came again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator

from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.transport.channel import HEARTBEAT_S, NUMBER_BYTES, REFUSED, SESSION_BYTES, SILENCE_S
from headgate.capture.transport.messages import MalformedMessage
from headgate.capture.transport.network import DOMAIN, IPC, FarAddress, Listening, host_id, suffix

logger = logging.getLogger("headgate")

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
        self._door: ThreadAuthenticator | None = None
        self.far_address: str | None = None
        try:
            self._bind(listening)
        except BaseException:
            self._let_nobody_in()
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
        self._door = ThreadAuthenticator(self._context)
        self._door.start()
        self._door.configure_curve_callback(DOMAIN.decode(), listening.keys)
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = 1000 * HEARTBEAT_S, 1000 * SILENCE_S
        # Options hold for addresses that are bound after them: the Unix socket stays as it is.
        self.far_address = listening.bind(self._socket)

    def _let_nobody_in(self) -> None:
        if self._door is not None:
            self._door.stop()

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
        self._let_nobody_in()
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


UNDO_TIMEOUT_S = 1.0
"""Seconds that each part gets to close when the listener could not be opened as a whole."""

PREFIX = "headgate-"
"""How the names of private folders begin."""

SOCKET = "hub"
"""Name of the listener's own socket in its folder; those of others that open with it are beside it."""

OLD_S = 60.0
"""Age from which a folder without a listener is a leftover: a new one is made before its sockets are."""

Closer: TypeAlias = Callable[[float], bool]
Handle: TypeAlias = Callable[[Sequence[zmq.Frame]], None]


class Doors:
    """The inboxes of one hub: its own, and the ones opened beside it for rows.

    Attributes:
        hub: The hub's own, open from the beginning.

    Args:
        address: Of the hub's own Unix socket.
        handle: Takes the frames of one message, on the thread of the hub's inbox.
        listening: Where all of them listen for other hosts, too.
        settings: Further ones of the hub's `Inbox`.
    """

    def __init__(self, address: str, handle: Handle, *, listening: Listening | None, **settings: Any) -> None:
        self._listening = listening
        self._rows: dict[str, Inbox] = {}
        self.hub = Inbox(address, handle, listening=listening, **settings)

    @property
    def address(self) -> str:
        """The text that requests carry; see `headgate.capture.transport.network`."""
        if self.hub.far_address is None:
            return self.hub.address
        rows = {name: inbox.far_address for name, inbox in self._rows.items() if inbox.far_address is not None}
        return str(FarAddress(host=host_id(), ipc=self.hub.address, tcp=self.hub.far_address, rows=rows))

    def rows(self, instance: str, handle: Handle, **settings: Any) -> Inbox:
        """Open the inbox of a driver-located consumer, by its instance name; see `Inbox`."""
        name = suffix(instance)
        inbox = self._rows[name] = Inbox(f"{self.hub.address}.{name}", handle, listening=self._listening, **settings)
        return inbox


Opener: TypeAlias = Callable[[Doors], Closer]


class HubListener:
    """The inbox of a hub, in a private folder, and everything that opens and closes with it. Opened once.

    Threads: any. The lock guards opening and closing.

    Args:
        parent_folder: Where the private folder is made; the system's folder for temporary files if None.
        on_failure: Called with the reason when the inbox gives up.
        listening: Where to listen for other hosts, too.
    """

    def __init__(
        self, parent_folder: str | None, on_failure: Callable[[str], None], listening: Listening | None = None
    ) -> None:
        self._parent_folder = parent_folder
        self._on_failure = on_failure
        self._listening = listening
        self._openers: list[Opener] = []
        self._of_parent: list[object] = []
        self._doors: Doors | None = None
        self._closers: list[Closer] = []
        self.reset()

    def reset(self) -> None:
        """Start closed, in a forked child, and with a new lock, since another thread may have held the old one."""
        self._lock = threading.Lock()
        if self._doors is not None:
            # Their sockets are the parent's: never closed here, nor collected.
            self._of_parent += [self._doors, *self._closers]
        self._doors = None
        self._closers = []
        self._is_closed = False

    @property
    def num_malformed(self) -> int:
        """Messages that could not be read, since it was opened."""
        doors = self._doors
        return 0 if doors is None else doors.hub.malformed

    def on_open(self, opener: Opener) -> None:
        """Call ``opener(doors)`` whenever it opens; at once, too, if it is open."""
        with self._lock:
            self._openers.append(opener)
            if self._doors is not None:
                self._closers.append(opener(self._doors))

    def open(self, handle: Handle) -> str:
        """Start listening unless it does; return the address that requests carry.

        Args:
            handle: Takes the frames of one message, on the inbox's thread.

        Raises:
            UnsupportedError: If the socket cannot be made, or if it was closed.
        """
        with self._lock:
            if self._is_closed:
                raise UnsupportedError("this front end was shut down, and takes no captures any more: start another")
            if self._doors is None:
                self._doors = self._open_doors(handle)
            return self._doors.address

    def close(self, timeout_s: float) -> bool:
        """Stop listening for good and remove the socket; False if something did not end within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            doors, closers = self._doors, self._closers
            self._doors, self._closers, self._is_closed = None, [], True
            if doors is None:
                return True
            ended = [close(max(deadline - time.monotonic(), 0)) for close in [*closers, doors.hub.close]]
            _remove_own(os.path.dirname(doors.hub.path), os.getpid())
        return all(ended)

    def _open_doors(self, handle: Handle) -> Doors:
        parent = self._parent_folder or tempfile.gettempdir()
        sweep(parent)
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # mode 0700
        remove = weakref.finalize(self, _remove_own, folder, os.getpid())
        with contextlib.ExitStack() as undo:
            undo.callback(remove)
            doors = Doors(
                f"ipc://{folder}/{SOCKET}",
                handle,
                listening=self._listening,
                name="headgate-results",
                on_failure=self._on_failure,
            )
            undo.callback(doors.hub.close, UNDO_TIMEOUT_S)
            closers = []
            for opener in self._openers:
                closers.append(opener(doors))
                undo.callback(closers[-1], UNDO_TIMEOUT_S)
            undo.pop_all()
        self._closers = closers
        return doors


def _remove_own(folder: str, pid: int) -> None:
    """Remove the private folder, unless this process is a child of the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: str) -> None:
    """Remove the private folders in `parent` of this user's processes that were killed."""
    with os.scandir(parent) as entries:
        folders = [entry.path for entry in entries if entry.name.startswith(PREFIX)]
    for folder in folders:
        with contextlib.suppress(OSError):  # another process may sweep it, too
            if _is_left_over(folder):
                shutil.rmtree(folder)


def _is_left_over(folder: str) -> bool:
    """Whether a folder is of our making, and no process listens there any more."""
    about = os.lstat(folder)
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
    if not is_own or time.time() - about.st_mtime < OLD_S:
        return False
    with os.scandir(folder) as entries:
        sockets = {entry.name: stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) for entry in entries}
    return SOCKET in sockets and all(sockets.values()) and not any(_listens(f"{folder}/{name}") for name in sockets)


def _listens(path: str) -> bool:
    """Whether a process listens at a Unix socket; one that is stopped or busy does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # its queue of connections is full
            return True
    return True
