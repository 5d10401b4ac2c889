"""Coefficients that controllers set on the requests of a worker: entries of programs have them on generated rows.

A coefficient has a column, like the strength of a gate, but nothing on the device evaluates it: the host writes it into
the state of the request where it changes. Rows that are computed again, several in a forward, find theirs in the
signals, as `headgate.steering.programs.gate_codes` has it for entries that act early. Numpy only.

Letters in shape comments: G requests with gates in a step, N their rows, K requests that are driven.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int32Array, Int64Array
from headgate.steering.gates.coefficient_changes import CoefficientChanges
from headgate.steering.programs.gate_codes import TokenFlag
from headgate.steering.vectors.dtypes import Float32Rows
from headgate.steering.worker.gates.requests import GatedBatch, GateRows

_AT_FIRST = 64
_FEW = 64
"""Pieces of a history, of a step each, that are put together."""
_NEVER = np.iinfo(np.int64).max


class Places(NamedTuple):
    """Numbers to write, of a slot or a batch row each.

    Attributes:
        rows: int64 ``[n]``: slots, or batch rows.
        columns: int64 ``[n]``.
        values: float32 ``[n]``.
    """

    rows: Int64Array
    columns: Int64Array
    values: Float32Rows

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, float]]) -> Places:
        """Make it of row, column and value of each."""
        rows, columns, values = list(zip(*places, strict=True)) or ((), (), ())
        return cls(np.array(rows, np.int64), np.array(columns, np.int64), np.array(values, np.float32))

    @classmethod
    def joined(cls, *parts: Places) -> Places:
        """Put some one behind the other."""
        found = [part for part in parts if len(part)]
        if len(found) < 2:
            return found[0] if found else NO_PLACES
        rows, columns, values = (np.concatenate([part[at] for part in found]) for at in (0, 1, 2))
        return cls(rows, columns, values)


NO_PLACES = Places(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


class _Piece(NamedTuple):
    """Changes of one column in the order in which they were decided: whose, from which position on, and what.

    Attributes:
        serials: int64 ``[n]``: serial numbers of requests, of which no two are the same.
        firsts: int64 ``[n]``.
        values: float32 ``[n]``.
    """

    serials: Int64Array
    firsts: Int64Array
    values: Float32Rows

    @classmethod
    def joined(cls, pieces: list[_Piece], alive: Int64Array) -> _Piece:
        """Put some one behind the other, without requests that have ended."""
        serials, firsts, values = (np.concatenate([piece[at] for piece in pieces]) for at in (0, 1, 2))
        stays = np.isin(serials, alive)
        return cls(serials[stays], firsts[stays], values[stays])


class _Column:
    """The coefficients in one column, of each driven request by its number: the last ones, and a history."""

    def __init__(self, size: int, num_slots: int) -> None:
        self.firsts: Int64Array = np.full(size, _NEVER, np.int64)
        """The position from which the last value acts; `_NEVER` for a request that is not driven here."""
        self.values: Float32Rows = np.zeros(size, np.float32)
        self.written: Float32Rows = np.full(num_slots, np.nan, np.float32)
        """By slot, as the device has it; NaN if nothing is known."""
        self._large: list[_Piece] = []
        self._small: list[_Piece] = []

    def is_driven(self, numbers: Any) -> Any:
        """Return whether the requests of some numbers, or of one, have had a coefficient here."""
        return self.firsts[numbers] < _NEVER

    def grow(self, size: int) -> None:
        """Make room for numbers below `size`."""
        more = size - len(self.firsts)
        self.firsts = np.concatenate([self.firsts, np.full(more, _NEVER, np.int64)])
        self.values = np.concatenate([self.values, np.zeros(more, np.float32)])

    def set(self, numbers: Int64Array, piece: _Piece, alive: Int64Array) -> None:
        """Set values from positions on, for good.

        Args:
            numbers: Of the requests.
            piece: What is set.
            alive: Serial numbers of all driven requests.
        """
        self.firsts[numbers], self.values[numbers] = piece.firsts, piece.values
        self._small.append(piece)
        if len(self._small) < _FEW:
            return
        self._large.append(_Piece.joined(self._small, alive))
        self._small = []
        while len(self._large) > 1 and len(self._large[-2].firsts) <= 2 * len(self._large[-1].firsts):
            self._large[-2:] = [_Piece.joined(self._large[-2:], alive)]

    def at(self, serial: int, positions: Int64Array) -> Float32Rows:
        """Return the value of a request at each of some positions; 0 before the first."""
        found = [(piece, piece.serials == serial) for piece in (*self._large, *self._small)]
        firsts = np.concatenate([piece.firsts[mine] for piece, mine in found])
        values = np.concatenate([np.zeros(1, np.float32), *(piece.values[mine] for piece, mine in found)])
        # One that was decided later takes the place of all that were to act from its position on.
        behind = np.minimum.accumulate(np.append(firsts, _NEVER)[::-1])[::-1][1:]
        stays = firsts < behind
        at: Float32Rows = values[np.append(True, stays)][np.searchsorted(firsts[stays], positions, side="right")]
        return at


class DrivenStrengths:
    """The coefficients of a worker's requests. Step thread only.

    Args:
        num_slots: Slots of states.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._numbers: dict[str, int] = {}
        """Of the requests that are driven."""
        self._columns: dict[int, _Column] = {}
        self._serials: Int64Array = np.full(_AT_FIRST, -1, np.int64)
        """By number; -1 for a free one."""
        self._free = list(range(_AT_FIRST - 1, -1, -1))
        self._next_serial = 0
        self._unsettled: set[str] = set()
        """Requests whose last change may not be on the device yet."""
        self._batch: tuple[GatedBatch | None, Int64Array] = (None, self._serials)
        """The last batch, and the number of each of its requests, int64 ``[G]``; -1 for those that are not driven."""

    def set(self, changes: CoefficientChanges) -> list[str]:
        """Take changes.

        Returns:
            The requests that were not driven in that column before.
        """
        known = list(map(self._numbers.get, changes.req_ids))
        if None in known:
            known = list(map(self._number, changes.req_ids))
        numbers = np.array(known, np.int64)
        fresh: dict[str, None] = {}
        for name in sorted(set(changes.columns.tolist())):
            (at,) = np.nonzero(changes.columns == name)
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = _Column(len(self._serials), self._num_slots)
            mine = numbers[at]
            if not (is_known := column.is_driven(mine)).all():
                fresh |= dict.fromkeys(changes.req_ids[each] for each in at[~is_known].tolist())
            piece = _Piece(self._serials[mine], changes.firsts[at], changes.values[at])
            column.set(mine, piece, self._serials)
        self._unsettled.update(changes.req_ids)
        return list(fresh)

    def columns(self, req_id: str) -> frozenset[int]:
        """Return the columns that a request has had a coefficient in."""
        number = self._numbers.get(req_id)
        if number is None:
            return frozenset()
        return frozenset(name for name, column in self._columns.items() if column.is_driven(number))

    def forget(self, req_id: str) -> None:
        """Forget a request that ended."""
        number = self._numbers.pop(req_id, None)
        if number is None:
            return
        self._unsettled.discard(req_id)
        for name, column in list(self._columns.items()):
            column.firsts[number] = _NEVER
            if not column.is_driven(slice(None)).any():
                del self._columns[name]
        self._serials[number] = -1
        self._free.append(number)
        self._batch = (None, self._batch[1])

    def changes(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write before a step of one row for each request, behind such a step; it counts as written."""
        return self._settle(rows, batch) if self._unsettled else NO_PLACES

    def states(self, rows: GateRows, batch: GatedBatch, cleared: Int32Array) -> Places:
        """Return what to write into the states before a step; it counts as written.

        Args:
            rows: Of the step.
            batch: Of the step.
            cleared: Slots whose states are forgotten before.
        """
        for column in self._columns.values() if len(cleared) else ():
            column.written[cleared] = np.nan
        return self._settle(rows, batch) if self._numbers else NO_PLACES

    def replayed(self, rows: GateRows, batch: GatedBatch, flags: Int32Array) -> Places:
        """Return what to write into the signals of rows that are computed again.

        Args:
            rows: Of the step.
            batch: Of the step.
            flags: `TokenFlag` of each row, int32 ``[N]``.
        """
        if not self._numbers or not (flags & TokenFlag.IS_REPLAYED).any():
            return NO_PLACES
        found: list[Places] = []
        ends = np.cumsum(rows.counts)
        for at, number in enumerate(self._numbers_of(batch).tolist()):
            (index,) = np.nonzero(flags[ends[at] - rows.counts[at] : ends[at]] & TokenFlag.IS_REPLAYED)
            for name, column in self._columns.items() if number >= 0 and len(index) else ():
                if column.is_driven(number):
                    values = column.at(int(self._serials[number]), rows.firsts[at] + index)
                    found.append(Places(rows.starts[at] + index, np.full(len(index), name), values))
        return Places.joined(*found)

    def _number(self, req_id: str) -> int:
        """Return the number of a request, which counts as driven from here on."""
        if (known := self._numbers.get(req_id)) is not None:
            return known
        if not self._free:
            size = len(self._serials)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self._serials = np.concatenate([self._serials, np.full(size, -1, np.int64)])
            for column in self._columns.values():
                column.grow(2 * size)
        number = self._numbers[req_id] = self._free.pop()
        self._serials[number] = self._next_serial
        self._next_serial += 1
        self._batch = (None, self._batch[1])
        return number

    def _numbers_of(self, batch: GatedBatch) -> Int64Array:
        if self._batch[0] is not batch:
            self._batch = batch, np.array([self._numbers.get(req_id, -1) for req_id in batch.places], np.int64)
        return self._batch[1]

    def _settle(self, rows: GateRows, batch: GatedBatch) -> Places:
        """Return what to write for the first row of each request; one is settled if nothing changes behind that."""
        numbers, found = self._numbers_of(batch), []
        waiting: set[str] = set()
        for name, column in self._columns.items():
            firsts = np.where(numbers < 0, _NEVER, column.firsts[numbers])
            values, is_driven = column.values[numbers], firsts < _NEVER
            for at in np.flatnonzero(is_driven & (firsts > rows.firsts)).tolist():
                waiting.add(rows.req_ids[at])
                values[at] = column.at(int(self._serials[numbers[at]]), rows.firsts[at : at + 1])[0]
            (changed,) = np.nonzero(is_driven & (values != column.written[batch.slots]))
            if len(changed):
                slots, written = batch.slots[changed].astype(np.int64), values[changed]
                column.written[slots] = written
                found.append(Places(slots, np.full(len(slots), name, np.int64), written))
        self._unsettled.difference_update(rows.req_ids)
        self._unsettled |= waiting
        return Places.joined(*found)
