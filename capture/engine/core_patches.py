"""The attributes of vLLM that `core` and `block_keys` replace in an engine core."""

from __future__ import annotations

from headgate.capture.engine import block_keys, core
from headgate.capture.engine.patching import Patch

_CORE = "vllm.v1.engine.core"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_EXTRA_KEYS = ("request", "start_token_idx", "end_token_idx", "start_mm_idx")

CORE_PATCHES = (
    Patch(
        module=_CORE,
        target="enable_envs_cache",
        wrap=core.open_noted,
        why="the constructor of an engine core ends with it: opens what is configured there, or refuses to start",
        parameters=(),
    ),
    Patch(
        module=_CORE,
        target="EngineCore.preprocess_add_request",
        wrap=core.preprocess_add_request,
        why="names of modules become content, once, before a prompt's blocks are hashed",
        parameters=("self", "request"),
    ),
    Patch(
        module=_CORE,
        target="EngineCoreProc._handle_client_request",
        wrap=core.handle_client_request,
        why="a request that is refused at the scheduler would end the engine, or leave its reservations behind",
        parameters=("self", "request_type", "request"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.add_request",
        wrap=core.add_request,
        why="requests wait for free slots outside the scheduler",
        parameters=("self", "request"),
    ),
    Patch(
        module=_SCHEDULER,
        target="Scheduler.finish_requests",
        wrap=core.finish_requests,
        why="aborts reach the requests that wait outside",
        parameters=("self", "request_ids", "finished_status"),
    ),
    Patch(
        module="vllm.v1.core.kv_cache_utils",
        target="generate_block_hash_extra_keys",
        wrap=block_keys.extra_keys,
        why="KV blocks of steered tokens are shared with those that were steered alike, and with no others",
        parameters=_EXTRA_KEYS,
    ),
    Patch(
        module="vllm.v1.core.block_pool",
        target="generate_block_hash_extra_keys",
        wrap=block_keys.follow_extra_keys,
        why="the same for a copy imported by name; the one in simple_kv_offload serves connectors, which are refused",
        parameters=_EXTRA_KEYS,
    ),
)
