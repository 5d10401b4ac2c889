"""Operations become entries of a program. Numpy only; sums in float64.

A row is stored as its client gave it, times a power of two so that its largest magnitude lies between 1/2 and 1, and
rounded to the model's dtype. Directions are not made unit vectors first: the entries' scales do that, from the norm of
the row as it is stored. So a direction that came in the model's dtype is stored exactly, what is removed is removed
exactly along the stored direction, and methods on one vector share one row at all sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Named, PositionSelector
from headgate.steering.programs.codes import EVERYWHERE, MAX_GROUPS, Code, Flag
from headgate.steering.programs.operations import Float32Row, Lookup, Method, ModuleVector, Operation
from headgate.steering.programs.program import Entry, Program
from headgate.steering.vectors.dtypes import Rows, StoredType, widen
from headgate.steering.vectors.sums import LIMIT, round_to

Float64Row = npt.NDArray[np.float64]

PARALLEL = 1e-3
"""Sine of the angle below which two directions count as parallel: the row that tells them apart would be rounding."""


def lower(operations: Iterable[Operation], dtype: StoredType, lookup: Lookup | None = None) -> Program | None:
    """Return the program of operations, in their order; None if none of them changes anything.

    Args:
        operations: Of one phase.
        dtype: The model's.
        lookup: Gives the vectors of modules; needed if an operation names one.

    Raises:
        RequestError: With the path of an operation's field: a module without a vector at the site, a vector of zeros
            that has to have a direction, directions that are parallel, a change too large for `dtype`, too many
            distinct selectors of positions.
    """
    listed = tuple(operations)
    rows, groups = _Rows(listed, dtype, lookup), _Groups()
    entries: list[Entry] = []
    last: Operation | None = None
    parts: list[_Part] = []
    group = EVERYWHERE
    for operation in listed:
        if last is None or not _are_alike(operation, last):
            parts = _flagged(_LOWER[operation.method](operation, rows), operation)
            group = groups.of(operation) if parts else EVERYWHERE
            last = operation
        entries.extend([Entry(operation.site, *part, group) for part in parts])
    return Program.from_entries(entries, dtype, groups.selectors) if entries else None


def _are_alike(one: Operation, other: Operation) -> bool:
    """Return whether operations of one document differ in nothing but the site; False if that is not sure."""
    return (
        one.vectors is other.vectors
        and one.numbers is other.numbers
        and one.method is other.method
        and one.mask is other.mask
        and one.positions is other.positions
        and one.only_if_positive == other.only_if_positive
        and one.preserve_norm == other.preserve_norm
        and one.where == other.where
        and not one.references
    )


def _flagged(parts: list[_Part], operation: Operation) -> list[_Part]:
    if parts and operation.preserve_norm:
        parts[0] = parts[0]._replace(code=parts[0].code | Flag.KEEP_NORM_FROM)
        parts[-1] = parts[-1]._replace(code=parts[-1].code | Flag.KEEP_NORM_TO)
    return parts


class StoredRow(NamedTuple):
    """A row as it is stored, ``[hidden]``: the vector is ``factor * row``."""

    row: Rows
    factor: float


def split_row(values: Float32Row, dtype: StoredType) -> tuple[StoredRow, StoredRow | None]:
    """Return a vector as it is stored in `dtype`, and what rounding took from it, if that is anything."""
    whole = _store(values[None], dtype)[0]
    if np.array_equal(whole.row * np.float32(whole.factor), values):
        return StoredRow(whole.stored, whole.factor), None
    rest = values.astype(np.float64) - whole.factor * whole.row.astype(np.float64)
    if not rest.any():
        return StoredRow(whole.stored, whole.factor), None
    lower = _store(rest[None], dtype)[0]
    return StoredRow(whole.stored, whole.factor), StoredRow(lower.stored, lower.factor)


class _Part(NamedTuple):
    """An entry without its site."""

    code: int
    read: Rows | None
    write: Rows | None
    params: Sequence[float]


_MAX_EXPONENT = 120
"""Powers of two up to it, and from its reciprocal on, are numbers of float32 as any other."""


class _Stored(NamedTuple):
    """A vector as it is stored.

    Attributes:
        stored: The stored row.
        row: Its values, widened.
        factor: A power of two; the vector is ``factor * row`` but for its rounding.
        norm: Of `row`; 0 for zeros.
        given: The vector before rounding, as it was given.
        peak: The largest magnitude of `given`.
        row_peak: The largest magnitude of `row`.
    """

    stored: Rows
    row: Float32Row
    factor: float
    norm: float
    given: npt.NDArray[np.floating]
    peak: float
    row_peak: float

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
        return self.row_peak / self.norm

    @property
    def length(self) -> float:
        """The norm of the vector."""
        return float(np.linalg.norm(self.values))


def _store(values: npt.NDArray[np.floating], dtype: StoredType) -> list[_Stored]:
    """Round vectors, ``[n, hidden]``, to the model's dtype: all at once, since each step of numpy has a price."""
    peaks = np.abs(values).max(axis=1)
    exponents = np.frexp(peaks)[1]
    powers = np.ldexp(1.0, -exponents)  # multiplied in, which is exact, and ten times as fast as `ldexp` of all values
    # A power beyond float32's range, of vectors as small as its smallest numbers, makes the product one of float64.
    powers = powers.astype(np.float32) if exponents.min() > -_MAX_EXPONENT else powers
    stored = round_to((values * powers[:, None]).astype(np.float32, copy=False), dtype)
    rows = widen(stored, dtype)
    norms = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
    factors, row_peaks = np.ldexp(1.0, exponents), np.abs(rows).max(axis=1)
    numbers = zip(factors.tolist(), norms.tolist(), peaks.tolist(), row_peaks.tolist(), strict=True)
    return [
        _Stored(kept, row, factor, norm, whole, peak, row_peak)
        for kept, row, whole, (factor, norm, peak, row_peak) in zip(stored, rows, values, numbers, strict=True)
    ]


class _Rows:
    """The vectors of operations, each stored once."""

    def __init__(self, operations: Sequence[Operation], dtype: StoredType, lookup: Lookup | None) -> None:
        self.dtype = dtype
        self._lookup = lookup
        by_document = {id(operation.vectors): operation.vectors for operation in operations}
        given = {id(one): one for vectors in by_document.values() for one in vectors.values()}
        arrays = {key: one for key, one in given.items() if not isinstance(one, ModuleVector)}
        self._found: dict[int | ModuleVector, _Stored] = {}
        if arrays:
            self._found.update(zip(arrays, _store(np.stack([*arrays.values()]), dtype), strict=True))
        self._made: dict[tuple[str, int, int], _Stored] = {}

    def of(self, operation: Operation, key: str) -> _Stored:
        """Return a vector of an operation."""
        given = operation.vectors[key]
        name = given if isinstance(given, ModuleVector) else id(given)
        if name not in self._found:
            self._found[name] = self.store(self._values(given, f"{operation.where}.{key}"))
        return self._found[name]

    def direction(self, operation: Operation, key: str) -> _Stored:
        """Return a vector of an operation that must not be zero."""
        found = self.of(operation, key)
        if found.norm == 0:
            raise RequestError(f"{operation.where}.{key}", "is zero, and has no direction")
        return found

    def store(self, values: npt.NDArray[np.floating]) -> _Stored:
        """Round a vector to the model's dtype."""
        return _store(values[None], self.dtype)[0]

    def made(self, name: str, one: _Stored, other: _Stored, make: Callable[[], Float64Row]) -> _Stored:
        """Store what is made of two vectors of `of`, once for all sites."""
        key = name, id(one), id(other)
        if key not in self._made:
            self._made[key] = self.store(make())
        return self._made[key]

    def check(self, largest: float, operation: Operation, key: str) -> None:
        """Refuse a change whose largest value is beyond `LIMIT`."""
        if not largest < LIMIT[self.dtype]:
            raise RequestError(
                f"{operation.where}.{key}",
                f"the operation would change a row by up to {largest:.4g}; changes for a model in {self.dtype} must "
                f"stay below {LIMIT[self.dtype]:.4g}",
            )

    def _values(self, given: Float32Row | ModuleVector, where: str) -> Float32Row:
        if not isinstance(given, ModuleVector):
            return given
        if self._lookup is None:
            raise AssertionError(f"{where} names the module {given.module!r}, and there is no lookup")
        found = self._lookup(given.module, given.site)
        if found is None:
            raise RequestError(where, f"module {given.module!r} has no vector at {given.site.name}")
        return found


class _Groups:
    """The selectors of position groups, each once."""

    def __init__(self) -> None:
        self.selectors: list[PositionSelector] = []

    def of(self, operation: Operation) -> int:
        """Return the group of an operation's rows."""
        wanted = operation.positions
        if wanted is None or wanted == Named("all"):
            return EVERYWHERE
        if wanted not in self.selectors:
            if len(self.selectors) == MAX_GROUPS:
                raise RequestError(
                    f"{operation.where}.positions", f"more than {MAX_GROUPS} distinct selectors of positions"
                )
            self.selectors.append(wanted)
        return self.selectors.index(wanted) + 1


def _additive(operation: Operation, rows: _Rows) -> list[_Part]:
    scale = operation.numbers["scale"]
    vector = rows.of(operation, "vector") if scale == 0 else rows.direction(operation, "vector")
    return _added(operation, "vector", vector, scale, rows)


def _added(operation: Operation, key: str, vector: _Stored, scale: float, rows: _Rows) -> list[_Part]:
    """``h + scale * vector``."""
    if scale == 0 or vector.norm == 0:
        return []
    rows.check(abs(scale) * vector.peak, operation, key)
    return [_Part(Code.ADD, None, vector.stored, (0.0, scale * vector.factor))]


def _linear(vector: _Stored, of_projection: float, constant: float) -> list[_Part]:
    """``h + (of_projection * p + constant) v^``."""
    if of_projection == 0 and constant == 0:
        return []
    return [_Part(Code.LINEAR, vector.stored, vector.stored, (*_along(vector), of_projection, constant))]


def _along(vector: _Stored) -> tuple[float, float]:
    """Return `read_scale` and `write_scale` that make the stored row a unit vector on both sides.

    Their product, once both are float32, is as close to ``1 / norm**2`` as float32 allows.
    """
    read_scale = float(np.float32(1 / vector.norm))
    return read_scale, 1 / (vector.norm**2 * read_scale)


def _ablate(operation: Operation, rows: _Rows) -> list[_Part]:
    return _linear(rows.direction(operation, "vector"), -operation.numbers["scale"], 0.0)


def _orthogonal(operation: Operation, rows: _Rows) -> list[_Part]:
    return _linear(rows.direction(operation, "vector"), operation.numbers["scale"] - 1, 0.0)


def _clamp(operation: Operation, rows: _Rows) -> list[_Part]:
    low, high = operation.numbers.get("min", -math.inf), operation.numbers.get("max", math.inf)
    return _clipped(operation, rows, low, high)


def _set(operation: Operation, rows: _Rows) -> list[_Part]:
    return _clipped(operation, rows, operation.numbers["value"], operation.numbers["value"])


def _clipped(operation: Operation, rows: _Rows, low: float, high: float) -> list[_Part]:
    vector, strength = rows.direction(operation, "vector"), operation.numbers["scale"]
    largest = max(abs(bound) for bound in (low, high) if math.isfinite(bound))
    rows.check(largest * vector.unit_peak, operation, "vector")
    return [_Part(Code.CLAMP, vector.stored, vector.stored, (*_along(vector), low, high, strength))] if strength else []


def _swap(operation: Operation, rows: _Rows) -> list[_Part]:
    vector, target = rows.direction(operation, "vector"), rows.direction(operation, "target")
    written = rows.made("swap", vector, target, lambda: _unit(target.values) - vector.unit)
    if written.length < PARALLEL:
        raise RequestError(f"{operation.where}.target", "has the direction of 'vector': nothing would change")
    return [_Part(Code.LINEAR, vector.stored, written.stored, (1 / vector.norm, written.factor, 1.0))]


def _affine(operation: Operation, rows: _Rows) -> list[_Part]:
    vector = rows.direction(operation, "vector")
    constant = operation.numbers["alpha"] * vector.length
    if "reference" in operation.vectors:
        constant += float(rows.of(operation, "reference").values @ vector.unit)
    rows.check(abs(constant) * vector.unit_peak, operation, "vector")
    return _linear(vector, -1.0, constant)


def _mean_ablate(operation: Operation, rows: _Rows) -> list[_Part]:
    removed = _linear(rows.direction(operation, "vector"), -1.0, 0.0)
    return [*removed, *_added(operation, "mean", rows.of(operation, "mean"), 1.0, rows)]


def _norm_scaled_add(operation: Operation, rows: _Rows) -> list[_Part]:
    vector, ratio = rows.direction(operation, "vector"), operation.numbers.get("max_ratio", math.inf)
    scale = min(max(operation.numbers["scale"], -ratio), ratio)
    return [_Part(Code.NORM_ADD, None, vector.stored, (0.0, 1 / vector.norm, scale))] if scale else []


def _rotate(operation: Operation, rows: _Rows) -> list[_Part]:
    first, other = rows.direction(operation, "plane[0]"), rows.direction(operation, "plane[1]")
    second = rows.made("rotate", first, other, lambda: _across(first.unit, _unit(other.values)))
    if second.length < PARALLEL:
        raise RequestError(f"{operation.where}.plane", "the two vectors are parallel, and span no plane")
    angle = math.radians(math.fmod(operation.numbers["degrees"], 360))
    code = Code.ROTATE | (Flag.IF_POSITIVE if operation.only_if_positive else 0)
    params = (1 / first.norm, 1 / second.norm, math.cos(angle), math.sin(angle), 1.0)
    return [_Part(code, first.stored, second.stored, params)]


def _replace(operation: Operation, rows: _Rows) -> list[_Part]:
    alpha, mask, vector = operation.numbers["alpha"], operation.mask, rows.of(operation, "vector")
    if alpha == 0:
        return []
    rows.check(vector.peak, operation, "vector")
    if mask is None:
        return [_Part(Code.REPLACE, None, vector.stored, (0.0, vector.factor, alpha))]
    chosen = mask.astype(np.float32)
    return [_Part(Code.REPLACE, chosen, vector.row * chosen, (0.0, vector.factor, alpha))]


def _across(unit: Float64Row, direction: Float64Row) -> Float64Row:
    """Return `direction` without its part along `unit`."""
    across: Float64Row = direction - (direction @ unit) * unit
    return across


def _unit(values: Float64Row) -> Float64Row:
    scaled = values / np.abs(values).max()  # squares of small values would vanish
    unit: Float64Row = scaled / np.linalg.norm(scaled)
    return unit


_LOWER: dict[Method, Callable[[Operation, _Rows], list[_Part]]] = {
    Method.ADDITIVE: _additive,
    Method.ABLATE: _ablate,
    Method.ORTHOGONAL: _orthogonal,
    Method.CLAMP: _clamp,
    Method.SET: _set,
    Method.SWAP: _swap,
    Method.AFFINE: _affine,
    Method.MEAN_ABLATE: _mean_ablate,
    Method.NORM_SCALED_ADD: _norm_scaled_add,
    Method.ROTATE: _rotate,
    Method.REPLACE: _replace,
}
