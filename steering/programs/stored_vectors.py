"""Vectors of operations and probes as programs store them. Numpy only; sums in float64.

A row is stored as its client gave it, times a power of two so that its largest magnitude lies between 1/2 and 1, and
rounded to the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headgate.steering.programs.operations import Float32Row, ModuleVector, Operation
from headgate.steering.vectors.dtypes import Rows, StoredType, as_bfloat16, widen
from headgate.steering.vectors.sums import round_to

Float64Row = npt.NDArray[np.float64]

_MAX_EXPONENT = 120
"""Powers of two up to it, and from its reciprocal on, are numbers of float32 as any other."""


@dataclass(eq=False)
class StoredVector:
    """A vector as it is stored.

    Attributes:
        stored: The stored row.
        factor: A power of two; the vector is ``factor * row`` but for its rounding.
        given: The vector before rounding, as it was given.
        peak: The largest magnitude of `given`.
        dtype: The model's.
        is_exact: Whether rounding certainly took nothing.
    """

    stored: Rows
    factor: float
    given: npt.NDArray[np.floating]
    peak: float
    dtype: StoredType
    is_exact: bool

    @property
    def is_zero(self) -> bool:
        """Whether it is zero, and has no direction: else the largest magnitude of `row` is 1/2 at least."""
        return self.peak == 0

    @cached_property
    def row(self) -> Float32Row:
        """The values of the stored row, widened."""
        return widen(self.stored, self.dtype)

    @cached_property
    def norm(self) -> float:
        """Euclidean norm of `row`; 0 for zeros."""
        return math.sqrt(np.square(self.row, dtype=np.float64).sum())

    @property
    def values(self) -> Float64Row:
        """The vector before rounding."""
        return self.given.astype(np.float64)

    @property
    def unit(self) -> Float64Row:
        """The direction as it is stored."""
        return self.row.astype(np.float64) / self.norm

    @property
    def unit_peak(self) -> float:
        """The largest magnitude of `unit`: division rounds without changing the order."""
        return float(np.abs(self.row).max()) / self.norm

    @property
    def length(self) -> float:
        """The norm of the vector."""
        return float(np.linalg.norm(self.values))

    def rest(self) -> StoredVector | None:
        """Return what rounding took from the vector, if that is anything, as it is stored."""
        if self.is_exact or (self.row * np.float32(self.factor) == self.given).all():
            return None
        rest = self.values - self.factor * self.row.astype(np.float64)
        return store([rest], self.dtype)[0] if rest.any() else None


def store(vectors: Sequence[npt.NDArray[np.floating]], dtype: StoredType) -> list[StoredVector]:
    """Round vectors to the model's dtype, at least one: all at once, since each step of numpy has a price."""
    values = vectors[0][None] if len(vectors) == 1 else np.concatenate(vectors).reshape(len(vectors), -1)
    magnitudes = np.abs(values)
    peaks = magnitudes.max(axis=1).tolist()
    exponents = [math.frexp(peak)[1] for peak in peaks]
    # Powers beyond float32's range, of vectors as small as its smallest numbers, make the product one of float64.
    wide = np.float32 if min(exponents) > -_MAX_EXPONENT else np.float64
    powers = np.array([[math.ldexp(1.0, -exponent)] for exponent in exponents], wide)
    # Multiplied in, which takes a tenth of the time of `ldexp` of all values, and in memory that is at hand.
    scaled = np.multiply(values, powers, out=magnitudes).astype(np.float32, copy=False)
    is_finite = all(map(math.isfinite, peaks))
    exact = as_bfloat16(scaled, "float32") if dtype == "bfloat16" and is_finite else None
    stored = round_to(scaled, dtype) if exact is None else exact
    return [
        # What is made larger stays exact; what is made smaller may vanish.
        StoredVector(row, math.ldexp(1.0, exponent), given, peak, dtype, exact is not None and exponent <= 0)
        for row, exponent, given, peak in zip(stored, exponents, vectors, peaks, strict=True)
    ]


def vectors_of(operations: Iterable[Operation]) -> list[Float32Row]:
    """Return the vectors that operations bring, each as often as documents name it; those of modules are left out."""
    by_document = {id(operation.vectors): operation.vectors for operation in operations}
    given = [one for vectors in by_document.values() for one in vectors.values()]
    return [one for one in given if not isinstance(one, ModuleVector)]


class StoredVectors:
    """Vectors that were given together, each stored once.

    Args:
        vectors: The vectors; equal objects count as two.
        dtype: The model's.

    Attributes:
        dtype: As given.
    """

    def __init__(self, vectors: Iterable[Float32Row], dtype: StoredType) -> None:
        self.dtype = dtype
        given = {id(one): one for one in vectors}
        self._found = dict(zip(given, store([*given.values()], dtype), strict=True)) if given else {}

    def of(self, vector: Float32Row) -> StoredVector:
        """Return a vector, which may be another one, as it is stored."""
        if (found := self._found.get(id(vector))) is None:
            # It holds the vector, whose id stays its own.
            (found,) = store([vector], self.dtype)
            self._found[id(vector)] = found
        return found
