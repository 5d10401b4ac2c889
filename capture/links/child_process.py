"""One end of the socket to a process that is started here: whole messages, in order, without waiting to send."""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

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


def start_module(module: str, settings: object, *fds: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start ``python -m module``, with the numbers of its end of a socket and of open files as arguments.

    Args:
        module: Its name; it is found as here.
        settings: Its first message, pickled.
        fds: Files that it gets.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    numbers = (theirs.fileno(), *fds)
    command = [sys.executable, "-m", module, *map(str, numbers)]
    # Threads that worked together would wait for the next work in a loop, which takes a processor each for 5 ms.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        child = subprocess.Popen(  # noqa: S603  (this very Python, with numbers)
            command, pass_fds=numbers, env=environment, stdin=subprocess.DEVNULL
        )
    connection = Connection(ours)
    connection.send(pickle.dumps(settings))
    return connection, child


def watch_child(process: int, connection: Connection) -> None:
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


def watch_parent(end: Callable[[], object]) -> None:
    """Call `end` once the process that has started this one is gone, on a thread that waits for that."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end()

    threading.Thread(target=watch, name="headgate-parent", daemon=True).start()
