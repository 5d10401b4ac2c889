"""How what a request asks travels: on a copy of its parameters to where the request is made, then to the engine.

From the front end on, a request carries one dict under ``extra_args["headgate"]``, of plain values and bytes only, long
ones as `headgate.capture.engine.core.frames.Frame`::

    {"v": 1,
     "offline": True, if an `LLM` makes the request
     # if it captures:
     "id": client's request id, "n": samples, "key": random, "reply": the hub's address or None,
     "wait": whether the client waits for its results,
     "capture": {instance: CaptureSpec.to_wire()},
     # of every other part that it asks something of, by its section:
     "steering": ...}

The dict is written by `fold` alone. A request that arrives with one is refused: it could name a reply address of its
own choice. Before vLLM copies the parameters, the raw fields are taken out of them: copying lists of numbers is slow.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from headgate.capture.engine.contracts.request_part import PartRequest
from headgate.capture.engine.contracts.vllm_frontend import NewRequest, SamplingParams
from headgate.capture.engine.contracts.wire_format import CAPTURE, OFFLINE, WIRE_KEY
from headgate.capture.engine.requests.capture_request import CaptureRequest, needs_prompt, to_wire
from headgate.capture.engine.requests.sampling_params import all_fields
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.spec import WIRE_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadgateRequest:
    """The checked headgate fields of one request. Immutable.

    Attributes:
        capture: Of capture; None if nothing.
        parts: Of the other parts, by section. Both may be empty: then the request's fields came to nothing.
        is_offline: It is made by an `LLM`.
    """

    capture: CaptureRequest | None = None
    parts: Mapping[str, PartRequest] = field(default_factory=dict)
    is_offline: bool = False

    def __deepcopy__(self, memo: object) -> HeadgateRequest:
        """Itself: parameters are copied deeply on their way, payloads must not be."""
        return self

    @property
    def field(self) -> str:
        """A field that the request set, for errors that concern all of it."""
        if self.capture is not None:
            return f"{CAPTURE}.{next(iter(self.capture.specs))}"
        return next((wanted.field for wanted in self.parts.values()), CAPTURE)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return self.capture is None and not self.parts


def refuse_forged(params: SamplingParams) -> None:
    """Refuse a request that brings the wire dict along.

    Raises:
        RequestError: If it does.
    """
    if params.extra_args and WIRE_KEY in params.extra_args:
        raise RequestError(
            f"extra_args.{WIRE_KEY}", "this key is headgate's own; set 'capture' or 'steering_vectors' instead"
        )


def attach(params: SamplingParams, headgate_request: HeadgateRequest) -> SamplingParams:
    """A copy of `params` that carries `headgate_request` in place of the raw fields; the caller's stays as it is.

    It lies under the wire dict's key, so that it can be copied on but never be lost: parameters in which it is
    replaced by anything else are refused as forged.
    """
    carrier = copy.copy(params)
    carrier.extra_args = {**_others(params), WIRE_KEY: headgate_request}
    return carrier


def attached(params: SamplingParams) -> HeadgateRequest | None:
    """Return the request that `attach` put into `params`; None if there is none."""
    carried = (params.extra_args or {}).get(WIRE_KEY)
    return carried if isinstance(carried, HeadgateRequest) else None


def fold(request: NewRequest, headgate_request: HeadgateRequest, request_id: str) -> None:
    """Write the wire dict into an `EngineCoreRequest`, whose parameters are the front end's own copy.

    Raises:
        RequestError: If requests of this kind cannot be captured or steered.
    """
    refuse_kind(request, headgate_request)
    params = request.sampling_params
    wire: dict[str, Any] = {"v": WIRE_VERSION}
    if (ask := headgate_request.capture) is not None:
        wire.update(to_wire(ask, params.n, request_id))
        if needs_prompt(ask, len(request.prompt_token_ids)):
            params.skip_reading_prefix_cache = True
    for section, wanted in headgate_request.parts.items():
        wire[section] = dict(wanted.wire)  # the engine adds to it, and requests may share what is wanted
    if headgate_request.is_offline:
        wire[OFFLINE] = True
    others = _others(params)
    params.extra_args = (others or None) if headgate_request.is_empty else {**others, WIRE_KEY: wire}


def _others(params: SamplingParams) -> dict[str, Any]:
    extra = params.extra_args or {}
    return {key: value for key, value in extra.items() if key != WIRE_KEY and key not in all_fields()}


def refuse_kind(request: NewRequest, headgate_request: HeadgateRequest) -> None:
    """Refuse kinds of requests whose rows cannot be told apart.

    Raises:
        RequestError: Naming a field that was set.
    """
    if headgate_request.is_empty:
        return
    if request.sampling_params is None:
        raise RequestError(headgate_request.field, "pooling requests cannot be captured or steered")
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        raise RequestError(
            headgate_request.field,
            "a prompt given as embeddings cannot be captured or steered: its rows belong to no token; give its tokens",
        )
    if request.resumable:
        refuse_streamed_input(headgate_request)


def refuse_streamed_input(headgate_request: HeadgateRequest) -> NoReturn:
    """Refuse a session whose input arrives in parts.

    Raises:
        RequestError: Always.
    """
    raise RequestError(
        headgate_request.field,
        "a session with streamed input cannot be captured or steered: its prompt is not known yet",
    )


def refuse_made(request: NewRequest, params: SamplingParams) -> None:
    """Refuse an `EngineCoreRequest` that asks for something which was not folded into it: it would be ignored.

    Args:
        request: What the caller gave as the prompt.
        params: The parameters beside it, which vLLM ignores in this case.

    Raises:
        RequestError: Naming the field.
    """
    made = request.sampling_params
    given = [name for name in all_fields() for source in (made, params) if _is_set(source, name)]
    if given and (_is_set(made, given[0]) or WIRE_KEY not in (made.extra_args or {})):
        raise RequestError(
            given[0], "an EngineCoreRequest is taken as it is; pass the prompt itself, with the sampling parameters"
        )


def _is_set(params: SamplingParams, name: str) -> bool:
    return params is not None and (name in vars(params) or name in (params.extra_args or {}))
