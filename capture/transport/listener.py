"""The place where a front end listens: a socket in a private folder, and everything that opens and closes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.transport.addresses import FarAddress, suffix
from headgate.capture.transport.inbox import Inbox
from headgate.capture.transport.network import Listening, host_id

UNDO_TIMEOUT_S = 1.0
"""Seconds that each part gets to close when the listener could not be opened as a whole."""

PREFIX = "headgate-"
"""How the names of private folders begin."""

SOCKET = "hub"
"""Name of the listener's own socket in its folder; those of others that open with it are beside it."""

OLD_S = 60.0
"""Age from which a folder of which nobody listens is a leftover: a new one is made before its sockets are."""

Closer: TypeAlias = Callable[[float], bool]
Handle: TypeAlias = Callable[[Sequence[zmq.Frame]], None]


class Doors:
    """The inboxes of one hub: its own, and those that are opened beside it for rows.

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
        """The text that requests carry; see `headgate.capture.transport.addresses`."""
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


class Listener:
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
    """Whether a folder is of our making, and nobody listens there any more."""
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
