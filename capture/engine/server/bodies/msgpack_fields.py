"""Bodies of type msgpack: the fields of parts, whose vectors may be raw bytes, and the rest as JSON.

A few bytes of msgpack can stand for a hundred times as much memory. So the values are counted before any is made.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TypeVar

import msgspec

from headgate.capture.engine.server.bodies.parsing import MAX_TEXT, Fields
from headgate.capture.schema.errors import RequestError

MAX_VALUES = 1 << 13
"""Values of a body, keys and those within others included: the bytes of a vector are one of them."""
MAX_REST = 1 << 20
"""Bytes of a body outside of the fields of parts."""

Value = TypeVar("Value")

_SCALAR = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5}
_SCALAR.update({0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18})
_SIZES = bytes(
    1 if kind < 0x80 or kind >= 0xE0 else 1 + (kind & 31) if 0xA0 <= kind < 0xC0 else _SCALAR.get(kind, 0)
    for kind in range(256)
)
"""Bytes of a value by its first one: numbers, short strings and extensions of fixed size; 0 for others."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of bytes, extensions and strings."""
_COUNTS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count of arrays and maps, and values of an item."""
_EXTENSIONS = range(0xC7, 0xCA)


def extract_msgpack(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
    """The rest of a msgpack body as JSON, and the fields called `names`.

    Raises:
        RequestError: If it is no msgpack object, holds bytes anywhere else, or more values than vectors need.
    """
    parts = _decode(body, dict[str, msgspec.Raw])
    fields: Fields = {name: _decode(parts.pop(name), object) for name in names if name in parts}
    num_rest = sum(len(memoryview(raw)) for raw in parts.values())
    if num_rest > MAX_REST:
        raise RequestError("body", f"holds {num_rest} bytes beside vectors, at most {MAX_REST} are read; send JSON")
    rest = []
    for name, raw in parts.items():
        try:
            rest.append(f"{json.dumps(name)}:{json.dumps(_decode(raw, object))}")
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(name, f"only JSON values can be given here: {error}") from None
    return f"{{{','.join(rest)}}}".encode(), fields


def read_msgpack(body: bytes) -> object:
    """A msgpack value.

    Raises:
        RequestError: If it is none, or holds more values than vectors need.
    """
    return _decode(body, object)


def _decode(body: bytes | msgspec.Raw, kind: type[Value]) -> Value:
    if isinstance(body, bytes):
        _check(body)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        # msgspec 0.18 raises a TypeError for a map as the key of another.
        raise RequestError("body", f"is not a msgpack object: {error}") from None


def _check(body: bytes) -> None:
    """Count the values of a body; what is malformed is left to the decoder.

    Raises:
        RequestError: If there are too many, or one is too long.
    """
    position, num_left, num_bytes = 0, 1, len(body)
    for _ in range(MAX_VALUES):
        if num_left == 0 or position >= num_bytes:
            return
        kind = body[position]
        size = _SIZES[kind]
        num_left -= 1
        if size:
            position += size
            continue
        size, num_inner = _measure(body, position, kind)
        position += size
        num_left += num_inner
        if num_left > MAX_VALUES:
            break
    if num_left:
        raise RequestError(
            "body", f"holds more than {MAX_VALUES} values; give vectors as bytes ('data'), or send the body as JSON"
        )


def _measure(body: bytes, position: int, kind: int) -> tuple[int, int]:
    """Bytes of the head of an array or map, or of all of a string or bytes; and the values within it."""
    if kind < 0x90:
        return 1, 2 * (kind & 15)
    if kind < 0xA0:
        return 1, kind & 15
    if kind in _COUNTS:
        width, each = _COUNTS[kind]
        return 1 + width, each * int.from_bytes(body[position + 1 : position + 1 + width], "big")
    width = _LENGTHS.get(kind, 0)
    length = int.from_bytes(body[position + 1 : position + 1 + width], "big")
    if length > MAX_TEXT:
        raise RequestError("body", f"holds a value of {length} bytes, at most {MAX_TEXT} are read")
    return 1 + width + length + (kind in _EXTENSIONS), 0
