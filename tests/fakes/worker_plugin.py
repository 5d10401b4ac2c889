"""Plugin of every process of the tests' engines: headgate's worker half makes way for the fake worker."""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Runs beside headgate's own plugin, before any model is loaded."""
    from headgate.capture.engine.worker import install

    install.install = _install_unless_fake  # type: ignore[assignment]
    if os.environ.get("FAKE_ASYNC_SCHEDULING") == "1":
        _allow_async_scheduling()


def _install_unless_fake(worker: Any) -> None:
    assert hasattr(worker, "headgate_stats"), "only the fake worker is known to do without"


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
