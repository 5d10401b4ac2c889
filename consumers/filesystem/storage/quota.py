"""Limits of the bytes under one tag and under the whole root (parameters `max_tag_bytes` and `max_root_bytes`)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.consumer import RowBlock
from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.filesystem.storage.store import TEMP_FOLDER

FILE_BYTES = 4096
"""Counted for a file beside its bytes: what the disk spends on one."""
MEASURE_AGAIN_S = 10.0
"""Time after which a full folder is measured again: files may have been removed."""
MEASURE_SHARE = 0.01
"""Part of the time that measuring one folder may take: the larger a folder is, the more rarely."""
MAX_TAGS = 1024
"""Tags that are remembered beside those in use; others are measured anew when they are used again."""
_ROOT = ""
"""Stands for the root among the tags, which are never empty; also as the path below it."""


@dataclass(slots=True)
class _Folder:
    """A folder with a limit: its bytes, including what running requests will add."""

    num_bytes: int
    measure_at: float  # not before


@dataclass(slots=True)
class _Charge:
    """The bytes that a request is counted with, in its tag and in the root."""

    tag: str
    num_bytes: int = 0


class DiskQuota:
    """Counts the bytes under each tag and under the root: the bytes on the disk when it is first used, and what
    requests add since.

    Rows count as soon as they arrive, so that requests which run together cannot pass a limit together; once its files
    are written, a request counts with their size. Not locked: all calls but `settle` come from one thread, the
    consumer's. Other processes that write to the same root are seen when a folder is measured, and not between.

    Args:
        max_tag_bytes: Of one tag; None for no limit. At least one of the two is given.
        max_root_bytes: Of all of them; None for no limit.
        root: Holds a folder for each tag.
        measure: What counts under a folder now.
        clock: Seconds, monotonic.
        no_room: The reason that a request gets, from the tag, empty for the root, and its limit.
    """

    def __init__(
        self,
        max_tag_bytes: int | None,
        max_root_bytes: int | None,
        root: Path,
        measure: Callable[[Path], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        no_room: Callable[[str, int], str] | None = None,
    ) -> None:
        self._root = root
        self._max_tag_bytes = max_tag_bytes
        self._max_root_bytes = max_root_bytes
        self._measure = measure or bytes_below
        self._clock = clock
        self._no_room = no_room or _no_room
        self._folders: dict[str, _Folder] = {}
        self._running: dict[str, _Charge] = {}  # by request
        self._storing: dict[int, _Charge] = {}  # of requests whose files are being written, by ticket
        self._settled: deque[tuple[int, int]] = deque()  # tickets and bytes, appended by any thread
        self._removed: deque[int] = deque()  # bytes, appended by any thread
        self._refused: dict[str, str] = {}  # by request, why
        self._tickets = count()
        self._num_kept = MAX_TAGS

    def open(self) -> None:
        """Measure the root if it has a limit: before anybody waits, since it may take long."""
        if self._max_root_bytes is not None:
            self._used(_ROOT, 0, self._max_root_bytes)

    def within(self, block: RowBlock, data: npt.NDArray[np.uint8]) -> RowBlock:
        """Count a block's rows; return it without the spans for which there is no room.

        Args:
            block: Rows of several requests, whose specs have the option ``tag``.
            data: Its rows as uint8 ``[S, N, row_bytes]``.
        """
        num_sites, _, row_bytes = data.shape
        spans = tuple(
            span
            for span in block.spans
            if self.add(
                span.request.request_id,
                str(span.request.spec.options["tag"]),
                (span.stop - span.start) * num_sites * row_bytes,
            )
        )
        return block if len(spans) == len(block.spans) else replace(block, spans=spans)

    def add(self, request_id: str, tag: str, num_bytes: int) -> bool:
        """Count rows or files of a request; False once there is no room for all of them."""
        if request_id in self._refused:
            return False
        self._apply_settled()
        for name, limit in self._limits(tag):
            if self._used(name, num_bytes, limit) + num_bytes > limit:
                self.release(request_id)
                self._refused[request_id] = self._no_room(name, limit)
                return False
        self._running.setdefault(request_id, _Charge(tag)).num_bytes += num_bytes
        self._count(tag, num_bytes)
        return True

    def store(self, request_id: str) -> int:
        """Keep what an ended request is counted with until its files are written; return a ticket for `settle`.

        Raises:
            ConsumerError: If there was no room for some of it.
        """
        if (why := self._refused.pop(request_id, None)) is not None:
            raise ConsumerError(why)
        ticket = next(self._tickets)
        if (charge := self._running.pop(request_id, None)) is not None:
            self._storing[ticket] = charge
        return ticket

    def settle(self, ticket: int, num_bytes: int) -> None:
        """Count a request with what its files take: 0 if none were written. Any thread."""
        self._settled.append((ticket, num_bytes))

    def removed(self, num_bytes: int, num_files: int) -> None:
        """Stop counting files that are no longer below the root. Any thread."""
        self._removed.append(num_bytes + num_files * FILE_BYTES)

    def release(self, request_id: str) -> None:
        """Stop counting a request that failed: nothing will be stored. May be called again."""
        self._refused.pop(request_id, None)
        if (charge := self._running.pop(request_id, None)) is not None:
            self._count(charge.tag, -charge.num_bytes)

    def _limits(self, tag: str) -> Iterator[tuple[str, int]]:
        if self._max_tag_bytes is not None:
            yield tag, self._max_tag_bytes
        if self._max_root_bytes is not None:
            yield _ROOT, self._max_root_bytes

    def _count(self, tag: str, num_bytes: int) -> None:
        for name in {tag, _ROOT}:
            if (folder := self._folders.get(name)) is not None:
                folder.num_bytes += num_bytes

    def _apply_settled(self) -> None:
        while self._settled:
            ticket, num_bytes = self._settled.popleft()
            if (charge := self._storing.pop(ticket, None)) is not None:
                self._count(charge.tag, num_bytes - charge.num_bytes)
        while self._removed:
            self._count(_ROOT, -self._removed.popleft())

    def _used(self, name: str, more: int, limit: int) -> int:
        known, now = self._folders.get(name), self._clock()
        if known is None or (known.num_bytes + more > limit and now >= known.measure_at):
            counted = [*self._running.values(), *self._storing.values()]
            waiting = sum(charge.num_bytes for charge in counted if name in (_ROOT, charge.tag))
            num_bytes = self._measure(self._root / name) + waiting
            measured = self._clock()
            pause = max(MEASURE_AGAIN_S, (measured - now) / MEASURE_SHARE)
            known = self._folders[name] = _Folder(num_bytes, measured + pause)
            self._forget_old()
        return known.num_bytes

    def _forget_old(self) -> None:
        """Forget tags that no request uses, those measured first before others, once there are many."""
        if len(self._folders) <= self._num_kept:
            return
        used = {charge.tag for charge in (*self._running.values(), *self._storing.values())}
        idle = [name for name in self._folders if name not in used and name != _ROOT]
        for name in idle[: max(len(idle) - MAX_TAGS // 2, 0)]:
            del self._folders[name]
        self._num_kept = len(self._folders) + MAX_TAGS // 2


def _no_room(name: str, limit: int) -> str:
    if name == _ROOT:
        return f"the root has no room for this request: max_root_bytes is {limit}; remove files in it"
    why = f"tag {name!r} has no room for this request: max_tag_bytes is {limit}"
    return f"{why}; remove files under it, or use another tag"


def bytes_below(folder: Path) -> int:
    """Count all files in a local folder and the folders in it, 0 if there is none; those in the making are left out."""
    total = 0
    for path, names_of_folders, names in os.walk(folder):
        if TEMP_FOLDER in names_of_folders:
            names_of_folders.remove(TEMP_FOLDER)
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size + FILE_BYTES
            except FileNotFoundError:
                continue  # moved meanwhile
    return total
