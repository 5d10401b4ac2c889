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

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar, cast

import msgspec
import numpy as np

from headgate.capture.engine.contracts.request_part import Known, PartRequest
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.results import FindKept
from headgate.capture.schema.vocabulary import Vocabulary
from headgate.steering.config import parse_config
from headgate.steering.documents.features import (
    MODULE_FEATURES,
    REQUEST_FEATURES,
    Edits,
    PhaseFeatures,
    Reconstructions,
    read_features,
)
from headgate.steering.documents.gates import GATES, PREDECESSOR, RULES, read_gate_fields, read_selection
from headgate.steering.documents.operations import MODULE_FIELDS as MODULE_OPS
from headgate.steering.documents.operations import REQUEST_FIELDS, Clamps, Operations, PhaseOps, has_sources, read_ops
from headgate.steering.documents.schema import one_of
from headgate.steering.documents.vectors import Vectors, check_scale, read_tier
from headgate.steering.gates.gate import WHO_KNOWS_RULES, Gate, names_of, probe_key, rule_key
from headgate.steering.gates.trace import RETURN_TRACE, TRACE, SteeringTrace, join_notes, read_asked
from headgate.steering.lenses.directions import LensDirections
from headgate.steering.lru_cache import LruCache
from headgate.steering.programs.feature_edits import FeatureEdit, SaeFacts, check_edits, sae_key
from headgate.steering.programs.program import Program
from headgate.steering.spec import ModuleRef, SteeringSpec, to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import TIERS, PhaseVectors, Steerable, check_name, weighted_sum
from headgate.steering.vectors.sums import LIMIT, peak, too_large

BASE, PREFILL, DECODE = "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"
NAME, MODULE_REF = "steering_name", "steering_module_ref"
_VECTORS = (BASE, PREFILL, DECODE)

_ELSEWHERE = frozenset((GATES, PREDECESSOR, RULES, RETURN_TRACE))
"""Fields that `read_steering` leaves to others."""

MODULE_FIELDS = ("vectors", "prefill_vectors", "decode_vectors")
"""The tiers of a module's document or of the global one, in the order of `_VECTORS`."""


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

    prefill_vectors: Vectors
    decode_vectors: Vectors
    ops: Annotated[Any, one_of(Operations)]
    prefill_ops: Annotated[Any, one_of(Operations)]
    decode_ops: Annotated[Any, one_of(Operations)]
    clamps: Annotated[Any, one_of(Clamps)]
    prefill_clamps: Annotated[Any, one_of(Clamps)]
    decode_clamps: Annotated[Any, one_of(Clamps)]
    features: Annotated[Any, one_of(Edits)]
    prefill_features: Annotated[Any, one_of(Edits)]
    decode_features: Annotated[Any, one_of(Edits)]
    sae_reconstruction: Annotated[Any, one_of(Reconstructions)]
    prefill_sae_reconstruction: Annotated[Any, one_of(Reconstructions)]
    decode_sae_reconstruction: Annotated[Any, one_of(Reconstructions)]


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
        fields: The request's values by the names in `FIELD_DOCS`; absent and None are alike.
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
    tiers = [read_tier(fields.get(field), steerable, field) for field in _VECTORS]
    ops = read_ops(fields, steerable, steerable.op_sites, steerable.max_ops_per_site, find=find)
    features = read_features(fields, steerable)
    spec = replace(
        with_ops(sum_tiers(tiers, steerable, _VECTORS, modules), ops),
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


MAX_BYTES = 32 << 20
"""Content whose results are kept, in all. A result takes once or twice as much memory."""
MAX_ENTRY_BYTES = 512 << 10
_LEAVES = frozenset((str, int, float, bool, bytes, type(None), np.ndarray))


class ContentKey(NamedTuple):
    """A result is found by it.

    Attributes:
        digest: SHA-256 of the content.
        num_bytes: Its length.
    """

    digest: bytes
    num_bytes: int


def content_of(values: Mapping[str, object]) -> ContentKey | None:
    """Return the key of values that are plain, as JSON and MessagePack have them, or arrays of numbers.

    None for others: tensors, and subclasses of plain types and of arrays, which may mean something else; and for values
    that are too long to be kept.
    """
    try:
        if not _are_plain(values.values()):
            return None
        content = msgspec.msgpack.encode(dict(values), enc_hook=_encode_array)
    except (OverflowError, TypeError, ValueError, RecursionError):  # such as an integer of more than 64 bits
        return None
    return ContentKey(hashlib.sha256(content).digest(), len(content)) if len(content) <= MAX_ENTRY_BYTES else None


def _encode_array(array: object) -> msgspec.msgpack.Ext:
    """Return an array as a value that no plain one is encoded to.

    Raises:
        ValueError: If it is not of numbers, or too long.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or array.nbytes > MAX_ENTRY_BYTES:
        raise ValueError("not an array of numbers that is kept")
    about = f"{array.dtype.name} {array.dtype.str} {array.shape}\n"
    return msgspec.msgpack.Ext(1, about.encode() + array.tobytes())


def _are_plain(values: Iterable[object]) -> bool:
    for one in values:
        kind: type[object] = type(one)
        if kind is dict:
            if not (_are_leaves(one) and _are_plain(one.values())):  # type: ignore[arg-type, attr-defined]
                return False
        elif kind is list:
            if not (_are_leaves(one) or _are_plain(one)):  # type: ignore[arg-type]
                return False
        elif kind not in _LEAVES:
            return False
    return True


def _are_leaves(values: Iterable[object]) -> bool:
    return _LEAVES.issuperset(map(type, values))


_Identity = tuple[tuple[str, int], ...]

FIELD_DOCS = {
    BASE: "Vectors to add at prompt and generated positions: {hook: {layer: vector}}.",
    PREFILL: "Vectors to add at prompt positions in addition.",
    DECODE: "Vectors to add at generated positions in addition.",
    NAME: "Registered modules to add, by name: a text, or a list of texts.",
    MODULE_REF: "Registered modules to add, scaled: (name, scale), or a list of these.",
    REQUEST_FIELDS.ops[0]: "Operations at prompt and generated positions: [{at, method, vector, ...}].",
    REQUEST_FIELDS.ops[1]: "Operations at prompt positions in addition.",
    REQUEST_FIELDS.ops[2]: "Operations at generated positions in addition.",
    REQUEST_FIELDS.clamps[0]: "Clamps of projections at all positions: {hook: {layer: [{vector, min, max}]}}.",
    REQUEST_FIELDS.clamps[1]: "Clamps at prompt positions in addition.",
    REQUEST_FIELDS.clamps[2]: "Clamps at generated positions in addition.",
    REQUEST_FEATURES.features[0]: "Features of SAEs at all positions: [{sae, feature, set}], or add, scale, min, max.",
    REQUEST_FEATURES.features[1]: "Features of SAEs at prompt positions in addition.",
    REQUEST_FEATURES.features[2]: "Features of SAEs at generated positions in addition.",
    REQUEST_FEATURES.reconstructions[0]: "SAEs whose reconstruction takes the place of the row: [name].",
    REQUEST_FEATURES.reconstructions[1]: "SAEs that reconstruct rows at prompt positions in addition.",
    REQUEST_FEATURES.reconstructions[2]: "SAEs that reconstruct rows at generated positions in addition.",
    "sae_clamp_specs": "Features of SAEs in the form [{module_name, clamps, phase}].",
    "sae_full_reconstruction_specs": "SAEs that reconstruct rows, in the form [{module_name, clamps, phase}].",
    GATES: "Gates, which turn steering on by what they read of each row: [{when, then, strength, scope}].",
    PREDECESSOR: "Gates in the form [{when: {kind, probe, threshold, sharpness}, scope, apply: {kind, ...}}].",
    RULES: "Rules to act beside those for all requests: [name]; [] for none of those one can opt out of.",
    RETURN_TRACE: "Whether each choice is to come with its trace: what was read and written at its rows.",
}

ANSWER_FIELDS = {RETURN_TRACE: TRACE}
"""Fields that ask for something in the answer, each with its name there."""

NESTED_NAMES = {"conversation_id": (GATES, PREDECESSOR)}
"""Names within fields that could be taken for fields, each with those."""

_WITH_ROWS = (*_VECTORS, *REQUEST_FIELDS.all, GATES, PREDECESSOR)
"""Fields whose values may be long."""


class SteeringReader:
    """Implements `headgate.capture.engine.contracts.request_part.PartRequestReader`.

    Args:
        steerable: The model and its limits.
        sae_root: Folder whose SAEs clients may register; None if none.
    """

    def __init__(self, steerable: Steerable, sae_root: str | None = None) -> None:
        self.steerable = steerable
        self.sae_root = sae_root
        self._cache: IdentityCache[PartRequest | None] = IdentityCache()
        self._known: LruCache[PartRequest] = LruCache(MAX_BYTES)

    def read(self, values: Mapping[str, Any]) -> PartRequest | None:
        """Read the fields; equal content is read once, and so are the same objects whose content is the same."""
        if RETURN_TRACE not in values:
            return self._read_kept(values)
        others = {field: value for field, value in values.items() if field != RETURN_TRACE}
        found = self._read_kept(others) if others else None
        return _traced(found) if read_asked(values[RETURN_TRACE]) else found

    def _read_kept(self, values: Mapping[str, Any]) -> PartRequest | None:
        if not any(field in values for field in _WITH_ROWS):
            return self._read(values)
        if (key := content_of(values)) is not None:
            return self._read_content(key, values)
        if (found := self._cache.find(values)) is not None:
            return found.result
        wanted = self._read(values)
        self._cache.keep(values, wanted)
        return wanted

    def _read_content(self, key: ContentKey, values: Mapping[str, Any]) -> PartRequest | None:
        found = self._known.find(key)
        if found is None and (found := self._read(values)) is not None:
            self._known.keep(key, found, key.num_bytes)
        return found

    def has_sources(self, values: Mapping[str, Any]) -> bool:
        """Whether operations name rows of earlier requests."""
        return any(field in values for field in REQUEST_FIELDS.ops) and has_sources(values)

    def read_with(self, values: Mapping[str, Any], find: FindKept) -> PartRequest | None:
        """Read the fields with rows of earlier requests, which may be others each time."""
        found = self._read(values, find)
        return _traced(found) if read_asked(values.get(RETURN_TRACE)) else found

    def read_notes(self, wanted: PartRequest, notes: Sequence[Any], end: int | None) -> dict[str, Any]:
        """Make the trace, or a piece of it."""
        return {TRACE: SteeringTrace(join_notes(notes, end))}

    def _read(self, values: Mapping[str, Any], find: FindKept | None = None) -> PartRequest | None:
        spec, ops = read_steering(values, self.steerable, find)
        gates: tuple[Gate, ...] = ()
        if GATES in values or PREDECESSOR in values:
            gates = read_gate_fields(values, self.steerable)
        if gates:
            spec = SteeringSpec(gates=gates) if spec is None else replace(spec, gates=gates)
        if (rules := read_selection(values.get(RULES))) is not None:
            spec = replace(spec or SteeringSpec(), rules=rules)
        if spec is None:
            return None
        names = names_of(gates) if gates else {}
        if spec.prefill_features or spec.decode_features:
            names |= PhaseFeatures(spec.prefill_features, spec.decode_features).names
        names |= {} if ops is None else ops.modules
        names |= _names(values, spec.modules)
        names |= {rule_key(name): RULES for name in rules or ()}
        return PartRequest(
            wire=to_wire(spec),
            field=next(iter(values)),
            names=names,
            content=spec,
            reads_every_row=any(gate.has_state for gate in gates),
            owned_field=next(
                (f"{gate.where}.conversation_id" for gate in gates if gate.conversation is not None), None
            ),
            positions={} if ops is None else ops.positions,
            knows_positions=self.steerable.knows_positions,
        )

    def names(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the modules that are named, each with the field that names it."""
        if NAME not in values and MODULE_REF not in values:
            return {}
        return _names(values, read_modules(values.get(NAME), values.get(MODULE_REF)))

    def check(self, wanted: PartRequest, known: Known) -> None:
        """Check that what is named exists, and that sums with modules fit the model's dtype."""
        for name, field in wanted.names.items():
            if name not in known:
                raise _unknown(name, field, known)
        if isinstance(wanted.content, SteeringSpec):
            if wanted.content.modules:
                self._check_sum(wanted.content, wanted.names, known)
            self.check_features(wanted.content, known)

    def check_features(self, spec: SteeringSpec, known: Known) -> None:
        """Check the features of a spec whose SAEs exist.

        Raises:
            RequestError: Naming the field, if an SAE has no such feature, or cannot do what is asked.
        """

        facts: dict[str, SaeFacts] = {}

        def facts_of(edit: FeatureEdit) -> SaeFacts:
            if edit.sae not in facts:
                facts[edit.sae] = SaeFacts.from_plain(known[sae_key(edit.sae)])
            return facts[edit.sae]

        phases = [spec.prefill_features]
        phases += [spec.decode_features] if spec.decode_features is not spec.prefill_features else []
        for edits in (*phases, *(gate.then.features for gate in spec.gates)):
            if edits:
                check_edits(edits, facts_of, self.steerable.max_sae_features)

    def _check_sum(self, spec: SteeringSpec, fields: Mapping[str, str], known: Known) -> None:
        limit = LIMIT[cast("StoredType", self.steerable.dtype)]
        largest = max(peak(spec.prefill), peak(spec.decode))
        for ref in spec.modules:
            largest += abs(ref.scale) * cast("float", known[ref.name]["peak"])
            if not largest < limit:
                raise RequestError(
                    fields[ref.name],
                    f"with module {ref.name!r}, the vectors times their scales reach {largest:.4g}; sums for a model "
                    f"in {self.steerable.dtype} must stay below {limit:.4g}: use smaller vectors or scales",
                )


def _traced(found: PartRequest | None) -> PartRequest:
    """Return a request, which may steer with nothing of its own, with its trace."""
    asked = found or PartRequest(wire={}, field=RETURN_TRACE, names={}, content=SteeringSpec())
    return replace(asked, wire={**asked.wire, "trace": True}, wants_notes=True)


def _unknown(name: str, field: str, known: Known) -> RequestError:
    """Make the error about a name that is not registered."""
    kind, own = _kind_of(name)
    if kind == "rule":
        return RequestError(field, f"unknown rule {own!r}; {WHO_KNOWS_RULES}")
    others = sorted(other for found, other in map(_kind_of, known) if found == kind)
    return RequestError(field, f"unknown {kind} {own!r}; registered: {', '.join(others) or 'none'}")


def _kind_of(key: str) -> tuple[str, str]:
    """Return the kind of a registered name, for people, and the name itself."""
    name = key.partition("\n")[2]
    kind = {sae_key(name): "SAE", probe_key(name): "probe", rule_key(name): "rule"}.get(key)
    return ("steering module", key) if kind is None else (kind, name)


def _names(values: Mapping[str, Any], refs: Sequence[ModuleRef]) -> dict[str, str]:
    num_plain = len(read_modules(values.get(NAME), None)) if values.get(MODULE_REF) is not None else len(refs)
    return {ref.name: NAME if index < num_plain else MODULE_REF for index, ref in enumerate(refs)}


def open_reader(section: Mapping[str, Any], model: ModelInfo, vocabulary: Vocabulary | None = None) -> SteeringReader:
    """Return the reader for an engine whose configuration has a ``steering`` section.

    Raises:
        ConfigError: If the section is wrong.
    """
    config = parse_config(section)
    steerable = config.steerable(
        num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype, shapes=model.shapes
    )
    directions = LensDirections(config.lenses, model, vocabulary)
    steerable = replace(steerable, directions=directions, knows_positions=not model.has_drafts)
    return SteeringReader(steerable, config.sae_root)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Found(Generic[Result]):
    """A result that was kept, which may be None."""

    result: Result


class _KeptResult(NamedTuple):
    values: dict[str, Any]
    """Held, so that no other object gets the identity of one of them."""
    copies: dict[str, Any]
    found: Found[Any]


class IdentityCache(Generic[Result]):
    """The last few results of raw values: one `SamplingParams` is often used for many prompts. Any thread.

    Values are found by identity, and compared with a copy of their content then: an array that was changed in place
    since is read anew. That takes a fraction of reading.

    Args:
        capacity: Results that are kept, each with its values and a copy of them.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[_Identity, _KeptResult] = OrderedDict()
        self._lock = Lock()

    def find(self, values: Mapping[str, Any]) -> Found[Result] | None:
        """Return the result that was kept for these objects, if their content is the same as then; else None."""
        key = _identity(values)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is None or not all(_is_same(values[name], entry.copies[name]) for name in values):
            return None
        return entry.found

    def keep(self, values: Mapping[str, Any], result: Result) -> None:
        """Keep the result of `values`; lists of numbers must hold numbers alone."""
        entry = _KeptResult(dict(values), {name: _copy(value) for name, value in values.items()}, Found(result))
        with self._lock:
            self._entries[_identity(values)] = entry
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)


class _Array(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: bytes


class _Tensor(NamedTuple):
    clone: Any


class _Buffer(NamedTuple):
    data: bytes


class _Listed(NamedTuple):
    items: list[Any]


def _identity(values: Mapping[str, Any]) -> _Identity:
    return tuple((name, id(value)) for name, value in values.items())


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_nested(items: list[Any] | tuple[Any, ...]) -> bool:
    return bool(items) and not isinstance(items[0], int | float | np.number)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return _Array(value.dtype, value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return _Listed([_copy(item) for item in value] if _is_nested(value) else list(value))
    if isinstance(value, bytearray | memoryview):
        return _Buffer(bytes(value))
    return _Tensor(value.detach().clone()) if _is_tensor(value) else value


def _is_same(value: Any, copy: Any) -> bool:
    if isinstance(value, Mapping):
        return (
            isinstance(copy, dict)
            and list(value) == list(copy)
            and all(_is_same(inner, copy[key]) for key, inner in value.items())
        )
    if isinstance(value, np.ndarray):
        return isinstance(copy, _Array) and (value.dtype, value.shape, value.tobytes()) == copy
    if isinstance(value, list | tuple):
        if not isinstance(copy, _Listed) or len(value) != len(copy.items):
            return False
        if _is_nested(value):
            return all(_is_same(item, kept) for item, kept in zip(value, copy.items, strict=True))
        return list(value) == copy.items
    if isinstance(value, bytearray | memoryview):
        return isinstance(copy, _Buffer) and bytes(value) == copy.data
    if _is_tensor(value):
        return isinstance(copy, _Tensor) and _is_same_tensor(value, copy.clone)
    return value is copy or (isinstance(value, int | float | str) and type(value) is type(copy) and value == copy)


def _is_same_tensor(value: Any, clone: Any) -> bool:
    import torch

    return (value.dtype, value.device, value.shape) == (clone.dtype, clone.device, clone.shape) and torch.equal(
        value, clone
    )
