"""The refusal to start an engine that is configured for headgate but cannot be served by it."""

from __future__ import annotations

from functools import wraps

from headgate.capture.engine.contracts.parts import worker_part
from headgate.capture.engine.contracts.vllm_engine import Function, VllmConfig
from headgate.capture.engine.setup.hosts import network_keys
from headgate.capture.engine.setup.patch_set import process_patches
from headgate.capture.engine.setup.refusals import refuse_unsupported_settings
from headgate.capture.engine.setup.settings import sections
from headgate.capture.engine.setup.versions import check_version
from headgate.capture.schema.errors import UnsupportedError

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
    import vllm
    from vllm import envs

    check_version(vllm.__version__)
    patches = process_patches()
    if patches is None:
        raise UnsupportedError("headgate is configured but was not installed in this process: call its plugin.register")
    patches.require()
    if envs.VLLM_PLUGINS is not None and PLUGIN not in envs.VLLM_PLUGINS:
        raise UnsupportedError(
            f"VLLM_PLUGINS={','.join(envs.VLLM_PLUGINS)} keeps {PLUGIN} out of vLLM's processes; add {PLUGIN} to it"
        )
    if envs.VLLM_USE_RUST_FRONTEND:
        raise UnsupportedError("requests to the Rust front end do not reach headgate; unset VLLM_USE_RUST_FRONTEND")
    if getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False):  # later releases are to drop it
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
        return vllm_config

    return wrapped
