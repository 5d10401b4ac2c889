"""``LLM.capture``, ``LLM.steering`` and its like: what parts offer to users, as a property named like the part."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.request_part import RequestPart
from headgate.capture.engine.contracts.vllm_frontend import LLM, AsyncLLM, Engine
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.engine.core.core_calls import AsyncCoreClient, CoreClient
from headgate.capture.engine.frontends.lazy_capture import AsyncCapturing, Capturing
from headgate.capture.engine.requests.capture_frontend import FrontEnd, front_end_of
from headgate.capture.engine.requests.capture_request import HOW_TO_CAPTURE, NO_CAPTURE
from headgate.capture.engine.requests.request_reader import OpenPart, RequestReader, reader_of
from headgate.capture.schema.errors import ConfigError


class NotConfiguredError(ConfigError, AttributeError):
    """A part was not configured. An `AttributeError` too, so that tools which list attributes get by."""


def add_handles(module: ModuleType) -> None:
    """Give ``vllm.entrypoints.llm.LLM`` a property for each part, and one for capture."""
    _add(module.LLM, CAPTURE, property(_read_capturing, doc=_doc(CAPTURE)))
    for name, part in request_parts().items():
        _add(module.LLM, name, property(_sync_getter(name, part), doc=_doc(name)))


def add_async_handles(module: ModuleType) -> None:
    """Give ``vllm.v1.engine.async_llm.AsyncLLM`` a property for each part, and one for capture."""
    _add(module.AsyncLLM, CAPTURE, property(_read_async_capturing, doc=_doc(CAPTURE)))
    for name, part in request_parts().items():
        _add(module.AsyncLLM, name, property(_async_getter(name, part), doc=_doc(name)))


def _add(owner: type, name: str, handle: property) -> None:
    held = vars(owner).get(name)
    if hasattr(owner, name) and not (isinstance(held, property) and held.fget.__module__ == __name__):
        raise TypeError(f"vLLM's {owner.__name__} has an attribute {name!r} of its own")
    setattr(owner, name, handle)


def _doc(name: str) -> str:
    return f"headgate: {name} of this engine, if it is configured."


def _read_capturing(self: LLM) -> Capturing:
    return Capturing(self, _capturing_front_end(self.llm_engine))


def _read_async_capturing(self: AsyncLLM) -> AsyncCapturing:
    return AsyncCapturing(self, _capturing_front_end(self))


def _capturing_front_end(engine: Engine) -> FrontEnd:
    front = front_end_of(engine)
    if front is None:
        raise NotConfiguredError(f"{NO_CAPTURE} {HOW_TO_CAPTURE}")
    return front


def _sync_getter(name: str, part: RequestPart) -> Callable[[LLM], object]:
    def read(self: LLM) -> object:
        engine = self.llm_engine
        opened = _opened(reader_of(engine), name, part)
        return part.handle(CoreClient(engine.engine_core, name), opened.reader)

    return read


def _async_getter(name: str, part: RequestPart) -> Callable[[AsyncLLM], object]:
    def read(self: AsyncLLM) -> object:
        opened = _opened(reader_of(self), name, part)
        return part.async_handle(AsyncCoreClient(self.engine_core, name, opened.call_lock), opened.reader)

    return read


def _opened(reader: RequestReader, name: str, part: RequestPart) -> OpenPart:
    opened = reader.parts.get(name)
    if opened is None:
        raise NotConfiguredError(f"this engine was started without {name}. {part.how_to_start}")
    return opened
