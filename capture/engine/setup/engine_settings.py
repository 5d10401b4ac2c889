"""Every setting of vLLM that changes what headgate reads or writes: served since when and tested how, or refused.

Start-up refuses by this table, ``headgate doctor MODEL FLAGS`` answers from it, and docs/reference/configuration.md
shows it (`table`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from headgate.capture.engine.vllm_types import VllmConfig


class Refusal(NamedTuple):
    """One setting that cannot be served.

    Attributes:
        is_set: Whether an engine has it.
        what: Its name, and its flag.
        why: Why it cannot be served.
        instead: What to do.
        path: Of the `Served` that names other values of the setting, and does not apply where these are refused; empty
            if there is none.
    """

    is_set: Callable[[VllmConfig], bool]
    what: str
    why: str
    instead: str
    path: str = ""

    @property
    def answer(self) -> str:
        """Why, and what to do instead."""
        return f"refused: {self.why}; {self.instead}"


class Served(NamedTuple):
    """One setting that is served, or, with no `tests`, neither refused nor tested.

    Attributes:
        path: Where vLLM's configuration has it; empty where requests decide.
        what: Its name, and its flag.
        since: The first release of headgate with these tests.
        tests: Files below ``tests/`` that compare its rows with Hugging Face's or stock vLLM's.
        device: What these ran on.
        note: What else is known, in one sentence or two.
    """

    path: str
    what: str
    since: str = ""
    tests: tuple[str, ...] = ()
    device: str = ""
    note: str = ""

    def is_set(self, config: VllmConfig) -> bool:
        """Whether an engine has it; other releases of vLLM may lack the attribute."""
        try:
            value = attrgetter(self.path)(config) if self.path else None
        except AttributeError:
            return False
        value = getattr(value, "name", value)  # of an enumeration
        return value not in (None, False, "NONE", "auto") and not (
            self.path.endswith(("_size", "nnodes")) and value == 1
        )

    @property
    def answer(self) -> str:
        """Since when it is served, and what was tested on which device."""
        if not self.tests:
            return f"not refused, not tested{f'. {self.note}' if self.note else ''}"
        return f"since {self.since}; tested on {self.device}{f'. {self.note}' if self.note else ''}"


DRAFT_METHODS = ("ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding that are served."""


def _unserved_drafts(config: VllmConfig) -> bool:
    drafts = config.speculative_config
    return drafts is not None and (drafts.method not in DRAFT_METHODS or getattr(drafts, "parallel_drafting", False))


def _varying_drafts(config: VllmConfig) -> bool:
    drafts = config.speculative_config
    adapts = ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification")
    return drafts is not None and any(getattr(drafts, name, None) for name in adapts)


def _sequence_parallel(config: VllmConfig) -> bool:
    # vLLM 0.26 has the pass; later releases dropped it.
    return bool(getattr(config.compilation_config.pass_config, "enable_sp", False))


def _external_launcher(config: VllmConfig) -> bool:
    parallel = config.parallel_config
    return parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1


OFFLOADING = "OffloadingConnector"
"""The one connector whose keys are vLLM's hashes of blocks, which contain what steered them."""


NAMED_BY_TOKENS = ("ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "HF3FSKVConnector")
"""Connectors that look keys and values up by tokens alone."""

NAMED_BY_REQUEST = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")
"""Connectors that bring the blocks of a request from the engine that computed its prompt."""


def _connector(config: VllmConfig) -> str | None:
    transfer = config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


def _other_connector(config: VllmConfig) -> bool:
    return _connector(config) not in (None, OFFLOADING, *NAMED_BY_TOKENS, *NAMED_BY_REQUEST)


def _other_offloading(config: VllmConfig) -> bool:
    transfer, usual = config.kv_transfer_config, "CPUOffloadingSpec"
    return (
        transfer is not None
        and _connector(config) == OFFLOADING
        and transfer.kv_connector_extra_config.get("spec_name", usual) != usual
    )


REFUSALS = (
    Refusal(
        lambda config: config.parallel_config.data_parallel_backend == "ray",
        "data-parallel engines that Ray starts (--data-parallel-backend ray)",
        "engine cores are actors then, whose start is not the one that headgate follows",
        "start the engines of each host with --data-parallel-backend mp; --distributed-executor-backend ray is served",
    ),
    Refusal(
        _external_launcher,
        "the executor external_launcher with more than one rank",
        "every process runs every request and one rank captures, so the others would wait for results that never come",
        "start it with --distributed-executor-backend mp or ray",
    ),
    Refusal(
        lambda config: config.parallel_config.use_ubatching,
        "dual-batch overlap (--enable-dbo, ubatching)",
        "layers see a slice of the batch, so batch rows would be attributed to the wrong requests",
        "start without --enable-dbo",
    ),
    Refusal(
        lambda config: config.cache_config.kv_sharing_fast_prefill,
        "fast prefill of layers that share keys and values (--kv-sharing-fast-prefill)",
        "these layers compute the last row of a prompt only, so batch rows would be attributed to the wrong requests",
        "start without --kv-sharing-fast-prefill",
    ),
    Refusal(
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        "prefill context parallelism",
        "each rank computes some stretches of a prompt's positions, as if they were requests of their own, and rank 0 "
        "alone captures",
        "start with --prefill-context-parallel-size 1",
    ),
    Refusal(
        lambda config: config.parallel_config.decode_context_parallel_size > 1,
        "decode context parallelism (--decode-context-parallel-size)",
        "each rank computes attention over the keys of some positions, with kernels that return their sums of weights, "
        "which vLLM has for GPUs alone; rows under it were never compared with those of one rank",
        "start with --decode-context-parallel-size 1; tensor parallelism is served",
    ),
    Refusal(
        _sequence_parallel,
        "the sequence-parallel compilation pass (enable_sp)",
        "it shards the residual stream over ranks by token",
        "set compilation_config.pass_config.enable_sp to false",
    ),
    Refusal(
        lambda config: config.parallel_config.use_sequence_parallel_moe,
        "token-sharded mixture-of-experts residuals (expert parallel with data and tensor parallel)",
        "each tensor-parallel rank has the tokens of its share alone between attention and experts, in DeepSeek's "
        "models also from layer to layer, so batch rows would be attributed to the wrong requests",
        "start without --enable-expert-parallel, or with --data-parallel-size 1 or --tensor-parallel-size 1",
    ),
    Refusal(
        _unserved_drafts,
        "this method of speculative decoding",
        "which rows are of accepted tokens was not proven for it",
        f"choose another method in --speculative-config ({', '.join(DRAFT_METHODS)}), without parallel_drafting",
        path="speculative_config",
    ),
    Refusal(
        _varying_drafts,
        "speculative decoding that varies how many drafts it verifies",
        "the batch rows of each request are known on the device alone",
        "start without num_speculative_tokens_per_batch_size and enable_adaptive_verification",
        path="speculative_config",
    ),
    Refusal(
        lambda config: config.speculative_config is not None and config.parallel_config.pipeline_parallel_size > 1,
        "speculative decoding with pipeline parallelism",
        "only the last stage knows in time which drafts were accepted",
        "start without --speculative-config, or with --pipeline-parallel-size 1",
        path="speculative_config",
    ),
    Refusal(
        lambda config: config.model_config.is_diffusion,
        "block-diffusion models",
        "they compute the positions of a block again and again, and later steps change their tokens",
        "serve a model that generates from left to right",
    ),
    Refusal(
        lambda config: _connector(config) in NAMED_BY_TOKENS,
        f"KV connectors that look up tokens ({', '.join(NAMED_BY_TOKENS)}; --kv-offloading-backend lmcache)",
        "they do not ask for the hashes of blocks, which contain what steered them, so that a request would get keys "
        "and values of others that were steered",
        "start without them; --kv-offloading-size with the backend native is served",
        path="kv_transfer_config",
    ),
    Refusal(
        lambda config: _connector(config) in NAMED_BY_REQUEST,
        f"prefill and decode on different engines ({', '.join(NAMED_BY_REQUEST)})",
        "kv_transfer_params say where the blocks of a prompt are, not how they were steered, and headgate sends its "
        "results in the same field of vLLM's",
        "serve prefill and decode in one engine; --kv-offloading-size with the backend native is served",
        path="kv_transfer_config",
    ),
    Refusal(
        _other_connector,
        f"other KV connectors than {OFFLOADING}",
        "whether a steered block is given to equally steered requests alone was not tested",
        "start without them; --kv-offloading-size with the backend native is served",
        path="kv_transfer_config",
    ),
    Refusal(
        _other_offloading,
        "KV offloading to anything but this engine's memory (spec_name)",
        "files and other engines may hold keys and values that an earlier release or other settings computed",
        "leave spec_name out of kv_connector_extra_config",
        path="kv_transfer_config",
    ),
    Refusal(
        lambda config: config.model_config.is_encoder_decoder,
        "encoder-decoder models",
        "positions of encoder and decoder would share one axis",
        "serve a decoder-only model",
    ),
    Refusal(
        lambda config: config.model_config.runner_type != "generate",
        "pooling models",
        "they finish requests without generating",
        "serve the model with --runner generate",
    ),
)


CPU = "a CPU"
NEXT = "0.4.0"
SERVED = (
    Served(
        "cache_config.enable_prefix_caching",
        "prefix caching (--enable-prefix-caching)",
        "0.1.0",
        ("engine/test_steering_cache.py", "engine/test_frontend.py"),
        CPU,
        "Blocks are shared by requests that are steered alike; a capture of prompt positions computes its whole prompt",
    ),
    Served(
        "scheduler_config.enable_chunked_prefill",
        "chunked prefill (--enable-chunked-prefill)",
        "0.1.0",
        ("engine/test_architectures.py", "gpu/test_quantised_gpu.py"),
        f"{CPU} and an H100",
    ),
    Served(
        "scheduler_config.async_scheduling",
        "asynchronous scheduling (--async-scheduling)",
        "0.3.0",
        ("engine/test_gate_parity.py", "gpu/test_changes_gpu.py"),
        f"{CPU} and an H200",
    ),
    Served(
        "compilation_config.mode",
        "torch.compile",
        "0.1.0",
        ("engine/test_idle_compiled.py", "engine/test_gate_parity_compiled.py", "gpu/test_idle_gpu.py"),
        f"{CPU} and an H200",
    ),
    Served(
        "compilation_config.cudagraph_mode",
        "CUDA graphs (cudagraph_mode)",
        "0.1.0",
        ("gpu/test_capture_gpu.py", "gpu/test_steering_gpu.py", "gpu/test_idle_gpu.py"),
        "an H200",
    ),
    Served(
        "model_config.quantization",
        "quantised weights (--quantization, or the checkpoint's)",
        "0.3.0",
        ("gpu/test_quantised_gpu.py", "gpu/test_lora_fp8_gpu.py", "gpu/test_idle_settings_gpu.py"),
        "an H100 and an H200",
        "fp8, compressed-tensors (w8a8, w4a16), awq, gptq and mxfp4; other methods are not tested. With fp8, compiled "
        "reproducibly, the answers to requests that ask for nothing differ from stock's in last bits (13 of 40)",
    ),
    Served(
        "cache_config.cache_dtype",
        "type of the KV cache (--kv-cache-dtype)",
        NEXT,
        ("gpu/test_quantised_gpu.py", "gpu/test_idle_settings_gpu.py"),
        "an H100 and an H200",
        "fp8 alone; `attention` has no patterns then",
    ),
    Served(
        "lora_config",
        "LoRA (--enable-lora)",
        "0.3.0",
        ("engine/test_request_kinds.py", "gpu/test_lora_fp8_gpu.py"),
        f"{CPU} and an H200",
    ),
    Served(
        "parallel_config.tensor_parallel_size",
        "tensor parallelism (--tensor-parallel-size)",
        "0.1.0",
        ("engine/test_parallel.py", "engine/test_widths.py", "gpu/test_parallel_gpu.py", "gpu/test_dynamic_gpu.py"),
        f"{CPU} and two H200",
    ),
    Served(
        "parallel_config.pipeline_parallel_size",
        "pipeline parallelism (--pipeline-parallel-size)",
        "0.1.0",
        ("engine/test_parallel.py", "gpu/test_parallel_gpu.py"),
        f"{CPU} and two H200",
        "Gates, rules and controllers were tested on a CPU; drafts are refused",
    ),
    Served(
        "parallel_config.data_parallel_size",
        "data parallelism (--data-parallel-size)",
        "0.3.0",
        ("engine/test_far_engines.py",),
        CPU,
    ),
    Served(
        "parallel_config.enable_expert_parallel",
        "expert parallelism (--enable-expert-parallel)",
        NEXT,
        ("gpu/test_experts_gpu.py",),
        "two H200",
        "With data parallelism there is no site `experts`, as routers get tokens of all ranks; with both data and "
        "tensor parallelism it is refused",
    ),
    Served(
        "parallel_config.enable_eplb",
        "balancing of experts over ranks (--enable-eplb)",
        NEXT,
        ("gpu/test_experts_gpu.py",),
        "two H200",
        "`experts` are read before their numbers are mapped to copies",
    ),
    Served(
        "parallel_config.nnodes",
        "one engine on several hosts (--nnodes)",
        "0.3.0",
        ("engine/test_parallel.py", "engine/test_far_engines.py"),
        CPU,
    ),
    Served(
        "parallel_config.use_ray",
        "Ray's executor (--distributed-executor-backend ray)",
        "0.3.0",
        ("engine/test_ray.py",),
        CPU,
    ),
    Served(
        "speculative_config",
        f"speculative decoding (--speculative-config), the methods {', '.join(DRAFT_METHODS)}",
        NEXT,
        (
            *("engine/test_drafts.py", "gpu/test_drafts_gpu.py", "gpu/test_draft_soak_gpu.py"),
            "gpu/test_idle_settings_gpu.py",
        ),
        "a CPU (ngram, eagle, draft_model, mtp of DeepSeek without async_scheduling); an H100 (ngram, "
        "eagle, eagle3; gates with eagle); an H200 (mtp of DeepSeek; ngram, draft_model and eagle with 10^6 tokens)",
        "Rows of accepted tokens alone; no controllers",
    ),
    Served(
        "kv_transfer_config",
        "KV offloading to this machine's memory (--kv-offloading-size)",
        NEXT,
        ("engine/test_kv_offloading.py", "gpu/test_kv_offloading_gpu.py", "gpu/test_idle_settings_gpu.py"),
        "an H100 and an H200; a CPU, with copies of its own in place of vLLM's",
    ),
    Served(
        "model_config.is_multimodal_model",
        "images",
        "0.3.0",
        ("engine/test_multimodal.py",),
        CPU,
        "Idefics 3 with its vision tower; Qwen3.5, Gemma 3 and 4 and Llama 4 as text models alone: their image "
        "processors need torchvision. Audio and video are not tested",
    ),
    Served(
        "",
        "structured outputs",
        "0.3.0",
        ("engine/test_request_kinds.py",),
        CPU,
    ),
    Served(
        "model_config.enable_sleep_mode",
        "sleep mode (--enable-sleep-mode)",
        "0.3.0",
        ("engine/test_request_kinds.py",),
        f"{CPU}, where vLLM frees nothing",
    ),
    Served(
        "model_config.enable_prompt_embeds",
        "prompt embeddings (--enable-prompt-embeds)",
        "0.3.0",
        ("engine/test_request_kinds.py",),
        CPU,
        "Captures and steering of such a request are refused; global vectors act on it",
    ),
)
"""Settings that an engine may have beside headgate."""


def applying(config: VllmConfig) -> list[Served | Refusal]:
    """The settings of an engine that change what headgate reads or writes, refused ones first."""
    refused = [each for each in REFUSALS if each.is_set(config)]
    others = {each.path for each in refused if each.path}
    served = [each for each in SERVED if each.is_set(config) and each.path not in others]
    return [*refused, *served]


def table() -> str:
    """All settings as a Markdown table, for docs/reference/configuration.md."""
    rows = [("setting of vLLM", "served", "tests, or what to do instead"), ("---",) * 3]
    for each in SERVED:
        rows.append((each.what, each.answer, ", ".join(f"`{test}`" for test in each.tests)))
    rows += [(each.what, f"refused: {each.why}", each.instead) for each in REFUSALS]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
