"""Conditions of a layer's source, such as those of ``if``: decided by the layer object, or walked both ways."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from headgate.capture.engine.model.symbols import UNKNOWN, Plain, Tape, Value

Evaluate = Callable[[ast.expr], Value]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.IsNot: ast.Is, ast.NotEq: ast.Eq, ast.NotIn: ast.In}


class Decisions:
    """The conditions of one path whose value is not known, each with the way that the path takes.

    Args:
        choices: Decisions to repeat, in order; new ones are appended, at first as True.
    """

    def __init__(self, choices: list[bool]) -> None:
        self._choices = choices
        self._decided: dict[str, bool] = {}

    def decide(self, test: ast.expr) -> bool:
        """Return the way to go; the same condition is decided alike all along a path."""
        text = ast.unparse(test)
        if text not in self._decided:
            if len(self._decided) == len(self._choices):
                self._choices.append(True)
            self._decided[text] = self._choices[len(self._decided)]
        return self._decided[text]


class Conditions:
    """The truth of expressions in one function.

    Args:
        evaluate: Returns the value of an expression there.
        tape: The path's.
        decisions: The path's.
    """

    def __init__(self, evaluate: Evaluate, tape: Tape, decisions: Decisions) -> None:
        self._evaluate = evaluate
        self._tape = tape
        self._decisions = decisions

    def truth(self, test: ast.expr) -> bool:
        """Return whether `test` holds on this path."""
        if isinstance(test, ast.BoolOp):
            is_and = isinstance(test.op, ast.And)
            return all(map(self.truth, test.values)) if is_and else any(map(self.truth, test.values))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self.truth(test.operand)
        value = self._evaluate(test)
        if isinstance(value, Plain) and value.value is not UNKNOWN:
            return bool(value.value)
        if isinstance(test, ast.Compare) and type(test.ops[0]) in _OPPOSITE:
            opposite = ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators)
            return not self._decisions.decide(opposite)
        return self._decisions.decide(test)

    def compared(self, node: ast.Compare) -> Value:
        """Return the value of a comparison, if the layer or the kind of its sides tells it."""
        left, right, kind = self._evaluate(node.left), self._evaluate(node.comparators[0]), type(node.ops[0])
        if len(node.ops) > 1:
            return Plain()
        if isinstance(left, Plain) and isinstance(right, Plain):
            known = left.value is not UNKNOWN and right.value is not UNKNOWN
            return Plain(_COMPARE[kind](left.value, right.value)) if known else Plain()
        if isinstance(right, Plain) and right.value is None and self._tape.is_tensor(left):
            return Plain(kind in (ast.IsNot, ast.NotEq))
        return Plain()
