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

from headgate.capture.errors import RequestError

Fields = dict[str, Any]

_LONG_LIST = re.compile(rb"\[[-+0-9eE., \t\r\n]{256,}\]")
_PAUSE_S = 20e-6
"""Long enough for the event loop's thread to wake up."""


def take_json(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
    """The body without the fields called `names`, and those; long lists of numbers in them become float64 arrays.

    A body that is not what it should be comes back whole, for the server to say so.
    """
    short, lists = _lift_lists(body)
    try:
        parts = msgspec.json.decode(short, type=dict[str, msgspec.Raw])
        fields = {name: _lower(msgspec.json.decode(parts.pop(name)), lists) for name in names if name in parts}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body, {}
    if not fields:
        return body, {}
    rest = b",".join([b"%s:%s" % (msgspec.json.encode(name), bytes(raw)) for name, raw in parts.items()])
    return lists.restore(b"{%s}" % rest), fields


def read_json(body: bytes) -> Any:
    """A JSON value; long lists of numbers in it become float64 arrays.

    Raises:
        msgspec.DecodeError: Or what else ``msgspec.json.decode`` raises.
    """
    short, lists = _lift_lists(body)
    try:
        return _lower(msgspec.json.decode(short), lists)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(body)  # says where it is wrong


def take_msgpack(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
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


class _Lists:
    """Lists that were lifted out of a text, by the mark that stands for each: a string that no client can guess."""

    def __init__(self) -> None:
        self._prefix = f"headgate-{secrets.token_hex(16)}-"
        self._marks = re.compile(b'"%s([0-9]+)"' % self._prefix.encode())
        self._found: list[bytes] = []

    def lift(self, text: bytes) -> bytes:
        """The mark for a list."""
        self._found.append(text)
        return b'"%s%d"' % (self._prefix.encode(), len(self._found) - 1)

    def restore(self, text: bytes) -> bytes:
        """The text with every list in its place again."""
        return self._marks.sub(lambda mark: self._found[int(mark[1])], text) if self._found else text

    def read(self, value: str) -> Any:
        """The array for a mark; other strings as they are."""
        if not value.startswith(self._prefix):
            return value
        numbers = msgspec.json.decode(self._found[int(value.removeprefix(self._prefix))], type=list[float])
        array = np.array(numbers, np.float64)
        time.sleep(_PAUSE_S)
        return array


def _lift_lists(body: bytes) -> tuple[bytes, _Lists]:
    """`body` with a mark in place of each long list of numbers that stands outside of strings."""
    lists, pieces, start, position = _Lists(), [], 0, 0
    quote, bracket = body.find(b'"'), body.find(b"[")
    while bracket >= 0:
        if 0 <= quote < bracket:
            position = _end_of_string(body, quote)
        elif found := _LONG_LIST.match(body, bracket):
            pieces += [body[start:bracket], lists.lift(found[0])]
            start = position = found.end()
            time.sleep(_PAUSE_S)
        else:
            position = bracket + 1
        if quote < position:
            quote = body.find(b'"', position)
            quote = len(body) if quote < 0 else quote
        if bracket < position:
            bracket = body.find(b"[", position)
    return b"".join([*pieces, body[start:]]), lists


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


def _lower(value: Any, lists: _Lists) -> Any:
    if isinstance(value, str):
        return lists.read(value)
    if isinstance(value, Mapping):
        return {key: _lower(inner, lists) for key, inner in value.items()}
    return [_lower(inner, lists) for inner in value] if isinstance(value, list) else value


Take = Callable[[bytes, Collection[str]], tuple[bytes, Fields]]

TAKE: Mapping[str, Take] = {
    "application/json": take_json,
    "application/msgpack": take_msgpack,
    "application/x-msgpack": take_msgpack,
}
"""By content type."""
