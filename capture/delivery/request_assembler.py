"""Whole requests out of the rows of many steps, for a `BatchedConsumer` and others that need them.

Shapes: S sites, N rows of a block, C rows that there is room for, D width of a row, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.delivery.row_packets import RowPool
from headgate.capture.monitoring.stats import Figure, figures_of
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.config import MIB
from headgate.capture.schema.consumer import (
    BatchedConsumer,
    CapturedRequest,
    FinishedRequest,
    ModelInfo,
    RequestInfo,
    RowBlock,
    RowSpan,
)
from headgate.capture.schema.sites import Site

Bytes = npt.NDArray[np.uint8]

CHUNK_ROWS = 32
"""Rows of a chunk of a request's memory; the first has room for the wanted part of the prompt."""

KEEP_BYTES = 512 * MIB
"""Unused host memory kept for later requests: enough for 64 requests of all layers of a 4B model."""


class RequestCollector:
    """Collects each request's rows and hands them over whole when it is finished.

    Rows are copied out of their blocks at once: a block holds rows of every request of its step, and keeping a
    slice of it would keep all of them in memory for as long as the longest request runs.

    Not locked: all calls come from one thread, the consumer's.

    Args:
        model: The model being served.
        on_capture: Called once for each finished request.
    """

    def __init__(self, model: ModelInfo, on_capture: Callable[[CapturedRequest], Any]) -> None:
        self._model = model
        self._on_capture = on_capture
        self._pool = RowPool(KEEP_BYTES)
        self._requests: dict[str, _CollectedRows] = {}

    def begin(self, request: RequestInfo) -> None:
        """Expect rows of `request`."""
        self._requests[request.request_id] = _CollectedRows(request, self._model, self._pool)

    def write(
        self, blocks: Sequence[RowBlock], has_room: Callable[[RowSpan, RowBlock], bool] = lambda span, block: True
    ) -> None:
        """Copy out the rows of every span, or only of the spans for which `has_room` returns true."""
        for block in blocks:
            rows_SNB: Bytes = block.rows.view(torch.uint8).numpy()
            for span in block.spans:
                if has_room(span, block):
                    self._requests[span.request.request_id].add(block, rows_SNB, span.start, span.stop)

    def finish(self, finished: FinishedRequest) -> Any:
        """Hand the request over, without the rows that were computed in vain; return what `on_capture` returns."""
        collected = self._requests.pop(finished.request.request_id)
        spec = finished.request.spec
        positions, rows = collected.rows_below(finished.final.num_rows)
        common, *own = positions
        captured = CapturedRequest(
            request=finished.request,
            final=finished.final,
            sites=spec.sites,
            rows=rows,
            positions=common,
            token_ids=finished.final.token_ids[common],
            dropped_rows=finished.dropped_rows,
            hook_positions=dict(zip(spec.hook_positions, own, strict=True)),
        )
        return self._on_capture(captured)

    def abandon(self, request: RequestInfo) -> None:
        """Throw away the collected rows of `request`, if any."""
        self._requests.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        """Throw away all rows: requests that are not finished by now never will be."""
        self._requests.clear()


class Assembler(RequestCollector):
    """A `BatchedConsumer` as its thread sees it.

    Args:
        consumer: Gets `on_capture` once for each finished request.
    """

    def __init__(self, consumer: BatchedConsumer) -> None:
        super().__init__(consumer.context.model, consumer.on_capture)
        self._consumer = consumer

    def figures(self) -> tuple[Figure, ...]:
        """The numbers that the consumer counts by itself."""
        return figures_of(self._consumer)

    def close(self, timeout_s: float) -> None:
        """Throw away all rows, and close the consumer."""
        super().close(timeout_s)
        self._consumer.close(timeout_s)


class _CollectedRows:
    """The rows of one request so far, by the sets of sites that they came in."""

    def __init__(self, request: RequestInfo, model: ModelInfo, pool: RowPool) -> None:
        self._pool = pool
        self._request = request
        self._model = model
        self._spec = request.spec
        self._num_prompt = request.num_prompt_tokens
        self._parts: list[_SiteRows] = []

    def add(self, block: RowBlock, rows_SNB: Bytes, start: int, stop: int) -> None:
        """Append rows ``start : stop`` of `block`, whose rows are `rows_SNB`."""
        # Few kinds of blocks come for a request, and all of a kind share the tuple of their sites.
        part = next((part for part in self._parts if part.sites is block.sites), None)
        if part is None:
            part = _SiteRows(block, self._num_expected(block.sites), self._pool)
            self._parts.append(part)
        part.add(rows_SNB, block.positions, start, stop)

    def rows_below(self, num_positions: int) -> tuple[list[Int64Array], dict[Site, Tensor]]:
        """Return each site's rows of positions below `num_positions`, and the positions of each of the selections."""
        pieces: dict[Site, list[tuple[Int64Array, Tensor]]] = {site: [] for site in self._spec.sites}
        for part in self._parts:
            positions, rows_SND = part.rows_below(num_positions)
            for site, rows_ND in zip(part.sites, rows_SND, strict=True):
                pieces[site].append((positions, rows_ND))
        found: dict[Site, Tensor] = {}
        positions_of: list[Int64Array] = []
        for selected, _ in self._spec.selections:
            common, rows = _complete({site: self._join(site, pieces[site]) for site in selected})
            positions_of.append(common)
            found |= rows
        return positions_of, {site: found[site] for site in self._spec.sites}

    def _num_expected(self, sites: Sequence[Site]) -> int:
        """Count the positions of the prompt that are wanted at all of some sites."""
        prompt = np.arange(self._num_prompt, dtype=np.int64)
        selectors = {id(each): each for each in map(self._spec.positions_at, sites)}.values()
        chosen = [each.mask(prompt, np.full_like(prompt, self._num_prompt)) for each in selectors]
        return int(np.all(chosen, axis=0).sum())

    def _join(self, site: Site, pieces: list[tuple[Int64Array, Tensor]]) -> tuple[Int64Array, Tensor]:
        """Put one site's rows in the order of their positions."""
        if not pieces:
            shape = self._request.shape(site, self._model)
            return np.empty(0, dtype=np.int64), torch.empty(0, shape.width, dtype=getattr(torch, shape.dtype))
        if len(pieces) == 1:
            return pieces[0]
        positions = np.concatenate([positions for positions, _ in pieces])
        order = np.argsort(positions)
        return positions[order], torch.cat([rows for _, rows in pieces])[torch.from_numpy(order)]


def _complete(sites: Mapping[Site, tuple[Int64Array, Tensor]]) -> tuple[Int64Array, dict[Site, Tensor]]:
    """Return the positions that all of some sites have, and each site's rows of them."""
    common = next((positions for positions, _ in sites.values()), np.empty(0, dtype=np.int64))
    if all(positions is common or np.array_equal(positions, common) for positions, _ in sites.values()):
        return common, {site: rows for site, (_, rows) in sites.items()}
    # Rows of some sites were lost on their way: only complete positions can be handed over.
    for positions, _ in sites.values():
        common = np.intersect1d(common, positions, assume_unique=True)
    return common, {
        site: rows[torch.from_numpy(np.searchsorted(positions, common))] for site, (positions, rows) in sites.items()
    }


class _SiteRows:
    """Rows that came with the same sites, in chunks of host memory; a request's prompt goes into the first.

    As bytes, since numpy copies single rows ten times as fast as torch does.
    """

    def __init__(self, block: RowBlock, num_expected: int, pool: RowPool) -> None:
        self.sites = block.sites
        self._dtype = block.rows.dtype
        self._row_bytes = block.rows.shape[2] * self._dtype.itemsize
        self._pool = pool
        self._chunks = [self._chunk(num_expected or CHUNK_ROWS)]
        self._num_free = self._chunks[0].shape[1]
        self._positions: Int64Array = np.empty(self._num_free, dtype=np.int64)
        self._num_rows = 0

    def add(self, rows_SNB: Bytes, positions: Int64Array, start: int, stop: int) -> None:
        first, end = self._num_rows, self._num_rows + stop - start
        if end > len(self._positions):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[:first] = self._positions[:first]
            self._positions = grown
        self._positions[first:end] = positions[start:stop]
        self._num_rows = end
        while start < stop:
            if not self._num_free:
                self._chunks.append(self._chunk(max(stop - start, CHUNK_ROWS)))
                self._num_free = self._chunks[-1].shape[1]
            count = min(stop - start, self._num_free)
            at = self._chunks[-1].shape[1] - self._num_free
            self._chunks[-1][:, at : at + count] = rows_SNB[:, start : start + count]
            self._num_free -= count
            start += count

    def rows_below(self, num_positions: int) -> tuple[Int64Array, Tensor]:
        """Return the positions below `num_positions`, and their rows at every site."""
        count = int(np.searchsorted(self._positions[: self._num_rows], num_positions))
        positions = self._positions[:count].copy()
        if count == self._chunks[0].shape[1]:
            return positions, torch.from_numpy(self._chunks[0]).view(self._dtype)
        rows_SCB = self._pool.empty((len(self.sites), count, self._row_bytes), torch.uint8)
        at = 0
        for chunk in self._chunks:
            taken = torch.from_numpy(chunk)[:, : count - at]
            rows_SCB[:, at : at + taken.shape[1]] = taken
            at += taken.shape[1]
        return positions, rows_SCB.view(self._dtype)

    def _chunk(self, num_rows: int) -> Bytes:
        chunk: Bytes = self._pool.empty((len(self.sites), num_rows, self._row_bytes), torch.uint8).numpy()
        return chunk
