"""vLLM's objects in front ends and HTTP servers, as far as headgate touches them.

Protocols and not vLLM's own classes, for the reasons that `vllm_engine` gives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, Self

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import AsyncEngineClient, EngineClient, SendingClient, VllmConfig

Scope = MutableMapping[str, Any]
"""The scope of an ASGI call."""

AsgiMessage = MutableMapping[str, Any]
"""A message that an ASGI application receives or sends."""

Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class OutputKind(Protocol):
    """``vllm.sampling_params.RequestOutputKind``: CUMULATIVE, DELTA (new tokens alone) or FINAL_ONLY."""

    @property
    def name(self) -> str: ...


class SamplingParams(Protocol):
    """``vllm.SamplingParams`` as a user or an HTTP route makes it."""

    n: int
    max_tokens: int | None
    output_kind: OutputKind
    extra_args: dict[str, object] | None
    skip_reading_prefix_cache: bool | None


class Feature(Protocol):
    """``vllm.multimodal.inputs.MultiModalFeatureSpec``: an image, a sound or a video in a prompt."""

    data: object | None
    identifier: str
    mm_hash: str | None


class MadeRequest(Protocol):
    """``vllm.v1.engine.EngineCoreRequest``, as an input processor makes it; not for pooling."""

    request_id: str
    sampling_params: SamplingParams
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: object | None
    mm_features: Sequence[Feature] | None
    resumable: bool


class CompletionOutput(Protocol):
    """``vllm.CompletionOutput``: one sample. headgate sets ``capture_results``."""

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    capture_results: object


class RequestOutput(Protocol):
    """``vllm.RequestOutput``. headgate sets ``capture_results``."""

    request_id: str
    finished: bool
    outputs: Sequence[CompletionOutput]
    capture_results: object


class Detokenizer(Protocol):
    """``vllm.v1.engine.detokenizer.IncrementalDetokenizer``."""

    def num_output_tokens(self) -> int: ...


class OutputQueue(Protocol):
    """``vllm.v1.engine.output_processor.RequestOutputCollector``."""

    aggregate: bool
    output: object


class RequestState(Protocol):
    """``vllm.v1.engine.output_processor.RequestState``."""

    queue: OutputQueue | None
    prompt_len: int
    detokenizer: Detokenizer
    output_kind: OutputKind


class EngineCoreOutput(Protocol):
    """``vllm.v1.engine.EngineCoreOutput``."""

    request_id: str
    kv_transfer_params: dict[str, object] | None


class ProcessedOutputs(Protocol):
    """``vllm.v1.engine.output_processor.OutputProcessorOutput``."""

    reqs_to_abort: list[str]


class OutputProcessor(Protocol):
    """``vllm.v1.engine.output_processor.OutputProcessor``."""

    external_req_ids: dict[str, list[str]]
    request_states: dict[str, RequestState]


class SyncClient(SendingClient, EngineClient, Protocol):
    """``vllm.v1.engine.core_client.EngineCoreClient``, as an `LLMEngine` steps it."""

    def get_output(self) -> object: ...

    def shutdown(self) -> object: ...


class Engine(Protocol):
    """An `LLMEngine` or `AsyncLLM`."""

    input_processor: object


class CoreConnection(Protocol):
    """``vllm.v1.engine.core_client.EngineCoreClient``, as far as all of them are alike."""

    def shutdown(self) -> None: ...


class StartedEngine(Engine, Protocol):
    """An `LLMEngine` or `AsyncLLM` at the end of its ``__init__``."""

    vllm_config: VllmConfig
    engine_core: CoreConnection


class LLMEngine(Engine, Protocol):
    """``vllm.v1.engine.llm_engine.LLMEngine``."""

    engine_core: SyncClient
    output_processor: OutputProcessor

    def abort_request(self, request_ids: list[str], internal: bool = ...) -> None: ...


class AsyncLLM(Engine, Protocol):
    """``vllm.v1.engine.async_llm.AsyncLLM``."""

    vllm_config: VllmConfig
    engine_core: AsyncEngineClient
    dead_error: Exception


class OfflineLLM(Protocol):
    """``vllm.LLM``."""

    llm_engine: LLMEngine

    def get_tokenizer(self) -> object: ...


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
