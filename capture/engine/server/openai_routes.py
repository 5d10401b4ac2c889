"""Our fields in the bodies of OpenAI-compatible requests, and what comes of them in the answers.

vLLM's request models keep unknown fields of a body, and its response models write fields that they do not know. A
response gets ``capture_results``, and each of its choices ``hidden_states`` and values of parts. A stream of chunks
gets one more chunk, before ``[DONE]``; values come with the chunks of their choice, as they are made, and so do parts
of results of consumers that stream. A stream of events gets them in the response of its last event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.contracts.core_calls import run_each_async
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.frontends.metering import check_quota
from headgate.capture.engine.frontends.prompt_tokens import forget_unsent, looking_up
from headgate.capture.engine.requests.call_context import (
    ATTRIBUTE,
    HttpCall,
    current_call,
    enter,
    plain_state,
    read_form,
    taken,
)
from headgate.capture.engine.requests.capture_frontend import front_end_of
from headgate.capture.engine.requests.capture_request import messages_of
from headgate.capture.engine.requests.chat_messages import (
    Chat,
    LocatedChat,
    RenderedMessage,
    Tokens,
    is_beginning,
    locate,
    pick,
    roles_of,
)
from headgate.capture.engine.requests.request_reader import reader_of
from headgate.capture.engine.requests.sampling_params import (
    CAPTURE_FIELDS,
    CAPTURE_MESSAGES,
    EXTRA_ARGS,
    RETURN_HIDDEN_STATES,
    SAMPLING_PARAMS,
    VLLM_XARGS,
    CaptureRequest,
    all_fields,
    answer_fields,
    none_if_default,
    read_fields,
    refuse_ignored,
    refuse_unknown,
)
from headgate.capture.engine.server.access_keys import require_role
from headgate.capture.engine.server.retry_after import await_first_event
from headgate.capture.engine.vllm_types import (
    AsyncLLM,
    Body,
    ChatBody,
    ChatHandler,
    ErrorAnswers,
    Function,
    Handler,
    ResponsesBody,
    ResponsesHandler,
    SamplingParams,
    TokensBody,
)
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import CaptureResult, plain_payload

if TYPE_CHECKING:
    from starlette.requests import Request


RESULTS = "capture_results"
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class ResponseEvent(Protocol):
    """An event of a stream of /v1/responses, one of `_LAST_EVENTS`."""

    response: object


def answer_choices(answer: object, call: HttpCall) -> object:
    """Complete an answer of /v1/completions or /v1/chat/completions; errors stay as they are."""
    if isinstance(answer, AsyncGenerator):
        return _stream_chunks(answer, call)
    if not hasattr(answer, "choices"):
        return answer
    if (results := plain_results(call)) is not None:
        setattr(answer, RESULTS, results)
    states = dict(states_of(call))
    for choice in answer.choices:
        if choice.index in states:
            setattr(choice, ATTRIBUTE, states[choice.index])
        for name, value in _plain(_values_of(call, choice.index)).items():
            setattr(choice, name, value)
    return answer


def answer_response(answer: object, call: HttpCall) -> object:
    """Complete an answer of /v1/responses; errors stay as they are."""
    if isinstance(answer, AsyncGenerator):
        return _stream_events(answer, call)
    if hasattr(answer, "output"):
        _complete_response(answer, call)
    return answer


def _complete_response(response: object, call: HttpCall) -> None:
    if (results := plain_results(call)) is not None:
        setattr(response, RESULTS, results)
    if states := states_of(call):
        setattr(response, ATTRIBUTE, states[-1][1])
    reported = [_plain(slot.notes.take(0)) for slot in call.slots if slot.notes is not None]
    for name in reported[0] if reported else ():
        setattr(response, name, reported[0][name] if len(reported) == 1 else [values[name] for values in reported])


async def _stream_events(
    events: AsyncGenerator[ResponseEvent, None], call: HttpCall
) -> AsyncGenerator[ResponseEvent, None]:
    enter(call)  # the engine is called from here, in a task of its own
    try:
        async for event in events:
            if getattr(event, "type", None) in _LAST_EVENTS:
                _complete_response(event.response, call)
            yield event
    finally:
        await events.aclose()


async def _stream_chunks(chunks: AsyncGenerator[str, None], call: HttpCall) -> AsyncGenerator[str, None]:
    first: Document | None = None
    try:
        async for chunk in chunks:
            if first is None and chunk.startswith(_DATA + "{"):
                first = msgspec.json.decode(_split(chunk)[0])
            chunk = _with_values(chunk, call)
            if chunk.startswith("data: [DONE]") and (last := _last_chunk(first or {}, call)) is not None:
                # In one piece: each takes the server some 60 us to send.
                chunk = _event(last, chunk)
            yield chunk
    finally:
        await chunks.aclose()


def _with_values(chunk: str, call: HttpCall) -> str:
    """Return a chunk with the values that are there for its choices."""
    if not [slot for slot in call.slots if slot.notes is not None or slot.take_new is not None]:
        return chunk  # a list: `any` of a generator takes twice as long, for each chunk
    unreported, is_streamed = _unreported(call), any(slot.take_new is not None for slot in call.slots)
    if not (unreported or is_streamed) or not chunk.startswith(_DATA + "{"):
        return chunk
    found: dict[int, dict[str, msgspec.Raw]] = {}
    content, rest = _split(chunk)
    for place, choice in enumerate(_CHUNK.decode(content).choices or ()):
        values = _values_of(call, choice.index) if choice.index in unreported else {}
        if is_streamed and (new := _new_results(call, choice.index)):
            values = {**values, RESULTS: new}
        if values:
            found[place] = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}
    if not found:
        return chunk  # most chunks of a stream: parsing all of them would cost too much
    fields = FIELDS_DECODER.decode(content)
    choices = _CHOICES.decode(fields["choices"])
    for place, values in found.items():
        choices[place].update(values)
    return _event({**fields, "choices": choices}, rest)


class _Choice(msgspec.Struct):
    """The fields of a choice that are read of every chunk."""

    index: int | None = None


class _Chunk(msgspec.Struct):
    """The fields that are read of every chunk."""

    choices: list[_Choice] | None = None


_DATA = "data: "
_CHUNK = msgspec.json.Decoder(_Chunk)
FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Reads an object without its values, which are written again as they are."""
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def _split(chunk: str) -> tuple[str, str]:
    """Return the JSON of a chunk's event, and what comes after the event."""
    event, _, rest = chunk.partition("\n\n")
    return event[len(_DATA) :], rest


def _event(content: object, rest: str) -> str:
    """Return an event of a stream, and what comes after it."""
    return f"{_DATA}{msgspec.json.encode(content).decode()}\n\n{rest}"


def _new_results(call: HttpCall, choice: int | None) -> Document:
    """Return what consumers that stream have of a choice's tokens since its last chunk, by instance."""
    if choice is None:
        return {}
    prompt, index = divmod(choice, call.num_samples)
    slot = call.slots[prompt] if prompt < len(call.slots) else None
    if slot is None or slot.take_new is None or slot.results is not None:
        return {}  # with the results, the payload is whole
    return slot.take_new(index, slot.num_rows.get(index, 0))


def _unreported(call: HttpCall) -> list[int]:
    """Return the choices that there are untold values for."""
    return [
        number * call.num_samples + index
        for number, slot in enumerate(call.slots)
        if slot.notes is not None
        for index in slot.notes.samples()
    ]


def _values_of(call: HttpCall, choice: int) -> Document:
    """Return the values of parts for a choice, by name, once."""
    prompt, index = divmod(choice, call.num_samples)
    notes = call.slots[prompt].notes if prompt < len(call.slots) else None
    return {} if notes is None else notes.take(index)


def _plain(values: object) -> Any:
    """Return values as JSON has them: without NaN and infinity."""
    return msgspec.json.decode(msgspec.json.encode(values))


def _last_chunk(first: Document, call: HttpCall) -> Document | None:
    results = encoded_results(call)
    reported: dict[int, dict[str, object]] = {index: {ATTRIBUTE: state} for index, state in states_of(call)}
    for index in _unreported(call):
        reported.setdefault(index, {}).update(_values_of(call, index))
    if results is None and not reported:
        return None
    empty: dict[str, object] = {"delta": {}} if str(first.get("object")).startswith("chat") else {"text": ""}
    choices = [{"index": index, **empty, "finish_reason": None, **reported[index]} for index in sorted(reported)]
    chunk = {**{name: first.get(name) for name in ("id", "object", "created", "model")}, "choices": choices}
    return chunk if results is None else {**chunk, RESULTS: results}


def states_of(call: HttpCall) -> list[tuple[int, object]]:
    """The hidden states that were asked for, each with the index of its choice; None for one that is missing."""
    if call.form is None:
        return []
    samples = [sample for slot in call.slots if slot.results is not None for sample in slot.results.per_sample]
    return [(index, plain_state(sample.get(call.states or ""), call.form)) for index, sample in enumerate(samples)]


def plain_results(call: HttpCall) -> Any:
    """Return what `encoded_results` says as JSON values; None if there is nothing."""
    found = encoded_results(call)
    return None if found is None else _plain(found)


def encoded_results(call: HttpCall) -> object:
    """``{instance: JSON}`` for a call with one prompt, a list of those for one with several; None of none."""
    found = [None if slot.results is None else _encoded(slot.results.merged, call) for slot in call.slots]
    if not any(found):
        return None
    return found[0] if len(found) == 1 else found


def _encoded(results: Mapping[str, CaptureResult], call: HttpCall) -> dict[str, msgspec.Raw]:
    """Without hidden states, which have a place of their own, unless something is to be said about them."""
    return {
        instance: encoded_result(instance, msgspec.structs.replace(result, payload=None))
        if instance == call.states
        else encoded_result(instance, result)
        for instance, result in results.items()
        if instance != call.states or result.status != "ok"
    }


def encoded_result(instance: str, result: CaptureResult) -> msgspec.Raw:
    """Return a result as JSON, in which NaN and infinity are null.

    A payload that is no JSON becomes an error text, and never an error of the answer.
    """
    try:
        payload = plain_payload(result.payload)
        return msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(result, payload=payload)))
    except Exception as error:  # noqa: BLE001  (payload and summary are the consumer's; any failure is its own)
        text = f"consumer {instance!r}: its payload, a {type(result.payload).__name__}, is not JSON: {error}"
        reported = f"{result.error}; {text}" if result.error else text
        status = "partial_error" if result.status == "ok" else result.status
        plain = msgspec.structs.replace(result, status=status, error=reported, payload=None)
        return msgspec.Raw(msgspec.json.encode(plain))


MAX_LOCATED = 128
"""Messages of one chat that are looked for: for each the chat up to it is rendered, on the server's event loop."""

CHAT_TEMPLATE = "chat_template"
NO_BEAMS = "beam search cannot be captured or steered: its requests come and go with the beams"


def to_sampling_params(original: Function) -> Function:
    """Wrap ``to_sampling_params`` of a request model: pass our fields of the body on.

    Other routes use these models too (batches, rendering); their answers have no place for captured results.
    """

    @wraps(original)
    def wrapped(self: Body, *args: object, **kwargs: object) -> SamplingParams:
        if current_call() is not None:  # the handler has checked the body
            given = _ours(_unknown_to_vllm(self))
        elif given := _given(self):
            _refuse_unanswered(given)
        params: SamplingParams = original(self, *args, **kwargs)
        for name in read_fields(params, _answered_fields()):
            # Its answer would have no place for results, and no client has asked for a key.
            with as_client_error():
                raise RequestError(f"vllm_xargs.{name}", f"give {name!r} as a field of the body")
        for name, value in given.items():
            setattr(params, name, value)
        return params

    return wrapped


def _unknown_to_vllm(request: Body) -> Document:
    """Fields of a body that vLLM's model of it does not have, and fields that were taken out before."""
    extra, before = request.model_extra or {}, taken().fields
    return {**extra, **before} if before else extra


def _given(request: Body) -> dict[str, object]:
    """Our fields that a body has."""
    extra, xargs = _unknown_to_vllm(request), getattr(request, VLLM_XARGS, None)
    if not extra and not xargs:
        return {}  # most requests: they shall not pay for ours
    with as_client_error():
        refuse_unknown(extra)
        if nested := {name: extra[name] for name in (EXTRA_ARGS, SAMPLING_PARAMS) if name in extra}:
            refuse_ignored(nested, "give it as a field of the body")
        if xargs:
            _refuse_in_xargs(request, xargs)
    return _ours(extra)


def _ours(extra: Document) -> dict[str, object]:
    given = {name: extra[name] for name in all_fields() if name in extra}
    return {name: value for name, value in given.items() if none_if_default(name, value) is not None}


def _refuse_in_xargs(request: Body, xargs: Document) -> None:
    if getattr(request, "use_beam_search", False):
        refuse_ignored({VLLM_XARGS: xargs}, NO_BEAMS)
    refuse_unknown(xargs, f"{VLLM_XARGS}.")


def _captures(given: Document) -> bool:
    return not given.keys().isdisjoint(CAPTURE_FIELDS)


def _answered_fields() -> tuple[str, ...]:
    """Fields that ask for something in the answer."""
    return *CAPTURE_FIELDS, *answer_fields()


def _is_answered(given: Document) -> bool:
    return not given.keys().isdisjoint(_answered_fields())


def _refuse_unanswered(given: Document) -> None:
    for name in _answered_fields():
        if name in given:
            use = "use /v1/completions, /v1/chat/completions or /v1/responses"
            with as_client_error():
                raise RequestError(name, f"{use} to capture" if name in CAPTURE_FIELDS else f"{use} to get it")


def create_completion(original: Function, *, is_chat: bool = False) -> Function:
    """Wrap ``OpenAIServingCompletion.create_completion``, or ``OpenAIServingChat.create_chat_completion``."""

    @wraps(original)
    async def wrapped(
        self: Handler, request: Body, raw_request: Request | None = None, *args: object, **kwargs: object
    ) -> object:
        given = _given(request)
        if given:
            await _check_early(given, self, request, raw_request)
        if not _is_answered(given):
            return await _serve(original, given, self, request, raw_request, *args, **kwargs)
        call = _begin_call(self, request, given)
        if is_chat and _captures(given):
            call.chat = await _find_chat_messages(cast("ChatHandler", self), cast("ChatBody", request))
        return answer_choices(await _serve(original, given, self, request, raw_request, *args, **kwargs), call)

    return wrapped


async def _serve(
    original: Function, given: Document, handler: Handler, request: Body, *args: object, **kwargs: object
) -> object:
    """Call vLLM's handler. The stream of a request that the engine may refuse begins when it has not.

    The stream of a response in the background only watches another task, and does not end if that fails.
    """
    answer: object = await original(handler, request, *args, **kwargs)
    is_watched = bool(given.keys() - CAPTURE_FIELDS) and not getattr(request, "background", False)
    return await await_first_event(answer, handler) if is_watched else answer


def create_responses(original: Function) -> Function:
    """Wrap ``OpenAIServingResponses.create_responses``.

    It calls the engine from inside its stream, too late for a status 400: so everything is read here once before.
    """

    @wraps(original)
    async def wrapped(
        self: ResponsesHandler,
        request: ResponsesBody,
        raw_request: Request | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        given = _given(request)
        if not given:
            return await original(self, request, raw_request, *args, **kwargs)
        await _check_early(given, self, request, raw_request)
        call = _begin_call(self, request, given)
        call.has_turns = True
        with as_client_error():
            if _is_answered(given) and request.background:
                raise RequestError("background", "a response in the background has no answer that could carry results")
            params = request.to_sampling_params(1, self.default_sampling_params)
            headgate_request = reader_of(self.engine_client).read(params, request.request_id)
            if headgate_request is not None:
                reader, cores = reader_of(self.engine_client), self.engine_client.engine_core
                await run_each_async(reader.confirm(headgate_request), cores)
        answer = await _serve(original, given, self, request, raw_request, *args, **kwargs)
        return answer_response(answer, call) if _is_answered(given) else answer

    return wrapped


def generate_response(original: Function) -> Function:
    """Wrap ``OpenAIServingResponses._generate_with_builtin_tools``.

    It is called with the prompt before the response begins, and calls the engine afterwards: what is to be captured of
    the prompt is checked in between.
    """

    @wraps(original)
    def wrapped(
        self: Handler,
        request_id: str,
        engine_input: Mapping[str, Sequence[int]],
        sampling_params: SamplingParams,
        *args: object,
        **kwargs: object,
    ) -> AsyncGenerator[object, None]:
        try:
            with as_client_error():
                _check_engine_input(self.engine_client, engine_input, sampling_params, request_id)
        except Exception:
            forget_unsent(self.engine_client.input_processor, engine_input)
            raise
        return original(self, request_id, engine_input, sampling_params, *args, **kwargs)  # type: ignore[no-any-return]

    return wrapped


def _check_engine_input(
    engine: AsyncLLM, engine_input: Mapping[str, Sequence[int]], params: SamplingParams, request_id: str
) -> None:
    reader = reader_of(engine)
    headgate_request = None if current_call() is None else reader.read(params, request_id)
    if headgate_request is None or headgate_request.capture is None or "prompt_token_ids" not in engine_input:
        return
    assert reader.capture is not None  # noqa: S101  (it has read what is captured)
    num_prompt = len(engine_input["prompt_token_ids"])
    resolved = reader.capture.resolve(headgate_request.capture, num_prompt, params, None)
    check_quota(reader.capture, resolved, num_prompt, params)


def create_from_audio(original: Function) -> Function:
    """Wrap ``create_transcription`` and ``create_translation``, whose bodies are forms."""

    @wraps(original)
    async def wrapped(self: ErrorAnswers, audio_data: bytes, request: Body, *args: object, **kwargs: object) -> object:
        given = {VLLM_XARGS: getattr(request, VLLM_XARGS, None), **(request.model_extra or {})}
        try:
            with as_client_error():
                refuse_ignored(given, "audio routes do not take it; use /v1/completions or /v1/chat/completions")
        except RequestError as error:
            return self.create_error_response(error)  # vLLM 0.26 answers whatever is raised with status 500
        return await original(self, audio_data, request, *args, **kwargs)

    return wrapped


def serve_tokens(original: Function) -> Function:
    """Wrap ``ServingTokens.serve_tokens``, whose clients write `SamplingParams` themselves."""

    @wraps(original)
    async def wrapped(
        self: Handler, request: TokensBody, raw_request: Request | None = None, *args: object, **kwargs: object
    ) -> object:
        if raw_request is not None and read_fields(request.sampling_params, CAPTURE_FIELDS):
            require_role(CAPTURE, raw_request)
        with as_client_error():
            for name in read_fields(request.sampling_params, answer_fields()):
                raise RequestError(
                    f"sampling_params.extra_args.{name}", "the answers of this route have no place for it"
                )
        return await original(self, request, raw_request, *args, **kwargs)

    return wrapped


def _begin_call(handler: Handler, request: Body, given: Document) -> HttpCall:
    """Handle a call in this task, whose answer will have a place for what is captured."""
    with as_client_error():
        form = read_form(given.get(RETURN_HIDDEN_STATES))
    front = front_end_of(handler.engine_client)
    states = None if front is None else front.capture_reader.hidden_states
    call = HttpCall(form=form, states=states, num_samples=getattr(request, "n", None) or 1)
    enter(call)
    return call


async def _check_early(given: Document, handler: Handler, request: Body, raw_request: Request | None) -> None:
    """Check what cannot be checked in the call of the engine, of a request that gives fields of ours.

    That is the key of an HTTP client who captures (batches of the operator's own have no client), beam search, which
    drops our fields, and registered names.
    """
    if raw_request is not None and _captures(given):
        require_role(CAPTURE, raw_request)
    with as_client_error():
        if getattr(request, "use_beam_search", False):
            raise RequestError(next(iter(given)), NO_BEAMS)
        client = handler.engine_client
        await run_each_async(reader_of(client).confirm_names(given), client.engine_core)


async def _find_chat_messages(handler: ChatHandler, request: ChatBody) -> LocatedChat | None:
    """Render the beginnings of the chat that message selectors need, as the chat itself will be rendered."""
    front = front_end_of(handler.engine_client)
    if front is None:
        return None
    with as_client_error():
        ask = front.capture_reader.read(request.to_sampling_params(1, {}), request.request_id)
        if ask is None:
            return None
        roles = roles_of(request.messages)
        wanted = _wanted_messages(ask, roles)
        if wanted and _has_own_template(request):
            await _check_template(handler, request)
        beginnings: dict[int, Tokens | None] = {}
        found = {number: await _locate(handler, request, number, where, beginnings) for number, where in wanted.items()}
        return LocatedChat(roles, found)


def _has_own_template(request: ChatBody) -> bool:
    own = getattr(request, CHAT_TEMPLATE, None)
    return own is not None or CHAT_TEMPLATE in (getattr(request, "chat_template_kwargs", None) or {})


async def _check_template(handler: ChatHandler, request: ChatBody) -> None:
    """Refuse a chat that vLLM does not render with the template of its request, for vLLM's own reason.

    Raises:
        RequestError: Such as that the server does not trust templates of requests.
    """
    with looking_up():
        answer: Any = await handler.render_chat_request(request.model_copy(update={}))
    if not isinstance(answer, tuple):
        raise RequestError(CHAT_TEMPLATE, str(getattr(answer, "error", answer).message))


def _wanted_messages(ask: CaptureRequest, roles: Sequence[str | None]) -> dict[int, str]:
    """Numbers of the messages that are to be found, each with the field that asks."""
    wanted = {number: where for one, where in messages_of(ask).items() for number in pick(one, roles, where)}
    if ask.messages is not None:
        wanted = {number: f"{CAPTURE_MESSAGES}[{number}]" for number in range(len(roles))} | wanted
    if len(wanted) > MAX_LOCATED:
        where = CAPTURE_MESSAGES if ask.messages is not None else next(iter(wanted.values()))
        raise RequestError(
            where,
            f"{len(wanted)} messages of the chat would have to be looked for, and each is rendered with all before it; "
            f"at most {MAX_LOCATED} can be",
        )
    return wanted


async def _locate(
    handler: ChatHandler, request: ChatBody, number: int, where: str, beginnings: dict[int, Tokens | None]
) -> RenderedMessage:
    """Find one message; `beginnings` keeps what beginnings of the chat, by their lengths, were rendered to."""
    chat = request.messages
    rendering = locate(
        chat,
        number,
        is_continued=request.continue_final_message,
        bos=getattr(handler.renderer.tokenizer, "bos_token_id", None),
        field=where,
    )
    try:
        part = next(rendering)
        while True:
            if not is_beginning(part, chat):
                part = rendering.send(await _try_render(handler, request, part))
                continue
            if len(part) not in beginnings:
                beginnings[len(part)] = await _try_render(handler, request, part)
            part = rendering.send(beginnings[len(part)])
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def _try_render(handler: ChatHandler, request: ChatBody, chat: Chat) -> Tokens | None:
    part = request.model_copy(
        update={"messages": list(chat), "add_generation_prompt": False, "continue_final_message": False}
    )
    try:
        with looking_up():
            _, (prompt,) = await handler.render_chat_request(part)
        return prompt["prompt_token_ids"]
    except Exception:  # noqa: BLE001  (templates raise whatever they like to refuse a conversation)
        return None
