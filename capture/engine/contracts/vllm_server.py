"""vLLM's HTTP server, as far as headgate touches it: its handlers and the bodies that they are given.

Protocols and not vLLM's own classes, for the reasons that `vllm_engine` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_frontend import AsyncLLM, SamplingParams


class Body(Protocol):
    """The model of a request's body, which keeps the fields that it does not know in ``model_extra``."""

    request_id: str
    model_extra: dict[str, object] | None

    def to_sampling_params(self, max_tokens: int, default_sampling_params: Document) -> SamplingParams: ...


class ChatBody(Body, Protocol):
    """``ChatCompletionRequest``."""

    messages: Sequence[Document]
    continue_final_message: bool

    def model_copy(self, *, update: Document) -> Self: ...


class ResponsesBody(Body, Protocol):
    """``ResponsesRequest``."""

    background: bool | None


class TokensBody(Protocol):
    """``GenerateRequest``, whose client writes `SamplingParams` itself."""

    sampling_params: SamplingParams


class ErrorAnswers(Protocol):
    """A handler, as far as it makes error answers."""

    def create_error_response(self, message: Exception) -> object: ...


class Renderer(Protocol):
    """Makes the prompt of a body."""

    tokenizer: object


class Handler(ErrorAnswers, Protocol):
    """``OpenAIServingCompletion`` and its like: answers the requests of one route."""

    engine_client: AsyncLLM


class ChatHandler(Handler, Protocol):
    """``OpenAIServingChat``."""

    renderer: Renderer

    async def render_chat_request(self, request: ChatBody) -> tuple[object, Sequence[Mapping[str, Sequence[int]]]]: ...


class ResponsesHandler(Handler, Protocol):
    """``OpenAIServingResponses``."""

    default_sampling_params: Document
