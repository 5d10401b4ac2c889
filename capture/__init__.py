"""Reading activations from stock vLLM while it serves: the lowest layer of headgate.

All names that the author of a consumer needs can be imported from here.

Nothing here imports vLLM or torch before it is used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CaptureConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    ModelInfo,
    Readout,
    RequestInfo,
    RowBlock,
    RowSpan,
    SpecContext,
    StreamingConsumer,
    parse_client_spec,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, HeadgateError, RequestError
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import HookPoint, Site, site_map
from headgate.capture.schema.spec import CaptureSpec

if TYPE_CHECKING:
    __version__: str
    from headgate.capture.engine.api import LLM, SamplingParams, start_llm
    from headgate.capture.engine.frontends.prompt_tokens import prompt_tokens
    from headgate.capture.engine.requests.chat_messages import message_spans
    from headgate.capture.engine.setup.cli_flags import additional_config
    from headgate.capture.handles import CaptureHandle, RowView, UnreadCaptureWarning, fetch_all

__all__ = [
    "LLM",
    "BatchedConsumer",
    "CaptureConsumer",
    "CaptureConsumerSpec",
    "CaptureConsumersConfig",
    "CaptureHandle",
    "CaptureResult",
    "CaptureSpec",
    "CapturedRequest",
    "ConfigError",
    "ConsumerContext",
    "ConsumerError",
    "FinishedRequest",
    "HeadgateError",
    "HookPoint",
    "ModelInfo",
    "Readout",
    "RequestError",
    "RequestInfo",
    "RowBlock",
    "RowSpan",
    "RowView",
    "SamplingParams",
    "Site",
    "SpecContext",
    "StreamingConsumer",
    "UnreadCaptureWarning",
    "__version__",
    "additional_config",
    "fetch_all",
    "message_spans",
    "parse_client_spec",
    "prompt_tokens",
    "site_map",
    "start_llm",
]

_LATE = {
    "CaptureHandle": "headgate.capture.handles",
    "LLM": "headgate.capture.engine.api",
    "RowView": "headgate.capture.handles",
    "SamplingParams": "headgate.capture.engine.api",
    "UnreadCaptureWarning": "headgate.capture.handles",
    "additional_config": "headgate.capture.engine.setup.cli_flags",
    "fetch_all": "headgate.capture.handles",
    "message_spans": "headgate.capture.engine.requests.chat_messages",
    "prompt_tokens": "headgate.capture.engine.frontends.prompt_tokens",
    "start_llm": "headgate.capture.engine.api",
}
"""Names that need vLLM or are part of its world, and what few need: imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("headgate")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
