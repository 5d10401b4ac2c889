"""The requests of one writer thread, from their first row to their files.

Rows of the last few steps by request, cut out of their blocks many steps at a time.

A decode step brings one row each of many requests. Cutting each out at once would cost a dozen Python calls per token,
and they would hold up the engine's own thread; so blocks are kept for a few steps and a request's rows are then copied
out of all of them together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, RequestInfo, RowBlock
from headgate.capture.schema.errors import ConsumerError
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.formats.layout import Finished, Layout, Stored
from headgate.consumers.filesystem.formats.sidecar import ITEM_SIZES, LayoutName, sidecar_of
from headgate.consumers.filesystem.storage.names import Target, stem_of
from headgate.consumers.filesystem.storage.store import Settling
from headgate.consumers.filesystem.writing.spool import Chunk, Spool

logger = logging.getLogger(__name__)

Outcome = Future[dict[str, Any]]


@dataclass(slots=True)
class _Running:
    """A request that has not ended; with `error`, its further rows are thrown away."""

    request: RequestInfo
    spool: Spool = field(default_factory=Spool)
    error: ConsumerError | None = None


class Partition:
    """Collects rows per request, spills them when they are many, stores them when the request ends.

    Used by one writer thread. What goes wrong with a request ends that request, in its outcome, and nothing else.

    Args:
        context: Of the consumer.
        layouts: The layouts that requests may name; for this thread alone.
        temp_path: Gives paths for temporary files.
        max_request_bytes: Rows of one request held in memory.
        memory_bytes: Rows of all requests held in memory.
    """

    def __init__(
        self,
        context: ConsumerContext,
        layouts: Mapping[LayoutName, Layout],
        temp_path: Callable[[], Path],
        *,
        max_request_bytes: int,
        memory_bytes: int,
    ) -> None:
        self._context = context
        self._layouts = layouts
        self._temp_path = temp_path
        self._max_request_bytes = max_request_bytes
        self._memory_bytes = memory_bytes
        self._running: dict[str, _Running] = {}
        self._held_bytes = 0
        self._stored: list[tuple[Stored, Outcome]] = []
        self._row_bytes = context.model.hidden_size * ITEM_SIZES[context.model.dtype]

    def begin(self, request: RequestInfo) -> None:
        """A request that this thread will write."""
        running = self._running[request.request_id] = _Running(request)
        try:
            self._layout(request).check_free(self._target(request))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
            self._fail(running, error)

    def append(self, chunks: Sequence[tuple[str, Chunk]]) -> None:
        """Take rows: request ids, and rows of each."""
        for request_id, chunk in chunks:
            running = self._running.get(request_id)
            if running is None or running.error is not None:
                continue  # failed before, and said so in the log; its outcome will say so too
            self._held_bytes += chunk.num_bytes
            running.spool.append(chunk)
            if running.spool.held_bytes > self._max_request_bytes:
                self._spill(running)
        if self._held_bytes > self._memory_bytes:
            self._make_room()

    def finish(self, finished: FinishedRequest, chunks: Sequence[Chunk], outcome: Outcome) -> None:
        """The request ended with `chunks`: write it; `outcome` completes with `settle`, or here if writing fails."""
        self.append([(finished.request.request_id, chunk) for chunk in chunks])
        running = self._running.pop(finished.request.request_id, None)
        if running is None:
            _complete(outcome, ConsumerError(f"request {finished.request.request_id} was never begun"))
        elif running.error is not None:
            _complete(outcome, running.error)
        else:
            self._held_bytes -= running.spool.held_bytes
            try:
                self._stored.append((self._store(finished, running.spool), outcome))
            except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
                _complete(outcome, _failure(finished.request, error))
            finally:
                running.spool.discard()

    def abandon(self, request: RequestInfo) -> None:
        """The request will never be finished: let go of its rows."""
        running = self._running.pop(request.request_id, None)
        if running is not None:
            self._held_bytes -= running.spool.held_bytes
            running.spool.discard()

    def settle(self) -> None:
        """Put what was written since the last call on the disk, then say so."""
        waiting: dict[Settling, list[tuple[Stored, Outcome]]] = {}
        for stored, outcome in self._stored:
            waiting.setdefault(stored.settling, []).append((stored, outcome))
        self._stored.clear()
        for settling, group in waiting.items():
            try:
                settling.settle()
            except Exception as error:  # noqa: BLE001  (whatever it is, it is these requests' outcome)
                for stored, outcome in group:
                    _complete(outcome, ConsumerError(f"cannot write {stored.payload['paths']}: {error}"))
            else:
                for stored, outcome in group:
                    _complete(outcome, stored.payload)

    def close(self) -> None:
        """Throw away the rows of requests that never ended, and close the layouts."""
        for running in self._running.values():
            logger.warning("request %s had not ended; its rows are thrown away", running.request.request_id)
            running.spool.discard()
        self._running.clear()
        for layout in self._layouts.values():
            layout.close()

    def _layout(self, request: RequestInfo) -> Layout:
        return self._layouts[request.spec.options["layout"]]

    def _target(self, request: RequestInfo) -> Target:
        stage = (self._context.pp_rank, self._context.pp_size)
        options = request.spec.options
        stem = stem_of(options["name"], sample=(request.sample_index, request.num_samples), stage=stage)
        return Target((options["tag"],), stem)

    def _store(self, finished: FinishedRequest, spool: Spool) -> Stored:
        request, final = finished.request, finished.final
        rows = spool.assemble(
            request.spec.sites,
            num_rows=final.num_rows,
            row_bytes=self._row_bytes,
            has_gaps=finished.dropped_rows > 0,
        )
        sidecar = sidecar_of(
            finished,
            self._context,
            num_rows=rows.num_rows,
            num_prefill_rows=int(np.searchsorted(rows.positions, final.num_prompt_tokens)),
            name=stem_of(
                request.spec.options["name"], sample=(request.sample_index, request.num_samples), stage=(0, 1)
            ),
        )
        token_ids = final.token_ids[rows.positions]
        whole = Finished(target=self._target(request), sidecar=sidecar, rows=rows, token_ids=token_ids)
        return self._layout(request).store(whole)

    def _make_room(self) -> None:
        """Spill the largest requests until half of the memory is free: few large writes, not many small ones."""
        by_size = sorted(self._running.values(), key=lambda running: running.spool.held_bytes, reverse=True)
        for running in by_size:
            if self._held_bytes <= self._memory_bytes // 2:
                break
            self._spill(running)

    def _spill(self, running: _Running) -> None:
        before = running.spool.held_bytes
        try:
            running.spool.spill(self._temp_path())
        except Exception as error:  # noqa: BLE001  (whatever it is, it is this request's outcome)
            self._fail(running, error)
        self._held_bytes -= before - running.spool.held_bytes

    def _fail(self, running: _Running, error: Exception) -> None:
        running.error = _failure(running.request, error)
        running.spool.discard()
        logger.warning("%s", running.error)


def _failure(request: RequestInfo, error: Exception) -> ConsumerError:
    if isinstance(error, ConsumerError):
        return error
    failure = ConsumerError(f"cannot write the capture of request {request.client_request_id}: {error}")
    failure.__cause__ = error
    return failure


def _complete(outcome: Outcome, result: dict[str, Any] | ConsumerError) -> None:
    try:
        if isinstance(result, ConsumerError):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)
    except InvalidStateError:
        logger.warning("written after closing gave it up: %s", result)


MAX_BLOCKS = 64
"""Blocks kept at most; more would save little."""

_Piece = tuple[RowBlock, npt.NDArray[np.uint8], int, int]
"""Rows ``start : stop`` of a block, and the block's rows as uint8 ``[S, N, row_bytes]``."""


class RowGatherer:
    """Collects blocks. Used by one thread.

    Args:
        max_bytes: Blocks are kept up to this size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_blocks = 0
        self._num_bytes = 0
        self._pieces: dict[str, list[_Piece]] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is time to `take_all`."""
        return self._num_blocks >= MAX_BLOCKS or self._num_bytes >= self._max_bytes

    def add(self, block: RowBlock, data: npt.NDArray[np.uint8]) -> None:
        """Keep a block; `data` is its rows as uint8 ``[S, N, row_bytes]``."""
        self._num_blocks += 1
        self._num_bytes += data.nbytes
        pieces = self._pieces
        for span in block.spans:
            request_id = span.request.request_id
            piece = (block, data, span.start, span.stop)
            if request_id in pieces:
                pieces[request_id].append(piece)
            else:
                pieces[request_id] = [piece]

    def take(self, request_id: str) -> list[Chunk]:
        """Remove and return the rows of one request, in their order."""
        return _chunks(self._pieces.pop(request_id, []))

    def take_all(self) -> dict[str, list[Chunk]]:
        """Remove and return the rows of every request."""
        taken = {request_id: _chunks(pieces) for request_id, pieces in self._pieces.items()}
        self._pieces = {}
        self._num_blocks = self._num_bytes = 0
        return taken


def _chunks(pieces: Sequence[_Piece]) -> list[Chunk]:
    """As few chunks as possible: one for each set of sites, if no site is in two different sets."""
    by_sites: dict[tuple[Site, ...], list[_Piece]] = {}
    for piece in pieces:
        by_sites.setdefault(piece[0].sites, []).append(piece)
    if sum(map(len, by_sites)) != len(set().union(*by_sites)):
        # Merged chunks would bring a site's rows out of order.
        return [_merge(piece[0].sites, [piece]) for piece in pieces]
    return [_merge(sites, of_sites) for sites, of_sites in by_sites.items()]


def _merge(sites: tuple[Site, ...], pieces: Sequence[_Piece]) -> Chunk:
    if len(pieces) > 1:
        positions = np.concatenate([block.positions[start:stop] for block, _, start, stop in pieces])
        return Chunk(sites, positions, np.concatenate([data[:, start:stop] for _, data, start, stop in pieces], axis=1))
    ((block, data, start, stop),) = pieces
    rows = data[:, start:stop]
    if 2 * rows.shape[1] < data.shape[1]:
        # A copy: a view would keep the rows of all the other requests in memory until this one ends.
        rows = rows.copy()
    return Chunk(sites, block.positions[start:stop], rows)
