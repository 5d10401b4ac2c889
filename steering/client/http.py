"""`Client` and `AsyncClient`: a server's whole surface for programs, over httpx."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

from headgate.steering.client import calls
from headgate.steering.client.answers import Answer, Capturable, GlobalUpdate, Layers
from headgate.steering.client.calls import Access, Call, Generation
from headgate.steering.control.operations import ModuleStatus, SteeringStatus

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "headgate's client needs httpx, which is not installed: pip install 'headgate[client]'", name=error.name
    ) from error

T = TypeVar("T")
Path = str | os.PathLike[str]


class _Settings:
    """What both clients are made from.

    Args:
        url: The server's address, such as ``http://localhost:8000``; a ``/v1`` at the end is allowed.
        model: Whom to ask; the first that the server names if None.
        api_key: The server's ``--api-key``.
        steering_key: One of its ``HEADGATE_STEERING_KEYS``, for changes of global vectors and modules.
        capture_key: One of its ``HEADGATE_CAPTURE_KEYS``, for requests that capture.
        is_binary: Send vectors as raw bytes in msgpack bodies instead of base64 in JSON: less to send and to read.
            The server needs ``VLLM_PLUGINS=headgate``, which `headgate serve` sets.
        timeout_s: Seconds to wait for the server to send anything.
        transport: For tests: what to send requests with.
    """

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


class Client(_Settings):
    """A server, for synchronous programs; any number of threads.

    ::

        with Client("http://localhost:8000") as client:
            client.register("calm", {"post_mlp": {12: direction}})
            print(client.chat("Hello", steering_module_ref=("calm", 1.5), max_tokens=40).text)

    Every method raises `ServerError` if the server refuses or fails, `RequestError` if vectors cannot be read, and
    ``httpx.HTTPError`` if the server cannot be reached.
    """

    def _open(self, **options: Any) -> None:
        self._http = httpx.Client(**options)

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """A completion of a prompt, or of several.

        Args:
            prompt: As /v1/completions has it: a text, a list of texts, token ids, ...
            fields: Everything else of the body: ``max_tokens``, ``capture``, ``steering_vectors``, ``steering_name``,
                ... Vectors may be arrays, tensors or `PhaseVectors`.
        """
        return self._send(calls.completion(self._access, self.model(), prompt, fields, stream=False))

    def chat(self, messages: Any, **fields: Any) -> Answer:
        """The next message of a conversation.

        Args:
            messages: As /v1/chat/completions has them, or the text of one message.
            fields: As for `complete`.
        """
        return self._send(calls.chat(self._access, self.model(), messages, fields, stream=False))

    def stream_completion(self, prompt: Any, **fields: Any) -> Generator[Answer, None, None]:
        """`complete`, chunk by chunk; the last chunk has what was captured. To close it ends the request."""
        return self._stream(calls.completion, prompt, fields)

    def stream_chat(self, messages: Any, **fields: Any) -> Generator[Answer, None, None]:
        """`chat`, chunk by chunk, as `stream_completion`."""
        return self._stream(calls.chat, messages, fields)

    def set(
        self, vectors: Any = None, *, prefill_vectors: Any = None, decode_vectors: Any = None, replace: bool = False
    ) -> GlobalUpdate:
        """Add vectors to every request from the next step on, those that run included.

        Args:
            vectors: For prompt and generated positions.
            prefill_vectors: For prompt positions in addition.
            decode_vectors: For generated positions in addition.
            replace: Take everything else away. Otherwise vectors replace those at the same site of the same tier.
        """
        tiers = (vectors, prefill_vectors, decode_vectors)
        return self._send(calls.set_global(self._access, tiers, replace=replace))

    def clear(self) -> None:
        """Take all global vectors away."""
        self._send(calls.clear_global(self._access))

    def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        path: Path | None = None,
    ) -> ModuleStatus:
        """Name vectors, so that requests need only say the name; in place of what had this name.

        Args:
            name: 1 to 256 printable characters.
            vectors: For prompt and generated positions.
            prefill_vectors: For prompt positions in addition.
            decode_vectors: For generated positions in addition.
            path: A ``.safetensors``, ``.json`` or ``.gguf`` file of vectors on this machine, in place of vectors.
        """
        return self._send(calls.register(self._access, name, (vectors, prefill_vectors, decode_vectors), path))

    def unregister(self, name: str) -> None:
        """Forget a module; requests that run already keep it."""
        self._send(calls.unregister(self._access, name))

    def modules(self) -> list[str]:
        """The names of the registered modules."""
        return self._send(calls.modules())

    def status(self) -> SteeringStatus:
        """What the server steers with: global vectors, modules, vector slots."""
        return self._send(calls.status())

    def layers(self) -> Layers:
        """What can be steered, and how wide a vector is."""
        return self._send(calls.layers())

    def consumers(self) -> Capturable:
        """What can be captured, and by whom."""
        return self._send(calls.consumers(self._access))

    def model(self) -> str:
        """Whom this client asks."""
        if self._model is None:
            self._model = self._send(calls.models())
        return self._model

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        response = self._http.send(self._http.build_request(**calls.request(self._access, call)))
        return calls.answer(call, response.status_code, response.content)

    def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> Generator[Answer, None, None]:
        call = build(self._access, self.model(), subject, fields, stream=True)
        with self._http.stream(**calls.request(self._access, call)) as response:
            if not response.is_success:
                calls.answer(call, response.status_code, response.read())
            for line in response.iter_lines():
                if (chunk := calls.event(line)) is not None:
                    yield chunk


class AsyncClient(_Settings):
    """A server, for programs on an event loop: as `Client`, with every call awaited, and streams by ``async for``.

    A stream that is left early goes on until it is closed: see ``contextlib.aclosing``.
    """

    def _open(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        """See `Client.complete`."""
        return await self._send(calls.completion(self._access, await self.model(), prompt, fields, stream=False))

    async def chat(self, messages: Any, **fields: Any) -> Answer:
        """See `Client.chat`."""
        return await self._send(calls.chat(self._access, await self.model(), messages, fields, stream=False))

    def stream_completion(self, prompt: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_completion`; not awaited itself."""
        return self._stream(calls.completion, prompt, fields)

    def stream_chat(self, messages: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_chat`; not awaited itself."""
        return self._stream(calls.chat, messages, fields)

    async def set(
        self, vectors: Any = None, *, prefill_vectors: Any = None, decode_vectors: Any = None, replace: bool = False
    ) -> GlobalUpdate:
        """See `Client.set`."""
        tiers = (vectors, prefill_vectors, decode_vectors)
        return await self._send(calls.set_global(self._access, tiers, replace=replace))

    async def clear(self) -> None:
        """See `Client.clear`."""
        await self._send(calls.clear_global(self._access))

    async def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        prefill_vectors: Any = None,
        decode_vectors: Any = None,
        path: Path | None = None,
    ) -> ModuleStatus:
        """See `Client.register`."""
        return await self._send(calls.register(self._access, name, (vectors, prefill_vectors, decode_vectors), path))

    async def unregister(self, name: str) -> None:
        """See `Client.unregister`."""
        await self._send(calls.unregister(self._access, name))

    async def modules(self) -> list[str]:
        """See `Client.modules`."""
        return await self._send(calls.modules())

    async def status(self) -> SteeringStatus:
        """See `Client.status`."""
        return await self._send(calls.status())

    async def layers(self) -> Layers:
        """See `Client.layers`."""
        return await self._send(calls.layers())

    async def consumers(self) -> Capturable:
        """See `Client.consumers`."""
        return await self._send(calls.consumers(self._access))

    async def model(self) -> str:
        """See `Client.model`."""
        if self._model is None:
            self._model = await self._send(calls.models())
        return self._model

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, call: Call[T]) -> T:
        response = await self._http.send(self._http.build_request(**calls.request(self._access, call)))
        return calls.answer(call, response.status_code, response.content)

    async def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        call = build(self._access, await self.model(), subject, fields, stream=True)
        async with self._http.stream(**calls.request(self._access, call)) as response:
            if not response.is_success:
                calls.answer(call, response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if (chunk := calls.event(line)) is not None:
                    yield chunk
