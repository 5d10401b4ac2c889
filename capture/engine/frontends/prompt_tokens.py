"""Tokens of prompts as vLLM makes them: the one way in which chats become tokens here, too.

vLLM renders a prompt to send it. It remembers which images, sounds and videos it has rendered, and sends the hash alone
of one that comes again, since the engine core has the rest. A rendering that is never sent (of a chat that is looked
at, or of a request that is refused) must not be remembered: the next request with its image would be sent without it,
and fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Any, cast

from headgate.capture.engine import vllm_names
from headgate.capture.engine.vllm_types import Function, MadeRequest
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import RequestError

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


def forget_unsent_features(input_processor: object, request: MadeRequest) -> None:
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


def prompt_tokens(
    llm: Any,
    prompt: str | Sequence[int] | Sequence[Document],
    *,
    add_generation_prompt: bool = True,
    field: str = "prompt",
) -> list[int]:
    """Return the tokens that `LLM.generate` makes of a text, or `LLM.chat` of a chat; nothing runs.

    Messages are normalised as for `LLM.chat` and by servers: content parts as the chat template takes them, arguments
    of tool calls as objects.

    Args:
        llm: An `LLM` or `AsyncLLM` of vLLM; with a tokenizer, unless `prompt` is tokens.
        prompt: A text, token ids, or the messages of a chat. It may be longer than the model's context.
        add_generation_prompt: Of a chat: end with what invites the model to answer.
        field: Name of the prompt, for errors.

    Raises:
        RequestError: If it cannot be rendered, has a token that the model does not know, or holds images or the like:
            their rows need more than tokens.
    """
    if not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], Mapping)):
        return _known_tokens(llm, cast("Sequence[int]", prompt), field)
    try:
        with looking_up():
            found = _render(llm, cast("str | Sequence[Document]", prompt), add_generation_prompt)
    except Exception as error:  # a template raises whatever it likes to refuse a conversation
        raise RequestError(field, f"vLLM cannot render it: {type(error).__name__}: {error}") from error
    if found["type"] != "token":
        raise RequestError(field, f"expected a text or a chat of texts, got one that vLLM reads as {found['type']}")
    return list(found["prompt_token_ids"])


def _render(llm: Any, prompt: str | Sequence[Document], add_generation_prompt: bool) -> Any:
    renderer = llm.renderer
    if isinstance(prompt, str):
        tok_params = replace(renderer.default_cmpl_tok_params, max_total_tokens=None)
        (found,) = renderer.render_cmpl([{"prompt": prompt}], tok_params)
    else:
        settings = {"add_generation_prompt": add_generation_prompt, "chat_template": _template_of(llm)}
        chat_params, tok_params = chat_params_of(renderer, settings)
        _, (found,) = renderer.render_chat([list(prompt)], chat_params, replace(tok_params, max_total_tokens=None))
    return found


def _known_tokens(llm: Any, token_ids: Sequence[int], field: str) -> list[int]:
    """Refuse ids beyond the vocabulary: without a tokenizer vLLM does not, and its engine core dies of them."""
    num_known = llm.model_config.get_vocab_size()
    if llm.renderer.tokenizer is not None and token_ids and max(token_ids) >= num_known:
        # Not the tokenizer's `max_token_id`, which is one too many where it counts the vocabulary (vLLM 0.26).
        num_known = max(num_known, 1 + max(llm.renderer.tokenizer.get_vocab().values()))
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_known:
        unknown = next(token for token in token_ids if not 0 <= token < num_known)
        raise RequestError(field, f"expected token ids from 0 to {num_known - 1}, got {unknown}")
    return list(token_ids)


def _template_of(llm: Any) -> str | None:
    """The chat template that an `LLM` was given in place of the tokenizer's; an `AsyncLLM` has none.

    In vLLM 0.26 ``LLM.chat`` itself does not use it, unless it is passed as an argument.
    """
    return cast("str | None", getattr(llm, "chat_template", None))


def chat_params_of(renderer: Any, settings: Document) -> tuple[Any, Any]:
    """Return what ``renderer.render_chat`` takes beside the chats, as ``LLM.chat`` makes it of its keywords."""
    ChatParams = vllm_names.CHAT_PARAMS.get()
    merge_kwargs = vllm_names.MERGE_KWARGS.get()
    MistralTokenizer = vllm_names.MISTRAL_TOKENIZER.get()

    own = {
        "add_generation_prompt": settings.get("add_generation_prompt", True),
        "continue_final_message": settings.get("continue_final_message", False),
        "tools": settings.get("tools"),
        "tokenize": isinstance(renderer.tokenizer, MistralTokenizer),
    }
    chat_params = ChatParams(
        chat_template=settings.get("chat_template"),
        chat_template_kwargs=merge_kwargs(settings.get("chat_template_kwargs"), own),
    )
    return chat_params, renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
