"""Capture on vLLM's server: the HTTP routes ``/v1/capture/...``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from starlette.responses import Response, StreamingResponse

from headgate.capture.engine.access.access_key import ADMIN, AccessKey
from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.requests.capture_request import capturing_key, check_consumer
from headgate.capture.engine.server.openai_routes import FIELDS_DECODER, encoded_result
from headgate.capture.schema.config import Location, Overload
from headgate.capture.schema.errors import (
    CaptureFileError,
    ForbiddenError,
    NoCaptureError,
    OverloadedError,
    RequestError,
)
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.results import CaptureBrowser, CaptureResult, ReportContext, SentFile, StateReporter
from headgate.capture.schema.sites import STREAM_HOOKS, HookPoint, Site, site_map
from headgate.capture.schema.vocabulary import Vocabulary, read_tokens

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.parts import RouteServices

_TEXT = {"type": "string"}
_CONSUMER = {
    "type": "object",
    "properties": {
        "name": {**_TEXT, "description": "What requests call it."},
        "consumer": {**_TEXT, "description": "Its entry point."},
        "location": {"type": "string", "enum": list(get_args(Location))},
        "reads_client_spec": {"type": "boolean", "description": "Whether requests can name it."},
        "overload": {"type": "string", "enum": list(get_args(Overload))},
        "offers": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": _TEXT},
            "description": "Names that requests may choose from, by the field that names them: {lens: [logit]}.",
        },
        "is_browsable": {"type": "boolean", "description": "Whether its captures can be listed and read back."},
    },
    "required": ["name", "consumer", "location", "reads_client_spec", "overload", "offers", "is_browsable"],
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "consumers": {"type": "array", "items": _CONSUMER},
        "count": {"type": "integer"},
        "sites": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}},
            "description": "What can be captured: {hook point: layers}.",
        },
        "memory": {
            "type": "object",
            "description": "What capturing costs on the device: each site has room for one step, at least.",
            "properties": {
                "step_rows": {"type": "integer", "description": "Rows of one site."},
                "hooks": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "properties": {
                            "layers": {"type": "integer", "description": "Layers whose rows have that size."},
                            "width": {"type": "integer", "description": "Values of a row, of the widest layer."},
                            "dtype": _TEXT,
                            "site_bytes": {"type": "integer", "description": "Of one site, of the widest layer."},
                        },
                    },
                    "description": "By hook point, whether or not it is captured. That a model has it is not said.",
                },
            },
            "required": ["step_rows", "hooks"],
        },
    },
    "required": ["consumers", "count", "sites", "memory"],
}
_EXAMPLE = {
    "consumers": [
        {
            "name": "filesystem",
            "consumer": "filesystem",
            "location": "worker",
            "reads_client_spec": True,
            "overload": "block",
            "offers": {},
            "is_browsable": True,
        }
    ],
    "count": 1,
    "sites": {"post_mlp": [0, 1, 2]},
    "memory": {
        "step_rows": 2048,
        "hooks": {"post_mlp": {"layers": 3, "width": 576, "dtype": "bfloat16", "site_bytes": 2359296}},
    },
}


_REPORT_EXAMPLE = {
    "written_at": "2030-01-01T12:00:00.000+00:00",
    "settings": {"model": "my/model", "hidden_size": 576, "covariance": "full"},
    "entries": [{"tag": "default", "site": "12.post_mlp", "phase": "prefill", "num_rows": 4096, "mean_norm": 61.4}],
    "count": 1,
}


_READ_BODY = {
    "schema": {
        "type": "object",
        "properties": {
            "prompt": {
                "oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}],
                "description": "A text, which begins with the model's special tokens, or token ids.",
            },
        },
        "required": ["prompt"],
        "additionalProperties": True,
        "description": "The other fields are those of the consumer.",
    },
    "example": {"prompt": "The capital of France is", "lens": "logit", "layers": [12, 20], "tokens": [" Paris"]},
}
_READ_EXAMPLE = {
    "prompt_token_ids": [504, 3575],
    "tokens": ["The", " capital"],
    "status": "ok",
    "payload": {
        "lens": "logit",
        "positions": [0, 1],
        "layers": {
            "12": {
                "ids": [[198], [282]],
                "tokens": [["\n"], [" of"]],
                "logprobs": [[-0.1], [-0.2]],
                "token_logprobs": [[-33.0], [-31.5]],
                "token_ranks": [[6616], [5839]],
            }
        },
    },
}


_CAPTURE_EXAMPLE = {
    "tag": "default",
    "name": "day.safetensors",
    "request_id": "day",
    "layout": "request",
    "written_at": "2030-01-01T12:00:00.000+00:00",
    "model": "my/model",
    "status": "stop",
    "num_rows": 2,
    "num_prompt_tokens": 1,
    "num_bytes": 4608,
    "dropped_rows": 0,
    "sites": {"post_mlp": [12, 20]},
    "roles": ["user"],
    "if_probe": None,
    "stage": [0, 1],
}
_PAGE_EXAMPLE = {"captures": [_CAPTURE_EXAMPLE], "count": 1, "next": None, "damaged": []}
_ONE_EXAMPLE = {
    **_CAPTURE_EXAMPLE,
    "metadata": {"model": "my/model", "num_tokens": 3, "selector": "all"},
    "positions": [0, 1],
    "token_ids": [504, 3575],
    "tokens": ["The", " capital"],
}


def open_routes(services: RouteServices) -> APIRouter:
    """The router of ``/v1/capture``."""
    router = APIRouter(prefix="/v1/capture", tags=["capture"], dependencies=[Depends(services.require_key)])

    @router.get(
        "/consumers",
        summary="Consumers of captured activations, and what can be captured",
        response_model=None,
        responses={
            200: {"description": "Done.", "content": {"application/json": {"schema": _SCHEMA, "example": _EXAMPLE}}},
            403: {"description": "The request lacks a key of HEADGATE_CAPTURE_KEYS."},
            404: {"description": "The server was started without capture."},
        },
    )
    async def consumers() -> dict[str, object]:
        """The consumers that the operator configured, without their parameters, which may hold secrets."""
        front = _front_end(services)
        max_tokens = services.engine().vllm_config.scheduler_config.max_num_batched_tokens
        return {**described(front), "memory": memory_of(front, front.config.ring_rows or max_tokens)}

    _add_reading(router, services)
    _add_state(router, services)
    _add_browsing(router, services)
    return router


def _add_reading(router: APIRouter, services: RouteServices) -> None:
    @router.post(
        "/{consumer}",
        summary="What a consumer, such as a lens, makes of a prompt, without an answer to it",
        response_model=None,
        responses={
            200: {
                "description": "Done; `status` and `error` are the result's.",
                "content": {"application/json": {"schema": {"type": "object"}, "example": _READ_EXAMPLE}},
            },
            400: {"description": "A field is wrong; `param` names it."},
            403: {"description": "The request lacks the role `capture`, or its key does not allow this consumer."},
            404: {"description": "The server was started without capture."},
            503: {"description": "Too many requests wait."},
        },
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": _READ_BODY}}},
    )
    async def read(consumer: str, request: Request) -> Response:
        """Run a prompt and return what a consumer makes of it: `lens`, `features`, `attention`, `probe`, `inline`, ...

        The body has ``prompt``, a text or token ids, and the fields that a request has under ``capture[consumer]``;
        `positions`, where it has that field, is ``all_prompt`` if absent. One token is generated and thrown away.
        """
        front = _front_end(services)
        with services.client_errors():
            document = await services.read_object(request)
            prompt = document.pop("prompt", None)
            vocabulary = await services.vocabulary()
            tokens = await asyncio.to_thread(read_tokens, prompt, vocabulary, "prompt")
            try:
                result = await services.read_prompt(tokens, consumer, _spec_of_prompt(front, consumer, document))
            except OverloadedError as error:
                raise HTTPException(503, str(error)) from None
        content = await asyncio.to_thread(_answer, tokens, vocabulary, consumer, result)
        return Response(content, media_type="application/json")


def _answer(tokens: Sequence[int], vocabulary: Vocabulary, consumer: str, result: CaptureResult) -> bytes:
    """Return the answer's body: FastAPI would encode it value by value, on the event loop."""
    shown = {"prompt_token_ids": tokens, "tokens": _texts(tokens, vocabulary)}
    return msgspec.json.encode({**shown, **FIELDS_DECODER.decode(encoded_result(consumer, result))})


def _texts(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    texts = {token: vocabulary.shown(token) for token in set(tokens)}
    return [texts[token] for token in tokens]


def _spec_of_prompt(front: FrontEnd, instance: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a consumer gets of a prompt: all positions, unless it or the client chooses others."""
    consumer = front.consumers.get(instance)
    if consumer is not None and not consumer.reads_positions:
        return fields
    return {"positions": "all_prompt", **fields}


def _add_state(router: APIRouter, services: RouteServices) -> None:
    reading = asyncio.Lock()  # one at a time: a state may be as large as its consumer's max_bytes

    @router.get(
        "/{consumer}",
        summary="State that a consumer keeps over all requests, such as moments",
        response_model=None,
        responses={
            200: {
                "description": "The consumer's answer; that of `moments` is described in the guide of consumers.",
                "content": {"application/json": {"schema": {"type": "object"}, "example": _REPORT_EXAMPLE}},
            },
            400: {"description": "A field of the query is wrong."},
            403: {"description": "The request lacks the role `capture`, or its key does not allow this consumer."},
            404: {"description": "The server has no such consumer, or it has no state."},
            500: {"description": "The consumer's state cannot be read."},
        },
    )
    async def state(consumer: str, request: Request) -> dict[str, Any]:
        """The state that a consumer keeps over all requests, limited to what the client's key allows.

        `consumer` is its name in requests. The consumer defines the fields of the query.
        """
        front = _front_end(services)
        with services.client_errors():
            check_consumer(consumer, "consumer")
            make = partial(_reporter(front, consumer).report, _report_context(front, consumer, request.query_params))
            try:
                async with reading:
                    return await asyncio.to_thread(make)
            except CaptureFileError as error:
                raise HTTPException(500, str(error)) from None


class _Browsing:
    """The routes of stored captures, one method each.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: RouteServices) -> None:
        self._services = services
        self._browsing = asyncio.Lock()  # one at a time: a root may have a million files

    async def _ask(self, consumer: str, request: Request, question: Callable[[Any, ReportContext], Any]) -> Any:
        front = _front_end(self._services)
        with self._services.client_errors():
            check_consumer(consumer, "consumer")
            _refuse_nameless()
            make = partial(question, _browser(front, consumer), _report_context(front, consumer, request.query_params))
            try:
                async with self._browsing:
                    return await asyncio.to_thread(make)
            except NoCaptureError as error:
                raise HTTPException(404, str(error)) from None
            except CaptureFileError as error:
                raise HTTPException(500, str(error)) from None

    async def captures(self, consumer: str, request: Request) -> dict[str, Any]:
        """List the captures of the client's own requests; an administrator sees all, and everybody without keys.

        Fields of the query: `tag`; `site`, such as `12.post_mlp`; `role` of a message of the chat; `probe`, that fired;
        `limit`, 50 if absent and 500 at most; `after`, the `next` of the page before.
        """
        found: dict[str, Any] = await self._ask(
            consumer, request, lambda browser, context: browser.list_captures(context)
        )
        return found

    async def capture(self, consumer: str, tag: str, name: str, request: Request) -> Response:
        """Return what the list has of a capture, with `metadata`, `positions`, `token_ids` and the `tokens`' texts.

        `tokens` is null if another model was captured, or if this server has no tokenizer.
        """
        found: dict[str, Any] = await self._ask(
            consumer, request, lambda browser, context: browser.describe_capture(context, tag, name)
        )
        vocabulary = None
        if found["model"] == _front_end(self._services).model.name:
            with suppress(RequestError):
                vocabulary = await self._services.vocabulary()
        content = await asyncio.to_thread(_described, found, vocabulary)
        return Response(content, media_type="application/json")

    async def rows(self, consumer: str, tag: str, name: str, request: Request) -> StreamingResponse:
        """Return the rows at all sites that the client's key allows.

        The field `sites` of the query lists some of them: `12.post_mlp,13.post_mlp`. The file is like the one that
        layout `request` of `filesystem` writes.
        """
        file: SentFile = await self._ask(
            consumer, request, lambda browser, context: browser.send_capture(context, tag, name)
        )
        headers = {"Content-Length": str(file.num_bytes), "X-Content-Type-Options": "nosniff"}
        return StreamingResponse(file.pieces, media_type="application/octet-stream", headers=headers)


def _described(found: Mapping[str, Any], vocabulary: Vocabulary | None) -> bytes:
    """Return the answer's body, for the reason of `_answer`: a capture may have very many rows."""
    texts = None if vocabulary is None else _texts(found["token_ids"], vocabulary)
    return msgspec.json.encode({**found, "tokens": texts})


def _browsing_answers(what: str, content: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {
        200: {"description": what, "content": content},
        400: {"description": "A field of the query is wrong; `param` names it."},
        403: {"description": "The request lacks the role `capture`, or its key does not allow this consumer."},
        404: {"description": "There is no such consumer or capture, or it belongs to another client."},
        500: {"description": "Files cannot be read."},
    }


def _add_browsing(router: APIRouter, services: RouteServices) -> None:
    routes = _Browsing(services)
    page, one = (
        {"application/json": {"schema": {"type": "object"}, "example": example}}
        for example in (_PAGE_EXAMPLE, _ONE_EXAMPLE)
    )
    router.get(
        "/{consumer}/captures",
        summary="Captures that a consumer such as `filesystem` has stored for this client, the newest first",
        response_model=None,
        responses=_browsing_answers("A page of them; `after=NEXT` gives the following one.", page),
    )(routes.captures)
    router.get(
        "/{consumer}/captures/{tag}/{name}",
        summary="One stored capture: its metadata, and the positions and tokens of its rows",
        response_model=None,
        responses=_browsing_answers("Done.", one),
    )(routes.capture)
    router.get(
        "/{consumer}/captures/{tag}/{name}/rows",
        summary="The rows of one stored capture, as a file of the format safetensors",
        response_class=StreamingResponse,
        responses=_browsing_answers(
            "`positions` and `token_ids`, int64 `[rows]`, and `[rows, width]` of each site under its name.",
            {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        ),
    )(routes.rows)


def _refuse_nameless() -> None:
    """Refuse keys of the environment: their names are numbers, which change with their order, so they own nothing."""
    key = capturing_key()
    if key is not None and key.is_of_environment and not key.has_role(ADMIN):
        raise ForbiddenError(
            f"the key {key.name!r} of HEADGATE_CAPTURE_KEYS owns no captures; send one of the file --headgate-keys, or "
            "one with the role admin"
        )


def _browser(front: FrontEnd, instance: str) -> CaptureBrowser:
    known = [spec.instance for spec in front.config.consumers if isinstance(load_configured(spec), CaptureBrowser)]
    if instance not in known:
        raise HTTPException(404, f"no consumer {instance!r} that stores captures; known: {', '.join(known) or 'none'}")
    browser: Any = front.consumers[instance]
    return browser  # type: ignore[no-any-return]


def _front_end(services: RouteServices) -> FrontEnd:
    engine = services.engine()
    front = None if engine is None else front_end_of(engine)
    if front is None:
        raise HTTPException(
            404, "this server was started without capture. Start it with --capture-consumers, such as filesystem"
        )
    return front


def _reporter(front: FrontEnd, instance: str) -> StateReporter:
    classes = {spec.instance: load_configured(spec) for spec in front.config.consumers}
    known = [name for name, found in classes.items() if isinstance(found, StateReporter)]
    if instance not in known:
        raise HTTPException(
            404, f"no consumer {instance!r} with a state of its own; those that have one: {', '.join(known) or 'none'}"
        )
    reporter: Any = classes[instance]
    return reporter  # type: ignore[no-any-return]


def _report_context(front: FrontEnd, instance: str, query: Mapping[str, str]) -> ReportContext:
    params = next(spec.params for spec in front.config.consumers if spec.instance == instance)
    key = capturing_key()
    return ReportContext(
        params=params,
        query=dict(query),
        allows_site=(lambda site: True) if key is None else key.allows_site,
        allows_tag=(lambda tag: True) if key is None else key.allows_tag,
        allows_owner=_allows_owner(key),
    )


def _allows_owner(key: AccessKey | None) -> Callable[[str | None], bool]:
    caller = current_caller()
    if key is None or caller is None or key.has_role(ADMIN):
        return lambda owner: True
    return lambda owner: owner == caller.name


def memory_of(front: FrontEnd, step_rows: int) -> dict[str, object]:
    """Return the device memory that a site takes, by hook point, whether or not the server captures there.

    Args:
        front: The engine's front end.
        step_rows: Rows that each site has room for.
    """
    model = front.model
    stream = (Site(layer, hook) for hook in STREAM_HOOKS for layer in range(model.num_layers))
    by_hook: dict[HookPoint, set[Site]] = {}
    for site in (*stream, *model.shapes, *model.sites):
        by_hook.setdefault(site.hook, set()).add(site)
    hooks = {}
    for hook in HookPoint:
        if hook in by_hook:
            widest = max((model.shape(site) for site in by_hook[hook]), key=lambda shape: shape.row_bytes)
            size = {"width": widest.width, "dtype": widest.dtype, "site_bytes": step_rows * widest.row_bytes}
            hooks[hook.value] = {"layers": len(by_hook[hook]), **size}
    return {"step_rows": step_rows, "hooks": hooks}


def described(front: FrontEnd) -> dict[str, object]:
    """The answer of ``GET /v1/capture/consumers``: what the client's key allows, if it has shown one."""
    key = capturing_key()
    sites = [site for site in front.model.sites if key is None or key.allows_site(site)]
    found = []
    for spec in front.config.consumers:
        if key is not None and not key.allows_consumer(spec.instance):
            continue
        consumer = load_configured(spec)
        found.append(
            {
                "name": spec.instance,
                "consumer": spec.name,
                "location": consumer.location,
                "reads_client_spec": consumer.reads_client_spec,
                "overload": spec.overload,
                "offers": consumer.offers(spec.params),
                "is_browsable": isinstance(consumer, CaptureBrowser),
            }
        )
    return {"consumers": found, "count": len(found), "sites": site_map(sites)}
