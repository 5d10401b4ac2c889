"""Messages between a worker and its capture process. Both are of one installation, so nothing here has a version.

Arrays of int64 travel as their bytes, in the machine's own order, or as the first and their number if they count up.
Rows of a quarter of a second have to fit into the socket at once: what does not waits for a thread of the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.delivery.delivery import (
    CloseReport,
    DeliveryStats,
    Dispatched,
    MemoryWanted,
    RequestBegins,
    RequestEnds,
)
from headgate.capture.planning.step_plan import PackGroup, RequestSpans, SiteSet, count_up
from headgate.capture.schema.batch import WIRE_VERSION, FinalState, Int64Array, NewRequest
from headgate.capture.staging.host_rows import CopyPart, StagedRows

UNKNOWN = -1
"""Number of a request that the process was not given: its rows have no consumer there."""
NOBODY = ""
"""Stands for the id of such a request; no request has it."""


class RequestNumbers:
    """The worker's side: numbers the requests that a process is given."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last = 0

    def begin(self, req_id: str) -> int:
        """Number a request; one of the same id before it has its number no longer."""
        self._last += 1
        self._numbers[req_id] = self._last
        return self._last

    def end(self, req_id: str) -> None:
        """Forget a request for which no more rows come."""
        self._numbers.pop(req_id, None)

    def clear(self) -> None:
        """Forget all requests: another process takes the place of the one that knew them."""
        self._numbers.clear()

    def of(self, spans: RequestSpans) -> bytes:
        """Return the number of each span's request, int64."""
        number_of = self._numbers.get
        return np.array([number_of(req_id, UNKNOWN) for req_id, _, _ in spans], np.int64).tobytes()


class NumberedRequests:
    """The process's side: the ids that the numbers stand for."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}

    def begin(self, number: int, req_id: str) -> None:
        """Take a request; one of the same id before it is forgotten."""
        self.end(req_id)
        self._ids[number] = req_id
        self._numbers[req_id] = number

    def end(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        number = self._numbers.pop(req_id, None)
        if number is not None:
            del self._ids[number]

    def ids(self, numbers: Iterable[int]) -> list[str]:
        """Return the id of each request."""
        id_of = self._ids.get
        return [id_of(number, NOBODY) for number in numbers]


T = TypeVar("T")
Numbers = bytes | list[int]
"""int64: all of them, or the first one and how many there are, which count up."""


class Begin(msgspec.Struct, tag=0, array_like=True):
    """A `RequestBegins`: `prompt` is int64; `capture` is the section of its wire, None if it captures nothing.

    `number` stands for the request in messages about rows.
    """

    req_id: str
    number: int
    prompt: bytes
    capture: dict[str, Any] | None
    is_same_client: bool


class GroupWire(msgspec.Struct, array_like=True):
    """A `PackGroup`: `masks` is one mask if all rows have it; `starts` has one more entry than there are requests.

    `requests` are their numbers, int64.
    """

    site_ids: bytes
    rows: Numbers
    positions: bytes
    masks: bytes | int
    requests: bytes
    starts: Numbers


class Staged(msgspec.Struct, tag=1, array_like=True):
    """A `StagedRows`: its lease is ``start : start + num_leased``, its part has `num_rows` rows from `first` on."""

    number: int
    start: int
    num_leased: int
    since: float
    first: int
    num_rows: int
    num_copies: int
    num_token_rows: int
    num_output_rows: int
    groups: list[GroupWire]


class End(msgspec.Struct, tag=2, array_like=True):
    """A `RequestEnds`: `token_ids` is int64, None if its end is unknown."""

    req_id: str
    num_prompt: int = 0
    token_ids: bytes | None = None
    status: str = ""
    notes: dict[str, Any] = msgspec.field(default_factory=dict)
    num_outdated: int = 0


class WantsMemory(msgspec.Struct, tag=3, array_like=True):
    """A `MemoryWanted`."""


class Close(msgspec.Struct, tag=4, array_like=True):
    """Asks to deliver what is there in so many seconds, and to end."""

    timeout_s: float


ToProcess = Begin | Staged | End | WantsMemory | Close


class Done(msgspec.Struct, tag=0, array_like=True):
    """Requests whose part here is over: consumer, id and key of each."""

    ended: list[tuple[str, str, str]]


class Closed(msgspec.Struct, tag=1, array_like=True):
    """The last message: everything was closed, and these are the counters."""

    report: CloseReport
    stats: DeliveryStats


ToWorker = Done | Closed


def _plain(value: object) -> object:
    """Bytes of what is an array: long bytes of a request's wire come as such."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be sent to a capture process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: ToProcess | ToWorker) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_process(data: bytes) -> ToProcess:
    """Read what a worker sends."""
    return _to_process.decode(data)


def decode_to_worker(data: bytes) -> ToWorker:
    """Read what a capture process sends."""
    return _to_worker.decode(data)


def message_of(item: Dispatched, requests: RequestNumbers) -> ToProcess:
    """Make the message that stands for what the step thread hands over.

    Args:
        item: What it hands over.
        requests: The requests that the process was given; a request that begins or ends is noted there.
    """
    if isinstance(item, StagedRows):
        part, lease = item.part, item.lease
        groups = [_group(group, requests) for group in part.groups]
        about = (part.start, part.num_rows, part.num_copies, part.num_token_rows, part.num_output_rows)
        return Staged(lease.number, lease.start, lease.num_rows, item.since, *about, groups)
    if isinstance(item, RequestBegins):
        new = item.new
        capture = None if new.wire is None else new.wire.get("capture")
        prompt = np.asarray(new.prompt_token_ids, np.int64).tobytes()
        number = requests.begin(new.req_id)
        return Begin(new.req_id, number, prompt, None if capture is None else dict(capture), item.is_same_client)
    if isinstance(item, RequestEnds):
        final = item.final
        requests.end(item.req_id)
        if final is None:
            return End(item.req_id)
        token_ids = np.asarray(final.token_ids, np.int64).tobytes()
        return End(item.req_id, final.num_prompt_tokens, token_ids, final.status, dict(final.notes), final.num_outdated)
    assert isinstance(item, MemoryWanted)  # noqa: S101  (the last kind)
    return WantsMemory()


def _group(group: PackGroup, requests: RequestNumbers) -> GroupWire:
    masks = group.masks
    are_alike = bool((masks == masks[0]).all())
    return GroupWire(
        site_ids=group.site_ids.tobytes(),
        rows=_packed(group.rows),
        positions=group.positions.tobytes(),
        masks=int(masks[0]) if are_alike else masks.tobytes(),
        requests=requests.of(group.spans),
        starts=_bounds(group.spans),
    )


def pack_group(group: GroupWire, site_set: SiteSet, requests: NumberedRequests) -> PackGroup:
    """Make the rows that a `GroupWire` stands for.

    Args:
        group: As it came.
        site_set: Of its sites.
        requests: The requests that the process was given.
    """
    bounds, req_ids = numbers(group.starts).tolist(), requests.ids(numbers(group.requests).tolist())
    rows, masks = numbers(group.rows), group.masks
    return PackGroup(
        site_set=site_set,
        rows=rows,
        positions=numbers(group.positions),
        masks=np.full(len(rows), masks, np.int64) if isinstance(masks, int) else numbers(masks),
        spans=tuple(zip(req_ids, bounds[:-1], bounds[1:], strict=True)),
    )


def _bounds(spans: RequestSpans) -> Numbers:
    """Where each request's rows begin, and where the last one's end: spans follow each other, none is empty."""
    stop = spans[-1][2]
    if stop == len(spans):
        return [0, stop + 1]
    return np.array([*(start for _, start, _ in spans), stop], np.int64).tobytes()


def _packed(values: Int64Array) -> Numbers:
    first, count = int(values[0]), len(values)
    are_counting = values[-1] - first == count - 1 and bool((values[1:] - values[:-1] == 1).all())
    return [first, count] if are_counting else values.tobytes()


def numbers(data: Numbers) -> Int64Array:
    """Return the numbers that were sent, int64, read-only."""
    if isinstance(data, list):
        return count_up(data[0], data[0] + data[1])
    found: npt.NDArray[np.int64] = np.frombuffer(data, np.int64)
    return found


def new_request(message: Begin) -> NewRequest:
    """The request of a `Begin`, with its section of capture alone."""
    wire = None if message.capture is None else {"v": WIRE_VERSION, "capture": message.capture}
    return NewRequest(req_id=message.req_id, prompt_token_ids=numbers(message.prompt), wire=wire)  # type: ignore[arg-type]


def request_ends(message: End) -> RequestEnds:
    """The end that an `End` stands for."""
    if message.token_ids is None:
        return RequestEnds(message.req_id, None)
    final = FinalState(
        num_prompt_tokens=message.num_prompt,
        token_ids=numbers(message.token_ids),
        status=message.status,
        notes=message.notes,
        num_outdated=message.num_outdated,
    )
    return RequestEnds(message.req_id, final)


def copy_part(message: Staged, groups: Sequence[PackGroup]) -> CopyPart:
    """The part that a `Staged` stands for."""
    return CopyPart(
        tuple(groups),
        message.first,
        message.num_rows,
        message.num_copies,
        message.num_token_rows,
        message.num_output_rows,
    )
