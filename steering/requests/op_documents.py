"""One operation of a request, read from the client's document into `Operation`.

A document's keys are ``at``, ``method``, ``positions``, ``preserve_norm`` and those of its method (`_KEYS`). Anything
else is refused, so that no misspelt key is dropped. None is the same as an absent key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from headgate.capture.schema.batch import BoolArray
from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.selectors.parsing import parse_positions
from headgate.capture.schema.sites import HOOK_NAMES, Site, parse_sites, sort_sites
from headgate.steering.programs.operations import Float32Row, Method, ModuleVector, Operation
from headgate.steering.requests.kept_rows import KeptRows, read_source
from headgate.steering.requests.vector_forms import check_scale, read_single
from headgate.steering.vectors.phase_vectors import Steerable, check_name

METHOD_ALIASES: dict[str, Method] = {
    "add": Method.ADDITIVE,
    "simple_additive": Method.ADDITIVE,
    "ablation": Method.ABLATE,
    "project_out": Method.ABLATE,
    "orthogonal_decomp": Method.ORTHOGONAL,
    "projection_cap": Method.CLAMP,
    "cap": Method.CLAMP,
    "capping": Method.CLAMP,
    "ace": Method.AFFINE,
    "mean_ablation": Method.MEAN_ABLATE,
    "norm_match": Method.NORM_SCALED_ADD,
    "angular": Method.ROTATE,
    "patch": Method.REPLACE,
}
"""Names of other tools, in lower case with underscores; any case and hyphens are read."""

_METHODS: dict[str, Method] = {**{method.value: method for method in Method}, **METHOD_ALIASES}

_COMMON = ("at", "method", "positions", "preserve_norm")

_KEYS: dict[Method, tuple[str, ...]] = {
    Method.ADDITIVE: ("vector", "scale"),
    Method.ABLATE: ("vector", "scale"),
    Method.ORTHOGONAL: ("vector", "scale"),
    Method.CLAMP: ("vector", "min", "max", "value", "scale"),
    Method.SET: ("vector", "value", "scale"),
    Method.SWAP: ("vector", "target"),
    Method.AFFINE: ("vector", "reference", "alpha"),
    Method.MEAN_ABLATE: ("vector", "mean"),
    Method.NORM_SCALED_ADD: ("vector", "scale", "max_ratio"),
    Method.ROTATE: ("plane", "degrees", "only_if_positive"),
    Method.REPLACE: ("vector", "source", "alpha", "mask"),
}
"""The keys of each method beside `_COMMON`."""

_VECTORS = ("vector", "target", "reference", "mean")
_NUMBERS = ("scale", "min", "max", "value", "alpha", "max_ratio", "degrees")
_FLAGS = ("only_if_positive", "preserve_norm")

_NEEDED: dict[Method, tuple[str, ...]] = {
    Method.ORTHOGONAL: ("vector", "scale"),  # 1, the default of others, would change nothing
    Method.SET: ("vector", "value"),
    Method.SWAP: ("vector", "target"),
    Method.MEAN_ABLATE: ("vector", "mean"),
    Method.ROTATE: ("plane", "degrees"),
}
"""Keys that a method cannot do without, where it is not the vector alone."""

_DEFAULTS: dict[Method, dict[str, float]] = {
    Method.AFFINE: {"alpha": 0.0},
    Method.REPLACE: {"alpha": 1.0},
    Method.SWAP: {},
    Method.MEAN_ABLATE: {},
    Method.ROTATE: {},
}
"""Numbers that are filled in, where it is not a scale of 1."""

_PARTS = {Method.CLAMP: "scale", Method.SET: "scale", Method.REPLACE: "alpha"}
"""The number of a method that is a part of its whole effect, from 0 to 1."""

MAX_SITE_NAME = 32
"""Characters of a site's name, at most."""

MAX_KEYS = 16
"""Keys of one document, at most; no method has so many."""


class Sites(NamedTuple):
    """Where operations may act, and how many.

    Attributes:
        declared: Sites with operations, in the order of the forward pass.
        max_per_site: Operations of one phase at one site.
    """

    declared: tuple[Site, ...]
    max_per_site: int

    def check(self, sites: Sequence[Site], where: str) -> None:
        """Refuse sites that are not declared."""
        missing = next((site for site in sites if site not in self.declared), None)
        if missing is not None:
            names = shown([site.name for site in self.declared]) if self.declared else "none"
            raise RequestError(
                where,
                f"{missing.name} takes no operations on this server; declared sites: {names}; the operator declares "
                "them with --steering-op-sites",
            )


def read_at(at: object, num_layers: int, where: str) -> tuple[Site, ...]:
    """Read where an operation acts: a site's name, ``{"hook", "layers"}``, or a list of these; each site once.

    Raises:
        RequestError: If it is none of these, or names a layer or hook point that does not exist.
    """
    if isinstance(at, list | tuple) and not isinstance(at, Site):
        if not 0 < len(at) <= num_layers * len(HOOK_NAMES):
            raise RequestError(where, f"expected a site or a non-empty list of sites, got {len(at)} entries")
        return sort_sites({site for i, one in enumerate(at) for site in _sites(one, num_layers, f"{where}[{i}]")})
    return _sites(at, num_layers, where)


def _sites(at: object, num_layers: int, where: str) -> tuple[Site, ...]:
    if isinstance(at, Site):
        return (at,)
    if isinstance(at, str):
        return (read_site(at, where),)
    if isinstance(at, Mapping) and "hook" in at and set(at) <= {"hook", "layers"}:
        hook = at["hook"]
        if not isinstance(hook, str) or hook not in HOOK_NAMES:
            raise RequestError(f"{where}.hook", f"unknown hook point {shown(hook)}")
        return _of_hook(hook, at.get("layers"), num_layers, where)
    raise RequestError(where, f'expected a site, such as "12.post_mlp", or {{"hook", "layers"}}; got {shown(at)}')


def read_site(name: object, where: str) -> Site:
    """Read the name of a site; a `Site` stays as it is.

    Raises:
        RequestError: If it is none.
    """
    if isinstance(name, Site):
        return name
    if isinstance(name, str) and len(name) <= MAX_SITE_NAME:
        with suppress(ValueError):
            return Site.parse(name)
    raise RequestError(where, f"not a site: {shown(name)}; expected LAYER.HOOK, such as 12.post_mlp, or final_norm")


def _of_hook(hook: str, layers: object, num_layers: int, where: str) -> tuple[Site, ...]:
    try:
        return parse_sites({hook: layers}, num_layers, where)
    except RequestError as error:
        named = error.field.removeprefix(f"{where}.{hook}")
        raise RequestError(f"{where}.layers{named}", str(error).removeprefix(f"{error.field}: ")) from None


class Vectors:
    """Reads the vectors of one request's operations; one object in many operations is read once.

    Args:
        hidden: Values of a vector.
        kept: Rows of earlier requests.
    """

    def __init__(self, hidden: int, kept: KeptRows) -> None:
        self.hidden = hidden
        self.kept = kept
        self._read: dict[int, tuple[object, Float32Row]] = {}

    def read(self, value: object, where: str) -> Float32Row:
        """Return a vector's values.

        Raises:
            RequestError: As `read_single`.
        """
        if id(value) not in self._read:
            self._read[id(value)] = value, read_single(value, self.hidden, where)
        return self._read[id(value)][1]


def read_operation(
    document: Mapping[str, Any], sites: Sequence[Site], steerable: Steerable, vectors: Vectors, where: str
) -> list[Operation]:
    """Read one document into an operation for each of its sites.

    Args:
        document: With ``method`` and the keys of the method.
        sites: What its ``at`` names.
        steerable: The model.
        vectors: Of the request.
        where: Path of the document.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    method, given = _method(document, where)
    numbers = _numbers(method, given, where)
    if method is Method.CLAMP and "value" in numbers:
        method = Method.SET
    flags = {key: _flag(given.get(key, False), f"{where}.{key}") for key in _FLAGS}
    positions = _positions(given.get("positions"), f"{where}.positions")
    mask = _mask(given["mask"], steerable.hidden_size, f"{where}.mask") if "mask" in given else None
    named = _named_vectors(given, where)
    read = {key: None if is_reference(value) else vectors.read(value, f"{where}.{key}") for key, value in named}
    source = read_source(given["source"], f"{where}.source") if "source" in given else None
    taken = {} if source is None else {site: vectors.kept.row(source, site, f"{where}.source") for site in sites}
    shared = {key: row for key, row in read.items() if row is not None}
    return [
        Operation(
            method=method,
            site=site,
            vectors=shared
            if len(shared) == len(named) and not taken
            else {
                key: read_reference(value, site, f"{where}.{key}") if (row := read[key]) is None else row
                for key, value in named
            }
            | ({"vector": taken[site]} if site in taken else {}),
            numbers=numbers,
            mask=mask,
            positions=positions,
            where=where,
            **flags,
        )
        for site in sites
    ]


def _method(document: Mapping[str, Any], where: str) -> tuple[Method, dict[str, Any]]:
    """Return the method, and the keys that are given, by their own names."""
    name = document.get("method")
    method = _METHODS.get(name.lower().replace("-", "_")) if isinstance(name, str) and len(name) <= 32 else None
    if method is None:
        raise RequestError(f"{where}.method", f"expected one of {', '.join(Method)}; got {shown(name)}")
    allowed = (*_COMMON, *_KEYS[method])
    given: dict[str, Any] = {}
    for key, value in document.items():
        own = _own_key(key, method)
        if own not in allowed:
            raise RequestError(f"{where}.{shown(key)[1:-1]}", f"unknown key; {method} has {', '.join(allowed)}")
        if value is None:
            continue
        if own in given:
            raise RequestError(f"{where}.{key}", f"is another name of {own}, which is given too")
        given[own] = value
    if "source" in given and "vector" in given:
        raise RequestError(f"{where}.source", "excludes 'vector': the row comes from one of them")
    needed = () if "source" in given else _NEEDED.get(method, ("vector",))
    missing = next((key for key in needed if key not in given), None)
    if missing is not None:
        raise RequestError(f"{where}.{missing}", f"is missing; {method} needs {', '.join(needed)}")
    if method is Method.AFFINE and not given.keys() & {"reference", "alpha"}:
        raise RequestError(where, "affine needs 'reference' or 'alpha', or both")
    return method, given


def _own_key(key: object, method: Method) -> object:
    if key in ("strength", "scale"):
        return "alpha" if method is Method.REPLACE else "scale"
    return key


def _numbers(method: Method, given: Mapping[str, Any], where: str) -> dict[str, float]:
    found = {key: check_scale(given[key], f"{where}.{key}") for key in _NUMBERS if key in given}
    numbers = {**_DEFAULTS.get(method, {"scale": 1.0}), **found}
    part = _PARTS.get(method)
    if part is not None and not 0 <= numbers[part] <= 1:
        raise RequestError(f"{where}.{part}", f"{part} of {method} lies between 0 and 1, got {numbers[part]}")
    if numbers.get("max_ratio", 1) <= 0:
        raise RequestError(f"{where}.max_ratio", f"must be above 0, got {numbers['max_ratio']}")
    if method is Method.CLAMP:
        _check_bounds(numbers, where)
    return numbers


def _check_bounds(numbers: Mapping[str, float], where: str) -> None:
    bounds = [key for key in ("min", "max") if key in numbers]
    if "value" in numbers and bounds:
        raise RequestError(f"{where}.value", f"excludes {' and '.join(bounds)}: it is both bounds at once")
    if "value" not in numbers and not bounds:
        raise RequestError(where, "clamp needs 'min', 'max' or both, or 'value'")
    if len(bounds) == 2 and numbers["min"] > numbers["max"]:
        raise RequestError(f"{where}.min", f"{numbers['min']} is above max, {numbers['max']}")


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(where, f"expected true or false, got {shown(value)}")
    return value


def _positions(value: object, where: str) -> PositionSelector | None:
    return None if value is None else parse_positions(value, where)


def _named_vectors(given: Mapping[str, Any], where: str) -> list[tuple[str, object]]:
    """Return the vectors that are given, by the keys of `Operation.vectors`."""
    if "plane" not in given:
        return [(key, given[key]) for key in _VECTORS if key in given]
    plane = given["plane"]
    if not isinstance(plane, list | tuple | np.ndarray) or len(plane) != 2:
        raise RequestError(f"{where}.plane", f"expected two vectors, got {shown(plane)}")
    return [(f"plane[{index}]", vector) for index, vector in enumerate(plane)]


def is_reference(value: object) -> bool:
    """Whether a vector is given by the name of a module."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "module" in value)


def read_reference(value: Any, site: Site, where: str) -> ModuleVector:
    """Read a name, or ``{"module", "site"}``, where no site stands for `site`.

    Raises:
        RequestError: If it is something else.
    """
    if isinstance(value, str):
        return ModuleVector(check_name(value, where), site)
    if not set(value) <= {"module", "site"}:
        raise RequestError(where, f"expected the keys 'module' and 'site', got {shown(list(value))}")
    name = check_name(value["module"], f"{where}.module")
    if value.get("site") is None:
        return ModuleVector(name, site)
    return ModuleVector(name, read_site(value["site"], f"{where}.site"))


def _mask(value: object, hidden: int, where: str) -> BoolArray:
    """Read a mask: `hidden` values of 0 and 1, or the indices of the ones."""
    if isinstance(value, Mapping):
        value = read_single(value, hidden, where)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biuf":
        value = value[: hidden + 1].tolist()
    if not isinstance(value, list | tuple) or not 0 < len(value) <= hidden:
        raise RequestError(where, f"expected {hidden} values of 0 and 1, or a list of indices below {hidden}")
    if len(value) == hidden and set(map(type, value)) <= {bool, int, float} and set(value) <= {0, 1}:
        mask = np.array(value, np.bool_)
    else:
        wrong = next((i for i, one in enumerate(value) if type(one) is not int or not 0 <= one < hidden), None)
        if wrong is not None:
            raise RequestError(
                f"{where}[{wrong}]", f"expected an index from 0 to {hidden - 1}, got {shown(value[wrong])}"
            )
        mask = np.zeros(hidden, np.bool_)
        mask[list(value)] = True
    if not mask.any():
        raise RequestError(where, "selects no value")
    return mask
