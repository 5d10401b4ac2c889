"""Gates as plain values, on their way from a front end to its engine cores.

The front end made and checked them: a malformed one is a bug, not bad input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.gates.gate import (
    Always,
    Condition,
    ConditionGroup,
    FeatureReading,
    Gate,
    InlineProbe,
    Leaf,
    ModuleThen,
    NamedProbe,
    Negation,
    Pid,
    Reading,
    Then,
)
from headgate.steering.programs.feature_edits import edits_from_wire, edits_to_wire
from headgate.steering.programs.gate_codes import Combine, GateScope, Mode, Pool
from headgate.steering.programs.operations import ModuleVector, operations_from_wire, operations_to_wire

GatesWire = list[dict[str, Any]]


def gates_to_wire(gates: Sequence[Gate]) -> GatesWire:
    """Return plain values that `gates_from_wire` reads back."""
    return [
        {
            "name": gate.name,
            "when": _condition(gate.when),
            "then": _then(gate.then),
            "mode": int(gate.mode),
            "amount": gate.amount,
            "pid": None if gate.pid is None else list(gate.pid),
            "scope": int(gate.scope),
            "conversation": gate.conversation,
            "where": gate.where,
        }
        for gate in gates
    ]


def gates_from_wire(wire: Iterable[dict[str, Any]]) -> tuple[Gate, ...]:
    """Return the gates that `gates_to_wire` wrote; arrays are views of the received bytes."""
    return tuple(
        Gate(
            name=given["name"],
            when=_read_condition(given["when"]),
            then=_read_then(given["then"]),
            mode=Mode(given["mode"]),
            amount=given["amount"],
            pid=None if given["pid"] is None else Pid(*given["pid"]),
            scope=GateScope(given["scope"]),
            conversation=given["conversation"],
            where=given["where"],
        )
        for given in wire
    )


def _condition(condition: Condition) -> list[Any]:
    if isinstance(condition, Leaf):
        numbers = [condition.is_below, condition.threshold, condition.hysteresis, int(condition.pool), condition.alpha]
        return ["leaf", _reading(condition.reading), *numbers, condition.where]
    if isinstance(condition, ConditionGroup):
        return ["group", int(condition.combine), [_condition(each) for each in condition.conditions]]
    if isinstance(condition, Negation):
        return ["not", _condition(condition.condition)]
    return ["always"]


def _read_condition(wire: Sequence[Any]) -> Condition:
    kind, *given = wire
    if kind == "leaf":
        reading, is_below, threshold, hysteresis, pool, alpha, where = given
        return Leaf(
            reading=_read_reading(reading),
            is_below=is_below,
            threshold=threshold,
            hysteresis=hysteresis,
            pool=Pool(pool),
            alpha=alpha,
            where=where,
        )
    if kind == "group":
        return ConditionGroup(Combine(given[0]), tuple(_read_condition(each) for each in given[1]))
    return Negation(_read_condition(given[0])) if kind == "not" else Always()


def _reading(reading: Reading) -> list[Any]:
    if isinstance(reading, NamedProbe):
        return ["probe", *reading]
    if isinstance(reading, FeatureReading):
        return ["feature", *reading]
    weight = reading.weight
    plain: Any = _module(weight) if isinstance(weight, ModuleVector) else weight.tobytes()
    return ["inline", _site(reading.site), plain, reading.bias, reading.is_cosine, reading.where]


def _read_reading(wire: Sequence[Any]) -> Reading:
    kind, *given = wire
    if kind == "probe":
        return NamedProbe(*given)
    if kind == "feature":
        return FeatureReading(*given)
    site, weight, bias, is_cosine, where = given
    read = np.frombuffer(weight, np.float32) if isinstance(weight, bytes | memoryview) else _read_module(weight)
    return InlineProbe(site=_read_site(site), weight=read, bias=bias, is_cosine=is_cosine, where=where)


def _then(then: Then) -> dict[str, Any]:
    return {
        "operations": operations_to_wire(then.operations),
        "features": edits_to_wire(then.features),
        "module": None if then.module is None else list(then.module),
        "attenuate": then.attenuate,
        "observes": then.observes,
    }


def _read_then(wire: dict[str, Any]) -> Then:
    return Then(
        operations=operations_from_wire(wire["operations"]),
        features=edits_from_wire(wire["features"]),
        module=None if wire["module"] is None else ModuleThen(*wire["module"]),
        attenuate=wire["attenuate"],
        observes=wire["observes"],
    )


def _site(site: Site) -> list[Any]:
    return [site.layer, site.hook.value]


def _read_site(wire: Sequence[Any]) -> Site:
    return Site(wire[0], HookPoint(wire[1]))


def _module(vector: ModuleVector) -> list[Any]:
    return [vector.module, *_site(vector.site)]


def _read_module(wire: Sequence[Any]) -> ModuleVector:
    return ModuleVector(wire[0], _read_site(wire[1:]))
