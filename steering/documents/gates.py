"""A request's gates, read from its fields: ``steering_gates``, or ``steering`` in the form of `PREDECESSOR_FORM`.

Nothing here knows the server's probes, modules and SAEs: what depends on their sites is left to the engine core. None
is the same as an absent key. Names, scopes and strengths of all gates are read before the first vector is converted.

Depth and number of conditions are compared with their limits before what is inside of them is read, and the numbers of
a comparison before its vector is converted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
import yaml  # type: ignore[import-untyped]

from headgate.capture.schema.errors import ConfigError, RequestError, check_keys, shown
from headgate.capture.schema.sites import FINAL_NORM_SITE, Site
from headgate.steering.documents.features import (
    Edits,
    check_has_saes,
    read_edits,
    read_feature,
)
from headgate.steering.documents.operations import (
    KeptRows,
    Operations,
    OpVector,
    Sites,
    VectorReader,
    check_lowers,
    is_reference,
    read_gated,
    read_reference,
    read_site,
)
from headgate.steering.documents.schema import Count, Name, one_of
from headgate.steering.documents.vectors import Vectors, check_in_stream, check_scale, read_rows, read_tier
from headgate.steering.gates.gate import (
    COLUMNS_PER_GATE,
    FIELD,
    PID_KEYS,
    Always,
    AppliesTo,
    Condition,
    ConditionGroup,
    FeatureReading,
    Gate,
    GatePhase,
    InlineProbe,
    Leaf,
    ModuleThen,
    NamedProbe,
    Negation,
    Pid,
    Reading,
    Rule,
    Then,
    check_reads,
    check_this_token,
    columns_of,
    fields_of_rule,
    num_columns,
)
from headgate.steering.programs.codes import (
    GATE_COLUMNS,
    LEAF_COLUMNS,
    NODE_COLUMNS,
    SCORE_COLUMNS,
    Combine,
    GateScope,
    Mode,
    ScorePooling,
)
from headgate.steering.programs.operations import Float32Row, Method, ModuleVector, Operation
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable, check_name
from headgate.steering.vectors.sums import LIMIT, MAX_STRENGTH

GATES, PREDECESSOR, RULES = "steering_gates", "steering", "steering_rules"
"""Fields of a request."""

MAX_DEPTH = 8
"""Conditions in each other: a comparison alone has the depth 1."""

CONDITION_FORM = (
    '"always", "prompt", "generated", {"probe": name or {"at", "weight", "bias"}, "above" or "below", "hysteresis", '
    '"pool"}, '
    '{"sae", "feature", "above" or "below"}, {"cosine": vector, "at", "above" or "below"}, {"any": [...]}, '
    '{"all": [...]} or {"not": ...}'
)

_NUMBERS = ("above", "below", "hysteresis", "pool")
_CONDITION_KEYS: dict[str, tuple[str, ...]] = {
    "probe": ("probe", *_NUMBERS),
    "sae": ("sae", "feature", *_NUMBERS),
    "cosine": ("cosine", "at", *_NUMBERS),
    "any": ("any",),
    "all": ("all",),
    "not": ("not",),
}
"""The keys of each kind of condition, by the key that names the kind."""

_KNOWN = frozenset(key for keys in _CONDITION_KEYS.values() for key in keys)
_PHASES = {phase.value: phase for phase in GatePhase}
_GROUPS = {"any": Combine.ANY, "all": Combine.ALL}
_POOLINGS = {each.name.lower(): each for each in ScorePooling if each is not ScorePooling.EMA}
_PROBE_KEYS = ("at", "weight", "bias")
_REGISTERED_KEYS = ("kind", "hidden", "classes")


class ConditionReader:
    """Reads the conditions of the gates of one request, and counts their columns.

    Args:
        steerable: The model and its limits.
        vectors: Vectors of the request.
    """

    def __init__(self, steerable: Steerable, vectors: VectorReader) -> None:
        self._steerable = steerable
        self._sites = Sites(steerable.op_sites, steerable.max_ops_per_site)
        self._vectors = vectors
        self._num_columns = 0

    def read(self, value: object, where: str, depth: int = 1, *, is_controlled: bool = False) -> Condition:
        """Read a condition.

        Args:
            value: In one of the forms of `CONDITION_FORM`.
            where: Its path.
            depth: Its depth in other conditions, from 1 on.
            is_controlled: A control loop reads its score: it is one without a threshold.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        if isinstance(value, str) and value in _PHASES and not is_controlled:
            always = Always(_PHASES[value])
            self._take(num_columns(always), where)
            return always
        kind, document = _kind_of(value, where)
        if is_controlled:
            _check_controlled(document, kind, where)
        if depth > MAX_DEPTH:
            raise RequestError(where, f"is too deep: conditions stand in each other {MAX_DEPTH} times at most")
        if kind in _GROUPS:
            listed = document[kind]
            inner = f"{where}.{kind}"
            if not isinstance(listed, list | tuple) or not listed:
                raise RequestError(inner, f"expected a non-empty list of conditions, got {shown(listed)}")
            self._take(NODE_COLUMNS * (len(listed) - 1), inner)
            return ConditionGroup(
                _GROUPS[kind],
                tuple(self.read(each, f"{inner}[{index}]", depth + 1) for index, each in enumerate(listed)),
            )
        if kind == "not":
            self._take(NODE_COLUMNS, where)
            return Negation(self.read(document[kind], f"{where}.not", depth + 1))
        self._take(LEAF_COLUMNS, where)
        return self._leaf(document, kind, where, is_controlled=is_controlled)

    def _take(self, columns: int, where: str) -> None:
        self._num_columns += columns
        check_columns(self._num_columns, self._steerable, where)

    def _leaf(self, document: Mapping[Any, Any], kind: str, where: str, *, is_controlled: bool) -> Leaf:
        has_own = is_controlled or isinstance(document.get("probe"), str)
        is_below, threshold = _threshold(document, where, has_own=has_own)
        hysteresis = _number(document, "hysteresis", 0.0, where)
        if hysteresis < 0:
            raise RequestError(f"{where}.hysteresis", f"must not be negative, got {hysteresis:g}")
        pooling, alpha = _pooling(document.get("pool"), f"{where}.pool")
        read = {"probe": self._probe, "sae": self._feature, "cosine": self._cosine}[kind]
        return Leaf(
            reading=read(document, where),
            is_below=is_below,
            threshold=threshold,
            hysteresis=hysteresis,
            pooling=pooling,
            alpha=alpha,
            where=where,
        )

    def _probe(self, document: Mapping[Any, Any], leaf: str) -> Reading:
        given, where = document["probe"], f"{leaf}.probe"
        if isinstance(given, str):
            return NamedProbe(check_name(given, where, "a probe"), where)
        if not isinstance(given, Mapping):
            raise RequestError(
                where, f'expected the name of a probe, or {{"at", "weight", "bias"}}; got {shown(given)}'
            )
        for key in given:
            if key in _REGISTERED_KEYS:
                raise RequestError(
                    f"{where}.{key}",
                    "is for registered probes; one that a request brings is linear, and has at, weight and bias. "
                    "Register an MLP with POST /v1/steering/probes/register, or --probes NAME=PATH, and name it here; "
                    'a cosine is the condition {"cosine": vector, "at"}',
                )
        check_keys(given, _PROBE_KEYS, where, "a probe")
        site = self._site(given, where)
        bias = _number(given, "bias", 0.0, where)
        weight = self._vector(given, "weight", site, where)
        return InlineProbe(site=site, weight=weight, bias=bias, where=where)

    def _feature(self, document: Mapping[Any, Any], where: str) -> Reading:
        check_has_saes(self._steerable, f"{where}.sae")
        name = check_name(document["sae"], f"{where}.sae", "an SAE")
        if document.get("feature") is None:
            raise RequestError(f"{where}.feature", "is missing: the index of a feature of the SAE")
        return FeatureReading(name, read_feature(document["feature"], f"{where}.feature"), where)

    def _cosine(self, document: Mapping[Any, Any], where: str) -> Reading:
        site = self._site(document, where)
        weight = self._vector(document, "cosine", site, where)
        return InlineProbe(site=site, weight=weight, is_cosine=True, where=where)

    def _site(self, document: Mapping[Any, Any], where: str) -> Site:
        inner = f"{where}.at"
        if document.get("at") is None:
            raise RequestError(inner, "is missing: the site that is read, such as 12.post_mlp")
        site = read_site(document["at"], inner)
        self._sites.check((site,), inner)
        if why := self._steerable.why_unread(site):
            raise RequestError(inner, why)
        return site

    def _vector(self, document: Mapping[Any, Any], key: str, site: Site, where: str) -> Float32Row | ModuleVector:
        inner, value = f"{where}.{key}", document.get(key)
        if value is None:
            raise RequestError(inner, "is missing: a vector, or the name of a module that has one")
        if is_reference(value):
            return read_reference(value, site, inner)
        check_in_stream(value, (site,), inner)
        row = self._vectors.read(value, self._steerable.width(site), inner)
        if not row.any():
            raise RequestError(inner, "is zero in float32, so every row would have one score")
        return row


def check_columns(count: int, steerable: Steerable, where: str) -> None:
    """Check that numbers which gates keep for each row fit.

    Raises:
        RequestError: If they do not.
    """
    limit = COLUMNS_PER_GATE * steerable.max_gates
    if count > limit:
        alone = SCORE_COLUMNS + LEAF_COLUMNS + GATE_COLUMNS
        further = SCORE_COLUMNS + LEAF_COLUMNS + NODE_COLUMNS
        raise RequestError(
            where,
            f"with it, the gates of the request take {count} numbers for each row, {limit} fit: {COLUMNS_PER_GATE} for "
            f"each of {steerable.max_gates} gates; a gate of one comparison takes {alone}, each further comparison "
            f"{further}, and one less where it shares its probe; the operator sets --max-steering-gates",
        )


def _kind_of(value: object, where: str) -> tuple[str, Mapping[Any, Any]]:
    """Return the key of `_CONDITION_KEYS` that names the kind of a condition, and the condition."""
    if value is None:
        raise RequestError(where, f"is missing; expected {CONDITION_FORM}")
    if not isinstance(value, Mapping) or not 0 < len(value) <= len(_KNOWN):
        raise RequestError(where, f"expected {CONDITION_FORM}; got {shown(value)}")
    kinds = [key for key in _CONDITION_KEYS if value.get(key) is not None]
    if len(kinds) > 1:
        raise RequestError(
            f"{where}.{kinds[1]}", f"excludes {kinds[0]!r}: a condition has one of {', '.join(_CONDITION_KEYS)}"
        )
    if not kinds:
        check_keys(value, _KNOWN, where, "a condition")
        raise RequestError(where, f"has none of the keys {', '.join(_CONDITION_KEYS)}; expected {CONDITION_FORM}")
    given = {key: None for key in value if value[key] is not None or key not in _KNOWN}
    check_keys(given, _CONDITION_KEYS[kinds[0]], where, f"a condition with {kinds[0]!r}")
    return kinds[0], value


def _threshold(document: Mapping[Any, Any], where: str, *, has_own: bool) -> tuple[bool, float | None]:
    """Return whether a comparison is `below`, and its threshold; None for that of the probe itself, if it `has_own`.

    A key that is null says the direction where no other does.
    """
    given = [key for key in ("above", "below") if document.get(key) is not None]
    if len(given) > 1:
        raise RequestError(f"{where}.below", "excludes 'above': give two conditions in 'any' or 'all'")
    if given:
        return given[0] == "below", check_scale(document[given[0]], f"{where}.{given[0]}")
    if not has_own:
        raise RequestError(f"{where}.above", "is missing: the threshold; or 'below'")
    return "below" in document and "above" not in document, None


def _check_controlled(document: Mapping[Any, Any], kind: str, where: str) -> None:
    """Check that a condition is a score alone, as a control loop reads it.

    Raises:
        RequestError: Naming the key that it should not have.
    """
    if kind not in ("probe", "sae", "cosine"):
        raise RequestError(f"{where}.{kind}", "a control loop reads one score: a probe, a feature or a cosine")
    for key in ("above", "below", "hysteresis"):
        if document.get(key) is not None:
            raise RequestError(f"{where}.{key}", "a control loop has a setpoint and no threshold")
    if document.get("pool") in ("last_prompt", "prompt_mean"):
        raise RequestError(f"{where}.pool", 'a control loop reads each row: expected "token" or {"ema": alpha}')


def _number(document: Mapping[Any, Any], key: str, default: float, where: str) -> float:
    value = document.get(key)
    return default if value is None else check_scale(value, f"{where}.{key}")


def _pooling(value: object, where: str) -> tuple[ScorePooling, float]:
    """Return over which rows to pool, and the weight of a row in `ScorePooling.EMA`."""
    if value is None:
        return ScorePooling.TOKEN, 0.0
    if isinstance(value, str) and value in _POOLINGS:
        return _POOLINGS[value], 0.0
    if not isinstance(value, Mapping) or set(value) != {"ema"}:
        raise RequestError(where, f'expected one of {", ".join(_POOLINGS)} or {{"ema": alpha}}; got {shown(value)}')
    alpha = check_scale(value["ema"], f"{where}.ema")
    if not 0 < alpha <= 1:
        raise RequestError(f"{where}.ema", f"expected a weight above 0, and 1 at most; got {alpha:g}")
    return ScorePooling.EMA, alpha


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
    "this_token": GateScope.THIS,
    "next_token": GateScope.NEXT,
    "next_step": GateScope.NEXT,
    "rest_of_request": GateScope.REST,
    _CONVERSATION: GateScope.REST,
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
    vectors = VectorReader(KeptRows(), steerable.directions)
    conditions = ConditionReader(steerable, vectors)
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


def read_predecessor(value: object, steerable: Steerable) -> tuple[Gate, ...]:
    """Read a list of gates in the form of `PREDECESSOR_FORM`.

    Args:
        value: A non-empty list of at most `Steerable.max_gates` documents.
        steerable: The model and its limits.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    documents = _documents(value, steerable, PREDECESSOR)
    gates = tuple(_old_gate(document, index, steerable) for index, document in enumerate(documents))
    return _checked(gates, steerable, PREDECESSOR)


class _Head(NamedTuple):
    """The parts of a gate that hold no vectors."""

    name: str
    mode: Mode
    amount: float
    pid: Pid | None
    scope: GateScope
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
    if pid is not None and scope is GateScope.REST:
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
    pid = msgspec.convert(given, Pid)
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


def _scope(document: Mapping[Any, Any], where: str) -> tuple[GateScope, str | None]:
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


def read_then(value: object, steerable: Steerable, vectors: VectorReader, where: str) -> Then:
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
    rows = read.by_site(steerable)
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
    columns = columns_of(gates)
    check_columns(columns.num_columns, steerable, field)
    owners = {id(leaf.reading): gate for gate in gates for leaf in gate.leaves}
    first: dict[str, Reading] = {}
    for score in columns.scores:
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


def _old_gate(document: Mapping[Any, Any], index: int, steerable: Steerable) -> Gate:
    where = f"{PREDECESSOR}[{index}]"
    check_keys(document, _OLD_KEYS, where, "a gate of this form")
    scope, conversation = _scope(document, where)
    kind, given = _tagged(document.get("when"), _OLD_WHEN, f"{where}.when")
    sharpness = given.get("sharpness")
    sharpness = 1.0 if sharpness is None else _positive(sharpness, f"{where}.when.sharpness")
    is_soft = kind == "probe" and scope is GateScope.THIS
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
    """Return the kind that a document names, and the document."""
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
    if why := steerable.why_unread(site):
        raise RequestError(inner, why)
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


class Proportional(msgspec.Struct, forbid_unknown_fields=True):
    """A strength that grows with the score up to a gain."""

    proportional: float


class Sigmoid(msgspec.Struct, forbid_unknown_fields=True):
    """A strength between 0 and 1, with its sharpness."""

    sigmoid: float


class PidDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A control loop, which holds a score."""

    pid: Pid


class Ema(msgspec.Struct, forbid_unknown_fields=True):
    """A running average of scores, with the weight of each new one."""

    ema: float


class BroughtProbe(msgspec.Struct, forbid_unknown_fields=True):
    """A linear probe that is not registered.

    Attributes:
        at: The site that it reads.
        weight: A vector, or the name of a module, whose vector at the site it is.
    """

    at: str
    weight: OpVector
    bias: float | None = None


class Comparison(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A score of each row and its threshold: above or below it. A control loop, whose strength is pid, has none.

    Attributes:
        above: The threshold; a registered probe's own if there is neither.
        below: The threshold of a condition that holds below it.
        hysteresis: By how much the score must go back beyond the threshold.
        pool: Over which rows: the row alone if absent.
    """

    above: float | None = None
    below: float | None = None
    hysteresis: float | None = None
    pool: Annotated[Any, one_of(Literal["token", "last_prompt", "prompt_mean"], Ema, None)] = None


class ProbeCondition(Comparison):
    """The score of a probe: a registered one by its name, or one that comes along."""

    probe: Annotated[Any, one_of(str, BroughtProbe)]


class FeatureCondition(Comparison):
    """The activation of a feature of an SAE of the server."""

    sae: str
    feature: Count


class CosineCondition(Comparison):
    """The cosine of the row and a vector."""

    cosine: OpVector
    at: str


RowPhase = Literal["always", "prompt", "generated"]
_Nested = Annotated[
    Any,
    one_of(RowPhase, ProbeCondition, FeatureCondition, CosineCondition, dict[str, Any]),
    msgspec.Meta(description="A condition of any form."),
]


class AnyCondition(msgspec.Struct, forbid_unknown_fields=True):
    """Holds if one of the conditions does."""

    any: Annotated[list[_Nested], msgspec.Meta(min_length=1)]


class AllCondition(msgspec.Struct, forbid_unknown_fields=True):
    """Holds if all conditions do."""

    all: Annotated[list[_Nested], msgspec.Meta(min_length=1)]


class NotCondition(msgspec.Struct, forbid_unknown_fields=True, rename={"condition": "not"}):
    """Holds if the condition does not."""

    condition: _Nested


class RuleEffect(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The effect: exactly one of module, vectors, ops and features.

    Attributes:
        module: Name of a registered module.
        scale: Of the module alone.
        vectors: As steering_vectors of a request.
        ops: Without positions and source.
    """

    module: Name | None = None
    scale: float | None = None
    vectors: Vectors = None
    ops: Annotated[Any, one_of(Operations)] = None
    features: Annotated[Any, one_of(Edits)] = None


When = Annotated[
    Any,
    one_of(
        *(RowPhase, ProbeCondition, FeatureCondition, CosineCondition),
        *(AnyCondition, AllCondition, NotCondition),
    ),
]
Whom = Literal["all", "opt_in", "opt_out"]
Strength = Annotated[Any, one_of(Literal["binary"], Proportional, Sigmoid, PidDocument)]
RuleScope = Literal["this_token", "next_token", "rest_of_request"]


class RuleDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A rule: a gate with a name, and the requests that it acts on.

    Attributes:
        applies_to: opt_in: requests whose steering_rules name it; opt_out: beside these all without that field.
        when: The condition, as of a gate in steering_gates.
        then: As of a gate, without attenuate: module, vectors, ops or features.
    """

    name: Name
    applies_to: Whom
    when: When
    then: Annotated[Any, one_of(Literal["observe"], RuleEffect)]
    strength: Annotated[Any, one_of(Strength, None)] = "binary"
    scope: RuleScope | None = "this_token"


RULE_FIELDS = RuleDocument.__struct_fields__[1:]
"""The fields of a rule's document beside its ``name``."""

_MAX_NAMED = 1024
_ANY = 64
"""Gates that one list may have where the columns of rules are the limit."""


def read_rule(name: object, document: Mapping[Any, Any], steerable: Steerable) -> Rule:
    """Read a rule.

    Args:
        name: Name of the rule.
        document: Its fields: `RULE_FIELDS`.
        steerable: The model and its limits.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if not steerable.max_rules:
        raise RequestError(
            "name", "rules are off on this server; the operator sets --max-steering-rules and --steering-op-sites"
        )
    name = check_name(name, "name", "a rule")
    check_keys(document, RULE_FIELDS, "", "a rule")
    applies_to = _applies_to(document.get("applies_to"))
    _check_supported(document)
    gate = {key: document[key] for key in RULE_FIELDS[1:] if key in document}
    with fields_of_rule():
        (read,) = read_gates([{"name": name, **gate}], replace(steerable, max_gates=_ANY), FIELD)
    count, limit = columns_of([read]).num_columns, COLUMNS_PER_GATE * steerable.max_rules
    if count > limit:
        raise RequestError(
            "when",
            f"takes {count} numbers for each row, but all rules together have {limit}: {COLUMNS_PER_GATE} for each of "
            f"{steerable.max_rules}; the operator sets --max-steering-rules",
        )
    return Rule(gate=read, applies_to=applies_to)


def read_rules_document(document: object, steerable: Steerable) -> Rule:
    """Read one rule of a file: an object with its ``name`` and `RULE_FIELDS`.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    if not isinstance(document, Mapping):
        raise RequestError("rule", f"expected an object with name, {', '.join(RULE_FIELDS)}; got {shown(document)}")
    fields = {key: value for key, value in document.items() if key != "name"}
    if document.get("name") is None:
        raise RequestError("name", "is missing")
    return read_rule(document["name"], fields, steerable)


def read_selection(value: object) -> tuple[str, ...] | None:
    """Read the rules that a request names; None if it does not select among rules.

    Raises:
        RequestError: If they are no list of names, each once.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > _MAX_NAMED:
        raise RequestError(RULES, f"expected a list of at most {_MAX_NAMED} names of rules, got {shown(value)}")
    return tuple(dict.fromkeys(check_name(name, f"{RULES}[{index}]", "a rule") for index, name in enumerate(value)))


def _applies_to(value: object) -> AppliesTo:
    known = [each.value for each in AppliesTo]
    if not isinstance(value, str) or value not in known:
        reported = "is missing" if value is None else f"got {shown(value)}"
        raise RequestError("applies_to", f"{reported}; expected one of {', '.join(known)}")
    return AppliesTo(value)


def _check_supported(document: Mapping[Any, Any]) -> None:
    if document.get("scope") == "rest_of_conversation":
        raise RequestError(
            "scope", "rules do not follow conversations; expected this_token, next_token or rest_of_request"
        )
    then = document.get("then")
    if isinstance(then, Mapping):
        if then.get("attenuate") is not None:
            raise RequestError("then.attenuate", "is for gates of requests: a rule has no static steering of its own")
        check_keys(then, ("module", "scale", "vectors", "ops", "features"), "then", "the effect of a rule")


def load_rules(path: Path, steerable: Steerable) -> tuple[Rule, ...]:
    """Read a file of rules.

    Raises:
        ConfigError: Naming the file, and the rule and field that is wrong.
    """
    try:
        documents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"steering.rules_file (--steering-rules): {path}: cannot be read: {error}") from error
    if not isinstance(documents, list):
        raise ConfigError(
            f"steering.rules_file (--steering-rules): {path}: expected a list of rules, got {shown(documents)}"
        )
    rules: dict[str, Rule] = {}
    for index, document in enumerate(documents):
        try:
            rule = read_rules_document(document, steerable)
        except RequestError as error:
            raise ConfigError(f"steering.rules_file (--steering-rules): {path}: [{index}].{error}") from error
        if rule.name in rules:
            raise ConfigError(
                f"steering.rules_file (--steering-rules): {path}: [{index}].name: {rule.name!r} is the name of an "
                "earlier rule, too"
            )
        rules[rule.name] = rule
    return tuple(rules.values())
