"""The start of an engine core: it opens the part that is configured there, or refuses to start.

In a process of its own an engine core loads plugins inside its constructor, when it is too late to wrap that. So two
of the constructor's calls are wrapped: the one after plugins were loaded and workers started notes the engine core,
and the last one opens it.
"""

from __future__ import annotations

import weakref
from functools import wraps

from headgate.capture.engine.contracts.parts import core_part_names, load_part
from headgate.capture.engine.contracts.vllm_engine import EngineCore, Function, VllmConfig
from headgate.capture.engine.core import block_keys, restart
from headgate.capture.engine.core.engine_core import CORE_ADAPTER, EngineCoreAdapter
from headgate.capture.engine.core.overload import after_step
from headgate.capture.engine.core.step_notes import check_carrier
from headgate.capture.engine.core.steps_in_flight import StepsInFlight
from headgate.capture.engine.setup.hosts import SETUP_RPC, check_agreement
from headgate.capture.engine.setup.logs import speak_through_vllm
from headgate.capture.engine.setup.settings import sections
from headgate.capture.engine.setup.startup_checks import check_servable
from headgate.capture.schema.errors import UnsupportedError

_noted: weakref.ref[EngineCore] | None = None
"""The ``EngineCore`` of this process that is in its constructor."""


def initialize_kv_caches(original: Function) -> Function:
    """Wrap ``EngineCore._initialize_kv_caches``: refuse in this process too, and make sure every worker took part
    and is configured alike.

    It is what an engine core calls next after it has loaded plugins and started its workers.
    """

    @wraps(original)
    def wrapped(self: EngineCore, vllm_config: VllmConfig, *args: object, **kwargs: object) -> object:
        global _noted
        check_servable(vllm_config)
        if sections(vllm_config):
            check_agreement(vllm_config, self.model_executor.collective_rpc(SETUP_RPC))
            _noted = weakref.ref(self)
        return original(self, vllm_config, *args, **kwargs)

    return wrapped


def open_noted(original: Function) -> Function:
    """Wrap ``enable_envs_cache`` as ``EngineCore.__init__`` calls it, last: open what is configured, or refuse."""

    @wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        global _noted
        result = original(*args, **kwargs)
        core, _noted = _noted() if _noted is not None else None, None
        if core is not None:
            _open_configured(core)
        return result

    return wrapped


def _open_configured(core: EngineCore) -> None:
    steps = StepsInFlight(core)
    names = [name for name in sections(core.vllm_config) if name in core_part_names()]
    if not names:
        return
    try:
        _open(core, steps, names)
    except BaseException:
        core.shutdown()
        raise


def _open(core: EngineCore, steps: StepsInFlight, names: list[str]) -> None:
    if len(names) > 1:
        raise UnsupportedError(f"an engine core has room for one part, but {', '.join(names)} are configured")
    speak_through_vllm()
    restart.check_support(core.scheduler)
    check_carrier()
    block_keys.verify_block_keys(core.request_block_hasher, core.scheduler.hash_block_size)
    adapter = EngineCoreAdapter(core, steps, load_part(names[0]))
    core.headgate_call = adapter.call
    core.step_fn = after_step(core.step_fn, adapter.end_overdue)
    setattr(core, CORE_ADAPTER, adapter)
    setattr(core.scheduler, CORE_ADAPTER, adapter)
