"""Reading the source of a layer's ``forward``: which tensors are sums of which others, without running it.

A path through the source is walked with symbols instead of tensors. Every tensor is a `Sum` of atoms: the layer's
inputs, and what modules and functions returned. Additions stay visible, everything else makes a new atom that
remembers what it was computed from. Conditions that the layer object decides (``self.do_layer_norm_before``) are
decided; the others are walked both ways, see `walk_paths`.

Pure reading: nothing of the layer is called, and no state of it changes.
"""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from headgate.capture.errors import UnsupportedError
from torch import nn

MAX_PATHS = 1024
MAX_INLINED = 6


class UnknownObject:
    """The value of an attribute that only an instance could tell."""


UNKNOWN = UnknownObject()


@dataclass(frozen=True, slots=True)
class Atom:
    """A tensor that is not a sum: an input of the layer, or what a call returned.

    Attributes:
        number: Unique in its path, ascending in the order of computation.
        module: Path of the module that returned it (``self_attn``); "" for a function or an unknown operation.
        element: Which element of the module's tuple it is; 0 also if it returned no tuple.
        argument: Name of the layer's parameter if it is an input, else "".
        reads: The sums it was computed from, as sets of atom numbers, where they hold an input stream.
    """

    number: int
    module: str = ""
    element: int = 0
    argument: str = ""
    reads: frozenset[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Sum:
    """A tensor: atoms with the factors each is multiplied by, as source text (``self.residual_multiplier``)."""

    terms: tuple[tuple[Atom, tuple[str, ...]], ...]

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of its atoms."""
        return frozenset(atom.number for atom, _ in self.terms)

    @property
    def atom(self) -> Atom | None:
        """Its atom if it is nothing but that."""
        return self.terms[0][0] if len(self.terms) == 1 and not self.terms[0][1] else None


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or list."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A Python object that is known: a constant, a global; `path` is set if it is an attribute of the layer."""

    value: Any
    path: str = ""


Value = Sum | Items | Plain


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a submodule.

    Attributes:
        module: Path of the module below the layer.
        inputs: Its tensor arguments; the key is a position or a keyword.
        output: What it returned (of a fused add and norm: the normed one).
        added: Of a fused add and norm ``x, residual = norm(x, residual)``: the new residual.
    """

    module: str
    inputs: Mapping[int | str, Sum]
    output: Atom
    added: Sum | None = None


@dataclass(slots=True)
class Path:
    """One way through ``forward``: the calls in order and what was returned."""

    calls: list[ModuleCall] = field(default_factory=list)
    result: Value = field(default_factory=lambda: Plain(None))
    decisions: dict[str, bool] = field(default_factory=dict)


class NotUnderstoodError(Exception):
    """The source does something whose effect on the stream cannot be told; the text says what."""


def is_norm(path: str, module: object = None) -> bool:
    """Whether a submodule normalises its input, by its class if there is one, else by its name."""
    name = path.rpartition(".")[2].lower()
    by_name = "norm" in name or name.startswith(("ln_", "ln1", "ln2")) or name.endswith("_ln") or name == "ln"
    return by_name or (isinstance(module, nn.Module) and "norm" in type(module).__name__.lower())


@lru_cache(maxsize=256)
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
        raise UnsupportedError(f"{function.__qualname__} is no plain function: its source starts with {ast.unparse(node)[:60]!r}")
    return node


def walk_paths(
    function: Callable[..., Any], owner: type[nn.Module], module: nn.Module | None, inputs: Mapping[str, bool]
) -> Iterator[Path]:
    """Every path through `function`, a method of `owner`.

    Args:
        function: The unwrapped method.
        owner: The class; its other methods are followed.
        module: The object whose attributes decide conditions, if there is one.
        inputs: Parameters that carry the stream: True for a tensor, False for None.

    Raises:
        UnsupportedError: If there are too many paths.
        NotUnderstoodError: From a path, see there.
    """
    choices: list[bool] = []
    for _ in range(MAX_PATHS):
        walk = Walk(owner, module, function, choices)
        ended = walk.run(inputs)
        if ended:
            yield walk.path
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return
        choices[-1] = False
    raise UnsupportedError(f"{owner.__name__}.{function.__name__} has more than {MAX_PATHS} paths")


class _Return(Exception):  # noqa: N818  (control flow)
    def __init__(self, value: Value) -> None:
        self.value = value


class _DeadEnd(Exception):  # noqa: N818  (control flow)
    """The path raises: no tensor leaves the layer this way."""
