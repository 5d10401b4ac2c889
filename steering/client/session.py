"""Sessions with a server over httpx: the connections, and how calls are sent and streams are read."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

from headgate.steering.client.answers import Answer
from headgate.steering.client.calls import (
    Access,
    Call,
    Generation,
    Lines,
    answer,
    event,
    event_document,
    models,
    request,
)

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "headgate's client needs httpx, which is not installed: pip install 'headgate[client]'", name=error.name
    ) from error

T = TypeVar("T")
Sync = TypeVar("Sync", bound="Session")
Async = TypeVar("Async", bound="AsyncSession")


class _Settings:
    """The settings of both kinds of session; for the arguments see `Session`."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        steering_key: str | None = None,
        capture_key: str | None = None,
        is_binary: bool = False,
        timeout_s: float = 600.0,
        transport: Any = None,
    ) -> None:
        self._access = Access(
            url=url, api_key=api_key, steering_key=steering_key, capture_key=capture_key, is_binary=is_binary
        )
        self._model = model
        self._open(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            transport=transport,
        )

    def _open(self, **options: Any) -> None:
        raise NotImplementedError


class Session(_Settings):
    """A session of a synchronous program; any number of threads.

    Args:
        url: The server's address, such as ``http://localhost:8000``; a ``/v1`` at the end is allowed.
        model: Name of the model to ask; the first that the server names if None.
        api_key: The server's ``--api-key``.
        steering_key: A key with the role ``steer``, for changes of global vectors and modules.
        capture_key: A key with the role ``capture``, for requests that capture; may be the same.
        is_binary: Send vectors as raw bytes in msgpack bodies instead of base64 in JSON: less to send and to read.
            The server needs ``VLLM_PLUGINS=headgate``, which `headgate serve` sets.
        timeout_s: Seconds to wait for the server to send anything.
        transport: An httpx transport to send requests with, for tests.
    """

    def _open(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def model(self) -> str:
        """Return the name of the model that this client asks."""
        if self._model is None:
            self._model = self._send(models())
        return self._model

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self: Sync) -> Sync:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        response = self._http.send(self._http.build_request(**request(self._access, call)))
        return answer(call, response.status_code, response.content)

    def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> Generator[Answer, None, None]:
        call = build(self._access, self.model(), subject, fields, stream=True)
        with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, response.read())
            for line in _lines(response):
                if (chunk := event(line)) is not None:
                    yield chunk

    def _events(self, call: Call[None]) -> Generator[dict[str, Any], None, None]:
        with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, response.read())
            for line in _lines(response):
                if (document := event_document(line)) is not None:
                    yield document


class AsyncSession(_Settings):
    """A session of a program on an event loop; for the arguments see `Session`."""

    def _open(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def model(self) -> str:
        """See `Session.model`."""
        if self._model is None:
            self._model = await self._send(models())
        return self._model

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self: Async) -> Async:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, call: Call[T]) -> T:
        response = await self._http.send(self._http.build_request(**request(self._access, call)))
        return answer(call, response.status_code, response.content)

    async def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        call = build(self._access, await self.model(), subject, fields, stream=True)
        async with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, await response.aread())
            async for line in _lines_later(response):
                if (chunk := event(line)) is not None:
                    yield chunk

    async def _events(self, call: Call[None]) -> list[dict[str, Any]]:
        async with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, await response.aread())
            found = [event_document(line) async for line in _lines_later(response)]
        return [document for document in found if document is not None]


def _lines(response: httpx.Response) -> Generator[str, None, None]:
    lines = Lines()
    for piece in response.iter_bytes():
        yield from lines.cut(piece)
    yield from lines.cut(b"\n")


async def _lines_later(response: httpx.Response) -> AsyncGenerator[str, None]:
    lines = Lines()
    async for piece in response.aiter_bytes():
        for line in lines.cut(piece):
            yield line
    for line in lines.cut(b"\n"):
        yield line
