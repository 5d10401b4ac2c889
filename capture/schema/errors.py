"""Every exception headgate raises on purpose.

::

    HeadgateError
    ├── ConfigError          what the operator configured cannot be served (ValueError)
    ├── RequestError         what one request asked for cannot be served; HTTP 400 (ValueError)
    ├── ForbiddenError       a client's key does not allow what it asked for; HTTP 403 (PermissionError)
    │   ├── UnknownKeyError  it has shown a key that is not known; HTTP 401
    │   └── QuotaError       its key has used up what it may; HTTP 429
    │       └── UncountedError  what it has used cannot be counted now; HTTP 503
    ├── OverloadedError      too many others want the same; HTTP 503 with Retry-After (RuntimeError)
    ├── UnsupportedError     this vLLM, this model or this engine setting cannot be served (RuntimeError)
    ├── EngineStateError     engine cores of one server hold different state (RuntimeError)
    ├── SelfTestError        a site did not respond at start-up: refuse to serve (RuntimeError)
    ├── ConsumerError        a consumer failed; goes into the request's result, never into the engine
    └── CaptureFileError     a file of captured rows is partial, damaged or not ours (ValueError)
        └── NewerFormatError a newer headgate wrote it
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, ClassVar

MAX_FIELD = 300
"""Characters of a field's path in an error: clients may choose the names in it."""


def shown(value: object) -> str:
    """`value` for an error message, cut short without walking through all of it."""
    return reprlib.repr(value)


def finite(value: object) -> float | None:
    """Return a number as a float; None if it is none, not finite, or too large, as a whole number can be."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _named(field: str) -> str:
    """A field's path as an answer can carry it: not longer than `MAX_FIELD`."""
    return _encodable(field if len(field) <= MAX_FIELD else f"{field[:MAX_FIELD]}...")


def _encodable(text: str) -> str:
    r"""`text` with halves of surrogate pairs, which JSON can bring and UTF-8 cannot hold, as ``\udXXX``."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def check_keys(document: Mapping[Any, Any], allowed: Collection[str], where: str, what: str) -> None:
    """Check that what a request wrote has no other keys.

    Args:
        document: An object of a request, or its query.
        allowed: The keys that there are.
        where: Path of the object; empty for that of a whole body.
        what: The kind of object, with its article, for the error.

    Raises:
        RequestError: Naming the first key that it should not have.
    """
    for key in document:
        if key not in allowed:
            name = key if isinstance(key, str) else shown(key)
            path = f"{where}.{name}" if where else name
            raise RequestError(path, f"unknown key; {what} has {', '.join(allowed) or 'none'}")


def read_flag(value: object, where: str) -> bool:
    """Return a value that a request wrote if it is true or false.

    Raises:
        RequestError: If it is something else.
    """
    if not isinstance(value, bool):
        raise RequestError(where, f"expected true or false, got {shown(value)}")
    return value


class HeadgateError(Exception):
    """Base of all errors of this package."""


class ConfigError(HeadgateError, ValueError):
    """The operator's configuration is wrong; the message names the field and what it accepts."""


class RequestError(HeadgateError, ValueError):
    """A request's own fields are wrong.

    Attributes:
        field: Path of the offending field as the client wrote it, for example
            ``capture.filesystem.hooks.post_mlp``; cut short if it is very long.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = _named(field)
        super().__init__(f"{self.field}: {_encodable(message)}")


class ForbiddenError(HeadgateError, PermissionError):
    """A client may not do this; the message says which key it lacks, never anything about the keys themselves.

    Attributes:
        field: Path of the field that its key does not allow; None if it concerns all of the request.
        status: Of the HTTP answer.
    """

    status: ClassVar[int] = 403

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = None if field is None else _named(field)
        text = _encodable(message)
        super().__init__(text if self.field is None else f"{self.field}: {text}")


class UnknownKeyError(ForbiddenError):
    """A client has shown a key that is not known, or not any more, beside what would belong to it."""

    status = 401


class QuotaError(ForbiddenError):
    """A client's key has used up a quota; the message says how much was used, and when it may be tried again.

    Attributes:
        retry_after_s: Seconds until the quota is whole again; None if that depends on requests that run.
    """

    status = 429

    def __init__(self, message: str, field: str | None, retry_after_s: int | None) -> None:
        super().__init__(message, field)
        self.retry_after_s = retry_after_s


class UncountedError(QuotaError):
    """The use of a key cannot be counted now, since its file cannot be read or written; nothing was counted."""

    status = 503


class OverloadedError(HeadgateError, RuntimeError):
    """A request was sent away unserved, since too many others want the same; it may be sent again later."""


class UnsupportedError(HeadgateError, RuntimeError):
    """Something headgate needs is missing or works differently here; refused before serving."""


class EngineStateError(HeadgateError, RuntimeError):
    """Data-parallel engine cores no longer agree on what was registered or set; the message says what to do."""


class SelfTestError(HeadgateError, RuntimeError):
    """A configured site did not deliver its rows in the start-up self-test."""


class ConsumerError(HeadgateError, RuntimeError):
    """A consumer raised, hung or lost rows; reported in the request's `CaptureResult`."""


class CaptureFileError(HeadgateError, ValueError):
    """A file of captured rows cannot be read: partial, damaged, or of another format; the message names it."""


class NoCaptureError(CaptureFileError):
    """There is no such stored capture, or the client may not see it, which looks alike."""


class NewerFormatError(CaptureFileError):
    """A file was written by a newer headgate in a format that this one cannot read; the message has both versions."""
