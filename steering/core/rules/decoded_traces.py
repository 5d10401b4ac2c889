"""Traces of steps in which each of the same requests generates a row: all of them at once, by arrays. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import BEFORE, NEVER, Note, TraceWriter
from headgate.steering.vectors.dtypes import Float32Rows


class DecodedTraces:
    """Tells of the generated rows of the same requests, step by step, what their `TraceWriter` would.

    Args:
        ids: The requests of the steps.
        writers: Of those whose traces are wanted, each with the place of its request.
    """

    def __init__(self, ids: tuple[str, ...], writers: Sequence[tuple[int, TraceWriter]]) -> None:
        self._ids = ids
        self._at = np.array([at for at, _ in writers], np.int64)
        self._writers = [writer for _, writer in writers]
        plans = [writer.decoded() for writer in self._writers]
        self._next = np.array(
            [max(plan.since, writer.end) for plan, writer in zip(plans, self._writers, strict=True)], np.int64
        )
        """The first position of each that can be told here."""
        sizes = [len(plan.columns) for plan in plans]
        self._rows = np.repeat(self._at, sizes)
        self._columns = np.array([column for plan in plans for column in plan.columns], np.int64)
        whose = np.array([one for plan in plans for one in plan.whose], np.int64)
        (self._held,), (self._never,) = (whose == BEFORE).nonzero(), (whose == NEVER).nonzero()
        ends = (4 * np.cumsum(sizes)).tolist()
        self._told = [
            (ids[at], plan.scores, plan.gates, slice(end - 4 * size, end))
            for (at, _), plan, size, end in zip(writers, plans, sizes, ends, strict=True)
        ]
        self._before: StepTable | None = None
        """The last step."""

    def tells(self, step: StepTable) -> bool:
        """Whether it tells of a step: one of a new generated row of each of its requests."""
        is_ours = step.has_one_row_each and self._ids == step.ids
        return is_ours and not np.count_nonzero(step.firsts[self._at] < self._next)

    def notes(self, step: StepTable) -> dict[str, Note]:
        """Return the pieces of a step that it tells of; nobody changes its signals."""
        values = step.signals[self._rows, self._columns]
        if len(self._held):
            values[self._held] = np.nan_to_num(self._handed_on(), nan=0.0)
        if len(self._never):
            values[self._never] = 0.0
        firsts = step.firsts[self._at]
        self._before, self._next, told = step, firsts + 1, values.tobytes()
        return {
            req_id: {"first": first, "rows": 1, "scores": scores, "gates": gates, "values": told[part]}
            for (req_id, scores, gates, part), first in zip(self._told, firsts.tolist(), strict=True)
        }

    def leave(self) -> None:
        """Let the writers go on."""
        if (before := self._before) is None:
            return
        for at, writer in zip(self._at.tolist(), self._writers, strict=True):
            writer.follow(int(before.firsts[at]) + 1, before.signals[at : at + 1].copy())

    def _handed_on(self) -> Float32Rows:
        """Return the strengths that the rows before hand on, float32 ``[n]``: 0 where there was none."""
        rows, columns = self._rows[self._held], self._columns[self._held]
        if self._before is not None:
            found: Float32Rows = self._before.signals[rows, columns]
            return found
        lasts = {at: writer.last for at, writer in zip(self._at.tolist(), self._writers, strict=True)}
        values = (
            0.0 if (last := lasts[at]) is None else last[0, column]
            for at, column in zip(rows.tolist(), columns.tolist(), strict=True)
        )
        return np.fromiter(values, np.float32, len(rows))
