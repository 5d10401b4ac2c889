"""The reading side of a stream: batches of rows, each once, over connections that break."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.selection import parse_sites
from headgate.consumers.datasets.view import typed
from headgate.consumers.stream.consumer import HOW_TO_INSTALL
from headgate.consumers.stream.wire import (
    ACKNOWLEDGED,
    END,
    FORMAT,
    HANDSHAKE_S,
    HEADER,
    VERSION,
    Address,
    Bytes,
    Greeting,
    Hello,
    RequestFacts,
    RequestRows,
    StreamError,
    StreamGapError,
    StreamRefusedError,
    Welcome,
    decode,
    keep_alive,
    parse_address,
    read_token,
    receive_bytes,
    receive_text,
    send_text,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class StreamBatch:
    """Some rows, with all that is known of them. The memory is the batch's own: it may be written to.

    Attributes:
        dtypes: By site.
        data: uint8 ``[rows, row_bytes]`` by site.
        positions: int64 ``[rows]``: the absolute position of each row.
        token_ids: int64 ``[rows]``: the token whose forward gave each row.
        is_prefill: bool ``[rows]``: True where the row's token was part of the prompt.
        facts: ``[rows]``: request id, tag and sample of each row.
    """

    dtypes: Mapping[str, str]
    data: Mapping[str, Bytes]
    positions: Int64Array
    token_ids: Int64Array
    is_prefill: BoolArray
    facts: Sequence[RequestFacts]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def request_ids(self) -> list[str]:
        """``[rows]``: the id of each row's request."""
        return [facts.request_id for facts in self.facts]

    @property
    def tags(self) -> list[str]:
        """``[rows]``: the tag of each row's request."""
        return [facts.tag for facts in self.facts]

    def torch(self, site: str | None = None) -> Tensor:
        """``[rows, width]`` in the site's dtype; without a copy.

        Args:
            site: Its name; optional if there is only one.
        """
        import torch

        name = self._site(site)
        return torch.from_numpy(self.data[name]).view(getattr(torch, self.dtypes[name]))

    def numpy(self, site: str | None = None) -> npt.NDArray[Any]:
        """``[rows, hidden]``: float16 and float32 as they are, bfloat16 as float32, which holds it exactly."""
        name = self._site(site)
        return typed(self.data[name], self.dtypes[name])

    @property
    def dtype(self) -> str:
        """The dtype of the rows of all sites.

        Raises:
            ValueError: If the sites differ.
        """
        found = set(self.dtypes.values())
        if len(found) > 1:
            raise ValueError(f"the batch has rows of several dtypes: {dict(self.dtypes)}")
        return found.pop()

    def float32(self, site: str | None = None) -> npt.NDArray[np.float32]:
        """float32 ``[rows, hidden]``, which holds every dtype of a model exactly."""
        return self.numpy(site).astype(np.float32, copy=False)

    def _site(self, site: str | None) -> str:
        if site is not None:
            return site
        if len(self.data) > 1:
            raise ValueError(f"the batch has several sites: name one of {', '.join(self.data)}")
        return next(iter(self.data))


def joined(pieces: Sequence[RequestRows], sites: Sequence[str]) -> StreamBatch:
    """Rows of several requests, one after the other, as one batch of copies."""
    return StreamBatch(
        dtypes={site: pieces[0].dtypes[site] for site in sites},
        data={site: np.concatenate([piece.data[site] for piece in pieces]) for site in sites},
        positions=np.concatenate([piece.positions for piece in pieces]),
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        is_prefill=np.concatenate([piece.is_prefill for piece in pieces]),
        facts=[piece.facts for piece in pieces for _ in range(len(piece))],
    )


logger = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0


class StreamReader(Iterator[StreamBatch]):
    """Batches of a stream, in the order in which their requests ended; ends when the server does. One thread.

    It reconnects when the connection breaks, and continues with the first row that has not arrived. A reader with the
    state of an earlier one continues after that state.

    Attributes:
        sites: Sites of its rows; known after the first batch.
        num_lacking: Batches that were omitted because their request lacks one of the sites.

    Args:
        address: The consumer's: ``tcp://HOST:PORT`` or ``unix:///PATH``.
        sites: One or several; the sites of the first batch if None.
        batch_size: Rows in a batch, over requests; if None, batches are as the server sent them, each with rows of one
            request. Batches are smaller at the end, and if waiting rows would fill half of the server's ``max_bytes``.
        acknowledge: ``auto``: a batch is acknowledged when the next one is asked for. ``manual``: `acknowledge` does so
            for all batches so far, such as after a checkpoint with `state_dict`.
        token_file: File with the token; the environment's ``HEADGATE_STREAM_TOKEN`` if None.
        reconnect_s: Seconds of attempts to reconnect before an error is raised.

    Raises:
        ConfigError: If an argument cannot be used, or pyarrow is not installed.
    """

    def __init__(
        self,
        address: str,
        *,
        sites: str | Site | Iterable[str | Site] | None = None,
        batch_size: int | None = None,
        acknowledge: Literal["auto", "manual"] = "auto",
        token_file: str | os.PathLike[str] | None = None,
        reconnect_s: float = 300.0,
    ) -> None:
        if find_spec("pyarrow") is None:
            raise ConfigError(f"pyarrow is not installed: {HOW_TO_INSTALL}")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size: must be at least 1, got {batch_size}")
        if acknowledge not in ("auto", "manual"):
            raise ConfigError(f"acknowledge: expected auto or manual, got {acknowledge!r}")
        self.sites: tuple[str, ...] = () if sites is None else parse_sites(sites)
        self.num_lacking = 0
        self._batch_size = batch_size
        self._is_auto = acknowledge == "auto"
        token = read_token(None if token_file is None else os.fspath(token_file), is_reader=True)
        self._line = _Line(parse_address(address), token, reconnect_s)
        self._waiting: deque[RequestRows] = deque()
        self._num_rows = 0  # in _waiting
        self._sizes: deque[tuple[int, int]] = deque()  # number and bytes of each batch that is not acknowledged
        self._num_bytes = 0  # in _sizes
        self._place = (0, 0)  # the first batch that was not given out whole, and its rows that were
        self._is_ended = False

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> StreamBatch:
        """The next batch; waits for its rows.

        Raises:
            StreamGapError: If the next rows no longer exist.
            StreamRefusedError: If the server does not let this reader in.
            StreamError: If there is no server for `reconnect_s`, or too much is not acknowledged.
        """
        if self._is_auto:
            self.acknowledge()
        while not self._is_enough() and self._receive():
            pass
        if not self._waiting:
            raise StopIteration
        return self._take(self._batch_size or len(self._waiting[0]))

    def acknowledge(self) -> None:
        """Let the server forget the rows of all batches so far: no state before now can be used."""
        number = self._place[0]
        while self._sizes and self._sizes[0][0] < number:
            self._num_bytes -= self._sizes.popleft()[1]
        self._line.acknowledge(number)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch, in plain values, for `load_state_dict`."""
        return {"stream": self._line.stream, "next": self._place[0], "rows": self._place[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; call it before the first batch.

        Raises:
            StreamError: If a batch was read before.
        """
        if self._line.stream is not None:
            raise StreamError("load_state_dict: this reader has begun; make another one")
        self._place = (int(state["next"]), int(state["rows"]))
        self._line.go_on(state["stream"], self._place[0])

    def close(self) -> None:
        """End the connection. What was not acknowledged stays with the server."""
        self._line.close()

    def _is_enough(self) -> bool:
        if self._num_rows >= (self._batch_size or 1):
            return True
        is_half = self._num_bytes > self._line.max_bytes // 2
        if is_half and not self._num_rows:
            raise StreamError(
                f"over half of the server's max_bytes, {self._line.max_bytes}, is not acknowledged: call acknowledge() "
                "more often, or raise it there"
            )
        return is_half

    def _receive(self) -> bool:
        """Receive one batch; False if the stream has ended."""
        found = None if self._is_ended else self._line.receive()
        if found is None:
            self._is_ended = True
            return False
        number, content = found
        self._sizes.append((number, len(content)))
        self._num_bytes += len(content)
        rows = decode(content, number)
        self.sites = self.sites or tuple(rows.data)
        if not self._waiting and number > self._place[0]:
            self._place = (number, 0)  # a new reader begins where the one before it ended
        start = self._place[1] if number == self._place[0] else 0
        if not set(self.sites) <= rows.data.keys():
            self._leave_out(rows)
        elif start < len(rows):
            self._waiting.append(rows.part(start, len(rows)))
            self._num_rows += len(rows) - start
        return True

    def _leave_out(self, rows: RequestRows) -> None:
        if not self.num_lacking:
            missing = ", ".join(site for site in self.sites if site not in rows.data)
            logger.warning(
                "rows of request %s lack %s and are left out, as others may be", rows.facts.request_id, missing
            )
        self.num_lacking += 1
        if not self._waiting:
            self._place = (rows.number + 1, 0)
            if self._is_auto:
                self.acknowledge()

    def _take(self, count: int) -> StreamBatch:
        pieces: list[RequestRows] = []
        while count and self._waiting:
            rows = self._waiting.popleft()
            part = rows.part(0, count)
            count -= len(part)
            pieces.append(part)
            self._num_rows -= len(part)
            done = self._place[1] if self._place[0] == rows.number else 0
            self._place = (rows.number + 1, 0)
            if len(part) < len(rows):
                self._waiting.appendleft(rows.part(len(part), len(rows)))
                self._place = (rows.number, done + len(part))
        if not self._waiting:
            self._place = (self._line.next, 0)  # also past batches that were left out
        return joined(pieces, self.sites)


class _Line:
    """The connection to a stream, made anew where it breaks.

    Attributes:
        stream: The stream's random name; None before it was reached.
        max_bytes: Of batches that are not acknowledged.
        next: Number of the batch that comes next.
    """

    def __init__(self, place: Address, token: bytes | None, reconnect_s: float) -> None:
        self.stream: str | None = None
        self.max_bytes = 1 << 62
        self._address = place
        self._token = token
        self._reconnect_s = reconnect_s
        self._reader = secrets.token_hex(8)
        self.next = 0
        self._acknowledged = 0
        self._connection: socket.socket | None = None

    def go_on(self, stream: str | None, number: int) -> None:
        """Begin with that batch of that stream."""
        self.stream, self.next = stream, number

    def receive(self) -> tuple[int, memoryview] | None:
        """The next batch with its number; None at the end of the stream."""
        until: float | None = None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._connection is None:
                    self._connect()
                return self._receive()
            except OSError as error:
                self.close()
                until = until or time.monotonic() + self._reconnect_s
                if time.monotonic() >= until:
                    raise StreamError(
                        f"{self._address.text}: no connection for {self._reconnect_s:g} s: {error}"
                    ) from error
                logger.info("%s: %s; trying again", self._address.text, error)
                time.sleep(min(pause_s, max(until - time.monotonic(), 0)))
                pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def acknowledge(self, number: int) -> None:
        """Acknowledge now or with the next connection."""
        if number <= self._acknowledged or self.stream is None:
            return
        self._acknowledged = number
        if self._connection is not None:
            try:
                self._connection.sendall(ACKNOWLEDGED.pack(number))
            except OSError:
                self.close()  # `receive` makes the next one

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None

    def _receive(self) -> tuple[int, memoryview] | None:
        connection = self._connection
        assert connection is not None  # noqa: S101  (the caller has just made it)
        number, length = HEADER.unpack(receive_bytes(connection, HEADER.size))
        if number == END:
            return None
        if number != self.next:
            raise StreamError(f"{self._address.text}: batch {number} came, expected {self.next}")
        content = receive_bytes(connection, length)
        self.next += 1
        return number, content

    def _connect(self) -> None:
        connection = self._address.connect()
        try:
            welcome = self._shake_hands(connection)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        self._connection = connection
        self.stream, self.max_bytes = welcome.stream, welcome.max_bytes
        self.next = welcome.first
        if self._acknowledged:
            connection.sendall(ACKNOWLEDGED.pack(self._acknowledged))

    def _shake_hands(self, connection: socket.socket) -> Welcome:
        deadline = time.monotonic() + HANDSHAKE_S
        keep_alive(connection)
        greeting = receive_text(connection, Greeting, None, "", deadline)
        self._check(greeting)
        hello = Hello(reader=self._reader, nonce=secrets.token_hex(16), stream=self.stream, next=self.next)
        send_text(connection, hello, self._token, f"reader {greeting.nonce}")
        salt = f"stream {greeting.nonce} {hello.nonce}"
        welcome = receive_text(connection, Welcome, self._token, salt, deadline)
        if welcome.is_busy:
            raise ConnectionRefusedError(welcome.refusal)  # it may be this reader's past, whose end is not noticed yet
        if welcome.refusal is not None:
            kind = StreamGapError if welcome.is_gap else StreamRefusedError
            raise kind(f"{self._address.text}: {welcome.refusal}")
        return welcome

    def _check(self, greeting: Greeting) -> None:
        if (greeting.format, greeting.version) != (FORMAT, VERSION):
            raise StreamRefusedError(
                f"{self._address.text}: {greeting.format!r}, version {greeting.version}; this reader speaks version "
                f"{VERSION} of {FORMAT}"
            )
        if greeting.needs_token and self._token is None:
            raise StreamRefusedError(
                f"{self._address.text}: needs the server's token: name a token_file, or set HEADGATE_STREAM_TOKEN"
            )
        if not greeting.needs_token and self._token is not None:
            raise StreamRefusedError(
                f"{self._address.text}: has no token although this reader does: it may not be the server that was meant"
            )
