"""Steering: adds vectors to the residual stream of stock vLLM while it serves.

::

    from headgate.steering import LLM, SamplingParams

    llm = LLM("model", steering=True)
    llm.generate("Hello", SamplingParams(steering_vectors={"post_mlp": {12: vector}}))

The folders, in the order in which they import each other:

* ``vectors/``: element types, the canonical form of vectors (`PhaseVectors`), sums, directions from captured rows.
* ``programs/``: operations at a site beyond addition: their methods, and the entries that they are lowered to;
  `headgate.steering.ops` makes them by name.
* ``features/``: SAEs and transcoders as files, and the command ``headgate sae``.
* ``probes/``: scores of rows: made from captures, judged, as files, and the command ``headgate probe``; directions
  between groups of captured rows (`between`).
* ``gates/``: conditions on rows that turn steering on, lowered to entries of programs; traces.
* ``controllers/``: Python plug-ins that read scores of running requests and change their steering.
* ``documents/``: what clients send, in every form, read into a spec and its wire form.
* ``files/``: vectors on disk: safetensors, JSON, GGUF, and the files of other tools; the command ``headgate vectors``.
* ``core/``: in the engine core: global vectors, named modules, slots for requests, keys of KV blocks.
* ``worker/``: in each worker: the pool of vectors, a table row for each token, the addition in the forward pass, which
  ``kernels/`` computes where no compiler fuses it.
* ``control/``: ``llm.steering``, the routes ``/v1/steering`` and the metrics.
* ``client/``: a client of servers for programs without vLLM.

A vector's way from a request to the stream: ``documents/request``, ``vectors``, ``spec``;
``core/steering_core``, ``state``, ``admission``; ``worker/steering_part``, ``row_table``, ``vector_pool``,
``device_tables``, ``site_action``. `headgate.steering.config` has every knob, and `headgate.steering.part` joins
steering to headgate.

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.capture import LLM, SamplingParams, additional_config
    from headgate.capture.schema.errors import ConfigError, RequestError
    from headgate.capture.schema.sites import HookPoint, Site
    from headgate.steering import ops, probes
    from headgate.steering.config import SteeringConfig
    from headgate.steering.control.handle import AsyncSteering, Steering
    from headgate.steering.files.vector_files import VectorFile, VectorFileError, load, save
    from headgate.steering.probes.groups import GroupDirections, between
    from headgate.steering.spec import ModuleRef
    from headgate.steering.vectors.directions import captured_rows, contrast, mean_difference, pca
    from headgate.steering.vectors.phase_vectors import PhaseVectors, weighted_sum

__all__ = [
    "LLM",
    "AsyncSteering",
    "ConfigError",
    "GroupDirections",
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
    "between",
    "captured_rows",
    "contrast",
    "load",
    "mean_difference",
    "ops",
    "pca",
    "probes",
    "save",
    "weighted_sum",
]

_WHERE = {
    "headgate.capture": ("LLM", "SamplingParams", "additional_config"),
    "headgate.capture.schema.errors": ("ConfigError", "RequestError"),
    "headgate.capture.schema.sites": ("HookPoint", "Site"),
    "headgate.steering.config": ("SteeringConfig",),
    "headgate.steering.vectors.directions": ("captured_rows", "contrast", "mean_difference", "pca"),
    "headgate.steering.files.vector_files": ("VectorFile", "VectorFileError", "load", "save"),
    "headgate.steering.probes.groups": ("GroupDirections", "between"),
    "headgate.steering.control.handle": ("AsyncSteering", "Steering"),
    "headgate.steering.spec": ("ModuleRef",),
    "headgate.steering.vectors.phase_vectors": ("PhaseVectors", "weighted_sum"),
}
_LATE = {name: module for module, names in _WHERE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("ops", "probes"):
        return import_module(f"headgate.steering.{name}")
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
