"""Rows of many steps, gathered: each site's rows in their order, whatever the blocks looked like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.delivery.row_packets import RowPool
from headgate.capture.schema.consumer import RequestInfo, RowBlock, RowSpan
from headgate.capture.schema.positions import Named
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.filesystem import request_writer
from headgate.consumers.filesystem.request_writer import MAX_BLOCKS, RowGatherer, chunks_of

SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(3))
REQUESTS = [
    RequestInfo(
        request_id=name,
        client_request_id=name,
        prompt_token_ids=np.zeros(1, dtype=np.int64),
        spec=CaptureSpec(sites=SITES, positions=Named("all")),
    )
    for name in ("a", "b", "c")
]

partitions = st.sampled_from([[(0, 1, 2)], [(0,), (1, 2)], [(2,), (0, 1)], [(0,), (1,), (2,)]])
steps = st.lists(
    st.tuples(st.lists(st.integers(0, 2), unique=True, min_size=1), partitions, st.integers(1, 4)), max_size=12
)


def block_of(request_indices: list[int], site_indices: tuple[int, ...], num_rows: int, computed: list[int]) -> RowBlock:
    """Rows whose every byte pair names its request, site and position."""
    spans, positions, columns = [], [], []
    for place, index in enumerate(request_indices):
        spans.append(RowSpan(request=REQUESTS[index], start=place * num_rows, stop=(place + 1) * num_rows))
        of_request = np.arange(computed[index], computed[index] + num_rows)
        positions.append(of_request)
        columns.append([[value(index, site, position)] for site in site_indices for position in of_request])
    rows = torch.tensor(np.array(columns).reshape(len(request_indices), len(site_indices), num_rows, 1))
    return RowBlock(
        sites=tuple(SITES[index] for index in site_indices),
        rows=rows.transpose(0, 1).reshape(len(site_indices), -1, 1).to(torch.int16),
        positions=np.concatenate(positions),
        spans=tuple(spans),
    )


def value(request: int, site: int, position: int) -> int:
    return request * 10_000 + site * 1_000 + position


@given(steps, st.integers(0, 2))
def test_every_row_comes_out_once_and_in_order(
    plan: list[tuple[list[int], list[tuple[int, ...]], int]], taken_alone: int
) -> None:
    gatherer = RowGatherer(1 << 20)
    computed = [0, 0, 0]
    for request_indices, parts, num_rows in plan:
        for part in parts:
            block = block_of(request_indices, part, num_rows, computed)
            gatherer.add(block, block.rows.view(torch.uint8).numpy())
        for index in request_indices:
            computed[index] += num_rows

    alone = gatherer.pop(REQUESTS[taken_alone].request_id)
    pool, pieces = RowPool(0), {**gatherer.pop_all(), REQUESTS[taken_alone].request_id: alone}
    chunks = {request_id: chunks_of(of_request, pool) for request_id, of_request in pieces.items() if of_request}

    for index, request in enumerate(REQUESTS):
        for place, site in enumerate(SITES):
            found = [
                (int(position), int(row.view(np.int16)[0]))
                for chunk in chunks.get(request.request_id, [])
                if site in chunk.sites and chunk.data is not None
                for position, row in zip(chunk.positions, chunk.data[chunk.sites.index(site)], strict=True)
            ]
            assert found == [(position, value(index, place, position)) for position in range(computed[index])]
    assert gatherer.pop_all() == {}


def test_it_is_full_by_blocks_and_by_bytes() -> None:
    block = block_of([0], (0, 1, 2), 4, [0, 0, 0])
    data = block.rows.view(torch.uint8).numpy()
    by_bytes, by_blocks = RowGatherer(2 * data.nbytes), RowGatherer(1 << 20)

    by_bytes.add(block, data)
    assert not by_bytes.is_full
    by_bytes.add(block, data)
    assert by_bytes.is_full

    for _ in range(MAX_BLOCKS):
        assert not by_blocks.is_full
        by_blocks.add(block, data)
    assert by_blocks.is_full
    by_blocks.pop_all()
    assert not by_blocks.is_full


def test_few_rows_of_a_large_block_do_not_keep_it_in_memory() -> None:
    block = block_of([0, 1, 2], (0, 1, 2), 4, [0, 0, 0])
    data = block.rows.view(torch.uint8).numpy()
    gatherer = RowGatherer(1 << 20)
    gatherer.add(block, data)

    for pieces in gatherer.pop_all().values():
        for chunk in chunks_of(pieces, RowPool(0)):
            assert chunk.data is not None
            assert not np.shares_memory(chunk.data, data)


def test_many_rows_that_have_their_block_for_themselves_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_writer, "MIN_CHUNK_BYTES", 3 * 4 * 2)
    gatherer = RowGatherer(1 << 20)
    whole, later, part = (block_of([0], (0, 1, 2), rows, [at, 0, 0]) for at, rows in ((0, 4), (4, 5), (9, 1)))
    arrays = [block.rows.view(torch.uint8).numpy() for block in (whole, later, part)]
    for block, data in zip((whole, later, part), arrays, strict=True):
        gatherer.add(block, data)

    first, second, third = chunks_of(gatherer.pop("a"), RowPool(0))

    assert first.data is arrays[0] or np.shares_memory(first.data, arrays[0])
    assert np.shares_memory(second.data, arrays[1])
    assert [chunk.positions.tolist() for chunk in (first, second, third)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9]]
