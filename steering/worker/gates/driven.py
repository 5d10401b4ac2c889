"""Coefficients that controllers set on the requests of a worker: entries of programs have them on generated rows.

A coefficient has a column, like the strength of a gate, but nothing on the device evaluates it: the host writes it into
the state of the request where it changes. Rows that are computed again, several in a forward, find theirs in the
signals, as `headgate.steering.programs.gate_codes` has it for entries that act early. Numpy only.

Letters in shape comments: G requests with gates in a step, N their rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int32Array
from headgate.steering.programs.gate_codes import TokenFlag
from headgate.steering.worker.gates.requests import GatedBatch, GateRows


class CoefficientChange(NamedTuple):
    """A coefficient that a request has in a column from a position on."""

    req_id: str
    column: int
    first: int
    value: float


class _Timeline:
    """The coefficients of one column of a request, by position."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._values: list[float] = []

    def set(self, first: int, value: float) -> None:
        """Set the value from a position on, for good."""
        if self._firsts and self._firsts[-1] < first:
            self._firsts.append(first)
            self._values.append(value)
            return
        del self._values[(end := bisect_right(self._firsts, first - 1)) :]
        del self._firsts[end:]
        self._firsts.append(first)
        self._values.append(value)

    def at(self, position: int) -> float:
        """Return the value at a position; 0 before the first."""
        if self._firsts[-1] <= position:
            return self._values[-1]
        at = bisect_right(self._firsts, position)
        return self._values[at - 1] if at else 0.0

    @property
    def last(self) -> int:
        """The position from which the value stays."""
        return self._firsts[-1]


Place = tuple[int, int, float]
"""A slot or a batch row, a column, and the value to write there."""


class DrivenStrengths:
    """The coefficients of a worker's requests. Step thread only."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, _Timeline]] = {}
        self._written: dict[int, dict[int, float]] = {}
        """By slot and column, as the device has it."""
        self._unsettled: set[str] = set()
        """Requests whose last change may not be on the device yet."""

    def set(self, drives: Iterable[CoefficientChange]) -> list[str]:
        """Take changes, those of one request and column in the order in which they were decided.

        Returns:
            The requests that were not driven in that column before.
        """
        fresh: dict[str, None] = {}
        for req_id, column, first, value in drives:
            timelines = self._requests.setdefault(req_id, {})
            if (timeline := timelines.get(column)) is None:
                timeline = timelines[column] = _Timeline()
                fresh[req_id] = None
            timeline.set(first, value)
            self._unsettled.add(req_id)
        return list(fresh)

    def columns(self, req_id: str) -> frozenset[int]:
        """Return the columns that a request has had a coefficient in."""
        return frozenset(self._requests.get(req_id, ()))

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        self._requests.pop(req_id, None)
        self._unsettled.discard(req_id)

    def changes(self, rows: GateRows, batch: GatedBatch) -> list[Place]:
        """Return what to write before a step of one row for each request, behind such a step; it counts as written."""
        if not self._unsettled:
            return []
        found: list[Place] = []
        for req_id in [known for known in self._unsettled if known in batch.places]:
            at = batch.places[req_id]
            found += self._settled(req_id, int(batch.slots[at]), int(rows.firsts[at]))
        return found

    def states(self, rows: GateRows, slots: Int32Array, cleared: Int32Array) -> list[Place]:
        """Return what to write into the states before a step; it counts as written.

        Args:
            rows: Of the step.
            slots: int32 ``[G]``: of each request.
            cleared: Slots whose states are forgotten before.
        """
        for slot in cleared.tolist():
            self._written.pop(slot, None)
        if not self._requests:
            return []
        found: list[Place] = []
        for req_id, slot, first in zip(rows.req_ids, slots.tolist(), rows.firsts.tolist(), strict=True):
            if req_id in self._requests:
                found += self._settled(req_id, slot, first)
        return found

    def replayed(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> list[Place]:
        """Return what to write into the signals of rows that are computed again: batch row, column and value of each.

        Args:
            rows: Of the step.
            batch: Of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.
        """
        if not self._requests or not (flags & TokenFlag.IS_REPLAYED).any():
            return []
        found: list[Place] = []
        end = 0
        for at, req_id in enumerate(rows.req_ids):
            start, end = end, end + int(rows.counts[at])
            timelines = self._requests.get(req_id)
            if timelines is None:
                continue
            for index in np.flatnonzero(flags[start:end] & TokenFlag.IS_REPLAYED).tolist():
                row, position = int(rows.starts[at]) + index, int(rows.firsts[at]) + index
                found += [(row, column, timeline.at(position)) for column, timeline in timelines.items()]
        return found

    def _settled(self, req_id: str, slot: int, first: int) -> list[Place]:
        """Return what to write for the row at a position; the request is settled if nothing changes behind it."""
        written, timelines = self._written.setdefault(slot, {}), self._requests[req_id]
        if all(timeline.last <= first for timeline in timelines.values()):
            self._unsettled.discard(req_id)
        else:
            self._unsettled.add(req_id)
        found = []
        for column, timeline in timelines.items():
            value = timeline.at(first)
            if written.get(column) != value:
                written[column] = value
                found.append((slot, column, value))
        return found
