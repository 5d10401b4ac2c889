"""``SamplingParams.capture`` and the other fields in which a request says what it wants of headgate.

vLLM keeps only declared fields of `SamplingParams` when it copies, pickles or sends one; a plain attribute is lost.
The properties put in here store their value in ``extra_args``, which travels with it everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, wraps
from types import ModuleType
from typing import Any

from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import Function
from headgate.capture.engine.contracts.vllm_frontend import SamplingParams
from headgate.capture.engine.contracts.wire_format import CAPTURE, WIRE_KEY
from headgate.capture.engine.setup.versions import WORKS_WITH
from headgate.capture.schema.errors import RequestError

CAPTURE_WAIT = "capture_wait"
RETURN_HIDDEN_STATES = "return_hidden_states"
CAPTURE_FIELDS = (CAPTURE, CAPTURE_WAIT, RETURN_HIDDEN_STATES)


@cache
def all_fields() -> tuple[str, ...]:
    """Capture's fields and those of every other part."""
    return *CAPTURE_FIELDS, *(name for part in request_parts().values() for name in part.fields)


def add_properties(module: ModuleType) -> None:
    """Give ``vllm.sampling_params`` our fields; a class that cannot have them refuses them."""
    for name in all_fields():
        if name in module.SamplingParams.__struct_fields__:
            raise TypeError(f"vLLM's SamplingParams has a field {name!r} of its own")
        setattr(module.SamplingParams, name, _stored(name))
        refused = _refused(name, "beam search cannot be captured or steered; use SamplingParams")
        setattr(module.BeamSearchParams, name, refused)


def refuse_properties(module: ModuleType) -> None:
    """Refuse our fields in a vLLM that headgate was not made for, instead of letting them be ignored."""
    for name in all_fields():
        setattr(module.SamplingParams, name, _refused(name, f"this vLLM is not supported; {WORKS_WITH}"))


def read_field(params: SamplingParams, name: str) -> Any:
    """The value of one of our fields, None if unset; also when it was set before the properties were there."""
    return _read(vars(params), params.extra_args or {}, name)


def _read(early: Document, extra: Document, name: str) -> Any:
    value = early.get(name)
    return none_if_default(name, value if value is not None else extra.get(name))


def none_if_default(name: str, value: Any) -> Any:
    """`value`, or None if it says nothing: some clients send every field that they know with its default."""
    return None if name == RETURN_HIDDEN_STATES and value is False else value


def read_fields(params: SamplingParams, names: Iterable[str]) -> dict[str, Any]:
    """Those of our fields that are set, by name."""
    if is_plain(params):
        return {}  # most requests: they shall not pay for ours
    early, extra, found = vars(params), params.extra_args or {}, {}
    for name in names:
        if (name in extra or name in early) and (value := _read(early, extra, name)) is not None:
            found[name] = value
    return found


def is_plain(params: SamplingParams) -> bool:
    """Whether a `SamplingParams` can hold nothing of ours: it has neither ``extra_args`` nor attributes of its own."""
    return not params.extra_args and not vars(params)


def _stored(name: str) -> property:
    def read(self: SamplingParams) -> Any:
        return read_field(self, name)

    def write(self: SamplingParams, value: object) -> None:
        vars(self).pop(name, None)
        extra = {key: kept for key, kept in (self.extra_args or {}).items() if key != name}
        if value is not None:
            extra[name] = value
        self.extra_args = extra or None

    return property(read, write, doc=f"headgate: see headgate.capture.SamplingParams ({name}).")


def _refused(name: str, why: str) -> property:
    def read(self: SamplingParams) -> None:
        return None

    def write(self: SamplingParams, value: object) -> None:
        if value is not None:
            raise RequestError(name, why)

    return property(read, write)


def short_repr(original: Function) -> Function:
    """Wrap ``SamplingParams.__repr__``: request logs and crash dumps must not print whole wire dicts, nor vectors."""

    @wraps(original)
    def __repr__(self: SamplingParams) -> str:
        extra = self.extra_args or {}
        elided = {name: _Elided(extra[name]) for name in (WIRE_KEY, *_long_fields()) if name in extra}
        if not elided:
            return str(original(self))
        shown = copy.copy(self)
        shown.extra_args = {**extra, **elided}
        return str(original(shown))

    return __repr__


def _long_fields() -> Iterator[str]:
    return (name for part in request_parts().values() for name in part.fields)


class _Elided:
    """Stands for a wire dict, or for the value of a field, where it is printed."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, str):
            return repr(self._value)
        if not isinstance(self._value, Mapping):
            return "<...>"
        named = [f"{CAPTURE} for {', '.join(self._value[CAPTURE])}"] if CAPTURE in self._value else []
        return f"<{'; '.join([*named, *(key for key in self._value if key in request_parts())]) or '...'}>"
