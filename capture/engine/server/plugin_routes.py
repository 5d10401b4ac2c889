"""Entry point of the group ``vllm.endpoint_plugins``: headgate's own routes on vLLM's server.

vLLM loads it only where ``VLLM_PLUGINS`` names it: ``VLLM_PLUGINS=headgate``. Fields of requests work without it.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from starlette.datastructures import State

from headgate.capture.engine import vllm_names
from headgate.capture.engine.access.access_key import ADMIN, role_of
from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.client_errors import answer_refused, as_client_error, refused_error
from headgate.capture.engine.contracts.parts import Part, RouteClient, RouteServices, collect
from headgate.capture.engine.frontends.lazy_capture import NotConfiguredError
from headgate.capture.engine.requests.request_reader import reader_of
from headgate.capture.engine.server.access_keys import (
    forwarded_for,
    install_clients,
    open_access,
    peer_of,
    require_role,
)
from headgate.capture.engine.server.bodies.field_guard import install_guard
from headgate.capture.engine.server.bodies.middleware import LONG_BODY, install_bodies
from headgate.capture.engine.server.bodies.parsing import read_json, read_msgpack, read_short_json
from headgate.capture.engine.server.loop_threads import in_turn, run_in_thread
from headgate.capture.engine.server.metrics_page import Counters, MetricsPage
from headgate.capture.engine.server.retry_after import RetryAfterMiddleware
from headgate.capture.engine.server.studio import PATH, open_studio
from headgate.capture.engine.setup.cli_flags import read_server_args
from headgate.capture.engine.setup.vocabulary import ModelVocabulary
from headgate.capture.monitoring.logs import speak_through_vllm
from headgate.capture.schema.batch import Document
from headgate.capture.schema.config import server_config
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import CaptureResult, KeptRequest

SCORED = "logprob_token_ids"
"""Field of vLLM's `SamplingParams`: tokens whose logprobs are returned, whatever their rank."""

_LOGPROBS = "raw_logprobs"


async def vocabulary_of(engine: Any) -> ModelVocabulary:
    """Return the vocabulary of an `AsyncLLM`.

    Raises:
        RequestError: If it was started without a tokenizer.
    """
    try:
        found = engine.get_tokenizer()
        tokenizer = await found if inspect.isawaitable(found) else found
    except ValueError as error:
        raise RequestError("prompt", f"this server has no tokenizer: {error}") from None
    return ModelVocabulary(tokenizer, engine.vllm_config)


async def score(engine: Any, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
    """Return the logprobs of tokens after a prompt; see `RouteServices.score`."""
    SamplingParams = vllm_names.SAMPLING_PARAMS.get()

    mode = getattr(
        engine.vllm_config.model_config.logprobs_mode, "value", engine.vllm_config.model_config.logprobs_mode
    )
    if SCORED not in SamplingParams.__struct_fields__ or mode != _LOGPROBS:
        with as_client_error():
            raise RequestError(
                "metric",
                f"this server cannot score tokens: it takes a vLLM whose SamplingParams has {SCORED}, and "
                f"--logprobs-mode {_LOGPROBS}, which is {mode}",
            )
    if engine.vllm_config.speculative_config is not None:
        with as_client_error():
            raise RequestError(
                "metric", f"this server cannot score tokens: with --speculative-config vLLM passes over {SCORED}"
            )
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **{SCORED: list(dict.fromkeys(token_ids))})
    for name, value in fields.items():
        setattr(params, name, value)
    outputs = engine.generate({"prompt_token_ids": list(prompt)}, params, f"score-{secrets.token_hex(8)}")
    last = None
    async for output in outputs:
        last = output
    if last is None or not last.outputs[0].logprobs:
        reason = None if last is None else last.outputs[0].finish_reason
        raise RuntimeError(f"a scored request ended without a token ({reason})")
    step = last.outputs[0].logprobs[0]
    return [float(step[token].logprob) for token in token_ids]


async def read_prompt(engine: Any, prompt: Sequence[int], instance: str, spec: object) -> CaptureResult:
    """Return what a consumer makes of a prompt; see `RouteServices.read_prompt`."""
    SamplingParams = vllm_names.SAMPLING_PARAMS.get()

    most = engine.vllm_config.model_config.max_model_len
    if len(prompt) >= most:
        raise RequestError("prompt", f"has {len(prompt)} tokens; the model takes {most - 1} and one more")
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    params.capture, params.capture_wait = {instance: spec}, True
    outputs = engine.generate({"prompt_token_ids": list(prompt)}, params, f"read-{secrets.token_hex(8)}")
    last = None
    async for output in outputs:
        last = output
    if last is None or instance not in last.capture_results:
        raise RuntimeError("a prompt was read without a result")
    result: CaptureResult = last.capture_results[instance]
    return result


logger = logging.getLogger("headgate")

_Decode = Callable[[bytes], object]
_MSGPACK = (read_msgpack, read_msgpack)
_DECODERS: dict[str, tuple[_Decode, _Decode]] = {
    "application/json": (read_short_json, read_json),
    "application/msgpack": _MSGPACK,
    "application/x-msgpack": _MSGPACK,
}
"""By content type: of short bodies, on the event loop, and of long ones, on a thread."""


class Endpoints:
    """Implements ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "headgate"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._parts: tuple[str, ...] = ()
        """Names of those whose routes are served."""

    def attach_router(self, app: FastAPI) -> None:
        """Add every part's routes, our counters to the page of metrics, and the reader of bodies."""
        open_access(app.state)
        configuration = read_server_args(app.state.args).additional_config
        routers = collect(self._routes)
        for router in routers.values():
            app.include_router(router)
        app.include_router(open_studio())
        self._parts = tuple(routers)
        app.add_middleware(RetryAfterMiddleware)
        install_guard(app, self._parts)
        app.add_middleware(MetricsPage, counters=Counters(lambda: self._engine))
        install_bodies(app, server_config(configuration))
        install_clients(app)
        app.add_exception_handler(refused_error(), answer_refused)

    async def init_state(self, engine_client: object, state: State, args: Namespace) -> None:
        """The engine is there; the keys are read."""
        self._engine = engine_client
        speak_through_vllm()
        access = open_access(state)
        access.read_again_on_hangup()
        for name in self._parts:
            who = access.keys.described(role_of(name), is_local=access.is_local)
            logger.info("headgate: /v1/%s is served; %s", name, who)
        logger.info("headgate: the studio is served at %s", PATH)

    def _routes(self, part: Part) -> APIRouter | None:
        return part.routes(ServerServices(part.name, lambda: self._engine))


class ServerServices(RouteServices):
    """`RouteServices` of vLLM's server.

    Args:
        part: Name of its section.
        engine: The server's `AsyncLLM`, or None while it is not there.
    """

    def __init__(self, part: str, engine: Callable[[], Any]) -> None:
        self._part = part
        self.engine = engine

    def handle(self) -> Any:
        try:
            return getattr(self.engine(), self._part)
        except NotConfiguredError as error:
            raise HTTPException(404, str(error)) from None

    async def require_key(self, request: Request) -> None:
        require_role(role_of(self._part), request)

    def has_key(self, request: Request) -> bool:
        try:
            require_role(role_of(self._part), request)
        except refused_error():
            return False
        return True

    async def require_admin(self, request: Request) -> None:
        require_role(ADMIN, request)

    def client(self, request: Request) -> RouteClient:
        caller = current_caller()
        address, forwarded = peer_of(request.scope), forwarded_for(request.headers)
        key = None if caller is None else caller.key_with(role_of(self._part))
        if key is None:
            return RouteClient(None, address, is_bound=False, forwarded=forwarded)
        is_bound = not key.is_of_environment and not key.has_role(ADMIN)
        return RouteClient(key.name, address, is_bound, forwarded)

    async def read_object(self, request: Request) -> dict[str, Any]:
        return await read_object(request)

    def find_kept(self, name: str, sample_index: int, field: str) -> KeptRequest:
        return reader_of(self.engine()).find_kept(name, sample_index, field)

    async def vocabulary(self) -> ModelVocabulary:
        return await vocabulary_of(self.engine())

    async def score(self, prompt: Sequence[int], token_ids: Sequence[int], fields: Document) -> Sequence[float]:
        return await score(self.engine(), prompt, token_ids, fields)

    async def read_prompt(self, prompt: Sequence[int], instance: str, spec: object) -> CaptureResult:
        return await read_prompt(self.engine(), prompt, instance, spec)

    def client_errors(self) -> AbstractContextManager[None]:
        return as_client_error()


async def read_object(request: Request) -> dict[str, Any]:
    """The body of a request as an object.

    Raises:
        HTTPException: With status 415, if it is neither JSON nor msgpack.
        RequestError: If it cannot be decoded, or is no object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _DECODERS:
        raise HTTPException(
            415, f"Unsupported Media Type {kind!r}: send Content-Type: application/json or application/msgpack"
        )
    body = await _body_of(request)
    try:
        short, long = _DECODERS[kind]
        document = short(body) if len(body) < LONG_BODY else await run_in_thread(partial(in_turn, partial(long, body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError("body", f"is not {kind.rpartition('/')[2]}: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise RequestError("body", f"expected an object, got {type(document).__name__}")
    return document


async def _body_of(request: Request) -> bytes:
    """As ``request.body()``, which copies what `bodies` hands on in one piece."""
    pieces = [piece async for piece in request.stream() if piece]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
