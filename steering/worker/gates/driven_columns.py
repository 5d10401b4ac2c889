"""The coefficients of a column: the last ones, and those of earlier rows, which may be computed again. Numpy only.

Letters in shape comments: n requests or changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import Int64Array
from headgate.steering.gates.coefficient_changes import ColumnChanges
from headgate.steering.vectors.dtypes import Float32Rows

_FEW = 64
"""Pieces of a history, of a step each, that are put together."""
NEVER = np.iinfo(np.int64).max


class Places(NamedTuple):
    """Numbers to write into signals or states.

    Attributes:
        flat: int64 ``[n]``: the batch row, or slot, times the number of columns, plus the column. The very array of the
            step before if it is the same.
        values: float32 ``[n]``.
    """

    flat: Int64Array
    values: Float32Rows

    def __len__(self) -> int:
        return len(self.flat)

    @classmethod
    def of(cls, places: Iterable[tuple[int, int, float]], num_columns: int) -> Places:
        """Make it of row, column and value of each."""
        listed = list(places)
        flat = np.array([row * num_columns + column for row, column, _ in listed], np.int64)
        return cls(flat, np.array([value for *_, value in listed], np.float32))

    @classmethod
    def joined(cls, *parts: Places) -> Places:
        """Put some one behind the other."""
        found = [part for part in parts if len(part)]
        if len(found) < 2:
            return found[0] if found else NO_PLACES
        flat, values = (np.concatenate([part[at] for part in found]) for at in (0, 1))
        return cls(flat, values)


NO_PLACES = Places(np.empty(0, np.int64), np.empty(0, np.float32))


class Piece(NamedTuple):
    """Changes of one column in the order in which they were decided: whose, from which position on, and what.

    Attributes:
        serials: int64 ``[n]``: serial numbers of requests.
        firsts: int64 ``[n]``.
        values: float32 ``[n]``.
    """

    serials: Int64Array
    firsts: Int64Array
    values: Float32Rows

    @classmethod
    def of(cls, serials: Int64Array, changes: ColumnChanges) -> Piece:
        """Make it of changes, and the serial number of each request that they name; int64 ``[m]``."""
        return cls(serials[changes.whose], changes.firsts, changes.values)

    @classmethod
    def joined(cls, pieces: list[Piece], alive: Int64Array) -> Piece:
        """Put some one behind the other, without requests that have ended."""
        serials, firsts, values = (np.concatenate([piece[at] for piece in pieces]) for at in (0, 1, 2))
        stays = np.isin(serials, alive)
        return cls(serials[stays], firsts[stays], values[stays])

    def rows_of(self, serial: int) -> tuple[Int64Array, Float32Rows]:
        """Return positions and values of one request's."""
        mine = self.serials == serial
        return self.firsts[mine], self.values[mine]


class _Noted(NamedTuple):
    """Changes of a step, as they came: see `Piece.of`."""

    serials: Int64Array
    changes: ColumnChanges

    def rows_of(self, serial: int) -> tuple[Int64Array, Float32Rows]:
        return self.piece().rows_of(serial)

    def piece(self) -> Piece:
        return Piece.of(self.serials, self.changes)


class DrivenColumn:
    """The coefficients in one column, of each driven request by its number.

    Args:
        size: Numbers.
        num_slots: Slots of states.

    Attributes:
        firsts: int64 ``[size]``: the position from which the last value acts; `NEVER` for a request that is not driven
            here.
        values: float32 ``[size]``: the last values.
        written: float32 ``[num_slots]``: as the device has it, by slot; NaN if nothing is known.
        is_changed: Whether a value was set since the last step.
    """

    def __init__(self, size: int, num_slots: int) -> None:
        self.firsts: Int64Array = np.full(size, NEVER, np.int64)
        self.values: Float32Rows = np.zeros(size, np.float32)
        self.written: Float32Rows = np.full(num_slots, np.nan, np.float32)
        self.is_changed = False
        self._large: list[Piece] = []
        self._small: list[_Noted] = []
        """Those of the last steps."""

    def is_driven(self, numbers: Any) -> Any:
        """Return whether the requests of some numbers, or of one, have had a coefficient here."""
        return self.firsts[numbers] < NEVER

    def grow(self, size: int) -> None:
        """Make room for numbers below `size`."""
        more = size - len(self.firsts)
        self.firsts = np.concatenate([self.firsts, np.full(more, NEVER, np.int64)])
        self.values = np.concatenate([self.values, np.zeros(more, np.float32)])

    def forget(self, number: int) -> None:
        """Let a number be another request's."""
        self.firsts[number] = NEVER

    def set(self, numbers: Int64Array, serials: Int64Array, changes: ColumnChanges, alive: Int64Array) -> None:
        """Set values from positions on, for good.

        Args:
            numbers: Of the requests that change, int64 ``[n]``.
            serials: Serial numbers of all that the changes name, int64 ``[m]``.
            changes: What is set.
            alive: Serial numbers of all driven requests.
        """
        self.firsts[numbers], self.values[numbers] = changes.firsts, changes.values
        self.is_changed = True
        self._small.append(_Noted(serials, changes))
        if len(self._small) >= _FEW:
            self._compact(alive)

    def at(self, serial: int, positions: Int64Array) -> Float32Rows:
        """Return the value of a request at each of some positions; 0 before the first."""
        pieces: list[Piece | _Noted] = [*self._large, *self._small]
        found = [piece.rows_of(serial) for piece in pieces]
        firsts = np.concatenate([firsts for firsts, _ in found])
        values = np.concatenate([np.zeros(1, np.float32), *(values for _, values in found)])
        # One that was decided later takes the place of all that were to act from its position on.
        behind = np.minimum.accumulate(np.append(firsts, NEVER)[::-1])[::-1][1:]
        stays = firsts < behind
        at: Float32Rows = values[np.append(True, stays)][np.searchsorted(firsts[stays], positions, side="right")]
        return at

    def _compact(self, alive: Int64Array) -> None:
        """Put the pieces of the last steps together."""
        self._large.append(Piece.joined([piece.piece() for piece in self._small], alive))
        self._small = []
        while len(self._large) > 1 and len(self._large[-2].firsts) <= 2 * len(self._large[-1].firsts):
            self._large[-2:] = [Piece.joined(self._large[-2:], alive)]
