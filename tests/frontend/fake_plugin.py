"""Plugin of every process of the tests' engines: headgate's worker half makes way for the fake worker."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

WORKER_HALF = "headgate.capture.engine.install"


def register() -> None:
    """Runs beside headgate's own plugin, before any worker is imported."""
    nothing = ModuleType(WORKER_HALF)
    nothing.patch_worker = lambda module: None  # type: ignore[attr-defined]
    sys.modules[WORKER_HALF] = nothing
    if os.environ.get("FAKE_ASYNC_SCHEDULING") == "1":
        _allow_async_scheduling()


def _allow_async_scheduling() -> None:
    """The CPU platform turns it off; the worker above can do it."""
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "fake_async"):
        return
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.fake_async = True
