"""Takes the fields of parts (steering's vectors) out of long JSON bodies, without making an object of each number.

Runs on threads beside the event loop, and pauses between lists: a thread that holds the GIL holds up the loop
just the same. So the work is bounded whatever a body holds: one with more in it than vectors need is left to the
server, which reads it as it reads any other.

Bodies of type msgpack may hold vectors as raw bytes; they are split into the fields of parts, and the rest as JSON. A
few bytes of msgpack can stand for a hundred times as much memory, so the values are counted before any is made.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn, TypeVar

import msgspec
import numpy as np

from headgate.capture.engine.server.loop_threads import PAUSE_S
from headgate.capture.schema.errors import RequestError

Fields = dict[str, object]

MAX_TEXT = 16 << 20
"""Bytes of one string, at most: several times the vectors of all layers of the largest models."""
_MAX_TOKENS = 8192
"""Strings and lists of a body that are looked at: a few for each site, and a conversation's."""
_MAX_SHORT = 256 << 10
"""Bytes of a body that are neither long strings nor long lists."""
_MAX_NUMBERS = 1 << 15
"""Numbers of one list: more than any model is wide."""
_LONG_LIST = re.compile(rb"\[[-+0-9eE., \t\r\n]{256,1048576}\]")
_LONG_TEXT = 4096
_MAX_BACKSLASHES = 64
"""Most consecutive backslashes before a quote."""
_WINDOW = 4 << 20
"""Bytes that are searched without a pause."""
_LONG_COPY = 1 << 20
"""Bytes that are copied without one."""
_MARK = re.compile(rb'"headgate-([0-9a-f]{32})-([0-9]+)"')
_PAUSE_BYTES = 16 << 10
"""Bytes of lists between two pauses: 0.2 ms of work."""
_LONG_WORK = 64 << 10
"""Bytes after which a pause is as much longer: by then, the loop's thread sleeps deeply, and misses short ones."""


class _TooMuchError(Exception):
    """There is more in a body than is looked at."""


def extract_json(body: bytes, names: Collection[str]) -> tuple[bytes, Fields]:
    """The body without the fields called `names`, and those; long lists of numbers in them become float64 arrays.

    Long lists and long strings are taken out first, so that what JSON is parsed of is short, and no number and no
    character of them is read twice.

    A body that is not what it should be, or holds too much beside its vectors, comes back whole: the server reads it,
    or says what is wrong.
    """
    try:
        short, lifted = _lift(body)
        parts = msgspec.json.decode(short, type=dict[str, msgspec.Raw])
        fields = {name: _lower(msgspec.json.decode(parts.pop(name)), lifted) for name in names if name in parts}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _TooMuchError):
        return body, {}
    if not fields:
        return body, {}
    rest = b",".join([b"%s:%s" % (msgspec.json.encode(name), bytes(raw)) for name, raw in parts.items()])
    return lifted.restore(b"{%s}" % rest), fields


def read_json(body: bytes) -> object:
    """A JSON value; long lists of numbers in it become float64 arrays.

    Raises:
        RequestError: If it holds too much beside vectors.
        msgspec.DecodeError: Or what else ``msgspec.json.decode`` raises.
    """
    try:
        short, lifted = _lift(body)
        return _lower(msgspec.json.decode(short), lifted)
    except _TooMuchError:
        limits = f"at most {_MAX_TOKENS} strings and lists, and {_MAX_SHORT} bytes that are neither long ones"
        raise RequestError("body", f"holds too much beside vectors: {limits}, are read") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _say_where(body, error)


def read_short_json(body: bytes) -> object:
    """A JSON value of a body that is read at once; raises as `read_json`, and names a field that is no JSON number."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        _refuse_constants(body)
        raise


def _refuse_constants(body: bytes) -> None:
    """Name the field of a body that would be JSON without NaN and infinities, as Python's own encoder writes them.

    Raises:
        RequestError: If there is one.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return
    pending: list[tuple[str, object]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(path or "body", f"expected a finite number that JSON can write, got {value}")
        if isinstance(value, dict):
            pending += [(f"{path}.{key}" if path else key, inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            pending += [(f"{path}[{index}]", inner) for index, inner in reversed([*enumerate(value)])]


def _say_where(body: bytes, error: Exception) -> NoReturn:
    """Raise the error of the whole body, which says where it is wrong; that of a long one does not say."""
    if len(body) <= _MAX_SHORT:
        read_short_json(body)
    if isinstance(error, msgspec.DecodeError):
        raise msgspec.DecodeError(str(error).partition(" (byte")[0]) from None
    raise error


class _Lifted:
    """Values that were lifted out of a text, by the mark that stands for each: a string that no client can guess."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._view = memoryview(body)
        self._token = secrets.token_hex(16).encode()
        self._prefix = f"headgate-{self._token.decode()}-"
        self._found: list[memoryview] = []
        self._pieces: list[bytes] = []
        self._end = self._num_short = self._num_unpaused = 0

    def lift(self, start: int, end: int) -> None:
        """Put a mark in place of a list or a string of the body, after the ones lifted before.

        Raises:
            _TooMuchError: If what lies between them is too long.
        """
        mark = b'"%s%d"' % (self._prefix.encode(), len(self._found))
        self._pieces += [self._between(start), mark]
        self._found.append(self._view[start:end])
        self._end = end

    def rest(self) -> bytes:
        """The text with its marks.

        Raises:
            _TooMuchError: As `lift`.
        """
        return b"".join([*self._pieces, self._between(len(self._body))])

    def _between(self, end: int) -> bytes:
        self._num_short += end - self._end
        if self._num_short > _MAX_SHORT:
            raise _TooMuchError
        return self._body[self._end : end]

    def restore(self, text: bytes) -> bytes:
        """The text with every value in its place again."""
        pieces, start = [], 0
        for mark in _MARK.finditer(text):
            if mark[1] == self._token:
                pieces.append(text[start : mark.start()])
                pieces += self._copies(self._found[int(mark[2])])
                start = mark.end()
        return b"".join([*pieces, text[start:]])

    def _copies(self, found: memoryview) -> Iterator[bytes]:
        for start in range(0, len(found), _LONG_COPY):
            if start:
                time.sleep(PAUSE_S)
            yield bytes(found[start : start + _LONG_COPY])

    def read(self, value: str) -> object:
        """The array or the string for a mark; other strings as they are.

        Raises:
            _TooMuchError: If a list is longer than any vector.
        """
        if not value.startswith(self._prefix):
            return value
        found = self._found[int(value.removeprefix(self._prefix))]
        if found[0] == ord('"'):
            return str(found[1:-1], "utf-8")
        if len(found) > 2 * _MAX_NUMBERS and bytes(found).count(b",") >= _MAX_NUMBERS:
            raise _TooMuchError
        numbers = msgspec.json.decode(found, type=list[float])
        array = np.array(numbers, np.float64)
        self.pause(len(found))
        return array

    def pause(self, num_bytes: int) -> None:
        """Let the event loop go on, if so many bytes more than at the last pause are enough for it."""
        self._num_unpaused += num_bytes
        if self._num_unpaused >= _PAUSE_BYTES:
            is_long = self._num_unpaused >= _LONG_WORK
            time.sleep(PAUSE_S * (2 * self._num_unpaused // _PAUSE_BYTES if is_long else 1))
            self._num_unpaused = 0


def _lift(body: bytes) -> tuple[bytes, _Lifted]:
    """`body` with a mark in place of each long list of numbers outside of strings, and of each long plain string.

    Raises:
        _TooMuchError: If there is more in it than is looked at.
    """
    lifted, position = _Lifted(body), 0
    quote, bracket = _find(body, b'"', 0), _find(body, b"[", 0)
    budget = iter(range(_MAX_TOKENS))
    for _ in budget:
        if quote == bracket:  # neither
            return lifted.rest(), lifted
        if quote < bracket:
            position = _end_of_string(body, quote, budget)
            if _is_long_text(body, quote, position):
                lifted.lift(quote, position)
        elif found := _LONG_LIST.match(body, bracket):
            position = found.end()
            lifted.lift(bracket, position)
            lifted.pause(position - bracket)
        else:
            position = bracket + 1
        if quote < position:
            quote = _find(body, b'"', position)
        if bracket < position:
            bracket = _find(body, b"[", position)
    raise _TooMuchError


def _find(body: bytes, what: bytes, start: int) -> int:
    """The place of a byte; the length of the body if it is not there."""
    for window in range(start, len(body), _WINDOW):
        if window > start:
            time.sleep(PAUSE_S)
        if (found := body.find(what, window, window + _WINDOW)) >= 0:
            return found
    return len(body)


def _is_long_text(body: bytes, start: int, end: int) -> bool:
    """Whether a string is long, stands for itself (no escapes) and is no key."""
    return (
        end - start > _LONG_TEXT
        and body.find(b"\\", start, end) < 0
        and not body[end : end + 64].lstrip(b" \t\r\n").startswith(b":")
        and body.endswith(b'"', start, end)
    )


def _end_of_string(body: bytes, start: int, budget: Iterator[int]) -> int:
    """The position after the string that begins at `start`; the end of the body if it does not end.

    Raises:
        _TooMuchError: If it is too long, or `budget` has no turn left for a quote in it.
    """
    position = start + 1
    for _ in budget:
        end = body.find(b'"', position, start + MAX_TEXT)
        if end < 0 and len(body) <= start + MAX_TEXT:
            return len(body)
        if end < 0:
            break
        if not _is_escaped(body, end):
            return end + 1
        position = end + 1
    raise _TooMuchError


def _is_escaped(body: bytes, quote: int) -> bool:
    if body[quote - 1] != ord("\\"):
        return False
    before = body[max(quote - _MAX_BACKSLASHES, 0) : quote]
    count = len(before) - len(before.rstrip(b"\\"))
    if count == _MAX_BACKSLASHES:
        raise _TooMuchError
    return count % 2 == 1


def _lower(value: object, lifted: _Lifted) -> object:
    if isinstance(value, str):
        return lifted.read(value)
    if isinstance(value, Mapping):
        return {key: _lower(inner, lifted) for key, inner in value.items()}
    return [_lower(inner, lifted) for inner in value] if isinstance(value, list) else value


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
