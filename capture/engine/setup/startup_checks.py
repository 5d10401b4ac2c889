"""The refusal to start an engine that is configured for headgate but cannot be served by it."""

from __future__ import annotations

import logging
from functools import wraps

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.parts import worker_part
from headgate.capture.engine.setup.engine_settings import REFUSALS
from headgate.capture.engine.setup.hosts import network_keys
from headgate.capture.engine.setup.patch_set import process_patches
from headgate.capture.engine.setup.settings import sections
from headgate.capture.engine.vllm_names import check_version
from headgate.capture.engine.vllm_types import Function, VllmConfig
from headgate.capture.monitoring.logs import speak_through_vllm
from headgate.capture.schema.config import GIB
from headgate.capture.schema.errors import UnsupportedError


def refuse_unsupported_settings(vllm_config: VllmConfig) -> None:
    """Refuse to start under settings that would make captured rows wrong.

    Raises:
        UnsupportedError: Naming every such setting, why, and what to do instead.
    """
    lines = [f"- {each.what}: {each.why}; {each.instead}" for each in REFUSALS if each.is_set(vllm_config)]
    if vllm_config.speculative_config is not None:
        for name, found in sections(vllm_config).items():
            lines += [f"- {each}" for each in worker_part(name).refused_with_drafts(found)]
    if lines:
        raise UnsupportedError("headgate cannot serve with:\n" + "\n".join(lines))


logger = logging.getLogger("headgate")

CPU_CACHE_BYTES = 4 * GIB
"""KV cache of an engine on CPUs whose machine lacks the memory that vLLM takes by default."""

PLUGIN = "headgate"
"""Our name in the group ``vllm.general_plugins``."""


def check_servable(vllm_config: VllmConfig) -> None:
    """Refuse to start an engine that is configured for headgate but cannot serve it.

    Raises:
        ConfigError: If a section of the configuration is unknown, its part cannot be loaded, or an engine on several
            hosts has no keys.
        UnsupportedError: If this vLLM or a setting cannot be served.
    """
    found = sections(vllm_config)
    if not found:
        return
    for name in found:
        worker_part(name).requests()
    check_version(vllm_names.VLLM_VERSION.get())
    patches = process_patches()
    if patches is None:
        raise UnsupportedError("headgate is configured but was not installed in this process: call its plugin.register")
    patches.require()
    plugins = vllm_names.PLUGIN_SETTING.get()
    if plugins is not None and PLUGIN not in plugins:
        raise UnsupportedError(
            f"VLLM_PLUGINS={','.join(plugins)} keeps {PLUGIN} out of vLLM's processes; add {PLUGIN} to it"
        )
    if vllm_names.RUST_FRONTEND_SETTING.get():
        raise UnsupportedError("requests to the Rust front end do not reach headgate; unset VLLM_USE_RUST_FRONTEND")
    if vllm_names.PLAIN_IDS_SETTING.get(default=False):  # later releases are to drop it
        raise UnsupportedError(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION lets a request have the id of an earlier one whose step still runs, "
            "so that the rows of one would be told as the other's; unset it: clients see the ids that they gave"
        )
    refuse_unsupported_settings(vllm_config)
    network_keys(vllm_config)


def create_engine_config(original: Function) -> Function:
    """Wrap ``EngineArgs.create_engine_config``: refuse before any process is started."""

    @wraps(original)
    def wrapped(self: object, *args: object, **kwargs: object) -> VllmConfig:
        vllm_config: VllmConfig = original(self, *args, **kwargs)
        check_servable(vllm_config)
        if sections(vllm_config) and is_left_to_vllm(self):
            bound_cpu_cache(vllm_config)
        return vllm_config

    return wrapped


def is_left_to_vllm(engine_args: object) -> bool:
    """Whether the share of the memory that an engine may take is not set."""
    share = "gpu_memory_utilization"
    return getattr(engine_args, share, None) == getattr(type(engine_args), share, None)


def bound_cpu_cache(vllm_config: VllmConfig) -> None:
    """Give an engine on CPUs a KV cache that fits, where vLLM's default share of the memory is not free.

    vLLM takes 92 % of the memory, and refuses to start where other programs, or its own two processes before the
    worker, leave less. Nothing changes on GPUs, where the size or the share was set, and where enough is free.
    """
    current_platform = vllm_names.PLATFORM.get()

    cache = vllm_config.cache_config
    if not current_platform.is_cpu() or cache.kv_cache_memory_bytes is not None:
        return
    total, free = cpu_memory()
    own = CPU_CACHE_BYTES  # what vLLM's processes and the model may take until the worker looks
    if free - own >= cache.gpu_memory_utilization * total:
        return
    cache.kv_cache_memory_bytes = min(CPU_CACHE_BYTES, free // (4 * vllm_config.parallel_config.world_size))
    speak_through_vllm()
    logger.warning(
        "KV cache of %.1f GiB: of %.1f GiB of memory %.1f are free, and vLLM's default share would not fit; set "
        "--kv-cache-memory-bytes (kv_cache_memory_bytes=...) or VLLM_CPU_KVCACHE_SPACE (in GiB) for another size",
        cache.kv_cache_memory_bytes / GIB,
        total / GIB,
        free / GIB,
    )


def cpu_memory() -> tuple[int, int]:
    """Bytes of memory, all and free, of the node that vLLM's first worker runs on, within the container's limit."""
    get_allowed_cpu_list = vllm_names.CPUS_OF_WORKERS.get()
    get_memory_node_info = vllm_names.MEMORY_OF_NODE.get()

    found = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    return found.total_memory, found.available_memory
