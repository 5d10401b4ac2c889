"""Wanted rows of a step, and the plan that they make together. Numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from headgate.capture.planning.request_plan import SelectedRows, SelectionShape
from headgate.capture.planning.step_plan import PackGroup, SiteSet, StepPlan, count_up, spans_of
from headgate.capture.schema.batch import Int64Array


class Rows(NamedTuple):
    """Rows of a step, each array int64 ``[N]``. A request's are next to each other, by ascending position."""

    owners: Int64Array
    """Index into ``BatchView.req_ids``, ascending."""
    batch_rows: Int64Array
    positions: Int64Array

    def select(self, chosen: SelectedRows) -> WantedRows:
        """Return the chosen rows, each with the mask of its consumers."""
        if (picks := chosen.picks) is None:
            return WantedRows(self.owners, self.batch_rows, self.positions, chosen.masks)
        return WantedRows(self.owners[picks], self.batch_rows[picks], self.positions[picks], chosen.masks)


class WantedRows(NamedTuple):
    """Rows of a step with the consumers that want them; arrays as in `Rows`."""

    owners: Int64Array
    batch_rows: Int64Array
    positions: Int64Array
    masks: Int64Array


class Piece(NamedTuple):
    """Consecutive positions that one request wants of a step.

    Attributes:
        req_id: The request.
        row: Batch row of the first position.
        positions: Not empty, by steps of 1.
    """

    req_id: str
    row: int
    positions: range


def consecutive(pieces: Sequence[Piece], shape: SelectionShape) -> StepPlan:
    """Plan a step of which these are wanted, by requests of one shape that is a run, at the same sites.

    Args:
        pieces: At least one, by batch row.
        shape: Of the requests.
    """
    stops = list(accumulate(len(piece.positions) for piece in pieces))
    (chosen,) = shape.choose_all(stops[-1])
    group = PackGroup(
        site_set=chosen.site_set,
        rows=count_up(0, stops[-1]),
        positions=np.concatenate([np.arange(each.positions.start, each.positions.stop) for each in pieces]),
        masks=chosen.masks,
        spans=tuple(
            (piece.req_id, stop - len(piece.positions), stop) for piece, stop in zip(pieces, stops, strict=True)
        ),
    )
    token_rows = [count_up(piece.row, piece.row + len(piece.positions)) for piece in pieces]
    return StepPlan(token_rows[0] if len(token_rows) == 1 else np.concatenate(token_rows), (group,))


def merged(req_ids: tuple[str, ...], parts: Mapping[SiteSet, Sequence[WantedRows]]) -> StepPlan:
    """Plan a step of which `parts` are wanted, by their sites; `req_ids` are its requests."""
    packed = {site_set: _in_batch_order(rows) for site_set, rows in parts.items()}
    if len(packed) == 1:
        ((site_set, rows),) = packed.items()
        if (rows.batch_rows[1:] > rows.batch_rows[:-1]).all():  # everybody wants the same sites: nothing to merge
            return StepPlan(rows.batch_rows, (_group(site_set, rows, np.arange(len(rows.batch_rows)), req_ids),))
    is_wanted = np.zeros(1 + max(int(rows.batch_rows.max()) for rows in packed.values()), dtype=np.bool_)
    for rows in packed.values():
        is_wanted[rows.batch_rows] = True
    token_rows = np.flatnonzero(is_wanted)
    offsets = np.cumsum(is_wanted) - 1
    groups = (_group(site_set, rows, offsets[rows.batch_rows], req_ids) for site_set, rows in packed.items())
    return StepPlan(token_rows, tuple(groups))


def _group(site_set: SiteSet, rows: WantedRows, offsets: Int64Array, req_ids: tuple[str, ...]) -> PackGroup:
    return PackGroup(
        site_set=site_set,
        rows=offsets,
        positions=rows.positions,
        masks=rows.masks,
        spans=spans_of(rows.owners, req_ids),
    )


def _in_batch_order(parts: Sequence[WantedRows]) -> WantedRows:
    """One set of rows out of those of several shapes, each of which is in batch order and has its own requests."""
    if len(parts) == 1:
        return parts[0]
    rows = WantedRows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    order = np.argsort(rows.owners, kind="stable")
    return WantedRows(*(array[order] for array in rows))
