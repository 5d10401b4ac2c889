"""``capture_results``, ``hidden_states`` and values of parts in the answers of OpenAI-compatible requests.

A response gets ``capture_results``, and each of its choices ``hidden_states`` and the values. A stream of chunks gets
one more chunk, before ``[DONE]``; values come with the chunks of their choice, as they are made. A stream of events
gets them in the response of its last event. vLLM's response models write fields that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import msgspec

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.requests.call_context import Call, enter
from headgate.capture.engine.requests.hidden_states import ATTRIBUTE, plain_state
from headgate.capture.schema.results import CaptureResult, plain_payload

RESULTS = "capture_results"
_DECODER = json.JSONDecoder()
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class ResponseEvent(Protocol):
    """An event of a stream of /v1/responses, one of `_LAST_EVENTS`."""

    response: object


def answer_choices(answer: object, call: Call) -> object:
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
        for name, value in _values_of(call, choice.index).items():
            setattr(choice, name, value)
    return answer


def answer_response(answer: object, call: Call) -> object:
    """Complete an answer of /v1/responses; errors stay as they are."""
    if isinstance(answer, AsyncGenerator):
        return _stream_events(answer, call)
    if hasattr(answer, "output"):
        _complete_response(answer, call)
    return answer


def _complete_response(response: object, call: Call) -> None:
    if (results := plain_results(call)) is not None:
        setattr(response, RESULTS, results)
    if states := states_of(call):
        setattr(response, ATTRIBUTE, states[-1][1])
    told = [_plain_values(slot.notes.take(0)) for slot in call.slots if slot.notes is not None]
    for name in told[0] if told else ():
        setattr(response, name, told[0][name] if len(told) == 1 else [values[name] for values in told])


async def _stream_events(
    events: AsyncGenerator[ResponseEvent, None], call: Call
) -> AsyncGenerator[ResponseEvent, None]:
    enter(call)  # the engine is called from here, in a task of its own
    try:
        async for event in events:
            if getattr(event, "type", None) in _LAST_EVENTS:
                _complete_response(event.response, call)
            yield event
    finally:
        await events.aclose()


async def _stream_chunks(chunks: AsyncGenerator[str, None], call: Call) -> AsyncGenerator[str, None]:
    first: Document | None = None
    try:
        async for chunk in chunks:
            if first is None and chunk.startswith("data: {"):
                first = _content(chunk)
            chunk = _with_values(chunk, call)
            if chunk.startswith("data: [DONE]") and (last := _last_chunk(first or {}, call)) is not None:
                # In one piece: each takes the server some 60 us to send.
                chunk = f"data: {msgspec.json.encode(last).decode()}\n\n{chunk}"
            yield chunk
    finally:
        await chunks.aclose()


def _content(chunk: str) -> dict[str, Any]:
    found: dict[str, Any]
    found, _ = _DECODER.raw_decode(chunk, len("data: "))
    return found


def _with_values(chunk: str, call: Call) -> str:
    """Return a chunk with the values that are there for its choices."""
    untold = _untold(call)
    if not untold or not chunk.startswith("data: {"):
        return chunk
    content = _content(chunk)
    choices = [choice for choice in content.get("choices") or () if choice.get("index") in untold]
    for choice in choices:
        choice.update(_values_of(call, choice["index"]))
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n" if choices else chunk


def _untold(call: Call) -> list[int]:
    """Return the choices that there are untold values for."""
    return [
        number * call.num_samples + index
        for number, slot in enumerate(call.slots)
        if slot.notes is not None
        for index in slot.notes.samples()
    ]


def _values_of(call: Call, choice: int) -> dict[str, Any]:
    """Return the values of parts for a choice, by name, once."""
    prompt, index = divmod(choice, call.num_samples)
    notes = call.slots[prompt].notes if prompt < len(call.slots) else None
    return {} if notes is None else _plain_values(notes.take(index))


def _plain_values(values: Document) -> dict[str, Any]:
    """Return values as JSON has them: without NaN and infinity."""
    return msgspec.json.decode(msgspec.json.encode(values))  # type: ignore[no-any-return]


def _last_chunk(first: Document, call: Call) -> Document | None:
    results = plain_results(call)
    told: dict[int, dict[str, object]] = {index: {ATTRIBUTE: state} for index, state in states_of(call)}
    for index in _untold(call):
        told.setdefault(index, {}).update(_values_of(call, index))
    if results is None and not told:
        return None
    empty: dict[str, object] = {"delta": {}} if str(first.get("object")).startswith("chat") else {"text": ""}
    choices = [{"index": index, **empty, "finish_reason": None, **told[index]} for index in sorted(told)]
    chunk = {**{name: first.get(name) for name in ("id", "object", "created", "model")}, "choices": choices}
    return chunk if results is None else {**chunk, RESULTS: results}


def states_of(call: Call) -> list[tuple[int, object]]:
    """The hidden states that were asked for, each with the index of its choice; None for one that is missing."""
    if call.form is None:
        return []
    samples = [sample for slot in call.slots if slot.results is not None for sample in slot.results.per_sample]
    return [(index, plain_state(sample.get(call.states or ""), call.form)) for index, sample in enumerate(samples)]


def plain_results(call: Call) -> object:
    """JSON: ``{instance: result}`` for a call with one prompt, a list of those for one with several."""
    found = [None if slot.results is None else _plain(slot.results.merged, call) for slot in call.slots]
    if not any(found):
        return None
    return found[0] if len(found) == 1 else found


def _plain(results: Mapping[str, CaptureResult], call: Call) -> dict[str, object]:
    """Without hidden states, which have a place of their own, unless something is to be said about them."""
    return {
        instance: plain_result(instance, msgspec.structs.replace(result, payload=None))
        if instance == call.states
        else plain_result(instance, result)
        for instance, result in results.items()
        if instance != call.states or result.status != "ok"
    }


def plain_result(instance: str, result: CaptureResult) -> dict[str, object]:
    """A result as JSON values. A payload that is none becomes an error text, and never an error of the answer."""
    try:
        payload = plain_payload(result.payload)
        # By way of JSON text, and so without NaN and infinity, which JSON does not have.
        return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(result, payload=payload)))  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001  (payload and summary are the consumer's; any failure is its own)
        text = f"consumer {instance!r}: its payload, a {type(result.payload).__name__}, is not JSON: {error}"
        told = f"{result.error}; {text}" if result.error else text
        status = "partial_error" if result.status == "ok" else result.status
        plain = msgspec.structs.replace(result, status=status, error=told, payload=None)
        return msgspec.to_builtins(plain)  # type: ignore[no-any-return]
