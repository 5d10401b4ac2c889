"""Content of requests, read and checked, as plain values that travel between processes.

The annotations of its classes (Structs, dataclasses and NamedTuples) say how each is written and read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np

from headgate.capture.schema.positions import PositionSelector, Selector
from headgate.steering.programs.operations import ModuleVector, OperationVector

T = TypeVar("T")


class ContentWire(TypedDict):
    """Content as plain values.

    Attributes:
        content: Values; arrays are their indices in `arrays`.
        arrays: Dtype (as NumPy writes it), shape and bytes of each, once.
    """

    content: Any
    arrays: list[tuple[str, list[int], bytes]]


def content_to_wire(content: object) -> ContentWire:
    """Return plain values that `content_from_wire` reads back."""
    arrays: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}

    def write(value: Any) -> Any:
        if isinstance(value, Mapping):  # a read-only view of one, which msgspec does not know
            return dict(value)
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"content of an unknown type: {type(value).__name__}")
        return arrays.setdefault(id(value), (len(arrays), value))[0]

    plain = msgspec.to_builtins(content, builtin_types=(bytes,), enc_hook=write)
    written = [(array.dtype.str, list(array.shape), array.tobytes()) for _, array in arrays.values()]
    return {"content": plain, "arrays": written}


def content_from_wire(kind: type[T], wire: ContentWire) -> T:
    """Return the content of a type that `content_to_wire` wrote; arrays are views of the received bytes."""

    def read(declared: Any, value: Any) -> Any:
        if declared is PositionSelector:
            return msgspec.convert(value, Selector, dec_hook=read)
        if declared is OperationVector and not isinstance(value, int):
            return msgspec.convert(value, ModuleVector)
        if not 0 <= value < len(wire["arrays"]):
            raise ValueError(f"array {value} of {len(wire['arrays'])}")
        dtype, shape, data = wire["arrays"][value]
        return np.frombuffer(data, dtype).reshape(shape)

    return msgspec.convert(wire["content"], kind, dec_hook=read)
