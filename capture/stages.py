"""Joins the rows of one request that pipeline stages send, each those of its own layers.

The stages compute the same positions, but not at the same time, and each may lose some to overload. A consumer is
promised that all sites of a request have the same positions, so a position is passed on when every stage has sent
it, and left out if one never will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

from headgate.capture.batch import Int64Array
from headgate.capture.consumer import RequestInfo, RowBlock, RowSpan
from headgate.capture.sites import sort_sites

END = np.iinfo(np.int64).max


def join_requests(stages: Mapping[int, RequestInfo]) -> RequestInfo:
    """The request as a consumer knows it that sees the sites of all stages."""
    first = stages[min(stages)]
    sites = sort_sites({site for stage in stages.values() for site in stage.spec.sites})
    return replace(first, spec=replace(first.spec, sites=sites))


class StageJoin:
    """What stages have sent of one request and was not passed on yet. Nothing is, until `start`."""

    def __init__(self) -> None:
        self._request: RequestInfo | None = None
        self._waiting: dict[int, list[RowBlock]] = {}
        self._reached: dict[int, int] = {}

    def start(self, request: RequestInfo, stages: Sequence[int]) -> list[RowBlock]:
        """Every stage has said what it will send; return what all have sent already.

        Args:
            request: Whom the joined rows belong to.
            stages: Those that have sites of the request.
        """
        self._request = request
        for stage in stages:
            self._waiting.setdefault(stage, [])
            self._reached.setdefault(stage, -1)
        return self._take(min(self._reached.values()), request)

    def add(self, stage: int, blocks: Sequence[RowBlock]) -> list[RowBlock]:
        """Take the blocks of one write of `stage`, all of whose rows are this request's.

        Returns:
            The rows that every stage has sent now.
        """
        self._waiting.setdefault(stage, []).extend(blocks)
        last = max(int(block.positions[-1]) for block in blocks)
        self._reached[stage] = max(self._reached.get(stage, -1), last)
        return [] if self._request is None else self._take(min(self._reached.values()), self._request)

    def end(self) -> list[RowBlock]:
        """No stage will send any more: what all have sent. The rest is thrown away."""
        return [] if self._request is None else self._take(END, self._request)

    def _take(self, last: int, request: RequestInfo) -> list[RowBlock]:
        """Blocks with the positions up to `last` that every stage has; those after it go on waiting."""
        everywhere = reduce(np.intersect1d, (_positions(blocks, last) for blocks in self._waiting.values()))
        taken = []
        for stage, blocks in self._waiting.items():
            for block in blocks:
                taken += _part(block, np.isin(block.positions, everywhere), request)
            self._waiting[stage] = [part for block in blocks for part in _part(block, block.positions > last, request)]
        return taken


def _positions(blocks: Sequence[RowBlock], last: int) -> Int64Array:
    """The positions up to `last`, ascending, each once."""
    positions = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(block.positions for block in blocks)]))
    return positions[: np.searchsorted(positions, last, side="right")]


def _part(block: RowBlock, is_kept: npt.NDArray[np.bool_], request: RequestInfo) -> list[RowBlock]:
    """A block of the rows that are kept, if there are any; copied unless all are."""
    index = np.flatnonzero(is_kept)
    if len(index) == 0:
        return []
    spans = (RowSpan(request=request, start=0, stop=len(index)),)
    if len(index) == len(block.positions):
        return [replace(block, spans=spans)]
    rows = block.rows.index_select(1, torch.from_numpy(index))
    return [replace(block, rows=rows, positions=block.positions[index], spans=spans)]
