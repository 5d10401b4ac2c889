"""Turns the rows of many steps into whole requests: how a `BatchedConsumer` is fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headgate.capture.batch import Int64Array
from headgate.capture.consumer import (
    BatchedConsumer,
    CapturedRequest,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    RowSpan,
)
from headgate.capture.sites import Site

GROWTH = 1.5
MIN_ROWS = 16


class Assembler:
    """Collects each request's rows and hands them over whole when it is finished.

    Rows are copied out of their blocks at once: a block holds rows of every request of its step, and keeping a
    slice of it would keep all of them in memory for as long as the longest request runs.

    Not locked: all calls come from one thread, the consumer's.

    Args:
        consumer: Gets `on_capture` once for each finished request.
    """

    def __init__(self, consumer: BatchedConsumer) -> None:
        self._consumer = consumer
        self._requests: dict[str, _CollectedRows] = {}

    def begin(self, request: RequestInfo) -> None:
        """Expect rows of `request`."""
        self._requests[request.request_id] = _CollectedRows(request, self._consumer.context.model)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        """Copy out the rows of every span."""
        for block in blocks:
            for span in block.spans:
                self._requests[span.request.request_id].add(block, span)

    def finish(self, finished: FinishedRequest) -> Any:
        """Hand the request over, without the rows that were computed in vain; return what the consumer returns."""
        collected = self._requests.pop(finished.request.request_id)
        positions, rows = collected.below(finished.final.num_rows)
        captured = CapturedRequest(
            request=finished.request,
            final=finished.final,
            sites=finished.request.spec.sites,
            rows=rows,
            positions=positions,
            token_ids=finished.final.token_ids[positions],
            dropped_rows=finished.dropped_rows,
        )
        return self._consumer.on_capture(captured)

    def abandon(self, request: RequestInfo) -> None:
        """Throw away what was collected of `request`, if anything."""
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        """Close the consumer; what is not finished by now never will be."""
        self._requests.clear()
        self._consumer.close(timeout_s)


class _CollectedRows:
    """The rows of one request so far: `S` sites, room for `C` rows of each, which grows."""

    def __init__(self, request: RequestInfo, model: ModelInfo) -> None:
        self._sites = request.spec.sites
        self._index = {site: index for index, site in enumerate(self._sites)}
        self._num_rows = [0] * len(self._sites)
        prompt = np.arange(request.num_prompt_tokens, dtype=np.int64)
        num_wanted = int(request.spec.positions.mask(prompt, np.full_like(prompt, len(prompt))).sum())
        capacity = max(num_wanted, MIN_ROWS)
        # Memory that is not written to yet costs nothing: the system backs it page by page.
        self._rows = torch.empty(len(self._sites), capacity, model.hidden_size, dtype=getattr(torch, model.dtype))
        self._positions = np.empty((len(self._sites), capacity), dtype=np.int64)

    def add(self, block: RowBlock, span: RowSpan) -> None:
        """Append the rows of `span` to each of the block's sites."""
        positions = block.positions[span.start : span.stop]
        if block.sites == self._sites and len(set(self._num_rows)) == 1:
            self._append(slice(None), self._num_rows[0], positions, block.rows[:, span.start : span.stop])
            self._num_rows = [self._num_rows[0] + len(positions)] * len(self._sites)
            return
        for rows, site in zip(block.rows, block.sites, strict=True):
            index = self._index[site]
            self._append(slice(index, index + 1), self._num_rows[index], positions, rows[span.start : span.stop])
            self._num_rows[index] += len(positions)

    def below(self, num_positions: int) -> tuple[Int64Array, dict[Site, Tensor]]:
        """Positions below `num_positions` that every site has, and each site's rows of them."""
        kept = [
            positions[: np.searchsorted(positions[:count], num_positions)]
            for positions, count in zip(self._positions, self._num_rows, strict=True)
        ]
        common = kept[0]
        if all(np.array_equal(common, positions) for positions in kept[1:]):
            rows = self._rows[:, : len(common)]
            return common.copy(), {site: rows[index] for site, index in self._index.items()}
        # Stages drop rows independently under overload: only what is complete can be handed over.
        for positions in kept[1:]:
            common = np.intersect1d(common, positions, assume_unique=True)
        places = [torch.from_numpy(np.searchsorted(positions, common)) for positions in kept]
        return common, {site: self._rows[index].index_select(0, places[index]) for site, index in self._index.items()}

    def _append(self, sites: slice, start: int, positions: Int64Array, rows: Tensor) -> None:
        stop = start + len(positions)
        if stop > self._rows.shape[1]:
            self._grow(stop)
        self._rows[sites, start:stop] = rows
        self._positions[sites, start:stop] = positions

    def _grow(self, num_rows: int) -> None:
        capacity = max(num_rows, int(self._rows.shape[1] * GROWTH))
        used = max(self._num_rows)
        rows = torch.empty(len(self._sites), capacity, self._rows.shape[2], dtype=self._rows.dtype)
        rows[:, :used] = self._rows[:, :used]
        positions = np.empty((len(self._sites), capacity), dtype=np.int64)
        positions[:, :used] = self._positions[:, :used]
        self._rows, self._positions = rows, positions
