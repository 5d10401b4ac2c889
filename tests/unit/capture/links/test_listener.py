"""The place where a front end listens: what the killed left is swept; a thread that fails goes on or is missed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from headgate.capture.links.hub import OLD_S, ResultHub
from headgate.capture.links.messages import Result
from headgate.capture.links.peer import MAX_FAILURES, Inbox
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.results import CaptureResult
from tests.fakes.pipeline import TIMEOUT_S
from tests.unit.capture.links.test_result_hub import ok, send

LISTENS = """
import sys
from headgate.capture.links.hub import ResultHub
hub = ResultHub(folder=sys.argv[1])
print(hub.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that listen in `folder`; the first one is killed."""
    command = [sys.executable, "-c", LISTENS, str(folder)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ipc://")
    started[0].send_signal(signal.SIGKILL)
    started[0].communicate(timeout=TIMEOUT_S)
    yield started
    started[1].communicate(timeout=TIMEOUT_S)


def grow_old(*folders: Path) -> None:
    for folder in folders:
        os.utime(folder, (time.time() - 2 * OLD_S,) * 2)


@pytest.mark.usefixtures("listening")
def test_folders_of_the_killed_are_swept_and_those_of_the_living_are_not(folder: Path) -> None:
    ours = set(folder.iterdir())
    notes = folder / "headgate-notes"
    notes.mkdir()
    (notes / "hub").write_text("not a socket")
    empty, elsewhere = folder / "headgate-empty", folder / "other"
    empty.mkdir()
    elsewhere.mkdir()
    with socket.socket(socket.AF_UNIX) as unused:
        unused.bind(str(elsewhere / "hub"))
    hub = ResultHub(folder=str(folder))

    first = Path(hub.address.removeprefix("ipc://")).parent
    assert set(folder.iterdir()) == {*ours, notes, empty, elsewhere, first}  # too young to tell
    assert hub.shutdown(TIMEOUT_S)
    grow_old(*ours, notes, empty, elsewhere)
    hub = ResultHub(folder=str(folder))
    second = Path(hub.address.removeprefix("ipc://")).parent

    assert len(ours) == 2
    left = ours & set(folder.iterdir())
    assert set(folder.iterdir()) == {*left, notes, empty, elsewhere, second}
    (alive,) = left
    assert sorted(path.name for path in alive.iterdir()) == ["hub"]
    assert hub.shutdown(TIMEOUT_S)


def test_a_thread_that_fails_now_and_then_goes_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    read, fails = threading.Semaphore(0), [True]

    def watch() -> None:
        if fails.pop() if fails else False:
            raise MemoryError("once")

    sender = ResultSender()
    with caplog.at_level(logging.ERROR):
        inbox = Inbox(f"ipc://{folder}/hub", lambda frames: read.release(), name="reader", watch=watch)
        for key in ("a", "b"):
            fails.append(True)
            sender.send_result(inbox.address, Result(key=key, req_id="r", instance="i", result=ok()))
            assert read.acquire(timeout=TIMEOUT_S)
        assert sender.close(TIMEOUT_S) == 0

        assert inbox.close(TIMEOUT_S)
    assert inbox.failures >= 2
    assert "The thread reader failed, it goes on" in caplog.text


def test_a_thread_that_only_fails_gives_up_and_says_so_once(folder: Path) -> None:
    reasons: list[str] = []
    told = threading.Event()

    def watch() -> None:
        raise OSError("no descriptors left")

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        told.set()

    inbox = Inbox(f"ipc://{folder}/hub", print, name="reader", watch=watch, on_failure=on_failure)
    assert told.wait(TIMEOUT_S)

    assert inbox.close(TIMEOUT_S)
    assert inbox.failures == MAX_FAILURES
    assert len(reasons) == 1
    assert "reader" in reasons[0]
    assert "no descriptors left" in reasons[0]


def test_when_results_can_no_longer_come_requests_get_errors_and_nobody_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, sender = ResultHub(folder=str(folder)), ResultSender()
    hub.expect("k1", instances=["files", "more"])
    send(sender, hub, "k1", ok("a"))
    assert sender.close(TIMEOUT_S) == 0
    assert hub.stats().problem is None
    waited: list[object] = []
    waiting = threading.Thread(target=lambda: waited.append(hub.wait("k1", TIMEOUT_S).merged))
    waiting.start()

    def broken(inbox: Inbox) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Inbox, "_read", broken)
    sender = ResultSender()
    send(sender, hub, "k1", ok("b"))
    waiting.join(TIMEOUT_S)

    (merged,) = waited
    assert isinstance(merged, dict)
    assert merged["files"] == replace(ok("a"), key="files")
    assert merged["more"].status == "error"
    assert "headgate-results" in merged["more"].error
    assert "restart the server" in merged["more"].error
    hub.expect("k2", instances=["files"])
    assert hub.wait("k2", TIMEOUT_S).merged["files"] == CaptureResult(
        status="error", error=hub.stats().problem, key="files"
    )
    sender.close(TIMEOUT_S)
    assert hub.shutdown(TIMEOUT_S)
