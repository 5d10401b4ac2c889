"""Renderings that are never sent: those of chats that are looked at, and of requests that are refused.

vLLM renders a prompt to send it. It remembers which images, sounds and videos it has rendered, and sends the hash alone
of one that comes again, since the engine core has the rest. A rendering that stays here must not be remembered so: the
next request with its image would be sent without it, and fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from headgate.capture.engine.contracts.vllm_engine import Function
from headgate.capture.engine.contracts.vllm_frontend import NewRequest

_is_lookup: ContextVar[bool] = ContextVar("headgate_is_lookup", default=False)


@contextmanager
def looking_up() -> Iterator[None]:
    """Nothing that this thread or task renders within is sent."""
    token = _is_lookup.set(True)
    try:
        yield
    finally:
        _is_lookup.reset(token)


def render_chat(original: Function) -> Function:
    """Wrap ``BaseRenderer.render_chat`` and ``render_chat_async``."""

    @wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> object:
        if _is_lookup.get():
            kwargs["skip_mm_cache"] = True
        return original(self, *args, **kwargs)

    return wrapped


def forget_unsent(input_processor: object, prompt: object) -> None:
    """Let the next request with the images of `prompt`, which was rendered and is not sent, send them.

    Args:
        input_processor: vLLM's, of the engine that refused.
        prompt: As it was rendered. Images that it has no data of were sent before.
    """
    if isinstance(prompt, Mapping):
        for modality, items in (prompt.get("mm_kwargs") or {}).items():
            _forget_new(input_processor, zip(prompt["mm_hashes"][modality], items, strict=True))


def forget_unsent_features(input_processor: object, request: NewRequest) -> None:
    """Do as `forget_unsent` for a request that vLLM made of a prompt that it rendered itself."""
    _forget_new(input_processor, ((item.mm_hash or item.identifier, item.data) for item in request.mm_features or ()))


def _forget_new(input_processor: object, items: Iterable[tuple[str, object | None]]) -> None:
    renderer = vars(input_processor).get("renderer")
    if renderer is not None and renderer.mm_processor_cache is not None:
        for mm_hash, item in items:
            if item is not None:
                _forget(renderer, mm_hash)


def _forget(renderer: Any, mm_hash: str) -> None:
    if hasattr(renderer, "queue_mm_cache_invalidations"):  # vLLM 0.33 alone renders on a thread of its own
        renderer.queue_mm_cache_invalidations([mm_hash])
    elif hasattr(renderer.mm_processor_cache, "invalidate"):
        renderer.mm_processor_cache.invalidate(mm_hash)
    elif type(renderer.mm_processor_cache).__name__ == "MultiModalProcessorSenderCache":  # vLLM 0.26
        renderer.mm_processor_cache._cache.pop(mm_hash, None)
