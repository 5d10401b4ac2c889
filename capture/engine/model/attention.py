"""Attention within a decoder layer: the argument through which it reads the stream, and its output projection.

The projection is the linear layer whose result is what attention returns. It is read from the source of the attention
module's ``forward``, as decoder layers are; its sizes are those of the module.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from headgate.capture.engine.model.symbolic_forward import Path, walk_paths
from headgate.capture.engine.model.symbols import Atom, Call, Items, Key, NotUnderstoodError, Sum, is_norm
from headgate.capture.schema.errors import UnsupportedError


def find_attention_input(branch: Atom, stream: frozenset[int], calls: Mapping[int, Call]) -> tuple[str, Key] | None:
    """Find the one argument through which `branch` reads the stream or its norm; None if there are several.

    Args:
        branch: What attention adds to the stream.
        stream: Numbers of the atoms that are the stream as it enters the layer.
        calls: Of the layer, by the number of their output.

    Returns:
        The module that has the argument, below the layer, and the argument.
    """
    entrances = _entrances(branch, stream, calls)
    if len(entrances) != 1:
        return None
    number, key = entrances.pop()
    call = calls.get(number)
    return None if call is None or is_norm(call.module) else (call.module, key)


def _entrances(atom: Atom, stream: frozenset[int], calls: Mapping[int, Call]) -> set[tuple[int, Key]]:
    """Return the arguments that are the stream or its norm, on all ways to `atom`: each with its call's output."""
    call = calls.get(atom.number)
    if call is None:
        return {(atom.number, "")}  # a module's second result: the way to it is not known
    found: set[tuple[int, Key]] = set()
    for key, value in call.inputs.items():
        for source, _ in value.terms:
            if source.number in stream or _is_input_norm(calls.get(source.number), stream):
                found.add((call.output.number, key))
            elif source.reads:
                found |= _entrances(source, stream, calls)
    return found


def _is_input_norm(call: Call | None, stream: frozenset[int]) -> bool:
    """Whether `call` is a norm of the stream as it enters the layer."""
    if call is None or not is_norm(call.module):
        return False
    return any(not value.numbers.isdisjoint(stream) for value in call.inputs.values())


class OutputProjection(NamedTuple):
    """A linear layer below an attention module.

    Attributes:
        module: Its dotted path, below the attention module.
        argument: Its argument that holds the heads' results.
        width: Values of a row of that argument, on this tensor-parallel rank.
        whole_width: The same on all ranks together.
        hidden_size: Values of a row of its result.
    """

    module: str
    argument: Key
    width: int
    whole_width: int
    hidden_size: int

    @property
    def obstacle(self) -> str:
        """Why its input cannot be a site, whose rows are as wide as the stream and whole on each rank; "" if it can."""
        if self.width != self.whole_width:
            return f"its {self.whole_width} values are spread over tensor-parallel ranks, {self.width} on each"
        if self.width != self.hidden_size:
            return f"it has {self.width} values where the stream has {self.hidden_size}, and all sites are equally wide"
        return ""


def find_output_projection(attention: nn.Module, argument: Key) -> OutputProjection | None:
    """Find the linear layer that makes the result of `attention`; None if the source does not show one.

    Args:
        attention: Module that attention starts with.
        argument: Its argument that holds the input, by position or name.
    """
    names = list(inspect.signature(inspect.unwrap(type(attention).forward)).parameters)[1:]
    name = argument if isinstance(argument, str) else names[argument] if argument < len(names) else ""
    if name not in names or "forward" in vars(attention):
        return None
    try:
        paths = list(walk_paths(type(attention), attention, {name: True}, hands_itself_out=True))
    except (NotUnderstoodError, UnsupportedError):
        return None
    found = {_last_call(path) for path in paths}
    module, key = (found.pop() if len(found) == 1 else None) or ("", 0)
    sizes = _sizes(attention, module)
    return OutputProjection(module, key, *sizes) if sizes is not None else None


def _last_call(path: Path) -> tuple[str, Key] | None:
    """Return the module whose result is the path's, if it is called once, and its one argument that reads the input."""
    result = path.result.values[0] if isinstance(path.result, Items) and path.result.values else path.result
    atom = result.atom if isinstance(result, Sum) else None
    calls = Counter(call.module for call in path.tape.calls)
    if atom is None or atom.element or calls[atom.module] != 1:
        return None
    call = next(call for call in path.tape.calls if call.module == atom.module)
    read = [key for key, value in call.inputs.items() if path.tape.reads(value)]
    return (call.module, read[0]) if len(read) == 1 else None


def _sizes(attention: nn.Module, path: str) -> tuple[int, int, int] | None:
    """Return the input's width on this rank and on all, and the result's; None if no linear layer is at `path`."""
    from vllm.model_executor.layers.linear import LinearBase

    try:
        module = attention.get_submodule(path) if path else None
    except AttributeError:
        return None
    module = getattr(module, "base_layer", module)  # of a layer that LoRA adapters wrap
    if isinstance(module, LinearBase):
        whole = int(module.input_size)
        return int(getattr(module, "input_size_per_partition", whole)), whole, int(module.output_size)
    if isinstance(module, nn.Linear):
        return module.in_features, module.in_features, module.out_features
    return None
