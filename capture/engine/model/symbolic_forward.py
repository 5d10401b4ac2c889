"""Walking the source of a layer's ``forward`` with symbols instead of tensors.

Conditions that the layer object decides (``self.do_layer_norm_before``) are decided; the others are walked both
ways. Pure reading: nothing of the layer is called, and nothing of it changes.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headgate.capture.engine.model.symbols import (
    NO_TENSOR,
    SELF,
    UNKNOWN,
    Items,
    Key,
    NotUnderstoodError,
    Plain,
    Sum,
    Tape,
    Value,
    is_identity,
)
from headgate.capture.schema.errors import UnsupportedError

MAX_PATHS = 1024
MAX_DEPTH = 5
MAX_UNROLLED = 8

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


@dataclass(frozen=True, slots=True)
class Path:
    """One way through ``forward``: what was computed, and what was returned."""

    tape: Tape
    result: Value


def parse_function(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of a function.

    Raises:
        UnsupportedError: If its source cannot be read.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UnsupportedError(f"cannot read the source of {function.__qualname__}: {error}") from error
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise UnsupportedError(f"the source of {function.__qualname__} is no plain function: {ast.unparse(node)[:80]}")
    return node


def walk_paths(owner: type[nn.Module], layer: object | None, inputs: Mapping[str, bool]) -> Iterator[Path]:
    """Every path through ``owner.forward`` that returns.

    Args:
        owner: Class of the layer; its methods that `forward` calls are followed.
        layer: Object whose attributes decide conditions, if there is one.
        inputs: Parameters that carry the stream: True for a tensor, False for None.

    Raises:
        UnsupportedError: If there are too many paths, or a source cannot be read.
        NotUnderstoodError: If a path does something that cannot be followed.
    """
    choices: list[bool] = []
    for _ in range(MAX_PATHS):
        path = _Walk(owner, layer, choices).run(inputs)
        if path is not None:
            yield path
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return
        choices[-1] = False
    raise UnsupportedError(f"{owner.__name__}.forward has more than {MAX_PATHS} paths")


class _Return(Exception):
    """Ends the walk of one function."""

    def __init__(self, value: Value) -> None:
        self.value = value


class _DeadEnd(Exception):
    """The path raises: nothing leaves the layer this way."""


@dataclass(slots=True)
class _Cell:
    """The binding of a name: two names share one after ``a = b``, so that ``a += c`` is seen through both."""

    value: Value


@dataclass(frozen=True, slots=True)
class _Frame:
    names: dict[str, _Cell]
    globals: Mapping[str, Any]


class _Walk(ast.NodeVisitor):
    """One path. `choices` are the decisions to repeat; new ones are appended, at first as True."""

    def __init__(self, owner: type[nn.Module], layer: object | None, choices: list[bool]) -> None:
        self._owner = owner
        self._layer = layer
        self._choices = choices
        self._decided: dict[str, bool] = {}
        self._tape = Tape()
        self._frames: list[_Frame] = []

    def run(self, inputs: Mapping[str, bool]) -> Path | None:
        """Walk; None if the path ends in a raise."""
        function = inspect.unwrap(self._owner.forward)
        node = parse_function(function)
        own, *names = _parameters(node)
        cells = {own: _Cell(Plain(SELF))}
        for name in names:
            is_none = inputs.get(name) is False
            cells[name] = _Cell(Plain(None) if is_none else self._tape.argument(name, is_stream=name in inputs))
        try:
            return Path(self._tape, self._run_function(node, function.__globals__, cells))
        except _DeadEnd:
            return None

    def _run_function(self, node: ast.FunctionDef, scope: Mapping[str, Any], names: dict[str, _Cell]) -> Value:
        if len(self._frames) >= MAX_DEPTH:
            raise NotUnderstoodError(f"methods nested more than {MAX_DEPTH} deep at {node.name}")
        self._frames.append(_Frame(names, scope))
        try:
            self._block(node.body)
        except _Return as returned:
            return returned.value
        finally:
            self._frames.pop()
        return Plain(None)

    # Statements

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        cell = self._cell(node.value)
        for target in node.targets:
            self._bind(target, cell)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, self._cell(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.visit_BinOp(ast.BinOp(node.target, node.op, node.value))
        cell = self._cell(node.target)
        if isinstance(cell.value, Sum):
            cell.value = value  # in place: seen through every name of the tensor
        else:
            self._bind(node.target, _Cell(value))

    def visit_If(self, node: ast.If) -> None:
        self._block(node.body if self._truth(node.test) else node.orelse)

    def visit_With(self, node: ast.With) -> None:
        self._block(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        self._block([*node.body, *node.orelse, *node.finalbody])

    def visit_For(self, node: ast.For) -> None:
        items = self.visit(node.iter)
        if not isinstance(items, Items) or len(items.values) > MAX_UNROLLED:
            raise NotUnderstoodError(f"a loop over {ast.unparse(node.iter)}")
        for item in items.values:
            self._bind(node.target, _Cell(item))
            self._block(node.body)

    def visit_While(self, node: ast.While) -> None:
        raise NotUnderstoodError(f"a loop: while {ast.unparse(node.test)}")

    def visit_Return(self, node: ast.Return) -> None:
        raise _Return(self.visit(node.value) if node.value is not None else Plain(None))

    def visit_Raise(self, node: ast.Raise) -> None:
        raise _DeadEnd

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nothing: a failing assertion ends the layer."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._frames[-1].names[node.name] = _Cell(Plain())

    def _bind(self, target: ast.expr, cell: _Cell) -> None:
        if isinstance(target, ast.Name):
            self._frames[-1].names[target.id] = cell
        elif isinstance(target, ast.Tuple | ast.List):
            values = self._tape.elements(cell.value, len(target.elts))
            for part, value in zip(target.elts, values, strict=True):
                self._bind(part, _Cell(value))
        elif isinstance(target, ast.Subscript):
            written = self._cell(target.value)
            if isinstance(written.value, Sum):
                written.value = self._tape.operation(f"{ast.unparse(target)} = ...", written.value, cell.value)

    # Conditions

    def _truth(self, test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp):
            is_and = isinstance(test.op, ast.And)
            return all(map(self._truth, test.values)) if is_and else any(map(self._truth, test.values))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._truth(test.operand)
        value = self.visit(test)
        if isinstance(value, Plain) and value.value is not UNKNOWN:
            return bool(value.value)
        if isinstance(test, ast.Compare) and type(test.ops[0]) in _OPPOSITE:
            return not self._decide(ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators))
        return self._decide(test)

    def _decide(self, test: ast.expr) -> bool:
        """Both ways, one after the other; the same condition is decided alike all along a path."""
        text = ast.unparse(test)
        if text not in self._decided:
            if len(self._decided) == len(self._choices):
                self._choices.append(True)
            self._decided[text] = self._choices[len(self._decided)]
        return self._decided[text]

    def visit_Compare(self, node: ast.Compare) -> Value:
        left, right, kind = self.visit(node.left), self.visit(node.comparators[0]), type(node.ops[0])
        if len(node.ops) > 1:
            return Plain()
        if isinstance(left, Plain) and isinstance(right, Plain):
            known = left.value is not UNKNOWN and right.value is not UNKNOWN
            return Plain(_COMPARE[kind](left.value, right.value)) if known else Plain()
        if isinstance(right, Plain) and right.value is None and self._tape.is_tensor(left):
            return Plain(kind in (ast.IsNot, ast.NotEq))
        return Plain()

    # Expressions

    def generic_visit(self, node: ast.AST) -> Value:
        """An operation that is not followed: it reads whatever its parts read."""
        parts = [self.visit(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return self._tape.operation(ast.unparse(node), *parts)

    def _cell(self, node: ast.expr) -> _Cell:
        """Return the binding of `node`, shared with its name if it is one."""
        names = self._frames[-1].names
        return names[node.id] if isinstance(node, ast.Name) and node.id in names else _Cell(self.visit(node))

    def visit_Name(self, node: ast.Name) -> Value:
        frame = self._frames[-1]
        if node.id in frame.names:
            return frame.names[node.id].value
        builtins = frame.globals.get("__builtins__", {})
        fallback = builtins if isinstance(builtins, dict) else vars(builtins)
        return Plain(frame.globals.get(node.id, fallback.get(node.id, UNKNOWN)))

    def visit_Constant(self, node: ast.Constant) -> Value:
        return Plain(node.value)

    def visit_Tuple(self, node: ast.Tuple | ast.List) -> Value:
        return Items(tuple(self.visit(element) for element in node.elts))

    visit_List = visit_Tuple

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        result: Value = self.visit(node.body if self._truth(node.test) else node.orelse)
        return result

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        return Plain(self._truth(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        return Plain(self._truth(node)) if isinstance(node.op, ast.Not) else self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        cell = self._cell(node.value)
        self._bind(node.target, cell)
        return cell.value

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        base = self.visit(node.value)
        if not isinstance(base, Plain):
            return Plain() if node.attr in NO_TENSOR else self._tape.operation(ast.unparse(node), base)
        owner = self._layer if base.value is SELF else base.value
        is_known = owner is not UNKNOWN and owner is not None
        path = node.attr if base.value is SELF else f"{base.path}.{node.attr}" if base.path else ""
        return Plain(getattr(owner, node.attr, UNKNOWN) if is_known else UNKNOWN, path)

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
        if isinstance(node.op, ast.Add):
            if isinstance(left, Items) and isinstance(right, Items):
                return Items(left.values + right.values)
            if isinstance(left, Sum) and isinstance(right, Sum):
                return left.plus(right)
        if isinstance(node.op, ast.Mult | ast.Div) and isinstance(left, Sum) and self._is_factor(right):
            text = ast.unparse(node.right)
            return left.scaled(text if isinstance(node.op, ast.Mult) else f"1 / ({text})")
        if isinstance(node.op, ast.Mult) and isinstance(right, Sum) and self._is_factor(left):
            return right.scaled(ast.unparse(node.left))
        return self._tape.operation(ast.unparse(node), left, right)

    def _is_factor(self, value: Value) -> bool:
        return not self._tape.reads(value) and not isinstance(value, Items)

    # Calls

    def visit_Call(self, node: ast.Call) -> Value:
        args: dict[Key, _Cell] = {index: self._cell(arg) for index, arg in enumerate(node.args)}
        args |= {keyword.arg or f"**{index}": self._cell(keyword.value) for index, keyword in enumerate(node.keywords)}
        values = [cell.value for cell in args.values()]
        if isinstance(node.func, ast.Attribute):
            base = self._cell(node.func.value)
            if not isinstance(base.value, Plain):
                result = self._tape.method(node.func.attr, base.value, values, ast.unparse(node))
                if node.func.attr.endswith("_"):
                    base.value = result  # in place
                return result
        called = self.visit(node.func)
        if isinstance(called, Plain) and called.path:
            return self._member(called, args, ast.unparse(node.func))
        return self._tape.function(called, values, ast.unparse(node.func))

    def _member(self, called: Plain, args: Mapping[Key, _Cell], text: str) -> Value:
        """Call of an attribute of the layer: one of its methods, a submodule, or something else."""
        method = getattr(self._owner, called.path, None) if "." not in called.path else None
        if isinstance(method, types.FunctionType):
            return self._method(method, called.path, args)
        values = {key: cell.value for key, cell in args.items()}
        module = called.value
        if not (isinstance(module, nn.Module) or (module is UNKNOWN and not called.path.endswith(".forward"))):
            return self._tape.function(Plain(module), list(values.values()), text)
        self._tape.check_deferred(text, list(values.values()))
        if is_identity(called.path, module) and values:
            return next(iter(values.values()))
        return self._tape.module(called.path, module, values)

    def _method(self, method: types.FunctionType, name: str, args: Mapping[Key, _Cell]) -> Value:
        function = inspect.unwrap(method)
        node = parse_function(function)
        names = _parameters(node)
        is_bound = not isinstance(inspect.getattr_static(self._owner, name), staticmethod)
        cells = {name: _Cell(Plain()) for name in names}
        defaults = dict(zip(reversed(node.args.args), reversed(node.args.defaults), strict=False))
        cells |= {arg.arg: _Cell(Plain(d.value)) for arg, d in defaults.items() if isinstance(d, ast.Constant)}
        if is_bound:
            cells[names[0]] = _Cell(Plain(SELF))
        for key, cell in args.items():
            cells[names[key + is_bound] if isinstance(key, int) else key] = cell
        return self._run_function(node, function.__globals__, cells)


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
