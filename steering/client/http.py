"""`Client` and `AsyncClient`: a server's whole surface for programs."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from typing import Any

import headgate.steering.client.calls as calls
from headgate.steering.client.answers import Answer, Capturable, GlobalUpdate, Layers
from headgate.steering.client.session import AsyncSession, Session
from headgate.steering.control.operations import ModuleStatus, SteeringStatus

Path = str | os.PathLike[str]


class Client(Session):
    """A server, for synchronous programs; any number of threads.

    ::

        with Client("http://localhost:8000") as client:
            client.register("calm", {"post_mlp": {12: direction}})
            print(client.chat("Hello", steering_module_ref=("calm", 1.5), max_tokens=40).text)

    Every method raises `ServerError` if the server refuses or fails, `RequestError` if vectors cannot be read, and
    ``httpx.HTTPError`` if the server cannot be reached. For the arguments see
    `headgate.steering.client.session.Session`.
    """

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        """Complete a prompt, or several.

        Args:
            prompt: As /v1/completions has it: a text, a list of texts, token ids, ...
            fields: Everything else of the body: ``max_tokens``, ``capture``, ``steering_vectors``, ``steering_name``,
                ... Vectors may be arrays, tensors or `PhaseVectors`.
        """
        return self._send(calls.completion(self._access, self.model(), prompt, fields, stream=False))

    def chat(self, messages: Any, **fields: Any) -> Answer:
        """Return the next message of a conversation.

        Args:
            messages: As /v1/chat/completions has them, or the text of one message.
            fields: As for `complete`.
        """
        return self._send(calls.chat(self._access, self.model(), messages, fields, stream=False))

    def stream_completion(self, prompt: Any, **fields: Any) -> Generator[Answer, None, None]:
        """Complete a prompt chunk by chunk; the last chunk has the captured rows. Closing it ends the request."""
        return self._stream(calls.completion, prompt, fields)

    def stream_chat(self, messages: Any, **fields: Any) -> Generator[Answer, None, None]:
        """Return the next message chunk by chunk, as `stream_completion`."""
        return self._stream(calls.chat, messages, fields)

    def set(
        self, vectors: Any = None, *, prefill_vectors: Any = None, decode_vectors: Any = None, replace: bool = False
    ) -> GlobalUpdate:
        """Add vectors to every request from the next step on, those that run included.

        Args:
            vectors: For prompt and generated positions.
            prefill_vectors: For prompt positions in addition.
            decode_vectors: For generated positions in addition.
            replace: Remove everything else. Otherwise vectors replace those at the same site of the same tier.
        """
        tiers = (vectors, prefill_vectors, decode_vectors)
        return self._send(calls.set_global(self._access, tiers, replace=replace))

    def clear(self) -> None:
        """Remove all global vectors."""
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
        """Name vectors, so that requests need only say the name; an earlier module of the name is replaced.

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
        """Return the names of the registered modules."""
        return self._send(calls.modules())

    def status(self) -> SteeringStatus:
        """Return the steering of the server: global vectors, modules, vector slots."""
        return self._send(calls.status())

    def layers(self) -> Layers:
        """Return the sites that can be steered, and the width of a vector."""
        return self._send(calls.layers())

    def consumers(self) -> Capturable:
        """Return the sites that can be captured, and the consumers."""
        return self._send(calls.consumers(self._access))


class AsyncClient(AsyncSession):
    """A server, for programs on an event loop: as `Client`, with every call awaited, and streams by ``async for``.

    A stream that is left early goes on until it is closed: see ``contextlib.aclosing``.
    """

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
