"""Messages between a stream and its reader, and the handshake that begins a connection.

Texts are JSON, each after its length and before a code that proves the shared token: 4 bytes, text, 32 bytes. First the
stream sends a `Greeting`, the reader a `Hello`, and the stream a `Welcome`. Then the stream sends batches, each after
`HEADER`, its number and its length, and the reader the number up to which it has taken them, as `ACKNOWLEDGED`.
Nonces of both sides are in what codes are made of, so a connection that was listened to cannot be repeated.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from typing import TypeVar

import msgspec
import numpy as np

from headgate.capture.schema.errors import HeadgateError


class StreamError(HeadgateError, RuntimeError):
    """The rows of a stream cannot be read on; the message says why, and what to do."""


class StreamRefusedError(StreamError):
    """The other side does not let this reader in, or is no stream: a wrong token, another reader, another version."""


class StreamGapError(StreamError):
    """Batches that come next for this reader are gone: the server was started anew, or gave them up."""


FORMAT, VERSION = "headgate-stream", 1
HEADER = struct.Struct(">QQ")
ACKNOWLEDGED = struct.Struct(">Q")
END = (1 << 64) - 1
"""In place of a batch's number: the stream has ended."""

HANDSHAKE_S = 10.0
"""Seconds in which the other side must have done its part of the handshake."""
FIRST_BYTES_S = 1.0
"""Seconds in which a stream must have had the first byte of a reader."""

_LENGTH = struct.Struct(">I")
_CODE_BYTES = 32
_FOREIGN = "the other side does not speak the protocol of headgate's streams"
_MAX_TEXT = 1 << 16


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """The first word of a stream."""

    nonce: str
    needs_token: bool
    format: str = FORMAT
    version: int = VERSION


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's answer.

    Attributes:
        reader: Random; the same when it comes back.
        nonce: Random, of this connection.
        stream: The stream whose batches it has had; None of a new reader.
        next: Number of the first batch that it has not had.
        version: Of the protocol.
    """

    reader: str
    nonce: str
    stream: str | None = None
    next: int = 0
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The stream's answer.

    Attributes:
        refusal: The reason why the reader is not let in; None if it is.
        is_busy: Whether that is because of another reader, which may leave.
        is_gap: Whether that is because batches are gone.
        stream: Random; of one run of the server.
        first: Number of the batch that comes first.
        max_bytes: Of batches that are not acknowledged.
        model: Name of the model.
        dtype: ``bfloat16``, ``float16`` or ``float32``: of every row.
        hidden_size: Width of a row.
    """

    refusal: str | None = None
    is_busy: bool = False
    is_gap: bool = False
    stream: str = ""
    first: int = 0
    max_bytes: int = 0
    model: str = ""
    dtype: str = ""
    hidden_size: int = 0


Text = TypeVar("Text", Greeting, Hello, Welcome)


def send_text(connection: socket.socket, text: Greeting | Hello | Welcome, token: bytes | None, salt: str) -> None:
    """Send a text, with the code that proves the token; without a token, a code of zeros."""
    content = msgspec.json.encode(text)
    connection.sendall(_LENGTH.pack(len(content)) + content + _code(content, token, salt))


def receive_text(connection: socket.socket, kind: type[Text], token: bytes | None, salt: str, deadline: float) -> Text:
    """Receive a text.

    Args:
        connection: From whom.
        kind: What is expected.
        token: Whose code must be there; None where nothing needs to be proven.
        salt: The nonces that the sender had to use.
        deadline: On the monotonic clock.

    Raises:
        StreamRefusedError: If it is something else, or the code is wrong.
        OSError: If the connection breaks, or time has run out.
    """
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size, deadline))
    if length > _MAX_TEXT:
        raise StreamRefusedError(_FOREIGN)
    content = bytes(receive_bytes(connection, length, deadline))
    code = bytes(receive_bytes(connection, _CODE_BYTES, deadline))
    if token is not None and not hmac.compare_digest(code, _code(content, token, salt)):
        raise StreamRefusedError("the token is wrong: both sides need the same")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise StreamRefusedError(f"{_FOREIGN}: {error}") from error


def _code(content: bytes, token: bytes | None, salt: str) -> bytes:
    if token is None:
        return bytes(_CODE_BYTES)
    return hmac.new(token, salt.encode() + b"\0" + content, hashlib.sha256).digest()


def receive_bytes(connection: socket.socket, count: int, deadline: float | None = None) -> memoryview:
    """Receive so many bytes; without a deadline, wait for as long as the connection holds.

    Raises:
        OSError: If the connection breaks (`ConnectionResetError` also where the other side has closed it), or at the
            deadline (`TimeoutError`).
    """
    view, done = np.empty(count, np.uint8).data, 0  # a bytearray would be filled with zeros first
    while done < count:
        connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        received = connection.recv_into(view[done:])
        if not received:
            raise ConnectionResetError("the other side has closed the connection")
        done += received
    return view


def keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute when the other machine of an idle connection is gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
