"""Where the `RequestWire` of a request lies: in the ``extra_args`` of its parameters, which vLLM carries everywhere.

A front end writes it when vLLM has made the request; engine core and workers read it. Nothing else is ever under its
key: a request that a client sends with one is refused, since it could name a reply address of the client's choice.
"""

from __future__ import annotations

from typing import cast

from headgate.capture.engine.vllm_types import RequestParams
from headgate.capture.schema.batch import Document, RequestWire

WIRE_KEY = "headgate"
"""Key of the `RequestWire` in ``extra_args``."""

CAPTURE = "capture"
"""Key of capture's section in the `RequestWire`; also the field of `SamplingParams` that asks for it."""

READINGS_ATTRIBUTE = "headgate_readings"
"""Attribute of a worker's ``ModelRunnerOutput``: ``{part: document}``, what the parts read in that step; absent if
nothing. It is no field of the class, and travels with its pickle."""

ORDERS_ATTRIBUTE = "headgate_orders"
"""Attribute of a ``SchedulerOutput``: ``{part: document}``, what the parts' halves in the workers are to follow from
that step on; absent if nothing. It is no field of the class, and travels with its pickle."""

NOTES_KEY = "headgate_notes"
"""Key of a request's notes in the ``kv_transfer_params`` of an ``EngineCoreOutput``: ``{part: [note, ...]}``, in the
order of the steps. The field is a free dict that only KV connectors use, which are refused; the front end takes the
notes out before vLLM looks at it."""

OUTDATED_KEY = "headgate_outdated"
"""Key that is there, in the same dict, if rows of the request's prompt were captured before what acts on the model
changed, and were computed again: its result will be an error, and chunks of a stream must have no part of it."""

FINAL_ATTRIBUTE = "headgate_final"
"""Attribute of a ``SchedulerOutput``: final states by request id; None means that the request ended and its final state
follows later. It is no field of the class, and travels with its pickle."""

Final = tuple[int, list[int], str, Document, int]
"""Number of prompt tokens, all token ids, the finish reason, notes on rows by part, and `FinalState.num_outdated`."""
OVERLOADED = "headgate: overloaded: "
"""Start of the stop reason of a request that was sent away unserved, with the finish reason "error"; the cause
follows."""


def wire_of(params: RequestParams | None) -> RequestWire | None:
    """Return the `RequestWire` of a request in the engine; None if the request asks for nothing."""
    if params is None or not params.extra_args:
        return None
    return cast("RequestWire | None", params.extra_args.get(WIRE_KEY))


def wants_notes(params: RequestParams | None) -> bool:
    """Whether notes about a request in the engine come with its outputs."""
    return "notes" in (wire_of(params) or ())


def is_captured(params: RequestParams | None) -> bool:
    """Whether a request in the engine captures."""
    wire = wire_of(params)
    return wire is not None and CAPTURE in wire
