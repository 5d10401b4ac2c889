"""Reading activations from stock vLLM while it serves: the lowest layer of headgate.

Nothing here imports vLLM or torch before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headgate.capture.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.consumer import BatchedConsumer, StreamingConsumer
from headgate.capture.errors import HeadgateError
from headgate.capture.results import CaptureResult
from headgate.capture.sites import HookPoint, Site
from headgate.capture.spec import CaptureSpec

if TYPE_CHECKING:
    from headgate.capture.engine.cli_flags import additional_config
    from headgate.capture.engine.user import LLM, SamplingParams

__all__ = [
    "LLM",
    "BatchedConsumer",
    "CaptureConsumerSpec",
    "CaptureConsumersConfig",
    "CaptureResult",
    "CaptureSpec",
    "HeadgateError",
    "HookPoint",
    "SamplingParams",
    "Site",
    "StreamingConsumer",
    "additional_config",
]

_LATE = {
    "LLM": "headgate.capture.engine.user",
    "SamplingParams": "headgate.capture.engine.user",
    "additional_config": "headgate.capture.engine.cli_flags",
}
"""Names that need vLLM or are part of its world: imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
