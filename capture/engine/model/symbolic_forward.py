"""Walking the source of a layer's ``forward`` with symbols instead of tensors.

Conditions that the layer object decides (``self.do_layer_norm_before``) are decided; the others are walked both
ways. Pure reading: nothing of the layer is called, and nothing of it changes.

A path is walked by three nouns: `_Function` runs the statements of one function, its `Expressions` evaluate the
expressions in them, and `_Calls` follows the calls, into other functions where these are the layer's own methods.
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
        """Return the value of a comparison, if the layer or the kind of its sides determines it."""
        left, right, kind = self._evaluate(node.left), self._evaluate(node.comparators[0]), type(node.ops[0])
        if len(node.ops) > 1:
            return Plain()
        if isinstance(left, Plain) and isinstance(right, Plain):
            known = left.value is not UNKNOWN and right.value is not UNKNOWN
            return Plain(_COMPARE[kind](left.value, right.value)) if known else Plain()
        if isinstance(right, Plain) and right.value is None and self._tape.is_tensor(left):
            return Plain(kind in (ast.IsNot, ast.NotEq))
        return Plain()


@dataclass(slots=True)
class Variable:
    """The value of a name. Two names share one after ``a = b``, so that ``a += c`` is seen through both."""

    value: Value


@dataclass(frozen=True, slots=True)
class Scope:
    """The names of one function that is walked.

    Attributes:
        names: Its parameters and local names.
        globals: Of its module.
    """

    names: dict[str, Variable]
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
    """Return the object that `base` stands for, to ask its attributes."""
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

    def cell(self, node: ast.expr) -> Variable:
        """Return the value of `node`, shared with its name if it is one."""
        names = self.scope.names
        return names[node.id] if isinstance(node, ast.Name) and node.id in names else Variable(self.visit(node))

    def bind(self, target: ast.expr, cell: Variable) -> None:
        """Assign `cell` to a name, to each of several, or to elements of a tensor."""
        if isinstance(target, ast.Name):
            self.scope.names[target.id] = cell
        elif isinstance(target, ast.Tuple | ast.List):
            values = self._tape.elements(cell.value, len(target.elts))
            for part, value in zip(target.elts, values, strict=True):
                self.bind(part, Variable(value))
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


MAX_PATHS = 1024
MAX_DEPTH = 5
MAX_UNROLLED = 8


@dataclass(frozen=True, slots=True)
class Path:
    """One way through ``forward``: everything it computed, and the result it returned."""

    tape: Tape
    result: Value


def parse_function(function: Callable[..., object]) -> ast.FunctionDef:
    """Return the syntax tree of a function.

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


def walk_paths(
    owner: type[nn.Module], layer: object | None, inputs: Mapping[str, bool], *, hands_itself_out: bool = False
) -> Iterator[Path]:
    """Yield every path through ``owner.forward`` that returns.

    Args:
        owner: Class of the layer; its methods that `forward` calls are followed.
        layer: Object whose attributes decide conditions, if there is one.
        inputs: Parameters that carry the stream: True for a tensor, False for None.
        hands_itself_out: Whether functions may be handed the layer, as Hugging Face's attention functions are.

    Raises:
        UnsupportedError: If there are too many paths, or a source cannot be read.
        NotUnderstoodError: If a path does something that cannot be followed.
    """
    choices: list[bool] = []
    for _ in range(MAX_PATHS):
        tape = Tape(hands_itself_out=hands_itself_out)
        path = _walk(PathState(owner, layer, Decisions(choices), tape), inputs)
        if path is not None:
            yield path
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return
        choices[-1] = False
    raise UnsupportedError(f"{owner.__name__}.forward has more than {MAX_PATHS} paths")


def _walk(state: PathState, inputs: Mapping[str, bool]) -> Path | None:
    """Walk one path; None if it ends in a raise."""
    function = inspect.unwrap(state.owner.forward)
    node = parse_function(function)
    own, *names = _parameters(node)
    cells = {own: Variable(Plain(SELF))}
    for name in names:
        is_none = inputs.get(name) is False
        cells[name] = Variable(Plain(None) if is_none else state.tape.argument(name, is_stream=name in inputs))
    try:
        return Path(state.tape, _Calls(state, 0).run(node, Scope(cells, function.__globals__)))
    except _DeadEnd:
        return None


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


class _Return(Exception):
    """Ends the walk of one function."""

    def __init__(self, value: Value) -> None:
        self.value = value


class _DeadEnd(Exception):
    """The path raises: nothing leaves the layer this way."""


class _Function(ast.NodeVisitor):
    """The statements of one function, run in order until it returns."""

    def __init__(self, expressions: Expressions) -> None:
        self._expressions = expressions

    def run(self, statements: Sequence[ast.stmt]) -> None:
        """Run statements.

        Raises:
            _Return: At a ``return``.
            _DeadEnd: At a ``raise``.
        """
        for statement in statements:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is None:
            return  # an annotation alone
        cell = self._expressions.cell(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._expressions.bind(target, cell)

    visit_AnnAssign = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        value = self._expressions.visit_BinOp(ast.BinOp(node.target, node.op, node.value))
        cell = self._expressions.cell(node.target)
        if isinstance(cell.value, Sum):
            cell.value = value  # in place: seen through every name of the tensor
        else:
            self._expressions.bind(node.target, Variable(value))

    def visit_If(self, node: ast.If) -> None:
        self.run(node.body if self._expressions.truth(node.test) else node.orelse)

    def visit_With(self, node: ast.With) -> None:
        self.run(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        self.run([*node.body, *node.orelse, *node.finalbody])

    def visit_For(self, node: ast.For) -> None:
        items = self._expressions.visit(node.iter)
        if not isinstance(items, Items) or len(items.values) > MAX_UNROLLED:
            raise NotUnderstoodError(f"a loop over {ast.unparse(node.iter)}")
        for item in items.values:
            self._expressions.bind(node.target, Variable(item))
            self.run(node.body)

    def visit_While(self, node: ast.While) -> None:
        raise NotUnderstoodError(f"a loop: while {ast.unparse(node.test)}")

    def visit_Return(self, node: ast.Return) -> None:
        raise _Return(self._expressions.visit(node.value) if node.value is not None else Plain(None))

    def visit_Raise(self, node: ast.Raise) -> None:
        raise _DeadEnd

    def visit_Expr(self, node: ast.Expr) -> None:
        self._expressions.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Do nothing: a failing assertion ends the layer."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._expressions.scope.names[node.name] = Variable(Plain())

    def generic_visit(self, node: ast.AST) -> None:
        """Read the parts of a statement that is not followed."""
        self._expressions.generic_visit(node)


class _Calls:
    """The calls of one function: followed into the layer's own methods; others are operations.

    Args:
        state: The path's.
        depth: Number of functions that the calling one lies in.
    """

    def __init__(self, state: PathState, depth: int) -> None:
        self._owner = state.owner
        self._state = state
        self._tape = state.tape
        self._depth = depth

    def run(self, node: ast.FunctionDef, scope: Scope) -> Value:
        """Walk a function; return its result."""
        if self._depth >= MAX_DEPTH:
            raise NotUnderstoodError(f"methods nested more than {MAX_DEPTH} deep at {node.name}")
        inner = _Calls(self._state, self._depth + 1)
        try:
            _Function(Expressions(self._state, scope, inner.call)).run(node.body)
        except _Return as returned:
            return returned.value
        return Plain(None)

    def call(self, expressions: Expressions, node: ast.Call) -> Value:
        """Return the result of a call."""
        cell = expressions.cell
        args: dict[Key, Variable] = {index: cell(arg) for index, arg in enumerate(node.args)}
        args |= {keyword.arg or f"**{index}": cell(keyword.value) for index, keyword in enumerate(node.keywords)}
        values = [given.value for given in args.values()]
        if isinstance(node.func, ast.Attribute):
            base = cell(node.func.value)
            if not isinstance(base.value, Plain):
                result = self._tape.method(node.func.attr, base.value, values, ast.unparse(node))
                if node.func.attr.endswith("_"):
                    base.value = result  # in place
                return result
        called = expressions.visit(node.func)
        if isinstance(called, Plain) and (called.value is getattr or called.value is hasattr):
            found = self._attribute_by_name(expressions, node, is_asked=called.value is hasattr)
            if found is not None:
                return found
        if isinstance(called, Plain) and called.path:
            return self._member(called, args, ast.unparse(node.func))
        return self._tape.function(called, values, ast.unparse(node.func))

    def _attribute_by_name(self, expressions: Expressions, node: ast.Call, *, is_asked: bool) -> Value | None:
        """Return the value of ``getattr(owner, "name", default)``, or of ``hasattr`` with `is_asked`.

        None if the owner is a tensor, or the name is computed.
        """
        match node:
            case ast.Call(args=[target, ast.Constant(value=str(name)), *defaults], keywords=[]):
                base = expressions.visit(target)
            case _:
                return None
        if not isinstance(base, Plain):
            return None
        if is_asked:
            owner = owner_of(self._state.layer, base)
            return Plain() if owner is UNKNOWN else Plain(hasattr(owner, name))
        default = expressions.visit(defaults[0]) if defaults else Plain()
        return attribute_of(self._state.layer, base, name, default.value if isinstance(default, Plain) else UNKNOWN)

    def _member(self, called: Plain, args: Mapping[Key, Variable], text: str) -> Value:
        """Return the result of calling an attribute of the layer: a method, a submodule, or something else."""
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

    def _method(self, method: types.FunctionType, name: str, args: Mapping[Key, Variable]) -> Value:
        function = inspect.unwrap(method)
        node = parse_function(function)
        names = _parameters(node)
        is_bound = not isinstance(inspect.getattr_static(self._owner, name), staticmethod)
        cells = {name: Variable(Plain()) for name in names}
        defaults = dict(zip(reversed(node.args.args), reversed(node.args.defaults), strict=False))
        cells |= {arg.arg: Variable(Plain(d.value)) for arg, d in defaults.items() if isinstance(d, ast.Constant)}
        if is_bound:
            cells[names[0]] = Variable(Plain(SELF))
        for key, cell in args.items():
            cells[names[key + is_bound] if isinstance(key, int) else key] = cell
        return self.run(node, Scope(cells, function.__globals__))
