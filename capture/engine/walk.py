"""Walking the source of a layer's ``forward`` with symbols instead of tensors.

Conditions that the layer object decides (``self.do_layer_norm_before``) are decided; the others are walked both
ways. Pure reading: nothing of the layer is called, and nothing of it changes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import operator
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headgate.capture.engine.symbols import (
    UNKNOWN,
    Atom,
    Call,
    Cell,
    Items,
    NotUnderstoodError,
    Path,
    Plain,
    Reads,
    Sum,
    Value,
    is_identity,
    is_norm,
)
from headgate.capture.errors import UnsupportedError

MAX_PATHS = 1024
MAX_DEPTH = 5
MAX_UNROLLED = 8

_SELF = object()
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
_SHAPE_METHODS = {"contiguous", "clone", "view", "reshape", "flatten", "squeeze", "unsqueeze", "to", "type_as", "float"}
_NO_TENSOR = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "is_contiguous", "stride"}
_PURE = (isinstance, len, hasattr, getattr, bool, type, min, max)
_ROW_SHARDING = ("reduce_scatter", "all_gather", "sequence_parallel")
_IDENTITY_FUNCTIONS = (torch.clone, torch.dropout, nn.functional.dropout)


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
        walk = _Walk(owner, layer, inputs, choices)
        if walk.run():
            yield walk.path
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return
        choices[-1] = False
    raise UnsupportedError(f"{owner.__name__}.forward has more than {MAX_PATHS} paths")


class _Return(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


class _DeadEnd(Exception):
    pass


@dataclass(slots=True)
class _Frame:
    names: dict[str, Cell]
    globals: Mapping[str, Any]


class _Walk(ast.NodeVisitor):
    """One path. `choices` are the decisions to repeat; new ones are appended, first as True."""

    def __init__(
        self, owner: type[nn.Module], layer: object | None, inputs: Mapping[str, bool], choices: list[bool]
    ) -> None:
        self.path = Path()
        self._owner = owner
        self._layer = layer
        self._inputs = inputs
        self._choices = choices
        self._taken = 0
        self._decided: dict[str, bool] = {}
        self._numbers = itertools.count()
        self._frames: list[_Frame] = []

    def run(self) -> bool:
        """Walk; False if the path ends in a raise."""
        function = inspect.unwrap(self._owner.forward)
        node = parse_function(function)
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        cells = {name: Cell(self._argument(name)) for name in names[1:]}
        try:
            self.path.result = self._run_function(node, function.__globals__, {names[0]: Cell(Plain(_SELF)), **cells})
        except _DeadEnd:
            return False
        return True

    def _argument(self, name: str) -> Value:
        if self._inputs.get(name) is False:
            return Plain(None)
        atom = Atom(next(self._numbers), argument=name)
        if name in self._inputs:
            self.path.inputs[name] = atom
        return Sum(((atom, ()),))

    def _run_function(self, node: ast.FunctionDef, scope: Mapping[str, Any], names: dict[str, Cell]) -> Value:
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
            self._bind(node.target, Cell(value))

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
            self._bind(node.target, Cell(item))
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
        self._bind(ast.Name(node.name), Cell(Plain()))

    def _bind(self, target: ast.expr, cell: Cell) -> None:
        if isinstance(target, ast.Name):
            self._frames[-1].names[target.id] = cell
        elif isinstance(target, ast.Tuple | ast.List):
            for part, value in zip(target.elts, self._unpack(cell.value, len(target.elts)), strict=True):
                self._bind(part, Cell(value))
        elif isinstance(target, ast.Subscript) and not isinstance(self.visit(target.value), Plain):
            self._cell(target.value).value = self._function(self.visit(target.value), cell.value)

    def _unpack(self, value: Value, count: int) -> list[Value]:
        if isinstance(value, Items) and len(value.values) == count:
            return list(value.values)
        return [self._element(value, index) for index in range(count)]

    def _element(self, value: Value, index: int) -> Value:
        if isinstance(value, Items) and -len(value.values) <= index < len(value.values):
            return value.values[index]
        atom = value.atom if isinstance(value, Sum) else None
        if atom is None or not atom.module:
            return self._function(value)
        if index == atom.element:
            return value
        return self._new(atom.reads, atom.module, index)

    # Conditions

    def _truth(self, test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp):
            is_and = isinstance(test.op, ast.And)
            return all(map(self._truth, test.values)) if is_and else any(map(self._truth, test.values))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._truth(test.operand)
        value = self.visit(test)
        if isinstance(value, Plain) and value.value is not UNKNOWN and value.value is not _SELF:
            return bool(value.value)
        if isinstance(test, ast.Compare) and type(test.ops[0]) in _OPPOSITE:
            return not self._decide(ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators))
        return self._decide(test)

    def _decide(self, test: ast.expr) -> bool:
        text = ast.unparse(test)
        if text not in self._decided:
            if self._taken == len(self._choices):
                self._choices.append(True)
            self._decided[text] = self._choices[self._taken]
            self._taken += 1
        return self._decided[text]

    def visit_Compare(self, node: ast.Compare) -> Value:
        left, right = self.visit(node.left), self.visit(node.comparators[0])
        if len(node.ops) > 1:
            return Plain()
        kind = type(node.ops[0])
        if isinstance(left, Plain) and isinstance(right, Plain):
            known = left.value is not UNKNOWN and right.value is not UNKNOWN
            return Plain(_COMPARE[kind](left.value, right.value)) if known else Plain()
        if isinstance(right, Plain) and right.value is None and self._is_tensor(left):
            return Plain(kind in (ast.IsNot, ast.NotEq))
        return Plain()

    def _is_tensor(self, value: Value) -> bool:
        """Whether it is a tensor for sure; an optional argument, or a module's second result, may be None."""
        if not isinstance(value, Sum):
            return isinstance(value, Items)
        atom = value.atom
        return atom is None or atom.argument in self.path.inputs or (bool(atom.module) and atom.element == 0)

    # Expressions

    def generic_visit(self, node: ast.AST) -> Value:
        """An operation that is not followed: it reads whatever its parts read."""
        return self._function(
            *(self.visit(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        )

    def _cell(self, node: ast.expr) -> Cell:
        """What `node` is, shared with its name if it is one."""
        names = self._frames[-1].names
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        return Cell(self.visit(node))

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
            return Plain() if node.attr in _NO_TENSOR else self._function(base)
        if base.value is _SELF:
            known = UNKNOWN if self._layer is None else getattr(self._layer, node.attr, UNKNOWN)
            return Plain(known, node.attr)
        known = UNKNOWN if base.value is UNKNOWN else getattr(base.value, node.attr, UNKNOWN)
        return Plain(known, f"{base.path}.{node.attr}" if base.path else "")

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        base, index = self.visit(node.value), node.slice
        if isinstance(base, Plain):
            return Plain(path=f"{base.path}.{ast.unparse(index)}" if base.path else "")
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            return self._element(base, index.value)
        return self._function(base)

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(left, Plain) and isinstance(right, Plain):
            return Plain()
        if isinstance(left, Items) and isinstance(right, Items):
            return Items(left.values + right.values)
        if isinstance(node.op, ast.Add) and isinstance(left, Sum) and isinstance(right, Sum):
            return Sum(left.terms + right.terms)
        if isinstance(node.op, ast.Mult | ast.Div):
            if isinstance(left, Sum) and self._is_factor(right):
                text = ast.unparse(node.right)
                return left.scaled(text if isinstance(node.op, ast.Mult) else f"1 / ({text})")
            if isinstance(node.op, ast.Mult) and isinstance(right, Sum) and self._is_factor(left):
                return right.scaled(ast.unparse(node.left))
        return self._function(left, right)

    def _is_factor(self, value: Value) -> bool:
        return isinstance(value, Plain) or (isinstance(value, Sum) and not self._reads(value))

    # Calls

    def visit_Call(self, node: ast.Call) -> Value:
        args: dict[int | str, Cell] = {}
        for index, arg in enumerate(node.args):
            args[index] = self._cell(arg)
        for keyword in node.keywords:
            args[keyword.arg or f"**{len(args)}"] = self._cell(keyword.value)
        if isinstance(node.func, ast.Attribute):
            base = self._cell(node.func.value)
            if not isinstance(base.value, Plain):
                return self._tensor_method(node.func.attr, base, args)
            if ast.unparse(node.func) == "super().forward":
                raise NotUnderstoodError("super().forward(...)")
        called = self.visit(node.func)
        if isinstance(called, Plain) and called.path:
            return self._member(called, args)
        return self._call_function(called, args, ast.unparse(node.func))

    def _tensor_method(self, name: str, base: Cell, args: Mapping[int | str, Cell]) -> Value:
        value = base.value
        if name in _NO_TENSOR:
            return Plain()
        if name in _SHAPE_METHODS:
            return value
        other = args[0].value if 0 in args else None
        is_add = name in ("add", "add_") and isinstance(value, Sum) and isinstance(other, Sum) and len(args) == 1
        result = Sum(value.terms + other.terms) if is_add else self._function(value, *(a.value for a in args.values()))
        if name.endswith("_"):
            base.value = result
        return result

    def _call_function(self, called: Value, args: Mapping[int | str, Cell], text: str) -> Value:
        function = called.value if isinstance(called, Plain) else UNKNOWN
        values = [cell.value for cell in args.values()]
        known = all(isinstance(v, Plain) and v.value is not UNKNOWN and v.value is not _SELF for v in values)
        if known and any(function is pure for pure in _PURE):
            return Plain(function(*(v.value for v in values if isinstance(v, Plain))))
        if function is range and known:
            return Items(tuple(Plain(index) for index in range(*(v.value for v in values if isinstance(v, Plain)))))
        if any(function is identity for identity in _IDENTITY_FUNCTIONS) and values:
            return values[0]
        if function is torch.add and len(values) == 2 and isinstance(values[0], Sum) and isinstance(values[1], Sum):
            return Sum(values[0].terms + values[1].terms)
        self._check_deferred(values, text)
        if self._reads(*values) and any(word in text for word in _ROW_SHARDING):
            raise NotUnderstoodError(f"{text}(...) spreads the rows of the batch over ranks")
        return self._function(*values)

    def _check_deferred(self, values: Sequence[Value], text: str) -> None:
        for value in values:
            if isinstance(value, Plain) and (value.value is _SELF or (value.path and is_norm(value.path, value.value))):
                raise NotUnderstoodError(
                    f"{text}(...) is handed {value.path or 'the layer'} and may call it, or bypass it, unseen"
                )

    def _member(self, called: Plain, args: Mapping[int | str, Cell]) -> Value:
        owner, target = self._owner, called.value
        method = getattr(owner, called.path, None) if "." not in called.path else None
        if isinstance(method, types.FunctionType) and target in (UNKNOWN, getattr(self._layer, called.path, UNKNOWN)):
            return self._inline(method, called.path, args)
        values = [cell.value for cell in args.values()]
        is_module = isinstance(target, nn.Module) or (target is UNKNOWN and not called.path.endswith(".forward"))
        if not is_module:
            return self._call_function(Plain(target), args, f"self.{called.path}")
        self._check_deferred(values, f"self.{called.path}")
        if is_identity(called.path, target) and values:
            return values[0]
        return self._module(called.path, target, {key: cell.value for key, cell in args.items()})

    def _module(self, path: str, module: object, args: Mapping[int | str, Value]) -> Value:
        inputs = {key: value for key, value in args.items() if isinstance(value, Sum)}
        first, residual = inputs.get(0), inputs.get(1, inputs.get("residual"))
        if first is None or residual is None or not is_norm(path, module):
            return self._record(path, self._reads(*args.values()), inputs)
        # A norm that is handed one tensor twice cannot mean to add them: it hands the second one through.
        added = residual if residual == first else Sum(first.terms + residual.terms)
        return Items((self._record(path, self._reads(added), inputs, added), added))

    def _record(self, path: str, reads: Reads, inputs: Mapping[int | str, Sum], added: Sum | None = None) -> Sum:
        result = self._new(reads, path)
        self.path.calls.append(Call(path, inputs, result.terms[0][0], added))
        return result

    def _inline(self, method: types.FunctionType, name: str, args: Mapping[int | str, Cell]) -> Value:
        function = inspect.unwrap(method)
        node = parse_function(function)
        parameters = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        is_static = isinstance(inspect.getattr_static(self._owner, name), staticmethod)
        names = dict.fromkeys(parameters, Cell(Plain()))
        if not is_static:
            names[parameters[0]] = Cell(Plain(_SELF))
        for key, cell in args.items():
            place = key if isinstance(key, str) else parameters[key + (not is_static)]
            names[place] = cell
        return self._run_function(node, function.__globals__, names)

    def _new(self, reads: Reads, module: str = "", element: int = 0) -> Sum:
        return Sum(((Atom(next(self._numbers), module, element, reads=reads), ()),))

    def _function(self, *values: Value) -> Sum:
        return self._record(
            "", self._reads(*values), {i: value for i, value in enumerate(values) if isinstance(value, Sum)}
        )

    def _reads(self, *values: Value) -> Reads:
        stream = {atom.number for atom in self.path.inputs.values()}
        found: set[frozenset[int]] = set()
        for value in values:
            if isinstance(value, Sum):
                found |= value.reads(stream)
            elif isinstance(value, Items):
                found |= self._reads(*value.values)
        return frozenset(found)
