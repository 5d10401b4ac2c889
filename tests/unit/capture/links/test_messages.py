"""Messages survive the wire bit for bit, and nothing but our messages is taken for one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.row_packets import select_spans
from headgate.capture.links.messages import (
    BlockHeader,
    MalformedMessage,
    Rows,
    SpanHeader,
    array_bytes,
    begin_of,
    decode,
    decode_frames,
    encode,
    encode_rows,
    read_begin,
    read_rows,
)
from headgate.capture.schema.batch import Begin, End, FinalState
from headgate.capture.schema.consumer import ReadoutFacts, RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.positions import Named
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec

SITES = (Site(0, HookPoint.POST_MLP), Site(3, HookPoint.ATTN_OUT), FINAL_NORM_SITE)


def request(name: str = "r0", *, reply: str | None = "ipc:///hub", key: str = "k") -> RequestInfo:
    return RequestInfo(
        request_id=name,
        client_request_id=f"client-{name}",
        sample_index=1,
        num_samples=2,
        prompt_token_ids=np.arange(5, dtype=np.int64),
        spec=CaptureSpec(sites=SITES, positions=Named("all"), options={"tag": "x"}),
        readouts={SITES[1]: ReadoutFacts(3, "abc"), SITES[2]: ReadoutFacts(1, "d")},
        origin=Origin(reply, key),
    )


def block(requests: list[RequestInfo], counts: list[int], dtype: torch.dtype = torch.bfloat16) -> RowBlock:
    stops = np.cumsum(counts).tolist()
    num_rows = stops[-1]
    return RowBlock(
        sites=SITES,
        rows=torch.randn(len(SITES), num_rows, 7).to(dtype),
        positions=np.arange(100, 100 + num_rows, dtype=np.int64),
        spans=tuple(
            RowSpan(request=info, start=stop - count, stop=stop)
            for info, count, stop in zip(requests, counts, stops, strict=True)
        ),
    )


def frames_of(parts: list[bytes | memoryview], *, offset: int = 0) -> list[zmq.Frame]:
    """Frames as ZMQ might hand them over: each array at any address."""
    return [zmq.Frame(memoryview(bytes(offset) + bytes(part))[offset:]) for part in parts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_arrive_bit_for_bit_wherever_zmq_places_them(dtype: torch.dtype, offset: int) -> None:
    sent = [block([request("a"), request("b")], [2, 3], dtype), block([request("a")], [4], dtype)]
    known = {("k", "a"): request("a"), ("k", "b"): request("b")}
    frames = frames_of(encode_rows(sent, stage=2), offset=offset)

    message = decode_frames(frames)
    assert isinstance(message, Rows)
    received = read_rows(message, frames, known)

    assert message.stage == 2
    for before, after in zip(sent, received, strict=True):
        assert after.sites == before.sites
        assert after.rows.dtype == dtype
        assert torch.equal(after.rows.view(torch.uint8), before.rows.view(torch.uint8))
        assert np.array_equal(after.positions, before.positions)
        assert [(span.request.request_id, span.start, span.stop) for span in after.spans] == [
            (span.request.request_id, span.start, span.stop) for span in before.spans
        ]


def test_blocks_of_the_same_sites_share_them_so_that_consumers_can_tell() -> None:
    received = []
    for _ in range(2):
        frames = frames_of(encode_rows([block([request("a")], [2])], stage=0))
        message = decode_frames(frames)
        assert isinstance(message, Rows)
        received += read_rows(message, frames, {("k", "a"): request("a")})

    assert received[0].sites is received[1].sites


def test_rows_that_are_not_contiguous_are_sent_as_they_are_read() -> None:
    whole = torch.randn(3, 10, 7)
    sent = RowBlock(
        sites=SITES,
        rows=whole[:, 2:6],
        positions=np.arange(4, dtype=np.int64),
        spans=(RowSpan(request=request(), start=0, stop=4),),
    )
    frames = frames_of(encode_rows([sent], stage=0))

    message = decode_frames(frames)
    assert isinstance(message, Rows)
    (received,) = read_rows(message, frames, {("k", "r0"): request()})

    assert torch.equal(received.rows, whole[:, 2:6])


def test_rows_of_unknown_requests_are_left_out() -> None:
    requests = [request("a"), request("stranger"), request("b")]
    sent = block(requests, [2, 3, 1])
    frames = frames_of(encode_rows([sent, block([requests[1]], [2])], stage=0))

    message = decode_frames(frames)
    assert isinstance(message, Rows)
    received = read_rows(message, frames, {("k", "a"): requests[0], ("k", "b"): requests[2]})

    assert len(received) == 1
    assert torch.equal(received[0].rows, sent.rows[:, [0, 1, 5]])
    assert received[0].positions.tolist() == [100, 101, 105]
    assert [(span.request.request_id, span.start, span.stop) for span in received[0].spans] == [
        ("a", 0, 2),
        ("b", 2, 3),
    ]


def test_a_key_belongs_to_its_request() -> None:
    frames = frames_of(encode_rows([block([request("a", key="forged")], [2])], stage=0))

    message = decode_frames(frames)
    assert isinstance(message, Rows)

    assert read_rows(message, frames, {("k", "a"): request("a")}) == []


def test_begin_and_end_arrive_as_sent() -> None:
    sent = request("1_r0")
    tokens, notes = np.array([1, 2**40, 3], dtype=np.int64), {"part": {"positions": [0, 1], "seen": [0.5, None]}}
    final = FinalState(num_prompt_tokens=5, token_ids=tokens, status="stop", notes=notes, num_outdated=2)

    begun = decode(encode(begin_of(sent, instance="files", stage=1, num_stages=2)))
    ended = decode(encode(End("1_r0", final, "k", 1, dropped_rows=4)))
    assert isinstance(begun, Begin)
    assert isinstance(ended, End)
    received = read_begin(begun)

    assert (begun.stage, begun.num_stages) == (1, 2)
    assert received.spec == request().spec
    assert received.readouts == sent.readouts
    assert all(isinstance(facts, ReadoutFacts) for facts in received.readouts.values())
    assert received.origin == Origin(None, "k")
    assert (received.request_id, received.client_request_id) == ("1_r0", "client-1_r0")
    assert (received.sample_index, received.num_samples) == (1, 2)
    assert np.array_equal(received.prompt_token_ids, request().prompt_token_ids)
    assert (ended.req_id, ended.key, ended.stage, ended.dropped_rows) == ("1_r0", "k", 1, 4)
    assert ended.final is not None
    for name in (each.name for each in fields(FinalState)):
        got, expected = getattr(ended.final, name), getattr(final, name)
        assert np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected, name


def test_a_request_without_an_origin_cannot_be_sent() -> None:
    homeless = RequestInfo(
        request_id="r", client_request_id="c", prompt_token_ids=np.zeros(0, dtype=np.int64), spec=request().spec
    )

    with pytest.raises(ConsumerError, match="request c has no front end"):
        begin_of(homeless, instance="files", stage=0, num_stages=1)


HEADER = BlockHeader(sites=["final_norm"], dtype="float32", shape=(1, 2, 3), spans=[SpanHeader("k", "r0", 0, 2)])
POSITIONS = array_bytes(np.arange(2, dtype=np.int64))
ROWS = bytes(24)


@pytest.mark.parametrize(
    ("changes", "arrays", "complaint"),
    [
        ({}, [POSITIONS], "1 arrays, expected 2"),
        ({}, [POSITIONS, ROWS, ROWS], "3 arrays, expected 2"),
        ({}, [POSITIONS, ROWS[:-1]], "23 bytes for float32 rows"),
        ({}, [POSITIONS[:-1], ROWS], "15 bytes are no int64 array"),
        ({}, [POSITIONS[:8], ROWS], "1 positions for rows"),
        ({"dtype": "object"}, [POSITIONS, ROWS], "dtype 'object'"),
        ({"shape": (1, -2, -3)}, [POSITIONS, ROWS], "shape"),
        ({"shape": (2, 2, 3)}, [POSITIONS, bytes(48)], "1 sites for rows"),
        ({"sites": ["__import__"]}, [POSITIONS, ROWS], "not a site"),
        ({"spans": [SpanHeader("k", "r0", 0, 1)]}, [POSITIONS, ROWS], "spans cover 1 of 2"),
        ({"spans": [SpanHeader("k", "r0", 1, 2)]}, [POSITIONS, ROWS], "spans do not cover"),
        ({"spans": [SpanHeader("k", "r0", 0, 2), SpanHeader("k", "r0", 2, 1)]}, [POSITIONS, ROWS], "spans do not"),
    ],
)
def test_rows_whose_header_and_frames_differ_are_refused(
    changes: dict[str, object], arrays: list[bytes | memoryview], complaint: str
) -> None:
    message = Rows(stage=0, blocks=[msgspec.structs.replace(HEADER, **changes)])
    frames = frames_of([encode(message), *arrays])

    with pytest.raises(MalformedMessage, match=complaint):
        read_rows(decode_frames(frames), frames, {("k", "r0"): request()})


SPEC = {"sites": {"post_mlp": [0]}, "positions": "all", "options": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"capture": None},
        {"specs": {}},
        {"specs": {"files": SPEC, "others": SPEC}},
        {"specs": {"files": {}}},
        {"specs": {"files": {**SPEC, "sites": {"nowhere": [1]}}}},
        {"specs": {"files": {**SPEC, "sites": []}}},
        {"stage": 2},
        {"stage": -1},
        {"req_id": "2_r0"},
        {"req_id": "r0"},
        {"readouts": {"nowhere": ReadoutFacts(1, "key")}},
    ],
)
def test_a_begin_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    begin = begin_of(request("1_r0"), instance="files", stage=1, num_stages=2)
    if "specs" in changes:
        assert begin.capture is not None
        changes = {"capture": {**begin.capture, **changes}}

    with pytest.raises(MalformedMessage):
        read_begin(msgspec.structs.replace(begin, **changes))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_happens(header: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_frames([zmq.Frame(header)])


@pytest.mark.parametrize(
    "header",
    [
        msgspec.msgpack.encode({"type": "result"}),
        msgspec.msgpack.encode({"type": "pickle", "data": b"cos\nsystem\n"}),
        b"\x91" * 100_000,
        b"",
    ],
)
def test_msgpack_that_is_no_message_is_refused(header: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_frames([zmq.Frame(header)])


def test_a_message_without_frames_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        decode_frames([])


@given(st.data())
def test_selected_spans_hold_their_own_rows(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    whole = block([request(str(index)) for index in range(len(counts))], counts)
    chosen = data.draw(st.lists(st.sampled_from(whole.spans), min_size=1, unique_by=lambda span: span.start))

    part = select_spans(whole, chosen)

    assert part.spans[-1].stop == len(part.positions) == part.rows.shape[1]
    for before, after in zip(chosen, part.spans, strict=True):
        assert after.request is before.request
        assert torch.equal(part.rows[:, after.start : after.stop], whole.rows[:, before.start : before.stop])
        assert np.array_equal(part.positions[after.start : after.stop], whole.positions[before.start : before.stop])
