"""Actions on their way from consumers to the engine core that they act in, wherever on this host the consumers live.

The engine core takes what has come between two steps; what it has not taken fills the window of its senders.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import zmq

from headgate.capture.links.hub import PREFIX, SOCKET, sweep
from headgate.capture.links.messages import Action, MalformedMessage, decode_frames, encode
from headgate.capture.links.peer import Channel, Endpoint, Inbox
from headgate.capture.schema.consumer import (
    MAX_BYTES,
    MAX_SUBMITTED,
    ActionTarget,
    NoActions,
    Submitted,
    encode_action,
)
from headgate.capture.schema.errors import ConsumerError, UnsupportedError


def actions_address(instance_id: str, engine: int = 0) -> str:
    """Return the address of the inbox of an engine core, by the id of its engine and its index there."""
    return f"ipc://{tempfile.gettempdir()}/{PREFIX}core-{instance_id}-{engine}/{SOCKET}"


def sink_of(target: ActionTarget, instance: str) -> ActionSender | NoActions:
    """Return the sink of a consumer, by its instance name."""
    if target.address is None:
        return NoActions(target.refusal)
    return ActionSender(target.address, instance)


class ActionSender:
    """Implements `ActionSink` for a consumer; the first action opens the connection, in a forked child anew.

    Args:
        address: Of an `ActionInbox`.
        instance: Name of the consumer.
    """

    def __init__(self, address: str, instance: str) -> None:
        self._address = address
        self._instance = instance
        self._channel: Channel | None = None
        self._pid = 0
        self._num_dropped = 0
        self._lock = threading.Lock()

    def submit(self, action: object) -> bool:
        """See `ActionSink`."""
        encoded = encode_action(action)
        with self._lock:
            channel = self._opened()
            action = Action(consumer=self._instance, encoded=encoded, num_dropped=self._num_dropped)
            if channel is not None and channel.send([encode(action)], timeout_s=0):
                self._num_dropped = 0
                return True
            self._num_dropped += 1
            return False

    def close(self, timeout_s: float) -> None:
        """Let what was submitted arrive, for a second at most; needed where a process skips its own finalizers."""
        with self._lock:
            if self._channel is not None:
                _close_channel(self._channel, self._pid, min(timeout_s, _CLOSE_S))

    def _opened(self) -> Channel | None:
        """Return the channel; None as long as no process listens."""
        if self._channel is None or self._pid != os.getpid():
            folder = Path(self._address.removeprefix("ipc://")).parent
            if not folder.exists():
                return None
            about = folder.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ConsumerError(
                    f"steering.submit: {folder} is not this user's alone: it was not the engine's doing"
                )
            self._pid = os.getpid()
            channel = self._channel = Channel(
                zmq.Context.instance(),
                Endpoint(self._address),
                _SHARE * MAX_BYTES,
                window_messages=_SHARE,
                loss_message="The engine core at %s %s: actions of consumers are lost",
            )
            weakref.finalize(self, _close_channel, channel, self._pid, _CLOSE_S)
        return self._channel


def _close_channel(channel: Channel, pid: int, timeout_s: float) -> None:
    if os.getpid() == pid:  # the sockets of a forked child's parent are not its own
        channel.close(timeout_s)


class _Queue:
    """Actions that have come; a thread that puts waits for room, which closing ends."""

    def __init__(self) -> None:
        self._waiting: list[Submitted] = []
        self._changed = threading.Condition()
        self._is_closing = False

    def put(self, frames: Sequence[zmq.Frame]) -> None:
        """Take a message in, on the inbox's thread; it is acknowledged after that."""
        message = decode_frames(frames)
        if not isinstance(message, Action):
            raise MalformedMessage(f"{type(message).__name__} is not for an engine core")
        submitted = Submitted(message.consumer, message.encoded, message.num_dropped)
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < _SHARE or self._is_closing)
            self._waiting.append(submitted)
            self._changed.notify_all()

    def take(self) -> list[Submitted]:
        """Return all, and make room."""
        if not self._waiting:
            return []
        with self._changed:
            found, self._waiting = self._waiting, []
            self._changed.notify_all()
        return found

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting), timeout_s)

    def close(self) -> None:
        """Wake every waiting thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()


class ActionInbox:
    """The inbox of an engine core, in a private folder. The engine thread takes; a thread of its own reads.

    Args:
        address: As `actions_address` made it.

    Raises:
        UnsupportedError: If the folder is there already, or the socket cannot be made.
    """

    def __init__(self, address: str) -> None:
        self._queue = _Queue()
        folder = Path(address.removeprefix("ipc://")).parent
        sweep(str(folder.parent))
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise UnsupportedError(f"the inbox of consumers' actions cannot be made: {error}") from error
        try:
            # The thread has the queue, and not this object: it ends with it.
            self._inbox = Inbox(address, self._queue.put, name="headgate-actions")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._close = weakref.finalize(self, _close, self._queue, self._inbox, folder, os.getpid())

    @property
    def num_malformed(self) -> int:
        """Messages that could not be read."""
        return self._inbox.malformed

    @property
    def num_waiting(self) -> int:
        """Actions that have come and were not taken."""
        return len(self._queue)

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to take; False if nothing came in `timeout_s` seconds."""
        return self._queue.wait(timeout_s)

    def take(self) -> list[Submitted]:
        """Return the actions that have come, in their order."""
        return self._queue.take()

    def close(self) -> None:
        """Stop listening, and remove the folder; idempotent."""
        self._close()


def _close(queue: _Queue, inbox: Inbox, folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # no forked child
        queue.close()
        inbox.close(_CLOSE_S)
        shutil.rmtree(folder, ignore_errors=True)


_CLOSE_S = 1.0
"""Seconds that what was sent gets to arrive, and what is being read to be put down."""
_SHARE = MAX_SUBMITTED // 2
"""How many of a consumer's actions are on their way, and how many have come and wait."""
