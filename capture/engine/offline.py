"""`LLM` and `LLMEngine`: finished requests wait for their results before they are handed to the user."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from headgate.capture.engine import inputs
from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.frontend import FRONT_END, FrontEnd, attach_results, front_end_of
from headgate.capture.engine.requests import Ask, attach, refuse_unconfigured
from headgate.capture.engine.turns import LLMChat

_DESK = "_headgate_desk"


@dataclass(slots=True)
class _Desk:
    """What an `LLMEngine` has to hand out.

    Attributes:
        front: Its front end.
        asks: Of running requests, by the caller's request id.
        finished: Outputs without their results, while `LLM` runs the engine; it collects them at the end.
        is_run_by_llm: `LLM` runs the engine; otherwise the user calls `step`.
    """

    front: FrontEnd
    asks: dict[str, Ask] = field(default_factory=dict)
    finished: list[tuple[Any, Ask]] = field(default_factory=list)
    is_run_by_llm: bool = False


def _desk_of(engine: Any) -> _Desk | None:
    """The desk of an engine that captures; None for others."""
    desk: _Desk | None = vars(engine).get(_DESK)
    if desk is None and (front := front_end_of(engine)) is not None:
        desk = _Desk(front)
        setattr(engine, _DESK, desk)
        setattr(engine.engine_core, FRONT_END, front)
    return desk


def add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LLMEngine.add_request``: check what the request asks, and remember to hand out its results."""

    @wraps(original)
    def wrapped(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(params, "extra_args"):  # pooling
            return original(self, request_id, prompt, params, *args, **kwargs)
        with as_client_error():
            desk = _desk_of(self)
            if desk is None:
                refuse_unconfigured(params)
                return original(self, request_id, prompt, params, *args, **kwargs)
            ask = desk.front.read(params, request_id, is_offline=True)
        if ask is None:
            return original(self, request_id, prompt, params, *args, **kwargs)
        try:
            result = original(self, request_id, prompt, attach(params, ask), *args, **kwargs)
        except BaseException:
            desk.front.forget(ask)
            raise
        desk.asks[request_id] = ask
        return result

    return wrapped


def step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LLMEngine.step``: results for users who run the engine themselves."""

    @wraps(original)
    def wrapped(self: Any) -> Any:
        outputs = original(self)
        desk = _desk_of(self)
        if desk is None or not desk.asks:
            return outputs
        desk.finished += [
            (output, desk.asks.pop(output.request_id))
            for output in outputs
            if output.finished and output.request_id in desk.asks
        ]
        if desk.finished and not desk.is_run_by_llm:
            _collect(self, desk, desk.front.config.result_wait_s)
        return outputs

    return wrapped


def run_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LLM._run_engine``: wait for the results of all requests once, after the last has finished."""

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = self.llm_engine
        desk = _desk_of(engine)
        if desk is None:
            return original(self, *args, **kwargs)
        desk.is_run_by_llm = True
        try:
            outputs = original(self, *args, **kwargs)
        except BaseException:
            for _, ask in desk.finished:
                desk.front.forget(ask)
            desk.finished = []
            raise
        finally:
            desk.is_run_by_llm = False
        if desk.finished:
            _collect(engine, desk, desk.front.config.result_timeout_s)
        return outputs

    return wrapped


def _collect(engine: Any, desk: _Desk, timeout_s: float) -> None:
    """Wait for all that finished, `timeout_s` together, and hand the results out."""
    _tell_worker(engine)
    deadline = time.monotonic() + timeout_s
    finished, desk.finished = desk.finished, []
    for output, ask in finished:
        attach_results(output, desk.front.wait(ask, deadline=deadline))


def _tell_worker(engine: Any) -> None:
    """An engine core inside this process takes a step only when told to: the worker has yet to learn who finished."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None:
        return
    while core.scheduler.has_finished_requests() and not core.scheduler.has_unfinished_requests():
        engine.engine_core.get_output()


def abort_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LLMEngine.abort_request``: an aborted request has no output that could carry results."""

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if (desk := _desk_of(self)) is not None:
            running = self.output_processor.external_req_ids
            for request_id in [known for known in desk.asks if known not in running]:
                desk.front.forget(desk.asks.pop(request_id))
        return result

    return wrapped


def shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``shutdown`` of an `LLMEngine`'s client: the front end closes with the engine core, and after it."""

    @wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            front: FrontEnd | None = vars(self).get(FRONT_END)
            if front is not None:
                front.close()

    return wrapped


def keep_chat(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LLM._preprocess_chat_one``: remember the conversation behind a prompt, for message selectors."""

    @wraps(original)
    def wrapped(self: Any, conversation: Sequence[Any], **kwargs: Any) -> Any:
        prompt = original(self, conversation, **kwargs)
        if front_end_of(self.llm_engine) is not None:

            def render(chat: Sequence[Any]) -> Any:
                closed = {"add_generation_prompt": False, "continue_final_message": False}
                return original(self, list(chat), **{**kwargs, **closed})["prompt_token_ids"]

            chat = LLMChat(
                prompt,
                conversation,
                render,
                is_continued=kwargs.get("continue_final_message", False),
                bos=getattr(self.get_tokenizer(), "bos_token_id", None),
            )
            inputs.keep_chat(self.llm_engine.input_processor, chat)
        return prompt

    return wrapped
