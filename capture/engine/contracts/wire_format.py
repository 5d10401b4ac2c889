"""The wire dict of a request: its fields, checked and resolved, on the way from a front end to engine core and workers.

It lies in the ``extra_args`` of the request's parameters, which vLLM carries everywhere.
"""

from __future__ import annotations

from headgate.capture.engine.contracts.plain_values import Document
from headgate.capture.engine.contracts.vllm_engine import RequestParams

WIRE_KEY = "headgate"
"""Key of the wire dict in ``extra_args``."""
CAPTURE = "capture"
"""Key of capture's section in the wire dict; also the field of `SamplingParams` that asks for it."""

OFFLINE = "offline"
"""Key of the wire dict that a request of an `LLM` has: nobody else waits for the engine."""

FAN_OUT = "fan_out"
"""Key of the wire dict of a sample on its way to the engine core: what the samples share, and whether it is here."""


def wire_of(params: RequestParams | None) -> Document | None:
    """Return the wire dict of a request in the engine; None if the request asks for nothing."""
    return None if params is None or not params.extra_args else params.extra_args.get(WIRE_KEY)


def is_captured(params: RequestParams | None) -> bool:
    """Whether the wire dict of a request has a section of capture's."""
    wire = wire_of(params)
    return wire is not None and CAPTURE in wire
