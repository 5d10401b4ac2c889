"""Messages between a worker and a front end: a msgpack header and raw frames. Never pickle.

Every message is one multipart ZMQ message. Its first frame is the header, one of the structs below, tagged; the
frames after it are arrays, whose shapes and dtypes are in the header:

================ ==================================================================================
`ResultMessage`  none
`BeginMessage`   prompt token ids, int64
`RowsMessage`    two a block: positions, int64 ``[N]``, and rows, ``[S, N, width]`` in the block's dtype
`FinishMessage`  token ids, int64
`AbandonMessage` none
================ ==================================================================================

Arrays are in the byte order of their host: an engine whose hosts differ in it does not start. bfloat16 rows are sent as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from headgate.capture.schema.batch import FinalState, Int64Array, SpecWire
from headgate.capture.schema.consumer import FinishedRequest, ReadoutFacts, RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.results import CaptureResult, Origin
from headgate.capture.schema.sites import ITEM_SIZES, Site
from headgate.capture.schema.spec import CaptureSpec

Frames: TypeAlias = Sequence[bytes | memoryview]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_SIZES}


class MalformedMessage(ValueError):
    """Raised for frames that are not one of our messages; the receiver counts them and goes on."""


class ResultMessage(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """Result of a request for one worker-located consumer at one pipeline stage.

    Attributes:
        key: What the hub knows the request by.
        req_id: Internal id, for logs.
        sample_index: Which of the ``n`` samples.
        instance: The consumer.
        stage: Pipeline stage that answers.
        num_stages: How many stages answer for this consumer.
        result: The outcome.
    """

    key: str
    req_id: str
    sample_index: int
    instance: str
    stage: int
    num_stages: int
    result: CaptureResult


class BeginMessage(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Announcement of a request that wants rows for a driver-located consumer; `num_stages` stages will send them.

    `readouts` are those of this stage: by the site's name, the number of outputs and the key.
    """

    key: str
    req_id: str
    client_request_id: str
    sample_index: int
    num_samples: int
    stage: int
    num_stages: int
    spec: SpecWire
    readouts: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)


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


class RowsMessage(msgspec.Struct, frozen=True, kw_only=True, tag="rows"):
    """Blocks of one `StreamingConsumer.write` that go to one front end."""

    stage: int
    blocks: list[BlockHeader]


class FinishMessage(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """End of a request, which got its last row of this stage; `dropped_rows` rows were lost on the way."""

    key: str
    req_id: str
    stage: int
    num_prompt_tokens: int
    status: str
    dropped_rows: int
    notes: dict[str, Any] = msgspec.field(default_factory=dict)
    num_outdated: int = 0


class AbandonMessage(msgspec.Struct, frozen=True, kw_only=True, tag="abandon"):
    """Failure of a request on this stage; its result, an error, travels by itself."""

    key: str
    req_id: str
    stage: int


Message: TypeAlias = ResultMessage | BeginMessage | RowsMessage | FinishMessage | AbandonMessage

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message, arrays: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """Make the frames of a message.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: If a payload is not made of plain values.
    """
    return [_encoder.encode(message), *arrays]


def decode(frames: Sequence[zmq.Frame]) -> Message:
    """Read the header; the arrays are read by the functions below.

    Raises:
        MalformedMessage: If it is not one of our messages.
    """
    if not frames:
        raise MalformedMessage("no header")
    try:
        return cast(Message, _decoder.decode(frames[0].buffer))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:  # TypeError: a map as a map's key
        raise MalformedMessage(f"header: {error}") from error


def origin_of(request: RequestInfo) -> Origin:
    """Return where the request's results go.

    Raises:
        ConsumerError: If no inbox is to get them.
    """
    if request.origin is None:
        raise ConsumerError(f"request {request.client_request_id} has no front end that waits for its results")
    return request.origin


def encode_begin(request: RequestInfo, *, stage: int, num_stages: int) -> list[bytes | memoryview]:
    """Make the frames of a `BeginMessage`."""
    message = BeginMessage(
        key=origin_of(request).key,
        req_id=request.request_id,
        client_request_id=request.client_request_id,
        sample_index=request.sample_index,
        num_samples=request.num_samples,
        stage=stage,
        num_stages=num_stages,
        spec=request.spec.to_wire(),
        readouts={site.name: (facts.num_outputs, facts.key) for site, facts in request.readouts.items()},
    )
    return encode(message, [array_bytes(request.prompt_token_ids)])


def read_begin(message: BeginMessage, frames: Sequence[zmq.Frame]) -> RequestInfo:
    """Read the request that a `BeginMessage` announces.

    Raises:
        MalformedMessage: If its frames or its spec are not as they should be.
    """
    _check_num_arrays(frames, 1)
    if not (0 <= message.stage < message.num_stages and 0 <= message.sample_index < message.num_samples):
        raise MalformedMessage(
            f"stage {message.stage} of {message.num_stages}, sample {message.sample_index} of {message.num_samples}"
        )
    try:
        spec = CaptureSpec.from_wire(message.spec)
        readouts = {Site.parse(name): ReadoutFacts(*facts) for name, facts in message.readouts.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedMessage(f"spec: {error!r}") from error
    return RequestInfo(
        request_id=message.req_id,
        client_request_id=message.client_request_id,
        sample_index=message.sample_index,
        num_samples=message.num_samples,
        prompt_token_ids=read_int64(frames[1]),
        spec=spec,
        readouts=readouts,
        origin=Origin(None, message.key),
    )


def encode_rows(blocks: Sequence[RowBlock], *, stage: int) -> list[bytes | memoryview]:
    """Make the frames of a `RowsMessage`; the rows are not copied if they are contiguous."""
    arrays: list[memoryview] = []
    for block in blocks:
        arrays += [array_bytes(block.positions), tensor_bytes(block.rows)]
    return encode(RowsMessage(stage=stage, blocks=[_block_header(block) for block in blocks]), arrays)


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
    message: RowsMessage, frames: Sequence[zmq.Frame], requests: Mapping[tuple[str, str], RequestInfo]
) -> list[RowBlock]:
    """Read the blocks of a `RowsMessage`; they share the memory of the frames.

    Args:
        message: The header.
        frames: All frames, the header's included.
        requests: ``(key, req_id)`` -> request; rows of any other are left out.

    Raises:
        MalformedMessage: If header and frames do not fit each other.
    """
    _check_num_arrays(frames, 2 * len(message.blocks))
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


def select_spans(block: RowBlock, spans: Sequence[RowSpan]) -> RowBlock:
    """Copy the rows of some of a block's spans into a block of their own."""
    rows = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    stops = np.cumsum([span.stop - span.start for span in spans]).tolist()
    return RowBlock(
        sites=block.sites,
        rows=block.rows[:, torch.from_numpy(rows)],
        positions=block.positions[rows],
        spans=tuple(
            RowSpan(request=span.request, start=stop - (span.stop - span.start), stop=stop)
            for span, stop in zip(spans, stops, strict=True)
        ),
    )


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


def encode_finish(finished: FinishedRequest, *, stage: int) -> list[bytes | memoryview]:
    """Make the frames of a `FinishMessage`."""
    message = FinishMessage(
        key=origin_of(finished.request).key,
        req_id=finished.request.request_id,
        stage=stage,
        num_prompt_tokens=finished.final.num_prompt_tokens,
        status=finished.final.status,
        dropped_rows=finished.dropped_rows,
        notes=dict(finished.final.notes),
        num_outdated=finished.final.num_outdated,
    )
    return encode(message, [array_bytes(finished.final.token_ids)])


def read_final(message: FinishMessage, frames: Sequence[zmq.Frame]) -> FinalState:
    """Read how the request of a `FinishMessage` ended.

    Raises:
        MalformedMessage: If its frames are not as they should be.
    """
    _check_num_arrays(frames, 1)
    return FinalState(
        num_prompt_tokens=message.num_prompt_tokens,
        token_ids=read_int64(frames[1]),
        status=message.status,
        notes=message.notes,
        num_outdated=message.num_outdated,
    )


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


def _check_num_arrays(frames: Sequence[zmq.Frame], expected: int) -> None:
    if len(frames) != expected + 1:
        raise MalformedMessage(f"{len(frames) - 1} arrays, expected {expected}")
