"""A channel never blocks its owner for a reader that is gone, and bounds the bytes that a slow reader has not taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq

from headgate.capture.links.messages import MalformedMessage
from headgate.capture.links.peer import Channel, Endpoint, Inbox
from headgate.capture.schema.errors import UnsupportedError
from tests.deadlines import patience

TIMEOUT_S = patience(120.0)
"""For whatever must happen, the start of a process on a busy machine included; a test that passes waits for less."""

READER = """
import sys, threading
from headgate.capture.links.peer import Inbox
inbox = Inbox(sys.argv[1], lambda frames: threading.Event().wait(), name="reader")
print("listening", flush=True)
sys.stdin.read()
"""

SENDER = """
import sys, zmq
from headgate.capture.links.peer import Endpoint
from headgate.capture.links.peer import Channel
channel = Channel(zmq.Context(), Endpoint(sys.argv[1]), window_bytes=1 << 30)
while True:
    channel.send([b"a" * 100_000], timeout_s=None)
"""


class Reader:
    """An inbox that keeps what it reads, and reads on only when it may."""

    def __init__(self, address: str) -> None:
        self.messages: list[list[bytes]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()
        self.has_read = threading.Semaphore(0)
        self.inbox = Inbox(address, self._handle, name="headgate-test")

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        self.is_reading.set()
        assert self.may_read.wait(TIMEOUT_S)
        self.messages.append([bytes(frame) for frame in frames])
        self.has_read.release()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self.has_read.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/box"


@pytest.fixture
def reader(address: str) -> Iterator[Reader]:
    reader = Reader(address)
    yield reader
    reader.may_read.set()
    assert reader.inbox.close(TIMEOUT_S)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


Open = Callable[..., Channel]


@pytest.fixture
def open_channel(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[Open]:
    channels: list[Channel] = []

    def open_channel(window_bytes: int = 1000) -> Channel:
        channels.append(Channel(context, Endpoint(address), window_bytes))
        return channels[-1]

    yield open_channel
    for channel in channels:
        channel.close(0)


def start(code: str, address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_messages_arrive_in_order_and_whole(reader: Reader, open_channel: Open) -> None:
    channel = open_channel()

    sent = [[b"%d" % index, b"", bytes(index)] for index in range(200)]
    results = [channel.send(frames, timeout_s=TIMEOUT_S) for frames in sent]
    reader.wait_for(len(sent))

    assert results == [True] * len(sent)
    assert reader.messages == sent
    assert channel.close(TIMEOUT_S) == 0
    assert channel.lost == 0


def test_64_mib_arrive_although_the_window_is_smaller(reader: Reader, open_channel: Open) -> None:
    rows = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)

    assert open_channel().send([b"header", rows.data], timeout_s=0)
    reader.wait_for(1)

    assert reader.messages[0][1] == rows.tobytes()


def test_a_slow_reader_bounds_what_is_on_its_way_and_makes_the_sender_wait(reader: Reader, open_channel: Open) -> None:
    channel = open_channel(window_bytes=1000)
    reader.may_read.clear()
    assert channel.send([bytes(600)], timeout_s=0)
    assert not channel.send([bytes(600)], timeout_s=0)
    assert channel.send([bytes(400)], timeout_s=0)

    assert channel.lost == 1

    channel = open_channel(window_bytes=1000)  # the other one gave up waiting
    assert channel.send([bytes(600)], timeout_s=0)
    waiting = threading.Thread(target=lambda: results.append(channel.send([bytes(600)], timeout_s=TIMEOUT_S)))
    results: list[bool] = []
    waiting.start()
    reader.may_read.set()
    waiting.join(TIMEOUT_S)

    assert results == [True]
    reader.wait_for(4)


def test_nobody_waits_twice_for_a_reader_that_is_stuck_but_it_is_served_again_when_it_moves(
    reader: Reader, open_channel: Open
) -> None:
    channel = open_channel(window_bytes=1000)
    reader.may_read.clear()
    assert channel.send([bytes(1000)], timeout_s=0)
    assert not channel.send([bytes(1000)], timeout_s=0.01)

    started = time.monotonic()
    assert not channel.send([bytes(1000)], timeout_s=TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert channel.lost == 2

    reader.may_read.set()
    reader.wait_for(1)
    assert channel.send([bytes(1)], timeout_s=None)  # follows the acknowledgement of the first, or waits for it
    reader.wait_for(1)
    while not channel.send([bytes(1000)], timeout_s=TIMEOUT_S):
        pass  # its acknowledgement is on its way
    reader.wait_for(1)


def test_a_message_that_must_not_be_lost_is_sent_although_the_window_is_full(
    reader: Reader, open_channel: Open
) -> None:
    channel = open_channel(window_bytes=10)
    reader.may_read.clear()
    assert channel.send([bytes(10)], timeout_s=0)

    assert channel.send([b"finish"], timeout_s=None)
    reader.may_read.set()
    reader.wait_for(2)

    assert reader.messages[1] == [b"finish"]


def test_a_killed_reader_ends_a_wait_at_once_and_everything_unacknowledged_counts_as_lost(
    address: str, open_channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    process = start(READER, address)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    channel = open_channel(window_bytes=1000)
    assert channel.send([bytes(1000)], timeout_s=0)
    threading.Timer(0.2, process.kill).start()

    started = time.monotonic()
    sent = channel.send([bytes(1000)], timeout_s=2 * TIMEOUT_S)
    waited_s = time.monotonic() - started
    process.communicate(timeout=TIMEOUT_S)

    assert not sent
    assert waited_s < TIMEOUT_S
    assert not channel.send([b"more"], timeout_s=TIMEOUT_S)
    assert channel.lost == 3
    assert [record.message for record in caplog.records] == [
        f"The front end at {address} is gone: results or rows for it are lost"
    ]
    assert channel.close(TIMEOUT_S) == 0


def test_a_killed_sender_does_not_disturb_the_reader(address: str, reader: Reader, open_channel: Open) -> None:
    process = start(SENDER, address)
    reader.wait_for(20)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=TIMEOUT_S)

    assert open_channel().send([b"from another"], timeout_s=0)
    while [b"from another"] not in reader.messages:
        reader.wait_for(1)

    assert {message[0] for message in reader.messages} == {b"a" * 100_000, b"from another"}
    assert reader.inbox._thread.is_alive()


def test_nobody_listening_is_noticed(open_channel: Open) -> None:
    channel = open_channel(window_bytes=10)
    channel.send([bytes(10)], timeout_s=None)

    assert not channel.send([bytes(10)], timeout_s=TIMEOUT_S)
    assert channel.lost == 2


@pytest.mark.parametrize(("error", "level"), [(MalformedMessage("bad"), "WARNING"), (RuntimeError("bug"), "ERROR")])
def test_a_message_that_cannot_be_handled_is_counted_logged_and_acknowledged(
    address: str, open_channel: Open, caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    handled = threading.Semaphore(0)

    def handle(frames: Sequence[zmq.Frame]) -> None:
        handled.release()
        raise error

    inbox = Inbox(address, handle, name="headgate-test")
    channel = open_channel(window_bytes=10)
    sent = [channel.send([bytes(10)], timeout_s=TIMEOUT_S) for _ in range(3)]
    left = channel.close(TIMEOUT_S)

    assert sent == [True] * 3
    assert left == 0
    assert inbox.malformed == 3
    assert inbox.close(TIMEOUT_S)
    assert caplog.records[0].levelname == level


def test_close_of_a_channel_says_what_never_arrived(reader: Reader, open_channel: Open) -> None:
    reader.may_read.clear()
    channel = open_channel()
    for _ in range(3):
        channel.send([b"x"], timeout_s=None)

    assert channel.close(0.01) == 3


def test_closing_an_inbox_whose_handler_hangs_takes_no_longer_than_allowed(address: str, open_channel: Open) -> None:
    reader = Reader(address)
    reader.may_read.clear()
    open_channel().send([b"x"], timeout_s=0)
    assert reader.is_reading.wait(TIMEOUT_S)

    assert not reader.inbox.close(0.05)
    reader.may_read.set()
    reader.wait_for(1)


def test_close_removes_the_socket_and_ends_the_thread(tmp_path: Path, address: str) -> None:
    reader = Reader(address)
    assert os.listdir(tmp_path) == ["box"]

    assert reader.inbox.close(TIMEOUT_S)

    assert os.listdir(tmp_path) == []
    assert not reader.inbox._thread.is_alive()


def test_watch_is_called_when_it_asked_to_be_and_after_each_message(address: str, open_channel: Open) -> None:
    calls = threading.Semaphore(0)
    due: list[float | None] = [time.monotonic() + 0.01, time.monotonic() + 0.02, None]

    def watch() -> float | None:
        calls.release()
        return due.pop(0) if due else None

    inbox = Inbox(address, lambda frames: None, name="headgate-test", watch=watch)

    for _ in range(3):
        assert calls.acquire(timeout=TIMEOUT_S)
    assert due == []
    open_channel().send([b"x"], timeout_s=0)
    assert calls.acquire(timeout=TIMEOUT_S)
    assert inbox.close(TIMEOUT_S)


def test_a_path_that_is_too_long_for_a_socket_is_refused_with_a_remedy() -> None:
    with pytest.raises(UnsupportedError, match="TMPDIR"):
        Inbox(f"ipc:///tmp/{'x' * 120}", lambda frames: None, name="headgate-test")


def test_an_address_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot listen"):
        Inbox(f"ipc://{tmp_path}/missing/box", lambda frames: None, name="headgate-test")


def test_close_of_a_channel_ends_a_send_that_waits(reader: Reader, open_channel: Open) -> None:
    reader.may_read.clear()
    channel = open_channel(window_bytes=10)
    assert channel.send([bytes(10)], timeout_s=0)
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(channel.send([bytes(10)], timeout_s=2 * TIMEOUT_S)))
    waiting.start()

    channel.close(0)
    waiting.join(TIMEOUT_S)

    assert results == [False]
