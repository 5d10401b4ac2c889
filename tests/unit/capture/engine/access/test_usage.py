"""Counts of what keys capture: quotas, days, several processes, and requests whose end nobody tells."""

from __future__ import annotations

import gc
import os
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.access import caller as usage_module
from headgate.capture.engine.access.access_key import AccessKey, KeyLimits, digest_of
from headgate.capture.engine.access.caller import Usage
from headgate.capture.schema.errors import ConfigError, QuotaError, UncountedError


def key(name: str = "alice", **limits: int) -> AccessKey:
    return AccessKey(name=name, sha256=digest_of(name), roles=("capture",), limits=KeyLimits(**limits))


@pytest.fixture(params=["memory", "file"])
def usage(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    counts = Usage(tmp_path / "usage.sqlite" if request.param == "file" else None)
    yield counts
    counts.close()


def test_a_day_has_so_many_bytes_and_what_was_not_captured_is_given_back(usage: Usage) -> None:
    alice, bob = key(max_bytes_per_day=1000), key("bob", max_bytes_per_day=1000)
    charge = usage.charge(alice, 900, "capture.files")
    assert charge is not None

    with pytest.raises(QuotaError, match="has used 900 of its 1000 bytes today") as raised:
        usage.charge(alice, 101, "capture.files")
    assert raised.value.field == "capture.files"
    assert raised.value.retry_after_s is not None
    assert 0 < raised.value.retry_after_s <= 86401
    usage.check(bob, 1000, "capture.files")

    charge.settle(300)
    charge.settle(0)  # a second time says nothing
    assert usage.used("alice") == (300, 1, 0)
    assert usage.charge(alice, 700, "capture.files") is not None
    with pytest.raises(QuotaError, match="max_bytes_per_day"):
        usage.check(alice, 1, "capture.files")


def test_requests_of_a_day_and_at_a_time(usage: Usage) -> None:
    alice = key(max_requests_per_day=3, max_concurrent_requests=2)
    first, second = (usage.charge(alice, 10, "capture.files") for _ in range(2))

    with pytest.raises(QuotaError, match="2 captures under way, and may have 2") as raised:
        usage.charge(alice, 10, "capture.files")
    assert raised.value.retry_after_s is None

    assert first is not None
    assert second is not None
    first.settle(10)
    third = usage.charge(alice, 10, "capture.files")
    assert third is not None
    third.settle(10)
    second.settle(10)
    with pytest.raises(QuotaError, match="used 3 of its 3 requests today"):
        usage.charge(alice, 10, "capture.files")


def test_a_key_without_such_limits_is_not_counted(usage: Usage) -> None:
    assert usage.charge(key(max_request_bytes=10), 10**12, "capture.files") is None
    assert usage.used("alice") == (0, 0, 0)


def test_the_next_day_begins_anew(usage: Usage, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = key(max_requests_per_day=1)
    evening = usage.charge(alice, 10, "capture.files")

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2999, 1, 1, 23, 59, 30, tzinfo=timezone.utc)

    monkeypatch.setattr(usage_module, "datetime", Later)
    assert usage.charge(alice, 5, "capture.files") is not None
    with pytest.raises(QuotaError, match="2999-01-02T00:00:00Z") as raised:
        usage.charge(alice, 5, "capture.files")
    assert raised.value.retry_after_s == 31

    assert evening is not None
    evening.settle(3)  # counts for its own day
    assert usage.used("alice")[:2] == (5, 1)


def test_processes_share_a_file_and_one_that_was_killed_leaves_none_under_way(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    alice = key(max_concurrent_requests=2, max_bytes_per_day=1000)
    program = (
        "import os, signal; from tests.unit.capture.engine.access.test_usage import key; from pathlib import Path\n"
        "from headgate.capture.engine.access.caller import Usage\n"
        f"Usage(Path({str(path)!r})).charge(key(max_concurrent_requests=2), 400, 'capture.files')\n"
        "print('charged', flush=True); input()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "charged\n"
    usage = Usage(path)

    assert usage.used("alice") == (400, 1, 1)
    assert usage.charge(alice, 100, "capture.files") is not None
    with pytest.raises(QuotaError, match="2 captures under way"):
        usage.check(alice, 0, "capture.files")
    other.kill()
    other.wait()
    usage.check(alice, 0, "capture.files")
    assert usage.used("alice") == (500, 2, 1)
    with pytest.raises(QuotaError, match="used 500 of its 1000"):
        usage.check(alice, 501, "capture.files")
    other.stdin.close()
    other.stdout.close()
    usage.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_servers_that_start_at_once_open_a_new_file_together(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headgate.capture.engine.access.caller import Usage\n"
        "kept = []; print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    try: kept.append(Usage(Path(line.strip()))); print('open', flush=True)\n"
        "    except Exception as error: print(error, flush=True)\n"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with ExitStack() as stack:
        servers = [stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) for _ in range(4)]
        found = {server.stdout.readline() for server in servers if server.stdout}
        for number in range(50):
            for server in servers:
                assert server.stdin is not None
                server.stdin.write(f"{tmp_path / f'{number}.sqlite'}\n")
                server.stdin.flush()
            found |= {server.stdout.readline() for server in servers if server.stdout}

    assert found == {"ready\n", "open\n"}


def test_a_charge_may_be_settled_while_the_same_thread_counts(usage: Usage) -> None:
    """As garbage collection does, which runs wherever memory is taken."""
    alice = key(max_bytes_per_day=1000)
    charge = usage.charge(alice, 900, "capture.files")
    assert charge is not None

    with usage._changing("capture.files"):
        charge.settle(0)
        gc.collect()

    usage.check(alice, 1000, "capture.files")


def test_a_file_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and quite long enough to be taken for one" * 100)
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")

    for name in ("text", "link", "missing/usage"):
        with pytest.raises(ConfigError, match="usage file"):
            Usage(tmp_path / name)


def test_a_file_whose_damaged_text_sqlite_quotes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    Usage(path).close()
    damaged = path.read_bytes()
    assert b"tabledaysdays" in damaged
    path.write_bytes(
        damaged.replace(b"tabledaysdays", b"table\x85aysdays").replace(b"CREATE TABLE days", b"CREATE TABLE d")
    )

    with pytest.raises(ConfigError, match="the file is damaged"):
        Usage(path)


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of counts, and a program that holds it for as long as its transaction lasts."""
    monkeypatch.setattr(usage_module, "BUSY_S", 0.0)
    path = tmp_path / "usage.sqlite"
    counts = Usage(path)
    other = sqlite3.connect(path, isolation_level=None)
    yield counts, other
    other.close()
    counts.close()


def test_a_capture_that_ends_while_the_file_cannot_be_written_is_taken_off_by_the_next(locked: Any) -> None:
    usage, other = locked
    alice = key(max_concurrent_requests=1, max_bytes_per_day=1000)
    charge = usage.charge(alice, 900, "capture.files")
    other.execute("BEGIN IMMEDIATE")
    charge.settle(300)
    assert usage.used("alice") == (900, 1, 1)

    with pytest.raises(UncountedError, match=r"usage file usage\.sqlite: database is locked.* try again") as raised:
        usage.charge(alice, 700, "capture.files")
    assert (raised.value.field, raised.value.status, raised.value.retry_after_s) == ("capture.files", 503, 1)
    other.execute("ROLLBACK")

    assert usage.charge(alice, 700, "capture.files") is not None
    assert usage.used("alice") == (1000, 2, 1)


def test_what_a_full_disk_lets_nobody_count_is_a_503_and_not_counted(tmp_path: Path) -> None:
    usage = Usage(tmp_path / "usage.sqlite")
    (pages,) = usage._file.execute("PRAGMA page_count").fetchone()
    usage._file.execute(f"PRAGMA max_page_count = {pages}")
    refused: dict[str, UncountedError] = {}
    for number in range(200):  # a page of names is soon full
        try:
            usage.charge(key(f"{number:064}", max_requests_per_day=1), 1, "capture.files")
        except UncountedError as error:
            refused[f"{number:064}"] = error

    assert refused
    for name, error in refused.items():
        assert "database or disk is full" in str(error)
        assert usage.used(name) == (0, 0, 0)
    usage._file.execute("PRAGMA max_page_count = 1000000")
    assert all(usage.charge(key(name, max_requests_per_day=1), 1, "capture.files") for name in refused)
    usage.close()


def test_half_of_a_settlement_is_none(tmp_path: Path) -> None:
    usage = Usage(tmp_path / "usage.sqlite")
    charge = usage.charge(key(max_concurrent_requests=1), 900, "capture.files")
    assert charge is not None
    usage._file.execute("CREATE TEMP TRIGGER stop BEFORE UPDATE ON running BEGIN SELECT RAISE(ABORT, 'no'); END")
    charge.settle(300)
    assert usage.used("alice") == (900, 1, 1)

    usage._file.execute("DROP TRIGGER stop")
    usage.check(key(max_concurrent_requests=1), 0, "capture.files")

    assert usage.used("alice") == (300, 1, 0)
    usage.close()
