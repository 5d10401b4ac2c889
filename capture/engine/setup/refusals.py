"""Engine settings under which rows of the batch would be attributed wrongly: each is refused at start-up by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headgate.capture.engine.contracts.vllm_engine import VllmConfig
from headgate.capture.schema.errors import UnsupportedError


class Refusal(NamedTuple):
    """One setting that cannot be served."""

    is_set: Callable[[VllmConfig], bool]
    what: str
    why: str
    instead: str


def _draft_model(config: VllmConfig) -> bool:
    return config.speculative_config is not None


def _sequence_parallel(config: VllmConfig) -> bool:
    # vLLM 0.26 has the pass; later releases dropped it.
    return bool(getattr(config.compilation_config.pass_config, "enable_sp", False))


def _external_launcher(config: VllmConfig) -> bool:
    parallel = config.parallel_config
    return parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1


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
        lambda config: config.parallel_config.prefill_context_parallel_size > 1,
        "prefill context parallelism",
        "each rank computes a part of the prompt's positions",
        "start with --prefill-context-parallel-size 1",
    ),
    Refusal(
        _sequence_parallel,
        "the sequence-parallel compilation pass (enable_sp)",
        "it shards the residual stream over ranks by token",
        "set compilation_config.pass_config.enable_sp to false",
    ),
    Refusal(
        lambda config: config.parallel_config.use_sequence_parallel_moe,
        "token-sharded mixture-of-experts residuals (expert parallel with data parallel)",
        "the residual stream is sharded by token between attention and experts",
        "start without --enable-expert-parallel, or with --data-parallel-size 1",
    ),
    Refusal(
        _draft_model,
        "speculative decoding",
        "rows of rejected drafts are computed and their positions computed again",
        "start without --speculative-config",
    ),
    Refusal(
        lambda config: config.model_config.is_diffusion,
        "block-diffusion models",
        "they compute the positions of a block again and again, and later steps change their tokens",
        "serve a model that generates from left to right",
    ),
    Refusal(
        lambda config: config.kv_transfer_config is not None,
        "KV connectors (--kv-transfer-config)",
        "rows can come from keys and values that were computed elsewhere, or be computed again after a failed load",
        "start without --kv-transfer-config",
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


def refuse_unsupported_settings(vllm_config: VllmConfig) -> None:
    """Refuse to start under settings that would make captured rows wrong.

    Raises:
        UnsupportedError: Naming every such setting, why, and what to do instead.
    """
    found = [refusal for refusal in REFUSALS if refusal.is_set(vllm_config)]
    if found:
        lines = [f"- {refusal.what}: {refusal.why}; {refusal.instead}" for refusal in found]
        raise UnsupportedError("headgate cannot serve with:\n" + "\n".join(lines))
