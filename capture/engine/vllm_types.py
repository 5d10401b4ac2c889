"""vLLM's objects in engine cores, workers, front ends and HTTP servers, as far as headgate touches them.

Protocols and not vLLM's own classes: those differ from release to release, are untyped in places, and importing them
loads CUDA. An attribute that only some supported releases have is not listed; its reader asks with ``hasattr``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol, Self

from headgate.capture.schema.batch import Document

if TYPE_CHECKING:
    from asyncio import Task
    from queue import Queue

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor, nn


Function = Callable[..., Any]
"""A function or method of vLLM that headgate wraps, and what it puts in its place."""


class HfTextConfig(Protocol):
    """The text half of the model's Hugging Face configuration."""

    num_hidden_layers: int


class ModelConfig(Protocol):
    """``vllm.config.ModelConfig``."""

    served_model_name: str | list[str]
    hf_config: object
    hf_text_config: HfTextConfig
    dtype: torch.dtype
    is_encoder_decoder: bool
    is_diffusion: bool
    runner_type: str
    max_model_len: int

    def get_hidden_size(self) -> int: ...

    def get_vocab_size(self) -> int: ...

    def get_head_size(self) -> int: ...

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int: ...

    def get_total_num_kv_heads(self) -> int: ...

    def get_num_experts(self) -> int: ...

    @property
    def use_mla(self) -> bool: ...


class ParallelConfig(Protocol):
    """``vllm.config.ParallelConfig``."""

    use_ubatching: bool
    tensor_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    pipeline_parallel_size: int
    use_sequence_parallel_moe: bool
    _api_process_count: int
    _api_process_rank: int
    use_ray: bool
    distributed_executor_backend: object
    nnodes: int
    world_size: int
    local_engines_only: bool
    data_parallel_backend: str
    data_parallel_size: int
    data_parallel_index: int
    data_parallel_size_local: int
    data_parallel_rank_local: int | None


class CacheConfig(Protocol):
    """``vllm.config.CacheConfig``."""

    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kv_sharing_fast_prefill: bool


class SchedulerConfig(Protocol):
    """``vllm.config.SchedulerConfig``."""

    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int


class GraphMode(Protocol):
    """``vllm.config.CUDAGraphMode``."""

    def mixed_mode(self) -> object: ...


class CompilationConfig(Protocol):
    """``vllm.config.CompilationConfig``."""

    cudagraph_mode: GraphMode | None
    mode: object
    pass_config: object
    cudagraph_capture_sizes: Sequence[int] | None


class SpeculativeConfig(Protocol):
    """``vllm.config.SpeculativeConfig``."""

    method: str | None


class VllmConfig(Protocol):
    """``vllm.config.VllmConfig``."""

    instance_id: str
    additional_config: Document
    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    compilation_config: CompilationConfig
    speculative_config: SpeculativeConfig | None
    kv_transfer_config: TransferConfig | None


class TransferConfig(Protocol):
    """``vllm.config.KVTransferConfig``."""

    kv_connector: str | None
    kv_connector_extra_config: Mapping[str, object]


class ExpertsParallelConfig(Protocol):
    """How the tokens of a layer of experts are spread."""

    dp_size: int


class ExpertsConfig(Protocol):
    """``vllm...fused_moe.config.FusedMoEConfig``."""

    num_logical_experts: int
    experts_per_token: int
    moe_parallel_config: ExpertsParallelConfig


class ExpertsLayer(Protocol):
    """``vllm...fused_moe.runner.moe_runner.MoERunner``: the experts of a layer, after their router."""

    moe_config: ExpertsConfig
    is_monolithic: bool


class RequestParams(Protocol):
    """``vllm.SamplingParams`` of a request that is in the engine."""

    extra_args: dict[str, object] | None
    stop: str | list[str] | None


class EngineCoreRequest(Protocol):
    """``vllm.v1.engine.EngineCoreRequest``: a request as a front end sends it to an engine core."""

    request_id: str
    client_index: int
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Tensor | None
    sampling_params: RequestParams | None
    mm_features: list[object] | None


class Request(Protocol):
    """``vllm.v1.request.Request``: a request as the scheduler keeps it."""

    request_id: str
    client_index: int
    priority: int
    resumable: bool
    status: object
    sampling_params: RequestParams
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens: int
    skip_reading_prefix_cache: bool
    all_token_ids: Sequence[int]
    block_hashes: list[object]

    def update_block_hashes(self) -> None: ...

    def is_finished(self) -> bool: ...

    def get_finished_reason(self) -> object: ...


class OffloadGroup(Protocol):
    """``vllm...offloading.scheduler.RequestGroupState``."""

    offload_keys: list[object]


class OffloadState(Protocol):
    """``vllm...offloading.scheduler.RequestOffloadState``: what the offloading connector keeps of a request."""

    req: Request
    group_states: Sequence[OffloadGroup]


class Scheduler(Protocol):
    """``vllm.v1.core.sched.scheduler.Scheduler``."""

    requests: MutableMapping[str, Request]
    running: list[Request]
    finished_req_ids_dict: MutableMapping[int, set[str]] | None
    prev_step_scheduled_req_ids: set[str]
    hash_block_size: int
    has_requests: Callable[[], bool]

    def add_request(self, request: Request) -> None: ...

    def finish_requests(self, request_ids: str, finished_status: object) -> object: ...

    def _preempt_request(self, request: Request, timestamp: float, **options: bool) -> None: ...


class EngineCoreOutput(Protocol):
    """``vllm.v1.engine.EngineCoreOutput``: new tokens of one request, on their way to its front end."""

    request_id: str
    kv_transfer_params: dict[str, object] | None


class CoreOutputs(Protocol):
    """``vllm.v1.engine.EngineCoreOutputs``: those of one step that go to one front end."""

    outputs: list[EngineCoreOutput]


class Executor(Protocol):
    """``vllm.v1.executor.Executor``: the workers of an engine core."""

    def collective_rpc(self, method: str, *, args: tuple[object, ...] = ...) -> Iterable[object]: ...


class ReceiverCache(Protocol):
    """``vllm.multimodal.cache.BaseMultiModalReceiverCache``: images and the like that front ends sent."""

    def get_and_update_features(self, mm_features: list[object]) -> object: ...


class EngineCore(Protocol):
    """``vllm.v1.engine.core.EngineCore``, with the method that front ends call by name."""

    vllm_config: VllmConfig
    scheduler: Scheduler
    model_executor: Executor
    batch_queue: Sized | None
    mm_receiver_cache: ReceiverCache | None
    request_block_hasher: Callable[[Request], list[object]] | None
    step_fn: Function
    headgate_call: Function

    def post_step(self, model_executed: bool) -> None: ...

    def shutdown(self) -> None: ...


class EngineCoreProc(EngineCore, Protocol):
    """``vllm.v1.engine.core.EngineCoreProc``: an engine core in a process of its own."""

    output_queue: Queue[tuple[int, object]]

    def _send_error_outputs_to_client(self, request_ids: list[str], client_index: int) -> None: ...


class RequestType(Protocol):
    """``vllm.v1.engine.EngineCoreRequestType``."""

    name: str


class NewRequestData(Protocol):
    """``vllm.v1.core.sched.output.NewRequestData``: a request as a worker first sees it."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Tensor | None
    sampling_params: RequestParams | None


class SchedulerOutput(Protocol):
    """``vllm.v1.core.sched.output.SchedulerOutput``: one step."""

    finished_req_ids: set[str]
    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: Sequence[NewRequestData]


class RunnerOutput(Protocol):
    """``vllm.v1.outputs.ModelRunnerOutput``: a worker's output of one step. headgate sets ``headgate_readings``."""

    req_ids: Sequence[str]


class AsyncRunnerOutput(Protocol):
    """``vllm.v1.outputs.AsyncModelRunnerOutput``: the same, on its way to the host. Called once, on any thread."""

    def get_output(self) -> RunnerOutput: ...


class HostAndDevice(Protocol):
    """``vllm.v1.utils.CpuGpuBuffer``."""

    np: npt.NDArray[np.int32]
    gpu: Tensor


class PersistentBatch(Protocol):
    """``vllm.v1.worker.gpu_input_batch.InputBatch`` of the V1 model runner."""

    num_reqs: int
    req_ids: Sequence[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    vocab_size: int


class StepBatch(Protocol):
    """``vllm.v1.worker.gpu.input_batch.InputBatch`` of the V2 model runner."""

    num_reqs: int
    req_ids: Sequence[str]
    query_start_loc_np: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]
    num_computed_tokens_np: npt.NDArray[np.int32]
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor


class StageTensors(Protocol):
    """``vllm.sequence.IntermediateTensors``: what goes from one pipeline stage to the next."""

    tensors: dict[str, Tensor]


class SampledTokens(Protocol):
    """``vllm.v1.outputs.SamplerOutput``."""

    sampled_token_ids: Tensor


class DraftedTokens(Protocol):
    """``vllm.v1.spec_decode.metadata.SpecDecodeMetadata``, of the V1 model runner."""

    num_draft_tokens: Sequence[int]


class ModelRunner(Protocol):
    """The model runner of either generation."""

    def get_model(self) -> nn.Module: ...

    def _dummy_run(self, num_tokens: int, **options: bool) -> object: ...


class ModelRunnerV1(ModelRunner, Protocol):
    """``vllm.v1.worker.gpu_model_runner.GPUModelRunner``, where a step's layout is read from the runner."""

    input_batch: PersistentBatch
    query_start_loc: HostAndDevice
    input_ids: HostAndDevice
    num_computed_tokens: Tensor


class Worker(Protocol):
    """``vllm.v1.worker.worker_base.WorkerBase``."""

    vllm_config: VllmConfig
    model_runner: ModelRunner
    device: torch.device | str
    rank: int

    def load_model(self, *args: object, **kwargs: object) -> object: ...


class WorkerWrapper(Protocol):
    """``vllm.v1.worker.worker_base.WorkerWrapperBase``."""

    worker: Worker


class EngineClient(Protocol):
    """``vllm.v1.engine.core_client.EngineCoreClient``, of an `LLM`.

    One whose engine core is in this process has it as ``engine_core``.
    """

    def call_utility(self, method: str, *args: object) -> object: ...


class ClientResources(Protocol):
    """``vllm.v1.engine.core_client.BackgroundResources``."""

    engine_dead: bool
    output_queue_task: Task[None]


class SendingClient(Protocol):
    """``vllm.v1.engine.core_client.MPClient``; a client of an engine core in this process has neither."""

    resources: ClientResources

    def _send_input(self, request_type: RequestType, request: object, *engine: object) -> Any: ...


class OpenCall(Protocol):
    """A future of either kind: of a call into an engine core."""

    def done(self) -> bool: ...

    def set_exception(self, exception: Exception) -> None: ...


class SyncEngineClient(SendingClient, Protocol):
    """``vllm.v1.engine.core_client.SyncMPClient``, of an `LLM` whose engine core has a process of its own."""

    utility_results: Mapping[int, OpenCall]
    outputs_queue: Queue[object]


class AsyncEngineClient(SendingClient, Protocol):
    """``vllm.v1.engine.core_client.DPLBAsyncMPClient``, of an `AsyncLLM`."""

    core_engines: Sequence[object]
    utility_results: Mapping[int, OpenCall]

    async def _call_utility_async(self, method: str, *args: object, engine: object) -> object: ...

    async def _abort_requests(self, request_ids: Sequence[str], engine: object) -> None: ...


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
    prompt_token_ids: Sequence[int] | None
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
    output_processor: OutputProcessor
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
