"""Who may read a stream: tokens, addresses, strangers."""

from __future__ import annotations

import socket
import stat
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.consumer import SpecContext
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.consumers.feed import EXAMPLE_MODEL
from headgate.consumers.stream import StreamConsumer, StreamReader, StreamRefusedError, consumer, wire
from headgate.consumers.stream.wire import TOKEN_VARIABLE, parse_address
from tests.deadlines import patience
from tests.fakes.streams import SITE, expected_facts, facts, streaming

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    return str(tmp_path / "token")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://10.1.2.3:5555", "tcp://trainer:5555"])
def test_an_address_that_others_can_reach_needs_a_token(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"can be reached from other machines: name a token_file, or set HEADGATE_ST"):
        StreamConsumer.check_params({"address": address})

    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    StreamConsumer.check_params({"address": address})


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "unix:///tmp/rows.sock"]
)
def test_an_address_of_this_machine_alone_needs_none(address: str) -> None:
    StreamConsumer.check_params({"address": address})


def test_both_sides_with_the_token_find_each_other(token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with streaming(address="tcp://0.0.0.0:0", token_file=token_file) as stream:
        requests = [stream.send(name) for name in ("one", "two")]
        address = stream.address.replace("0.0.0.0", "127.0.0.1")
        with StreamReader(address, sites=SITE, token_file=token_file) as reader:
            first = next(reader)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        with StreamReader(address, sites=SITE) as reader:
            assert facts([first, *(next(reader) for _ in range(2))]) == expected_facts([requests[0], *requests])


def test_readers_without_the_token_are_refused_and_see_nothing(
    token_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with streaming(token_file=token_file) as stream:
        stream.send("secret")
        with pytest.raises(StreamRefusedError, match="needs the server's token: name a token_file, or set HEADGATE_ST"):
            next(StreamReader(stream.address))
        monkeypatch.setenv(TOKEN_VARIABLE, OTHER)
        with pytest.raises(StreamRefusedError, match="the token is wrong"):
            next(StreamReader(stream.address))
        with StreamReader(stream.address, token_file=token_file) as reader:
            assert len(next(reader)) == 6
    assert OTHER not in caplog.text
    assert TOKEN not in caplog.text


def test_a_reader_with_a_token_takes_rows_from_nobody_without(token_file: str) -> None:
    with streaming() as stream:
        stream.send("one")
        with pytest.raises(StreamRefusedError, match="has no token although this reader does"):
            next(StreamReader(stream.address, token_file=token_file))


def test_what_a_reader_said_cannot_be_said_again(token_file: str) -> None:
    """Whoever has listened to a connection knows a hello with its code; it is of that connection alone."""
    with streaming(token_file=token_file) as stream:
        stream.send("one")
        host = parse_address(stream.address)
        deadline = time.monotonic() + patience(10)
        with host.connect() as first, host.connect() as second:
            greeting = wire.receive_text(first, wire.Greeting, None, "", deadline)
            hello = wire.Hello(reader="r", nonce="n")
            said = bytearray()

            class Noting:
                def sendall(self, data: bytes) -> None:
                    said.extend(data)

            wire.send_text(Noting(), hello, TOKEN.encode(), f"reader {greeting.nonce}")  # type: ignore[arg-type]
            first.close()
            wire.receive_text(second, wire.Greeting, None, "", deadline)
            second.sendall(said)
            answer = wire.receive_text(second, wire.Welcome, None, "", deadline)
    assert answer.refusal == "the token is wrong: both sides need the same"


@pytest.mark.parametrize("said", [b"", b"\0"])
def test_a_crowd_of_strangers_keeps_no_reader_waiting(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold every place, have an hour each to say something, and the reader is there before they are let go."""
    monkeypatch.setattr(consumer, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(consumer, "FIRST_BYTES_S", 3600.0)
    with streaming() as stream, ExitStack() as strangers:
        sent = stream.send("one")
        for _ in range(3 * consumer.MAX_HANDSHAKES):
            stranger = strangers.enter_context(parse_address(stream.address).connect())
            stranger.sendall(said)
        with StreamReader(stream.address, sites=SITE) as reader:
            assert facts([next(reader)]) == expected_facts([sent])
        deadline = time.monotonic() + patience(10)
        while len(found := candidates()) > consumer.MAX_HANDSHAKES and time.monotonic() < deadline:
            found[0].join(0.1)  # the oldest, whose connection was dropped first
        assert len(candidates()) <= consumer.MAX_HANDSHAKES


def candidates() -> list[threading.Thread]:
    """Threads that shake hands."""
    return [thread for thread in threading.enumerate() if thread.name == "headgate-stream-candidate"]


def test_a_stranger_that_says_nothing_is_let_go_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "FIRST_BYTES_S", 0.05)
    with streaming() as stream, parse_address(stream.address).connect() as stranger:
        deadline = time.monotonic() + 10
        wire.receive_text(stranger, wire.Greeting, None, "", deadline)
        with pytest.raises(ConnectionResetError):
            wire.receive_bytes(stranger, 1, deadline)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0\0\0\2{}" + bytes(32), b"\0\0\0\1[" + bytes(32)]
)
def test_strangers_do_not_keep_the_reader_out(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "HANDSHAKE_S", 0.2)
    with streaming() as stream:
        sent = stream.send("one")
        with parse_address(stream.address).connect() as stranger:
            stranger.sendall(said)
            with StreamReader(stream.address, sites=SITE) as reader:
                assert facts([next(reader)]) == expected_facts([sent])


def test_a_reader_refuses_what_is_no_stream() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        reader = StreamReader(f"tcp://127.0.0.1:{other.getsockname()[1]}")
        other.settimeout(10)

        import threading

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StreamRefusedError, match="does not speak the protocol of headgate's streams"):
            next(reader)
        thread.join()


def test_a_unix_socket_is_its_owners_and_one_that_was_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    with streaming(address=f"unix://{path}") as stream:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        sent = stream.send("one")
        with StreamReader(f"unix://{path}", sites=SITE) as reader:
            assert facts([next(reader)]) == expected_facts([sent])
        with pytest.raises(ConfigError, match=r"cannot listen at unix://.*in use"), streaming(address=f"unix://{path}"):
            pass
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen"), streaming(address=f"unix://{path}"):
        pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "missing required field `address`"),
        ({"address": "http://host:1"}, "address: expected tcp://HOST:PORT or unix:///PATH, got 'http://host:1'"),
        ({"address": "tcp://host"}, "address: expected"),
        ({"address": "tcp://host:99999"}, "address: expected"),
        ({"address": "unix://relative"}, "address: expected"),
        ({"address": "unix:///a", "token_file": "/nowhere"}, "token_file /nowhere: .*No such file"),
        ({"address": "unix:///a", "batch_rows": 0}, "batch_rows must be at least 1"),
        ({"address": "unix:///a", "wait_s": -1}, "wait_s must be 0 or more"),
        ({"address": "unix:///a", "tag": "../up"}, "tag"),
        ({"address": "unix:///a", "hooks": {"nowhere": "all"}}, "hooks.nowhere"),
        ({"address": "unix:///a", "token": TOKEN}, "unknown field `token`"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamConsumer.check_params(params)


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    for make in (lambda: StreamConsumer.check_params({"address": "unix:///a"}), lambda: StreamReader("unix:///a")):
        with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: the token has 5 characters; expected at least 16"):
            make()


def test_without_pyarrow_both_sides_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.consumers.stream.consumer.find_spec", lambda name: None)
    monkeypatch.setattr("headgate.consumers.stream.reader.find_spec", lambda name: None)
    for make in (lambda: StreamConsumer.check_params({"address": "unix:///a"}), lambda: StreamReader("unix:///a")):
        with pytest.raises(ConfigError, match=r"pip install 'headgate\[stream\]'"):
            make()


def test_the_operators_sites_are_streamed_of_every_request() -> None:
    def spec(params: dict[str, Any]) -> Any:
        context = SpecContext(instance_name="s", model=EXAMPLE_MODEL, params=params, client_request_id="r")
        return StreamConsumer.global_capture_spec(context)

    assert spec({"address": "unix:///a"}) is None
    found = spec({"address": "unix:///a", "hooks": {"post_mlp": [3]}, "positions": "all_prompt", "tag": "every"})
    assert ([site.name for site in found.sites], found.options) == ([SITE], {"tag": "every"})
    with pytest.raises(RequestError, match=r"^capture.stream.tag"), streaming() as stream:
        stream.send("r", raw={"tag": "../up"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"acknowledge": "never"}, "acknowledge: expected auto or manual"),
        ({"sites": "nowhere"}, "not a site"),
    ],
)
def test_bad_arguments_of_a_reader_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamReader("unix:///a", **arguments)
