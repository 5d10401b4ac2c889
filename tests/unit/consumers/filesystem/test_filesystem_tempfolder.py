"""Files in the making: a process has a folder of its own, and what dead processes left goes away."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import socket
import stat
from pathlib import Path

import pytest

from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.filesystem.storage import local_store
from headgate.consumers.filesystem.storage.local_store import BLOCK_BYTES, LocalStore, TempFolder, write_file
from headgate.consumers.filesystem.storage.store import slug

HOST = slug(socket.gethostname())


def folders(root: Path) -> set[str]:
    """What lies under ``.tmp`` but for its lock."""
    return {path.name for path in (root / ".tmp").iterdir() if path.name != "lock"}


def leave(root: Path, name: str, *, locked: bool = True) -> Path:
    """What a process that was killed leaves: its folder, with a lock file that nobody locks any more."""
    folder = root / ".tmp" / name
    folder.mkdir(parents=True)
    (folder / "7").write_text("half a file")
    if locked:
        (folder / "lock").touch()
    return folder


@pytest.mark.parametrize("locked", [True, False], ids=["killed-while-writing", "killed-while-starting"])
def test_what_a_dead_process_of_this_host_left_is_removed(tmp_path: Path, locked: bool) -> None:
    left = leave(tmp_path, f"{HOST}.1.0123abcd", locked=locked)

    temp = TempFolder(tmp_path)

    assert not left.exists()
    temp.close()
    assert folders(tmp_path) == set()


@pytest.mark.parametrize("name", ["other-host.1.0123abcd", f"{HOST}.1.xyz", f"{HOST}.0123abcd", "notes"])
def test_what_may_be_somebody_else_s_is_left_alone(tmp_path: Path, name: str) -> None:
    left = leave(tmp_path, name)

    TempFolder(tmp_path).close()

    assert (left / "7").read_text() == "half a file"


def test_a_process_that_lives_keeps_its_files(tmp_path: Path) -> None:
    living = TempFolder(tmp_path)
    path = living.new_path()
    path.write_text("half a file")

    TempFolder(tmp_path).close()

    assert path.read_text() == "half a file"
    assert living.new_path() != path
    living.close()
    living.close()
    assert folders(tmp_path) == set()


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = leave(tmp_path, f"{HOST}.1.0123abcd")
    monkeypatch.setattr(fcntl, "flock", fail)

    temp = TempFolder(tmp_path)

    assert left.exists()
    temp.new_path().write_text("half a file")
    temp.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("was_there", [False, True], ids=["new", "made-by-an-earlier-version"])
def test_nobody_else_may_lock(tmp_path: Path, was_there: bool) -> None:
    parent = tmp_path / ".tmp"
    if was_there:
        parent.mkdir(mode=0o755)
        (parent / "lock").touch(mode=0o644)

    temp = TempFolder(tmp_path)

    assert (mode(parent), mode(parent / "lock")) == (0o700, 0o600)
    assert mode(temp.new_path().parent) == 0o700
    temp.close()


def test_a_lock_that_somebody_holds_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_store, "LOCK_TIMEOUT_S", 0.05)
    TempFolder(tmp_path).close()
    with (tmp_path / ".tmp" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)

        with pytest.raises(ConfigError, match=r"held the lock .*\.tmp/lock for 0\.05 s.*fuser -v .*another root"):
            LocalStore(tmp_path, fsync=False, numbering=False)

    LocalStore(tmp_path, fsync=False, numbering=False).close()


def test_a_start_waits_for_another_that_is_done_in_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TempFolder(tmp_path).close()
    held = (tmp_path / ".tmp" / "lock").open()
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(local_store.time, "sleep", lambda seconds: held.close())

    TempFolder(tmp_path).close()

    assert held.closed


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "lock").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic link"):
        TempFolder(tmp_path)

    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_was_cleaned_away_is_made_again(tmp_path: Path) -> None:
    temp = TempFolder(tmp_path)
    shutil.rmtree(temp.new_path().parent)

    temp.new_path().write_text("half a file")

    temp.close()
    assert folders(tmp_path) == set()


def test_a_root_without_temporary_folder_is_not_the_one_that_was_opened(tmp_path: Path) -> None:
    temp = TempFolder(tmp_path)
    shutil.rmtree(tmp_path / ".tmp")

    with pytest.raises(ConsumerError, match="is gone or is not mounted"):
        temp.new_path()

    temp.close()


LONG = 2 * BLOCK_BYTES + 12345


def pieces(num_bytes: int, length: int) -> list[memoryview]:
    """Views of random bytes, `length` each but for the last."""
    whole = memoryview(random.Random(num_bytes).randbytes(num_bytes))
    return [whole[start : start + length] for start in range(0, num_bytes, length)]


def flags_while_writing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each write went past the page cache, as they come."""
    found: list[bool] = []
    write = os.pwritev

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        found.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return found


@pytest.mark.parametrize(
    ("num_bytes", "length"),
    [(BLOCK_BYTES, BLOCK_BYTES), (BLOCK_BYTES + 1, 5120), (LONG, 999_983), (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)],
)
def test_long_files_that_are_synced_hold_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, length: int
) -> None:
    monkeypatch.setattr(local_store, "_is_on_disk", lambda file: True)  # also where this test runs in memory
    views = pieces(num_bytes, length)
    assert write_file(tmp_path / "long", [views[0][:0], *views], fsync=True) == num_bytes
    assert (tmp_path / "long").read_bytes() == b"".join(views)


def test_long_files_go_past_the_page_cache_if_they_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_direct = flags_while_writing(monkeypatch)
    write_file(tmp_path / "short", pieces(BLOCK_BYTES - 1, 5120), fsync=True)
    write_file(tmp_path / "unsynced", pieces(LONG, 5120), fsync=False)
    assert not any(is_direct)
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("this folder is on no disk")
    is_direct.clear()
    write_file(tmp_path / "long", pieces(LONG, 5120), fsync=True)
    assert len(is_direct) == 3
    assert all(is_direct)


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_a_file_system_without_direct_writes_gets_long_files_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    change, write = fcntl.fcntl, os.pwritev
    is_direct = dict[int, bool]()

    def refuse(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            is_direct[file] = bool(argument & os.O_DIRECT)
            if is_direct[file] and refused == "flag":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return change(file, command, argument)

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct[file] and refused == "write":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(file, buffers, offset)

    monkeypatch.setattr(local_store, "_is_on_disk", lambda file: True)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "pwritev", pwritev)
    views = pieces(LONG, 5120)
    assert write_file(tmp_path / "long", views, fsync=True) == LONG
    assert (tmp_path / "long").read_bytes() == b"".join(views)


def test_a_disk_that_is_full_in_the_middle_of_a_long_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, buffers, offset)

    monkeypatch.setattr(local_store, "_is_on_disk", lambda file: True)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "long", pieces(LONG, 5120), fsync=True)
