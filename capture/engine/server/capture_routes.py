"""Capture on vLLM's server: the HTTP routes ``/v1/capture/...``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from starlette.responses import Response

from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.requests.capture_request import capturing_key, check_consumer
from headgate.capture.engine.server.openai_routes import encoded_result
from headgate.capture.schema.errors import CaptureFileError, OverloadedError
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.results import CaptureResult, ReportContext, StateReporter
from headgate.capture.schema.sites import site_map
from headgate.capture.schema.vocabulary import Vocabulary, read_tokens

if TYPE_CHECKING:
    from headgate.capture.engine.server.plugin_routes import RouteServices

_TEXT = {"type": "string"}
_CONSUMER = {
    "type": "object",
    "properties": {
        "name": {**_TEXT, "description": "What requests call it."},
        "consumer": {**_TEXT, "description": "Its entry point."},
        "location": {"type": "string", "enum": ["worker", "driver"]},
        "reads_client_spec": {"type": "boolean", "description": "Whether requests can name it."},
        "overload": {"type": "string", "enum": ["block", "drop", "spill"]},
        "offers": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": _TEXT},
            "description": "Names that requests may choose from, by the field that names them: {lens: [logit]}.",
        },
    },
    "required": ["name", "consumer", "location", "reads_client_spec", "overload", "offers"],
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
    },
    "required": ["consumers", "count", "sites"],
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
        }
    ],
    "count": 1,
    "sites": {"post_mlp": [0, 1, 2]},
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
        return described(_front_end(services))

    _add_reading(router, services)
    _add_state(router, services)
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
    texts = {token: vocabulary.shown(token) for token in set(tokens)}
    shown = {"prompt_token_ids": tokens, "tokens": [texts[token] for token in tokens]}
    return msgspec.json.encode({**shown, **_FIELDS.decode(encoded_result(consumer, result))})


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


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
    )


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
            }
        )
    return {"consumers": found, "count": len(found), "sites": site_map(sites)}
