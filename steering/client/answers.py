"""The answers of a server, typed. Fields that a newer server adds are kept in `raw`, or passed over."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np

from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.results import CaptureResult
from headgate.steering.control.status import SteeringStatus
from headgate.steering.files.tensor_bytes import FORMAT_NAMES, Tensor, decode
from headgate.steering.gates.trace import SteeringTrace
from headgate.steering.vectors.dtypes import STORAGE, StoredType, widen

Array = np.ndarray[Any, np.dtype[Any]]

_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2"}
"""Element types of positions, tokens and numbers of experts, by the names of the format."""


def inline_rows(result: CaptureResult, sample: int = 0) -> dict[str, Array]:
    """Return the arrays that the consumer `inline` sent back: one for each site, ``"positions"`` and ``"token_ids"``.

    It reads the answers of `attention` as well, and those of `features` with ``"encoding": "binary"``.

    ::

        answer = client.chat("Hello", capture={"inline": {"hooks": {"post_mlp": [12]}}})
        inline_rows(answer.capture_results["inline"])["12.post_mlp"]  # [rows, hidden]

    Args:
        result: Result of one request; of `n` samples if it asked for several.
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
    if tensor.dtype in _INTEGERS:
        return np.frombuffer(tensor.data, _INTEGERS[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype not in FORMAT_NAMES:
        raise ValueError(f"cannot read rows of type {tensor.dtype}")
    dtype = FORMAT_NAMES[tensor.dtype]
    rows = np.frombuffer(tensor.data, STORAGE[dtype]).reshape(tensor.shape)
    return widen(rows, dtype) if dtype == "bfloat16" else rows


Captures = dict[str, CaptureResult]
"""Results by consumer. With ``n > 1`` a payload is a list, one item for each sample."""


class ServerError(HeadgateError):
    """An error that the server answered with.

    Attributes:
        status: The HTTP status: 400 if the request is wrong, 401 and 403 if a key is missing or wrong. None for an
            error that came in the middle of a stream.
        field: The part of the body that is wrong, such as ``steering_vectors.post_mlp.3``; None if it is not known.
    """

    def __init__(self, message: str, *, status: int | None, field: str | None) -> None:
        super().__init__(f"{message} (HTTP {status})" if status else message)
        self.status = status
        self.field = field


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the answers to a prompt.

    Attributes:
        index: Its place; with several prompts, those of the first prompt come first.
        text: The generated text.
        finish_reason: ``stop``, ``length``, ...; None in a chunk of a stream that goes on.
        raw: The choice as the server sent it.
    """

    index: int
    text: str
    finish_reason: str | None
    raw: dict[str, Any]

    @property
    def hidden_state(self) -> Array | None:
        """The state that the last token was sampled from, ``[hidden]``, if ``return_hidden_states`` asked for it.

        Its type is float32 or float16; ``return_hidden_states="base64"`` is sent faster than a list.
        """
        return hidden_state(self.raw.get("hidden_states"))

    @property
    def steering_trace(self) -> dict[str, Any] | None:
        """The trace of this answer, or chunk, as the server sent it; None unless ``return_steering_trace`` asked."""
        found: dict[str, Any] | None = self.raw.get("steering_trace")
        return None if found is None else SteeringTrace(found)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a chunk of one that is streamed.

    Attributes:
        id: The server's name for the request.
        model: Name of the model that answered.
        choices: Empty in the last chunk of a stream that captured.
        captures: Results of the consumers, for each prompt; None for a prompt without capture.
        raw: The whole answer as the server sent it.
    """

    id: str
    model: str
    choices: tuple[Choice, ...]
    captures: tuple[Captures | None, ...]
    raw: dict[str, Any]

    @property
    def text(self) -> str:
        """Text of the first choice; empty if there is none."""
        return self.choices[0].text if self.choices else ""

    @property
    def capture_results(self) -> Captures:
        """Results of the consumers for the one prompt.

        Raises:
            ValueError: If there were several prompts, or none that captured.
        """
        if len(self.captures) != 1 or self.captures[0] is None:
            raise ValueError(f"expected the results of one prompt, there are {len(self.captures)}; see `captures`")
        return self.captures[0]


def read_answer(document: Mapping[str, Any]) -> Answer:
    """Read an answer, or a chunk, of /v1/completions or /v1/chat/completions.

    Raises:
        msgspec.ValidationError: If it is none.
    """
    return Answer(
        id=msgspec.convert(document.get("id"), str),
        model=msgspec.convert(document.get("model"), str),
        choices=tuple(_choice(choice) for choice in msgspec.convert(document.get("choices"), list[dict[str, Any]])),
        captures=_captures(document.get("capture_results")),
        raw=dict(document),
    )


def _choice(document: dict[str, Any]) -> Choice:
    message = document.get("message") or document.get("delta") or {}
    return Choice(
        index=document["index"],
        text=document.get("text") or message.get("content") or "",
        finish_reason=document.get("finish_reason"),
        raw=document,
    )


def _captures(document: Any) -> tuple[Captures | None, ...]:
    if document is None:
        return ()
    listed = document if isinstance(document, list) else [document]
    return tuple(msgspec.convert(listed, list[Captures | None]))


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of captured activations.

    Attributes:
        name: Its name in requests.
        consumer: Name of the kind of consumer.
        location: ``worker`` or ``driver``.
        reads_client_spec: Whether requests can name it.
        overload: Policy for rows that come faster than the consumer reads them: ``block``, ``drop`` or ``spill``.
        offers: Names that requests may choose from, by the field that names them.
    """

    name: str
    consumer: str
    location: str
    reads_client_spec: bool
    overload: str
    offers: dict[str, list[str]] = {}


class Capturable(msgspec.Struct, frozen=True, kw_only=True):
    """The sites that can be captured, and the consumers.

    Attributes:
        consumers: As the operator configured them.
        sites: Layers of each hook point; the final norm has none.
    """

    consumers: tuple[Consumer, ...]
    sites: dict[str, list[int]]


def read_status(document: Mapping[str, Any]) -> SteeringStatus:
    """Read the answer of /v1/steering.

    Raises:
        msgspec.ValidationError: If it is none.
    """
    return msgspec.convert({**document, "shared": document.get("global")}, SteeringStatus)
