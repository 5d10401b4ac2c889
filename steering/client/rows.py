"""Activations that come with an answer, as numpy arrays: small captures, and the hidden state of each choice."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from headgate.capture.schema.results import CaptureResult
from headgate.steering.files.tensor_bytes import FORMAT_NAMES, Tensor, decode
from headgate.steering.vectors.dtypes import STORAGE, StoredType, widen

Array = np.ndarray[Any, np.dtype[Any]]


def inline_rows(result: CaptureResult, sample: int = 0) -> dict[str, Array]:
    """Return the arrays that the consumer `inline` sent back: one for each site, ``"positions"`` and ``"token_ids"``.

    ::

        answer = client.chat("Hello", capture={"inline": {"hooks": {"post_mlp": [12]}}})
        inline_rows(answer.capture_results["inline"])["12.post_mlp"]  # [rows, hidden]

    Args:
        result: Of one request; of `n` samples if it asked for several.
        sample: Index of the sample.

    Returns:
        Rows in float16 or float32; those of a bfloat16 model in float32, exactly.

    Raises:
        ValueError: If the result has no rows; the message is the result's own error if it has one.
    """
    payload = result.payload[sample] if isinstance(result.payload, list) else result.payload
    if not isinstance(payload, Mapping) or payload.get("format") != "safetensors":
        raise ValueError(result.error or f"the result has no rows in it, but {payload!r}")
    tensors, _ = decode(base64.b64decode(payload["data"], validate=True))
    return {name: _array(tensor) for name, tensor in tensors.items()}


def hidden_state(value: Any) -> Array | None:
    """Return a choice's ``hidden_states``, ``[hidden]``, from a list (float32) or from base64; None if there is none.

    Raises:
        ValueError: If it is something else.
    """
    if value is None:
        return None
    if isinstance(value, list):
        return np.array(value, np.float32)
    if not isinstance(value, Mapping) or value.get("dtype") not in STORAGE:
        raise ValueError(f"expected a hidden state, got {str(value)[:100]}")
    dtype = cast("StoredType", value["dtype"])
    state = np.frombuffer(base64.b64decode(value["data"], validate=True), STORAGE[dtype])
    return widen(state, dtype) if dtype == "bfloat16" else state


def _array(tensor: Tensor) -> Array:
    if tensor.dtype == "I64":
        return np.frombuffer(tensor.data, "<i8").reshape(tensor.shape)
    if tensor.dtype not in FORMAT_NAMES:
        raise ValueError(f"cannot read rows of type {tensor.dtype}")
    dtype = FORMAT_NAMES[tensor.dtype]
    rows = np.frombuffer(tensor.data, STORAGE[dtype]).reshape(tensor.shape)
    return widen(rows, dtype) if dtype == "bfloat16" else rows
