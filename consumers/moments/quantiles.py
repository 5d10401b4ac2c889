"""Quantiles of many positive numbers in little memory: a sketch that merges without loss, with a relative error."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headgate.capture.schema.batch import Float64Array, Int64Array


@dataclass(slots=True)
class QuantileSketch:
    """Counts of numbers in buckets whose bounds grow by a constant factor (the DDSketch of Masson, Rim and Lee).

    Every quantile that it returns is within ``relative_error`` of a number that was added at that rank. A merged
    sketch is the very sketch of all numbers together, in whatever order and pieces they came. Of numbers from 1e-300
    to 1e300 it has at most 70,000 buckets at 1 %; of the lengths of a model's rows, some hundreds.

    Attributes:
        relative_error: Above 0 and below 1.
        counts: By bucket; bucket i holds numbers above ``growth ** (i - 1)`` up to ``growth ** i``.
        num_zeros: Numbers that were 0.
        total: Sum of all numbers.
        least: The smallest; infinity before the first.
        most: The largest; minus infinity before the first.
    """

    relative_error: float
    counts: dict[int, int] = field(default_factory=dict)
    num_zeros: int = 0
    total: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")

    @property
    def num_values(self) -> int:
        """How many numbers were added."""
        return self.num_zeros + sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        """The mean of all numbers, exact but for rounding; None without any."""
        count = self.num_values
        return self.total / count if count else None

    def add(self, values: Float64Array) -> None:
        """Add finite numbers that are at least 0."""
        if not len(values):
            return
        positive = values[values > 0]
        self.num_zeros += len(values) - len(positive)
        buckets = np.ceil(np.log(positive) / np.log(self._growth)).astype(np.int64)
        for bucket, count in zip(*(part.tolist() for part in np.unique(buckets, return_counts=True)), strict=True):
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def merge(self, other: QuantileSketch) -> None:
        """Add everything that `other` was given; it must have the same error."""
        if other.relative_error != self.relative_error:
            raise ValueError(f"sketches of errors {self.relative_error} and {other.relative_error} cannot be merged")
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num_zeros += other.num_zeros
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    def quantile(self, share: float) -> float | None:
        """Return the number below which that share of all lies; None without any. 0 and 1 give the exact extremes."""
        count = self.num_values
        if not count:
            return None
        rank = share * (count - 1)
        if rank <= 0:
            return self.least
        if rank >= count - 1:
            return self.most
        seen = self.num_zeros
        if rank < seen:
            return 0.0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if rank < seen:
                break
        middle = 2 * self._growth**bucket / (self._growth + 1)
        return min(max(middle, self.least), self.most)

    def arrays(self) -> tuple[Int64Array, Int64Array]:
        """Return buckets, ascending, and their counts; both int64."""
        ordered = sorted(self.counts.items())
        pairs = np.array(ordered, dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

    @property
    def _growth(self) -> float:
        return (1 + self.relative_error) / (1 - self.relative_error)
