"""Operations become entries of a program, and their vectors rows of the pool. Numpy only; sums in float64.

A row is stored as its client gave it, times a power of two so that its largest magnitude lies between 1/2 and 1, and
rounded to the model's dtype. Directions are not made unit vectors first: the entries' scales do that, from the norm of
the row as it is stored. So a direction that came in the model's dtype is stored exactly, what is removed is removed
exactly along the stored direction, and methods on one vector share one row at all sites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.positions import Named, PositionSelector
from headgate.capture.schema.sites import Columns
from headgate.steering.programs.codes import CODE_MASK, EVERYWHERE, MAX_GROUPS, Code, Flag
from headgate.steering.programs.operations import Float32Row, Lookup, Method, ModuleVector, Operation
from headgate.steering.programs.program import Entry, Program
from headgate.steering.vectors.dtypes import Rows, StoredType, as_bfloat16, widen
from headgate.steering.vectors.phase_vectors import within
from headgate.steering.vectors.sums import LIMIT, round_to

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
        by_width: dict[int, dict[int, Float32Row]] = {}
        for one in vectors:
            by_width.setdefault(len(one), {})[id(one)] = one
        self._found = {
            key: stored
            for given in by_width.values()
            for key, stored in zip(given, store([*given.values()], dtype), strict=True)
        }

    def of(self, vector: Float32Row) -> StoredVector:
        """Return a vector, which may be another one, as it is stored."""
        if (found := self._found.get(id(vector))) is None:
            # It holds the vector, whose id stays its own.
            (found,) = store([vector], self.dtype)
            self._found[id(vector)] = found
        return found


PARALLEL = 1e-3
"""Sine of the angle below which two directions count as parallel: the row of their difference would be rounding."""


class Lowered(NamedTuple):
    """Operations that are no program yet.

    Attributes:
        entries: In the order of the operations; empty if none of them changes anything.
        groups: Selectors of the position groups.
    """

    entries: list[Entry]
    groups: Sequence[PositionSelector]


def lower(operations: Iterable[Operation], dtype: StoredType, lookup: Lookup | None = None) -> Program | None:
    """Return the program of operations, in their order; None if none of them changes anything.

    Args:
        operations: Operations of one phase.
        dtype: The model's.
        lookup: Gives the vectors of modules; needed if an operation names one.

    Raises:
        RequestError: As `lower_entries`.
    """
    listed = tuple(operations)
    entries, groups = lower_entries(listed, StoredVectors(vectors_of(listed), dtype), lookup)
    return Program.from_entries(entries, dtype, groups) if entries else None


def lower_entries(operations: Sequence[Operation], vectors: StoredVectors, lookup: Lookup | None = None) -> Lowered:
    """Return the entries of operations, in their order.

    Args:
        operations: Operations of one phase.
        vectors: With `vectors_of` the operations.
        lookup: Gives the vectors of modules; needed if an operation names one.

    Raises:
        RequestError: With the path of an operation's field: a module without a vector at the site, a vector of zeros
            that has to have a direction, directions that are parallel, a change too large for `dtype`, too many
            distinct selectors of positions.
    """
    rows, groups = _OperationVectors(vectors, lookup), _Groups()
    entries: list[Entry] = []
    last: Operation | None = None
    parts: list[_UnplacedEntry] = []
    group = EVERYWHERE
    for operation in operations:
        if last is None or not _are_alike(operation, last):
            parts = _flagged(_LOWER[operation.method](operation, rows), operation)
            if operation.rank_width:
                _check_parts(parts, operation)
            group = groups.of(operation) if parts else EVERYWHERE
            last = operation
        entries.extend([Entry(operation.site, part.code, part.read, part.write, part.params, group) for part in parts])
    return Lowered(entries, groups.selectors)


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
        and one.rank_width == other.rank_width
        and one.where == other.where
        and not one.references
    )


_WITH_DOTS = (Code.LINEAR, Code.CLAMP, Code.ROTATE)


def _check_parts(parts: Sequence[_UnplacedEntry], operation: Operation) -> None:
    """Refuse what no tensor-parallel rank can compute of its own part of a row.

    A rank that has none of the columns of a direction finds nothing along it, and writes nothing: a direction within
    one head is computed where the head is. Entries without a projection act on each value by itself.

    Raises:
        RequestError: If a norm of the row is needed, or a projection on a direction that several ranks share.
    """
    site, size = operation.site.name, operation.rank_width
    shared = f"{site} has its columns on several tensor-parallel ranks"
    otherwise = "the operator names the site in --steering-gather-sites"
    if operation.preserve_norm or any(part.code & CODE_MASK == Code.NORM_ADD for part in parts):
        field = "preserve_norm" if operation.preserve_norm else "method"
        raise RequestError(f"{operation.where}.{field}", f"needs the norm of a whole row, but {shared}; {otherwise}")
    for part in parts:
        if part.code & CODE_MASK not in _WITH_DOTS:
            continue
        columns = [np.flatnonzero(row) // size for row in (part.read, part.write) if row is not None]
        if len(set(np.concatenate(columns).tolist())) > 1:
            unit = f"one head, {size} values" if size > 1 else "one value"
            raise RequestError(
                operation.where,
                f"{operation.method} projects rows on a direction, but {shared}: its vectors must be zero outside "
                f"of {unit}; give an operation for each, or {otherwise}",
            )


def _flagged(parts: list[_UnplacedEntry], operation: Operation) -> list[_UnplacedEntry]:
    if parts and operation.preserve_norm:
        parts[0] = parts[0]._replace(code=parts[0].code | Flag.KEEP_NORM_FROM)
        parts[-1] = parts[-1]._replace(code=parts[-1].code | Flag.KEEP_NORM_TO)
    return parts


class _UnplacedEntry(NamedTuple):
    """An entry without its site."""

    code: int
    read: Rows | None
    write: Rows | None
    params: Sequence[float]


class _OperationVectors:
    """The vectors of operations."""

    def __init__(self, vectors: StoredVectors, lookup: Lookup | None) -> None:
        self.dtype = vectors.dtype
        self._vectors = vectors
        self._lookup = lookup
        self._named: dict[tuple[ModuleVector, int, Columns], StoredVector] = {}
        self._made: dict[tuple[str, int, int], StoredVector] = {}

    def of(self, operation: Operation, key: str) -> StoredVector:
        """Return a vector of an operation."""
        given = operation.vectors[key]
        if not isinstance(given, ModuleVector):
            return self._vectors.of(given)
        name = given, operation.width, operation.columns
        if name not in self._named:
            self._named[name] = self._store(self._values(given, operation, f"{operation.where}.{key}"))
        return self._named[name]

    def direction(self, operation: Operation, key: str) -> StoredVector:
        """Return a vector of an operation that must not be zero."""
        found = self.of(operation, key)
        if found.is_zero:
            raise RequestError(f"{operation.where}.{key}", "is zero, and has no direction")
        return found

    def made(self, name: str, one: StoredVector, other: StoredVector, make: Callable[[], Float64Row]) -> StoredVector:
        """Store what is made of two vectors of `of`, once for all sites."""
        key = name, id(one), id(other)
        if key not in self._made:
            self._made[key] = self._store(make())
        return self._made[key]

    def check(self, largest: float, operation: Operation, key: str) -> None:
        """Refuse a change whose largest value is beyond `LIMIT`."""
        if not largest < LIMIT[self.dtype]:
            raise RequestError(
                f"{operation.where}.{key}",
                f"the operation would change a row by up to {largest:.4g}; changes for a model in {self.dtype} must "
                f"stay below {LIMIT[self.dtype]:.4g}",
            )

    def _store(self, values: npt.NDArray[np.floating]) -> StoredVector:
        return store([values], self.dtype)[0]

    def _values(self, given: ModuleVector, operation: Operation, where: str) -> Float32Row:
        if self._lookup is None:
            raise AssertionError(f"{where} names the module {given.module!r}, and there is no lookup")
        found = self._lookup(given.module, given.site)
        if found is None:
            raise RequestError(where, f"module {given.module!r} has no vector at {given.site.name}")
        if operation.width and len(found) != operation.width:
            raise RequestError(
                where,
                f"the vector of {given.module!r} at {given.site.name} has {len(found)} values, rows of "
                f"{operation.site.name} have {operation.width}",
            )
        return within(found, operation.columns, operation.width) if operation.columns else found


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


def _additive(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    scale = operation.numbers["scale"]
    vector = rows.of(operation, "vector") if scale == 0 else rows.direction(operation, "vector")
    return _added(operation, "vector", vector, scale, rows)


def _added(
    operation: Operation, key: str, vector: StoredVector, scale: float, rows: _OperationVectors
) -> list[_UnplacedEntry]:
    """``h + scale * vector``."""
    if scale == 0 or vector.is_zero:
        return []
    rows.check(abs(scale) * vector.peak, operation, key)
    return [_UnplacedEntry(Code.ADD, None, vector.stored, (0.0, scale * vector.factor))]


def _linear(vector: StoredVector, of_projection: float, constant: float) -> list[_UnplacedEntry]:
    """``h + (of_projection * p + constant) v^``."""
    if of_projection == 0 and constant == 0:
        return []
    return [_UnplacedEntry(Code.LINEAR, vector.stored, vector.stored, (*_along(vector), of_projection, constant))]


def _along(vector: StoredVector) -> tuple[float, float]:
    """Return `read_scale` and `write_scale` that make the stored row a unit vector on both sides.

    Their product, once both are float32, is as close to ``1 / norm**2`` as float32 allows.
    """
    read_scale = float(np.float32(1 / vector.norm))
    return read_scale, 1 / (vector.norm**2 * read_scale)


def _ablate(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    return _linear(rows.direction(operation, "vector"), -operation.numbers["scale"], 0.0)


def _orthogonal(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    return _linear(rows.direction(operation, "vector"), operation.numbers["scale"] - 1, 0.0)


def _clamp(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    low, high = operation.numbers.get("min", -math.inf), operation.numbers.get("max", math.inf)
    return _clipped(operation, rows, low, high)


def _set(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    return _clipped(operation, rows, operation.numbers["value"], operation.numbers["value"])


def _clipped(operation: Operation, rows: _OperationVectors, low: float, high: float) -> list[_UnplacedEntry]:
    vector, strength = rows.direction(operation, "vector"), operation.numbers["scale"]
    largest = max(abs(bound) for bound in (low, high) if math.isfinite(bound))
    rows.check(largest * vector.unit_peak, operation, "vector")
    return (
        [_UnplacedEntry(Code.CLAMP, vector.stored, vector.stored, (*_along(vector), low, high, strength))]
        if strength
        else []
    )


def _swap(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    vector, target = rows.direction(operation, "vector"), rows.direction(operation, "target")
    written = rows.made("swap", vector, target, lambda: _unit(target.values) - vector.unit)
    if written.length < PARALLEL:
        raise RequestError(f"{operation.where}.target", "has the direction of 'vector': nothing would change")
    return [_UnplacedEntry(Code.LINEAR, vector.stored, written.stored, (1 / vector.norm, written.factor, 1.0))]


def _affine(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    vector = rows.direction(operation, "vector")
    constant = operation.numbers["alpha"] * vector.length
    if "reference" in operation.vectors:
        constant += float(rows.of(operation, "reference").values @ vector.unit)
    rows.check(abs(constant) * vector.unit_peak, operation, "vector")
    return _linear(vector, -1.0, constant)


def _mean_ablate(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    removed = _linear(rows.direction(operation, "vector"), -1.0, 0.0)
    return [*removed, *_added(operation, "mean", rows.of(operation, "mean"), 1.0, rows)]


def _norm_scaled_add(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    vector, ratio = rows.direction(operation, "vector"), operation.numbers.get("max_ratio", math.inf)
    scale = min(max(operation.numbers["scale"], -ratio), ratio)
    return [_UnplacedEntry(Code.NORM_ADD, None, vector.stored, (0.0, 1 / vector.norm, scale))] if scale else []


def _rotate(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    first, other = rows.direction(operation, "plane[0]"), rows.direction(operation, "plane[1]")
    second = rows.made("rotate", first, other, lambda: _across(first.unit, _unit(other.values)))
    if second.length < PARALLEL:
        raise RequestError(f"{operation.where}.plane", "the two vectors are parallel, and span no plane")
    angle = math.radians(math.fmod(operation.numbers["degrees"], 360))
    code = Code.ROTATE | (Flag.IF_POSITIVE if operation.only_if_positive else 0)
    params = (1 / first.norm, 1 / second.norm, math.cos(angle), math.sin(angle), 1.0)
    return [_UnplacedEntry(code, first.stored, second.stored, params)]


def _replace(operation: Operation, rows: _OperationVectors) -> list[_UnplacedEntry]:
    alpha, mask, vector = operation.numbers["alpha"], operation.mask, rows.of(operation, "vector")
    if alpha == 0:
        return []
    rows.check(vector.peak, operation, "vector")
    if mask is None:
        return [_UnplacedEntry(Code.REPLACE, None, vector.stored, (0.0, vector.factor, alpha))]
    chosen = mask.astype(np.float32)
    return [_UnplacedEntry(Code.REPLACE, chosen, vector.row * chosen, (0.0, vector.factor, alpha))]


def _across(unit: Float64Row, direction: Float64Row) -> Float64Row:
    """Return `direction` without its part along `unit`."""
    across: Float64Row = direction - (direction @ unit) * unit
    return across


def _unit(values: Float64Row) -> Float64Row:
    scaled = values / np.abs(values).max()  # squares of small values would vanish
    unit: Float64Row = scaled / np.linalg.norm(scaled)
    return unit


_LOWER: dict[Method, Callable[[Operation, _OperationVectors], list[_UnplacedEntry]]] = {
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
