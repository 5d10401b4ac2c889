"""What goes wrong on a disk is one request's error; a killed process leaves nothing that looks whole."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.capture.schema.errors import ConfigError, ConsumerError
from headgate.consumers.feed import TIMEOUT_S, ExampleRequest
from headgate.consumers.reader import open_captures
from tests.deadlines import patience
from tests.fakes.capturing import capturing
from tests.fakes.dying_processes import FIRST, SECOND

LAYOUTS = ("request", "raw", "shards")
ROOT = Path(__file__).parents[4]

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def check(root: Path, *requests: ExampleRequest) -> None:
    """Assert that exactly `requests` can be read, and that every value is right."""
    found = {capture.request_id: capture for capture in open_captures(root)}
    assert sorted(found) == sorted(request.info.client_request_id for request in requests)
    for request in requests:
        capture = found[request.info.client_request_id]
        for site, rows in request.expected().rows.items():
            assert torch.equal(capture[site], rows)


class Disk:
    """Stands between Python and the disk, which can be filled up and made to hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None  # bytes; None for plenty
        self.works = threading.Event()
        self.works.set()
        self.hung = threading.Event()
        self.hangs_for: Callable[[], bool] = lambda: True
        self._pwritev, self._fsync = os.pwritev, os.fsync
        monkeypatch.setattr(os, "pwritev", self.pwritev)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def pwritev(self, file: int, buffers: list[memoryview], offset: int) -> int:
        if self.room is None:
            return self._pwritev(file, buffers, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwritev(file, [buffers[0][: self.room]], offset)
        self.room -= written
        return written

    def fsync(self, file: int) -> None:
        if not self.works.is_set() and self.hangs_for():
            self.hung.set()
            assert self.works.wait(TIMEOUT_S), "nobody repaired the disk"
        self._fsync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.works.set()


@each_layout
@pytest.mark.parametrize("room", [0, 1, 100, 700])
def test_a_full_disk_is_that_request_s_error_and_the_next_is_written(
    tmp_path: Path, disk: Disk, layout: str, room: int
) -> None:
    with capturing(tmp_path, layout=layout, threads=1) as files:
        before, lost, after = (files.request(client_id=name) for name in ("before", "lost", "after"))
        files.feed.whole(before)

        disk.room = room
        with pytest.raises(ConsumerError, match="No space left on device"):
            files.feed.whole(lost)
        assert files.temporary() == []
        check(tmp_path, before)
        disk.room = None
        files.feed.whole(after)

    check(tmp_path, before, after)


def test_no_room_for_rows_that_leave_memory_is_that_request_s_error(tmp_path: Path, disk: Disk) -> None:
    with capturing(tmp_path, max_request_bytes=1, threads=1) as files:
        lost, after = (files.request(client_id=name) for name in ("lost", "after"))
        files.feed.begin(lost)
        disk.room = 150
        files.feed.step({lost: (0, 3)})
        files.feed.step({lost: (3, lost.final.num_rows)})

        with pytest.raises(ConsumerError, match="No space left on device"):
            files.feed.finish(lost)
        assert files.temporary() == []
        disk.room = None
        files.feed.whole(after)

    check(tmp_path, after)


@each_layout
def test_a_failed_fsync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    real = os.fsync

    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with capturing(tmp_path, layout=layout, threads=1) as files:
        before, lost, after = (files.request(client_id=name) for name in ("before", "lost", "after"))
        files.feed.whole(before)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ConsumerError, match="Input/output error"):
            files.feed.whole(lost)
        monkeypatch.setattr(os, "fsync", real)
        files.feed.whole(after)

    check(tmp_path, before, after)


def fail_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsync fail for a folder, as its disk would after its files were written."""
    real = os.fsync

    def fail(file: int) -> None:
        if os.fstat(file).st_ino == folder.stat().st_ino:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("layout", ["request", "raw"])
def test_files_whose_folder_cannot_be_synced_are_taken_back_and_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    with capturing(tmp_path, layout=layout, threads=1) as files:
        before, again = (files.request(client_id=name) for name in ("before", "again"))
        files.feed.whole(before)
        (tag,) = (path for path in tmp_path.iterdir() if path.name != ".tmp")
        with monkeypatch.context() as patched:
            fail_for(tag, patched)
            with pytest.raises(ConsumerError, match=r"Input/output error.*Nothing of them is left"):
                files.feed.whole(again)
        check(tmp_path, before)
        assert files.temporary() == []

        files.feed.whole(again)

    check(tmp_path, before, again)


def test_files_that_cannot_be_taken_back_are_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with capturing(tmp_path, layout="request", threads=1) as files:
        files.feed.whole(files.request(client_id="before"))
        (tag,) = (path for path in tmp_path.iterdir() if path.name != ".tmp")
        with monkeypatch.context() as patched:
            fail_for(tag, patched)
            patched.setattr(os, "rename", fail)
            with pytest.raises(ConsumerError, match=r"left.*They are there, but .*Read-only file system"):
                files.feed.whole(files.request(client_id="left"))

        assert (tag / "left.safetensors").exists()


@pytest.mark.parametrize("num_good", range(6), ids=["site-1", "site-2", "site-3", "positions", "tokens", "index"])
def test_a_request_whose_shard_cannot_be_synced_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    real, good = os.fsync, iter(range(num_good))

    def fail_in_the_end(file: int) -> None:
        if next(good, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    with capturing(tmp_path, layout="shards", threads=1) as files:
        before, lost, after = (files.request(client_id=name) for name in ("before", "lost", "after"))
        files.feed.whole(before)
        monkeypatch.setattr(os, "fsync", fail_in_the_end)
        with pytest.raises(ConsumerError, match="Input/output error"):
            files.feed.whole(lost)
        check(tmp_path, before)
        monkeypatch.setattr(os, "fsync", real)
        files.feed.whole(after)

    check(tmp_path, before, after)


@each_layout
def test_a_root_that_went_away_is_not_made_anew(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "volume"
    with capturing(root, layout=layout, threads=1) as files:
        files.feed.whole(files.request(client_id="before"))
        shutil.rmtree(root)

        for name in ("lost", "also-lost"):
            with pytest.raises(ConsumerError, match="volume"):
                files.feed.whole(files.request(client_id=name))
        assert not root.exists()
        root.mkdir()
        with pytest.raises(ConsumerError, match="not mounted"):
            files.feed.whole(files.request(client_id="lost-in-the-mount-point"))
        (root / ".tmp").mkdir()
        after = files.request(client_id="after")
        files.feed.whole(after)

    check(root, after)


def test_a_shard_that_somebody_removed_is_not_appended_to(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="shards", threads=1) as files:
        files.feed.whole(files.request(client_id="before"))
        shutil.rmtree(tmp_path / "default")

        with pytest.raises(ConsumerError):
            files.feed.whole(files.request(client_id="lost"))
        after = files.request(client_id="after")
        files.feed.whole(after)

    check(tmp_path, after)


def test_a_root_that_cannot_be_made_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be written to"), capturing(tmp_path / "file" / "root"):
        pass


def engine_id_of(writer: int, num_writers: int) -> str:
    """An id whose rows go through that writer thread."""
    return next(name for name in map(str, range(100)) if zlib.crc32(name.encode()) % num_writers == writer)


def test_a_writer_that_hangs_holds_up_its_own_requests_alone(tmp_path: Path, disk: Disk) -> None:
    disk.hangs_for = lambda: threading.current_thread().name.endswith("-0")
    with capturing(tmp_path, threads=2) as files:
        held, free = (files.request(client_id=f"r{i}", engine_id=engine_id_of(i, 2)) for i in range(2))
        disk.works.clear()
        files.feed.begin(held, free)
        files.feed.step({request: (0, request.final.num_rows) for request in (held, free)})

        answer = files.feed.finish_later(held)
        assert disk.hung.wait(TIMEOUT_S)
        files.feed.finish(free)

        assert not answer.done()
        disk.works.set()
        answer.result(TIMEOUT_S)
    check(tmp_path, held, free)


def test_closing_keeps_its_deadline_and_says_what_is_lost(tmp_path: Path, disk: Disk) -> None:
    with capturing(tmp_path, threads=1) as files:
        request = files.request()
        disk.works.clear()
        files.feed.begin(request)
        files.feed.step({request: (0, request.final.num_rows)})
        answer: Future[Any] = files.feed.finish_later(request)
        assert disk.hung.wait(TIMEOUT_S)

        files.feed.consumer.close(0.0)

        with pytest.raises(ConsumerError, match="closing"):
            answer.result(timeout=0)
        with pytest.raises(ConsumerError, match="closed"):
            files.feed.begin(files.request(client_id="late"))
        disk.works.set()


@each_layout
def test_a_process_killed_at_any_point_leaves_only_whole_requests(tmp_path: Path, layout: str) -> None:
    done = run("tests.fakes.dying_processes", tmp_path, layout)
    num_points = int(done)

    assert num_points > 10
    num_whole = 0
    for point in range(num_points):
        root = tmp_path / str(point)
        with capturing(root, layout=layout, threads=1) as files:
            assert files.temporary() == []  # what the dead process left is gone
            first, second = files.request(client_id=FIRST), files.request(client_id=SECOND, prompt=3, output=2)
            is_whole = bool(open_captures(root).find(SECOND))
            num_whole += is_whole
            check(root, first, *[second] * is_whole)
            if not is_whole:
                files.feed.whole(second)
        check(root, first, second)
    assert 0 < num_whole < num_points  # both outcomes were seen


@each_layout
def test_what_was_reported_survives_kill_9(tmp_path: Path, layout: str) -> None:
    command = [sys.executable, "-m", "tests.fakes.reporting", str(tmp_path), layout]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reported = [process.stdout.readline().strip() for _ in range(50)]
        process.kill()
        reported += process.stdout.read().splitlines()[:-1]  # the last line may be cut

    found = {capture.request_id: capture for capture in open_captures(tmp_path)}
    assert set(reported) <= set(found)
    with capturing(tmp_path, layout=layout) as files:
        check(tmp_path, *(files.request(client_id=name) for name in found))


@each_layout
def test_a_real_full_disk_is_survived(tmp_path: Path, layout: str) -> None:
    fill = f"{sys.executable} -m tests.fakes.filling_disk {tmp_path} {layout}"
    script = f"mount -t tmpfs -o size=800k none {tmp_path} && exec {fill}"
    may_mount = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(may_mount, check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")

    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=patience(300))

    assert done.returncode == 0, done.stderr


def run(module: str, *args: object) -> str:
    """Run a module of the tests in a process of its own; return what it prints."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=patience(300)
    ).stdout
