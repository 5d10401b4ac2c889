"""Rules: the operator's gates, which act on requests that did not ask. Numpy only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headgate.capture.schema.errors import RequestError
from headgate.steering.gates.gate import Gate
from headgate.steering.gates.wire import gates_from_wire, gates_to_wire

Selection = Collection[str] | None
"""The rules that a request names in ``steering_rules``; None if it has no such field."""

_PLACE = "rule[0]."
"""Begins the path of each field of a rule's gate as the parser of gates writes it."""


WHO_KNOWS_RULES = "whoever has the role 'steer' finds those that are registered at GET /v1/steering/rules"
"""Stands for rules in errors about requests, whose clients do not learn the names of rules."""


class AppliesTo(str, Enum):
    """The requests that a rule acts on."""

    ALL = "all"
    OPT_IN = "opt_in"
    OPT_OUT = "opt_out"

    def acts(self, name: str, selection: Selection) -> bool:
        """Whether a rule of that name acts on a request with a selection."""
        if self is AppliesTo.ALL:
            return True
        return self is AppliesTo.OPT_OUT if selection is None else name in selection


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rule:
    """A rule: a gate with its name, and whom it acts on."""

    gate: Gate
    applies_to: AppliesTo

    @property
    def name(self) -> str:
        """The name of the rule, and of its gate."""
        return self.gate.name

    def to_wire(self) -> dict[str, Any]:
        """Return plain values that `from_wire` reads back."""
        return {"gate": gates_to_wire((self.gate,)), "applies_to": self.applies_to.value}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Rule:
        """Return the rule that `to_wire` wrote."""
        (gate,) = gates_from_wire(wire["gate"])
        return cls(gate=gate, applies_to=AppliesTo(wire["applies_to"]))


def rule_key(name: str) -> str:
    """Return the key of a rule among the registered names of an engine core, which nothing else there can have."""
    return f"rule\n{name}"


@contextmanager
def fields_of_rule() -> Iterator[None]:
    """Let errors about a rule's gate name the fields of the rule's own document: ``when`` for ``rule[0].when``."""
    try:
        yield
    except RequestError as error:
        message = str(error).removeprefix(f"{error.field}: ").replace(_PLACE, "")
        raise RequestError(error.field.removeprefix(_PLACE), message) from error


FIELD = "rule"
"""Name of the list of one gate that a rule's document is read as."""
