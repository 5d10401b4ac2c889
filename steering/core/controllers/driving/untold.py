"""Changes of coefficients that the workers do not know yet."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from headgate.steering.gates.coefficient_changes import (
    CoefficientChange,
    CoefficientChanges,
    ColumnChanges,
    by_column,
)


class Untold:
    """Keeps changes in the order in which they were decided, until steps of their requests."""

    def __init__(self) -> None:
        self._pieces: list[ColumnChanges] = []
        self._single: list[CoefficientChange] = []
        """Decided behind the pieces, one by one."""

    def add(self, piece: ColumnChanges) -> None:
        """Add some of one column."""
        if self._single:
            self._close()
        self._pieces.append(piece)

    def add_one(self, change: CoefficientChange) -> None:
        """Add one."""
        self._single.append(change)

    def take(self, scheduled: Collection[str]) -> CoefficientChanges | None:
        """Take those of some requests; None if there are none."""
        if self._single:
            self._close()
        if not self._pieces:
            return None
        is_scheduled = scheduled.__contains__
        for piece in self._pieces:
            if not all(map(is_scheduled, piece.req_ids)):
                return tuple(self._split(is_scheduled)) or None
        found, self._pieces = self._pieces, []
        return tuple(found)

    def drop(self, req_id: str) -> None:
        """Drop those of a request."""
        self._single = [change for change in self._single if change.req_id != req_id]
        if any(req_id in piece.req_ids for piece in self._pieces):
            self._split(lambda known: known == req_id)

    def _close(self) -> None:
        """Make pieces of those that were decided one by one."""
        self._pieces += by_column(self._single)
        self._single = []

    def _split(self, is_taken: Callable[[str], bool]) -> list[ColumnChanges]:
        """Take those of some requests out, and keep the others."""
        found: list[ColumnChanges] = []
        kept: list[ColumnChanges] = []
        for piece in self._pieces:
            takes = np.array([is_taken(req_id) for req_id in piece.req_ids], np.bool_)[piece.whose]
            for into, wanted in ((found, takes), (kept, ~takes)):
                if np.count_nonzero(wanted):
                    into.append(piece.where(wanted))
        self._pieces = kept
        return found
