"""Symbols for the values in a layer's source: tensors as sums of atoms, and everything else as is.

Additions stay visible, every other operation makes a new atom that remembers which sums it read. A `Tape` holds what
one path through the source computed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

NO_TENSOR = {"shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda", "is_contiguous", "stride"}
"""Attributes and methods of a tensor that are none themselves."""

_SAME_VALUES = {"contiguous", "clone", "view", "reshape", "flatten", "squeeze", "unsqueeze", "type_as"}
_PURE = (isinstance, len, hasattr, getattr, bool, type, min, max)
_IDENTITIES = (torch.clone, torch.dropout, nn.functional.dropout)
_ROW_SHARDING = ("reduce_scatter", "all_gather", "sequence_parallel")


class Unknown:
    """A value that the source does not determine: the value of an attribute without an instance, a shape, ..."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()
SELF: Final = object()
"""The layer itself."""

Key = int | str
"""An argument of a call: its position or its keyword."""

Reads = frozenset[frozenset[int]]


@dataclass(frozen=True, slots=True)
class Atom:
    """A tensor that is no sum: an argument of the layer, or what a call returned.

    Attributes:
        number: Unique in its path, ascending in the order of computation.
        module: Path, below the layer, of the module that returned it; "" for functions and other operations.
        element: Which element of the module's tuple it is; 0 also if it returned no tuple.
        argument: Name of the layer's parameter if it is one, else "".
        reads: The sums holding the layer's input stream that it was computed from, as sets of atom numbers.
        text: The source of the operation, if it is no module's.
    """

    number: int
    module: str = ""
    element: int = 0
    argument: str = ""
    reads: Reads = frozenset()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sum:
    """A tensor: atoms, each with the factors it is multiplied by, as source text (``self.residual_multiplier``)."""

    terms: tuple[tuple[Atom, tuple[str, ...]], ...]

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of its atoms."""
        return frozenset(atom.number for atom, _ in self.terms)

    @property
    def atom(self) -> Atom | None:
        """Its atom, if it is nothing but that."""
        return self.terms[0][0] if len(self.terms) == 1 and not self.terms[0][1] else None

    @property
    def has_repeats(self) -> bool:
        """Whether an atom is in it twice."""
        return len(self.numbers) < len(self.terms)

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both."""
        return Sum(self.terms + other.terms)

    def scaled(self, factor: str) -> Sum:
        """Return the same with every atom multiplied by `factor`."""
        return Sum(tuple((atom, (*factors, factor)) for atom, factors in self.terms))


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or list."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A Python object that is no tensor of the forward pass; `path` is set if it is an attribute of the layer."""

    value: Any = UNKNOWN
    path: str = ""


Value = Sum | Items | Plain


@dataclass(frozen=True, slots=True)
class SymbolicCall:
    """One call of a submodule, or of something else that made a new tensor.

    Attributes:
        module: Path of the module, below the layer; "" if it is none.
        inputs: Its tensor arguments.
        output: What it returned; of a fused add and norm the normed tensor.
        added: Of a fused add and norm, ``x, residual = norm(x, residual)``, the new residual; else None.
    """

    module: str
    inputs: Mapping[Key, Sum]
    output: Atom
    added: Sum | None = None


class NotUnderstoodError(Exception):
    """The source does something whose effect on the stream is unknown; the text says what."""


def is_norm(path: str, module: object = UNKNOWN) -> bool:
    """Whether a submodule normalises: by its class where there is one, or by its name."""
    words = [word for word in path.lower().split(".") if not word.isdecimal()]
    name = words[-1] if words else ""
    if name.endswith(("eps", "epsilon", "weight", "bias")):
        return False
    by_name = "norm" in name or name.startswith(("ln_", "ln1", "ln2")) or name.endswith("_ln") or name == "ln"
    return by_name or (isinstance(module, nn.Module) and "norm" in type(module).__name__.lower())


def is_identity(path: str, module: object = UNKNOWN) -> bool:
    """Whether a submodule returns its input unchanged when serving."""
    name = path.rpartition(".")[2].lower()
    return isinstance(module, nn.Dropout | nn.Identity) or "dropout" in name or "drop_path" in name


@dataclass(slots=True)
class Tape:
    """The calls and values of one path through ``forward``.

    Attributes:
        inputs: Atoms of the parameters that carry the stream, by name.
        calls: In order.
        hands_itself_out: Whether functions may be handed the layer.
    """

    inputs: dict[str, Atom] = field(default_factory=dict)
    calls: list[SymbolicCall] = field(default_factory=list)
    hands_itself_out: bool = False
    _count: int = 0

    def argument(self, name: str, *, is_stream: bool) -> Sum:
        """Make the symbol of a parameter of the layer."""
        atom = self._atom(argument=name)
        if is_stream:
            self.inputs[name] = atom
        return Sum(((atom, ()),))

    def operation(self, text: str, *values: Value) -> Sum:
        """Return the result of something that is no module and no sum."""
        inputs: dict[Key, Sum] = {index: value for index, value in enumerate(values) if isinstance(value, Sum)}
        return self._call("", inputs, self.reads(*values), text=text)

    def module(self, path: str, module: object, args: Mapping[Key, Value]) -> Value:
        """Return the result of calling the submodule at `path`; a fused add and norm returns two."""
        inputs = {key: value for key, value in args.items() if isinstance(value, Sum)}
        first, residual = inputs.get(0), inputs.get(1, inputs.get("residual"))
        if first is None or residual is None or not is_norm(path, module):
            return self._call(path, inputs, self.reads(*args.values()))
        # A norm that is handed one tensor twice cannot mean to add them: it hands the second one through.
        added = residual if residual == first else first.plus(residual)
        return Items((self._call(path, inputs, self.reads(added), added), added))

    def function(self, called: Value, args: Sequence[Value], text: str) -> Value:
        """Return the result of calling something that is no module of the layer, written `text`."""
        function: Any = called.value if isinstance(called, Plain) else UNKNOWN
        known = [arg.value for arg in args if isinstance(arg, Plain) and not _is_symbol(arg.value)]
        if len(known) == len(args) and any(function is pure for pure in _PURE):
            return Plain(function(*known))
        if len(known) == len(args) and function is range:
            return Items(tuple(Plain(index) for index in range(*known)))
        if args and any(function is identity for identity in _IDENTITIES):
            return args[0]
        if function is torch.add and len(args) == 2 and isinstance(args[0], Sum) and isinstance(args[1], Sum):
            return args[0].plus(args[1])
        self.check_deferred(text, args)
        if self.reads(*args) and any(word in text for word in _ROW_SHARDING):
            raise NotUnderstoodError(f"{text}(...) spreads the rows of the batch over ranks")
        return self.operation(f"{text}(...)", *args)

    def method(self, name: str, value: Value, args: Sequence[Value], text: str) -> Value:
        """Return the result of a tensor's method, written `text`."""
        if name in NO_TENSOR:
            return Plain()
        if name in _SAME_VALUES:
            return value
        if name in ("add", "add_") and isinstance(value, Sum) and len(args) == 1 and isinstance(args[0], Sum):
            return value.plus(args[0])
        return self.operation(text, value, *args)

    def arithmetic(self, node: ast.BinOp, left: Value, right: Value) -> Value:
        """Return the result of a binary operator with at least one side that is no plain object."""
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
        return self.operation(ast.unparse(node), left, right)

    def _is_factor(self, value: Value) -> bool:
        return not self.reads(value) and not isinstance(value, Items)

    def element(self, value: Value, index: int) -> Value:
        """Return element `index` of a tuple."""
        if isinstance(value, Items) and -len(value.values) <= index < len(value.values):
            return value.values[index]
        atom = value.atom if isinstance(value, Sum) else None
        if atom is None or not atom.module:
            return self.operation("an element of a result", value)
        if index == atom.element:
            return value
        return Sum(((self._atom(module=atom.module, element=index, reads=atom.reads), ()),))

    def elements(self, value: Value, count: int) -> list[Value]:
        """Return the values that ``a, b, ... = value`` binds to `count` names."""
        if isinstance(value, Items) and len(value.values) == count:
            return list(value.values)
        return [self.element(value, index) for index in range(count)]

    def reads(self, *values: Value) -> Reads:
        """Return the parts of the stream that an operation on `values` reads."""
        stream = {atom.number for atom in self.inputs.values()}
        found: set[frozenset[int]] = set()
        for value in values:
            if isinstance(value, Items):
                found |= self.reads(*value.values)
            elif isinstance(value, Sum) and not value.numbers.isdisjoint(stream):
                found.add(value.numbers)
            elif isinstance(value, Sum):
                found |= {reads for atom, _ in value.terms for reads in atom.reads}
        return frozenset(found)

    def is_tensor(self, value: Value) -> bool:
        """Whether it cannot be None; an optional argument, or a module's second result, may be."""
        if not isinstance(value, Sum):
            return isinstance(value, Items)
        atom = value.atom
        return atom is None or atom.argument in self.inputs or (bool(atom.module) and atom.element == 0)

    def check_deferred(self, called: str, values: Sequence[Value]) -> None:
        """Refuse a call that is handed a norm, or the layer: it may call it, or do its work, where no hook sees it."""
        for value in values:
            if not isinstance(value, Plain):
                continue
            is_callable = value.value is UNKNOWN or callable(value.value)
            if value.value is SELF and self.hands_itself_out:
                continue
            if value.value is SELF or (is_callable and value.path and is_norm(value.path, value.value)):
                raise NotUnderstoodError(f"{called}(...) is handed {value.path or 'the layer'} and may bypass it")

    def _call(
        self, path: str, inputs: Mapping[Key, Sum], reads: Reads, added: Sum | None = None, text: str = ""
    ) -> Sum:
        output = self._atom(module=path, reads=reads, text=text)
        self.calls.append(SymbolicCall(path, inputs, output, added))
        return Sum(((output, ()),))

    def _atom(self, **known: Any) -> Atom:
        self._count += 1
        return Atom(self._count, **known)


def _is_symbol(value: object) -> bool:
    return value is UNKNOWN or value is SELF
