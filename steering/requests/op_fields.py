"""A request's operations, read from its fields: lists of operations, and clamps in the form of `CLAMPS_FORM`.

Both come as a base field and one for each phase; a phase has the base's operations first, then its own, and its clamps
behind its operations. Numbers of operations, sites, keys and listed positions are compared with their limits before a
vector is converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.positions import PositionSelector
from headgate.capture.schema.results import FindKept
from headgate.capture.schema.selectors.union import MAX_LISTED
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site, parse_hook, parse_layers
from headgate.steering.programs.lowering import lower
from headgate.steering.programs.operations import Operation, named_modules
from headgate.steering.programs.program import Program
from headgate.steering.requests.kept_rows import KeptRows
from headgate.steering.requests.op_documents import MAX_KEYS, Sites, Vectors, read_at, read_operation
from headgate.steering.requests.vector_forms import packed_rows, packed_type
from headgate.steering.vectors.dtypes import StoredType, widen
from headgate.steering.vectors.phase_vectors import MAX_NAME, Steerable


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
    vectors = Vectors(steerable.hidden_size, KeptRows(find))
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


def read_gated(value: object, steerable: Steerable, vectors: Vectors, field: str) -> tuple[Operation, ...]:
    """Read the operations of a gate, which says on which rows they act: without positions, and without kept rows.

    Args:
        value: A list of operations.
        steerable: The model and its limits.
        vectors: Of the request.
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
    """Check what only the numbers of the vectors tell; those that name modules are left to the engine core.

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
    expected = [len(layers), steerable.hidden_size]
    if _list(given["shape"], 2, f"{where}.shape") != expected:
        raise RequestError(f"{where}.shape", f"expected {expected}, got {shown(given['shape'])}")
    bounds = _list(given["bounds"], len(layers), f"{where}.bounds")
    strengths = given.get("strengths")
    strengths = [1.0] * len(layers) if strengths is None else _list(strengths, len(layers), f"{where}.strengths")
    at = [layer_site(hook, layer, steerable, f"{where}.layer_indices[{i}]") for i, layer in enumerate(layers)]
    for index, found in enumerate(at):
        sites.check(found, f"{where}.layer_indices[{index}]")
    data = packed_rows(given["data"], dtype, len(layers), steerable.hidden_size, f"{where}.data")
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
