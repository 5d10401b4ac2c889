"""``SamplingParams.capture`` and ``capture_wait``: where a request says what it wants captured.

vLLM keeps only declared fields of `SamplingParams` when it copies, pickles or sends one; a plain attribute is lost.
The properties put in here store their value in ``extra_args``, which travels with it everywhere.
"""

from __future__ import annotations

import copy
from functools import wraps
from types import ModuleType
from typing import Any

from headgate.capture.engine.support import WORKS_WITH
from headgate.capture.errors import RequestError

CAPTURE = "capture"
CAPTURE_WAIT = "capture_wait"
FIELDS = (CAPTURE, CAPTURE_WAIT)
WIRE_KEY = "headgate"
"""Key of ``extra_args`` under which a request's checked and resolved capture travels to the worker."""


def add_properties(module: ModuleType) -> None:
    """Give ``vllm.sampling_params`` its capture fields; a class that cannot be captured refuses them."""
    for name in FIELDS:
        if name in module.SamplingParams.__struct_fields__:
            raise TypeError(f"vLLM's SamplingParams has a field {name!r} of its own")
        setattr(module.SamplingParams, name, _stored(name))
    module.BeamSearchParams.capture = _refused("beam search cannot be captured; use SamplingParams")


def refuse_properties(module: ModuleType) -> None:
    """Refuse capture in a vLLM that headgate was not made for, instead of letting it be ignored."""
    for name in FIELDS:
        setattr(module.SamplingParams, name, _refused(f"this vLLM is not supported; {WORKS_WITH}"))


def read_field(params: Any, name: str) -> Any:
    """The value of one of `FIELDS`, None if unset; also when it was set before the properties were there."""
    early = vars(params).get(name)
    return early if early is not None else (params.extra_args or {}).get(name)


def _stored(name: str) -> property:
    def read(self: Any) -> Any:
        return read_field(self, name)

    def write(self: Any, value: Any) -> None:
        vars(self).pop(name, None)
        extra = {key: kept for key, kept in (self.extra_args or {}).items() if key != name}
        if value is not None:
            extra[name] = value
        self.extra_args = extra or None

    return property(read, write, doc=f"headgate: see headgate.capture.SamplingParams ({name}).")


def _refused(why: str) -> property:
    def read(self: Any) -> None:
        return None

    def write(self: Any, value: Any) -> None:
        if value is not None:
            raise RequestError(CAPTURE, why)

    return property(read, write)


def short_repr(original: Any) -> Any:
    """Wrap ``SamplingParams.__repr__``: request logs and crash dumps must not print whole wire dicts."""

    @wraps(original)
    def __repr__(self: Any) -> str:
        extra = self.extra_args
        if not extra or WIRE_KEY not in extra:
            return str(original(self))
        shown = copy.copy(self)
        shown.extra_args = {**extra, WIRE_KEY: _Elided(extra[WIRE_KEY])}
        return str(original(shown))

    return __repr__


class _Elided:
    """Stands for a wire dict where one is printed."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire

    def __repr__(self) -> str:
        return f"<capture for {', '.join(self._wire.get('capture', ()))}>" if isinstance(self._wire, dict) else "<...>"


def make_sampling_params() -> type:
    """``headgate.capture.SamplingParams``: vLLM's class, whose constructor also takes `capture` and `capture_wait`.

    Calling it returns an instance of vLLM's own class, and ``isinstance(x, it)`` holds for those, so nothing in vLLM
    can tell the difference.
    """
    import vllm.sampling_params as module

    from headgate.capture.engine.plugin import register

    register()
    base = module.SamplingParams

    class Constructor(type(base)):  # type: ignore[misc]
        def __call__(cls, *args: Any, capture: Any = None, capture_wait: bool | None = None, **kwargs: Any) -> Any:
            params = base(*args, **kwargs)
            params.capture = capture
            params.capture_wait = capture_wait
            return params

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    return Constructor(
        "SamplingParams", (base,), {"__doc__": base.__doc__, "__module__": "headgate.capture"}, dict=True
    )
