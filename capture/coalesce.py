"""Rows of several steps as if they were of one: what a step costs the dispatch thread and consumers is paid once.

A decode step brings one row for each of many requests, and dealing it out takes some Python calls for each of them.
The interpreter that runs those also runs the engine's steps, so they are saved: small steps are held for a moment,
and then cut out of the staging memory together, each request's rows next to each other.

Shapes: S sites, N rows of a group, M rows of all groups with the same sites, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headgate.capture.batch import Int64Array
from headgate.capture.pool import RowPool
from headgate.capture.spans import RequestSpans, spans_of
from headgate.capture.staged import StagedRows
from headgate.capture.stepplan import PackGroup
from headgate.capture.tokens import Int32Array

MAX_STEPS = 32
"""Steps held at most; more would save little."""


class Taken(NamedTuple):
    """Rows that have left the staging memory."""

    group: PackGroup
    """What they are; its `rows` count through them."""
    rows: Tensor
    """``[S, M, D]``"""
    token_ids: Int32Array | None
    """The token that each was computed from, int32 ``[M]``; None if nobody knows."""


class Held:
    """Rows in the staging memory that wait for those of the next steps. For one thread.

    Args:
        max_bytes: From so many on they are to be taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._staged: list[StagedRows] = []
        self._num_bytes = 0
        self._req_ids: set[str] = set()
        self._last_spans: RequestSpans | None = None

    def __len__(self) -> int:
        """Steps, or parts of one, that are held."""
        return len(self._staged)

    @property
    def is_full(self) -> bool:
        """Whether it is time to `take`."""
        return self._num_bytes >= self._max_bytes or len(self._staged) >= MAX_STEPS

    def has(self, req_id: str) -> bool:
        """Whether rows of that request are held."""
        return req_id in self._req_ids

    def add(self, staged: StagedRows) -> None:
        """Hold rows; their memory stays leased until `take`."""
        self._staged.append(staged)
        self._num_bytes += staged.num_bytes
        for group in staged.contents:
            if group.spans is not self._last_spans:
                self._last_spans = group.spans
                self._req_ids.update(req_id for req_id, _, _ in group.spans)

    def take(self, pool: RowPool) -> list[Taken]:
        """Copy everything out of the staging memory and give that back; nothing is held then, whatever happens.

        Args:
            pool: Where the rows go.
        """
        staged, self._staged = self._staged, []
        self._num_bytes, self._last_spans = 0, None
        self._req_ids.clear()
        try:
            for each in staged:
                each.wait()
            return [_take(parts, pool) for parts in _by_sites(staged)]
        finally:
            for each in staged:
                each.release()


class _Part(NamedTuple):
    """A group of one step, and where its rows are."""

    group: PackGroup
    staged: StagedRows
    start: int
    """Row of the staging memory that the first site's first row lies at."""


def _by_sites(staged: Iterable[StagedRows]) -> list[list[_Part]]:
    """The groups of all steps; those of the same sites together, in order."""
    found: dict[int, list[_Part]] = {}
    for each in staged:
        for group, start in each.places:
            # The planner keeps one array for a set of sites while any request wants it; the part keeps it, too.
            found.setdefault(id(group.site_ids), []).append(_Part(group, each, start))
    return list(found.values())


def _take(parts: Sequence[_Part], pool: RowPool) -> Taken:
    group, staged, start = parts[0]
    memory_AD = staged.memory
    num_sites = len(group.sites)
    if len(parts) == 1:
        rows = staged.view(group, start)
        return Taken(group, pool.empty(rows.shape, rows.dtype).copy_(rows), staged.token_ids(group))
    owners, req_ids = _owners(parts)
    order = np.argsort(owners, kind="stable")
    index_SM = np.concatenate([_index(part, num_sites) for part in parts], axis=1)[:, order]
    shape = (num_sites, len(order), memory_AD.shape[1])
    rows = pool.empty(shape, memory_AD.dtype)
    torch.index_select(memory_AD, 0, torch.from_numpy(index_SM.reshape(-1)), out=rows.view(-1, shape[2]))
    merged = PackGroup(
        sites=group.sites,
        site_ids=group.site_ids,
        rows=np.arange(len(order)),
        positions=np.concatenate([part.group.positions for part in parts])[order],
        masks=np.concatenate([part.group.masks for part in parts])[order],
        spans=spans_of(owners[order], req_ids),
    )
    token_ids = [part.staged.token_ids(part.group) for part in parts]
    known = [ids for ids in token_ids if ids is not None]
    return Taken(merged, rows, np.concatenate(known)[order] if len(known) == len(token_ids) else None)


def _index(part: _Part, num_sites: int) -> Int64Array:
    """Rows of the staging memory, int64 ``[S, N]``."""
    num_rows = len(part.group.rows)
    return part.start + np.arange(num_sites * num_rows).reshape(num_sites, num_rows)


def _owners(parts: Sequence[_Part]) -> tuple[Int64Array, list[str]]:
    """Whose each row is, as numbers, int64 ``[M]``, and what the numbers mean: requests as they first appear."""
    numbers: dict[str, int] = {}
    owners: list[Int64Array] = []
    last: RequestSpans | None = None
    for part in parts:
        spans = part.group.spans
        if spans is not last and spans != last:
            of_spans = [numbers.setdefault(req_id, len(numbers)) for req_id, _, _ in spans]
            each = np.repeat(of_spans, [stop - start for _, start, stop in spans])
        last = spans
        owners.append(each)
    return np.concatenate(owners), list(numbers)
