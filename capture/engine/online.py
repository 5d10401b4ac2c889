"""`AsyncLLM`: requests are checked in the call itself, and their last output waits for the results."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import wraps
from typing import Any

from headgate.capture.engine import http
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.frontend import FrontEnd, attach_results, front_end_of
from headgate.capture.engine.requests import Ask, attach, refuse_streamed_input, refuse_unconfigured, resolve


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.generate``.

    The check runs when `generate` is called, not when its outputs are awaited: a streaming HTTP request then gets a
    real status 400 instead of an error inside its stream.
    """

    @wraps(original)
    def wrapped(self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        with as_client_error():
            front = front_end_of(self)
            if front is None:
                refuse_unconfigured(sampling_params)
                return original(self, prompt, sampling_params, request_id, *args, **kwargs)
            ask = front.read(sampling_params, request_id, is_offline=False)
            if ask is None:
                return original(self, prompt, sampling_params, request_id, *args, **kwargs)
            call = http.current_call()
            if isinstance(prompt, AsyncIterator):
                refuse_streamed_input(ask)
            if isinstance(prompt, Mapping) and (tokens := prompt.get("prompt_token_ids")) is not None:
                ask = resolve(ask, len(tokens), call.find_message(tokens) if call else None)
        outputs = original(self, prompt, attach(sampling_params, ask), request_id, *args, **kwargs)
        return _with_results(outputs, front, ask, call.expect() if call else None)

    return wrapped


async def _with_results(
    outputs: AsyncGenerator[Any, None], front: FrontEnd, ask: Ask, slot: http.Slot | None
) -> AsyncGenerator[Any, None]:
    try:
        async for output in outputs:
            if output.finished and (ask.is_explicit or ask.wait):
                is_aborted = all(completion.finish_reason == "abort" for completion in output.outputs)
                results = await front.wait_async(ask, is_aborted=is_aborted)
                attach_results(output, results)
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
