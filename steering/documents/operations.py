"""A request's operations, read from its fields: lists of operations, and clamps in the form of `CLAMPS_FORM`.

Both come as a base field and one for each phase; a phase has the base's operations first, then its own, and its clamps
after its operations. Numbers of operations, sites, keys and listed positions are compared with their limits before a
vector is converted.

An operation's key ``source`` names a row of an earlier request of this server. It becomes the operation's vector before
anything is computed from it, so an operation with a source is the same as one with the row itself, down to the keys of
the prefix cache.

The keys of an operation are ``at``, ``method``, ``positions``, ``preserve_norm`` and those of its method (`_KEYS`).
Anything else is refused, so that no misspelt key is dropped. None is the same as an absent key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np

from headgate.capture.schema.batch import BoolArray
from headgate.capture.schema.errors import RequestError, check_keys, read_flag, shown
from headgate.capture.schema.positions import MAX_LISTED, MAX_POSITION, PositionSelector, parse_positions
from headgate.capture.schema.results import MAX_KEPT_NAME, FindKept, KeptRequest
from headgate.capture.schema.sites import (
    COLUMN_KEYS,
    FINAL_NORM_SITE,
    HOOK_NAMES,
    Columns,
    HookPoint,
    Site,
    parse_columns,
    parse_hook,
    parse_layers,
    parse_sites,
    sort_sites,
    width_of,
)
from headgate.steering.documents.schema import Count, one_of
from headgate.steering.documents.vectors import (
    PackedVector,
    Row,
    TokenDirection,
    check_in_stream,
    check_scale,
    is_as_long,
    packed_rows,
    packed_type,
    read_single,
)
from headgate.steering.programs.lowering import lower
from headgate.steering.programs.operations import Float32Row, Method, ModuleVector, Operation, named_modules
from headgate.steering.programs.program import Program
from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.phase_vectors import MAX_NAME, Directions, Steerable, check_name, within


class SiteChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Sites of one hook point, with layers as captures select them."""

    hook: str
    layers: Any = None


class ModuleReference(msgspec.Struct, forbid_unknown_fields=True):
    """The vector of a registered module.

    Attributes:
        site: Whose vector it is; the operation's own if absent.
    """

    module: str
    site: str | None = None


class SourceDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A kept row of an earlier request.

    Attributes:
        request: Name under which it is kept.
        site: Where it was captured; where the operation acts if absent.
        position: A negative one counts from the end of the prompt.
        sample: Which sample of that request.
    """

    request: str
    site: str | None = None
    position: int
    sample: Count = 0


At = Annotated[Any, one_of(str, SiteChoice)]
OpVector = Annotated[Any, one_of(Row, str, ModuleReference, PackedVector, TokenDirection)]
_SOURCE_KEYS = SourceDocument.__struct_fields__


class RowSource(NamedTuple):
    """A kept row, as an operation names it.

    Attributes:
        request: Name under which it is kept.
        sample: Which sample of that request.
        site: Where it was captured; None for the site where the operation acts.
        position: Absolute; a negative one counts from the end of the prompt.
    """

    request: str
    sample: int
    site: Site | None
    position: int


def read_source(value: object, where: str) -> RowSource:
    """Read ``{"request", "position", "site", "sample"}``, where the last two may be absent.

    Raises:
        RequestError: If it is something else, naming the key that is wrong.
    """
    if not isinstance(value, Mapping):
        raise RequestError(where, f'expected {{"request", "site", "position"}}, got {shown(value)}')
    check_keys(value, _SOURCE_KEYS, where, "a source")
    request = value.get("request")
    if not isinstance(request, str) or not 0 < len(request) <= MAX_KEPT_NAME:
        raise RequestError(f"{where}.request", f"expected the name under which rows are kept, got {shown(request)}")
    if value.get("position") is None:
        raise RequestError(f"{where}.position", "is missing: the position of the row, such as 5 or -1")
    sample = value.get("sample")
    return RowSource(
        request=request,
        sample=0 if sample is None else _integer(sample, 0, f"{where}.sample"),
        site=_site(value.get("site"), f"{where}.site"),
        position=_integer(value["position"], -MAX_POSITION, f"{where}.position"),
    )


class KeptRows:
    """The kept rows of one request's operations; a row of many operations is one array.

    Args:
        find: Finds what earlier requests have kept; None where no request is at hand.
    """

    def __init__(self, find: FindKept | None = None) -> None:
        self._find = find
        self._requests: dict[tuple[str, int], KeptRequest] = {}
        self._rows: dict[tuple[str, int, Site, int], Float32Row] = {}

    def row(self, source: RowSource, site: Site, where: str) -> tuple[Float32Row, Columns]:
        """Return the row of a source for an operation at `site`, and its columns that were kept; empty for all.

        Raises:
            RequestError: If it is not kept (any more), or not finite.
        """
        if self._find is None:
            raise RequestError(where, "only a request can take rows from others; give the row itself as 'vector'")
        site = site if source.site is None else source.site
        owner = source.request, source.sample
        if owner not in self._requests:
            self._requests[owner] = self._find(*owner, where)
        key = (*owner, site, source.position)
        if key not in self._rows:
            self._rows[key] = float32_row(self._requests[owner].row(site, source.position, where), where)
        return self._rows[key], self._requests[owner].columns.get(site, ())


def float32_row(row: Any, where: str) -> Float32Row:
    """Return a captured row, a tensor ``[hidden]``, in float32, which holds it exactly.

    Raises:
        RequestError: If a value is not finite.
    """
    wide: Float32Row = row.float().numpy()
    if not np.isfinite(wide).all():
        wrong = int(np.flatnonzero(~np.isfinite(wide))[0])
        raise RequestError(where, f"the captured row has a value that is not finite: {wide[wrong]} at {wrong}")
    return wide


def _site(value: object, where: str) -> Site | None:
    if value is None or isinstance(value, Site):
        return value
    try:
        return Site.parse(value if isinstance(value, str) and len(value) <= MAX_KEPT_NAME else "")
    except ValueError:
        raise RequestError(where, f"not a site: {shown(value)}; expected LAYER.HOOK, such as 12.post_mlp") from None


def _integer(value: object, least: int, where: str) -> int:
    if type(value) is not int or not least <= value <= MAX_POSITION:
        raise RequestError(where, f"expected an integer from {least} to {MAX_POSITION}, got {shown(value)}")
    return value


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


MethodName = Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*map(str, Method), *METHOD_ALIASES]})]


class OperationDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An operation at sites. The keys that a method takes are its own.

    Attributes:
        at: A site, such as "12.post_mlp", or a hook point with layers as captures select them; or a list of these.
        vector: A vector, or the name of a module, whose vector at the site it is.
        source: A kept row of an earlier request in place of the vector.
        strength: Another name of scale, and of alpha for the method replace.
        value: The projection of the method set; of the method replace, the number that the row becomes, in place of a
            vector.
        mask: Indices of the values that are replaced, or 0 and 1 for each.
        heads: The heads of a row that it acts on, in place of all; vectors are as long as these heads, or zero outside.
        experts: Those of router_logits, likewise.
        columns: A range of a row's values, [start, stop], likewise.
        positions: Rows it acts on, as captures select positions; all of the phase if absent.
    """

    at: Annotated[Any, one_of(At, list[At])]
    method: MethodName
    vector: OpVector = None
    source: SourceDocument | None = None
    target: OpVector = None
    reference: OpVector = None
    mean: OpVector = None
    plane: Annotated[list[OpVector], msgspec.Meta(min_length=2, max_length=2)] | None = None
    scale: float | None = None
    strength: float | None = None
    min: float | None = None
    max: float | None = None
    value: float | None = None
    alpha: float | None = None
    max_ratio: float | None = None
    degrees: float | None = None
    mask: list[int] | None = None
    heads: list[int] | None = None
    experts: list[int] | None = None
    columns: Annotated[list[int], msgspec.Meta(min_length=2, max_length=2)] | None = None
    positions: Any = None
    only_if_positive: bool = False
    preserve_norm: bool = False


Operations = list[OperationDocument] | None
Clamps = dict[str, Any] | None
_METHODS: dict[str, Method] = {**{method.value: method for method in Method}, **METHOD_ALIASES}

_COMMON = ("at", "method", "positions", "preserve_norm", *COLUMN_KEYS)

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
    Method.REPLACE: ("vector", "source", "value", "alpha", "mask"),
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

_FRACTIONS = {Method.CLAMP: "scale", Method.SET: "scale", Method.REPLACE: "alpha"}
"""The number of a method that is a fraction of its whole effect, from 0 to 1."""

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


class VectorReader:
    """Reads the vectors of one request's operations; one object in many operations is read once.

    Args:
        kept: Rows of earlier requests.
        directions: Reads directions of tokens.
    """

    def __init__(self, kept: KeptRows, directions: Directions | None = None) -> None:
        self._directions = directions
        self.kept = kept
        self._read: dict[tuple[int, int, Columns], tuple[object, Float32Row]] = {}

    def read(self, value: object, width: int, where: str, columns: Columns = ()) -> Float32Row:
        """Return a vector's values, `width` of them.

        Args:
            value: The vector; with `columns` it may be as long as these are together.
            width: Of the site's rows.
            where: Its path.
            columns: The columns that may differ from zero; empty for all.

        Raises:
            RequestError: As `read_single`.
        """
        key = id(value), width, columns
        if key not in self._read:
            count = width_of(columns, width)
            row = read_single(value, count if is_as_long(value, count) else width, where, self._directions)
            if len(row) not in (count, width):
                raise RequestError(where, f"has {len(row)} values, the hidden size; rows of the site have {width}")
            self._read[key] = value, within(row, columns, width)
        return self._read[key][1]


def read_operation(
    document: Mapping[str, Any], sites: Sequence[Site], steerable: Steerable, vectors: VectorReader, where: str
) -> list[Operation]:
    """Read one document into an operation for each of its sites.

    Args:
        document: With ``method`` and the keys of the method.
        sites: What its ``at`` names.
        steerable: The model.
        vectors: Vectors of the request.
        where: Path of the document.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    method, given = _method(document, where)
    numbers = _numbers(method, given, where)
    if method is Method.CLAMP and "value" in numbers:
        method = Method.SET
    flags = {key: read_flag(given.get(key, False), f"{where}.{key}") for key in _FLAGS}
    positions = _positions(given.get("positions"), f"{where}.positions")
    columns = _columns(given, sites, steerable, where)
    if method is Method.REPLACE and "value" in numbers:
        given["vector"] = np.full(width_of(columns, steerable.width(sites[0])), numbers.pop("value"), np.float32)
    mask = _mask_of(given, columns, steerable.width(sites[0]), where)
    by_site = _vectors_by_site(given, sites, columns, steerable, vectors, where)
    return [
        Operation(
            method=method,
            site=site,
            vectors=of_site,
            numbers=numbers,
            mask=mask,
            positions=positions,
            where=where,
            width=steerable.width(site),
            columns=columns,
            rank_width=steerable.rank_width(site),
            **flags,
        )
        for site, of_site in by_site.items()
    ]


def _vectors_by_site(
    given: Mapping[str, Any],
    sites: Sequence[Site],
    columns: Columns,
    steerable: Steerable,
    vectors: VectorReader,
    where: str,
) -> dict[Site, Mapping[str, Float32Row | ModuleVector]]:
    """Return the vectors of an operation at each site; one object for all sites where they are the same."""
    named, width = _named_vectors(given, where), steerable.width(sites[0])
    for key, value in named:
        check_in_stream(value, sites, f"{where}.{key}")
    read = {
        key: None if is_reference(value) else vectors.read(value, width, f"{where}.{key}", columns)
        for key, value in named
    }
    source = read_source(given["source"], f"{where}.source") if "source" in given else None
    taken = {}
    if source is not None:
        taken = {site: _taken(source, site, columns, width, vectors.kept, f"{where}.source") for site in sites}
    shared = {key: row for key, row in read.items() if row is not None}
    if len(shared) == len(named) and not taken:
        return dict.fromkeys(sites, shared)
    return {
        site: {
            key: read_reference(value, site, f"{where}.{key}") if (row := read[key]) is None else row
            for key, value in named
        }
        | ({"vector": taken[site]} if site in taken else {})
        for site in sites
    }


def _columns(given: Mapping[str, Any], sites: Sequence[Site], steerable: Steerable, where: str) -> Columns:
    """Read the columns that an operation acts on; its sites must have rows of one kind, or all vectors be modules'."""
    shapes = [steerable.shape(site) for site in sites]
    brings = any(key in given for key in (*COLUMN_KEYS, "mask", "value", "source")) or not all(
        is_reference(value) for _, value in _named_vectors(given, where)
    )
    other = next((at for at, shape in enumerate(shapes) if shape[::3] != shapes[0][::3]), None)
    if brings and other is not None:
        raise RequestError(
            f"{where}.at",
            f"rows of {sites[0].name} have {shapes[0].width} values, of {sites[other].name} {shapes[other].width}, or "
            "other heads; give an operation for each",
        )
    return parse_columns(given, sites[0], shapes[0], where)


def _mask_of(given: Mapping[str, Any], columns: Columns, width: int, where: str) -> BoolArray | None:
    """Return the values of a row that are replaced; None for all."""
    if "mask" in given:
        if columns:
            raise RequestError(f"{where}.mask", "excludes heads, experts and columns: both select columns")
        return _mask(given["mask"], width, f"{where}.mask")
    if not columns:
        return None
    mask = np.zeros(width, np.bool_)
    for start, stop in columns:
        mask[start:stop] = True
    return mask


def _taken(source: RowSource, site: Site, columns: Columns, width: int, kept: KeptRows, where: str) -> Float32Row:
    """Return the row of a source for a site; what the operation acts on must have been kept."""
    row, held = kept.row(source, site, where)
    if held:
        is_held = np.zeros(max(width, held[-1][1]), np.bool_)
        for start, stop in held:
            is_held[start:stop] = True
        if not all(is_held[start:stop].all() for start, stop in columns or ((0, width),)):
            raise RequestError(
                where,
                f"of the row the columns {list(map(list, held))} were kept alone, and the operation acts on others",
            )
        row = within(row, held, len(is_held))[:width]
    if len(row) != width:
        raise RequestError(where, f"the kept row has {len(row)} values, rows of {site.name} have {width}")
    return within(row, columns, width)


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
    rows = [key for key in ("source", "vector", *(["value"] if method is Method.REPLACE else [])) if key in given]
    if len(rows) > 1:
        raise RequestError(f"{where}.{rows[0]}", f"excludes {rows[1]!r}: the row comes from one of them")
    needed = () if rows and method is Method.REPLACE else _NEEDED.get(method, ("vector",))
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
    fraction = _FRACTIONS.get(method)
    if fraction is not None and not 0 <= numbers[fraction] <= 1:
        raise RequestError(
            f"{where}.{fraction}", f"{fraction} of {method} lies between 0 and 1, got {numbers[fraction]}"
        )
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


class OpFields(NamedTuple):
    """Names of the fields of operations, base, prefill and decode each."""

    ops: tuple[str, str, str]
    clamps: tuple[str, str, str]

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.ops, *self.clamps)

    @property
    def by_tier(self) -> tuple[tuple[str, str], ...]:
        """Names of the base, the prefill and the decode tier."""
        return tuple(zip(self.ops, self.clamps, strict=True))


REQUEST_FIELDS = OpFields(
    ops=("steering_ops", "prefill_steering_ops", "decode_steering_ops"),
    clamps=("steering_clamps", "prefill_steering_clamps", "decode_steering_clamps"),
)
MODULE_FIELDS = OpFields(
    ops=("ops", "prefill_ops", "decode_ops"),
    clamps=("clamps", "prefill_clamps", "decode_clamps"),
)
"""In the documents of modules and of the global state."""

CLAMPS_FORM = (
    '{hook: {layer: [{"vector", "min", "max", "strength"} or {"vector", "value", "strength"}]}} or '
    '{hook: {"dtype", "shape", "layer_indices", "data", "bounds", "strengths"}}'
)

_CLAMP_KEYS = {"vector", "min", "max", "value", "strength"}
_PACKED_KEYS = {"dtype", "shape", "layer_indices", "data", "bounds"}

Lowered = Program | tuple[Operation, ...] | None
"""The operations of a phase: a program, or as they were read if one of them names a module, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseOps:
    """The operations of a request by phase; one object for both phases if they are alike.

    Attributes:
        prefill: At prompt positions.
        decode: At generated positions.
        modules: Modules that are named, each with the path that names it.
        positions: Positions that operations are limited to, by their paths.
    """

    prefill: Lowered
    decode: Lowered
    modules: Mapping[str, str]
    positions: Mapping[str, PositionSelector]


class _Given(NamedTuple):
    """A document that is not converted yet."""

    sites: tuple[Site, ...]
    document: Mapping[str, Any]
    where: str


def read_ops(
    fields: Mapping[str, Any],
    steerable: Steerable,
    op_sites: Sequence[Site],
    max_per_site: int,
    names: OpFields = REQUEST_FIELDS,
    find: FindKept | None = None,
) -> PhaseOps | None:
    """Read the operations of a request, a module or the global state; None if there are none.

    Args:
        fields: Values by field; others than those of `names` are left alone, and None is the same as absent.
        steerable: The model and its limits.
        op_sites: Sites that are declared for operations.
        max_per_site: Operations of one phase at one site, at most.
        names: Names of the fields.
        find: Finds rows that earlier requests have kept; None where operations cannot take any.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if all(fields.get(name) is None for name in names.all):
        return None
    sites = Sites(tuple(op_sites), max_per_site)
    given = [_tier(fields, names, tier, steerable, sites) for tier in range(3)]
    for tier in (1, 2):
        _check_counts([*given[0], *given[tier]], max_per_site)
    vectors = VectorReader(KeptRows(find), steerable.directions)
    tiers = [
        [op for one in tier for op in read_operation(one.document, one.sites, steerable, vectors, one.where)]
        for tier in given
    ]
    modules = named_modules(op for tier in tiers for op in tier)
    prefill = _lowered((*tiers[0], *tiers[1]), steerable, modules)
    decode = prefill if not tiers[1] and not tiers[2] else _lowered((*tiers[0], *tiers[2]), steerable, modules)
    _check_rows(prefill, decode, steerable, next(name for name in names.all if fields.get(name) is not None))
    if prefill is None and decode is None:
        return None
    positions = {f"{op.where}.positions": op.positions for tier in tiers for op in tier if op.positions is not None}
    return PhaseOps(prefill=prefill, decode=decode, modules=modules, positions=positions)


def read_gated(value: object, steerable: Steerable, vectors: VectorReader, field: str) -> tuple[Operation, ...]:
    """Read the operations of a gate, which says on which rows they act: without positions, and without kept rows.

    Args:
        value: A list of operations.
        steerable: The model and its limits.
        vectors: Vectors of the request.
        field: Path of the list.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    sites = Sites(steerable.op_sites, steerable.max_ops_per_site)
    given = list(_listed_ops(value, steerable, sites, field))
    for one in given:
        if one.document.get("positions") is not None:
            raise RequestError(f"{one.where}.positions", "is not for a gate: its condition and scope say where it acts")
        if one.document.get("source") is not None:
            raise RequestError(f"{one.where}.source", "is not for a gate: give the row itself as 'vector'")
    _check_counts(given, steerable.max_ops_per_site)
    operations = [op for one in given for op in read_operation(one.document, one.sites, steerable, vectors, one.where)]
    check_lowers(operations, steerable)
    return tuple(operations)


def check_lowers(operations: Sequence[Operation], steerable: Steerable) -> None:
    """Check what only the numbers of the vectors show; operations that name modules are left to the engine core.

    Raises:
        RequestError: Naming the field, such as that of a vector without a direction.
    """
    lower([one for one in operations if not one.references], cast("StoredType", steerable.dtype))


def has_sources(fields: Mapping[str, Any]) -> bool:
    """Whether operations of a request name kept rows; nothing else of them is read."""
    listed = [fields.get(name) for name in REQUEST_FIELDS.ops]
    documents = (one for ops in listed if isinstance(ops, list | tuple) for one in ops)
    return any(isinstance(one, Mapping) and one.get("source") is not None for one in documents)


def _lowered(operations: tuple[Operation, ...], steerable: Steerable, modules: Mapping[str, str]) -> Lowered:
    if modules and any(operation.references for operation in operations):
        return operations
    return lower(operations, cast("StoredType", steerable.dtype))


def _tier(fields: Mapping[str, Any], names: OpFields, tier: int, steerable: Steerable, sites: Sites) -> list[_Given]:
    found: list[_Given] = []
    if (ops := fields.get(names.ops[tier])) is not None:
        found.extend(_listed_ops(ops, steerable, sites, names.ops[tier]))
    if (clamps := fields.get(names.clamps[tier])) is not None:
        found.extend(_clamps(clamps, steerable, sites, names.clamps[tier]))
    return found


def _listed_ops(value: object, steerable: Steerable, sites: Sites, field: str) -> Iterator[_Given]:
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected a non-empty list of operations, got {shown(value)}")
    _check_total(len(value), sites, field)
    num_listed = 0
    for index, document in enumerate(value):
        where = f"{field}[{index}]"
        if not isinstance(document, Mapping) or not 0 < len(document) <= MAX_KEYS:
            raise RequestError(
                where, f'expected an operation, such as {{"at", "method", "vector"}}; got {shown(document)}'
            )
        if "at" not in document:
            raise RequestError(f"{where}.at", "is missing: the site where the operation acts, such as 12.post_mlp")
        positions = document.get("positions")
        num_listed += len(positions) if isinstance(positions, list | tuple) else 0
        if num_listed > MAX_LISTED:
            raise RequestError(f"{where}.positions", f"operations of one field list at most {MAX_LISTED} positions")
        at = read_at(document["at"], steerable.num_layers, f"{where}.at")
        sites.check(at, f"{where}.at")
        yield _Given(at, document, where)


def _check_total(count: int, sites: Sites, where: str) -> None:
    limit = max(len(sites.declared), 1) * sites.max_per_site
    if count > limit:
        raise RequestError(
            where,
            f"has {count} operations, at most {limit} can act: {sites.max_per_site} at each declared site; the "
            "operator sets --max-steering-ops-per-site and --steering-op-sites",
        )


def _check_counts(given: Sequence[_Given], max_per_site: int) -> None:
    counts: Counter[Site] = Counter()
    for one in given:
        counts.update(one.sites)
        site = next((site for site in one.sites if counts[site] > max_per_site), None)
        if site is not None:
            raise RequestError(
                one.where,
                f"is one operation too many at {site.name}: {max_per_site} of one phase can act at a site; the "
                "operator sets --max-steering-ops-per-site",
            )


def _check_rows(prefill: Lowered, decode: Lowered, steerable: Steerable, field: str) -> None:
    programs = {program.key: program for program in (prefill, decode) if isinstance(program, Program)}
    count = sum(program.num_rows for program in programs.values())
    if count > steerable.max_vectors:
        raise RequestError(
            field,
            f"takes {count} rows (those that are read or written, once for each phase), at most "
            f"{steerable.max_vectors} are allowed; the operator sets max_vectors_per_request and max_steering_slots",
        )


def _clamps(value: object, steerable: Steerable, sites: Sites, field: str) -> Iterator[_Given]:
    if not isinstance(value, Mapping) or not value:
        raise RequestError(field, f"expected {CLAMPS_FORM}, got {shown(value)}")
    for name, given in value.items():
        if isinstance(name, str) and len(name) > MAX_NAME:
            raise RequestError(field, f"unknown hook point {shown(name)}")
        where = f"{field}.{name}"
        hook = parse_hook(name, where)
        if not isinstance(given, Mapping) or not given:
            raise RequestError(where, f"expected {CLAMPS_FORM}, got {shown(given)}")
        clamps = _packed_clamps if "data" in given else _layered_clamps
        yield from clamps(given, hook, steerable, sites, where)


def _layered_clamps(
    given: Mapping[Any, Any], hook: HookPoint, steerable: Steerable, sites: Sites, where: str
) -> Iterator[_Given]:
    _check_total(len(given), sites, where)
    for layer, entries in given.items():
        inner = f"{where}.{layer}" if len(str(layer)) <= MAX_NAME else where
        at = layer_site(hook, layer, steerable, inner)
        sites.check(at, inner)
        if not isinstance(entries, list | tuple) or not entries:
            raise RequestError(inner, f"expected a non-empty list of clamps, got {shown(entries)}")
        _check_total(len(entries), sites, inner)
        for index, entry in enumerate(entries):
            place = f"{inner}[{index}]"
            if not isinstance(entry, Mapping) or not set(entry) <= _CLAMP_KEYS:
                raise RequestError(place, f"expected a clamp with the keys {sorted(_CLAMP_KEYS)}, got {shown(entry)}")
            yield _Given(at, {**entry, "method": "clamp"}, place)


def layer_site(hook: HookPoint, layer: object, steerable: Steerable, where: str) -> tuple[Site, ...]:
    """Return the site of a layer that is given as an integer, or as the text of one."""
    if isinstance(layer, str) and len(layer) <= 10 and layer.removeprefix("-").isdecimal():
        layer = int(layer)
    if hook is HookPoint.FINAL_NORM and type(layer) is int and layer == -1:
        return (FINAL_NORM_SITE,)
    if hook is HookPoint.FINAL_NORM:
        raise RequestError(where, f"final_norm has no layers: expected -1, got {shown(layer)}")
    return (Site(parse_layers([layer], steerable.num_layers, where)[0], hook),)


def _packed_clamps(
    given: Mapping[Any, Any], hook: HookPoint, steerable: Steerable, sites: Sites, where: str
) -> Iterator[_Given]:
    missing, unknown = _PACKED_KEYS - set(given), set(given) - _PACKED_KEYS - {"strengths"}
    if missing or unknown:
        wrong = f"lacks {sorted(missing)}" if missing else f"has the unknown keys {shown(sorted(map(str, unknown)))}"
        raise RequestError(where, f"the packed form {wrong}; expected {CLAMPS_FORM}")
    dtype = packed_type(given["dtype"], f"{where}.dtype")
    layers = _list(given["layer_indices"], None, f"{where}.layer_indices")
    _check_total(len(layers), sites, f"{where}.layer_indices")
    at = [layer_site(hook, layer, steerable, f"{where}.layer_indices[{i}]") for i, layer in enumerate(layers)]
    width = steerable.width(at[0][0])
    expected = [len(layers), width]
    if _list(given["shape"], 2, f"{where}.shape") != expected:
        raise RequestError(f"{where}.shape", f"expected {expected}, got {shown(given['shape'])}")
    bounds = _list(given["bounds"], len(layers), f"{where}.bounds")
    strengths = given.get("strengths")
    strengths = [1.0] * len(layers) if strengths is None else _list(strengths, len(layers), f"{where}.strengths")
    for index, found in enumerate(at):
        sites.check(found, f"{where}.layer_indices[{index}]")
    data = packed_rows(given["data"], dtype, len(layers), width, f"{where}.data")
    rows = widen(data, "float32" if dtype == "float64" else cast("StoredType", dtype))
    for index, (row, pair, strength) in enumerate(zip(rows, bounds, strengths, strict=True)):
        low, high = _list(pair, 2, f"{where}.bounds[{index}]")
        document = {"method": "clamp", "vector": row, "min": low, "max": high, "strength": strength}
        yield _Given(at[index], document, f"{where}[{index}]")


def _list(value: object, length: int | None, where: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value or length not in (None, len(value)):
        raise RequestError(
            where, f"expected a list of {'one or more' if length is None else length}, got {shown(value)}"
        )
    return list(value)
