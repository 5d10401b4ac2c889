"""Messages between a stream and its reader: the handshake that begins a connection, and batches of rows as Arrow.

Texts are JSON, each after its length and before a code that proves the shared token: 4 bytes, text, 32 bytes. First the
stream sends a `Greeting`, the reader a `Hello`, and the stream a `Welcome`. Then the stream sends batches, each after
`HEADER`, its number and its length, and the reader the number up to which it has taken them, as `ACKNOWLEDGED`.
Nonces of both sides are in what codes are made of, so a connection that was listened to cannot be repeated.

Each batch is a whole stream in Arrow's IPC format, with its schema, that any Arrow library reads. Columns:
``request_id`` and ``tag`` (text), ``sample`` (int32), ``position`` and ``token_id`` (int64), ``is_prompt`` (bool), and
one for each site, lists of as many values as a row has. Arrow has no bfloat16: its bits are uint16, as the
field's metadata ``dtype`` says. All rows of a batch are of one request.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.files.reading import read_secret
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.consumer import CapturedRequest, ModelInfo
from headgate.capture.schema.errors import ConfigError, HeadgateError, shown

TOKEN_VARIABLE = "HEADGATE_STREAM_TOKEN"  # noqa: S105  (the name of a variable)
MIN_TOKEN = 16
"""Characters of a token, at least."""
CONNECT_S = 10.0
BACKLOG = 128
"""Connections that wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stream is: a Unix socket, or a host and a port.

    Attributes:
        text: As it was given.
        path: Of the Unix socket; None of TCP.
        host: Name or number; empty of a Unix socket.
        port: 0 lets the machine choose one.
    """

    text: str
    path: str | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only users of this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False

    def listen(self) -> socket.socket:
        """A listening socket. That of a Unix socket is its owner's alone; one without a listener is replaced.

        Raises:
            OSError: If it is taken, or cannot be made.
        """
        if self.path is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        if _is_left_over(self.path):
            os.unlink(self.path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listening.fileno(), 0o600)  # before `bind`, which makes the file with this mode
            listening.bind(self.path)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening

    def connect(self) -> socket.socket:
        """A connected socket.

        Raises:
            OSError: If no process listens there.
        """
        if self.path is None:
            return socket.create_connection((self.host, self.port), CONNECT_S)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(CONNECT_S)
            connected.connect(self.path)
        except OSError:
            connected.close()
            raise
        return connected


def _is_left_over(path: str) -> bool:
    """Whether a Unix socket without a listener lies there."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probing:
        try:
            probing.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def parse_address(text: object) -> Address:
    """Read ``tcp://HOST:PORT`` or ``unix:///PATH``.

    Raises:
        ConfigError: If it is neither.
    """
    wanted = f"address: expected tcp://HOST:PORT or unix:///PATH, got {shown(text)}"
    if not isinstance(text, str):
        raise ConfigError(wanted)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{wanted}: {error}") from error
    if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
        return Address(text, path=parts.path)
    if parts.scheme == "tcp" and parts.hostname and port is not None and parts.path in ("", "/"):
        return Address(text, host=parts.hostname, port=port)
    raise ConfigError(wanted)


def read_token(file: str | None, *, is_reader: bool = False) -> bytes | None:
    """The token in a file, or in the environment if none is named; None if there is none.

    Args:
        file: Its path.
        is_reader: The token is shown to a server, whose user may own the file.

    Raises:
        ConfigError: If the file cannot be read, if others may read or change it, or the token is too short.
    """
    if file is None:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip().encode(), TOKEN_VARIABLE
        if not token:
            return None
    else:
        where = f"token_file {file}"
        token = read_secret(Path(file).expanduser(), "token_file", is_reader=is_reader).strip()
    if len(token) < MIN_TOKEN:
        raise ConfigError(f"{where}: the token has {len(token)} characters; expected at least {MIN_TOKEN}")
    return token


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
        dtype: ``bfloat16``, ``float16`` or ``float32``: of rows of the residual stream; others say so in each batch.
        hidden_size: Width of a row of the residual stream.
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


Bytes = npt.NDArray[np.uint8]
_FACTS = ("request_id", "tag", "sample", "position", "token_id", "is_prompt")
_NUMPY = {"bfloat16": "uint16", "float16": "float16", "float32": "float32", "int16": "int16"}
"""The type that the values of each dtype have in Arrow and numpy."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part that all rows of a request share.

    Attributes:
        request_id: The client's, or the front end's.
        tag: Its tag.
        sample: Which of its samples.
    """

    request_id: str
    tag: str
    sample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRows:
    """Rows of one request.

    Attributes:
        number: Of their batch.
        facts: Of the request.
        positions: int64 ``[rows]``.
        token_ids: int64 ``[rows]``.
        is_prefill: bool ``[rows]``.
        data: uint8 ``[rows, row_bytes]`` by site.
        dtypes: By site.
    """

    number: int
    facts: RequestFacts
    positions: Int64Array
    token_ids: Int64Array
    is_prefill: BoolArray
    data: Mapping[str, Bytes]
    dtypes: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.positions)

    def part(self, start: int, stop: int) -> RequestRows:
        """Rows ``start : stop``; nothing is copied."""
        rows = slice(start, stop)
        return replace(
            self,
            positions=self.positions[rows],
            token_ids=self.token_ids[rows],
            is_prefill=self.is_prefill[rows],
            data={site: values[rows] for site, values in self.data.items()},
        )


def encode(captured: CapturedRequest, model: ModelInfo, start: int, stop: int) -> memoryview:
    """Rows ``start : stop`` of a request as the bytes of a batch."""
    import pyarrow as pa
    import torch

    rows, count = slice(start, stop), stop - start
    request = captured.request
    name = request.client_request_id.encode("utf-8", "replace").decode()
    texts = {"request_id": name, "tag": str(request.spec.options["tag"])}
    zeros = pa.array(np.zeros(count, np.int32))
    columns: dict[str, Any] = {
        key: pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for key, text in texts.items()
    }
    columns["sample"] = pa.array(np.full(count, request.sample_index, np.int32))
    columns["position"] = pa.array(captured.positions[rows])
    columns["token_id"] = pa.array(captured.token_ids[rows])
    columns["is_prompt"] = pa.array(captured.is_prefill[rows])
    fields = [pa.field(key, column.type) for key, column in columns.items()]
    for site in captured.sites:
        bits = captured.rows[site][rows].contiguous().view(torch.uint8).numpy()
        dtype = model.shape(site).dtype
        values = bits.reshape(-1).view(_NUMPY[dtype])
        columns[site.name] = pa.FixedSizeListArray.from_arrays(pa.array(values), len(values) // count)
        metadata = {"dtype": dtype}
        if selected := request.spec.columns.get(site):
            metadata["columns"] = msgspec.json.encode(selected).decode()
        fields.append(pa.field(site.name, columns[site.name].type, metadata=metadata))
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(content: memoryview, number: int) -> RequestRows:
    """Read the bytes of a batch; rows are views of them.

    Raises:
        StreamError: If they are no batch of a stream.
    """
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            batch = stream.read_next_batch()
        batch.validate()
        columns = {name: batch.column(name) for name in _FACTS}
        dtypes = {field.name: _dtype_of(field) for field in batch.schema if field.name not in _FACTS}
        facts = {name: columns[name][0].as_py() for name in ("request_id", "tag", "sample")}
        return RequestRows(
            number=number,
            facts=msgspec.convert(facts, RequestFacts),
            positions=columns["position"].to_numpy(),
            token_ids=columns["token_id"].to_numpy(),
            is_prefill=columns["is_prompt"].to_numpy(zero_copy_only=False),
            data={name: _bits(batch.column(name), dtype) for name, dtype in dtypes.items()},
            dtypes=dtypes,
        )
    except (pa.ArrowException, msgspec.ValidationError, LookupError, ValueError) as error:
        raise StreamError(f"batch {number}: no rows of a stream: {error}") from error


def _dtype_of(field: Any) -> str:
    dtype = (field.metadata or {}).get(b"dtype", b"").decode()
    if dtype not in _NUMPY:
        raise ValueError(f"values of {dtype or 'an unknown dtype'} at {field.name}")
    return str(dtype)


def _bits(column: Any, dtype: str) -> Bytes:
    values = column.flatten().to_numpy()
    if values.dtype != _NUMPY[dtype]:
        raise ValueError(f"values of {values.dtype}")
    bits: Bytes = values.view(np.uint8).reshape(len(column), -1)
    return bits
