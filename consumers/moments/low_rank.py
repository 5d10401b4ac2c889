"""A scatter matrix of many rows in little memory: its largest directions, with a bound of what is missing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


class LowRankScatter:
    """Stands for ``A.T @ A`` of all rows A that were added, by few rows B (Frequent Directions of Liberty).

    ``0 <= x @ (A.T @ A - B.T @ B) @ x <= error`` for every x of unit length. `error` is kept with the sketch; it is at
    most the sum of all squared elements of A divided by ``rank + 1``, and 0 while A has no more than `rank`
    dimensions. Sketches merge, and their bounds add up with what merging takes away.

    Attributes:
        rank: Rows of B once it is full.
        rows: B: float64 ``[0 to rank, width]``.
        error: See above.

    Args:
        width: Elements of a row.
        rank: At least 1.
    """

    def __init__(self, width: int, rank: int) -> None:
        self.rank = rank
        self.rows: Float64Array = np.empty((0, width))
        self.error = 0.0

    def add(self, rows: Float64Array) -> None:
        """Add rows, ``[N, width]``."""
        step = max(self.rank, 64)
        for start in range(0, len(rows), step):
            self._shrink(np.concatenate((self.rows, rows[start : start + step])))

    def merge(self, other: LowRankScatter) -> None:
        """Add what `other` stands for; it must have the same rank."""
        if other.rank != self.rank:
            raise ValueError(f"sketches of ranks {self.rank} and {other.rank} cannot be merged")
        self.error += other.error
        self._shrink(np.concatenate((self.rows, other.rows)))

    def _shrink(self, rows: Float64Array) -> None:
        """Keep `rank` rows: rotate, and take from every squared singular value the largest that is left out."""
        if len(rows) <= self.rank:
            self.rows = rows
            return
        squares, rotation = np.linalg.eigh(rows @ rows.T)  # ascending
        squares = np.maximum(squares, 0.0)
        lost, kept = float(squares[-self.rank - 1]), squares[-self.rank :]
        kept_rows = rotation[:, -self.rank :].T @ rows
        factors = np.sqrt(np.divide(kept - lost, kept, out=np.zeros_like(kept), where=kept > 0))
        self.rows = kept_rows * factors[:, None]
        self.error += lost
