"""What a layer's source computes with, as symbols: tensors as sums of atoms, and everything else as is.

Additions stay visible, every other operation makes a new atom that remembers which sums it read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn


class Unknown:
    """What cannot be known from the source: the value of an attribute without an instance, a shape, ..."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()

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
    """

    number: int
    module: str = ""
    element: int = 0
    argument: str = ""
    reads: Reads = frozenset()


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

    def scaled(self, factor: str) -> Sum:
        """The same with every atom multiplied by `factor`."""
        return Sum(tuple((atom, (*factors, factor)) for atom, factors in self.terms))

    def reads(self, stream: Iterable[int]) -> Reads:
        """What an operation on it reads: itself if it holds the stream, else what its atoms had read."""
        if not self.numbers.isdisjoint(stream):
            return frozenset([self.numbers])
        return frozenset[frozenset[int]]().union(*(atom.reads for atom, _ in self.terms))


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


@dataclass(slots=True)
class Cell:
    """What a name is bound to: two names share one after ``a = b``, so that ``a += c`` is seen through both."""

    value: Value


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a submodule, or of something else that made a new tensor.

    Attributes:
        module: Path of the module, below the layer; "" if it is none.
        inputs: Its tensor arguments; the key is a position or a keyword.
        output: What it returned; of a fused add and norm the normed tensor.
        added: Of a fused add and norm, ``x, residual = norm(x, residual)``, the new residual; else None.
    """

    module: str
    inputs: Mapping[int | str, Sum]
    output: Atom
    added: Sum | None = None


@dataclass(slots=True)
class Path:
    """One way through ``forward``.

    Attributes:
        inputs: Atoms of the parameters that carry the stream.
        calls: In order.
        result: What it returns.
    """

    inputs: dict[str, Atom] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    result: Value = field(default_factory=lambda: Plain(None))


class NotUnderstoodError(Exception):
    """The source does something whose effect on the stream cannot be told; the text says what."""


def is_norm(path: str, module: object = UNKNOWN) -> bool:
    """Whether a submodule normalises: by its class where there is one, or by its name."""
    name = path.rpartition(".")[2].lower()
    by_name = "norm" in name or name.startswith(("ln_", "ln1", "ln2")) or name.endswith("_ln") or name == "ln"
    return by_name or (isinstance(module, nn.Module) and "norm" in type(module).__name__.lower())


def is_identity(path: str, module: object = UNKNOWN) -> bool:
    """Whether a submodule returns its input unchanged when serving."""
    name = path.rpartition(".")[2].lower()
    return isinstance(module, nn.Dropout | nn.Identity) or "dropout" in name or "drop_path" in name
