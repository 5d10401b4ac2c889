"""Expressions of a layer's source, evaluated with symbols instead of tensors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from headgate.capture.engine.model.conditions import Conditions, Decisions
from headgate.capture.engine.model.symbols import NO_TENSOR, SELF, UNKNOWN, Items, Plain, Sum, Tape, Value


@dataclass(slots=True)
class Cell:
    """The value of a name. Two names share one after ``a = b``, so that ``a += c`` is seen through both."""

    value: Value


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of one function that is walked.

    Attributes:
        names: Its parameters and local names.
        globals: Of its module.
    """

    names: dict[str, Cell]
    globals: Mapping[str, object]

    def value_of(self, name: str) -> Value:
        """Return the value of a local name, a global one or a builtin."""
        if name in self.names:
            return self.names[name].value
        builtins = self.globals.get("__builtins__", {})
        fallback = builtins if isinstance(builtins, dict) else vars(builtins)
        return Plain(self.globals.get(name, fallback.get(name, UNKNOWN)))


@dataclass(frozen=True, slots=True)
class PathState:
    """One path that is being walked.

    Attributes:
        owner: Class of the layer.
        layer: Object whose attributes decide conditions, if there is one.
        decisions: The ways taken so far.
        tape: Everything computed so far.
    """

    owner: type[nn.Module]
    layer: object | None
    decisions: Decisions
    tape: Tape


def attribute_of(layer: object | None, base: Plain, name: str, default: object = UNKNOWN) -> Plain:
    """Return attribute `name` of `base`, `default` if it has none; unknown where the object is.

    Args:
        layer: What `base` is if it is the layer itself; None: its attributes are unknown.
    """
    path = name if base.value is SELF else f"{base.path}.{name}" if base.path else ""
    owner = owner_of(layer, base)
    return Plain(UNKNOWN if owner is UNKNOWN else getattr(owner, name, default), path)


def owner_of(layer: object | None, base: Plain) -> object:
    """Return the object that `base` stands for, of which attributes are asked."""
    owner = layer if base.value is SELF else base.value
    return UNKNOWN if owner is None else owner


class Expressions(ast.NodeVisitor):
    """The expressions of one function: `visit` returns the value of a node.

    Args:
        state: The path's.
        scope: The function's.
        call: Returns the result of a call in the function.
    """

    def __init__(self, state: PathState, scope: Scope, call: Callable[[Expressions, ast.Call], Value]) -> None:
        self.scope = scope
        self._layer = state.layer
        self._tape = state.tape
        self._call = call
        self._conditions = Conditions(self.visit, state.tape, state.decisions)
        self.truth = self._conditions.truth

    def cell(self, node: ast.expr) -> Cell:
        """Return the value of `node`, shared with its name if it is one."""
        names = self.scope.names
        return names[node.id] if isinstance(node, ast.Name) and node.id in names else Cell(self.visit(node))

    def bind(self, target: ast.expr, cell: Cell) -> None:
        """Assign `cell` to a name, to each of several, or to elements of a tensor."""
        if isinstance(target, ast.Name):
            self.scope.names[target.id] = cell
        elif isinstance(target, ast.Tuple | ast.List):
            values = self._tape.elements(cell.value, len(target.elts))
            for part, value in zip(target.elts, values, strict=True):
                self.bind(part, Cell(value))
        elif isinstance(target, ast.Subscript):
            written = self.cell(target.value)
            if isinstance(written.value, Sum):
                written.value = self._tape.operation(f"{ast.unparse(target)} = ...", written.value, cell.value)

    def generic_visit(self, node: ast.AST) -> Value:
        """Return the result of an operation that is not followed: it reads whatever its parts read."""
        parts = [self.visit(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return self._tape.operation(ast.unparse(node), *parts)

    def visit_Name(self, node: ast.Name) -> Value:
        return self.scope.value_of(node.id)

    def visit_Constant(self, node: ast.Constant) -> Value:
        return Plain(node.value)

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Value:
        return Items(tuple(self.visit(element) for element in node.elts))

    visit_List = visit_Tuple

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        result: Value = self.visit(node.body if self.truth(node.test) else node.orelse)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp | ast.BoolOp) -> Value:
        is_logical = isinstance(node, ast.BoolOp) or isinstance(node.op, ast.Not)
        return Plain(self.truth(node)) if is_logical else self.generic_visit(node)

    visit_BoolOp = visit_UnaryOp

    def visit_Compare(self, node: ast.Compare) -> Value:
        return self._conditions.compared(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        cell = self.cell(node.value)
        self.bind(node.target, cell)
        return cell.value

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        base = self.visit(node.value)
        if not isinstance(base, Plain):
            return Plain() if node.attr in NO_TENSOR else self._tape.operation(ast.unparse(node), base)
        return attribute_of(self._layer, base, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, index = self.visit(node.value), node.slice
        if isinstance(base, Plain):
            return Plain(path=f"{base.path}.{ast.unparse(index)}" if base.path else "")
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            return self._tape.element(base, index.value)
        return self._tape.operation(ast.unparse(node), base)

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(left, Plain) and isinstance(right, Plain):
            return Plain()
        return self._tape.arithmetic(node, left, right)

    def visit_Call(self, node: ast.Call) -> Value:
        return self._call(self, node)
