"""Open streams with requests of known rows, connections that break, and what readers should find."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.stream import StreamBatch, StreamConsumer, reader
from headgate.consumers.stream.wire import Address

SITE = "3.post_mlp"
Fact = tuple[str, int, int, bytes]
"""Request id, position, token and values of a row."""


class Streaming:
    """A stream consumer and requests for it, on the calling thread."""

    def __init__(self, params: dict[str, Any]) -> None:
        self._params = {"address": "tcp://127.0.0.1:0", **params}
        self.consumer = StreamConsumer(self._params, ConsumerContext(instance_name="stream", model=EXAMPLE_MODEL))
        self.address = self.consumer.address
        self._feed = Feed(self.consumer)
        self._ending: threading.Thread | None = None

    def send(self, name: str, *, prompt: int = 3, output: int = 4, raw: Any = None) -> ExampleRequest:
        """Stream a whole request; raise what the consumer raises."""
        request = self.request(name, prompt=prompt, output=output, raw=raw)
        self.payload = self._feed.whole(request)
        return request

    def request(self, name: str, *, prompt: int = 3, output: int = 4, raw: Any = None) -> ExampleRequest:
        context = SpecContext(
            instance_name="stream",
            model=EXAMPLE_MODEL,
            params=self._params,
            client_request_id=f"client-{name}",
            takes_columns=True,
        )
        wanted = {"hooks": {"post_mlp": [1, 3]}, **(raw or {})}
        return ExampleRequest(StreamConsumer.validate_client_spec(wanted, context), name, prompt=prompt, output=output)

    def end(self) -> None:
        """Close the consumer as an engine does that shuts down, while a reader goes on."""
        self._ending = threading.Thread(target=self.consumer.close, args=(TIMEOUT_S,))
        self._ending.start()

    def close(self) -> None:
        if self._ending is None:
            self.consumer.close(0)
        else:
            self._ending.join(TIMEOUT_S)
            assert not self._ending.is_alive()


@contextmanager
def streaming(**params: Any) -> Iterator[Streaming]:
    """An open stream on a port of this machine, or at ``address``."""
    opened = Streaming(params)
    try:
        yield opened
    finally:
        opened.close()


def facts(batches: Iterable[StreamBatch], site: str = SITE) -> list[Fact]:
    """All rows, in their order."""
    return [
        fact
        for batch in batches
        for fact in zip(
            batch.request_ids,
            batch.positions.tolist(),
            batch.token_ids.tolist(),
            [row.tobytes() for row in batch.float32(site)],
            strict=True,
        )
    ]


def expected_facts(requests: Iterable[ExampleRequest], site: str = SITE) -> list[Fact]:
    """The same of requests, in the order in which they ended."""
    found = []
    for request in requests:
        whole = request.expected()
        rows = whole.rows[next(one for one in whole.sites if one.name == site)].float().numpy()
        for position, token, row in zip(whole.positions.tolist(), whole.token_ids.tolist(), rows, strict=True):
            found.append((request.info.client_request_id, position, token, row.tobytes()))
    return found


class BreakingSocket:
    """A socket that breaks once so many bytes came or went; what was on its way is lost."""

    def __init__(self, real: socket.socket, left: int) -> None:
        self._real = real
        self._left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv_into(self, view: memoryview) -> int:
        return self._real.recv_into(view[: self._take(len(view))])

    def sendall(self, data: bytes) -> None:
        self._real.sendall(data[: self._take(len(data))])
        self._take(0)

    def _take(self, count: int) -> int:
        if self._left <= 0:
            self._real.close()
            raise ConnectionResetError("cut")
        taken = min(count, self._left)
        self._left -= taken
        return taken


def break_connections(patch: pytest.MonkeyPatch, after: Iterable[int]) -> list[int]:
    """Let each connection of readers break after so many bytes, the later ones never; return what is left to break."""
    left = list(after)
    connect = Address.connect

    def breaking(self: Address) -> Any:
        real = connect(self)
        return BreakingSocket(real, left.pop(0)) if left else real

    patch.setattr(Address, "connect", breaking)
    patch.setattr(reader, "FIRST_PAUSE_S", 0.001)
    patch.setattr(reader, "MAX_PAUSE_S", 0.001)
    return left
