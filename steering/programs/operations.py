"""Operations at a site in canonical form: parsed, checked, not lowered yet. Numpy only.

In the formulas of `Method`, ``h`` is a row of the stream, ``v`` the operation's vector, ``v^`` its unit vector and
``p = h . v^``. An operation may name vectors of registered modules; the engine core, which has them, looks them up when
it lowers (`headgate.steering.programs.lowering`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray
from headgate.capture.schema.positions import PositionSelector, selector_from_wire
from headgate.capture.schema.sites import Columns, HookPoint, Site

Float32Row = npt.NDArray[np.float32]
"""``[width]`` of a site."""


class Method(str, Enum):
    """How an operation changes a row. `scale` is s; other names are keys of the operation."""

    ADDITIVE = "additive"
    """``h + s v``"""
    ABLATE = "ablate"
    """``h - s p v^``"""
    ORTHOGONAL = "orthogonal"
    """``h + (s - 1) p v^``"""
    CLAMP = "clamp"
    """``h + s (clip(p, min, max) - p) v^``"""
    SET = "set"
    """``h + s (value - p) v^``"""
    SWAP = "swap"
    """``h + p (t^ - v^)`` with t the `target`"""
    AFFINE = "affine"
    """``h - p v^ + (r . v^) v^ + alpha v`` with r the `reference`"""
    MEAN_ABLATE = "mean_ablate"
    """``h - p v^ + m`` with m the `mean`"""
    NORM_SCALED_ADD = "norm_scaled_add"
    """``h + s norm(h) v^``, with s between ``-max_ratio`` and ``max_ratio``"""
    ROTATE = "rotate"
    """The part of h in the plane of b1 and b2 gets the angle `degrees` from b1 towards b2, and keeps its length."""
    REPLACE = "replace"
    """``(1 - alpha mask) h + alpha mask v``"""

    def __str__(self) -> str:
        return self.value


class ModuleVector(NamedTuple):
    """The vector of a registered module at a site, by name."""

    module: str
    site: Site


Lookup = Callable[[str, Site], Float32Row | None]
"""Returns a module's vector at a site, or None if it has none there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One operation at one site.

    Attributes:
        method: How it changes a row.
        site: Where it acts.
        vectors: By their keys: ``vector``, ``target``, ``reference``, ``mean``, and ``plane[0]`` and ``plane[1]``. One
            array may serve many operations.
        numbers: By their keys: ``scale``, ``min``, ``max``, ``value``, ``alpha``, ``max_ratio``, ``degrees``. Those of
            the method, defaults filled in; a bound that is not given is absent.
        mask: Of `Method.REPLACE`: the values of a row that are replaced; None for all.
        only_if_positive: Of `Method.ROTATE`: rows with ``h . b1 <= 0`` stay.
        preserve_norm: The row is scaled to the norm that it had before the operation.
        positions: The rows it acts on; None for every row of its phase.
        where: Path in the client's document, for errors.
        width: Values of a row of the site; 0 if that is not known.
        columns: The columns that it acts on, and vectors of modules are cut to; empty for all.
        part: Values of a row that certainly lie on one tensor-parallel rank together, where ranks share the site's
            columns: those of a head; 0 where every rank has whole rows.
    """

    method: Method
    site: Site
    vectors: Mapping[str, Float32Row | ModuleVector]
    numbers: Mapping[str, float] = field(default_factory=dict)
    mask: BoolArray | None = None
    only_if_positive: bool = False
    preserve_norm: bool = False
    positions: PositionSelector | None = None
    where: str = "steering_ops"
    width: int = 0
    columns: Columns = ()
    part: int = 0

    @property
    def references(self) -> tuple[ModuleVector, ...]:
        """Vectors of modules that it names."""
        return tuple(vector for vector in self.vectors.values() if isinstance(vector, ModuleVector))


def named_modules(operations: Iterable[Operation]) -> dict[str, str]:
    """Return the modules that operations name, each with the path of the first operation that does."""
    found: dict[str, str] = {}
    for operation in operations:
        for key, vector in operation.vectors.items():
            if isinstance(vector, ModuleVector):
                found.setdefault(vector.module, f"{operation.where}.{key}")
    return found


class OperationsWire(TypedDict):
    """Operations as plain values; vectors are numbers of `arrays`, or module, layer and hook point."""

    operations: list[dict[str, Any]]
    arrays: list[bytes]


def operations_to_wire(operations: Sequence[Operation]) -> OperationsWire:
    """Return plain values that `operations_from_wire` reads back; an array that many operations share travels once."""
    arrays: dict[int, tuple[int, Float32Row]] = {}

    def vector(value: Float32Row | ModuleVector) -> Any:
        if isinstance(value, ModuleVector):
            return [value.module, value.site.layer, value.site.hook.value]
        return arrays.setdefault(id(value), (len(arrays), value))[0]

    listed = [
        {
            "method": operation.method.value,
            "site": [operation.site.layer, operation.site.hook.value],
            "vectors": {key: vector(value) for key, value in operation.vectors.items()},
            "numbers": dict(operation.numbers),
            "mask": None if operation.mask is None else operation.mask.tobytes(),
            "only_if_positive": operation.only_if_positive,
            "preserve_norm": operation.preserve_norm,
            "positions": None if operation.positions is None else operation.positions.to_wire(),
            "where": operation.where,
            "row": [operation.width, [list(each) for each in operation.columns], operation.part],
        }
        for operation in operations
    ]
    return {"operations": listed, "arrays": [array.tobytes() for _, array in arrays.values()]}


def operations_from_wire(wire: OperationsWire) -> tuple[Operation, ...]:
    """Return the operations that `operations_to_wire` wrote; arrays are views of the received bytes."""
    arrays = [np.frombuffer(data, np.float32) for data in wire["arrays"]]

    def vector(value: Any) -> Float32Row | ModuleVector:
        if isinstance(value, int):
            return arrays[value]
        module, layer, hook = value
        return ModuleVector(module, Site(layer, HookPoint(hook)))

    return tuple(
        Operation(
            method=Method(given["method"]),
            site=Site(given["site"][0], HookPoint(given["site"][1])),
            vectors={key: vector(value) for key, value in given["vectors"].items()},
            numbers=given["numbers"],
            mask=None if given["mask"] is None else np.frombuffer(given["mask"], np.bool_),
            only_if_positive=given["only_if_positive"],
            preserve_norm=given["preserve_norm"],
            positions=None if given["positions"] is None else selector_from_wire(given["positions"]),
            where=given["where"],
            width=given["row"][0],
            columns=tuple((start, stop) for start, stop in given["row"][1]),
            part=given["row"][2],
        )
        for given in wire["operations"]
    )
