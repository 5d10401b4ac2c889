"""Rows of the last few steps by request, cut out of their blocks many steps at a time.

A decode step brings one row each of many requests. Cutting each out at once would cost a dozen Python calls per token,
and they would hold up the engine's own thread; so blocks are kept for a few steps and a request's rows are then copied
out of all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headgate.capture.consumer import RowBlock
from headgate.capture.sites import Site
from headgate.consumers.filesystem.spool import Chunk

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
