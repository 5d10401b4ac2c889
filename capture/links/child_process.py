"""Processes that are started here: their start, first message, watch, restart and end, on both sides of the socket.

The parent has a `Supervisor` for each; the child runs ``python -m headgate.capture.links PROGRAM``, see `serve`. Both
ends of the socket are a `Connection`: whole messages, in order, without waiting to send. It needs no numbers, as
those between hosts do: it breaks only when one of the processes ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headgate.capture.schema.errors import ConfigError

logger = logging.getLogger("headgate")

START_S = 300.0
"""Seconds that the start may take: imports from a slow disk, and whatever consumers or controllers do when opened."""
END_S = 5.0
"""Seconds that it may take to end by itself once its socket is shut, or it has closed everything."""
QUICK_S, MAX_PAUSE_S = 60.0, 60.0
"""One that dies sooner after its start is started again after a pause, doubled each time up to the latter."""
PARENT_POLL_S = 1.0
"""Interval at which a process looks whether its parent lives: forked children of the parent keep its socket open."""
_LENGTH_BYTES = 8


class Connection:
    """A connected Unix stream socket.

    `send` is for any thread: what the socket does not take at once is left to a thread that is started then. `receive`
    is for one thread.

    Args:
        end: The socket, in blocking mode; it is closed with this.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb", buffering=1 << 18)
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._is_broken = self._is_pumping = False

    def send(self, *messages: bytes) -> bool:
        """Send messages with one call of the system, or have them sent; False once the other end is gone."""
        pieces = [piece for each in messages for piece in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)]
        framed = memoryview(b"".join(pieces))
        with self._lock:
            if self._is_broken:
                return False
            if not self._is_pumping:
                try:
                    framed = framed[self._socket.send(framed, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    self._is_broken = True
                    return False
            if framed:
                self._unsent.append(framed)
                self._pump()
        return True

    def receive(self) -> bytes | None:
        """Wait for the next message; None when the other end is gone."""
        try:
            header = self._file.read(_LENGTH_BYTES)
            length = int.from_bytes(header, "little")
            message = self._file.read(length)
        except (OSError, ValueError):
            return None
        return message if len(header) == _LENGTH_BYTES and len(message) == length else None

    def shut(self) -> None:
        """End both directions, now; a thread in `receive` returns."""
        with self._lock:
            self._is_broken = True
            self._unsent.clear()
        with suppress(OSError):  # the other end may be faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. For the thread that receives, at its end."""
        self.shut()
        self._file.close()
        self._socket.close()

    def _pump(self) -> None:
        """Under the lock: see to it that a thread sends what is left."""
        if not self._is_pumping:
            self._is_pumping = True
            threading.Thread(target=self._send_rest, name="headgate-send", daemon=True).start()

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._is_pumping = False
                    return
                piece = self._unsent.popleft()
            try:
                self._socket.sendall(piece)
            except OSError:
                with self._lock:
                    self._is_broken, self._is_pumping = True, False
                    self._unsent.clear()
                return


class Ready(msgspec.Struct, array_like=True):
    """The first message of a child: it serves, and `content` is for its parent; or it does not, because of `error`."""

    error: str | None = None
    content: bytes = b""


class Child(Protocol):
    """A process that was started; `subprocess.Popen` is one."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status; raises `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """End it, now."""
        ...


Started = tuple[Connection, Child]


class Owner(Protocol):
    """Whom a `Supervisor` works for; called on its thread, `left` and `ended` only while it is not closed."""

    def received(self, data: bytes) -> object:
        """Take a message of the child."""
        ...

    def left(self) -> object:
        """Send nothing more: the child is gone, or ends."""
        ...

    def ended(self, how: str) -> object:
        """The child has ended, which `how` describes after its name: ``was ended by SIGKILL``."""
        ...

    def serves_again(self) -> object:
        """Another child has taken its place, and serves."""
        ...


class Supervisor:
    """One child process at a time.

    A thread waits for what the child sends; it costs nothing while that is silent. It has a reference to `owner`.

    Args:
        name: What the child is, with its article, for errors and log lines.
        start: Starts one; see `start_child`.
        owner: Takes its messages and learns of its end.
        is_restarted: Whether another child takes the place of one that ended.

    Attributes:
        content: Of the first child's `Ready`.
        child: The process.
        is_closing: Set when no child is started any more.

    Raises:
        ConfigError: If the first one cannot serve; the reason is that of its `Ready`, or how it has ended.
    """

    def __init__(self, name: str, start: Callable[[], Started], owner: Owner, *, is_restarted: bool) -> None:
        self._name = name
        self._start = start
        self._owner = owner
        self._is_restarted = is_restarted
        self.is_closing = threading.Event()
        self._is_done = threading.Event()
        self._num_quick = 0
        self.content = self._begin()
        self._thread = threading.Thread(target=self._watch, name="headgate-child-messages", daemon=True)

    def watch(self) -> None:
        """Begin to take messages: once the owner is ready for them."""
        self._thread.start()

    def send(self, *messages: bytes) -> bool:
        """See `Connection.send`."""
        return self._connection.send(*messages)

    def done(self) -> None:
        """Note that the child has said its last word: `close` need not wait for more."""
        self._is_done.set()

    def close(self, timeout_s: float = 0.0) -> None:
        """Start no child any more, and end this one.

        Args:
            timeout_s: Seconds that it gets to send what it has to send, before the socket is shut.
        """
        self.is_closing.set()
        if timeout_s:
            self._is_done.wait(timeout_s)
        self._connection.shut()
        self._end_child()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _begin(self) -> bytes:
        """Start a child, wait for its first message, and return its content."""
        self._connection, self.child = self._start()
        self._started_at = time.monotonic()
        timer = threading.Timer(START_S, self._connection.shut)
        timer.start()
        try:
            data = self._connection.receive()
        finally:
            timer.cancel()
        ready = None if data is None else _read_ready(data)
        if ready is not None and ready.error is None:
            return ready.content
        self._connection.close()
        ended = self._end_child()
        text = None if ready is None else ready.error
        raise ConfigError(text or f"{self._name} did not start: it {ended}; its log says why")

    def _watch(self) -> None:
        while True:
            while (data := self._connection.receive()) is not None:
                self._owner.received(data)
            self._connection.close()
            if self.is_closing.is_set():
                break
            self._owner.left()
            self._owner.ended(self._end_child())
            if not self._is_restarted or not self._begin_again():
                break
        self._is_done.set()

    def _begin_again(self) -> bool:
        """Start another child; False if it is closed meanwhile."""
        is_quick = time.monotonic() - self._started_at < QUICK_S
        self._num_quick = self._num_quick + 1 if is_quick else 0
        while not self.is_closing.wait(min(2.0**self._num_quick - 1, MAX_PAUSE_S)):
            try:
                self._begin()
            except (ConfigError, OSError) as error:
                self._num_quick += 1
                logger.error("%s could not be started again: %s", self._name, error)  # noqa: TRY400  (no bug)
            else:
                self._owner.serves_again()
                return True
        return False

    def _end_child(self) -> str:
        """Wait for the end of a child that has nothing more to say, and say how it ended."""
        try:
            status = self.child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            return f"said nothing more for {END_S:g} s and was killed"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"


def encode_ready(ready: Ready) -> bytes:
    """A child's first message as bytes."""
    return msgspec.msgpack.encode(ready)


def _read_ready(data: bytes) -> Ready | None:
    try:
        return msgspec.msgpack.decode(data, type=Ready)
    except msgspec.MsgspecError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """First message to a child, pickled.

    Attributes:
        label: What its log lines begin with.
        path: The parent's `sys.path`.
        log_level: Of headgate's log.
        settings: The program's own.
    """

    label: str
    path: tuple[str, ...]
    log_level: int
    settings: Any


def start_child(program: str, settings: object, *fds: int, label: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a child process that runs `program`; its connection is shut when it has ended.

    Args:
        program: A module, found as here, with a function ``serve(connection, settings, *fds)``. It sends a `Ready`.
        settings: What the function gets.
        fds: Numbers of open files that the child gets.
        label: What its log lines begin with.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    numbers = (theirs.fileno(), *fds)
    command = [sys.executable, "-m", "headgate.capture.links", program, *map(str, numbers)]
    # Threads that worked together would wait for the next work in a loop, which takes a processor each for 5 ms.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        child = subprocess.Popen(  # noqa: S603  (this very Python, with numbers)
            command, pass_fds=numbers, env=environment, stdin=subprocess.DEVNULL
        )
    connection = Connection(ours)
    start = _Start(label=label, path=tuple(sys.path), log_level=logger.getEffectiveLevel(), settings=settings)
    connection.send(pickle.dumps(start))
    _watch_child(child.pid, connection)
    return connection, child


def _watch_child(process: int, connection: Connection) -> None:
    """Shut the connection when the process at its other end is gone, though children of that keep its socket open."""
    try:
        end = os.pidfd_open(process)
    except ProcessLookupError:  # it has ended, and another thread has waited for that
        connection.shut()
        return

    def watch() -> None:
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        waiting.poll()
        os.close(end)
        connection.shut()  # what it has sent can still be received

    threading.Thread(target=watch, name="headgate-child", daemon=True).start()


def serve(program: str, end: int, *fds: int) -> None:
    """Run a program in a child process, for the parent at the other end of a socket.

    Args:
        program: See `start_child`.
        end: Number of the socket, an open file.
        fds: Likewise, for the program.
    """
    # A terminal and a process manager signal the whole group: the parent says when to end, and its end is noticed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    connection = Connection(socket.socket(fileno=end))
    if (data := connection.receive()) is None:
        return
    start: _Start = pickle.loads(data)  # noqa: S301  (from the process that has started this one)
    sys.path[:] = start.path
    logging.basicConfig(
        level=logging.WARNING,
        format=f"({start.label} pid={os.getpid()}) %(levelname)s %(asctime)s [%(name)s] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    logger.setLevel(start.log_level)
    importlib.import_module(program).serve(connection, start.settings, *fds)


def watch_parent(end: Callable[[], object]) -> None:
    """Call `end` once the process that has started this one is gone, on a thread that waits for that."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end()

    threading.Thread(target=watch, name="headgate-parent", daemon=True).start()
