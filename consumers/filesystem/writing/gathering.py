"""Rows of many requests, gathered by request.

A decode step brings one row each of many requests. Cutting each out at once would cost a dozen Python calls per token.
So the consumer's thread keeps the blocks of a few steps in a `RowGatherer`, and each request's rows are copied out of
all of them together, by the thread that writes the request's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.consumer import RowBlock
from headgate.capture.schema.sites import Site
from headgate.consumers.filesystem.writing.spool import Chunk

if TYPE_CHECKING:
    from headgate.capture.delivery.buffer_pool import RowPool

MAX_BLOCKS = 64
"""Blocks kept at most; more would save little."""

Bytes3D = npt.NDArray[np.uint8]


class Piece(NamedTuple):
    """Some rows of one request in a block.

    Attributes:
        block: Sites and positions.
        data: The block's rows, uint8 ``[S, N, row_bytes]``.
        start: The first row.
        stop: The one behind the last.
    """

    block: RowBlock
    data: Bytes3D
    start: int
    stop: int

    @property
    def rows(self) -> Bytes3D:
        """The rows of the request, uint8 ``[S, stop - start, row_bytes]``: a view."""
        return self.data[:, self.start : self.stop]


class RowGatherer:
    """Collects blocks. Used by one thread.

    Args:
        max_bytes: Blocks are kept up to this size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_blocks = 0
        self._num_bytes = 0
        self._pieces: dict[str, list[Piece]] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is time to `pop_all`."""
        return self._num_blocks >= MAX_BLOCKS or self._num_bytes >= self._max_bytes

    def add(self, block: RowBlock, data: Bytes3D) -> None:
        """Keep a block; `data` is its rows as uint8 ``[S, N, row_bytes]``."""
        self._num_blocks += 1
        self._num_bytes += data.nbytes
        pieces = self._pieces
        for span in block.spans:
            request_id = span.request.request_id
            piece = Piece(block, data, span.start, span.stop)
            if request_id in pieces:
                pieces[request_id].append(piece)
            else:
                pieces[request_id] = [piece]

    def pop(self, request_id: str) -> list[Piece]:
        """Remove and return the rows of one request, in their order."""
        return self._pieces.pop(request_id, [])

    def pop_all(self) -> dict[str, list[Piece]]:
        """Remove and return the rows of every request."""
        taken, self._pieces = self._pieces, {}
        self._num_blocks = self._num_bytes = 0
        return taken


def chunks_of(pieces: Sequence[Piece], pool: RowPool) -> list[Chunk]:
    """Merge pieces of a request into as few chunks as possible.

    That is one for each set of sites, if no site is in two different sets. Most are copies: a view would keep the rows
    of all other requests of a block in memory until this one ends.

    Args:
        pieces: In the order of their positions.
        pool: Memory for the copies.
    """
    by_sites: dict[tuple[Site, ...], list[Piece]] = {}
    for piece in pieces:
        by_sites.setdefault(piece.block.sites, []).append(piece)
    if sum(map(len, by_sites)) != len(set().union(*by_sites)):
        # Merged chunks would bring a site's rows out of order.
        return [_merge([piece], pool) for piece in pieces]
    return [_merge(of_sites, pool) for of_sites in by_sites.values()]


def _merge(pieces: Sequence[Piece], pool: RowPool) -> Chunk:
    first = pieces[0]
    sites, rows = first.block.sites, first.rows
    if len(pieces) == 1 and 2 * rows.shape[1] >= first.data.shape[1]:
        return Chunk(sites, first.block.positions[first.start : first.stop], rows)
    positions = np.concatenate([piece.block.positions[piece.start : piece.stop] for piece in pieces])
    merged = pool.empty_bytes((rows.shape[0], len(positions), rows.shape[2]))
    np.concatenate([piece.rows for piece in pieces], axis=1, out=merged)
    return Chunk(sites, positions, merged)
