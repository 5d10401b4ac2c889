"""Files in the making: a process has a folder of its own, and what dead processes left goes away."""

from __future__ import annotations

import errno
import fcntl
import shutil
import socket
from pathlib import Path

import pytest

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.filesystem.storage.store import slug
from headgate.consumers.filesystem.storage.temp_folder import TempFolder

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
