"""Coefficients that controllers set on the requests of a worker: entries of programs have them on generated rows.

A coefficient has a column, like the strength of a gate, but nothing on the device evaluates it: the host writes it into
the state of the request where it changes. Rows that are computed again, several in a forward, find theirs in the
signals, as `headgate.steering.programs.gate_codes` has it for entries that act early. Numpy only.

Letters in shape comments: G requests with gates in a step, N their rows, K requests that are driven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.gates.coefficient_changes import CoefficientChanges, ColumnChanges
from headgate.steering.programs.gate_codes import TokenFlag
from headgate.steering.worker.gates.driven_columns import NO_PLACES, DrivenColumn, Places
from headgate.steering.worker.gates.requests import GatedBatch, GateRows

_AT_FIRST = 64


class _Told(NamedTuple):
    """The requests that changes name; the next ones are likely to name the same.

    Attributes:
        req_ids: The very tuple.
        numbers: int64 ``[n]``; `NOBODY` for those that are not driven.
        serials: int64 ``[n]``.
        columns: Those in which all of them are driven.
    """

    req_ids: tuple[str, ...]
    numbers: Int64Array
    serials: Int64Array
    columns: set[int]


class _Members(NamedTuple):
    """The requests of a batch that are driven in a column; they stay from step to step.

    Attributes:
        at: int64 ``[K]``: their places in the batch; None if it is all of them.
        numbers: int64 ``[K]``.
        slots: int64 ``[K]``.
        flat: int64 ``[K]``: where their coefficients lie in the states.
    """

    at: Int64Array | None
    numbers: Int64Array
    slots: Int64Array
    flat: Int64Array


NOBODY = 0
"""The number of requests that are not driven."""


class DrivenStrengths:
    """The coefficients of a worker's requests. Step thread only.

    Args:
        num_slots: Slots of states.
        num_columns: Of signals and states.

    Attributes:
        numbers: Of the requests that are driven, by id.
        serials: int64, by number: a serial number of each request, which no other ever has; -1 for a free number.
        by_column: Their coefficients.
        is_settled: Whether the device has the last value of each request of the last step.
    """

    def __init__(self, num_slots: int, num_columns: int) -> None:
        self._num_slots, self._num_columns = num_slots, num_columns
        self.numbers: dict[str, int] = {}
        self.by_column: dict[int, DrivenColumn] = {}
        self.serials: Int64Array = np.full(_AT_FIRST, -1, np.int64)
        self._free = list(range(_AT_FIRST - 1, NOBODY, -1))
        self._next_serial = 0
        self.is_settled = True
        self._named: tuple[tuple[str, ...], Int64Array] = ((), self.serials)
        """The requests that were asked for last, and the number of each."""
        self._told: _Told | None = None
        """Of the last changes; None once numbers have changed."""
        self._batch: GatedBatch | None = None
        self._members: dict[int, _Members] = {}
        """Of the last batch, by column."""
        self._joined: dict[tuple[int, ...], Int64Array] = {}
        """Where the coefficients of its members lie, by columns."""

    def set(self, changes: CoefficientChanges) -> list[str]:
        """Take changes.

        Returns:
            The requests that were not driven in that column before.
        """
        fresh: dict[str, None] = {}
        for piece in changes:
            column = self.by_column.get(piece.column)
            if column is None:
                column = self.by_column[piece.column] = DrivenColumn(len(self.serials), self._num_slots)
            told = self._told_by(piece.req_ids)
            if piece.column not in told.columns:
                fresh |= dict.fromkeys(self._begin(piece, column, told))
                told = self._told_by(piece.req_ids)
            numbers = told.numbers if len(piece.whose) == len(piece.req_ids) else told.numbers[piece.whose]
            column.set(numbers, told.serials, piece, self.serials)
        self.is_settled = False
        return list(fresh)

    def _begin(self, piece: ColumnChanges, column: DrivenColumn, told: _Told) -> list[str]:
        """Give the requests of changes numbers; returns those that were not driven in the column before."""
        is_driven = column.is_driven(told.numbers)
        if np.count_nonzero(is_driven) == len(is_driven):
            told.columns.add(piece.column)
            return []
        fresh = [piece.req_ids[at] for at in piece.whose[~is_driven[piece.whose]].tolist()]
        for req_id in fresh:
            self._number(req_id)
        if fresh:
            self._forget_members()
        return fresh

    def columns(self, req_id: str) -> frozenset[int]:
        """Return the columns that a request has had a coefficient in."""
        number = self.numbers.get(req_id)
        if number is None:
            return frozenset()
        return frozenset(name for name, column in self.by_column.items() if column.is_driven(number))

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        number = self.numbers.pop(req_id, None)
        if number is None:
            return
        for name, column in list(self.by_column.items()):
            column.forget(number)
            if not column.is_driven(slice(None)).any():
                del self.by_column[name]
        self.serials[number] = -1
        self._free.append(number)
        self._renumbered()

    def changes(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write before a step that goes on from the one before; it counts as written."""
        return NO_PLACES if self.is_settled else self._settle(rows, batch)

    def states(self, rows: GateRows, batch: GatedBatch, cleared: Int32Array) -> Places:
        """Return what to write into the states before a step; it counts as written.

        Args:
            rows: Of the step.
            batch: Of the step.
            cleared: Slots whose states are forgotten before.
        """
        for column in self.by_column.values() if len(cleared) else ():
            column.written[cleared] = np.nan
        return self._settle(rows, batch) if self.numbers else NO_PLACES

    def replayed(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> Places:
        """Return what to write into the signals of rows that are computed again.

        Args:
            rows: Of the step.
            batch: Of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.
        """
        if not self.numbers or not (flags & TokenFlag.IS_REPLAYED).any():
            return NO_PLACES
        found: list[Places] = []
        ends = np.cumsum(rows.counts)
        for at, number in enumerate(self._numbers_of(batch.gated_ids).tolist()):
            (index,) = np.nonzero(flags[ends[at] - rows.counts[at] : ends[at]] & TokenFlag.IS_REPLAYED)
            for name, column in self.by_column.items() if len(index) else ():
                if column.is_driven(number):
                    values = column.at(int(self.serials[number]), rows.firsts[at] + index)
                    found.append(Places((rows.starts[at] + index) * self._num_columns + name, values))
        return Places.joined(*found)

    def _number(self, req_id: str) -> int:
        """Return the number of a request, which counts as driven from here on."""
        if (known := self.numbers.get(req_id)) is not None:
            return known
        if not self._free:
            size = len(self.serials)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.serials = np.concatenate([self.serials, np.full(size, -1, np.int64)])
            for column in self.by_column.values():
                column.grow(2 * size)
        number = self.numbers[req_id] = self._free.pop()
        self.serials[number] = self._next_serial
        self._next_serial += 1
        self._renumbered()
        return number

    def _renumbered(self) -> None:
        self._named = ((), self._named[1])
        self._told = None
        self._forget_members()

    def _forget_members(self) -> None:
        self._members.clear()
        self._joined.clear()

    def _told_by(self, req_ids: tuple[str, ...]) -> _Told:
        told = self._told
        if told is None or told.req_ids is not req_ids:
            numbers = self._numbers_of(req_ids)
            told = self._told = _Told(req_ids, numbers, self.serials[numbers], set())
        return told

    def _numbers_of(self, req_ids: tuple[str, ...]) -> Int64Array:
        """Return the number of each of some requests, int64 ``[n]``."""
        if self._named[0] != req_ids:
            self._named = req_ids, np.array([self.numbers.get(req_id, NOBODY) for req_id in req_ids], np.int64)
        return self._named[1]

    def _members_of(self, name: int, batch: GatedBatch) -> _Members:
        if (known := self._members.get(name)) is None:
            numbers = self._numbers_of(batch.gated_ids)
            (at,) = self.by_column[name].is_driven(numbers).nonzero()
            slots = batch.slots[at].astype(np.int64)
            flat = slots * self._num_columns + name
            known = _Members(None if len(at) == len(numbers) else at, numbers[at], slots, flat)
            self._members[name] = known
        return known

    def _settle(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write for the first row of each request.

        Where one changes all of a column are written: so the places stay the same from step to step.
        """
        if self._batch is not batch:
            self._batch = batch
            self._forget_members()
        found: list[tuple[int, Places]] = []
        self.is_settled = True
        for name, column in self.by_column.items():
            at, numbers, slots, flat = self._members_of(name, batch)
            firsts = rows.firsts if at is None else rows.firsts[at]
            values = column.values[numbers]
            is_early = firsts < column.firsts[numbers]
            for index in is_early.nonzero()[0].tolist() if np.count_nonzero(is_early) else ():
                self.is_settled = False
                values[index] = column.at(int(self.serials[numbers[index]]), firsts[index : index + 1])[0]
            if column.is_changed or np.count_nonzero(values != column.written[slots]):
                column.is_changed, column.written[slots] = False, values
                found.append((name, Places(flat, values)))
        if len(found) > 1:
            return _one_behind_the_other(found, self._joined)
        return found[0][1] if found else NO_PLACES


def _one_behind_the_other(found: Sequence[tuple[int, Places]], known: dict[tuple[int, ...], Int64Array]) -> Places:
    """Put the places of some columns one behind the other; `known` has the arrays of before, by columns."""
    joined = Places.joined(*(places for _, places in found))
    return Places(known.setdefault(tuple(name for name, _ in found), joined.flat), joined.values)
