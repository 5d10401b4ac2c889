"""Messages between hosts: every one arrives once and in order, whatever breaks, and only from those with the keys."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from headgate.capture.links import peer as channel_module
from headgate.capture.links.network import Listening, NetworkKeys
from headgate.capture.links.peer import REFUSED, Channel, Endpoint, Inbox, numbering
from headgate.capture.schema.errors import UnsupportedError
from tests.deadlines import patience
from tests.fakes.breaking_wire import BreakingWire, breaking_wire

TIMEOUT_S = patience(60.0)
KEYS = NetworkKeys.make()


class Reader:
    """An inbox that keeps what it reads."""

    def __init__(self, folder: object, listening: Listening) -> None:
        self.read: list[bytes] = []
        self._came = threading.Condition()
        self.inbox = Inbox(f"ipc://{folder}/hub", self._handle, name="reader", listening=listening)

    def wait(self, count: int) -> list[bytes]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.read) >= count, TIMEOUT_S), f"{len(self.read)} of {count}"
            return list(self.read)

    def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        with self._came:
            self.read.append(b"".join(frame.bytes for frame in frames))
            self._came.notify_all()


@pytest.fixture
def reader(tmp_path: object) -> Iterator[Reader]:
    made = Reader(tmp_path, Listening(host="127.0.0.1", keys=KEYS))
    yield made
    assert made.inbox.close(TIMEOUT_S)


@pytest.fixture
def wire(reader: Reader) -> Iterator[BreakingWire]:
    assert reader.inbox.far_address is not None
    with breaking_wire(reader.inbox.far_address) as made:
        yield made


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Channel]]:
    monkeypatch.setattr(channel_module, "PAUSE_S", 0.01)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Channel] = []

    def connect(address: str | None, keys: NetworkKeys = KEYS, **settings: Any) -> Channel:
        assert address is not None
        made.append(Channel(context, Endpoint(address, keys), **{"window_bytes": 1 << 20, **settings}))
        return made[-1]

    yield connect
    for each in made:
        each.close(0)
    context.term()


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def until(condition: Callable[[], bool], *channels: Channel) -> None:
    """Tend channels, as their sender's thread does, until something holds."""
    waiting = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        for channel in channels:
            channel.tend()
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it does not come to hold")


def test_messages_of_other_hosts_arrive_in_order_and_are_acknowledged(
    reader: Reader, connect: Callable[..., Channel]
) -> None:
    channel = connect(reader.inbox.far_address)

    assert all(channel.send([number], timeout_s=TIMEOUT_S) for number in numbers(500))

    assert channel.close(TIMEOUT_S) == 0
    assert reader.read == numbers(500)


@pytest.mark.parametrize("seed", range(4))
def test_every_message_arrives_once_and_in_order_however_often_the_connection_breaks(
    reader: Reader, wire: BreakingWire, connect: Callable[..., Channel], seed: int
) -> None:
    dice = random.Random(seed)
    channel = connect(wire.address, window_bytes=20_000)
    wanted = [b"%d " % number + bytes(dice.randrange(3000)) for number in range(300)]

    for message in wanted:
        if dice.random() < 0.05:
            wire.reset()
        assert channel.send([message[:5], message[5:]], timeout_s=TIMEOUT_S)
    wire.reset()

    assert channel.close(TIMEOUT_S) == 0
    assert reader.read == wanted
    assert wire.num_connections > 2


def test_the_last_message_before_a_cut_arrives_when_it_is_mended_though_nothing_is_sent_after_it(
    reader: Reader, wire: BreakingWire, connect: Callable[..., Channel]
) -> None:
    channel = connect(wire.address)
    assert channel.send([b"first"], timeout_s=TIMEOUT_S)
    reader.wait(1)

    wire.cut()
    assert channel.send([b"last"], timeout_s=TIMEOUT_S)
    until(lambda: wire.num_connections >= 3, channel)
    assert reader.read == [b"first"]
    wire.mend()

    until(lambda: len(reader.read) == 2, channel)
    assert reader.read == [b"first", b"last"]
    assert channel.lost == 0


def test_a_host_that_stays_away_is_given_up_and_what_was_on_the_way_counts_as_lost(
    wire: BreakingWire, connect: Callable[..., Channel], caplog: pytest.LogCaptureFixture
) -> None:
    wire.cut()
    channel = connect(wire.address, give_up_s=0.2)
    for number in numbers(3):
        assert channel.send([number], timeout_s=0)

    until(lambda: channel.lost == 3, channel)

    assert not channel.send([b"more"], timeout_s=TIMEOUT_S)
    assert f"The front end at {wire.address} has not been reached for 0.2 s, or has other keys" in caplog.text


def test_a_full_window_waits_for_room_while_the_connection_is_cut(
    reader: Reader, wire: BreakingWire, connect: Callable[..., Channel]
) -> None:
    channel = connect(wire.address, window_bytes=1000)
    assert channel.send([bytes(10)], timeout_s=TIMEOUT_S)
    reader.wait(1)
    wire.cut()

    assert channel.send([bytes(900)], timeout_s=0)
    assert not channel.send([bytes(900)], timeout_s=0.05)
    wire.mend()
    assert channel.close(TIMEOUT_S) == 0

    assert [len(message) for message in reader.read] == [10, 900]
    assert channel.lost == 1


@pytest.mark.parametrize(
    "keys", [NetworkKeys.make(), NetworkKeys(KEYS.listening, bytes(32)), NetworkKeys(bytes(32), KEYS.connecting)]
)
def test_nobody_without_the_keys_is_let_in(reader: Reader, connect: Callable[..., Channel], keys: NetworkKeys) -> None:
    stranger = connect(reader.inbox.far_address, keys, give_up_s=0.3)
    stranger.send([b"forged"], timeout_s=0)

    until(lambda: stranger.lost == 1, stranger)
    friend = connect(reader.inbox.far_address)
    assert friend.send([b"true"], timeout_s=TIMEOUT_S)

    assert reader.wait(1) == [b"true"]


def test_a_socket_without_encryption_is_not_let_in(reader: Reader, connect: Callable[..., Channel]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    assert reader.inbox.far_address is not None
    plain.connect(reader.inbox.far_address)
    plain.send_multipart([numbering(b"a" * 8, 0), b"forged"])
    friend = connect(reader.inbox.far_address)
    assert friend.send([b"true"], timeout_s=TIMEOUT_S)

    assert reader.wait(1) == [b"true"]
    assert plain.poll(200) == 0
    context.destroy(linger=0)


def test_another_process_at_the_same_address_does_not_take_the_middle_of_a_conversation(
    tmp_path: object, connect: Callable[..., Channel]
) -> None:
    first = Reader(tmp_path, Listening(host="127.0.0.1", keys=KEYS))
    address = first.inbox.far_address
    channel = connect(address)
    assert channel.send([b"one"], timeout_s=TIMEOUT_S)
    until(lambda: not channel._sent, channel)  # it knows that the first has it
    assert first.inbox.close(TIMEOUT_S)
    assert address is not None
    port = int(address.rpartition(":")[2])
    second = Reader(tmp_path, Listening(host="127.0.0.1", ports=range(port, port + 1), keys=KEYS))

    channel.send([b"two"], timeout_s=TIMEOUT_S)
    until(lambda: channel.lost == 1, channel)

    assert second.read == []
    assert second.inbox.close(TIMEOUT_S)


def test_the_socket_of_this_host_needs_no_keys(reader: Reader) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    near = Channel(context, Endpoint(reader.inbox.address), 1 << 20)

    assert near.send([b"near"], timeout_s=TIMEOUT_S)

    assert near.close(TIMEOUT_S) == 0
    assert reader.read == [b"near"]
    context.term()


def test_a_gap_is_refused(reader: Reader) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(reader.inbox.address)
    answers = []

    for number in (0, 2, 0, 1):
        socket.send_multipart([numbering(b"a" * 8, number), b"%d" % number])
        answers.append(int.from_bytes(socket.recv(), "little"))
    context.destroy(linger=0)

    assert answers == [0, REFUSED, 0, 1]
    assert reader.read == [b"0", b"1"]


def test_ports_are_taken_in_order_and_a_range_without_a_free_one_is_refused(tmp_path: object) -> None:
    host = f"127.{secrets.randbelow(200) + 10}.{secrets.randbelow(256)}.7"  # whose ports nobody else has
    two = Listening(host=host, ports=range(46000, 46002), keys=KEYS)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        sockets = [context.socket(zmq.ROUTER) for _ in range(3)]
        try:
            found = [two.bind(socket) for socket in sockets[:2]]
            with pytest.raises(UnsupportedError, match=r"at any port from 46000 to 46001 \(Address already in use"):
                two.bind(sockets[2])
        finally:
            for socket in sockets:
                socket.close(linger=0)

    assert found == [f"tcp://{host}:46000", f"tcp://{host}:46001"]
    with pytest.raises(UnsupportedError, match="expected an address of this host"):
        Reader(tmp_path, Listening(host="192.0.2.1", keys=KEYS))
