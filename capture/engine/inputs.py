"""`InputProcessor`, where every request of every front end is made: what it captures is folded in here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.frontend import FRONT_END, FrontEnd
from headgate.capture.engine.opening import open_front_end
from headgate.capture.engine.requests import Ask, attached, fold, refuse_kind, refuse_unconfigured, resolve
from headgate.capture.engine.turns import LLMChat

_CHAT = "_headgate_chat"


def open_with_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``InputProcessor.__init__``: open capture's front end with the engine's, or refuse to start."""

    @wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        front = open_front_end(vllm_config)
        setattr(self, FRONT_END, front)
        if front is not None:
            weakref.finalize(self, front.close)

    return __init__


def process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``InputProcessor.process_inputs``: fold what the request captures into the `EngineCoreRequest`.

    `AsyncLLM.generate` and `LLMEngine.add_request` have read it already and will wait for its results. For callers
    that come here by another way nobody waits.
    """

    @wraps(original)
    def wrapped(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(params, "extra_args"):  # pooling
            return original(self, request_id, prompt, params, *args, **kwargs)
        front: FrontEnd | None = vars(self).get(FRONT_END)
        with as_client_error():
            if front is None:
                refuse_unconfigured(params)
                return original(self, request_id, prompt, params, *args, **kwargs)
            ask = attached(params) or front.door.read(params, request_id)
        chat = _chat_of(self, prompt)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if ask is not None:
            with as_client_error():
                _fold(front, request, ask, chat, request_id)
        return request

    return wrapped


def _fold(front: FrontEnd, request: Any, ask: Ask, chat: LLMChat | None, request_id: str) -> None:
    refuse_kind(request, ask)
    tokens = request.prompt_token_ids
    find_message = None if chat is None else chat.find_message(tokens)
    front.expect(ask, request.sampling_params.n)
    fold(request, resolve(ask, len(tokens), find_message), request_id)


def keep_chat(processor: Any, chat: LLMChat) -> None:
    """Remember the conversation that `LLM.chat` rendered last: it adds each as a request right afterwards."""
    setattr(processor, _CHAT, chat)


def _chat_of(processor: Any, prompt: Any) -> LLMChat | None:
    # Taken out, since the conversation leads back to the `LLM` and would keep it alive.
    chat: LLMChat | None = vars(processor).pop(_CHAT, None)
    return chat if chat is not None and chat.prompt is prompt else None
