"""Entry point of the group ``vllm.general_plugins``: vLLM calls `register` in every one of its processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import wraps

from headgate.capture.engine import vllm_names
from headgate.capture.engine.setup.patch_set import Patch, PatchSet, process_patches, set_process_patches
from headgate.capture.engine.vllm_names import find_version, is_supported
from headgate.capture.engine.vllm_types import Function, VllmConfig
from headgate.capture.schema.errors import UnsupportedError

logger = logging.getLogger("headgate")


def register() -> None:
    """Install headgate's patches, each when its module is imported. Idempotent; imports nothing of vLLM.

    It never raises, since vLLM would not start: an engine that is configured for capture refuses by itself if
    anything could not be installed.
    """
    if process_patches() is None:
        set_process_patches(_install())


def _install() -> PatchSet:
    try:
        from headgate.capture.engine.frontends import lazy_capture, output_processor
        from headgate.capture.engine.patch_table import PATCHES
        from headgate.capture.engine.requests import capture_frontend, sampling_params
    except Exception as error:
        logger.exception("headgate could not be installed; engines that are configured for it will not start")
        patches = PatchSet(_refusals(f"headgate is configured but could not be installed: {error!r}"))
        patches.install()
        return patches
    if not is_supported(find_version()):
        # Nothing of a vLLM that we do not know is touched, except where an engine asks for us and is refused.
        patches = PatchSet([patch for patch in PATCHES if patch.only_refuses])
        patches.install()
        patches.when_imported(sampling_params.refuse_properties, vllm_names.SAMPLING_PARAMS)
        return patches
    patches = PatchSet(PATCHES, vllm_names.required_names())
    patches.install()
    names = vllm_names
    patches.when_imported(sampling_params.add_properties, names.SAMPLING_PARAMS, names.BEAM_SEARCH_PARAMS)
    patches.when_imported(capture_frontend.add_results, names.REQUEST_OUTPUT, names.COMPLETION_OUTPUT)
    patches.when_imported(output_processor.add_values, names.COMPLETION_OUTPUT)
    patches.when_imported(output_processor.check_methods, names.REQUEST_STATE, names.OUTPUT_COLLECTOR)
    patches.when_imported(lazy_capture.add_handles, names.LLM)
    patches.when_imported(lazy_capture.add_async_handles, names.ASYNC_LLM)
    patches.when_imported(_patch_worker, names.WORKER_WRAPPER, names.WORKER)
    return patches


def _refusals(problem: str) -> list[Patch]:
    """Patches for a process in which nothing else of headgate can be imported: a configured engine must not start."""

    def check(config: VllmConfig) -> None:
        extra = config.additional_config
        if isinstance(extra, Mapping) and "headgate" in extra:
            raise UnsupportedError(f"{problem}; `headgate doctor` says what is missing")

    def after(original: Function) -> Function:
        @wraps(original)
        def wrapped(self: object, *args: object, **kwargs: object) -> VllmConfig:
            config: VllmConfig = original(self, *args, **kwargs)
            check(config)
            return config

        return wrapped

    def before(original: Function) -> Function:
        @wraps(original)
        def wrapped(self: object, vllm_config: VllmConfig, *args: object, **kwargs: object) -> object:
            check(vllm_config)
            return original(self, vllm_config, *args, **kwargs)

        return wrapped

    why = "refuses to start without what is configured"
    front = vllm_names.ENGINE_ARGS.member("create_engine_config")
    core = vllm_names.ENGINE_CORE.member("_initialize_kv_caches")
    return [
        Patch(target=front, wrap=after, why=why, parameters=("self",)),
        Patch(target=core, wrap=before, why=why, parameters=("self", "vllm_config")),
    ]


def _patch_worker(wrapper: type, worker: type) -> None:
    from headgate.capture.engine.worker.install import patch_worker

    patch_worker(wrapper, worker)


def unregister() -> list[str]:
    """Take the patches out again; return the names of patches that another plugin's patch lies on top of."""
    patches = process_patches()
    set_process_patches(None)
    return patches.undo() if patches is not None else []
