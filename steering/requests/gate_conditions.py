"""Conditions of gates, read from the client's document into `headgate.steering.gates.gate.Condition`.

None is the same as an absent key. Depth and number of conditions are compared with their limits before what is inside
of them is read, and the numbers of a comparison before its vector is converted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import Site
from headgate.steering.gates.gate import (
    Always,
    Condition,
    FeatureReading,
    Group,
    InlineProbe,
    Leaf,
    NamedProbe,
    Negation,
    Reading,
)
from headgate.steering.gates.layout import COLUMNS_PER_GATE
from headgate.steering.programs.gate_codes import GATE_COLUMNS, LEAF_COLUMNS, NODE_COLUMNS, SCORE_COLUMNS, Combine, Pool
from headgate.steering.programs.operations import Float32Row, ModuleVector
from headgate.steering.requests.feature_fields import check_has_saes, read_feature
from headgate.steering.requests.op_documents import Sites, Vectors, is_reference, read_reference, read_site
from headgate.steering.requests.vector_forms import check_scale
from headgate.steering.vectors.phase_vectors import Steerable, check_name

MAX_DEPTH = 8
"""Conditions in each other: a comparison alone has the depth 1."""

CONDITION_FORM = (
    '"always", {"probe": name or {"at", "weight", "bias"}, "above" or "below", "hysteresis", "pool"}, '
    '{"sae", "feature", "above" or "below"}, {"cosine": vector, "at", "above" or "below"}, {"any": [...]}, '
    '{"all": [...]} or {"not": ...}'
)

_NUMBERS = ("above", "below", "hysteresis", "pool")
_KEYS: dict[str, tuple[str, ...]] = {
    "probe": ("probe", *_NUMBERS),
    "sae": ("sae", "feature", *_NUMBERS),
    "cosine": ("cosine", "at", *_NUMBERS),
    "any": ("any",),
    "all": ("all",),
    "not": ("not",),
}
"""The keys of each kind of condition, by the key that tells the kind."""

_KNOWN = frozenset(key for keys in _KEYS.values() for key in keys)
_GROUPS = {"any": Combine.ANY, "all": Combine.ALL}
_POOLS = {"token": Pool.TOKEN, "last_prompt": Pool.LAST_PROMPT, "prompt_mean": Pool.PROMPT_MEAN}
_PROBE_KEYS = ("at", "weight", "bias")
_REGISTERED_KEYS = ("kind", "hidden", "classes")


class Conditions:
    """Reads the conditions of the gates of one request, and counts their columns.

    Args:
        steerable: The model and its limits.
        vectors: Of the request.
    """

    def __init__(self, steerable: Steerable, vectors: Vectors) -> None:
        self._steerable = steerable
        self._sites = Sites(steerable.op_sites, steerable.max_ops_per_site)
        self._vectors = vectors
        self._num_columns = 0

    def read(self, value: object, where: str, depth: int = 1, *, is_controlled: bool = False) -> Condition:
        """Read a condition.

        Args:
            value: In one of the forms of `CONDITION_FORM`.
            where: Its path.
            depth: Of it in other conditions, from 1 on.
            is_controlled: A control loop reads its score: it is one without a threshold.

        Raises:
            RequestError: Naming the field that is wrong.
        """
        if isinstance(value, str) and value == "always" and not is_controlled:
            self._take(NODE_COLUMNS, where)
            return Always()
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
            return Group(
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
        pool, alpha = _pool(document.get("pool"), f"{where}.pool")
        read = {"probe": self._probe, "sae": self._feature, "cosine": self._cosine}[kind]
        return Leaf(
            reading=read(document, where),
            is_below=is_below,
            threshold=threshold,
            hysteresis=hysteresis,
            pool=pool,
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
        return site

    def _vector(self, document: Mapping[Any, Any], key: str, site: Site, where: str) -> Float32Row | ModuleVector:
        inner, value = f"{where}.{key}", document.get(key)
        if value is None:
            raise RequestError(inner, "is missing: a vector, or the name of a module that has one")
        if is_reference(value):
            return read_reference(value, site, inner)
        row = self._vectors.read(value, inner)
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


def check_keys(document: Mapping[Any, Any], allowed: Collection[str], where: str, what: str) -> None:
    """Check that a document has no other keys.

    Raises:
        RequestError: Naming the first that it should not have.
    """
    for key in document:
        if key not in allowed:
            name = key if isinstance(key, str) else shown(key)
            raise RequestError(f"{where}.{name}", f"unknown key; {what} has {', '.join(allowed)}")


def _kind_of(value: object, where: str) -> tuple[str, Mapping[Any, Any]]:
    """Return the key of `_KEYS` that tells the kind of a condition, and the condition."""
    if value is None:
        raise RequestError(where, f"is missing; expected {CONDITION_FORM}")
    if not isinstance(value, Mapping) or not 0 < len(value) <= len(_KNOWN):
        raise RequestError(where, f"expected {CONDITION_FORM}; got {shown(value)}")
    kinds = [key for key in _KEYS if value.get(key) is not None]
    if len(kinds) > 1:
        raise RequestError(f"{where}.{kinds[1]}", f"excludes {kinds[0]!r}: a condition has one of {', '.join(_KEYS)}")
    if not kinds:
        check_keys(value, _KNOWN, where, "a condition")
        raise RequestError(where, f"has none of the keys {', '.join(_KEYS)}; expected {CONDITION_FORM}")
    given = {key: None for key in value if value[key] is not None or key not in _KNOWN}
    check_keys(given, _KEYS[kinds[0]], where, f"a condition with {kinds[0]!r}")
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


def _pool(value: object, where: str) -> tuple[Pool, float]:
    """Return over which rows to pool, and the weight of a row in `Pool.EMA`."""
    if value is None:
        return Pool.TOKEN, 0.0
    if isinstance(value, str) and value in _POOLS:
        return _POOLS[value], 0.0
    if not isinstance(value, Mapping) or set(value) != {"ema"}:
        raise RequestError(where, f'expected one of {", ".join(_POOLS)} or {{"ema": alpha}}; got {shown(value)}')
    alpha = check_scale(value["ema"], f"{where}.ema")
    if not 0 < alpha <= 1:
        raise RequestError(f"{where}.ema", f"expected a weight above 0, and 1 at most; got {alpha:g}")
    return Pool.EMA, alpha
