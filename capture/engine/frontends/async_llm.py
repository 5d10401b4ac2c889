"""`AsyncLLM`: requests are checked in the call itself, and their last output waits for the results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from headgate.capture.engine.requests.call_context import Call, Slot, current_call
from headgate.capture.engine.requests.capture_frontend import FrontEnd, attach_results, front_end_of
from headgate.capture.engine.requests.capture_request import CaptureRequest
from headgate.capture.engine.requests.request_reader import RequestReader, is_refused, reader_of
from headgate.capture.engine.requests.wire import HeadgateRequest, attach, refuse_made, refuse_streamed_input
from headgate.capture.engine.setup.client_errors import as_client_error, is_without_field


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.generate``.

    The check runs when `generate` is called, not when its outputs are awaited: a streaming HTTP request then gets a
    real status 400 instead of an error inside its stream. Registered names that are not known here are the exception:
    the engine core is asked first; the HTTP handlers have done so before they call.
    """

    @wraps(original)
    def wrapped(self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        with as_client_error():
            if hasattr(prompt, "sampling_params"):
                refuse_made(prompt, sampling_params)
                return original(self, prompt, sampling_params, request_id, *args, **kwargs)
            reception = reader_of(self)
            asked = reception.read_answered(sampling_params, request_id, is_offline=False)
            if asked is None:
                return original(self, prompt, sampling_params, request_id, *args, **kwargs)
            if isinstance(prompt, AsyncIterator) and not asked.is_empty:
                refuse_streamed_input(asked)
            call = current_call()
            asked = _resolved(reception, asked, prompt, sampling_params, call)
        outputs = original(self, prompt, attach(sampling_params, asked), request_id, *args, **kwargs)
        if asked.parts:
            outputs = _with_refusals(outputs, reception, asked, self.engine_core)
        if asked.capture is not None and reception.capture is not None:
            outputs = _with_results(outputs, reception.capture, asked.capture, call.expect() if call else None)
        return outputs

    return wrapped


def _resolved(
    reception: RequestReader, asked: HeadgateRequest, prompt: Any, params: Any, call: Call | None
) -> HeadgateRequest:
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if asked.capture is None or reception.capture is None or tokens is None:
        return asked
    find_message = call.find_message(tokens) if call else None
    return replace(asked, capture=reception.capture.resolve(asked.capture, len(tokens), params, find_message))


async def _with_refusals(
    outputs: AsyncGenerator[Any, None], reception: RequestReader, asked: HeadgateRequest, client: Any
) -> AsyncGenerator[Any, None]:
    """CaptureRequest about names that are not known here, first, and again if the engine core refused the request."""
    try:
        with as_client_error():
            await reception.confirm_async(asked, client)
        async for output in outputs:
            if is_refused(output):
                with as_client_error():
                    await reception.explain_async(asked, client)
            yield output
    except Exception as error:
        if is_without_field(error):
            with as_client_error():
                await reception.explain_async(asked, client)
        raise
    finally:
        await outputs.aclose()


async def _with_results(
    outputs: AsyncGenerator[Any, None], front: FrontEnd, ask: CaptureRequest, slot: Slot | None
) -> AsyncGenerator[Any, None]:
    try:
        async for output in outputs:
            if output.finished and (ask.is_explicit or ask.wait):
                is_aborted = all(completion.finish_reason == "abort" for completion in output.outputs)
                results = await front.wait_async(ask, is_aborted=is_aborted)
                attach_results(output, results, front.door.hidden_states)
                if slot is not None:
                    slot.results = results
            yield output
    finally:
        front.forget(ask)
        await outputs.aclose()


def shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.shutdown``: the engine first, so that its last results still find the hub."""

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            # A constructor that failed leaves an object without an input processor, and is shut down all the same.
            if "input_processor" in vars(self) and (front := front_end_of(self)) is not None:
                front.close()

    return wrapped
