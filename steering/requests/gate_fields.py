"""A request's gates, read from its fields: ``steering_gates``, or ``steering`` in the form of `PREDECESSOR_FORM`.

Nothing here knows the server's probes, modules and SAEs: what depends on their sites is left to the engine core. None
is the same as an absent key. Names, scopes and strengths of all gates are read before the first vector is converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import FINAL_NORM_SITE
from headgate.steering.gates.checks import check_reads, check_this_token
from headgate.steering.gates.gate import (
    PID_KEYS,
    Always,
    Condition,
    Gate,
    InlineProbe,
    Leaf,
    ModuleThen,
    NamedProbe,
    Pid,
    Reading,
    Then,
)
from headgate.steering.gates.layout import layout_of
from headgate.steering.programs.gate_codes import Mode, Scope
from headgate.steering.programs.operations import Method, Operation
from headgate.steering.requests.feature_fields import read_edits
from headgate.steering.requests.gate_conditions import Conditions, check_columns, check_keys
from headgate.steering.requests.kept_rows import KeptRows
from headgate.steering.requests.op_documents import Sites, Vectors
from headgate.steering.requests.op_fields import check_lowers, read_gated
from headgate.steering.requests.request_fields import GATES, PREDECESSOR, read_rows, read_tier
from headgate.steering.requests.vector_forms import check_scale
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable, check_name
from headgate.steering.vectors.sums import LIMIT, MAX_STRENGTH

PREDECESSOR_FORM = (
    '[{"when": {"kind": "always"} or {"kind": "probe", "probe": VECTOR, "threshold", "sharpness"}, "scope", "apply": '
    '{"kind": "add", "steer": VECTOR, "strength"} or {"kind": "attenuate", "strength"}}] with VECTOR as '
    '{"kind": "name", "name"} or {"kind": "inline", "packed": {hook: packed}}'
)

_KEYS = ("name", "when", "then", "strength", "scope", "conversation_id")
_THEN_KEYS = ("module", "scale", "vectors", "ops", "features", "attenuate")
_THENS = ("module", "vectors", "ops", "features", "attenuate")
_MODES = {"proportional": Mode.PROPORTIONAL, "sigmoid": Mode.SIGMOID}
_CONVERSATION = "rest_of_conversation"
_SCOPES = {
    "this_token": Scope.THIS,
    "next_token": Scope.NEXT,
    "next_step": Scope.NEXT,
    "rest_of_request": Scope.REST,
    _CONVERSATION: Scope.REST,
}

_OLD_KEYS = ("when", "scope", "apply", "conversation_id")
_OLD_WHEN = {"always": ("kind",), "probe": ("kind", "probe", "threshold", "sharpness")}
_OLD_APPLY = {"add": ("kind", "steer", "strength"), "attenuate": ("kind", "strength")}
_OLD_VECTOR = {"name": ("kind", "name"), "inline": ("kind", "packed")}


def read_gate_fields(fields: Mapping[str, Any], steerable: Steerable) -> tuple[Gate, ...]:
    """Read the gates of a request, in either form; empty if it has none.

    Args:
        fields: The request's values by the names of its fields; absent and None are alike.
        steerable: The model and its limits.

    Raises:
        RequestError: Naming the field that is wrong; also if both forms are given.
    """
    gates, old = fields.get(GATES), fields.get(PREDECESSOR)
    if gates is not None and old is not None:
        raise RequestError(PREDECESSOR, f"excludes {GATES}: both are gates; give all of them in one")
    if gates is not None:
        return read_gates(gates, steerable)
    return () if old is None else read_predecessor(old, steerable)


def read_gates(value: object, steerable: Steerable, field: str = GATES) -> tuple[Gate, ...]:
    """Read a list of gates.

    Args:
        value: A non-empty list of at most `Steerable.max_gates` documents.
        steerable: The model and its limits.
        field: Path of the list.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    documents = _documents(value, steerable, field)
    places = [f"{field}[{index}]" for index in range(len(documents))]
    heads = [_head(document, index, places[index]) for index, document in enumerate(documents)]
    _check_names(heads, places)
    vectors = Vectors(steerable.hidden_size, KeptRows())
    conditions = Conditions(steerable, vectors)
    conditions_read = [
        conditions.read(document.get("when"), f"{where}.when", is_controlled=head.pid is not None)
        for head, document, where in zip(heads, documents, places, strict=True)
    ]
    gates = tuple(
        Gate(
            name=head.name,
            when=when,
            then=read_then(document.get("then"), steerable, vectors, f"{where}.then"),
            mode=head.mode,
            amount=head.amount,
            pid=head.pid,
            scope=head.scope,
            conversation=head.conversation,
            where=where,
        )
        for head, when, document, where in zip(heads, conditions_read, documents, places, strict=True)
    )
    return _checked(gates, steerable, field)


def read_predecessor(value: object, steerable: Steerable, field: str = PREDECESSOR) -> tuple[Gate, ...]:
    """Read a list of gates in the form of `PREDECESSOR_FORM`.

    Args:
        value: A non-empty list of at most `Steerable.max_gates` documents.
        steerable: The model and its limits.
        field: Path of the list.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    documents = _documents(value, steerable, field)
    gates = tuple(_old_gate(document, index, steerable, field) for index, document in enumerate(documents))
    return _checked(gates, steerable, field)


class _Head(NamedTuple):
    """The parts of a gate that hold no vectors."""

    name: str
    mode: Mode
    amount: float
    pid: Pid | None
    scope: Scope
    conversation: str | None


def _documents(value: object, steerable: Steerable, field: str) -> Sequence[Mapping[Any, Any]]:
    if not steerable.max_gates:
        raise RequestError(
            field, "gates are off on this server; the operator sets --max-steering-gates and --steering-op-sites"
        )
    if not isinstance(value, list | tuple) or not value:
        raise RequestError(field, f"expected a non-empty list of gates, got {shown(value)}")
    if len(value) > steerable.max_gates:
        raise RequestError(
            field,
            f"has {len(value)} gates, at most {steerable.max_gates} fit; the operator sets --max-steering-gates",
        )
    for index, document in enumerate(value):
        if not isinstance(document, Mapping):
            raise RequestError(f"{field}[{index}]", f"expected a gate as an object, got {shown(document)}")
    return value


def _head(document: Mapping[Any, Any], index: int, where: str) -> _Head:
    check_keys(document, _KEYS, where, "a gate")
    for key in ("when", "then"):
        if document.get(key) is None:
            raise RequestError(f"{where}.{key}", "is missing; a gate needs 'when' and 'then'")
    name = document.get("name")
    mode, amount, pid = _strength(document.get("strength"), f"{where}.strength")
    scope, conversation = _scope(document, where)
    if pid is not None and scope is Scope.REST:
        raise RequestError(
            f"{where}.scope",
            "a control loop sets another strength on each row: expected this_token or next_token with the strength pid",
        )
    name = f"gate{index}" if name is None else check_name(name, f"{where}.name", "a gate")
    return _Head(name, mode, amount, pid, scope, conversation)


def _strength(value: object, where: str) -> tuple[Mode, float, Pid | None]:
    if value is None or (isinstance(value, str) and value == "binary"):
        return Mode.BINARY, 1.0, None
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in (*_MODES, "pid"):
        raise RequestError(
            where,
            'expected "binary", {"proportional": gain}, {"sigmoid": sharpness} or '
            f'{{"pid": {{{", ".join(PID_KEYS)}}}}}; got {shown(value)}',
        )
    ((key, amount),) = value.items()
    if key == "pid":
        return Mode.PID, 1.0, _pid(amount, f"{where}.pid")
    found = _positive(amount, f"{where}.{key}")
    return _MODES[key], found if key == "sigmoid" else _checked_factor(found, f"{where}.{key}"), None


def _pid(value: object, where: str) -> Pid:
    if not isinstance(value, Mapping):
        raise RequestError(where, f"expected an object with {', '.join(PID_KEYS)}; got {shown(value)}")
    check_keys(value, PID_KEYS, where, "a control loop")
    if value.get("setpoint") is None:
        raise RequestError(f"{where}.setpoint", "is missing: the score that the loop holds")
    given = {key: check_scale(value[key], f"{where}.{key}") for key in PID_KEYS if value.get(key) is not None}
    pid = Pid(**{{"min": "least", "max": "largest"}.get(key, key): number for key, number in given.items()})
    _checked_factor(pid.least, f"{where}.min")
    _checked_factor(pid.largest, f"{where}.max")
    if pid.least > 0:
        raise RequestError(f"{where}.min", f"expected 0 or less: the limits are around 0; got {pid.least:g}")
    if pid.largest < 0:
        raise RequestError(f"{where}.max", f"expected 0 or more: the limits are around 0; got {pid.largest:g}")
    return pid


def _checked_factor(value: float, where: str) -> float:
    """Return a number by which steering is multiplied, if it is none that would carry rows out of range."""
    if abs(value) > MAX_STRENGTH:
        raise RequestError(where, f"expected a number of at most {MAX_STRENGTH:g} in magnitude, got {value:g}")
    return value


def _positive(value: object, where: str) -> float:
    number = check_scale(value, where)
    if number <= 0:
        raise RequestError(where, f"must be above 0, got {number:g}")
    return number


def _scope(document: Mapping[Any, Any], where: str) -> tuple[Scope, str | None]:
    """Return the scope of a gate, and the conversation that it goes on in."""
    scope, conversation = document.get("scope"), document.get("conversation_id")
    scope = "this_token" if scope is None else scope
    if not isinstance(scope, str) or scope not in _SCOPES:
        raise RequestError(f"{where}.scope", f"expected one of {', '.join(_SCOPES)}; got {shown(scope)}")
    inner = f"{where}.conversation_id"
    if scope != _CONVERSATION:
        if conversation is not None:
            raise RequestError(inner, f"is for the scope {_CONVERSATION} alone, not for {scope}")
        return _SCOPES[scope], None
    if conversation is None:
        raise RequestError(inner, f"is missing; the scope {_CONVERSATION} needs it")
    return _SCOPES[scope], check_name(conversation, inner, "a conversation")


def _check_names(heads: Sequence[_Head], places: Sequence[str]) -> None:
    first: dict[str, str] = {}
    for head, where in zip(heads, places, strict=True):
        other = first.setdefault(head.name, where)
        if other is not where:
            raise RequestError(
                f"{where}.name", f"{head.name!r} is the name of {other}, too; without one, a gate is named by its index"
            )


def read_then(value: object, steerable: Steerable, vectors: Vectors, where: str) -> Then:
    """Read what a gate, a rule or a controller turns on.

    Args:
        value: ``"observe"``, or an object with one of `_THENS`.
        steerable: The model and its limits.
        vectors: Reads vectors of operations.
        where: Path of the value.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if isinstance(value, str) and value == "observe":
        return Then(observes=True)
    if not isinstance(value, Mapping):
        raise RequestError(where, f'expected "observe", or one of the keys {", ".join(_THENS)}; got {shown(value)}')
    check_keys(value, _THEN_KEYS, where, "an effect")
    given = [key for key in _THENS if value.get(key) is not None]
    if len(given) != 1:
        got = f"got {' and '.join(given)}" if given else "got none of them"
        raise RequestError(
            f"{where}.{given[1]}" if given else where, f"expected exactly one of {', '.join(_THENS)}; {got}"
        )
    key, inner = given[0], f"{where}.{given[0]}"
    if value.get("scale") is not None and key != "module":
        raise RequestError(f"{where}.scale", f"is for a module; {key} have numbers of their own")
    if key == "module":
        scale = 1.0 if value.get("scale") is None else check_scale(value["scale"], f"{where}.scale")
        return Then(module=ModuleThen(check_name(value[key], inner), scale, inner))
    if key == "vectors":
        return Then(operations=_additions(value[key], 1.0, steerable, inner))
    if key == "ops":
        return Then(operations=read_gated(value[key], steerable, vectors, inner))
    if key == "features":
        return Then(features=read_edits(value[key], steerable, inner))
    return Then(attenuate=_checked_factor(check_scale(value[key], inner), inner))


def _additions(value: object, scale: float, steerable: Steerable, where: str) -> tuple[Operation, ...]:
    """Read vectors as operations, one for each site."""
    read = read_rows(value, steerable, where)
    rows = read.by_site(steerable.hidden_size)
    if not rows:
        raise RequestError(where, 'adds nothing: its scales are 0; a gate that only observes has "then": "observe"')
    sites = Sites(steerable.op_sites, steerable.max_ops_per_site)
    operations = []
    for site, row in rows.items():
        layer = "" if site == FINAL_NORM_SITE else f".{site.layer}"
        place = f"{where}.{site.hook.value}{layer}"
        sites.check((site,), place)
        operations.append(
            Operation(method=Method.ADDITIVE, site=site, vectors={"vector": row}, numbers={"scale": scale}, where=place)
        )
    # Lowering takes a hundred times as long, and refuses additions of these rows for their size alone.
    is_small = abs(scale) * max(read.peaks.tolist()) < LIMIT[cast("StoredType", steerable.dtype)]
    if scale == 0 or not is_small:
        check_lowers(operations, steerable)
    return tuple(operations)


def _checked(gates: tuple[Gate, ...], steerable: Steerable, field: str) -> tuple[Gate, ...]:
    """Return gates whose columns, names in traces and order of sites are in order."""
    layout = layout_of(gates)
    check_columns(layout.num_columns, steerable, field)
    owners = {id(leaf.reading): gate for gate in gates for leaf in gate.leaves}
    first: dict[str, Reading] = {}
    for score in layout.scores:
        other = first.setdefault(score.name, score.reading)
        if other is not score.reading:
            unnamed = other if isinstance(score.reading, NamedProbe) else score.reading
            raise RequestError(
                f"{owners[id(unnamed)].where}.name",
                f"two scores would be called {score.name!r} in traces: a probe that the request brings is named after "
                "its gate, GATE, GATE.1 and so on; name the gate differently",
            )
    for gate in gates:
        reads = {leaf.reading.site for leaf in gate.leaves if isinstance(leaf.reading, InlineProbe)}
        check_reads(gate, reads)
        check_this_token(gate, reads, {operation.site for operation in gate.then.operations})
    _check_attenuations([gate for gate in gates if gate.then.attenuate is not None])
    return gates


def _check_attenuations(gates: Sequence[Gate]) -> None:
    """Refuse gates that together could multiply the request's own steering by too much."""
    factor = 1.0
    for gate in gates:
        change = gate.largest_strength * ((gate.then.attenuate or 0.0) - 1)
        factor *= max(1.0, abs(1 + change), abs(1 - change) if gate.pid is not None else 0.0)
        _checked_factor(factor, f"{gate.where}.then.attenuate")


def _old_gate(document: Mapping[Any, Any], index: int, steerable: Steerable, field: str) -> Gate:
    where = f"{field}[{index}]"
    check_keys(document, _OLD_KEYS, where, "a gate of this form")
    scope, conversation = _scope(document, where)
    kind, given = _tagged(document.get("when"), _OLD_WHEN, f"{where}.when")
    sharpness = given.get("sharpness")
    sharpness = 1.0 if sharpness is None else _positive(sharpness, f"{where}.when.sharpness")
    is_soft = kind == "probe" and scope is Scope.THIS
    return Gate(
        name=f"gate{index}",
        when=Always() if kind == "always" else _old_condition(given, steerable, f"{where}.when"),
        then=_old_then(document.get("apply"), steerable, f"{where}.apply"),
        mode=Mode.SIGMOID if is_soft else Mode.BINARY,
        amount=sharpness if is_soft else 1.0,
        scope=scope,
        conversation=conversation,
        where=where,
    )


def _tagged(value: object, kinds: Mapping[str, tuple[str, ...]], where: str) -> tuple[str, Mapping[Any, Any]]:
    """Return the kind of a document that tells it, and the document."""
    if not isinstance(value, Mapping):
        raise RequestError(where, f"expected an object with a 'kind', got {shown(value)}; {PREDECESSOR_FORM}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"{where}.kind", f"expected one of {', '.join(kinds)}, got {shown(kind)}")
    check_keys(value, kinds[kind], where, f"the kind {kind}")
    return kind, value


def _needed(document: Mapping[Any, Any], key: str, where: str) -> Any:
    if document.get(key) is None:
        raise RequestError(f"{where}.{key}", "is missing")
    return document[key]


def _old_condition(document: Mapping[Any, Any], steerable: Steerable, where: str) -> Condition:
    threshold = check_scale(_needed(document, "threshold", where), f"{where}.threshold")
    place = f"{where}.probe"
    kind, given = _tagged(document.get("probe"), _OLD_VECTOR, place)
    if kind == "name":
        probe = check_name(given.get("name"), f"{place}.name", "a probe")
        return Leaf(reading=NamedProbe(probe, f"{place}.name"), threshold=threshold, where=where)
    inner = f"{place}.packed"
    vectors = read_tier(_needed(given, "packed", place), steerable, inner)
    if vectors is None or len(vectors.sites) != 1:
        count = 0 if vectors is None else len(vectors.sites)
        raise RequestError(inner, f"expected one row, which reads at its site; got {count}")
    (site,) = vectors.sites
    Sites(steerable.op_sites, steerable.max_ops_per_site).check((site,), inner)
    return Leaf(
        reading=InlineProbe(site=site, weight=vectors.float32()[0], where=place), threshold=threshold, where=where
    )


def _old_then(value: object, steerable: Steerable, where: str) -> Then:
    kind, given = _tagged(value, _OLD_APPLY, where)
    if kind == "attenuate":
        place = f"{where}.strength"
        return Then(attenuate=_checked_factor(check_scale(_needed(given, "strength", where), place), place))
    strength = given.get("strength")
    scale = 1.0 if strength is None else check_scale(strength, f"{where}.strength")
    place = f"{where}.steer"
    source, vector = _tagged(given.get("steer"), _OLD_VECTOR, place)
    if source == "name":
        return Then(module=ModuleThen(check_name(vector.get("name"), f"{place}.name"), scale, f"{place}.name"))
    inner = f"{place}.packed"
    return Then(operations=_additions(_needed(vector, "packed", place), scale, steerable, inner))
