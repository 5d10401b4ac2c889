"""Our fields in the bodies of OpenAI-compatible requests, and `capture_results` in the answers.

`capture` is taken from /v1/completions and /v1/chat/completions, the fields of other parts from /v1/responses too.
vLLM's request models keep unknown fields of a body, and its response models write them. What belongs to one HTTP
call is held in a context variable: the engine is called from inside the handler, which is where it is read.
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import msgspec

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.frontend import front_end_of
from headgate.capture.engine.keys import require_key
from headgate.capture.engine.params import CAPTURE, CAPTURE_FIELDS, all_fields, read_fields
from headgate.capture.engine.reception import reception_of
from headgate.capture.engine.requests import messages_of
from headgate.capture.engine.turns import Chat, Tokens, Turn, locate, pick
from headgate.capture.errors import RequestError
from headgate.capture.merge import CaptureResults
from headgate.capture.positions import Message, Span
from headgate.capture.results import CaptureResult, SupportsSummary

RESULTS = "capture_results"
_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("headgate_http_call", default=None)


@dataclass(slots=True)
class Slot:
    """Results of one engine request of a call; None until it has finished."""

    results: CaptureResults | None = None


@dataclass(slots=True)
class Call:
    """One HTTP call.

    Attributes:
        turns: Messages of the chat that selectors of this call mean.
        slots: One for each prompt, in the order of the body.
    """

    turns: dict[Message, Turn] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)

    def expect(self) -> Slot:
        """A slot for one more prompt."""
        self.slots.append(Slot())
        return self.slots[-1]

    def find_message(self, tokens: Tokens) -> Callable[[Message, str], Span]:
        """Resolves message selectors for the prompt of these tokens."""

        def find(selector: Message, where: str) -> Span:
            turn = self.turns.get(selector)
            if turn is None:
                raise RequestError(where, "a message selector needs a chat request (/v1/chat/completions)")
            return turn.span(tokens, where)

        return find


def current_call() -> Call | None:
    """The HTTP call being handled, if any."""
    return _call.get()


def to_sampling_params(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``to_sampling_params`` of a request model: pass our fields of the body on.

    Other routes use these models too (batches, rendering); their answers have no place for captured results.
    """

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_call() is None:
            _refuse_capture(self)
        params = original(self, *args, **kwargs)
        for name, value in _given(self, all_fields()).items():
            setattr(params, name, value)
        return params

    return wrapped


def _given(request: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those of our fields that a body has."""
    extra = request.model_extra or {}
    return {name: extra[name] for name in names if extra.get(name) is not None}


def _refuse_capture(request: Any) -> None:
    for name in _given(request, CAPTURE_FIELDS):
        with as_client_error():
            raise RequestError(name, "use /v1/completions or /v1/chat/completions to capture")


def create_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OpenAIServingCompletion.create_completion``."""

    @wraps(original)
    async def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _check_key(request, *args, **kwargs)
        await _check_early(self, request)
        if not _given(request, CAPTURE_FIELDS):
            return await original(self, request, *args, **kwargs)
        call = Call()
        _call.set(call)
        return _answer(await original(self, request, *args, **kwargs), call)

    return wrapped


def create_chat_completion(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OpenAIServingChat.create_chat_completion``."""

    @wraps(original)
    async def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _check_key(request, *args, **kwargs)
        await _check_early(self, request)
        if not _given(request, CAPTURE_FIELDS):
            return await original(self, request, *args, **kwargs)
        call = Call()
        _call.set(call)
        call.turns = await _find_turns(self, request)
        return _answer(await original(self, request, *args, **kwargs), call)

    return wrapped


def create_responses(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OpenAIServingResponses.create_responses``.

    It calls the engine from inside its stream, too late for a status 400: so everything is read here once before.
    """

    @wraps(original)
    async def wrapped(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _check_key(request, *args, **kwargs)
        await _check_early(self, request)
        _refuse_capture(request)
        if _given(request, all_fields()):
            with as_client_error():
                params = request.to_sampling_params(1, self.default_sampling_params)
                asked = reception_of(self.engine_client).read(params, request.request_id)
                if asked is not None:
                    await reception_of(self.engine_client).confirm_async(asked, self.engine_client.engine_core)
        return await original(self, request, *args, **kwargs)

    return wrapped


def serve_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ServingTokens.serve_tokens``, whose clients write `SamplingParams` themselves."""

    @wraps(original)
    async def wrapped(self: Any, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> Any:
        if raw_request is not None and read_fields(request.sampling_params, CAPTURE_FIELDS):
            require_key(CAPTURE, raw_request)
        return await original(self, request, raw_request, *args, **kwargs)

    return wrapped


def _check_key(request: Any, raw_request: Any = None, *args: Any, **kwargs: Any) -> None:
    """Refuse to capture for an HTTP client without a key for that; batches of the operator's own have no client."""
    if raw_request is not None and _given(request, CAPTURE_FIELDS):
        require_key(CAPTURE, raw_request)


async def _check_early(serving: Any, request: Any) -> None:
    """What cannot be checked in the call of the engine: beam search, which drops our fields, and registered names."""
    given = _given(request, all_fields())
    if not given:
        return
    with as_client_error():
        if getattr(request, "use_beam_search", False):
            raise RequestError(
                next(iter(given)), "beam search cannot be captured or steered: its requests come and go with the beams"
            )
        client = serving.engine_client
        await reception_of(client).confirm_names(given, client.engine_core)


def _answer(answer: Any, call: Call) -> Any:
    """Put the results into a response, or one more chunk into a stream; errors stay as they are."""
    if hasattr(answer, "__aiter__"):
        return _stream(answer, call)
    if (results := _results(call)) is not None and hasattr(answer, "choices"):
        setattr(answer, RESULTS, results)
    return answer


async def _stream(chunks: AsyncGenerator[str, None], call: Call) -> AsyncGenerator[str, None]:
    first: dict[str, Any] | None = None
    try:
        async for chunk in chunks:
            if first is None and chunk.startswith("data: {"):
                first, _ = json.JSONDecoder().raw_decode(chunk, len("data: "))
            if chunk.startswith("data: [DONE]") and (results := _results(call)) is not None:
                head = {name: (first or {}).get(name) for name in ("id", "object", "created", "model")}
                yield f"data: {json.dumps({**head, 'choices': [], RESULTS: results})}\n\n"
            yield chunk
    finally:
        await chunks.aclose()


def _results(call: Call) -> Any:
    """JSON: ``{instance: result}`` for a call with one prompt, a list of those for one with several."""
    found = [None if slot.results is None else _plain_results(slot.results.merged) for slot in call.slots]
    if not any(found):
        return None
    return found[0] if len(found) == 1 else found


def _plain_results(results: Mapping[str, CaptureResult]) -> dict[str, Any]:
    return {instance: plain_result(instance, result) for instance, result in results.items()}


def plain_result(instance: str, result: CaptureResult) -> dict[str, Any]:
    """A result as JSON values. A payload that is none becomes an error text, and never an error of the answer."""
    try:
        payload = result.payload.summary() if isinstance(result.payload, SupportsSummary) else result.payload
        # By way of JSON text, and so without NaN and infinity, which JSON does not have.
        return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(result, payload=payload)))  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  (payload and summary are the consumer's; any failure is its own)
        text = f"consumer {instance!r}: its payload, a {type(result.payload).__name__}, is not JSON: {error}"
        told = f"{result.error}; {text}" if result.error else text
        status = "partial_error" if result.status == "ok" else result.status
        plain = msgspec.structs.replace(result, status=status, error=told, payload=None)
        return msgspec.to_builtins(plain)  # type: ignore[no-any-return]


async def _find_turns(serving: Any, request: Any) -> dict[Message, Turn]:
    """Render the beginnings of the chat that message selectors need, as the chat itself will be rendered."""
    front = front_end_of(serving.engine_client)
    if front is None:
        return {}
    with as_client_error():
        ask = front.door.read(request.to_sampling_params(1, {}), request.request_id)
        if ask is None:
            return {}
        return {
            selector: await _locate(serving, request, selector, where) for selector, where in messages_of(ask).items()
        }


async def _locate(serving: Any, request: Any, selector: Message, where: str) -> Turn:
    chat: Sequence[Any] = request.messages
    rendering = locate(
        chat,
        pick(selector, chat, where),
        is_continued=request.continue_final_message,
        bos=getattr(serving.renderer.tokenizer, "bos_token_id", None),
        field=where,
    )
    try:
        part = next(rendering)
        while True:
            part = rendering.send(await _try_render(serving, request, part))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _try_render(serving: Any, request: Any, chat: Chat) -> Tokens | None:
    part = request.model_copy(
        update={"messages": list(chat), "add_generation_prompt": False, "continue_final_message": False}
    )
    try:
        rendered = await serving.render_chat_request(part)
        _, (prompt,) = rendered
        return prompt["prompt_token_ids"]  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001  (templates raise whatever they like to refuse a conversation)
        return None
