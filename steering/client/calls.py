"""Every call of the client as a value: the request, and how its answer is read. No transport.

The synchronous and the asynchronous client send the same calls.

Vectors of every form that a field accepts are packed for a request body. Checks that need the model (the width, the
layers, the sites that can be steered) are left to the server.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import COLUMN_KEYS, HookPoint, parse_hook
from headgate.steering.client.answers import (
    Answer,
    ServerError,
    read_answer,
)
from headgate.steering.documents.gates import GATES, PREDECESSOR
from headgate.steering.documents.operations import REQUEST_FIELDS, has_sources
from headgate.steering.documents.request import (
    BASE,
    DECODE,
    DOCUMENT_FIELDS,
    MODULE_FIELDS,
    PREFILL,
)
from headgate.steering.documents.vectors import read_vector, split_scale
from headgate.steering.vectors.dtypes import Rows, StoredType, widen
from headgate.steering.vectors.phase_vectors import PhaseVectors

Packed = dict[str, Any]

LISTS = ("mask", "positions", "layers", *COLUMN_KEYS)
"""Keys of operations whose numbers are no vector."""


def pack(vectors: Any, field: str, *, as_text: bool) -> Packed:
    """Pack one tier of vectors, by hook point.

    Args:
        vectors: `PhaseVectors`, or ``{hook: {layer: vector}}`` with a vector as a list, an array, a tensor or
            ``{"vector": ..., "scale": number}``. A hook point that is packed already stays as it is.
        field: Its name, for errors.
        as_text: The bytes become base64, for a JSON body.

    Raises:
        RequestError: If it cannot be read; the message names the vector.
    """
    if isinstance(vectors, PhaseVectors):
        return vectors.packed(as_text=as_text)
    if not isinstance(vectors, Mapping):
        raise RequestError(field, f"expected PhaseVectors or an object of hook point to vectors, got {shown(vectors)}")
    return {name: _pack_hook(given, name, f"{field}.{name}", as_text) for name, given in vectors.items()}


def pack_arrays(value: Any, where: str, *, as_text: bool, key: str = "") -> Any:
    """Return a field of operations with its arrays and tensors packed, and all else as it is.

    Args:
        value: Operations, or clamps by hook point and layer, with vectors in any form.
        where: Its name, for errors.
        as_text: The bytes become base64, for a JSON body.
        key: Key of the value in the mapping around it; arrays of `LISTS` become lists.

    Raises:
        RequestError: If an array is no vector; the message names it.
    """
    if isinstance(value, Mapping):
        return {
            name: pack_arrays(inner, f"{where}.{name}", as_text=as_text, key=str(name)) for name, inner in value.items()
        }
    if isinstance(value, bytes | bytearray):
        return _travelling(value, as_text)
    if isinstance(value, list | tuple):
        is_row = bool(value) and isinstance(value[0], int | float)
        return (
            value
            if is_row
            else [pack_arrays(inner, f"{where}[{at}]", as_text=as_text, key=key) for at, inner in enumerate(value)]
        )
    if not hasattr(value, "tolist"):
        return value
    if key in LISTS or not getattr(value, "ndim", 0):
        return value.tolist()
    row, dtype = read_vector(value, _width(value, where), where)
    return {"dtype": dtype, "shape": [len(row)], "data": _travelling(row.tobytes(), as_text)}


def pack_gates(gates: Any, where: str, *, as_text: bool) -> Any:
    """Return gates with their arrays, tensors and `PhaseVectors` packed, and all else as it is.

    Args:
        gates: Gates of a request; what is no list of objects is left to the server.
        where: Name of the field, for errors.
        as_text: The bytes become base64, for a JSON body.

    Raises:
        RequestError: If vectors cannot be read; the message names them.
    """
    if not isinstance(gates, list | tuple):
        return gates
    packed = []
    for index, gate in enumerate(gates):
        then = gate.get("then") if isinstance(gate, Mapping) else None
        if isinstance(then, Mapping) and then.get("vectors") is not None:
            vectors = pack(then["vectors"], f"{where}[{index}].then.vectors", as_text=as_text)
            gate = {**gate, "then": {**then, "vectors": vectors}}
        packed.append(gate)
    return pack_arrays(packed, where, as_text=as_text)


def _pack_hook(given: Any, name: Any, where: str, as_text: bool) -> Packed:
    if isinstance(given, Mapping) and "data" in given:
        data = given["data"]
        return {**given, "data": _travelling(data, as_text) if isinstance(data, bytes | bytearray) else data}
    is_layered = isinstance(given, Mapping) and "vector" not in given
    if parse_hook(name, where) is HookPoint.FINAL_NORM and not is_layered:
        given = {-1: given}
    if not isinstance(given, Mapping) or not given:
        raise RequestError(where, f"expected a non-empty object of layer to vector, got {shown(given)}")
    if any(isinstance(vector, Mapping) and set(vector) & set(COLUMN_KEYS) for vector in given.values()):
        return {layer: _of_columns(vector, f"{where}.{layer}") for layer, vector in given.items()}
    rows, scales = [], []
    for layer, vector in given.items():
        inner = f"{where}.{layer}"
        vector, scale = split_scale(vector, inner) if isinstance(vector, Mapping) else (vector, 1.0)
        rows.append(read_vector(vector, _width(vector, inner), inner))
        scales.append(scale)
    data, dtype, width = _stack(rows, where)
    document: Packed = {
        "dtype": dtype,
        "shape": [len(rows), width],
        "layer_indices": list(given),
        "data": _travelling(data, as_text),
    }
    return {**document, "scales": scales} if any(scale != 1 for scale in scales) else document


def _of_columns(given: Any, where: str) -> Any:
    """Return a vector that may be of some columns alone, with its numbers as a list."""
    vector = given["vector"] if isinstance(given, Mapping) and "vector" in given else given
    row, dtype = read_vector(vector, _width(vector, where), where)
    numbers = widen(row, dtype).tolist()
    return {**given, "vector": numbers} if isinstance(given, Mapping) else numbers


def _width(vector: Any, where: str) -> int:
    try:
        return len(vector)
    except TypeError:
        raise RequestError(where, f"expected a list of numbers, an array or a tensor, got {shown(vector)}") from None


def _stack(rows: list[tuple[Rows, StoredType]], where: str) -> tuple[bytes, StoredType, int]:
    """Join the rows, in their own type if they share one, else in float32; return bytes, type and width."""
    widths = sorted({len(row) for row, _ in rows})
    if len(widths) != 1 or widths[0] == 0:
        raise RequestError(where, f"expected vectors of one width, got the widths {widths}")
    types = {dtype for _, dtype in rows}
    if len(types) == 1:
        return b"".join(row.tobytes() for row, _ in rows), types.pop(), widths[0]
    return b"".join(np.asarray(widen(row, dtype), "<f4").tobytes() for row, dtype in rows), "float32", widths[0]


def _travelling(data: bytes | bytearray, as_text: bool) -> str | bytes:
    return base64.b64encode(data).decode("ascii") if as_text else bytes(data)


T = TypeVar("T")

KEY_HEADER = "X-Headgate-Key"
MSGPACK = "application/msgpack"

_VECTORS = (BASE, PREFILL, DECODE, *MODULE_FIELDS)
_OPERATIONS = (*REQUEST_FIELDS.all, *DOCUMENT_FIELDS[len(MODULE_FIELDS) :], PREDECESSOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAccess:
    """The address of a server, and its keys.

    Attributes:
        url: Its address; a ``/v1`` at the end is allowed.
        api_key: The server's ``--api-key``.
        steering_key: One of its ``HEADGATE_STEERING_KEYS``.
        capture_key: One of its ``HEADGATE_CAPTURE_KEYS``.
        is_binary: Send bodies as msgpack, with vectors as raw bytes. The server needs ``VLLM_PLUGINS=headgate``.
    """

    url: str
    api_key: str | None = None
    steering_key: str | None = None
    capture_key: str | None = None
    is_binary: bool = False

    def target(self, path: str) -> str:
        """Return the whole address of a route."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    def encode(self, body: Mapping[str, Any]) -> tuple[bytes, str]:
        """Return a body as bytes, and their content type."""
        if self.is_binary:
            return msgspec.msgpack.encode(body), MSGPACK
        return msgspec.json.encode(body), "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteCall(Generic[T]):
    """A call of one route.

    Attributes:
        path: Below the server's address.
        body: The body of a POST; None for a GET.
        read: Makes the typed answer from the decoded one.
        key: The access key that is sent beside the API key, if any.
        is_stream: The answer is a stream of documents, which are not read any further.
    """

    path: str
    body: Mapping[str, Any] | None
    read: Callable[[Any], T]
    key: str | None = None
    is_stream: bool = False


def request(access: ServerAccess, call: RouteCall[T]) -> dict[str, Any]:
    """Return a call as keyword arguments of ``httpx.Client.build_request``."""
    headers = {"Accept": "application/json, text/event-stream"}
    if access.api_key is not None:
        headers["Authorization"] = f"Bearer {access.api_key}"
    if call.key is not None:
        headers[KEY_HEADER] = call.key
    if call.body is None:
        return {"method": "GET", "url": access.target(call.path), "headers": headers}
    content, headers["Content-Type"] = access.encode(call.body)
    return {"method": "POST", "url": access.target(call.path), "headers": headers, "content": content}


def answer(call: RouteCall[T], status: int, content: bytes) -> T:
    """Return the typed answer of a call.

    Raises:
        ServerError: If the server refused the call, or failed, or its answer is not what it should be.
    """
    if not 200 <= status < 300:
        raise _error(status, content)
    try:
        return call.read(json.loads(content))
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{call.path}: cannot read the answer: {error!r}", status=status, field=None) from error


class Lines:
    """Cuts the bytes of a stream into lines, at line feeds alone.

    ``iter_lines`` of httpx also cuts at characters such as U+2028 and U+0085, which stand unescaped in JSON.
    """

    def __init__(self) -> None:
        self._rest = b""

    def cut(self, piece: bytes) -> list[str]:
        """Return the lines that end in a piece; the last one of a stream ends with ``b"\\n"``."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line.decode() for line in lines]


def event_document(line: str) -> dict[str, Any] | None:
    """Return the document in one line of a stream; None for lines between documents, and for the end.

    Raises:
        ServerError: If it is an error.
    """
    name, _, text = line.partition(":")
    text = text.strip()
    if name != "data" or text in ("", "[DONE]"):
        return None
    document = json.loads(text)
    if "error" in document:
        raise _server_error(document["error"], None)
    return document  # type: ignore[no-any-return]


def _error(status: int, content: bytes) -> ServerError:
    try:
        document = json.loads(content)
        return _server_error(document.get("error", document), status)
    except (ValueError, AttributeError):
        return ServerError(content[:1000].decode("utf-8", "replace") or "no reason given", status=status, field=None)


def _server_error(error: Any, status: int | None) -> ServerError:
    if not isinstance(error, Mapping):
        return ServerError(str(error), status=status, field=None)
    field = error.get("param")
    text = error.get("message") or error.get("detail") or json.dumps(dict(error))
    return ServerError(str(text), status=status, field=field if isinstance(field, str) else None)


def packed_fields(fields: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return the fields of a body, with vectors packed wherever they are; fields that are None are left out.

    Raises:
        RequestError: If vectors cannot be read.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in _VECTORS:
        if name in given:
            given[name] = pack(given[name], name, as_text=as_text)
    for name in _OPERATIONS:
        if name in given:
            given[name] = pack_arrays(given[name], name, as_text=as_text)
    if GATES in given:
        given[GATES] = pack_gates(given[GATES], GATES, as_text=as_text)
    return given


def generation(
    access: ServerAccess, path: str, model: str, fields: Mapping[str, Any], *, stream: bool
) -> RouteCall[Answer]:
    """Return a call of /v1/completions or /v1/chat/completions."""
    body = {"model": model, **packed_fields(fields, as_text=not access.is_binary)}
    if stream:
        body["stream"] = True
    is_keyed = "capture" in body or has_sources(body)  # rows of earlier requests are the client's own
    return RouteCall(path=path, body=body, read=read_answer, key=access.capture_key if is_keyed else None)


def with_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation; a text is the user's first."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def reader(kind: type[T], key: str | None = None) -> Callable[[Any], T]:
    """Return what reads an answer, or the field `key` of one."""
    return lambda document: msgspec.convert(document if key is None else document[key], kind)


def nothing(document: Any) -> None:
    """Read an answer that says no more than that it is done."""
