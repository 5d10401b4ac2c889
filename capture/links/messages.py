"""Everything that processes and hosts say to each other about requests: one union of messages in msgpack, never pickle.

====================== ====================================================================================
`Begin`, `End`         a request: worker to capture process, worker to driver
`Staged`               rows in shared memory: worker to capture process
`Rows`                 rows: worker to driver
`Result`               what a consumer made of a request: worker to front end
`Action`               what a consumer has the engine do: consumer to engine core
`MemoryWanted`         worker to capture process: dispatch what is held
`Close`                worker to capture process: the end
`Done`, `Closed`       capture process to worker
====================== ====================================================================================

Over ZMQ a message is one multipart message, whose first frame it is. Two frames for each block follow `Rows`, whose
shapes and dtypes it has: positions, int64 ``[N]``, and rows, ``[S, N, width]``; bfloat16 rows are sent as they are.

Arrays of int64 are bytes in the byte order of their host: an engine whose hosts differ in it does not start. In
`Staged` they may also be the first number and how many there are, if they count up: rows of a quarter of a second have
to fit into the socket at once, since what does not waits for a thread of the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from headgate.capture.delivery.completeness import request_info
from headgate.capture.delivery.delivery import CloseReport, DeliveryStats
from headgate.capture.delivery.row_packets import select_spans
from headgate.capture.planning.step_plan import PackGroup, RequestSpans, SiteSet, count_up
from headgate.capture.schema.batch import Begin, End, FinalState, Int64Array, MemoryWanted
from headgate.capture.schema.consumer import ReadoutFacts, RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import CaptureResult, Origin
from headgate.capture.schema.sites import ITEM_SIZES, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.staging.host_rows import StagedRows

Frames: TypeAlias = Sequence[bytes | memoryview]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}


class MalformedMessage(ValueError):
    """Raised for frames that are not one of our messages; the receiver counts them and goes on."""


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result", array_like=True):
    """Result of a request for one consumer at one pipeline stage.

    Attributes:
        key: What the hub knows the request by.
        req_id: Internal id, for logs.
        sample_index: Which of the ``n`` samples.
        instance: The consumer.
        stage: Pipeline stage that answers.
        num_stages: How many stages answer for this consumer.
        result: The outcome.
        num_rows: 0; of a part that is sent before the outcome, the position after its last: its tokens are there once
            the client has so many rows' tokens.
    """

    key: str
    req_id: str = ""
    sample_index: int = 0
    instance: str
    stage: int = 0
    num_stages: int = 1
    result: CaptureResult
    num_rows: int = 0


class SpanHeader(msgspec.Struct, frozen=True, array_like=True):
    """Owner of the rows ``start : stop`` of a block."""

    key: str
    req_id: str
    start: int
    stop: int


class BlockHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A `RowBlock` without its arrays."""

    sites: list[str]
    dtype: str
    shape: tuple[int, int, int]
    spans: list[SpanHeader]


class Rows(msgspec.Struct, frozen=True, kw_only=True, tag="rows", array_like=True):
    """Blocks of one `StreamingConsumer.write` that go to one front end."""

    stage: int
    blocks: list[BlockHeader]


class Action(msgspec.Struct, frozen=True, kw_only=True, tag="action", array_like=True):
    """An action of a consumer, which steers requests of the engine.

    Attributes:
        consumer: Its instance name.
        encoded: As `headgate.capture.schema.consumer.encode_action` made it.
        num_dropped: Actions of the same consumer that were dropped since the last one that was sent.
    """

    consumer: str
    encoded: bytes
    num_dropped: int


Numbers = bytes | list[int]
"""int64: all of them, or the first one and how many there are, which count up."""


class GroupWire(msgspec.Struct, frozen=True, array_like=True):
    """A `PackGroup`: `masks` is one mask if all rows have it."""

    site_ids: bytes
    rows: Numbers
    positions: bytes
    masks: bytes | int
    spans: RequestSpans


class Staged(msgspec.Struct, frozen=True, tag="staged", array_like=True):
    """A `StagedRows`: its lease is ``start : start + num_leased``, it has `num_rows` rows from `first` on."""

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


class Close(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """Asks to deliver what is there in so many seconds, and to end."""

    timeout_s: float


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Requests whose part in a capture process is over: consumer, id and key of each."""

    ended: list[tuple[str, str, str]]


class Closed(msgspec.Struct, frozen=True, tag="closed", array_like=True):
    """The last message: everything was closed, and these are the counters."""

    report: CloseReport
    stats: DeliveryStats


Message: TypeAlias = Begin | End | Staged | Rows | Result | Action | MemoryWanted | Close | Done | Closed


def _plain(value: object) -> object:
    """Bytes of what is an array: token ids, and long bytes of a request's wire."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def _read(kind: object, data: object) -> object:
    """An int64 array as it was sent, read-only; anything that is of no certain type as it is."""
    if kind is object:
        return data
    if not isinstance(data, bytes) or len(data) % 8:
        raise ValueError("no int64 array")
    return np.frombuffer(data, np.int64)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_read)


def encode(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: If a payload is not made of plain values.
    """
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Read what `encode` made, by another process of this installation."""
    return _decoder.decode(data)


def decode_frames(frames: Sequence[zmq.Frame]) -> Message:
    """Read the message of some frames; `read_rows` reads the arrays that follow `Rows`.

    Raises:
        MalformedMessage: If it is not one of our messages, or not so many arrays follow it.
    """
    if not frames:
        raise MalformedMessage("no header")
    try:
        message = decode(frames[0].buffer)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:  # TypeError: a map as a map's key
        raise MalformedMessage(f"header: {error}") from error
    expected = 2 * len(message.blocks) if isinstance(message, Rows) else 0
    if len(frames) != expected + 1:
        raise MalformedMessage(f"{len(frames) - 1} arrays, expected {expected}")
    return message


def origin_of(request: RequestInfo) -> Origin:
    """Return where the request's results go.

    Raises:
        ConsumerError: If no inbox is to get them.
    """
    if request.origin is None:
        raise ConsumerError(f"request {request.client_request_id} has no front end that waits for its results")
    return request.origin


def answer_of(
    request: RequestInfo,
    instance: str,
    result: CaptureResult,
    *,
    num_rows: int = 0,
    stage: int = 0,
    num_stages: int = 1,
) -> Result:
    """Return the message with a consumer's result for a request, or with a part of it; see `Result`."""
    return Result(
        key=origin_of(request).key,
        req_id=request.request_id,
        sample_index=request.sample_index,
        instance=instance,
        stage=stage,
        num_stages=num_stages,
        result=result,
        num_rows=num_rows,
    )


def begin_of(request: RequestInfo, *, instance: str, stage: int, num_stages: int) -> Begin:
    """Return the message that announces a request to a consumer in the driver."""
    return Begin(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        capture={
            "id": request.client_request_id,
            "n": request.num_samples,
            "key": origin_of(request).key,
            "reply": None,
            "wait": False,
            "specs": {instance: request.spec.to_wire()},
            "streamed": origin_of(request).is_streamed,
        },
        readouts={site.name: facts for site, facts in request.readouts.items()},
        stage=stage,
        num_stages=num_stages,
    )


def end_of(request: RequestInfo, final: FinalState | None, stage: int, dropped_rows: int = 0) -> End:
    """Return the message with which a request ends, after its last row, for a consumer in the driver; see `End`."""
    return End(request.request_id, final, origin_of(request).key, stage, dropped_rows)


def read_begin(message: Begin) -> RequestInfo:
    """Read the request that `begin_of` announced.

    Raises:
        MalformedMessage: If something in it is not as it should be.
    """
    if not 0 <= message.stage < message.num_stages:
        raise MalformedMessage(f"stage {message.stage} of {message.num_stages}")
    specs = {} if message.capture is None else message.capture["specs"]
    try:
        (wire,) = specs.values()
        readouts = {Site.parse(name): ReadoutFacts(*facts) for name, facts in message.readouts.items()}
        info = request_info(message, CaptureSpec.from_wire(wire), readouts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"spec: {error!r}") from error
    if not 0 <= info.sample_index < info.num_samples:
        raise MalformedMessage(f"sample {info.sample_index} of {info.num_samples}")
    return info


def encode_rows(blocks: Sequence[RowBlock], *, stage: int) -> list[bytes | memoryview]:
    """Make the frames of a `Rows` message; the rows are not copied if they are contiguous."""
    arrays: list[memoryview] = []
    for block in blocks:
        arrays += [array_bytes(block.positions), tensor_bytes(block.rows)]
    return [encode(Rows(stage=stage, blocks=[_block_header(block) for block in blocks])), *arrays]


def _block_header(block: RowBlock) -> BlockHeader:
    spans = [
        SpanHeader(origin_of(span.request).key, span.request.request_id, span.start, span.stop) for span in block.spans
    ]
    num_sites, num_rows, width = block.rows.shape
    return BlockHeader(
        sites=[site.name for site in block.sites],
        dtype=str(block.rows.dtype).removeprefix("torch."),
        shape=(num_sites, num_rows, width),
        spans=spans,
    )


def read_rows(
    message: Rows, frames: Sequence[zmq.Frame], requests: Mapping[tuple[str, str], RequestInfo]
) -> list[RowBlock]:
    """Read the blocks of a `Rows` message; they share the memory of the frames.

    Args:
        message: The header.
        frames: All frames, the header's included.
        requests: ``(key, req_id)`` -> request; rows of any other are left out.

    Raises:
        MalformedMessage: If header and frames do not fit each other.
    """
    blocks = []
    for header, positions, rows in zip(message.blocks, frames[1::2], frames[2::2], strict=True):
        spans = tuple(
            RowSpan(request=requests[span.key, span.req_id], start=span.start, stop=span.stop)
            for span in header.spans
            if (span.key, span.req_id) in requests
        )
        block = RowBlock(
            sites=_read_sites(header),
            rows=_read_tensor(header, rows),
            positions=_read_positions(header, positions),
            spans=spans,
        )
        if len(spans) == len(header.spans):
            blocks.append(block)
        elif spans:
            blocks.append(select_spans(block, spans))
    return blocks


def _read_sites(header: BlockHeader) -> tuple[Site, ...]:
    if len(header.sites) != header.shape[0]:
        raise MalformedMessage(f"{len(header.sites)} sites for rows of shape {header.shape}")
    try:
        return _parse_sites(tuple(header.sites))
    except ValueError as error:
        raise MalformedMessage(str(error)) from error


@lru_cache(maxsize=256)
def _parse_sites(names: tuple[str, ...]) -> tuple[Site, ...]:
    """Return the same tuple for the same names: consumers recognise blocks with the same sites by it."""
    return tuple(Site.parse(name) for name in names)


def _read_positions(header: BlockHeader, frame: zmq.Frame) -> Int64Array:
    positions, num_rows = read_int64(frame), header.shape[1]
    if len(positions) != num_rows:
        raise MalformedMessage(f"{len(positions)} positions for rows of shape {header.shape}")
    stop = 0
    for span in header.spans:
        if span.start != stop or span.stop <= span.start:
            raise MalformedMessage(f"spans do not cover rows 0 to {num_rows} one after the other")
        stop = span.stop
    if stop != num_rows:
        raise MalformedMessage(f"spans cover {stop} of {num_rows} rows")
    return positions


def _read_tensor(header: BlockHeader, frame: zmq.Frame) -> Tensor:
    dtype = DTYPES.get(header.dtype)
    if dtype is None or min(header.shape) < 1:
        raise MalformedMessage(f"rows of dtype {header.dtype!r} and shape {header.shape}")
    num_bytes = header.shape[0] * header.shape[1] * header.shape[2] * dtype.itemsize
    if len(frame) != num_bytes:
        raise MalformedMessage(f"{len(frame)} bytes for {header.dtype} rows of shape {header.shape}")
    # ZMQ places small messages at any address; torch wants elements at multiples of their size.
    is_aligned = np.frombuffer(frame.buffer, np.uint8).ctypes.data % dtype.itemsize == 0
    return torch.frombuffer(frame.buffer if is_aligned else bytearray(frame.buffer), dtype=dtype).view(header.shape)


def array_bytes(array: Int64Array) -> memoryview:
    """View an int64 array as bytes; copied if it is not contiguous."""
    return np.ascontiguousarray(array, dtype=np.int64).data.cast("B")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """View a CPU tensor with at least one element as bytes; copied if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def read_int64(frame: zmq.Frame) -> Int64Array:
    """Copy an int64 array out of a frame.

    Raises:
        MalformedMessage: If the frame does not hold whole numbers of 8 bytes.
    """
    if len(frame) % 8:
        raise MalformedMessage(f"{len(frame)} bytes are no int64 array")
    return np.frombuffer(frame.buffer, dtype=np.int64).copy()


def staged(item: StagedRows) -> Staged:
    """Return the message that stands for rows in shared memory."""
    lease, about = item.lease, (item.start, item.num_rows, item.num_copies, item.num_token_rows, item.num_output_rows)
    return Staged(lease.number, lease.start, lease.num_rows, item.since, *about, [_group(each) for each in item.groups])


def _group(group: PackGroup) -> GroupWire:
    masks = group.masks
    are_alike = bool((masks == masks[0]).all())
    return GroupWire(
        site_ids=group.site_ids.tobytes(),
        rows=_packed(group.rows),
        positions=group.positions.tobytes(),
        masks=int(masks[0]) if are_alike else masks.tobytes(),
        spans=group.spans,
    )


def _packed(values: Int64Array) -> Numbers:
    first, count = int(values[0]), len(values)
    are_counting = values[-1] - first == count - 1 and bool((values[1:] - values[:-1] == 1).all())
    return [first, count] if are_counting else values.tobytes()


def pack_group(group: GroupWire, site_set: SiteSet) -> PackGroup:
    """Return the rows that a `GroupWire` stands for, at the sites that it names."""
    rows, masks = numbers(group.rows), group.masks
    return PackGroup(
        site_set=site_set,
        rows=rows,
        positions=numbers(group.positions),
        masks=np.full(len(rows), masks, np.int64) if isinstance(masks, int) else numbers(masks),
        spans=group.spans,
    )


def numbers(data: Numbers) -> Int64Array:
    """Return the numbers that were sent, int64, read-only."""
    if isinstance(data, list):
        return count_up(data[0], data[0] + data[1])
    found: Int64Array = np.frombuffer(data, np.int64)
    return found


def staged_rows(message: Staged, groups: Sequence[PackGroup]) -> StagedRows:
    """Return the rows that a `Staged` stands for, not placed yet."""
    return StagedRows(
        tuple(groups),
        message.first,
        message.num_rows,
        message.num_copies,
        message.num_token_rows,
        message.num_output_rows,
        message.since,
    )
