"""Adding vectors to the residual stream of stock vLLM while it serves.

::

    from headgate.steering import LLM, SamplingParams

    llm = LLM("model", steering=True)
    llm.generate("Hello", SamplingParams(steering_vectors={"post_mlp": {12: vector}}))

Nothing here imports vLLM or torch before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.capture import LLM, SamplingParams, additional_config
    from headgate.capture.errors import ConfigError, RequestError
    from headgate.capture.sites import HookPoint, Site
    from headgate.steering.config import SteeringConfig
    from headgate.steering.contrast import captured_rows, contrast
    from headgate.steering.directions import mean_difference, pca
    from headgate.steering.files import VectorFile, VectorFileError, load, save
    from headgate.steering.handle import AsyncSteering, Steering
    from headgate.steering.vectors import ModuleRef, PhaseVectors, weighted_sum

__all__ = [
    "LLM",
    "AsyncSteering",
    "ConfigError",
    "HookPoint",
    "ModuleRef",
    "PhaseVectors",
    "RequestError",
    "SamplingParams",
    "Site",
    "Steering",
    "SteeringConfig",
    "VectorFile",
    "VectorFileError",
    "additional_config",
    "captured_rows",
    "contrast",
    "load",
    "mean_difference",
    "pca",
    "save",
    "weighted_sum",
]

_WHERE = {
    "headgate.capture": ("LLM", "SamplingParams", "additional_config"),
    "headgate.capture.errors": ("ConfigError", "RequestError"),
    "headgate.capture.sites": ("HookPoint", "Site"),
    "headgate.steering.config": ("SteeringConfig",),
    "headgate.steering.contrast": ("captured_rows", "contrast"),
    "headgate.steering.directions": ("mean_difference", "pca"),
    "headgate.steering.files": ("VectorFile", "VectorFileError", "load", "save"),
    "headgate.steering.handle": ("AsyncSteering", "Steering"),
    "headgate.steering.vectors": ("ModuleRef", "PhaseVectors", "weighted_sum"),
}
_LATE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
