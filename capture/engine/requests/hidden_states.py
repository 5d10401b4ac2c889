"""``return_hidden_states``: the last row of the final norm, with each choice of the answer.

It is the state from which the last token was sampled, ``[hidden]`` in the model's dtype: HF's ``hidden_states[-1]`` at
the last token but one, since the last sampled token is never forwarded. A consumer keeps it (the entry point
`HIDDEN_STATES`); the field stands for a spec that clients could not write themselves.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from headgate.capture.engine.requests.sampling_params import RETURN_HIDDEN_STATES
from headgate.capture.schema.config import HIDDEN_STATES
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Span
from headgate.capture.schema.results import CaptureResult
from headgate.capture.schema.sites import FINAL_NORM_SITE
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.transport.messages import DTYPES

ATTRIBUTE = HIDDEN_STATES
"""Of a `CompletionOutput`, and key of a choice in an HTTP answer."""

Form = Literal["list", "base64"]

SPEC = CaptureSpec(sites=(FINAL_NORM_SITE,), positions=Span(-1))
"""From the last token of the prompt on: if one token is generated, its row is the one that is wanted."""


def read_form(value: object) -> Form | None:
    """How an HTTP answer writes the state; None if it is not wanted.

    Raises:
        RequestError: If `value` is neither true, false, ``"list"`` nor ``"base64"``.
    """
    if value is None or value is False:
        return None
    if value is True or value == "list":
        return "list"
    if value == "base64":
        return "base64"
    raise RequestError(RETURN_HIDDEN_STATES, f'expected true, false, "list" or "base64", got {value!r}')


def tensor_of(result: CaptureResult | None) -> Tensor | None:
    """The state in one sample's result, ``[hidden]`` in the model's dtype; None if there is none."""
    payload = None if result is None else result.payload
    if not isinstance(payload, Mapping):
        return None
    try:
        data = bytearray(base64.b64decode(payload["data"], validate=True))
        return torch.frombuffer(data, dtype=DTYPES[payload["dtype"]])
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None


def plain_state(result: CaptureResult | None, form: Form) -> object:
    """The state in one sample's result as JSON: a list of numbers, or ``{"dtype", "shape", "data"}``; None if none."""
    if form == "base64":
        return None if result is None or tensor_of(result) is None else result.payload
    state = tensor_of(result)
    return None if state is None else state.tolist()
