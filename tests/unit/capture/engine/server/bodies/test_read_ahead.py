"""How far uvicorn reads a body ahead of the application."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import flow_control

from headgate.capture.engine.server.bodies.middleware import READ_AHEAD, read_ahead
from tests.deadlines import patience

TIMEOUT_S = patience(30)
SOCKET_BYTES = 1 << 16
BODY = bytes(READ_AHEAD - (1 << 18))
PROTOCOLS = ("httptools", "h11")


@pytest.fixture(autouse=True)
def _limits_as_before() -> Iterator[None]:
    before = limits()
    yield
    for name, limit in before.items():
        sys.modules[name].HIGH_WATER_LIMIT = limit  # type: ignore[attr-defined]


def limits() -> dict[str, int]:
    """By module."""
    found = {name: module for name, module in sys.modules.items() if name.startswith("uvicorn.protocols.http.")}
    return {name: module.HIGH_WATER_LIMIT for name, module in found.items() if hasattr(module, "HIGH_WATER_LIMIT")}


class Server:
    """uvicorn, with small socket buffers and an application that asks for the body once all of it was sent."""

    def __init__(self, protocol: str) -> None:
        self.is_sent = threading.Event()
        self.num_received = 0
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self.address = self._listening.getsockname()
        config = uvicorn.Config(self._answer, interface="asgi3", http=protocol, lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listening],))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_sent.set()
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(self.is_sent.wait, TIMEOUT_S)
        is_more = True
        while is_more:
            message = await receive()
            self.num_received += len(message["body"])
            is_more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_body_is_read_before_the_application_asks_for_it(protocol: str) -> None:
    read_ahead(READ_AHEAD)
    with Server(protocol) as server, socket.create_connection(server.address, TIMEOUT_S) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        client.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(BODY))

        client.sendall(BODY)  # would time out: the application waits until this is through
        server.is_sent.set()
        answer = b"".join(iter(lambda: client.recv(4096), b""))

    assert answer.startswith(b"HTTP/1.1 200")
    assert server.num_received == len(BODY)


def test_every_protocol_has_the_limit_and_those_that_are_imported_later() -> None:
    for name in PROTOCOLS:
        importlib.import_module(f"uvicorn.protocols.http.{name}_impl")

    read_ahead(READ_AHEAD)

    assert set(limits().values()) == {READ_AHEAD}
    assert "uvicorn.protocols.http.flow_control" in limits(), "protocols take it from there when they are imported"


def test_it_is_never_less_than_uvicorns_own() -> None:
    before = flow_control.HIGH_WATER_LIMIT

    read_ahead(1)

    assert set(limits().values()) == {before}
