"""Rows are cut for each consumer exactly as the masks say, and copied only where that cannot be helped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.completeness import ConsumerRequest
from headgate.capture.delivery.row_packets import BlockPart, Packet, Splitter
from headgate.capture.planning.step_plan import PackGroup, SiteSet, take_spans
from tests.fakes.pipeline import HIDDEN, SITES, consumer_request, info, packet

Requests = dict[str, dict[int, ConsumerRequest]]


def group_of(members: list[tuple[str, int]], masks: list[int]) -> tuple[PackGroup, torch.Tensor, Requests]:
    """Rows of requests, ``(req_id, number of rows)``, with their masks; each row's values are its number."""
    spans, stop = [], 0
    for req_id, count in members:
        start, stop = stop, stop + count
        spans.append((req_id, start, stop))
    group = PackGroup(
        site_set=SiteSet(SITES, np.arange(len(SITES))),
        rows=np.arange(stop),
        positions=np.concatenate([np.arange(count) for _, count in members]),
        masks=np.array(masks),
        spans=tuple(spans),
    )
    rows = torch.arange(stop).float()[None, :, None].expand(len(SITES), stop, HIDDEN).contiguous()
    bits = range(64)
    return group, rows, {req_id: {bit: ConsumerRequest(info(req_id)) for bit in bits} for req_id, _ in members}


def split(group: PackGroup, rows: torch.Tensor, requests: Requests) -> Iterator[tuple[int, BlockPart]]:
    splitter = Splitter()
    for req_id, by_bit in requests.items():
        splitter.begin(req_id, by_bit)
    return splitter.split(group, rows)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[tuple[str, int]], list[int]]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    masks = draw(st.lists(st.sampled_from([1, 2, 3, 5, 1 << 62, 7]), min_size=sum(counts), max_size=sum(counts)))
    return [(f"request-{number}", count) for number, count in enumerate(counts)], masks


@given(groups())
def test_each_consumer_gets_the_rows_whose_masks_have_its_bit(drawn: tuple[list[tuple[str, int]], list[int]]) -> None:
    members, masks = drawn
    group, rows, requests = group_of(members, masks)
    owners = [req_id for req_id, count in members for _ in range(count)]
    expected = {
        bit: [(owners[row], int(group.positions[row]), float(row)) for row, mask in enumerate(masks) if mask >> bit & 1]
        for bit in range(63)
    }

    got = {}
    for bit, (block, found) in split(group, rows, requests):
        assert list(found) == [requests[span.request.request_id][bit] for span in block.spans]
        assert [span.start for span in block.spans] == [0, *(span.stop for span in block.spans[:-1])]
        assert all(torch.equal(block.rows[0], block.rows[site]) for site in range(len(SITES)))
        got[bit] = [
            (span.request.request_id, int(block.positions[row]), float(block.rows[0, row, 0]))
            for span in block.spans
            for row in range(span.start, span.stop)
        ]

    assert got == {bit: found for bit, found in expected.items() if found}


def test_consumers_that_want_everything_share_the_tensor() -> None:
    group, rows, requests = group_of([("request-1", 3)], [3, 3, 3])

    blocks = [block for _, (block, _) in split(group, rows, requests)]

    assert [block.rows is rows for block in blocks] == [True, True]
    assert all(block.positions is group.positions for block in blocks)


def test_consecutive_rows_are_a_slice_and_others_a_copy() -> None:
    group, rows, requests = group_of([("request-1", 4)], [1 | 2, 2, 2, 1 | 4])

    found = {bit: block.rows for bit, (block, _) in split(group, rows, requests)}

    storage = rows.untyped_storage().data_ptr()
    assert found[1].untyped_storage().data_ptr() == storage
    assert found[2].untyped_storage().data_ptr() == storage
    assert found[0].untyped_storage().data_ptr() != storage


def test_an_id_that_lives_again_owns_its_rows_from_then_on() -> None:
    group, rows, requests = group_of([("request-1", 1), ("request-2", 1)], [1, 1])
    splitter, reborn = Splitter(), ConsumerRequest(info("request-1"))
    for req_id, by_bit in requests.items():
        splitter.begin(req_id, by_bit)

    def owners(of: PackGroup) -> list[ConsumerRequest]:
        return [owner for _, (_, found) in splitter.split(of, rows) for owner in found]

    first, second = requests["request-1"][0], requests["request-2"][0]
    assert owners(group) == owners(group) == [first, second]
    assert splitter.end("request-1") is requests["request-1"]
    splitter.begin("request-1", {0: reborn})
    assert owners(group) == [reborn, second]
    swapped = replace(group, spans=(("request-2", 0, 1), ("request-1", 1, 2)))
    assert owners(swapped) == [second, reborn]
    assert splitter.end("nobody") == {}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_spans_of_chosen_rows_are_those_of_a_slow_loop(counts: list[int], data: st.DataObject) -> None:
    stops = np.cumsum(counts).tolist()
    spans = tuple((f"r{i}", stop - count, stop) for i, (stop, count) in enumerate(zip(stops, counts, strict=True)))
    index = np.array(sorted(data.draw(st.sets(st.integers(0, stops[-1] - 1)))), dtype=np.int64)

    taken = take_spans(spans, index)

    owners = [req_id for req_id, start, stop in spans for row in range(start, stop) if row in index]
    assert [req_id for req_id, start, stop in taken for _ in range(start, stop)] == owners
    assert [start for _, start, _ in taken] == [0, *(stop for _, _, stop in taken[:-1])][: len(taken)]


def test_a_packet_counts_each_position_once_however_many_blocks_it_is_in() -> None:
    request = consumer_request()
    first, rest = packet([(request, [0, 1])], SITES[:1]), packet([(request, [0, 1])], SITES[1:])
    both = Packet([*first.parts, *rest.parts])

    assert both.num_rows == 2
    assert both.num_bytes == 2 * len(SITES) * HIDDEN * 4
    assert both.requests() == [request]


def test_rows_of_failed_requests_are_left_out() -> None:
    good, bad, other = consumer_request("request-1"), consumer_request("request-2"), consumer_request("request-3")
    whole = packet([(good, [0, 1]), (bad, [5]), (other, [7, 8])])
    assert whole.without_failed() is whole

    bad.failure = "it failed"
    kept = whole.without_failed()

    assert kept is not None
    (block,) = kept.blocks
    assert block.positions.tolist() == [0, 1, 7, 8]
    assert block.rows[0, :, :2].tolist() == [[1, 0], [1, 1], [3, 7], [3, 8]]
    assert [(span.request.request_id, span.start, span.stop) for span in block.spans] == [
        ("request-1", 0, 2),
        ("request-3", 2, 4),
    ]
    assert [owners for _, owners in kept.parts] == [(good, other)]


def test_nothing_is_left_of_a_packet_of_failed_requests() -> None:
    request = consumer_request()
    request.failure = "it failed"

    assert packet([(request, [0])]).without_failed() is None


def test_requests_that_want_columns_get_blocks_of_these_alone() -> None:
    members = [("whole", 2), ("first", 1), ("again", 1), ("last", 2)]
    group, rows, requests = group_of(members, [1] * 6)
    rows = rows + torch.arange(HIDDEN)
    wanted = {"first": ((0, 1), (2, 3)), "again": ((0, 1), (2, 3)), "last": ((1, 3),)}
    for req_id, columns in wanted.items():
        given = info(req_id)
        cut = replace(given, spec=replace(given.spec, columns={SITES[0]: columns}))
        requests[req_id] = {0: ConsumerRequest(cut)}

    parts = [part for _, part in split(group, rows, requests)]

    found = {(block.sites, tuple(owner.info.request_id for owner in owners)): block for block, owners in parts}
    pair, rest = ("first", "again"), SITES[1:]
    assert set(found) == {
        (SITES, ("whole",)),
        *((sites, owners) for owners in (pair, ("last",)) for sites in (SITES[:1], rest)),
    }
    assert torch.equal(found[SITES, ("whole",)].rows, rows[:, :2])
    assert torch.equal(found[SITES[:1], pair].rows, rows[:1, 2:4][:, :, [0, 2]])
    assert torch.equal(found[rest, pair].rows, rows[1:, 2:4])
    assert torch.equal(found[SITES[:1], ("last",)].rows, rows[:1, 4:][:, :, 1:3])
    assert [(span.start, span.stop) for span in found[SITES[:1], pair].spans] == [(0, 1), (1, 2)]
    assert all(block.rows.is_contiguous() for key, block in found.items() if key[0] == SITES[:1])
