"""Tokens of prompts as vLLM makes them: the one way in which chats become tokens here, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.frontends.unsent_renderings import looking_up
from headgate.capture.schema.errors import RequestError


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
    if llm.renderer.tokenizer is not None:
        num_known = max(num_known, llm.renderer.tokenizer.max_token_id + 1)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < num_known:
        unknown = next(token for token in token_ids if not 0 <= token < num_known)
        raise RequestError(field, f"expected token ids from 0 to {num_known - 1}, got {unknown}")
    return list(token_ids)


def _template_of(llm: Any) -> str | None:
    """The chat template that an `LLM` was given in place of the tokenizer's; an `AsyncLLM` has none."""
    return cast("str | None", getattr(llm, "chat_template", None))


def chat_params_of(renderer: Any, settings: Document) -> tuple[Any, Any]:
    """Return what ``renderer.render_chat`` takes beside the chats, as ``LLM.chat`` makes it of its keywords."""
    from vllm.renderers import ChatParams, merge_kwargs
    from vllm.tokenizers.mistral import MistralTokenizer

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
