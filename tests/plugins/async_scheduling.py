"""Plugin of every process of the tests' engines: they schedule asynchronously, as vLLM does by default on GPUs.

The CPU platform turns that off, although its model runner can do it. `tests.environment` puts this folder on the
path and sets the switch, so every engine of the tests has it, whichever way its processes start. An engine that is
started with ``async_scheduling=False`` goes without.
"""

from __future__ import annotations

import os
from typing import Any

SWITCH = "TESTS_ASYNC_SCHEDULING"


def register() -> None:
    """Keep what vLLM decided before the CPU platform was asked."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__
    if original.__module__ == __name__:
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
