"""`Client` and `AsyncClient`: a server's whole surface for programs."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

import headgate.steering.client.calls as calls
from headgate.capture.schema.shared_methods import Awaited, Blocking, shared
from headgate.steering.client.answers import Answer, Capturable, read_answer
from headgate.steering.client.calls import (
    Generation,
    Lines,
    RouteCall,
    ServerAccess,
    answer,
    event_document,
    models,
    request,
)
from headgate.steering.client.sweep import PatchSweep, SweepOptions, check_kept, collect, plan_sweep
from headgate.steering.control.operations import (
    FoundFeatures,
    GlobalUpdate,
    Layers,
    ModuleStatus,
    ProbeSource,
    ProbeStatus,
    RuleStatus,
    SaeStatus,
    SteeringStatus,
)
from headgate.steering.documents.request import SteeringDocument

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing from Python 3.11 on


try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "headgate's client needs httpx, which is not installed: pip install 'headgate[client]'", name=error.name
    ) from error

KEEP_ALIVE_S = 2.0
"""Seconds for which an idle connection is used again; uvicorn closes one after 5 s, perhaps while a request is sent."""

T = TypeVar("T")
Sync = TypeVar("Sync", bound="Session")
Async = TypeVar("Async", bound="AsyncSession")
Path = str | os.PathLike[str]


Steps = Generator[RouteCall[Any], Any, T]
"""A call of a client as a generator: it yields calls of routes, is sent their answers, and returns its own."""


def sent(call: RouteCall[T]) -> Steps[T]:
    """Send one call of a route and return its answer."""
    found: T = yield call
    return found


class Calls:
    """The calls of a `Client`, which returns what `Steps` return, and of an `AsyncClient`, where they are awaited."""

    _access: ServerAccess
    _model: str | None

    @shared
    def model(self) -> Steps[str]:
        """Return the name of the model that this client asks."""
        return self._name()

    @shared
    def complete(self, /, prompt: Any, **fields: Any) -> Steps[Answer]:
        """Complete a prompt, or several.

        Args:
            prompt: As /v1/completions has it: a text, a list of texts, token ids, ...
            fields: Everything else of the body: ``max_tokens``, ``capture``, ``steering_vectors``, ``steering_ops``,
                ``steering_gates``, ``steering_name``, ... Vectors may be arrays, tensors or `PhaseVectors`.
        """
        return self._generated(calls.completion, prompt, fields)

    @shared
    def chat(self, /, messages: Any, **fields: Any) -> Steps[Answer]:
        """Return the next message of a conversation.

        Args:
            messages: As /v1/chat/completions has them, or the text of one message.
            fields: As for `complete`.
        """
        return self._generated(calls.chat, messages, fields)

    @shared
    def set(
        self, vectors: Any = None, *, replace: bool = False, **others: Unpack[SteeringDocument]
    ) -> Steps[GlobalUpdate]:
        """Steer every request with vectors, operations and features from the next step on, running ones included.

        Args:
            vectors: For prompt and generated positions.
            replace: Remove everything else. Otherwise vectors replace those at the same site of the same tier,
                operations all of the same tier, and edits of features and reconstructions all of the same argument.
            others: Vectors of other phases, operations, edits of features and reconstructions: the keys of
                `SteeringDocument`.
        """
        return sent(calls.set_global(self._access, vectors, others, replace=replace))

    @shared
    def clear(self) -> Steps[None]:
        """Remove all global vectors."""
        return sent(calls.clear_global(self._access))

    @shared
    def register(
        self,
        name: str,
        vectors: Any = None,
        *,
        path: Path | None = None,
        **others: Unpack[SteeringDocument],
    ) -> Steps[ModuleStatus]:
        """Name vectors and operations, so that requests need only say the name; an earlier module is replaced.

        Args:
            name: 1 to 256 printable characters.
            vectors: For prompt and generated positions.
            path: A file of vectors on this machine, of any format, in place of vectors; see `headgate.steering.load`.
            others: Vectors of other phases, operations, edits of features and reconstructions: the keys of
                `SteeringDocument`.
        """
        return sent(calls.register(self._access, name, vectors, others, path))

    @shared
    def unregister(self, name: str) -> Steps[None]:
        """Forget a module; requests that run already keep it."""
        return sent(calls.unregister(self._access, name))

    @shared
    def register_sae(self, name: str, path: str, site: str | None = None) -> Steps[SaeStatus]:
        """Register an SAE, so that ``steering_features`` can name it; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            path: On the server, below its ``--sae-root``.
            site: Where it acts, such as ``"17.post_mlp"``; None if its files name it.
        """
        return sent(calls.register_sae(self._access, name, path, site))

    @shared
    def saes(self) -> Steps[list[SaeStatus]]:
        """Return the SAEs whose features requests can change."""
        return sent(calls.saes())

    @shared
    def sae_features(self, name: str, query: str = "", limit: int = 50) -> Steps[FoundFeatures]:
        """Return features of an SAE whose labels have every word of a query, the shortest labels first."""
        return sent(calls.sae_features(name, query, limit))

    @shared
    def register_probe(self, name: str, probe: ProbeSource) -> Steps[ProbeStatus]:
        """Register a probe, so that gates can name it; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            probe: A `Probe`, a file of one on this machine, or its fields: ``{"at", "weight", ...}``. Its metadata
                stays here.
        """
        return sent(calls.register_probe(self._access, name, probe))

    @shared
    def unregister_probe(self, name: str) -> Steps[None]:
        """Forget a probe; requests that run already keep it."""
        return sent(calls.unregister_probe(self._access, name))

    @shared
    def probes(self) -> Steps[list[ProbeStatus]]:
        """Return the probes that gates can name."""
        return sent(calls.probes())

    @shared
    def register_rule(self, /, name: str, **rule: Any) -> Steps[RuleStatus]:
        """Register a rule: a gate that acts on requests which did not ask; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            rule: ``applies_to`` (``"all"``, ``"opt_in"`` or ``"opt_out"``), ``when``, ``then``, ``strength`` and
                ``scope``, as of a gate in ``steering_gates``.
        """
        return sent(calls.register_rule(self._access, name, rule))

    @shared
    def unregister_rule(self, name: str) -> Steps[None]:
        """Forget a rule; it acts on nothing from the next step on."""
        return sent(calls.unregister_rule(self._access, name))

    @shared
    def rules(self) -> Steps[list[RuleStatus]]:
        """Return the registered rules."""
        return sent(calls.rules())

    @shared
    def modules(self) -> Steps[list[str]]:
        """Return the names of the registered modules."""
        return sent(calls.modules())

    @shared
    def status(self) -> Steps[SteeringStatus]:
        """Return the steering of the server: global vectors, modules, vector slots."""
        return sent(calls.status())

    @shared
    def layers(self) -> Steps[Layers]:
        """Return the sites that can be steered, and the width of a vector."""
        return sent(calls.layers())

    @shared
    def consumers(self) -> Steps[Capturable]:
        """Return the sites that can be captured, and the consumers."""
        return sent(calls.consumers(self._access))

    @shared
    def patch_sweep(self, clean: Any, corrupt: Any, answer: Any, **options: Unpack[SweepOptions]) -> Steps[PatchSweep]:
        """Find the sites and positions where a clean prompt's rows change a corrupted prompt's answer.

        The clean prompt is run once and its rows are kept; then each of them is put into the corrupted prompt, one at a
        time. The server needs the consumer `memory`, and sites that can be captured and are declared for operations.

        Args:
            clean: The prompt whose answer is `answer`: a text, or tokens.
            corrupt: The prompt that is patched; best one of as many tokens.
            answer: The token whose logprob counts: a text, such as ``" Paris"``, or an id.
            options: What is swept and measured: the keys of `SweepOptions`.
        """
        plan = plan_sweep(corrupt, answer, **options)
        check_kept((yield from self._generated(calls.completion, clean, plan.fields)), plan.consumer)
        model = yield from self._name()
        return collect((yield from sent(calls.patch_sweep(self._access, model, plan.body))))

    def _name(self) -> Steps[str]:
        if self._model is None:
            self._model = yield from sent(models())
        return self._model

    def _generated(self, build: Generation, subject: Any, fields: dict[str, Any]) -> Steps[Answer]:
        model = yield from self._name()
        return (yield from sent(build(self._access, model, subject, fields, stream=False)))


class _Settings(Calls):
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
        self._access = ServerAccess(
            url=url, api_key=api_key, steering_key=steering_key, capture_key=capture_key, is_binary=is_binary
        )
        self._model = model
        self._open(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEEP_ALIVE_S),
            transport=transport,
        )

    def _open(self, **options: Any) -> None:
        raise NotImplementedError


class Session(_Settings, Blocking):
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

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self: Sync) -> Sync:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, steps: Generator[Any, Any, T]) -> T:
        found: Any = None
        try:
            while True:
                found = self._send(steps.send(found))
        except StopIteration as end:
            return cast("T", end.value)

    def _send(self, call: RouteCall[Any]) -> Any:
        if call.is_stream:
            return list(self._documents(call))
        response = self._http.send(self._http.build_request(**request(self._access, call)))
        return answer(call, response.status_code, response.content)

    def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> Generator[Answer, None, None]:
        for document in self._documents(build(self._access, self.model(), subject, fields, stream=True)):
            yield read_answer(document)

    def _documents(self, call: RouteCall[Any]) -> Generator[dict[str, Any], None, None]:
        with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, response.read())
            for line in _lines(response):
                if (document := event_document(line)) is not None:
                    yield document


class AsyncSession(_Settings, Awaited):
    """A session of a program on an event loop; for the arguments see `Session`."""

    def _open(self, **options: Any) -> None:
        self._http = httpx.AsyncClient(**options)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self: Async) -> Async:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _run(self, steps: Generator[Any, Any, T]) -> T:
        found: Any = None
        try:
            while True:
                found = await self._send(steps.send(found))
        except StopIteration as end:
            return cast("T", end.value)

    async def _send(self, call: RouteCall[Any]) -> Any:
        if call.is_stream:
            return [document async for document in self._documents(call)]
        response = await self._http.send(self._http.build_request(**request(self._access, call)))
        return answer(call, response.status_code, response.content)

    async def _stream(self, build: Generation, subject: Any, fields: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        call = build(self._access, await self.model(), subject, fields, stream=True)
        async with aclosing(self._documents(call)) as documents:
            async for document in documents:
                yield read_answer(document)

    async def _documents(self, call: RouteCall[Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, await response.aread())
            async for line in _lines_later(response):
                if (document := event_document(line)) is not None:
                    yield document


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


class Client(Session):
    """A server, for synchronous programs; any number of threads.

    ::

        with Client("http://localhost:8000") as client:
            client.register("calm", {"post_mlp": {12: direction}})
            print(client.chat("Hello", steering_module_ref=("calm", 1.5), max_tokens=40).text)

    Every method raises `ServerError` if the server refuses or fails, `RequestError` if vectors cannot be read, and
    ``httpx.HTTPError`` if the server cannot be reached. For the arguments see
    `headgate.steering.client.http.Session`.
    """

    def stream_completion(self, prompt: Any, **fields: Any) -> Generator[Answer, None, None]:
        """Complete a prompt chunk by chunk; the last chunk has the captured rows. Closing it ends the request."""
        return self._stream(calls.completion, prompt, fields)

    def stream_chat(self, messages: Any, **fields: Any) -> Generator[Answer, None, None]:
        """Return the next message chunk by chunk, as `stream_completion`."""
        return self._stream(calls.chat, messages, fields)


class AsyncClient(AsyncSession):
    """A server, for programs on an event loop: as `Client`, with every call awaited, and streams by ``async for``.

    A stream that is left early goes on until it is closed: see ``contextlib.aclosing``.
    """

    def stream_completion(self, prompt: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_completion`; not awaited itself."""
        return self._stream(calls.completion, prompt, fields)

    def stream_chat(self, messages: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_chat`; not awaited itself."""
        return self._stream(calls.chat, messages, fields)
