"""A small client of servers with headgate: steering, named modules and captured results, typed.

Needs neither vLLM nor torch, only headgate's own packages and httpx (``pip install 'headgate[client]'``)::

    from headgate.steering.client import Client

    with Client("http://localhost:8000", steering_key="...") as client:
        client.register("calm", path="calm.safetensors")
        print(client.chat("Hello", steering_module_ref=("calm", 1.5), max_tokens=40).text)

The openai client takes the same fields through `extra_body`::

    openai_client.chat.completions.create(..., extra_body=extra_body(steering_vectors={"post_mlp": {12: direction}}))
"""

from __future__ import annotations

from typing import Any

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.results import CaptureResult
from headgate.steering.client.answers import (
    Answer,
    Capturable,
    Choice,
    Consumer,
    ServerError,
    inline_rows,
)
from headgate.steering.client.calls import packed_fields
from headgate.steering.client.http import AsyncClient, Client
from headgate.steering.client.sweep import Cell, PatchSweep
from headgate.steering.control.status import (
    FoundFeatures,
    GlobalUpdate,
    LabelledFeature,
    Layers,
    ModuleStatus,
    ProbeStatus,
    RuleStatus,
    SaeStatus,
    SteeringStatus,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "Capturable",
    "CaptureResult",
    "Cell",
    "Choice",
    "Client",
    "Consumer",
    "FoundFeatures",
    "GlobalUpdate",
    "LabelledFeature",
    "Layers",
    "ModuleStatus",
    "PatchSweep",
    "ProbeStatus",
    "RequestError",
    "RuleStatus",
    "SaeStatus",
    "ServerError",
    "SteeringStatus",
    "extra_body",
    "inline_rows",
]


def extra_body(**fields: Any) -> dict[str, Any]:
    """Return the fields of a request for another client's JSON body, with vectors packed as base64.

    Args:
        fields: ``steering_vectors`` and its like as arrays, tensors or `PhaseVectors`, ``steering_ops`` and its like
            with arrays or tensors, ``steering_gates`` with any of these, and any others, which stay as they are.

    Raises:
        RequestError: If vectors cannot be read.
    """
    return packed_fields(fields, as_text=True)
