"""The client that sent the HTTP request at hand: whose keys it has shown, and what was counted for it.

Who asks is found once for each request, from its headers, by its `RequestClient`: `server.clients` puts one around the
whole handling of a request, before its body is received. Whatever belongs to a client (kept rows, conversations,
quotas, modules, the audit) asks that one, on the event loop. Threads that read bodies have no client, and read nothing
that belongs to one.

What each key has captured today, and captures now, is counted for all API servers of one machine in SQLite (`Usage`):
in a file that the operator names, which outlives restarts and is shared by processes, or in memory.
"""

from __future__ import annotations

import contextvars
import fcntl
import os
import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.errors import ConfigError, QuotaError, UncountedError

BUSY_S = 0.5
"""Seconds that another process may hold the file; its changes take a fraction of a millisecond."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS days (name TEXT, day TEXT, bytes INTEGER, requests INTEGER, PRIMARY KEY (name, day))",
    "CREATE TABLE IF NOT EXISTS running (process TEXT, name TEXT, requests INTEGER, PRIMARY KEY (process, name))",
)
_ADD_DAY = (
    "INSERT INTO days VALUES (:name, :day, :bytes, :requests) "
    "ON CONFLICT DO UPDATE SET bytes = bytes + :bytes, requests = requests + :requests"
)
_ADD_RUNNING = (
    "INSERT INTO running VALUES (:process, :name, :requests) ON CONFLICT DO UPDATE SET requests = requests + :requests"
)


class _UsageFile(sqlite3.Connection):
    """A connection whose errors are all `sqlite3.Error`, also where SQLite quotes damaged text of the file."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Run one statement.

        Raises:
            sqlite3.Error: If it cannot be run.
        """
        try:
            return super().execute(*args)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError("the file is damaged") from error


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Create the file if it is not there, and let no other process open it meanwhile.

    SQLite does not wait where two connections change the mode of a file at once: it says that the database is locked.
    The lock is the folder's: SQLite's own locks of the file would end with another descriptor of it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        yield
    finally:
        os.close(folder)


class Usage:
    """Counts of each key by name. Any thread.

    Args:
        path: The file, on a local disk; in memory of this process if None.

    Raises:
        ConfigError: If the file cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._process = _process_of(os.getpid()) or str(os.getpid())
        self._lock = Lock()
        self._settled: deque[tuple[Charge, int, int]] = deque()
        """Requests that are over and still counted: the holder of the lock takes them off, as soon as the file can be
        written. They are no more than were admitted, and none is admitted before they are taken off."""
        self._name = "in memory" if path is None else path.name
        self._log = SparseLog(f"headgate: usage file {path}")
        try:
            with nullcontext() if path is None else _opening(path):
                self._file = sqlite3.connect(
                    ":memory:" if path is None else path,
                    timeout=BUSY_S,
                    isolation_level=None,
                    check_same_thread=False,
                    factory=_UsageFile,
                )
                self._file.execute("PRAGMA journal_mode=WAL")
                self._file.execute("PRAGMA synchronous=NORMAL")
                for table in _TABLES:
                    self._file.execute(table)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"usage file {path}: {error}") from error

    def check(self, key: AccessKey, num_bytes: int, field: str) -> None:
        """Refuse a request that could capture `num_bytes` if a quota of its key has no room for it.

        Raises:
            QuotaError: For `field`, with what was used and when it is whole again; an `UncountedError`, if the file
                cannot be written.
        """
        if key.limits.are_counted:
            with self._changing(field):
                self._check(key, num_bytes, field)

    def charge(self, key: AccessKey, num_bytes: int, field: str) -> Charge | None:
        """Do the same, and count the request until its charge is settled; None if nothing of its key is counted."""
        if not key.limits.are_counted:
            return None
        with self._changing(field):
            self._check(key, num_bytes, field)
            day = _today()
            self._file.execute("DELETE FROM days WHERE day < ?", (day,))
            self._file.execute(_ADD_DAY, {"name": key.name, "day": day, "bytes": num_bytes, "requests": 1})
            self._file.execute(_ADD_RUNNING, {"process": self._process, "name": key.name, "requests": 1})
        return Charge(self, key.name, day, num_bytes)

    def settle(self, charge: Charge, num_bytes: int, num_requests: int) -> None:
        """Let the request of `charge` be over, which captured `num_bytes`. Never waits for another thread.

        Garbage collection may call it anywhere, also on a thread that is counting.

        Args:
            charge: Counts the request.
            num_bytes: Bytes of rows that it captured.
            num_requests: 1; 0 if it never ran.
        """
        self._settled.append((charge, num_bytes, num_requests))
        if self._lock.acquire(blocking=False):
            try:
                self._settle_all()
            except sqlite3.Error as error:
                self._log.warning(f"a capture of {charge.name!r} is over, and stays counted until this works: {error}")
            finally:
                self._lock.release()

    def _settle_all(self) -> None:
        """Take off all that are over, in order.

        Raises:
            sqlite3.Error: If the file cannot be written; the rest are taken off by the next call.
        """
        while self._settled:
            charge, num_bytes, num_requests = self._settled[0]
            day = {"name": charge.name, "day": charge.day, "bytes": num_bytes - charge.num_bytes}
            with self._transaction():
                self._file.execute(_ADD_DAY, {**day, "requests": num_requests - 1})
                self._file.execute(_ADD_RUNNING, {"process": self._process, "name": charge.name, "requests": -1})
            self._settled.popleft()

    def used(self, name: str) -> tuple[int, int, int]:
        """Bytes and requests of a key today, and its requests that run."""
        row = self._file.execute("SELECT bytes, requests FROM days WHERE name = ? AND day = ?", (name, _today()))
        num_bytes, requests = row.fetchone() or (0, 0)
        running = self._file.execute("SELECT process, requests FROM running WHERE name = ?", (name,)).fetchall()
        return num_bytes, requests, sum(count for process, count in running if self._lives(process))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check(self, key: AccessKey, num_bytes: int, field: str) -> None:
        limits = key.limits
        bytes_used, requests_used, running = self.used(key.name)
        for limit, value, used, more, unit in (
            ("max_bytes_per_day", limits.max_bytes_per_day, bytes_used, num_bytes, "bytes"),
            ("max_requests_per_day", limits.max_requests_per_day, requests_used, 1, "requests"),
        ):
            if value is not None and used + more > value:
                raise QuotaError(
                    f"the key {key.name!r} has used {used} of its {value} {unit} today ({limit}), and this could take "
                    f"{more} more; the count begins anew at {_tomorrow():%Y-%m-%dT%H:%M:%SZ}",
                    field,
                    _seconds_left(),
                )
        most = limits.max_concurrent_requests
        if most is not None and running >= most:
            raise QuotaError(
                f"the key {key.name!r} has {running} captures under way, and may have {most} "
                "(max_concurrent_requests); wait until one has ended",
                field,
                None,
            )

    def _lives(self, process: str) -> bool:
        """Whether the process that counted still runs; one that was killed could not take its requests back."""
        return process == self._process or _process_of(int(process.partition("-")[0])) == process

    @contextmanager
    def _changing(self, field: str) -> Iterator[None]:
        """Hold the file, so that no other process counts in between; what fails has changed nothing.

        Raises:
            UncountedError: For `field`, if the file cannot be read or written.
        """
        with self._lock:
            try:
                self._settle_all()
                with self._transaction():
                    yield
            except sqlite3.Error as error:
                self._log.warning(f"requests of keys with quotas are refused: {error}")
                raise UncountedError(
                    f"quotas cannot be counted now (usage file {self._name}: {error}); nothing was counted, try again",
                    field,
                    1,
                ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # of some errors SQLite itself ends the transaction
                self._file.execute("ROLLBACK")
            raise


class Charge:
    """One request that is counted.

    Args:
        usage: Counts it.
        name: Of its key.
        day: On which it was admitted, and which it counts for.
        num_bytes: The most that it could capture.
    """

    def __init__(self, usage: Usage, name: str, day: str, num_bytes: int) -> None:
        self._usage: Usage | None = usage
        self.name = name
        self.day = day
        self.num_bytes = num_bytes

    def settle(self, num_bytes: int) -> None:
        """The request is over and captured `num_bytes`; only the first call counts."""
        self._settle(num_bytes, 1)

    def cancel(self) -> None:
        """The request never ran."""
        self._settle(0, 0)

    def _settle(self, num_bytes: int, num_requests: int) -> None:
        usage, self._usage = self._usage, None
        if usage is not None:
            usage.settle(self, num_bytes, num_requests)


def _today() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


def _tomorrow() -> datetime:
    today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    return today + timedelta(days=1)


def _seconds_left() -> int:
    return int((_tomorrow() - datetime.now(timezone.utc)).total_seconds()) + 1


def _process_of(pid: int) -> str | None:
    """Name a process so that a later one of the same id has another name; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return f"{pid}-{file.read().rpartition(')')[2].split()[19]}"
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that has shown a key.

    Attributes:
        keys: The keys that it has shown, at least one. Several if it sends two, or if a text is known for two roles.
        usage: Counts what it captures.
    """

    keys: tuple[AccessKey, ...]
    usage: Usage

    @property
    def name(self) -> str:
        """The name of the client: that of its first key, whatever it asks for."""
        return self.keys[0].name

    def key_with(self, role: str) -> AccessKey | None:
        """Return its key that has a role; None if none has."""
        return next((key for key in self.keys if key.has_role(role)), None)


class RequestClient(Protocol):
    """The sender of an HTTP request to the server."""

    @property
    def caller(self) -> Caller | None:
        """The client, if it has shown a key that is known."""
        ...

    def require_role(self, role: str) -> AccessKey | None:
        """Return its key for what needs `role`; None if that needs no key.

        Raises:
            fastapi.HTTPException: With status 403, if it may not.
        """
        ...

    def owner(self, field: str) -> str | None:
        """Return the name of the client, for what is to belong to it; None if it has shown no key.

        Raises:
            UnknownKeyError: For `field`, if it has shown a key that is not known, or not any more.
        """
        ...


_client: contextvars.ContextVar[RequestClient | None] = contextvars.ContextVar("headgate_client", default=None)


def current_client() -> RequestClient | None:
    """Return who sent the HTTP request being handled; None for requests that Python code makes."""
    return _client.get()


def current_caller() -> Caller | None:
    """Return the client whose request is being handled, if it has shown a key; None for `LLM` and `AsyncLLM`."""
    client = _client.get()
    return None if client is None else client.caller


def owner_of_request(field: str) -> str | None:
    """Return the name of the client whose request is being handled; None without a key, and for Python code.

    Raises:
        UnknownKeyError: For `field`, if it has shown a key that is not known.
    """
    client = _client.get()
    return None if client is None else client.owner(field)


def serve_for(client: RequestClient) -> contextvars.Token[RequestClient | None]:
    """Make `client` the one for whom this task works, until `leave`."""
    return _client.set(client)


def leave(token: contextvars.Token[RequestClient | None]) -> None:
    """Restore the state from before `serve_for`."""
    _client.reset(token)
