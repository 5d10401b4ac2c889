"""Operations at a site in canonical form: parsed, checked, not lowered yet. Numpy only.

In the formulas of `Method`, ``h`` is a row of the stream, ``v`` the operation's vector, ``v^`` its unit vector and
``p = h . v^``. An operation may name vectors of registered modules; the engine core, which has them, looks them up when
it lowers (`headgate.steering.programs.lowering`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import BoolArray
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.sites import Columns, Site

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


if TYPE_CHECKING:
    OperationVector = Float32Row | ModuleVector
else:
    OperationVector = object
    """msgspec knows no union with an array; `headgate.steering.programs.wire` reads it."""

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
        rank_width: Values of a row that certainly lie on one tensor-parallel rank together, where ranks share the
            site's columns: those of a head; 0 where every rank has whole rows.
    """

    method: Method
    site: Site
    vectors: Mapping[str, OperationVector]
    numbers: Mapping[str, float] = field(default_factory=dict)
    mask: BoolArray | None = None
    only_if_positive: bool = False
    preserve_norm: bool = False
    positions: PositionSelector | None = None
    where: str = "steering_ops"
    width: int = 0
    columns: Columns = ()
    rank_width: int = 0

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
