"""Python imports this module first in every process of a server under chaos: faults of the machine, by a file.

``$CHAOS_CONTROL`` names a JSON file: ``clock`` is added to the wall clock, in seconds; with ``disk`` ``"full"`` nothing
can be written, named or made any more, as on a disk without room: of a write, the first half still fits.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_REFRESH_S = 0.05


class _Control:
    """The file's values, read again when they may have changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read_at = -1.0
        self._values: dict[str, Any] = {}

    def get(self, name: str, default: Any) -> Any:
        now = time.monotonic()
        if now - self._read_at > _REFRESH_S:
            self._read_at = now
            with open(self._path, encoding="utf-8") as file:
                self._values = json.load(file)
        return self._values.get(name, default)


def _shift_clock(control: _Control) -> None:
    """Move ``time.time``, ``time.time_ns`` and ``datetime``; the monotonic clock stays."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + control.get("clock", 0)
    time.time_ns = lambda: real_ns() + int(control.get("clock", 0) * 1e9)

    class Moved(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Moved:
            return cls.fromtimestamp(time.time(), tz)

    datetime.datetime = Moved  # type: ignore[misc]


def _fill_disk(control: _Control) -> None:
    """Let system calls fail that take room."""

    def is_full() -> bool:
        return bool(control.get("disk", "free") == "full")

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if is_full():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return called

    half = False
    pwritev = os.pwritev

    def written(file: int, buffers: Any, offset: int) -> int:
        nonlocal half
        if not is_full():
            return pwritev(file, buffers, offset)
        half = not half
        size = buffers[0].nbytes // 2
        if not half or not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(file, [buffers[0][:size]], offset)

    os.pwritev = written  # type: ignore[assignment]
    for name in ("link", "mkdir", "pwrite", "rename"):
        setattr(os, name, failing(getattr(os, name)))


def _name_threads() -> None:
    """Let Linux know the names of Python's threads, as newer Pythons do, so that one can see which are left."""
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def named(thread: threading.Thread) -> None:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(thread.name[:15])
        bootstrap(thread)

    threading.Thread._bootstrap_inner = named  # type: ignore[attr-defined]


if "CHAOS_CONTROL" in os.environ:
    _name_threads()
    _shift_clock(_Control(os.environ["CHAOS_CONTROL"]))
    _fill_disk(_Control(os.environ["CHAOS_CONTROL"]))
