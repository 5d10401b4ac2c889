"""Takes the fields of parts (steering's vectors) out of long bodies, without making a Python object of each number.

Runs on threads beside the event loop, and pauses between lists: a thread that holds Python's lock holds up the loop
just the same.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from headgate.capture.schema.errors import RequestError

Fields = dict[str, Any]

_LONG_LIST = re.compile(rb"\[[-+0-9eE., \t\r\n]{256,}\]")
_LONG_TEXT = 4096
_MARK = re.compile(rb'"headgate-([0-9a-f]{32})-([0-9]+)"')
_PAUSE_S = 20e-6
"""Long enough for the event loop's thread to wake up."""


def extract_json(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
    """The body without the fields called `names`, and those; long lists of numbers in them become float64 arrays.

    Long lists and long strings are taken out first, so that what JSON is parsed of is short, and no number and no
    character of them is read twice.

    A body that is not what it should be comes back whole, for the server to say so.
    """
    short, lifted = _lift(body)
    try:
        parts = msgspec.json.decode(short, type=dict[str, msgspec.Raw])
        fields = {name: _lower(msgspec.json.decode(parts.pop(name)), lifted) for name in names if name in parts}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, {}
    if not fields:
        return body, {}
    rest = b",".join([b"%s:%s" % (msgspec.json.encode(name), bytes(raw)) for name, raw in parts.items()])
    return lifted.restore(b"{%s}" % rest), fields


def read_json(body: bytes) -> Any:
    """A JSON value; long lists of numbers in it become float64 arrays.

    Raises:
        msgspec.DecodeError: Or what else ``msgspec.json.decode`` raises.
    """
    short, lifted = _lift(body)
    try:
        return _lower(msgspec.json.decode(short), lifted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body)  # says where it is wrong


def extract_msgpack(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
    """The rest of a msgpack body as JSON, and the fields called `names`, whose vectors may be raw bytes.

    Raises:
        RequestError: If it is no msgpack object, or holds bytes anywhere else.
    """
    try:
        parts = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])
        fields = {name: msgspec.msgpack.decode(parts.pop(name)) for name in names if name in parts}
        rest = {name: msgspec.msgpack.decode(raw) for name, raw in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise RequestError("body", f"is not a msgpack object: {error}") from None
    for name, value in rest.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(name[:200], f"only JSON values can be given here: {error}") from None
    return json.dumps(rest).encode(), fields


class _Lifted:
    """Values that were lifted out of a text, by the mark that stands for each: a string that no client can guess."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._token = secrets.token_hex(16).encode()
        self._prefix = f"headgate-{self._token.decode()}-"
        self._found: list[memoryview] = []

    def lift(self, start: int, end: int) -> bytes:
        """The mark for a list or a string of the body."""
        self._found.append(self._body[start:end])
        return b'"%s%d"' % (self._prefix.encode(), len(self._found) - 1)

    def restore(self, text: bytes) -> bytes:
        """The text with every value in its place again."""
        return _MARK.sub(self._behind, text) if self._found else text

    def _behind(self, mark: re.Match[bytes]) -> bytes:
        return bytes(self._found[int(mark[2])]) if mark[1] == self._token else mark[0]

    def read(self, value: str) -> Any:
        """The array or the string for a mark; other strings as they are."""
        if not value.startswith(self._prefix):
            return value
        found = self._found[int(value.removeprefix(self._prefix))]
        if found[0] == ord('"'):
            return str(found[1:-1], "utf-8")
        numbers = msgspec.json.decode(found, type=list[float])
        array = np.array(numbers, np.float64)
        time.sleep(_PAUSE_S)
        return array


def _lift(body: bytes) -> tuple[bytes, _Lifted]:
    """`body` with a mark in place of each long list of numbers outside of strings, and of each long plain string."""
    lifted, pieces, start, position = _Lifted(body), [], 0, 0
    quote, bracket = body.find(b'"'), body.find(b"[")
    while quote >= 0 or bracket >= 0:
        if quote >= 0 and not 0 <= bracket < quote:
            position = _end_of_string(body, quote)
            if _is_long_text(body, quote, position):
                pieces += [body[start:quote], lifted.lift(quote, position)]
                start = position
        elif found := _LONG_LIST.match(body, bracket):
            pieces += [body[start:bracket], lifted.lift(*found.span())]
            start = position = found.end()
            time.sleep(_PAUSE_S)
        else:
            position = bracket + 1
        if 0 <= quote < position:
            quote = body.find(b'"', position)
        if 0 <= bracket < position:
            bracket = body.find(b"[", position)
    return b"".join([*pieces, body[start:]]), lifted


def _is_long_text(body: bytes, start: int, end: int) -> bool:
    """Whether a string is long, stands for itself (no escapes) and is no key."""
    return (
        end - start > _LONG_TEXT
        and body.find(b"\\", start, end) < 0
        and not body[end : end + 64].lstrip(b" \t\r\n").startswith(b":")
        and body.endswith(b'"', start, end)
    )


def _end_of_string(body: bytes, start: int) -> int:
    """Behind the string that begins at `start`; the end of the body if it does not end."""
    position = start + 1
    while (end := body.find(b'"', position)) >= 0:
        before = end
        while body[before - 1] == ord("\\"):
            before -= 1
        if (end - before) % 2 == 0:
            return end + 1
        position = end + 1
    return len(body)


def _lower(value: Any, lifted: _Lifted) -> Any:
    if isinstance(value, str):
        return lifted.read(value)
    if isinstance(value, Mapping):
        return {key: _lower(inner, lifted) for key, inner in value.items()}
    return [_lower(inner, lifted) for inner in value] if isinstance(value, list) else value


FieldExtractor = Callable[[bytes, Collection[str]], tuple[bytes, Fields]]

EXTRACT: Mapping[str, FieldExtractor] = {
    "application/json": extract_json,
    "application/msgpack": extract_msgpack,
    "application/x-msgpack": extract_msgpack,
}
"""By content type."""
