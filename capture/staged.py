"""Rows that have left the ring: what of them is where in the staging memory, until they are copied out of it.

Shapes: S sites, N rows of a group, D hidden size, A rows of the arena.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headgate.capture.arena import Arena, Lease
from headgate.capture.links import Copied
from headgate.capture.stepplan import PackGroup
from headgate.capture.tokens import Int32Array


class Piece(NamedTuple):
    """What is copied in one go: some of the wanted rows of the kept steps, at all their sites."""

    groups: tuple[PackGroup, ...]
    start: int
    """The first of those steps' wanted rows."""
    num_rows: int
    """How many of them."""
    num_copies: int
    """Rows to copy, over all sites."""
    num_token_rows: int = 0
    """Rows of the arena that the tokens of the rows take, ahead of the rows; 0 if they are not known."""


class StagedRows:
    """Rows of some steps, or of a part of one, on their way into host memory. For the dispatch thread.

    Their memory is leased: `wait`, read `groups`, copy out, `release`.

    Attributes:
        since: When the forward of the first of the steps was launched, in seconds of the monotonic clock.
    """

    def __init__(
        self, piece: Piece, arena_AD: Tensor, arena: Arena, lease: Lease, copied: Copied, since: float
    ) -> None:
        self._piece = piece
        self._arena_AD = arena_AD
        self._arena = arena
        self._lease = lease
        self._copied = copied
        self._token_ids: Int32Array | None = None
        self.since = since

    def wait(self) -> None:
        """Wait until the rows have arrived."""
        self._copied.wait()

    @property
    def contents(self) -> tuple[PackGroup, ...]:
        """What is there."""
        return self._piece.groups

    @property
    def num_bytes(self) -> int:
        """Bytes of the leased memory."""
        return self._lease.num_rows * self._arena_AD.shape[1] * self._arena_AD.element_size()

    @property
    def memory(self) -> Tensor:
        """``[A, D]``: all of the staging memory, in which `places` says what lies where."""
        return self._arena_AD

    @property
    def places(self) -> list[tuple[PackGroup, int]]:
        """What is there, and the row of `memory` at which its first site's first row lies.

        The rows of a site follow each other, and so do the sites: ``[S, N, D]`` from there on.
        """
        found, start = [], self._lease.start + self._piece.num_token_rows
        for group in self._piece.groups:
            found.append((group, start))
            start += len(group.site_ids) * len(group.rows)
        return found

    @property
    def groups(self) -> list[tuple[PackGroup, Tensor]]:
        """What is there, and its rows: ``[S, N, D]``, a view of the leased memory."""
        return [(group, self.view(group, start)) for group, start in self.places]

    def view(self, group: PackGroup, start: int) -> Tensor:
        """The rows of a group, ``[S, N, D]``, that begin at `start`; see `places`."""
        num_sites, num_rows = len(group.site_ids), len(group.rows)
        return self._arena_AD[start : start + num_sites * num_rows].view(num_sites, num_rows, -1)

    def token_ids(self, group: PackGroup) -> Int32Array | None:
        """The token that each row of `group` was computed from, int32 ``[N]``; None if nobody knows."""
        if not self._piece.num_token_rows:
            return None
        if self._token_ids is None:
            self._token_ids = as_int32(self._arena_AD, self._lease.start, self._piece.num_rows).numpy()
        found: Int32Array = self._token_ids[group.rows - self._piece.start]
        return found

    def release(self) -> None:
        """Give the memory back. The views of `groups` are void from here on."""
        self._copied.release()
        self._arena.release(self._lease)


def as_int32(arena_AD: Tensor, start: int, count: int) -> Tensor:
    """`count` integers in the arena, from row `start` on."""
    first = start * arena_AD.shape[1] * arena_AD.element_size()
    return arena_AD.view(-1).view(torch.uint8)[first : first + 4 * count].view(torch.int32)
