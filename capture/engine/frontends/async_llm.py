"""`AsyncLLM`: requests are checked in the call itself, and their last output waits for the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import wraps

from msgspec.structs import replace

from headgate.capture.engine.access.caller import current_caller, current_client
from headgate.capture.engine.client_errors import as_client_error, is_without_field, overloaded
from headgate.capture.engine.contracts.core_calls import run_each_async
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.core.fan_out import fan_out_async
from headgate.capture.engine.frontends.metering import Meter, metered, open_meter
from headgate.capture.engine.frontends.output_processor import is_delta, outdated_of, with_values
from headgate.capture.engine.frontends.prompt_tokens import forget_unsent
from headgate.capture.engine.requests.call_context import HttpCall, Slot, current_call, noting_refusals
from headgate.capture.engine.requests.capture_frontend import FrontEnd, attach_results, front_end_of
from headgate.capture.engine.requests.request_reader import RequestReader, is_refused, overload_of, reader_of
from headgate.capture.engine.requests.sampling_params import (
    CAPTURE_FIELDS,
    CaptureRequest,
    HeadgateRequest,
    attach,
    is_made,
    read_fields,
    refuse_made,
    refuse_streamed_input,
    refuse_unknown_in,
)
from headgate.capture.engine.setup.hosts import check_agreement, has_far_engines, worker_setups
from headgate.capture.engine.setup.settings import sections
from headgate.capture.engine.vllm_types import AsyncLLM, Function, RequestOutput, SamplingParams
from headgate.capture.schema.errors import UnsupportedError


def generate(original: Function) -> Function:
    """Wrap ``AsyncLLM.generate``.

    The check runs when `generate` is called, not when its outputs are awaited: a streaming HTTP request then gets a
    real status 400 instead of an error inside its stream. Registered names that are not known here are the exception:
    the engine core is asked first; the HTTP handlers have done so before they call.
    """
    checked = _checked(original)

    @wraps(original)
    def wrapped(self: AsyncLLM, prompt: object, *args: object, **kwargs: object) -> object:
        try:
            return checked(self, prompt, *args, **kwargs)
        except Exception:
            forget_unsent(self.input_processor, prompt)
            raise

    return wrapped


def _checked(original: Function) -> Function:
    def wrapped(
        self: AsyncLLM,
        prompt: object,
        sampling_params: SamplingParams,
        request_id: str,
        *args: object,
        **kwargs: object,
    ) -> object:
        with as_client_error():
            if is_made(prompt):
                refuse_made(prompt, sampling_params)
                refuse_unknown_in(prompt.sampling_params)
                return original(self, prompt, sampling_params, request_id, *args, **kwargs)
            reader, call = reader_of(self), current_call()
            if call is None:
                _require_capture_role(sampling_params)
            headgate_request = reader.read_answered(sampling_params, request_id, is_offline=False)
            is_session = isinstance(prompt, AsyncIterator)
            if headgate_request is None:
                outputs = original(self, prompt, sampling_params, request_id, *args, **kwargs)
                return _session(outputs) if is_session else outputs
            if is_session and not headgate_request.is_empty:
                refuse_streamed_input(headgate_request)
            headgate_request = _resolved(reader, headgate_request, prompt, sampling_params, call)
            meter = _meter(reader, headgate_request, prompt, sampling_params)
        outputs = original(self, prompt, attach(sampling_params, headgate_request), request_id, *args, **kwargs)
        if headgate_request.parts:
            outputs = _with_refusals(outputs, self, prompt, headgate_request)
        captures = headgate_request.capture is not None
        slot = call.expect() if call is not None and (captures or headgate_request.wants_notes) else None
        if headgate_request.wants_notes:
            outputs = with_values(outputs, reader, headgate_request, sampling_params.output_kind, slot)
        if headgate_request.capture is not None and reader.capture is not None:
            is_piece = is_delta(sampling_params.output_kind)
            outdated, ask = outdated_of(self.output_processor), headgate_request.capture
            outputs = _with_results(outputs, reader.capture, ask, slot, outdated, is_piece=is_piece)
        return outputs if meter is None else metered(outputs, meter)

    return wrapped


def add_request(original: Function) -> Function:
    """Wrap ``AsyncLLM.add_request``: what samples share is sent to each engine core once."""

    @wraps(original)
    async def wrapped(
        self: AsyncLLM, request_id: str, prompt: object, params: SamplingParams, *args: object, **kwargs: object
    ) -> object:
        try:
            if _has_far_engines(self):
                await _agreed(self)
            if getattr(params, "n", 1) == 1:  # pooling has none
                return await original(self, request_id, prompt, params, *args, **kwargs)
            async with fan_out_async(self.engine_core, params.n):
                return await original(self, request_id, prompt, params, *args, **kwargs)
        except Exception:
            forget_unsent(self.input_processor, prompt)
            raise

    return wrapped


_AGREEMENT = "_headgate_agreement"
_HAS_FAR_ENGINES = "_headgate_has_far_engines"


def _has_far_engines(engine: AsyncLLM) -> bool:
    """`has_far_engines`, asked once: every request passes here."""
    found: bool | None = vars(engine).get(_HAS_FAR_ENGINES)
    if found is None:
        found = has_far_engines(engine.vllm_config)
        setattr(engine, _HAS_FAR_ENGINES, found)
    return found


async def _agreed(engine: AsyncLLM) -> None:
    """Compare this process with the workers of all hosts, once: no earlier moment has an event loop and all of them.

    Raises:
        UnsupportedError: If one differs, for every request.
    """
    if sections(engine.vllm_config):
        comparing: asyncio.Future[None] | None = vars(engine).get(_AGREEMENT)
        if comparing is None:
            comparing = asyncio.ensure_future(_compare(engine))
            setattr(engine, _AGREEMENT, comparing)
        await asyncio.shield(comparing)


async def _compare(engine: AsyncLLM) -> None:
    check_agreement(engine.vllm_config, await worker_setups(engine.engine_core))


def _require_capture_role(params: SamplingParams) -> None:
    """Ask an HTTP client for the key to capture where no route that takes our fields has done so."""
    client = current_client()
    if client is not None and read_fields(params, CAPTURE_FIELDS):
        client.require_role(CAPTURE)


def _resolved(
    reader: RequestReader,
    headgate_request: HeadgateRequest,
    prompt: object,
    params: SamplingParams,
    call: HttpCall | None,
) -> HeadgateRequest:
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if tokens is not None:
        reader.check_positions(headgate_request, len(tokens))
    if headgate_request.capture is None or reader.capture is None or tokens is None:
        return headgate_request
    messages = call.messages(tokens) if call else None
    resolved = reader.capture.resolve(headgate_request.capture, len(tokens), params, messages, call)
    return headgate_request if resolved is headgate_request.capture else replace(headgate_request, capture=resolved)


def _meter(
    reader: RequestReader, headgate_request: HeadgateRequest, prompt: object, params: SamplingParams
) -> Meter | None:
    if headgate_request.capture is None or reader.capture is None or (caller := current_caller()) is None:
        return None
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    num_prompt = None if tokens is None else len(tokens)
    return open_meter(caller, reader.capture, headgate_request.capture, num_prompt, params)


async def _with_refusals(
    outputs: AsyncGenerator[RequestOutput, None], engine: AsyncLLM, prompt: object, headgate_request: HeadgateRequest
) -> AsyncGenerator[RequestOutput, None]:
    """Confirm registered names first, and raise the reason if the engine core refuses the request."""
    reader, client = reader_of(engine), engine.engine_core
    with noting_refusals():
        try:
            with as_client_error():
                await run_each_async(reader.confirm(headgate_request), client)
            async for output in outputs:
                _check_overload(output)
                if is_refused(output):
                    with as_client_error():
                        await run_each_async(reader.explain(headgate_request), client)
                yield output
        except Exception as error:
            forget_unsent(engine.input_processor, prompt)
            if is_without_field(error):
                with as_client_error():
                    await run_each_async(reader.explain(headgate_request), client)
            raise
        finally:
            await outputs.aclose()


async def _session(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """Raise what the engine core ended a streaming-input session for; vLLM would go on with its next piece of input."""
    try:
        async for output in outputs:
            _check_overload(output)
            yield output
    finally:
        await outputs.aclose()


def _check_overload(output: RequestOutput) -> None:
    """Raise the error that servers answer with 503 if the engine core sent the request away."""
    if (cause := overload_of(output)) is not None:
        raise overloaded(cause)


async def _with_results(
    outputs: AsyncGenerator[RequestOutput, None],
    front: FrontEnd,
    ask: CaptureRequest,
    slot: Slot | None,
    outdated: set[str],
    *,
    is_piece: bool,
) -> AsyncGenerator[RequestOutput, None]:
    """Put the results on the last output, and let chunks of a stream take what is there of its tokens.

    Args:
        outputs: Of one request.
        front: Of the engine.
        ask: What is captured.
        slot: Its place in an HTTP call.
        outdated: See `outdated_of`.
        is_piece: Whether each output has new tokens alone.
    """
    if slot is not None:
        slot.take_new = front.streamed(ask)
    generated: dict[int, int] = {}
    num_prompt = 0
    try:
        async for output in outputs:
            if slot is not None and ask.key in outdated:
                slot.take_new = None
            if slot is not None and slot.take_new is not None:
                num_prompt = num_prompt or len(output.prompt_token_ids or ())
                for completion in output.outputs:
                    count = len(completion.token_ids) + (generated.get(completion.index, 0) if is_piece else 0)
                    generated[completion.index] = count
                    slot.num_rows[completion.index] = num_prompt + count - 1
            if output.finished and (ask.is_explicit or ask.wait):
                is_aborted = all(completion.finish_reason == "abort" for completion in output.outputs)
                results = await front.wait_async(ask, is_aborted=is_aborted)
                attach_results(output, results, front.capture_reader.hidden_states)
                if slot is not None:
                    slot.results = results
            yield output
    finally:
        front.forget(ask)
        outdated.discard(ask.key)
        await outputs.aclose()


def shutdown(original: Function) -> Function:
    """Wrap ``AsyncLLM.shutdown``: the engine first, so that its last results still find the hub."""

    @wraps(original)
    def wrapped(self: AsyncLLM, *args: object, **kwargs: object) -> object:
        try:
            return original(self, *args, **kwargs)
        finally:
            # A constructor that failed leaves an object without an input processor, and is shut down all the same.
            if "input_processor" in vars(self) and (front := front_end_of(self)) is not None:
                front.close()

    return wrapped


def check_health(original: Function) -> Function:
    """Wrap ``AsyncLLM.check_health``: a server that can no longer answer captures is not healthy."""

    @wraps(original)
    async def wrapped(self: AsyncLLM, *args: object, **kwargs: object) -> object:
        result = await original(self, *args, **kwargs)
        if _has_far_engines(self):
            try:
                await _agreed(self)
            except UnsupportedError as error:
                raise self.dead_error from error
        front = front_end_of(self)
        if front is not None and front.problem is not None:
            raise self.dead_error from UnsupportedError(front.problem)
        return result

    return wrapped
