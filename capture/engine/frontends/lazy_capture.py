"""``LLM.capture`` and ``AsyncLLM.capture``: run prompts, and return handles of their captured rows."""

from __future__ import annotations

import asyncio
import copy
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import msgspec

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.core_calls import AsyncCoreClient, CoreClient
from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.request_part import RequestPart
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.frontends.prompt_tokens import chat_params_of, looking_up
from headgate.capture.engine.requests.call_context import HttpCall, enter
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.requests.capture_request import HOW_TO_CAPTURE, NO_CAPTURE
from headgate.capture.engine.requests.chat_messages import ENGINE_GONE, Chat, EngineGoneError, LLMChat, Tokens
from headgate.capture.engine.requests.request_reader import OpenPart, RequestReader, reader_of
from headgate.capture.engine.vllm_types import AsyncLLM, Engine, OfflineLLM, RequestOutput
from headgate.capture.handles import CaptureCall, CaptureHandle
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import ConfigError, RequestError, shown
from headgate.capture.schema.results import CaptureResult, RowFetcher, plain_payload
from headgate.capture.schema.sites import Site, site_map

Captured = tuple[list[RequestOutput], list[CaptureHandle]]

_CHAT_SETTINGS = ("chat_template", "chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")

_rendered: ContextVar[list[LLMChat] | None] = ContextVar("headgate_rendered_chats", default=None)


def note_chat(chat: LLMChat) -> None:
    """Remember a conversation that `LLM.chat` has rendered, if it is `LLM.capture` that calls it."""
    if (rendered := _rendered.get()) is not None:
        rendered.append(chat)


@contextmanager
def _noting_chats() -> Iterator[list[LLMChat]]:
    token = _rendered.set([])
    try:
        yield cast("list[LLMChat]", _rendered.get())
    finally:
        _rendered.reset(token)


class Capturing:
    """``llm.capture``: call it. It belongs to one `LLM`.

    Args:
        llm: The `LLM`.
        front: Its front end.
    """

    def __init__(self, llm: OfflineLLM, front: FrontEnd) -> None:
        self._llm: Any = llm
        self._front = front

    def __call__(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        sites: Mapping[str, Any] | Sequence[str | Site],
        positions: object = "all",
        consumer: str | None = None,
        options: Document | None = None,
        **kwargs: Any,
    ) -> Captured:
        """Run prompts or chats, and return their outputs and a handle for each sample of each.

        ::

            outputs, handles = llm.capture("Hello", sites=["12.post_mlp"], positions="all_prompt")
            outputs, handles = llm.capture(chats, SamplingParams(max_tokens=32), sites={"post_mlp": [10, 12]})

        It returns when every capture is complete, or after ``capture.result_timeout_s`` seconds. Outputs carry a
        summary of the rows; the rows themselves belong to the handles.

        Args:
            prompts: As `LLM.generate` takes them; or a chat, a list of messages; or a list of chats.
            sampling_params: As `LLM.generate` and `LLM.chat` take them; they stay as they are.
            sites: ``{hook point: layers}`` as in a request's ``hooks``, or names of sites.
            positions: A selector, or a list of selectors, as in a request.
            consumer: Name of the consumer that keeps the rows: one whose rows can be fetched, such as `memory` or
                `filesystem`. By default the first configured one.
            options: The consumer's own options of a request, such as ``tag``.
            kwargs: For `LLM.generate` or `LLM.chat`.

        Raises:
            RequestError: Naming the argument that is wrong.
        """
        call = _open_call(self._front, consumer)
        wanted = {call.consumer: {**(options or {}), "hooks": _hooks(sites), "positions": positions}}
        is_chat = _chats_of(prompts) is not None
        serve = self._llm.chat if is_chat else self._llm.generate
        given = self._llm.get_default_sampling_params() if sampling_params is None else sampling_params
        with _noting_chats() as chats:
            outputs: list[RequestOutput] = serve(prompts, _with_capture(given, wanted), **kwargs)
        known = chats if is_chat else [None] * len(outputs)
        handles = [
            handle for output, chat in zip(outputs, known, strict=True) for handle in _take_handles(output, call, chat)
        ]
        return outputs, handles


class AsyncCapturing:
    """``async_llm.capture``: call it, and await the result. It belongs to one `AsyncLLM`.

    Args:
        llm: The `AsyncLLM`.
        front: Its front end.
    """

    def __init__(self, llm: AsyncLLM, front: FrontEnd) -> None:
        self._llm: Any = llm
        self._front = front

    async def __call__(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        sites: Mapping[str, Any] | Sequence[str | Site],
        positions: object = "all",
        consumer: str | None = None,
        options: Document | None = None,
        **kwargs: Any,
    ) -> Captured:
        """Run prompts or chats side by side; see `Capturing.__call__`.

        Of chats, `kwargs` may have ``chat_template``, ``chat_template_kwargs``, ``tools``, ``add_generation_prompt``
        and ``continue_final_message``; everything else is for `AsyncLLM.generate`. If one request fails, the others
        are aborted.
        """
        call = _open_call(self._front, consumer)
        wanted = {call.consumer: {**(options or {}), "hooks": _hooks(sites), "positions": positions}}
        settings = {name: kwargs.pop(name) for name in _CHAT_SETTINGS if name in kwargs}
        chats = _chats_of(prompts)
        if chats is None and settings:
            raise RequestError(next(iter(settings)), "is for chats: give lists of messages")
        each = chats or ([prompts] if _is_one_prompt(prompts) else list(prompts))
        given = _default_params(self._llm) if sampling_params is None else sampling_params
        params = _with_capture(given, wanted)
        one_by_one = params if isinstance(params, list) else [params] * len(each)
        if len(one_by_one) != len(each):
            raise RequestError("sampling_params", f"expected one or {len(each)}, as prompts, got {len(one_by_one)}")
        name = f"capture-{secrets.token_hex(8)}"
        tasks = [
            asyncio.ensure_future(self._run(prompt, own, f"{name}-{n}", None if chats is None else settings, **kwargs))
            for n, (prompt, own) in enumerate(zip(each, one_by_one, strict=True))
        ]
        try:
            finished = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        handles = [handle for output, chat in finished for handle in _take_handles(output, call, chat)]
        return [output for output, _ in finished], handles

    async def _run(
        self, prompt: Any, params: Any, request_id: str, settings: Document | None, **kwargs: Any
    ) -> tuple[RequestOutput, LLMChat | None]:
        chat = None
        if settings is not None:
            prompt, chat = await self._render(prompt, settings)
            enter(HttpCall(chat=chat))  # in this task alone: its request finds its messages there
        last = None
        async for output in self._llm.generate(prompt, params, request_id, **kwargs):
            last = output
        assert last is not None  # noqa: S101  (a request has an output, or raises)
        return last, chat

    async def _render(self, chat: Chat, settings: Document) -> tuple[Mapping[str, Any], LLMChat]:
        """Render a chat as `LLM.chat` does; the rows' messages are found by rendering parts of it alike."""
        renderer = self._llm.renderer
        _, (prompt,) = await renderer.render_chat_async([list(chat)], *chat_params_of(renderer, settings))
        alive = weakref.ref(self._llm)

        def render(part: Chat) -> Tokens:
            if alive() is None:
                raise EngineGoneError(ENGINE_GONE)
            closed = {**settings, "add_generation_prompt": False, "continue_final_message": False}
            with looking_up():
                _, (found,) = renderer.render_chat([list(part)], *chat_params_of(renderer, closed))
            return cast("Tokens", found["prompt_token_ids"])

        is_continued = bool(settings.get("continue_final_message"))
        bos = getattr(renderer.tokenizer, "bos_token_id", None)
        return prompt, LLMChat(None, chat, render, is_continued=is_continued, bos=bos)


def _default_params(llm: Any) -> Any:
    SamplingParams = vllm_names.SAMPLING_PARAMS.get()

    differing = llm.model_config.get_diff_sampling_param()
    return SamplingParams.from_optional(**differing) if differing else SamplingParams()


def _open_call(front: FrontEnd, consumer: str | None) -> CaptureCall:
    """Choose the consumer that keeps the rows: the named one, else the first configured one that can."""
    classes: Mapping[str, object] = front.consumers
    fetchers = {name: kind.fetch_rows for name, kind in classes.items() if isinstance(kind, RowFetcher)}
    name = next(iter(fetchers), None) if consumer is None else consumer
    if name is None or name not in fetchers:
        there = f"consumers of this engine whose rows can be: {', '.join(fetchers) or 'none'}"
        asked = "no rows can be fetched" if consumer is None else f"rows of {shown(consumer)} cannot be fetched"
        raise RequestError("consumer", f"{asked}; {there}. Configure one, such as 'memory' or 'filesystem'")
    return CaptureCall(name, fetchers[name])


def _hooks(sites: Mapping[str, Any] | Sequence[str | Site]) -> Document:
    if isinstance(sites, Mapping):
        return dict(sites)
    try:
        named = [site if isinstance(site, Site) else Site.parse(site) for site in sites]
    except (ValueError, AttributeError, TypeError) as error:
        raise RequestError("sites", f"expected {{hook point: layers}} or names of sites, got {shown(sites)}") from error
    return {hook: layers or "all" for hook, layers in site_map(named).items()}


def _chats_of(prompts: Any) -> list[Chat] | None:
    """Return the chats that were given, of one chat a list; None if prompts were."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes) or not prompts:
        return None
    if _is_chat(prompts):
        return [prompts]
    return list(prompts) if all(map(_is_chat, prompts)) else None


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes) and len(prompt) > 0
    return is_list and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def _is_one_prompt(prompts: Any) -> bool:
    """Whether a text, the tokens of a prompt or a document with one of them was given, and no list of those."""
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and all(type(token) is int for token in prompts))


def _with_capture(given: Any, wanted: Document) -> Any:
    """Return copies of sampling parameters, one or several, that ask for a capture, too, and wait for it."""
    if not isinstance(given, Sequence):
        return _one_with_capture(given, wanted)
    copies = {id(params): _one_with_capture(params, wanted) for params in given}
    return [copies[id(params)] for params in given]


def _one_with_capture(given: Any, wanted: Document) -> Any:
    params, asked = copy.copy(given), given.capture or {}
    for name in wanted:
        if name in asked:
            raise RequestError(f"{CAPTURE}.{name}", "llm.capture sets it; leave it out of the sampling parameters")
    params.capture = {**asked, **wanted}
    params.capture_wait = True
    return params


def _take_handles(output: RequestOutput, call: CaptureCall, chat: LLMChat | None) -> list[CaptureHandle]:
    """Make the handles of an output's samples, and leave a summary of the rows in it: they belong to the handles."""
    tokens: Tokens = cast("Any", output).prompt_token_ids
    messages = None if chat is None else chat.messages(tokens)
    handles = []
    for completion in output.outputs:
        results = cast("Mapping[str, CaptureResult]", completion.capture_results)
        handle = CaptureHandle(
            results[call.consumer],
            call,
            request_id=output.request_id,
            sample_index=completion.index,
            num_prompt_tokens=len(tokens),
            chat=messages,
        )
        handles.append(handle)
        completion.capture_results = {**results, call.consumer: _summary(handle.result)}
    merged = cast("Mapping[str, CaptureResult]", output.capture_results)
    output.capture_results = {**merged, call.consumer: _summary(merged[call.consumer])}
    return handles


def _summary(result: CaptureResult) -> CaptureResult:
    payload = result.payload
    plain = [plain_payload(each) for each in payload] if isinstance(payload, list) else plain_payload(payload)
    return msgspec.structs.replace(result, payload=plain)


class NotConfiguredError(ConfigError, AttributeError):
    """A part was not configured. An `AttributeError` too, so that tools which list attributes get by."""


def add_handles(llm: type) -> None:
    """Give vLLM's ``LLM`` a property for each part, and one for capture."""
    _add(llm, CAPTURE, property(_read_capturing, doc=_doc(CAPTURE)))
    for name, part in request_parts().items():
        _add(llm, name, property(_sync_getter(name, part), doc=_doc(name)))


def add_async_handles(engine: type) -> None:
    """Give vLLM's ``AsyncLLM`` a property for each part, and one for capture."""
    _add(engine, CAPTURE, property(_read_async_capturing, doc=_doc(CAPTURE)))
    for name, part in request_parts().items():
        _add(engine, name, property(_async_getter(name, part), doc=_doc(name)))


def _add(owner: type, name: str, handle: property) -> None:
    held = vars(owner).get(name)
    if hasattr(owner, name) and not (isinstance(held, property) and held.fget.__module__ == __name__):
        raise TypeError(f"vLLM's {owner.__name__} has an attribute {name!r} of its own")
    setattr(owner, name, handle)


def _doc(name: str) -> str:
    return f"headgate: {name} of this engine, if it is configured."


def _read_capturing(self: OfflineLLM) -> Capturing:
    return Capturing(self, _capturing_front_end(self.llm_engine))


def _read_async_capturing(self: AsyncLLM) -> AsyncCapturing:
    return AsyncCapturing(self, _capturing_front_end(self))


def _capturing_front_end(engine: Engine) -> FrontEnd:
    front = front_end_of(engine)
    if front is None:
        raise NotConfiguredError(f"{NO_CAPTURE} {HOW_TO_CAPTURE}")
    return front


def _sync_getter(name: str, part: RequestPart) -> Callable[[OfflineLLM], object]:
    def read(self: OfflineLLM) -> object:
        engine = self.llm_engine
        opened = _opened(reader_of(engine), name, part)
        return part.handle(CoreClient(engine.engine_core, name), opened.reader)

    return read


def _async_getter(name: str, part: RequestPart) -> Callable[[AsyncLLM], object]:
    def read(self: AsyncLLM) -> object:
        opened = _opened(reader_of(self), name, part)
        return part.async_handle(AsyncCoreClient(self.engine_core, name, opened.call_lock), opened.reader)

    return read


def _opened(reader: RequestReader, name: str, part: RequestPart) -> OpenPart:
    opened = reader.parts.get(name)
    if opened is None:
        raise NotConfiguredError(f"this engine was started without {name}. {part.how_to_start}")
    return opened
