"""`Client` and `AsyncClient`: a server's whole surface for programs."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, urlencode

from headgate.capture.probe import load as load_probe
from headgate.capture.schema.shared_methods import Awaited, Blocking, shared
from headgate.steering.client.answers import Answer, Capturable, read_answer, read_status
from headgate.steering.client.calls import (
    Lines,
    RouteCall,
    ServerAccess,
    answer,
    event_document,
    generation,
    nothing,
    pack_arrays,
    packed_fields,
    reader,
    request,
    with_messages,
)
from headgate.steering.client.sweep import PatchSweep, SweepOptions, check_kept, collect, plan_sweep
from headgate.steering.control.status import (
    FoundFeatures,
    GlobalUpdate,
    Layers,
    ModuleStatus,
    ProbeStatus,
    RuleStatus,
    SaeStatus,
    SteeringStatus,
)
from headgate.steering.documents.probes import ProbeSource, probe_document
from headgate.steering.documents.request import SteeringDocument, document_of
from headgate.steering.files.vector_files import load

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


def _got(path: str, read: Callable[[Any], T], key: str | None = None) -> Steps[T]:
    """Ask a route."""
    return sent(RouteCall(path=f"/v1/{path}", body=None, read=read, key=key))


_COMPLETION = "/v1/completions", "prompt"
_CHAT = "/v1/chat/completions", "messages"
"""Routes that generate, and the field of each that has what to go on from."""


class Calls:
    """The calls of a `Client`, which returns what `Steps` return, and of an `AsyncClient`, where they are awaited.

    For the arguments see `Session`.
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
        self._access = ServerAccess(
            url=url, api_key=api_key, steering_key=steering_key, capture_key=capture_key, is_binary=is_binary
        )
        self._model: str | None = model
        self._open(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=KEEP_ALIVE_S),
            transport=transport,
        )

    def _open(self, **options: Any) -> None:
        raise NotImplementedError

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
        return self._generated(*_COMPLETION, prompt, fields)

    @shared
    def chat(self, /, messages: Any, **fields: Any) -> Steps[Answer]:
        """Return the next message of a conversation.

        Args:
            messages: As /v1/chat/completions has them, or the text of one message.
            fields: As for `complete`.
        """
        return self._generated(*_CHAT, with_messages(messages), fields)

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
        body = {**self._document(vectors, others), "replace": replace}
        return self._changed("set", body, reader(GlobalUpdate))

    @shared
    def clear(self) -> Steps[None]:
        """Remove all global vectors."""
        return self._changed("clear", {}, nothing)

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

        Raises:
            ValueError: If vectors and a path are given.
        """
        if path is not None:
            if any(value is not None for value in (vectors, *others.values())):
                raise ValueError("register takes vectors and operations or a path, not both")
            file = load(path)
            vectors = file.vectors
            others = {"prefill_vectors": file.prefill_vectors, "decode_vectors": file.decode_vectors}
        body = {"name": name, **self._document(vectors, others)}
        return self._changed("modules/register", body, reader(ModuleStatus))

    @shared
    def unregister(self, name: str) -> Steps[None]:
        """Forget a module; requests that run already keep it."""
        return self._changed("modules/unregister", {"name": name}, nothing)

    @shared
    def register_sae(self, name: str, path: str, site: str | None = None) -> Steps[SaeStatus]:
        """Register an SAE, so that ``steering_features`` can name it; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            path: On the server, below its ``--sae-root``.
            site: Where it acts, such as ``"17.post_mlp"``; None if its files name it.
        """
        body = {"name": name, "path": path, **({} if site is None else {"site": site})}
        return self._changed("saes/register", body, reader(SaeStatus))

    @shared
    def saes(self) -> Steps[list[SaeStatus]]:
        """Return the SAEs whose features requests can change."""
        return _got("steering/saes", reader(list[SaeStatus], "saes"))

    @shared
    def sae_features(self, name: str, query: str = "", limit: int = 50) -> Steps[FoundFeatures]:
        """Return features of an SAE whose labels have every word of a query, the shortest labels first."""
        path = f"steering/saes/{quote(name, safe='')}/features?{urlencode({'query': query, 'limit': limit})}"
        return _got(path, reader(FoundFeatures))

    @shared
    def register_probe(self, name: str, probe: ProbeSource) -> Steps[ProbeStatus]:
        """Register a probe, so that gates can name it; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            probe: A `Probe`, a file of one on this machine, or its fields: ``{"at", "weight", ...}``. Its metadata
                stays here.
        """
        if isinstance(probe, str | os.PathLike):
            probe = load_probe(probe)
        fields: dict[str, Any] = dict(probe) if isinstance(probe, Mapping) else probe_document(probe)
        weight, bias = fields.get("weight"), fields.get("bias")
        rows: Any = list(weight) if weight is not None and getattr(weight, "ndim", 1) == 2 else weight
        fields["weight"] = pack_arrays(rows, "weight", as_text=not self._access.is_binary)
        fields["bias"] = bias.tolist() if bias is not None and hasattr(bias, "tolist") else bias
        return self._changed("probes/register", {"name": name, **fields}, reader(ProbeStatus))

    @shared
    def unregister_probe(self, name: str) -> Steps[None]:
        """Forget a probe; requests that run already keep it."""
        return self._changed("probes/unregister", {"name": name}, nothing)

    @shared
    def probes(self) -> Steps[list[ProbeStatus]]:
        """Return the probes that gates can name."""
        return _got("steering/probes", reader(list[ProbeStatus], "probes"))

    @shared
    def register_rule(self, /, name: str, **rule: Any) -> Steps[RuleStatus]:
        """Register a rule: a gate that acts on requests which did not ask; an earlier one of the name is replaced.

        Args:
            name: 1 to 256 printable characters.
            rule: ``applies_to`` (``"all"``, ``"opt_in"`` or ``"opt_out"``), ``when``, ``then``, ``strength`` and
                ``scope``, as of a gate in ``steering_gates``.
        """
        body = {"name": name, **rule}
        for key in rule.keys() & {"when", "then"}:
            body[key] = pack_arrays(rule[key], key, as_text=not self._access.is_binary)
        return self._changed("rules/register", body, reader(RuleStatus))

    @shared
    def unregister_rule(self, name: str) -> Steps[None]:
        """Forget a rule; it acts on nothing from the next step on."""
        return self._changed("rules/unregister", {"name": name}, nothing)

    @shared
    def rules(self) -> Steps[list[RuleStatus]]:
        """Return the registered rules."""
        return _got("steering/rules", reader(list[RuleStatus], "rules"))

    @shared
    def modules(self) -> Steps[list[str]]:
        """Return the names of the registered modules."""
        return _got("steering/modules", reader(list[str], "modules"))

    @shared
    def status(self) -> Steps[SteeringStatus]:
        """Return the steering of the server: global vectors, modules, vector slots."""
        return _got("steering", read_status)

    @shared
    def layers(self) -> Steps[Layers]:
        """Return the sites that can be steered, and the width of a vector."""
        return _got("steering/layers", reader(Layers))

    @shared
    def consumers(self) -> Steps[Capturable]:
        """Return the sites that can be captured, and the consumers."""
        return _got("capture/consumers", reader(Capturable), key=self._access.capture_key)

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
        check_kept((yield from self._generated(*_COMPLETION, clean, plan.fields)), plan.consumer)
        given = {name: value for name, value in plan.body.items() if value is not None}
        body = {"model": (yield from self._name()), **given}
        key = self._access.capture_key
        events: RouteCall[list[dict[str, Any]]]
        events = RouteCall(path="/v1/patch_sweep", body=body, read=list, key=key, is_stream=True)
        return collect((yield from sent(events)))

    def _name(self) -> Steps[str]:
        if self._model is None:
            self._model = yield from _got("models", lambda document: str(document["data"][0]["id"]))
        return self._model

    def _generated(self, path: str, subject_field: str, subject: Any, fields: dict[str, Any]) -> Steps[Answer]:
        model = yield from self._name()
        given = {subject_field: subject, **fields}
        return (yield from sent(generation(self._access, path, model, given, stream=False)))

    def _changed(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> Steps[T]:
        """Send a change of what acts on everybody, or of what has a name."""
        return sent(RouteCall(path=f"/v1/steering/{path}", body=body, read=read, key=self._access.steering_key))

    def _document(self, vectors: Any, others: SteeringDocument) -> dict[str, Any]:
        return packed_fields(document_of(vectors, others), as_text=not self._access.is_binary)


class Session(Calls, Blocking):
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

    def _stream(self, path: str, fields: dict[str, Any]) -> Generator[Answer, None, None]:
        for document in self._documents(generation(self._access, path, self.model(), fields, stream=True)):
            yield read_answer(document)

    def _documents(self, call: RouteCall[Any]) -> Generator[dict[str, Any], None, None]:
        with self._http.stream(**request(self._access, call)) as response:
            if not response.is_success:
                answer(call, response.status_code, response.read())
            for line in _lines(response):
                if (document := event_document(line)) is not None:
                    yield document


class AsyncSession(Calls, Awaited):
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

    async def _stream(self, path: str, fields: dict[str, Any]) -> AsyncGenerator[Answer, None]:
        call = generation(self._access, path, await self.model(), fields, stream=True)
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
        return self._stream("/v1/completions", {"prompt": prompt, **fields})

    def stream_chat(self, messages: Any, **fields: Any) -> Generator[Answer, None, None]:
        """Return the next message chunk by chunk, as `stream_completion`."""
        return self._stream("/v1/chat/completions", {"messages": with_messages(messages), **fields})


class AsyncClient(AsyncSession):
    """A server, for programs on an event loop: as `Client`, with every call awaited, and streams by ``async for``.

    A stream that is left early goes on until it is closed: see ``contextlib.aclosing``.
    """

    def stream_completion(self, prompt: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_completion`; not awaited itself."""
        return self._stream("/v1/completions", {"prompt": prompt, **fields})

    def stream_chat(self, messages: Any, **fields: Any) -> AsyncGenerator[Answer, None]:
        """See `Client.stream_chat`; not awaited itself."""
        return self._stream("/v1/chat/completions", {"messages": with_messages(messages), **fields})
