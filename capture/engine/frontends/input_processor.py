"""`InputProcessor`, where every request of every front end is made: what it asks of headgate is folded in here."""

from __future__ import annotations

import logging
import weakref
from functools import wraps

from msgspec.structs import replace

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.frontends.prompt_tokens import forget_unsent_features
from headgate.capture.engine.frontends.startup import open_front_end, open_parts
from headgate.capture.engine.requests.capture_frontend import FRONT_END
from headgate.capture.engine.requests.chat_messages import LLMChat
from headgate.capture.engine.requests.request_reader import REQUEST_READER, RequestReader
from headgate.capture.engine.requests.sampling_params import HeadgateRequest, attach, attached, fold, prompt_tokens
from headgate.capture.engine.vllm_types import Function, MadeRequest, SamplingParams, VllmConfig

logger = logging.getLogger("headgate")


_CHAT = "_headgate_chat"


def open_with_engine(original: Function) -> Function:
    """Wrap ``InputProcessor.__init__``: open headgate's front end with the engine's, or refuse to start."""

    @wraps(original)
    def __init__(self: object, vllm_config: VllmConfig, *args: object, **kwargs: object) -> None:
        original(self, vllm_config, *args, **kwargs)
        tokenizer = getattr(self, "tokenizer", None)
        front = open_front_end(vllm_config, tokenizer)
        setattr(self, FRONT_END, front)
        setattr(self, REQUEST_READER, RequestReader(front, open_parts(vllm_config, tokenizer)))
        if front is not None:
            weakref.finalize(self, front.close)

    return __init__


def process_inputs(original: Function) -> Function:
    """Wrap ``InputProcessor.process_inputs``: fold what the request asks into the `EngineCoreRequest`.

    `AsyncLLM.generate` and `LLMEngine.add_request` have read it already and will wait for its results. Callers that
    come here by another way get no waiting.
    """

    @wraps(original)
    def wrapped(
        self: object, request_id: str, prompt: object, params: SamplingParams, *args: object, **kwargs: object
    ) -> object:
        if not hasattr(params, "extra_args"):  # pooling
            return original(self, request_id, prompt, params, *args, **kwargs)
        reader: RequestReader = vars(self).get(REQUEST_READER) or RequestReader()
        headgate_request = attached(params)
        if headgate_request is None:
            with as_client_error():
                headgate_request = reader.read(params, request_id)
            if headgate_request is None:
                return original(self, request_id, prompt, params, *args, **kwargs)
            params = attach(params, headgate_request)
        chat = _chat_of(self, prompt)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        try:
            with as_client_error():
                _fold(reader, request, headgate_request, chat, request_id)
        except Exception:
            forget_unsent_features(self, request)
            raise
        return request

    return wrapped


def _fold(
    reader: RequestReader,
    request: MadeRequest,
    headgate_request: HeadgateRequest,
    chat: LLMChat | None,
    request_id: str,
) -> None:
    if request.prompt_token_ids is not None:
        reader.check_positions(headgate_request, len(request.prompt_token_ids))
    if headgate_request.capture is not None:
        tokens = prompt_tokens(request, headgate_request)
        messages = None if chat is None else chat.messages(tokens)
        assert reader.capture is not None  # noqa: S101  (it has read what is captured)
        reader.capture.expect(headgate_request.capture, request.sampling_params.n)
        resolved = reader.capture.resolve(headgate_request.capture, len(tokens), request.sampling_params, messages)
        if resolved is not headgate_request.capture:
            headgate_request = replace(headgate_request, capture=resolved)
    fold(request, headgate_request, request_id)


def keep_chat(processor: object, chat: LLMChat) -> None:
    """Remember the conversation that `LLM.chat` rendered last: it adds each as a request right afterwards."""
    setattr(processor, _CHAT, chat)


def _chat_of(processor: object, prompt: object) -> LLMChat | None:
    # Taken out, since the conversation leads back to the `LLM` and would keep it alive.
    chat: LLMChat | None = vars(processor).pop(_CHAT, None)
    return chat if chat is not None and chat.prompt is prompt else None
