"""Where the `RequestWire` of a request lies: in the ``extra_args`` of its parameters, which vLLM carries everywhere.

A front end writes it when vLLM has made the request; engine core and workers read it. Nothing else is ever under its
key: a request that a client sends with one is refused, since it could name a reply address of the client's choice.
"""

from __future__ import annotations

from typing import cast

from headgate.capture.engine.contracts.vllm_engine import RequestParams
from headgate.capture.schema.batch import RequestWire

WIRE_KEY = "headgate"
"""Key of the `RequestWire` in ``extra_args``."""
CAPTURE = "capture"
"""Key of capture's section in the `RequestWire`; also the field of `SamplingParams` that asks for it."""


def wire_of(params: RequestParams | None) -> RequestWire | None:
    """Return the `RequestWire` of a request in the engine; None if the request asks for nothing."""
    if params is None or not params.extra_args:
        return None
    return cast("RequestWire | None", params.extra_args.get(WIRE_KEY))


def is_captured(params: RequestParams | None) -> bool:
    """Whether a request in the engine captures."""
    wire = wire_of(params)
    return wire is not None and CAPTURE in wire
