"""Folders that stay open between files, and files that have no name before they are whole."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.feed import TIMEOUT_S
from headgate.consumers.filesystem.storage import local_store as folders_module
from headgate.consumers.filesystem.storage.local_store import MAX_KEPT, Folders, TempFolder
from tests.fakes.capturing import capturing
from tests.unit.consumers.filesystem.test_filesystem_faults import Disk, check, each_layout


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def written(folders: Folders, *names: str) -> Path:
    """Make a file in a folder, and say where it is."""
    with folders.open(*names) as folder:
        os.close(os.open("here", os.O_CREAT | os.O_EXCL, dir_fd=folder.number))
        return Path(os.readlink(f"/proc/self/fd/{folder.number}")) / "here"


@pytest.fixture
def named_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes no files without names."""
    monkeypatch.setattr(
        "headgate.consumers.filesystem.storage.local_store._UNNAMED", os.O_WRONLY | os.O_CREAT | os.O_EXCL
    )


def test_a_folder_is_walked_to_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, opened = Folders(tmp_path), []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))

    for _ in range(3):
        with folders.open("a", "b"):
            pass

    assert opened == [tmp_path, "a", "a", "b", "b"]  # twice each: the first time, it was not there
    folders.close()


def test_a_folder_that_was_moved_away_is_not_written_to(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    assert written(folders, "tag") == tmp_path / "tag" / "here"
    (tmp_path / "tag").rename(tmp_path / "archive")

    assert written(folders, "tag") == tmp_path / "tag" / "here"
    assert (tmp_path / "tag" / "here").exists()

    folders.close()


def test_neither_is_one_below_a_folder_that_was_moved_away(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    written(folders, "tag", "below")
    (tmp_path / "tag").rename(tmp_path / "archive")

    assert written(folders, "tag", "below") == tmp_path / "tag" / "below" / "here"

    folders.close()


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    written(folders, "tag")
    shutil.rmtree(tmp_path / "tag")

    with pytest.raises(FileNotFoundError), folders.open("tag", make=False):
        pass
    assert written(folders, "tag").exists()

    folders.close()


def test_a_link_in_a_folder_s_place_is_refused_though_the_folder_is_open(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    folders = Folders(root)
    written(folders, "tag")
    (root / "tag").rename(outside)
    (root / "tag").symlink_to(outside)
    (outside / "here").unlink()

    with pytest.raises(ConsumerError, match="symbolic link"):
        written(folders, "tag")
    assert list(outside.iterdir()) == []

    folders.close()


def test_few_folders_stay_open_and_none_after_closing(tmp_path: Path) -> None:
    before, folders = num_open(), Folders(tmp_path)

    for number in range(3 * MAX_KEPT):
        written(folders, f"tag{number}")
    assert num_open() <= before + MAX_KEPT
    with folders.open("tag0") as used:
        folders.close()
        os.fstat(used.number)  # still open: somebody is using it

    assert num_open() == before


def test_threads_that_share_folders_leave_none_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders_module, "MAX_KEPT", 2)  # nearly every look is a miss for somebody
    before, folders, start = num_open(), Folders(tmp_path), threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(TIMEOUT_S)
        for turn in range(200):
            name = f"tag{(number + turn) % 4}"
            with suppress(FileNotFoundError), folders.open(name) as folder:  # it may move away before it is open
                assert os.path.basename(os.readlink(f"/proc/self/fd/{folder.number}")).startswith(name)
            if number == 0 and turn % 10 == 0:
                os.rename(tmp_path / name, tmp_path / f"{name}-{turn}")

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result(TIMEOUT_S)

    assert num_open() <= before + 2
    folders.close()
    assert num_open() == before


def test_entries_of_folders_above_are_synced_once_for_each_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, synced = Folders(tmp_path), []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or real(file))
    written(folders, "a", "b")

    folders.sync("a", "b")
    folders.sync("a", "b")
    assert synced == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path), str(tmp_path / "a" / "b")]

    synced.clear()
    (tmp_path / "a").rename(tmp_path / "archive")
    written(folders, "a", "b")
    folders.sync("a", "b")
    assert synced == [str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)]
    folders.close()


def test_a_file_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    temp = TempFolder(tmp_path)
    assert temp.takes_unnamed, "this file system has no files without names: the tests of them test nothing"

    os.close(temp.open_unnamed())
    assert [path.name for path in (tmp_path / ".tmp").glob("*/*")] == ["lock"]
    shutil.rmtree(tmp_path / ".tmp" / next(path.name for path in (tmp_path / ".tmp").iterdir() if path.is_dir()))
    os.close(temp.open_unnamed())  # its folder is made again

    temp.close()


@each_layout
@pytest.mark.usefixtures("named_only")
def test_a_file_system_that_wants_names_gets_the_same_files(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), capturing(tmp_path, layout=layout) as files:
        assert "files get a name there before they are whole" in caplog.text
        assert not files.feed.consumer._store._temp.takes_unnamed
        request = files.request()
        files.feed.whole(request)
        assert files.temporary() == []

    check(tmp_path, request)


@pytest.mark.usefixtures("named_only")
def test_and_nothing_is_left_there_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with capturing(tmp_path) as files:
        disk.room = 100
        with pytest.raises(ConsumerError, match="No space left"):
            files.feed.whole(files.request())

        assert files.temporary() == []
    assert not (tmp_path / "default" / "client-1.safetensors").exists()
