"""The rules of one engine core: their columns, their programs, and the requests that they act on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from headgate.capture.schema.errors import RequestError
from headgate.steering.core.admission import Demand, Load
from headgate.steering.gates.gate import (
    WHO_KNOWS_RULES,
    Always,
    Condition,
    ConditionGroup,
    FeatureReading,
    Gate,
    GateColumns,
    NamedProbe,
    Negation,
    Reading,
    Rule,
    Then,
    columns_of,
    rule_key,
)
from headgate.steering.gates.trace import GateSource
from headgate.steering.programs.codes import GateScope, Mode, ScorePooling
from headgate.steering.programs.operations import ModuleVector
from headgate.steering.programs.program import Program

_PREFIX = b"headgate rule\n"
"""Keeps the keys of rules apart from those of vectors and programs."""

_SCOPES = {GateScope.THIS: "this_token", GateScope.NEXT: "next_token", GateScope.REST: "rest_of_request"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptRule:
    """A registered rule.

    Attributes:
        rule: As it was registered.
        prefill: Its program at prompt positions.
        decode: Its program at generated positions.
        source: Its columns, and what it turns on.
        sha256: Hex, of its content, whatever its columns are.
    """

    rule: Rule
    prefill: Program
    decode: Program
    source: GateSource
    sha256: str

    @property
    def columns(self) -> GateColumns:
        """Its columns."""
        return self.source.columns

    @property
    def name(self) -> str:
        """The rule's."""
        return self.rule.name

    @property
    def first(self) -> int:
        """The first of its columns."""
        columns = [*(score.column for score in self.columns.scores), *(gate.first for gate in self.columns.gates)]
        return min(columns)

    @property
    def end(self) -> int:
        """The column after its last one."""
        return self.first + self.columns.num_columns

    @property
    def demand(self) -> Demand:
        """The slots that its programs hold while it is registered."""
        return Demand(*(Load(program.key, program.num_rows) for program in (self.prefill, self.decode)))

    def block_keys(self, num_prompt: int) -> tuple[bytes, bytes] | None:
        """Return the keys of what it makes of KV in both phases; None if it only observes.

        Args:
            num_prompt: Tokens of the request's prompt. Those before a decision at its end are not steered, and gates
                act on generated rows at more sites than on others.
        """
        if self.rule.gate.then.observes:
            return None
        length = num_prompt.to_bytes(8, "little")
        content = _PREFIX + bytes.fromhex(self.sha256)
        prefill = content + (length if self.rule.gate.is_pooled_over_prompt else b"")
        return hashlib.sha256(prefill).digest(), hashlib.sha256(content + length + b"decode").digest()

    def to_worker(self) -> dict[str, Any]:
        """Return plain values for the workers."""
        return {
            "name": self.name,
            "applies_to": self.rule.applies_to.value,
            "columns": [self.first, self.end],
            "prefill": self.prefill.to_wire(),
            "decode": self.decode.to_wire(),
        }

    def described(self) -> dict[str, Any]:
        """Return plain values for the list of rules."""
        gate = self.rule.gate
        return {
            "name": self.name,
            "applies_to": self.rule.applies_to.value,
            "when": _when(gate.when),
            "then": _then(gate.then),
            "scope": _SCOPES[gate.scope],
            "strength": _strength(gate),
            "probes": [score.name for score in self.columns.scores],
            "sites": list(dict.fromkeys(site.name for site in self.decode.sites)),
            "observes": gate.then.observes,
            "sha256": self.sha256,
        }


def kept_rule(rule: Rule, programs: tuple[Program, Program], bare: tuple[Program, Program], first: int) -> KeptRule:
    """Make a registered rule.

    Args:
        rule: As it was read.
        programs: Programs of both phases, with its own columns.
        bare: The same with columns from 0 on, for the key of its content.
        first: The first of its columns.
    """
    digest = hashlib.sha256(f"{rule.applies_to.value}\n{rule.gate.then.observes}\n".encode())
    for program in bare:
        digest.update(program.key)
    return KeptRule(
        rule=rule,
        prefill=programs[0],
        decode=programs[1],
        source=GateSource.of(columns_of([rule.gate], first), programs),
        sha256=digest.hexdigest(),
    )


MAX_SELECTIONS = 256
"""Sets of rules, as requests name them, for which it is remembered which rules act."""


class RuleKeys(NamedTuple):
    """The rules that act on a request, in terms of content.

    Attributes:
        prefill: Key of what they make of KV in the prefill phase; None if none acts but to observe.
        decode: The same for the decode phase.
        has_state: Whether a rule's strength at a row depends on other rows: none may be read from a cache.
    """

    prefill: bytes | None = None
    decode: bytes | None = None
    has_state: bool = False


NO_RULES = RuleKeys()


class _Rules(NamedTuple):
    """The rules of one moment.

    Attributes:
        by_name: In the order of the names.
        by_selection: Rules that act on requests with a selection; the last `MAX_SELECTIONS` selections asked for, at
            most.
    """

    by_name: Mapping[str, KeptRule]
    by_selection: dict[frozenset[str] | None, tuple[KeptRule, ...]]


class _RuledRequest(NamedTuple):
    selection: frozenset[str] | None
    num_prompt: int


class RuleRegistry:
    """Rules by name, and what each request selects of them. Any thread reads; the engine thread alone changes rules.

    Args:
        first_column: The first column that is theirs.
        num_columns: How many there are.
        max_rules: How many rules may be registered.
    """

    def __init__(self, first_column: int = 0, num_columns: int = 0, max_rules: int = 0) -> None:
        self._first = first_column
        self._num_columns = num_columns
        self._max_rules = max_rules
        self._now = _Rules({}, {})
        self._requests: dict[str, _RuledRequest] = {}
        self._others: tuple[str, ...] = ()

    def reserve(self, names: Iterable[str]) -> None:
        """Let requests select others beside rules by these names, which no rule can have."""
        self._others = tuple(names)

    def is_reserved(self, name: str) -> bool:
        """Whether `reserve` was given a name."""
        return name in self._others

    def all(self) -> tuple[KeptRule, ...]:
        """Return all rules, in the order of their names, in which they act."""
        return tuple(self._now.by_name.values())

    def find(self, name: str) -> KeptRule | None:
        """Return the rule of that name, if there is one."""
        return self._now.by_name.get(name)

    def place(self, rule: Rule) -> int:
        """Return the first of the columns that a rule can have: other rules keep theirs.

        Raises:
            RequestError: If there is no room.
        """
        others = sorted((each for each in self.all() if each.name != rule.name), key=lambda each: each.first)
        if len(others) >= self._max_rules:
            raise RequestError(
                "name",
                f"{len(others)} rules are registered, the most that may; unregister one, or raise --max-steering-rules",
            )
        count, at = columns_of([rule.gate]).num_columns, self._first
        for other in others:
            if other.first - at >= count:
                break
            at = other.end
        if at + count > self._first + self._num_columns:
            raise RequestError(
                "when",
                f"takes {count} numbers for each row, and no such gap is free among the {self._num_columns} of all "
                "rules; unregister one, or raise --max-steering-rules",
            )
        return at

    def with_rule(self, rule: KeptRule) -> dict[str, KeptRule]:
        """Return the rules with one, in place of an earlier one of its name, for `put`."""
        return dict(sorted({**self._now.by_name, rule.name: rule}.items()))

    def without(self, name: str) -> dict[str, KeptRule]:
        """Return the rules without one, for `put`."""
        return {other: rule for other, rule in self._now.by_name.items() if other != name}

    def put(self, rules: Mapping[str, KeptRule]) -> None:
        """Make `rules` the registered ones."""
        self._now = _Rules(rules, {})

    def names(self) -> list[dict[str, Any]]:
        """Return plain values for front ends, each with its key among registered names as ``name``."""
        return [{"name": rule_key(name)} for name in (*self._now.by_name, *self._others)]

    def add(self, req_id: str, selection: tuple[str, ...] | None, num_prompt: int) -> None:
        """Add a request, whether anything steers it or not.

        Raises:
            RequestError: If it names a rule that is not there.
        """
        for index, name in enumerate(selection or ()):
            if name not in self._now.by_name and name not in self._others:
                raise RequestError(f"steering_rules[{index}]", f"unknown rule {name!r}; {WHO_KNOWS_RULES}")
        if self._max_rules:
            self._requests[req_id] = _RuledRequest(None if selection is None else frozenset(selection), num_prompt)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(req_id, None)

    def acting(self, req_id: str) -> tuple[KeptRule, ...]:
        """Return the rules that act on a request now, in the order in which they do."""
        now = self._now
        if not now.by_name or (request := self._requests.get(req_id)) is None:
            return ()
        found = now.by_selection.get(request.selection)
        if found is None:
            rules = now.by_name.values()
            found = tuple(each for each in rules if each.rule.applies_to.acts(each.name, request.selection))
            if len(now.by_selection) >= MAX_SELECTIONS:
                now.by_selection.clear()  # clients choose them: 20 rules have a million
            now.by_selection[request.selection] = found
        return found

    def num_prompt(self, req_id: str) -> int:
        """Return the tokens of the prompt of a request that was added."""
        return self._requests[req_id].num_prompt

    def keys(self, req_id: str) -> RuleKeys:
        """Return the content keys of the rules that act on a request now."""
        acting = self.acting(req_id)
        if not acting:
            return RuleKeys()
        request = self._requests[req_id]
        pairs = [pair for each in acting if (pair := each.block_keys(request.num_prompt)) is not None]
        has_state = any(each.rule.gate.has_state for each in acting)
        return RuleKeys(_joined(one for one, _ in pairs), _joined(other for _, other in pairs), has_state)


def _when(condition: Condition) -> Any:
    """Return a condition as clients write it; of a vector that a client wrote, its place is None."""
    if isinstance(condition, Always):
        return condition.phase.value
    if isinstance(condition, Negation):
        return {"not": _when(condition.condition)}
    if isinstance(condition, ConditionGroup):
        return {condition.combine.name.lower(): [_when(each) for each in condition.conditions]}
    found = _read(condition.reading)
    if condition.threshold is not None:
        found["below" if condition.is_below else "above"] = condition.threshold
    if condition.hysteresis:
        found["hysteresis"] = condition.hysteresis
    if condition.pooling is not ScorePooling.TOKEN:
        is_average = condition.pooling is ScorePooling.EMA
        found["pool"] = {"ema": condition.alpha} if is_average else condition.pooling.name.lower()
    return found


def _read(reading: Reading) -> dict[str, Any]:
    if isinstance(reading, NamedProbe):
        return {"probe": reading.name}
    if isinstance(reading, FeatureReading):
        return {"sae": reading.sae, "feature": reading.feature}
    vector = reading.weight.module if isinstance(reading.weight, ModuleVector) else None
    at = {"at": reading.site.name}
    return {"cosine": vector, **at} if reading.is_cosine else {"probe": {**at, "weight": vector, "bias": reading.bias}}


def _then(then: Then) -> Any:
    """Return an effect as clients write it, without vectors and numbers of operations and features."""
    if then.observes:
        return "observe"
    if then.module is not None:
        return {"module": then.module.name, "scale": then.module.scale}
    if then.features:
        return {"features": [{"sae": edit.sae, "feature": edit.feature} for edit in then.features]}
    return {"ops": [{"at": each.site.name, "method": each.method.value} for each in then.operations]}


def _strength(gate: Gate) -> str | dict[str, Any]:
    """Return the strength of a gate as clients write it."""
    if gate.pid is not None:
        return {"pid": msgspec.to_builtins(gate.pid)}
    name = gate.mode.name.lower()
    return name if gate.mode is Mode.BINARY else {name: gate.amount}


def _joined(keys: Iterable[bytes]) -> bytes | None:
    listed = list(keys)
    return hashlib.sha256(b"".join(listed)).digest() if listed else None
