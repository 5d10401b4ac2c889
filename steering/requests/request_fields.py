"""A request's steering fields, read and checked: from what the client wrote to a `SteeringSpec`.

Every mistake is one `RequestError` that names the field. A site that is given twice in one field, be it through an
alias (``post_mlp`` and ``post_block``) or through two names of one layer (``3`` and ``"3"``, or counted from the end),
is refused: adding the two up would double a vector that was meant once. Vectors of one field may differ in dtype; one
vector may not.

A vector of zeros that is given by itself is refused, unless its scale is 0: it is a mistake more often than not. Packed
rows of zeros stand for layers that are left alone, as long as another row is not zero. Where vectors are set in place
of others (`read_update`), zeros take a site back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, cast

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.results import FindKept
from headgate.capture.schema.sites import Site, parse_hook
from headgate.steering.programs.program import Program
from headgate.steering.requests.feature_fields import MODULE_FEATURES, REQUEST_FEATURES, read_features
from headgate.steering.requests.op_fields import MODULE_FIELDS as MODULE_OPS
from headgate.steering.requests.op_fields import REQUEST_FIELDS, PhaseOps, read_ops
from headgate.steering.requests.trace import RETURN_TRACE
from headgate.steering.requests.vector_forms import FieldVector, TierRows, check_scale, checked_rows, entries
from headgate.steering.spec import ModuleRef, SteeringSpec
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import MAX_NAME, TIERS, PhaseVectors, Steerable, check_name, weighted_sum
from headgate.steering.vectors.sums import too_large

BASE, PREFILL, DECODE = "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"
NAME, MODULE_REF = "steering_name", "steering_module_ref"
GATES, PREDECESSOR, RULES = "steering_gates", "steering", "steering_rules"

FIELDS = (
    *(BASE, PREFILL, DECODE, NAME, MODULE_REF, *REQUEST_FIELDS.all, *REQUEST_FEATURES.all, GATES, PREDECESSOR),
    *(RULES, RETURN_TRACE),
)
"""The steering fields of a request."""

_ELSEWHERE = frozenset((GATES, PREDECESSOR, RULES, RETURN_TRACE))
"""Fields that `read_steering` leaves to others."""

MODULE_FIELDS = ("vectors", "prefill_vectors", "decode_vectors")
"""The tiers of a module's document or of the global one, in the order of `FIELDS`."""


class SteeringDocument(TypedDict, total=False):
    """The content of a module, or of the global state, beside its ``vectors``. Absent and None are alike.

    Attributes:
        prefill_vectors: Act at prompt positions in addition.
        decode_vectors: Act at generated positions in addition.
        ops: Operations at prompt and generated positions.
        prefill_ops: Operations at prompt positions, after `ops`.
        decode_ops: Operations at generated positions, after `ops`.
        clamps: As ``steering_clamps`` of a request, after the operations.
        prefill_clamps: Clamps at prompt positions.
        decode_clamps: Clamps at generated positions.
        features: Edits of features of SAEs at prompt and generated positions, after all operations.
        prefill_features: Edits at prompt positions.
        decode_features: Edits at generated positions.
        sae_reconstruction: Names of SAEs: rows become their reconstructions, with the edits of their features.
        prefill_sae_reconstruction: SAEs whose reconstructions replace rows at prompt positions.
        decode_sae_reconstruction: SAEs whose reconstructions replace rows at generated positions.
    """

    prefill_vectors: Any
    decode_vectors: Any
    ops: Any
    prefill_ops: Any
    decode_ops: Any
    clamps: Any
    prefill_clamps: Any
    decode_clamps: Any
    features: Any
    prefill_features: Any
    decode_features: Any
    sae_reconstruction: Any
    prefill_sae_reconstruction: Any
    decode_sae_reconstruction: Any


DOCUMENT_FIELDS = (*MODULE_FIELDS, *MODULE_OPS.all, *MODULE_FEATURES.all)
"""All keys of a document of a module, or of the global state."""


def document_of(vectors: Any, others: SteeringDocument) -> dict[str, Any]:
    """Return the whole document of the arguments of a call.

    Raises:
        TypeError: If one of them is not among `DOCUMENT_FIELDS`.
    """
    for name in others:
        if name not in DOCUMENT_FIELDS[1:]:
            raise TypeError(f"unexpected argument {name!r}; expected vectors, {', '.join(DOCUMENT_FIELDS[1:])}")
    return {"vectors": vectors, **others}


MAX_MODULES = 64
"""Modules that one request may name, at most."""


def read_steering(
    fields: Mapping[str, Any], steerable: Steerable, find: FindKept | None = None
) -> tuple[SteeringSpec | None, PhaseOps | None]:
    """Read the steering of a request; None if it asks for nothing, or for nothing but zeros.

    Args:
        fields: The request's values by the names in `FIELDS`; absent and None are alike.
        steerable: The model and its limits.
        find: Finds rows that earlier requests have kept.

    Returns:
        The spec, and its operations, with the modules that they name.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if _ELSEWHERE.issuperset(fields):
        return None, None
    modules = read_modules(fields.get(NAME), fields.get(MODULE_REF))
    tiers = [read_tier(fields.get(field), steerable, field) for field in FIELDS[:3]]
    ops = read_ops(fields, steerable, steerable.op_sites, steerable.max_ops_per_site, find=find)
    features = read_features(fields, steerable)
    spec = replace(
        with_ops(sum_tiers(tiers, steerable, FIELDS[:3], modules), ops),
        prefill_features=features.prefill,
        decode_features=features.decode,
    )
    return (None if spec.is_empty else spec), ops


def with_ops(spec: SteeringSpec, ops: PhaseOps | None) -> SteeringSpec:
    """Return `spec` with operations."""
    if ops is None:
        return spec
    programs = [lowered if isinstance(lowered, Program) else None for lowered in (ops.prefill, ops.decode)]
    named = [lowered if isinstance(lowered, tuple) else () for lowered in (ops.prefill, ops.decode)]
    return replace(
        spec,
        prefill_program=programs[0],
        decode_program=programs[1],
        prefill_ops=named[0],
        decode_ops=named[1],
    )


def read_module(document: Mapping[str, Any], steerable: Steerable) -> SteeringSpec:
    """Read the content of a named module: a document with the keys `DOCUMENT_FIELDS`.

    Raises:
        RequestError: Naming the field that is wrong; also if there is nothing but zeros in it.
    """
    tiers = [read_tier(document.get(field), steerable, field) for field in MODULE_FIELDS]
    ops = read_ops(document, steerable, steerable.op_sites, steerable.max_ops_per_site, MODULE_OPS)
    features = read_features(document, steerable, MODULE_FEATURES)
    spec = replace(
        with_ops(sum_tiers(tiers, steerable, MODULE_FIELDS), ops),
        prefill_features=features.prefill,
        decode_features=features.decode,
    )
    if spec.is_empty:
        raise RequestError(
            MODULE_FIELDS[0], "there is no vector other than zero in the module, no operation and no feature"
        )
    return spec


def read_tier(value: object, steerable: Steerable, field: str) -> PhaseVectors | None:
    """Read one tier: ``{hook: ...}`` in any of the accepted forms, or `PhaseVectors`; None if absent or of scale 0.

    Raises:
        RequestError: Naming what is wrong in `field`, a vector of zeros included.
    """
    if value is None:
        return None
    rows = read_rows(value, steerable, field)
    return PhaseVectors.from_bytes(rows.sites, rows.payload, rows.dtype, steerable.hidden_size, rows.peaks)


def read_rows(value: object, steerable: Steerable, field: str) -> TierRows:
    """Read the rows of one tier, in any form but None that `read_tier` takes.

    Raises:
        RequestError: As `read_tier`.
    """
    found = _entries(value, steerable, field)
    rows = checked_rows(found, steerable)
    zeros = rows.zeros
    for index in zeros:
        entry = found[index]
        if entry.scale != 0 and not (entry.is_packed and len(zeros) < len(found)):
            raise RequestError(
                entry.where, "is zero in float32, so it would add nothing; leave it out, or say so with the scale 0"
            )
    return rows


def read_global_ops(document: Mapping[str, Any], steerable: Steerable) -> dict[str, SteeringSpec]:
    """Read the operations of a global document, by tier; tiers that it does not mention are absent.

    A tier whose lists are empty has none from here on.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    found = {}
    for tier, names in zip(TIERS, MODULE_OPS.by_tier, strict=True):
        given = {name: document[name] for name in names if document.get(name) is not None}
        acting = {name: value for name, value in given.items() if value not in ([], (), {})}
        ops = read_ops(acting, steerable, steerable.op_sites, steerable.max_ops_per_site, MODULE_OPS)
        if given:
            found[tier] = with_ops(SteeringSpec(), ops)
    return found


class TierUpdate(NamedTuple):
    """A change of one tier of the global vectors.

    Attributes:
        vectors: To set; None if there are none.
        cleared: Sites to take back: zeros were given for them.
    """

    vectors: PhaseVectors | None
    cleared: tuple[Site, ...]

    @property
    def sites(self) -> set[Site]:
        """The sites that change."""
        return {*self.cleared, *(self.vectors.sites if self.vectors is not None else ())}


def read_update(value: object, steerable: Steerable, field: str) -> TierUpdate | None:
    """Read one tier of the global vectors, as `read_tier`; None if absent. A `TierUpdate` stays as it is.

    Raises:
        RequestError: Naming what is wrong in `field`.
    """
    if value is None or isinstance(value, TierUpdate):
        return value
    rows = checked_rows(_entries(value, steerable, field), steerable)
    vectors = PhaseVectors.from_bytes(rows.sites, rows.payload, rows.dtype, steerable.hidden_size, rows.peaks)
    return TierUpdate(vectors, tuple(rows.sites[index] for index in rows.zeros))


def _entries(value: object, steerable: Steerable, field: str) -> list[FieldVector]:
    """Return the vectors of one tier, in the order of the forward pass."""
    if isinstance(value, PhaseVectors):
        value = value.packed()
    if not isinstance(value, Mapping) or not value:
        raise RequestError(field, f"expected a non-empty object of hook point to vectors, got {shown(value)}")
    found: list[FieldVector] = []
    for name, given in value.items():
        if isinstance(name, str) and len(name) > MAX_NAME:
            raise RequestError(field, f"unknown hook point {shown(name)}")
        where = f"{field}.{name}"
        found.extend(entries(given, parse_hook(name, where), steerable, where))
    return _by_rank(found, steerable)


def sum_tiers(
    tiers: Sequence[PhaseVectors | None],
    steerable: Steerable,
    fields: Sequence[str],
    modules: tuple[ModuleRef, ...] = (),
) -> SteeringSpec:
    """Add the base tier to the prefill and to the decode tier, within the limits of `steerable`.

    Raises:
        RequestError: If a sum is not finite in the model's dtype, or if the vectors are more than one request may
            take.
    """
    base, prefill_tier, decode_tier = tiers
    prefill = _phase(base, prefill_tier, steerable, fields[1] if prefill_tier else fields[0])
    decode = _phase(base, decode_tier, steerable, fields[2] if decode_tier else fields[0])
    if prefill and decode and prefill.key == decode.key:
        decode = prefill
    spec = SteeringSpec(prefill=prefill, decode=decode, modules=modules)
    if spec.num_vectors > steerable.max_vectors:
        raise RequestError(
            fields[0],
            f"takes {spec.num_vectors} vectors (one for each site and phase), at most {steerable.max_vectors} are "
            "allowed; the operator sets max_vectors_per_request and max_steering_slots",
        )
    return spec


def read_modules(name: object, ref: object) -> tuple[ModuleRef, ...]:
    """Read the modules that ``steering_name`` and ``steering_module_ref`` name, each once; scales as given.

    Names are a text or a list of texts. References are ``(name, scale)``, ``{"name", "scale"}``, a name, or a list
    of these.

    Raises:
        RequestError: On any other form, or a name given twice.
    """
    refs = [ModuleRef(check_name(item, NAME)) for item in _items(name, NAME)]
    if ref is not None:
        is_single = isinstance(ref, str | Mapping) or (
            isinstance(ref, list | tuple) and len(ref) == 2 and isinstance(ref[0], str) and not _is_ref(ref[1])
        )
        refs.extend(_module_ref(item) for item in ([ref] if is_single else _items(ref, MODULE_REF)))
    names = [item.name for item in refs]
    twice = next((text for text in names if names.count(text) > 1), None)
    if twice is not None:
        field = NAME if ref is None else MODULE_REF
        raise RequestError(field, f"{twice!r} is named more than once; name it once, with the sum of the scales")
    if len(refs) > MAX_MODULES:
        raise RequestError(NAME if ref is None else MODULE_REF, f"names {len(refs)} modules, at most {MAX_MODULES}")
    return tuple(refs)


def _items(value: object, field: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected a module or a non-empty list of modules, got {shown(value)}")
    if len(value) > MAX_MODULES:
        raise RequestError(field, f"names {len(value)} modules, at most {MAX_MODULES}")
    return value


def _is_ref(value: object) -> bool:
    return isinstance(value, str | list | tuple | Mapping)


def _module_ref(item: object) -> ModuleRef:
    if isinstance(item, ModuleRef):
        item = (item.name, item.scale)
    if isinstance(item, Mapping):
        if "name" not in item or not set(item) <= {"name", "scale"}:
            raise RequestError(MODULE_REF, f"expected the keys 'name' and 'scale', got {shown(list(item))}")
        item = (item["name"], item.get("scale", 1.0))
    if isinstance(item, str):
        item = (item, 1.0)
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise RequestError(MODULE_REF, f"expected (name, scale), got {shown(item)}")
    return ModuleRef(check_name(item[0], MODULE_REF), check_scale(item[1], f"{MODULE_REF}.scale"))


def _by_rank(found: list[FieldVector], steerable: Steerable) -> list[FieldVector]:
    found.sort(key=lambda entry: entry.rank)
    for one, other in pairwise(found):
        if one.rank == other.rank:
            name = steerable.sites[one.rank].name
            raise RequestError(other.where, f"{name} is given twice, also as {one.where}; give their sum instead")
    return found


def _phase(
    base: PhaseVectors | None, tier: PhaseVectors | None, steerable: Steerable, field: str
) -> PhaseVectors | None:
    try:
        total = weighted_sum([(base, 1), (tier, 1)])
    except OverflowError as error:
        raise RequestError(field, str(error)) from None
    if total is not None and (problem := too_large(total, cast("StoredType", steerable.dtype))) is not None:
        raise RequestError(field, problem)
    return total
