"""Threads that bring files from the spool to an object store, and try again for as long as it takes.

Files wait in the spool on this machine, so that nothing is lost while the store is down or when a process dies.
``{spool}/{root's name}/{host}.{pid}.{token}`` is a process's own folder, in the form of a root, and locked as long as
the process lives. A process that starts takes over the folders of processes that are gone.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from headgate.capture.monitoring.stats import Figure
from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.filesystem.storage.local_store import Lock, exclusively, open_lock, try_lock
from headgate.consumers.filesystem.storage.object_store import ObjectStore
from headgate.consumers.filesystem.storage.store import TAKEN, numbered, slug

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_SHARD_FOLDER = "_shards"


@dataclass(frozen=True)
class UploadUnit:
    """A file, or a folder that belongs together, and its place below the root.

    Attributes:
        folder: The process's folder that it lies in.
        names: Its tag, the folders below that, and its own name.
    """

    folder: Path
    names: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.folder.joinpath(*self.names)

    def files(self) -> list[str]:
        """Names of the files of a folder in the order of their upload: files that vouch for others come last."""
        return sorted((path.name for path in self.path.iterdir() if not path.name.startswith(".")), key=_rank)

    def num_bytes(self) -> int:
        """Bytes of its files."""
        files = self.path.iterdir() if self.path.is_dir() else (self.path,)
        return sum(file.stat().st_size for file in files)

    def remove(self) -> None:
        """Remove it: it vanishes at once, whole. One that is gone already is no error."""
        gone = self.folder / f".{secrets.token_hex(6)}"
        with suppress(FileNotFoundError):
            self.path.rename(gone)
            if gone.is_dir():
                shutil.rmtree(gone)
            else:
                gone.unlink()


def _rank(name: str) -> tuple[int, str]:
    """A shard's description, data, the descriptions of data, and the index."""
    return (0 if name == "shard.json" else {".json": 2, ".jsonl": 3}.get(Path(name).suffix, 1)), name


class SpoolFolder:
    """A process's own folder of the spool, and the folders that it took over.

    Attributes:
        parent: Holds the folders of all processes that write to the same root.
        path: The process's own.
        left: Files that processes which are gone left in theirs.

    Args:
        spool: Made if it does not exist, for this user alone.
        url: The root that the files are for.

    Raises:
        ConfigError: If it cannot be made or written to, is another user's, or has no locks.
    """

    def __init__(self, spool: Path, url: str) -> None:
        self.parent = spool.expanduser().absolute() / slug(url)
        self._locks: dict[Path, int] = {}
        try:
            self.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.parent = self.parent.resolve()
            self.parent.mkdir(mode=0o700, exist_ok=True)
            _check_private(self.parent)
            with exclusively(self.parent / _LOCK):
                abandoned = [path for path in sorted(self.parent.iterdir()) if path.is_dir() and self._take(path)]
                self.path = self.parent / f"{slug(socket.gethostname())}.{os.getpid()}.{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                self._take(self.path)
        except OSError as error:
            raise ConfigError(
                f"filesystem: files for {url} cannot wait in {self.parent}: {error}; set the parameter spool to a "
                "folder on a local disk"
            ) from error
        for path in abandoned:
            _remove_unfinished(path)
        self.left = [unit for path in abandoned for unit in units_of(path)]
        if self.left:
            logger.warning("%s: %d files and folders wait there; they are uploaded now", self.parent, len(self.left))

    def close(self) -> None:
        """Remove the folders that are empty, and let others take over the rest. May be called again."""
        while self._locks:
            path, lock = self._locks.popitem()
            if next(units_of(path), None) is None:
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def _take(self, folder: Path) -> bool:
        """Lock a folder; False if a process holds it."""
        lock = open_lock(folder / _LOCK)
        outcome = try_lock(lock)
        if outcome is Lock.TAKEN:
            self._locks[folder] = lock
            return True
        os.close(lock)
        if outcome is Lock.UNSUPPORTED:
            raise ConfigError(
                f"filesystem: {self.parent} is on a file system without locks, which show whose files wait there; set "
                "the parameter spool to a folder on a local disk"
            )
        return False


def default_spool() -> Path:
    """``$XDG_STATE_HOME/headgate/spool``, or the same under ``~/.local/state``."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "headgate" / "spool"


def is_waiting(parent: Path, tag: str) -> bool:
    """Whether files of `tag` wait in any process's folder of `parent`."""
    try:
        return any(unit.names[0] == tag for path in parent.iterdir() if path.is_dir() for unit in units_of(path))
    except FileNotFoundError:  # one went while they were looked at
        return True


def units_of(folder: Path) -> Iterator[UploadUnit]:
    """Find the files in a process's folder that are whole, and folders of such files."""
    for tag in _entries(folder):
        for entry in _entries(tag):
            if entry.name == _SHARD_FOLDER:
                for shard in _entries(entry):
                    yield UploadUnit(folder, (tag.name, _SHARD_FOLDER, shard.name))
            else:
                yield UploadUnit(folder, (tag.name, entry.name))


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed had begun to write, or to remove."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name != _LOCK:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"filesystem: {folder} is not a folder that this user alone may write to; remove it, or set the parameter "
            "spool to a folder of your own"
        )


Outcome = Future[dict[str, Any]]


class UploadAnswer:
    """A request's result, which is given once: when its files are uploaded, or when it has waited long enough.

    Args:
        outcome: The result.
        payload: Of the files as they lie on this machine.
        urls: Where they will lie, with the path on this machine of each.
    """

    def __init__(self, outcome: Outcome, payload: dict[str, Any], urls: list[str]) -> None:
        self._outcome = outcome
        self._payload = payload
        self._urls = urls

    def report(self, urls: list[str] | None = None) -> None:
        """Give the result: with `urls`, the files are there; without, they wait on this machine."""
        is_uploaded = urls is not None
        facts = {"paths": urls or self._urls, "uploaded": is_uploaded}
        # Whether the rows survive a power cut is the store's business once it has them.
        durable = None if is_uploaded else self._payload["durable"]
        try:
            self._outcome.set_result({**self._payload, **facts, "durable": durable})
        except InvalidStateError:
            return  # given already

    def fail(self, error: Exception) -> bool:
        """Give an error; False if the result was given already, as it must not be taken back."""
        try:
            self._outcome.set_exception(error)
        except InvalidStateError:
            return False
        return True


class Patience:
    """Gives answers once they have waited for `wait_s` seconds. Any thread may call."""

    def __init__(self, name: str, wait_s: float) -> None:
        self._wait_s = wait_s
        self._waiting: deque[tuple[float, UploadAnswer]] = deque()
        self._is_closed = False
        self._changed = threading.Condition()  # guards the two above
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, answer: UploadAnswer) -> None:
        """Let an answer wait."""
        with self._changed:
            self._waiting.append((time.monotonic() + self._wait_s, answer))
            self._changed.notify()

    def close(self) -> None:
        """Give all answers now, and wait for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (answer := self._next()) is not None:
            answer.report()

    def _next(self) -> UploadAnswer | None:
        """The next answer whose time has come; None after the last one."""
        with self._changed:
            while not self._is_closed:
                left_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._waiting.popleft()[1] if self._waiting else None


FIRST_PAUSE_S = 0.5
"""After the first failure of a file; each further one doubles it."""
MAX_PAUSE_S = 30.0
"""Between two attempts to upload a file: when a store is back, all files are on their way within this time."""
_NUMBERED = re.compile(r"(.+)~(\d{1,9})")


@dataclass(order=True)
class _Task:
    """A unit that waits for its next attempt at `due`, on the monotonic clock."""

    due: float
    number: int
    unit: UploadUnit = field(compare=False)
    answer: UploadAnswer | None = field(compare=False)
    num_bytes: int = field(compare=False)
    num_failures: int = field(default=0, compare=False)
    is_old: bool = field(default=False, compare=False)


@dataclass(slots=True)
class _Counts:
    """Numbers that an uploader counts; see `_FIGURES`."""

    done: int = 0
    bytes: int = 0
    failures: int = 0
    retried: int = 0
    waiting_bytes: int = 0


_FIGURES: tuple[tuple[str, Literal["counter", "gauge"], str], ...] = (
    ("done", "counter", "Files and folders that left the spool: uploaded, or refused since their key was taken."),
    ("bytes", "counter", "Bytes of them."),
    ("failures", "counter", "Attempts to upload that failed; each is made again."),
    ("retried", "counter", "Files and folders that left the spool after failed attempts."),
    ("waiting", "gauge", "Files and folders in the spool that are whole and wait for the object store."),
    ("waiting_bytes", "gauge", "Bytes of them."),
    ("failing", "gauge", "Whether the last attempt to upload failed."),
)


class Uploader:
    """Uploads units, then removes them from the spool. Any thread may call.

    A unit whose place in the store is taken gets the next number if `numbering` is on, or if no request awaits it any
    more: its request has had its result. Otherwise its request ends with an error and the unit is removed.

    Attributes:
        is_failing: Whether the last attempt failed.

    Args:
        name: Of the threads.
        store: Where the units go.
        threads: Units uploaded at a time.
        numbering: Whether a name that is taken is answered with the next number instead of an error.
        removed: Called with the bytes and the number of files of a unit that has left the spool.
        ended: Called once, when it is closed and nothing is uploaded any more.
    """

    def __init__(
        self,
        name: str,
        store: ObjectStore,
        *,
        threads: int,
        numbering: bool,
        removed: Callable[[int, int], None],
        ended: Callable[[], None],
    ) -> None:
        self.is_failing = False
        self._store = store
        self._numbering = numbering
        self._removed = removed
        self._ended = ended
        self._tasks: list[_Task] = []
        self._num_running = 0
        self._num_working = threads
        self._is_closed = False
        self._numbers = itertools.count()
        self._counts = _Counts()
        self._changed = threading.Condition()  # guards the six above
        # Daemons: a store that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, unit: UploadUnit, answer: UploadAnswer | None, *, is_old: bool = False) -> None:
        """Upload a unit.

        Args:
            unit: One that is whole and does not change any more.
            answer: Set when it is uploaded; None if no request waits.
            is_old: An earlier process may have begun to upload it.
        """
        num_bytes = _size_of(unit)
        with self._changed:
            self._counts.waiting_bytes += num_bytes
            task = _Task(time.monotonic(), next(self._numbers), unit, answer, num_bytes, is_old=is_old)
            heapq.heappush(self._tasks, task)
            self._changed.notify_all()

    def figures(self) -> tuple[Figure, ...]:
        """Return what waits and what was uploaded, for ``/metrics``."""
        with self._changed:
            values = {**asdict(self._counts), "waiting": len(self._tasks) + self._num_running}
            values["failing"] = self.is_failing
        return tuple(
            Figure(name=f"upload_{name}", kind=kind, about=about, value=values[name]) for name, kind, about in _FIGURES
        )

    def close(self, timeout_s: float) -> int:
        """Upload units for up to `timeout_s` seconds; return how many are left. May be called again.

        Uploads that run then go on to their end.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks and not self._num_running, timeout_s)
            self._is_closed = True
            self._changed.notify_all()
            left, is_idle = len(self._tasks) + self._num_running, not self._num_running
        for thread in self._threads:
            thread.join(None if is_idle else max(deadline - time.monotonic(), 0.0))
        return left

    def _run(self) -> None:
        while (task := self._next()) is not None:
            self._attempt(task)
        with self._changed:
            self._num_working -= 1
            is_last = not self._num_working
        if is_last:
            self._ended()

    def _attempt(self, task: _Task) -> None:
        try:
            self._upload(task)
        except Exception as error:  # noqa: BLE001  (each store has errors of its own; none may lose a file)
            self._try_again(task, error)
        else:
            self._note_success(task)
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        """The next task that is due; None once closed."""
        with self._changed:
            while not self._is_closed:
                left_s = self._tasks[0].due - time.monotonic() if self._tasks else None
                if left_s is not None and left_s <= 0:
                    self._num_running += 1
                    return heapq.heappop(self._tasks)
                self._changed.wait(left_s)
            return None

    def _upload(self, task: _Task) -> None:
        unit, answer = task.unit, task.answer
        if not unit.path.exists():
            logger.error("%s was removed by another process before it was uploaded", unit.path)
            if answer is not None:
                answer.fail(ConsumerError(f"{unit.path} was removed by another process before it was uploaded"))
            return
        for key in _keys(self._store.root, unit):
            urls = self._put(task, key)
            if urls is not None:
                self._remove(unit)  # first: who has the result may send the same name again
                if answer is not None:
                    answer.report(urls)
                return
            if self._numbering:
                continue
            url = self._store.url(key)
            if answer is not None and answer.fail(_taken(url)):
                self._remove(unit)
                return
            # Its request has had a result, which cannot be taken back.
            logger.warning("%s exists and is not overwritten; %s is uploaded under the next number", url, unit.path)

    def _put(self, task: _Task, key: str) -> list[str] | None:
        """Upload a unit under `key`; None if that is taken, else where its files are."""
        unit = task.unit
        if unit.path.is_dir():
            files = {f"{key}/{name}": unit.path / name for name in unit.files()}
            there = {f"{key}/{name}" for name in self._store.names(key)}
            if not all(place in files and self._store.holds(files[place], place) for place in there):
                return None
        else:
            files, there = {key: unit.path}, set()
        for place, path in files.items():
            if place in there:
                continue
            if task.is_old or task.num_failures > 0:
                self._store.abort_unfinished(path, place)
            if not self._store.put(path, place):
                return None
        return [self._store.url(place) for place in files]

    def _remove(self, unit: UploadUnit) -> None:
        num_bytes, num_files = unit.num_bytes(), len(unit.files()) if unit.path.is_dir() else 1
        unit.remove()
        self._removed(num_bytes, num_files)

    def _try_again(self, task: _Task, error: Exception) -> None:
        pause_s = min(FIRST_PAUSE_S * 2 ** min(task.num_failures, 30), MAX_PAUSE_S)
        task.num_failures += 1
        # Spread, so that the servers of a store that was down do not come back at one moment.
        task.due = time.monotonic() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        with self._changed:
            heapq.heappush(self._tasks, task)
            self._counts.failures += 1
            num_waiting, was_failing, self.is_failing = len(self._tasks), self.is_failing, True
        level = logging.DEBUG if was_failing else logging.WARNING
        logger.log(
            level,
            "%s takes no files, %d wait in %s until it does: %s: %s",
            *(self._store.url(self._store.root), num_waiting, task.unit.folder, type(error).__name__, error),
        )

    def _note_success(self, task: _Task) -> None:
        with self._changed:
            self._counts.done += 1
            self._counts.bytes += task.num_bytes
            self._counts.retried += task.num_failures > 0
            self._counts.waiting_bytes -= task.num_bytes
            was_failing, self.is_failing = self.is_failing, False
        if was_failing:
            logger.warning("%s takes files again", self._store.url(self._store.root))


def _size_of(unit: UploadUnit) -> int:
    """Bytes of a unit; 0 if it is gone, which its upload reports."""
    try:
        return unit.num_bytes()
    except OSError:
        return 0


def _keys(root: str, unit: UploadUnit) -> Iterator[str]:
    """Keys for a unit: its own name's, then those with the numbers that follow."""
    name = unit.names[-1]
    suffix = "" if unit.path.is_dir() else PurePosixPath(name).suffix
    stem = name.removesuffix(suffix)
    match = _NUMBERED.fullmatch(stem)
    stem, first = (match[1], int(match[2])) if match else (stem, 1)
    for count in itertools.count(first):
        yield "/".join((root, *unit.names[:-1], f"{numbered(stem, count)}{suffix}"))


def _taken(url: str) -> ConsumerError:
    return ConsumerError(f"{url} {TAKEN}")
