"""Messages arrive whole and in order, whoever is slow, and an end that is gone is noticed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.links.child_process import Connection, start_child
from tests.unit.conftest import TIMEOUT_S

Pair = tuple[Connection, Connection]


def pair_of() -> Pair:
    one, other = socket.socketpair()
    return Connection(one), Connection(other)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = pair_of()
    yield ends
    for end in ends:
        end.close()


@settings(max_examples=25)
@given(st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 400_000).map(lambda size: b"x" * size)), max_size=12))
def test_messages_arrive_whole_and_in_order(messages: list[bytes]) -> None:
    near, far = pair_of()
    for message in messages:  # more than the socket takes, while nobody reads
        assert near.send(message)
    assert near.send(*messages)

    assert [far.receive() for _ in range(2 * len(messages))] == 2 * messages

    near.close()
    assert far.receive() is None
    far.close()


def test_an_end_that_is_gone_is_told_to_the_sender(pair: Pair) -> None:
    near, far = pair
    far.shut()

    assert not near.send(b"hello")
    assert near.receive() is None


def test_what_is_left_to_send_is_given_up_when_the_other_end_goes(pair: Pair) -> None:
    near, far = pair
    for _ in range(20):
        near.send(b"x" * 100_000)

    far.shut()

    assert near.receive() is None


def test_half_a_message_is_none(pair: Pair) -> None:
    near, far = pair
    near._socket.sendall((100).to_bytes(8, "little") + b"half")
    near.shut()

    assert far.receive() is None


FORKING = """
import os, time

def serve(connection, settings):
    if child := os.fork():
        connection.send(f"{child} {settings}".encode())
        os._exit(1)
    time.sleep(600)
"""


def test_it_ends_with_the_process_though_a_child_of_that_keeps_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forking_program.py").write_text(FORKING)
    monkeypatch.syspath_prepend(str(tmp_path))

    connection, child = start_child("forking_program", "given", label="Forking")

    grandchild, given = (connection.receive() or b"0 nothing").split()
    try:
        assert connection.receive() is None
        assert child.wait(TIMEOUT_S) == 1
        assert given == b"given"
    finally:
        os.kill(int(grandchild), signal.SIGKILL)
        connection.close()
