"""`LLM` and `LLMEngine`: finished requests wait for their results before they are handed to the user.

A script's own error is the last thing that its user sees. Python prints an uncaught error first and ends vLLM's
processes afterwards, which log what they do, and that they were ended. So engines with requests of headgate's are shut
down before the error is printed, and deliver what they captured.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import cast

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.contracts.core_calls import run_each
from headgate.capture.engine.core.fan_out import fan_out
from headgate.capture.engine.frontends import input_processor
from headgate.capture.engine.frontends.lazy_capture import note_chat
from headgate.capture.engine.frontends.output_processor import put_values
from headgate.capture.engine.frontends.prompt_tokens import forget_unsent, looking_up
from headgate.capture.engine.requests.capture_frontend import FRONT_END, FrontEnd, attach_results, front_end_of
from headgate.capture.engine.requests.chat_messages import ENGINE_GONE, EngineGoneError, LLMChat, Tokens
from headgate.capture.engine.requests.request_reader import RequestReader, is_refused, overload_of, reader_of
from headgate.capture.engine.requests.sampling_params import (
    CaptureRequest,
    HeadgateRequest,
    attach,
    is_made,
    refuse_made,
    refuse_unknown_in,
)
from headgate.capture.engine.vllm_types import (
    Function,
    LLMEngine,
    OfflineLLM,
    RequestOutput,
    SamplingParams,
    SyncClient,
)
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import OverloadedError, RequestError

logger = logging.getLogger("headgate")


_running: weakref.WeakSet[SyncClient] = weakref.WeakSet()


def shut_down_before_errors(client: SyncClient) -> None:
    """Shut `client` down before an error that ends the program is printed; idempotent, and keeps nothing alive."""
    _running.add(client)
    show = sys.excepthook
    if show.__module__ == __name__:
        return

    def shut_down_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for client in list(_running):
                _running.discard(client)
                client.shutdown()
        except Exception as failure:  # noqa: BLE001  (the error that ends the program is what matters)
            logger.warning("headgate: an engine could not be shut down: %r", failure)
        finally:
            show(kind, error, trace)

    sys.excepthook = shut_down_and_show


_PENDING_RESULTS = "_headgate_pending_results"


@dataclass(slots=True)
class _PendingResults:
    """Requests of one `LLMEngine` whose results are pending.

    Attributes:
        reader: Reads its requests.
        asks: Of running requests, by the caller's request id.
        finished: Outputs without their results, while `LLM` runs the engine; it collects them at the end.
        refused: What requests asked that the engine core did not take, while `LLM` runs the engine.
        overload: Why the engine core sent a request away, while `LLM` runs the engine.
        is_run_by_llm: `LLM` runs the engine; otherwise the user calls `step`.
    """

    reader: RequestReader
    asks: dict[str, HeadgateRequest] = field(default_factory=dict)
    finished: list[tuple[RequestOutput, CaptureRequest]] = field(default_factory=list)
    refused: list[HeadgateRequest] = field(default_factory=list)
    overload: OverloadedError | None = None
    is_run_by_llm: bool = False

    @property
    def front(self) -> FrontEnd:
        """Capture's front end; only for requests that capture."""
        assert self.reader.capture is not None  # noqa: S101
        return self.reader.capture

    def forget(self, headgate_request: HeadgateRequest) -> None:
        """Stop waiting for results of `headgate_request`."""
        if headgate_request.capture is not None:
            self.front.forget(headgate_request.capture)

    def take(self, output: RequestOutput) -> None:
        """An output of a request that finished."""
        headgate_request = self.asks.pop(output.request_id)
        if is_refused(output):
            self.forget(headgate_request)
            if self.is_run_by_llm:
                self.overload = overload_of(output) or self.overload
                self.refused.append(headgate_request)
        elif headgate_request.capture is not None:
            self.finished.append((output, headgate_request.capture))


def _pending_results(engine: LLMEngine) -> _PendingResults | None:
    """Return the pending results of an engine that is configured for headgate; None for others."""
    pending: _PendingResults | None = vars(engine).get(_PENDING_RESULTS)
    if pending is None:
        reader = reader_of(engine)
        if reader.capture is None and not reader.parts:
            return None
        pending = _PendingResults(reader)
        setattr(engine, _PENDING_RESULTS, pending)
        if reader.capture is not None:
            setattr(engine.engine_core, FRONT_END, reader.capture)
        shut_down_before_errors(engine.engine_core)
    return pending


def add_request(original: Function) -> Function:
    """Wrap ``LLMEngine.add_request``: check what the request asks, and remember to hand out its results."""
    checked = _checked(original)

    @wraps(original)
    def wrapped(
        self: LLMEngine, request_id: str, prompt: object, params: SamplingParams, *args: object, **kwargs: object
    ) -> object:
        try:
            return checked(self, request_id, prompt, params, *args, **kwargs)
        except Exception:
            forget_unsent(self.input_processor, prompt)
            raise

    return wrapped


def _checked(original: Function) -> Function:
    def wrapped(
        self: LLMEngine, request_id: str, prompt: object, params: SamplingParams, *args: object, **kwargs: object
    ) -> object:
        if not hasattr(params, "extra_args"):  # pooling
            return original(self, request_id, prompt, params, *args, **kwargs)
        with as_client_error():
            if is_made(prompt):
                refuse_made(prompt, params)
                refuse_unknown_in(prompt.sampling_params)
                return original(self, request_id, prompt, params, *args, **kwargs)
            reader = reader_of(self)
            headgate_request = reader.read_answered(params, request_id, is_offline=True)
            if headgate_request is None:
                return original(self, request_id, prompt, params, *args, **kwargs)
            run_each(reader.confirm(headgate_request), self.engine_core)
        pending = _pending_results(self)
        assert pending is not None  # noqa: S101  (a reader without parts reads nothing)
        before = _ids(self, request_id)
        try:
            with fan_out(self.engine_core, params.n):
                result = original(self, request_id, prompt, attach(params, headgate_request), *args, **kwargs)
        except BaseException as error:
            pending.forget(headgate_request)
            # An engine core in this process refuses in the call, when the output processor already waits for it.
            self.abort_request([known for known in _ids(self, request_id) if known not in before], internal=True)
            if isinstance(error, RequestError):
                _explain(self, pending, [headgate_request])
            raise
        if not headgate_request.is_empty:
            pending.asks[request_id] = headgate_request
        return result

    return wrapped


def _ids(engine: LLMEngine, request_id: str) -> list[str]:
    """The engine's ids of what runs under a caller's request id."""
    return list(engine.output_processor.external_req_ids.get(request_id, ()))


def step(original: Callable[[LLMEngine], Sequence[RequestOutput]]) -> Function:
    """Wrap ``LLMEngine.step``: results for users who run the engine themselves."""

    @wraps(original)
    def wrapped(self: LLMEngine) -> Sequence[RequestOutput]:
        outputs = original(self)
        pending = _pending_results(self)
        if pending is None or not pending.asks:
            return outputs
        for output in outputs:
            if (headgate_request := pending.asks.get(output.request_id)) is None:
                continue
            if headgate_request.wants_notes:
                put_values(output, pending.reader, headgate_request)
            if output.finished:
                pending.take(output)
        if pending.finished and not pending.is_run_by_llm:
            _collect(self, pending, pending.front.patience_s())
        return outputs

    return wrapped


def run_engine(original: Function) -> Function:
    """Wrap ``LLM._run_engine``: wait for the results of all requests once, after the last has finished.

    If the engine core refused a request for a registered name that is gone, that is raised as it would have been when
    the request was made.
    """

    @wraps(original)
    def wrapped(self: OfflineLLM, *args: object, **kwargs: object) -> object:
        engine = self.llm_engine
        pending = _pending_results(engine)
        if pending is None:
            return original(self, *args, **kwargs)
        pending.is_run_by_llm = True
        try:
            outputs = original(self, *args, **kwargs)
        except BaseException:
            for _, ask in pending.finished:
                pending.front.forget(ask)
            pending.finished, pending.refused, pending.overload = [], [], None
            raise
        finally:
            pending.is_run_by_llm = False
        if pending.finished:
            _collect(engine, pending, pending.front.config.result_timeout_s)
        refused, pending.refused = pending.refused, []
        overload, pending.overload = pending.overload, None
        if overload is not None:
            raise overload
        _explain(engine, pending, refused)
        return outputs

    return wrapped


def _explain(engine: LLMEngine, pending: _PendingResults, refused: Iterable[HeadgateRequest]) -> None:
    """Say why the engine core refused requests: for a name that is gone, or for want of room."""
    for headgate_request in refused:
        with as_client_error():
            run_each(pending.reader.explain(headgate_request), engine.engine_core)


def _collect(engine: LLMEngine, pending: _PendingResults, timeout_s: float) -> None:
    """Wait for all that finished, `timeout_s` together, and hand the results out."""
    _notify_worker(engine)
    deadline = time.monotonic() + timeout_s
    finished, pending.finished = pending.finished, []
    for output, ask in finished:
        attach_results(output, pending.front.wait(ask, deadline=deadline), pending.front.capture_reader.hidden_states)


def _notify_worker(engine: LLMEngine) -> None:
    """An engine core inside this process takes a step only when asked to: the worker has yet to learn who finished."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        return
    while core.scheduler.has_finished_requests() and not core.scheduler.has_unfinished_requests():
        engine.engine_core.get_output()


def abort_request(original: Function) -> Function:
    """Wrap ``LLMEngine.abort_request``: an aborted request has no output that could carry results."""

    @wraps(original)
    def wrapped(self: LLMEngine, *args: object, **kwargs: object) -> object:
        result = original(self, *args, **kwargs)
        if (pending := _pending_results(self)) is not None:
            running = self.output_processor.external_req_ids
            for request_id in [known for known in pending.asks if known not in running]:
                pending.forget(pending.asks.pop(request_id))
        return result

    return wrapped


def shutdown(original: Function) -> Function:
    """Wrap ``shutdown`` of an `LLMEngine`'s client: the front end closes with the engine core, and after it."""

    @wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        try:
            return original(self, *args, **kwargs)
        finally:
            front: FrontEnd | None = vars(self).get(FRONT_END)
            if front is not None:
                front.close()

    return wrapped


def keep_chat(original: Callable[..., Mapping[str, object]]) -> Function:
    """Wrap ``LLM._preprocess_chat_one``: remember the conversation of a prompt, for message selectors."""

    @wraps(original)
    def wrapped(self: OfflineLLM, conversation: Sequence[Document], **kwargs: object) -> Mapping[str, object]:
        prompt = original(self, conversation, **kwargs)
        if front_end_of(self.llm_engine) is not None:
            alive = weakref.ref(self)  # handles of captured rows keep the conversation, and shall not keep the engine

            def render(chat: Sequence[Document]) -> Tokens:
                llm = alive()
                if llm is None:
                    raise EngineGoneError(ENGINE_GONE)
                closed = {"add_generation_prompt": False, "continue_final_message": False}
                with looking_up():
                    return cast("Tokens", original(llm, list(chat), **{**kwargs, **closed})["prompt_token_ids"])

            chat = LLMChat(
                prompt,
                conversation,
                render,
                is_continued=bool(kwargs.get("continue_final_message")),
                bos=getattr(self.get_tokenizer(), "bos_token_id", None),
            )
            input_processor.keep_chat(self.llm_engine.input_processor, chat)
            note_chat(chat)
        return prompt

    return wrapped
