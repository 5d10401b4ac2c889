"""Batched consumers get whole requests: every row once, in order, trimmed, in memory of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.request_assembler import Assembler
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    ConsumerContext,
    FinishedRequest,
    RequestInfo,
)
from headgate.capture.schema.positions import Named, Span
from headgate.capture.schema.sites import HookPoint, Site
from tests.fakes.pipeline import HIDDEN, MODEL, SITES, block, consumer_request, final_state, info, row_values


class Keeper(BatchedConsumer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__({}, ConsumerContext(instance_name="keeper", model=MODEL))
        self.captured: list[CapturedRequest] = []
        self.closed_with: float | None = None

    def on_capture(self, captured: CapturedRequest) -> Any:
        self.captured.append(captured)
        return f"payload of {captured.request.request_id}"

    def close(self, timeout_s: float) -> None:
        self.closed_with = timeout_s


def finished(request: RequestInfo, num_tokens: int, dropped_rows: int = 0) -> FinishedRequest:
    final = final_state(request.num_prompt_tokens, num_tokens)
    return FinishedRequest(request=request, final=final, dropped_rows=dropped_rows)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 60),
)
def test_rows_come_back_in_order_and_trimmed_however_they_arrived(
    chunks: list[int], sites_per_block: int, in_one_write: bool, num_tokens: int
) -> None:
    keeper, request = Keeper(), consumer_request(num_prompt=5)
    assembler, at = Assembler(keeper), 0
    assembler.begin(request.info)

    for chunk in chunks:
        blocks = [
            block(
                [(consumer_request("request-9"), [at]), (request, range(at, at + chunk))],
                SITES[i : i + sites_per_block],
            )
            for i in range(0, len(SITES), sites_per_block)
        ]
        at += chunk
        mine = [replace(whole, spans=whole.spans[1:]) for whole in blocks]
        for write in [mine] if in_one_write else [[one] for one in mine]:
            assembler.write(write)
    assert assembler.finish(finished(request.info, max(num_tokens, 5), 3)) == "payload of request-1"

    (captured,) = keeper.captured
    expected = np.arange(min(at, captured.final.num_rows))
    assert np.array_equal(captured.positions, expected)
    assert np.array_equal(captured.token_ids, captured.final.token_ids[expected])
    assert captured.dropped_rows == 3
    assert captured.sites == SITES
    for index, site in enumerate(SITES):
        assert torch.equal(captured.rows[site], row_values(1, expected, index))


def test_positions_may_have_gaps() -> None:
    keeper, request = Keeper(), consumer_request(num_prompt=4, positions=Span(0, None, 3))
    assembler = Assembler(keeper)

    assembler.begin(request.info)
    assembler.write([block([(request, [0, 3])])])
    assembler.write([block([(request, [6])])])
    assembler.finish(finished(request.info, 20))

    assert keeper.captured[0].positions.tolist() == [0, 3, 6]
    assert keeper.captured[0].is_prefill.tolist() == [True, True, False]


def test_hook_points_may_have_positions_of_their_own() -> None:
    first = Site(0, HookPoint.PRE_ATTN)
    keeper, request = Keeper(), consumer_request(num_prompt=4)
    spec = replace(request.info.spec, sites=(first, *SITES), hook_positions={HookPoint.PRE_ATTN: Named("last_prompt")})
    request.info = replace(request.info, spec=spec)
    assembler = Assembler(keeper)
    rows = block([(request, [3])], SITES[:1])

    assembler.begin(request.info)
    assembler.write([block([(request, range(5))])])
    assembler.write([replace(rows, sites=(first,))])
    assembler.finish(finished(request.info, 6))

    (captured,) = keeper.captured
    assert list(captured.rows) == [first, *SITES]
    assert (captured.positions.tolist(), captured.positions_at(first).tolist()) == ([0, 1, 2, 3, 4], [3])
    assert torch.equal(captured.rows[first], rows.rows[0])
    assert torch.equal(captured.rows[SITES[2]], row_values(1, np.arange(5), 2))


def test_what_is_kept_of_a_request_does_not_hold_the_rows_of_its_neighbours() -> None:
    keeper, request, neighbour = Keeper(), consumer_request("request-1"), consumer_request("request-2", num_prompt=1000)
    assembler = Assembler(keeper)
    shared = block([(request, [0, 1, 2, 3]), (neighbour, range(1000))])

    assembler.begin(request.info)
    assembler.begin(neighbour.info)
    assembler.write([shared])
    assembler.finish(finished(request.info, 5))

    (captured,) = keeper.captured
    kept = captured.rows[SITES[0]].untyped_storage().nbytes()
    assert kept < shared.rows.nbytes / 10


@pytest.mark.parametrize("num_tokens", [5, 6, 200])
def test_what_is_handed_over_takes_no_more_memory_than_its_rows(num_tokens: int) -> None:
    keeper, request = Keeper(), consumer_request(num_prompt=4)
    assembler = Assembler(keeper)

    assembler.begin(request.info)
    assembler.write([block([(request, range(num_tokens))])])
    assembler.finish(finished(request.info, num_tokens))

    (captured,) = keeper.captured
    assert captured.rows[SITES[0]].untyped_storage().nbytes() == len(SITES) * (num_tokens - 1) * HIDDEN * 4


def test_rows_of_several_requests_do_not_mix() -> None:
    keeper = Keeper()
    assembler = Assembler(keeper)
    requests = [consumer_request(f"request-{number}", num_prompt=2) for number in (3, 4)]

    for request in requests:
        assembler.begin(request.info)
    for positions in ([0, 1], [2]):
        assembler.write([block([(request, positions) for request in requests])])
    for request in requests:
        assembler.finish(finished(request.info, 4))

    for captured, number in zip(keeper.captured, (3, 4), strict=True):
        assert torch.equal(captured.rows[SITES[2]], row_values(number, np.arange(3), 2))


def test_only_positions_that_every_site_has_are_handed_over() -> None:
    keeper, request = Keeper(), consumer_request(num_prompt=4)
    assembler = Assembler(keeper)

    assembler.begin(request.info)
    assembler.write([block([(request, [0, 1, 3])], SITES[:2])])
    assembler.write([block([(request, [1, 2, 3])], SITES[2:])])
    assembler.finish(finished(request.info, 5))

    (captured,) = keeper.captured
    assert captured.positions.tolist() == [1, 3]
    for index, site in enumerate(SITES):
        assert torch.equal(captured.rows[site], row_values(1, np.array([1, 3]), index))


@pytest.mark.parametrize("selector", [Named("all"), Named("all_generated")], ids=str)
def test_a_request_without_rows_is_handed_over_empty(selector: Named) -> None:
    keeper, request = Keeper(), info(positions=selector)
    assembler = Assembler(keeper)

    assembler.begin(request)
    assembler.finish(finished(request, 5))

    (captured,) = keeper.captured
    assert [rows.shape for rows in captured.rows.values()] == [(0, HIDDEN)] * len(SITES)
    assert captured.positions.shape == captured.token_ids.shape == (0,)


def test_an_abandoned_request_is_forgotten_and_its_id_can_begin_again() -> None:
    keeper, request = Keeper(), consumer_request()
    assembler = Assembler(keeper)

    assembler.begin(request.info)
    assembler.write([block([(request, [0, 1])])])
    assembler.abandon(request.info)
    assembler.abandon(request.info)
    assembler.begin(request.info)
    assembler.write([block([(request, [0])])])
    assembler.finish(finished(request.info, 5))

    assert [captured.positions.tolist() for captured in keeper.captured] == [[0]]


def test_closing_closes_the_consumer() -> None:
    keeper = Keeper()

    Assembler(keeper).close(3.0)

    assert keeper.closed_with == 3.0
