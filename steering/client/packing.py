"""Vectors of every form that a field accepts, packed for a request body. Knows no server and no model.

Checks that need the model (the width, the layers, the sites that can be steered) are left to the server.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from headgate.capture.schema.errors import RequestError, shown
from headgate.capture.schema.sites import HookPoint, parse_hook
from headgate.steering.requests.vector_forms import read_vector, split_scale
from headgate.steering.vectors.dtypes import Rows, StoredType, widen
from headgate.steering.vectors.phase_vectors import PhaseVectors

Packed = dict[str, Any]

LISTS = ("mask", "positions", "layers")
"""Keys of operations whose numbers are no vector."""


def pack(vectors: Any, field: str, *, as_text: bool) -> Packed:
    """Pack one tier of vectors, by hook point.

    Args:
        vectors: `PhaseVectors`, or ``{hook: {layer: vector}}`` with a vector as a list, an array, a tensor or
            ``{"vector": ..., "scale": number}``. A hook point that is packed already stays as it is.
        field: Its name, for errors.
        as_text: The bytes become base64, for a JSON body.

    Raises:
        RequestError: If it cannot be read; the message names the vector.
    """
    if isinstance(vectors, PhaseVectors):
        return vectors.packed(as_text=as_text)
    if not isinstance(vectors, Mapping):
        raise RequestError(field, f"expected PhaseVectors or an object of hook point to vectors, got {shown(vectors)}")
    return {name: _pack_hook(given, name, f"{field}.{name}", as_text) for name, given in vectors.items()}


def pack_arrays(value: Any, where: str, *, as_text: bool, key: str = "") -> Any:
    """Return a field of operations with its arrays and tensors packed, and all else as it is.

    Args:
        value: Operations, or clamps by hook point and layer, with vectors in any form.
        where: Its name, for errors.
        as_text: The bytes become base64, for a JSON body.
        key: Of the value in the mapping around it; arrays of `LISTS` become lists.

    Raises:
        RequestError: If an array is no vector; the message names it.
    """
    if isinstance(value, Mapping):
        return {
            name: pack_arrays(inner, f"{where}.{name}", as_text=as_text, key=str(name)) for name, inner in value.items()
        }
    if isinstance(value, bytes | bytearray):
        return _travelling(value, as_text)
    if isinstance(value, list | tuple):
        is_row = bool(value) and isinstance(value[0], int | float)
        return (
            value
            if is_row
            else [pack_arrays(inner, f"{where}[{at}]", as_text=as_text, key=key) for at, inner in enumerate(value)]
        )
    if not hasattr(value, "tolist"):
        return value
    if key in LISTS or not getattr(value, "ndim", 0):
        return value.tolist()
    row, dtype = read_vector(value, _width(value, where), where)
    return {"dtype": dtype, "shape": [len(row)], "data": _travelling(row.tobytes(), as_text)}


def pack_gates(gates: Any, where: str, *, as_text: bool) -> Any:
    """Return gates with their arrays, tensors and `PhaseVectors` packed, and all else as it is.

    Args:
        gates: Gates of a request; what is no list of objects is left to the server.
        where: Name of the field, for errors.
        as_text: The bytes become base64, for a JSON body.

    Raises:
        RequestError: If vectors cannot be read; the message names them.
    """
    if not isinstance(gates, list | tuple):
        return gates
    packed = []
    for index, gate in enumerate(gates):
        then = gate.get("then") if isinstance(gate, Mapping) else None
        if isinstance(then, Mapping) and then.get("vectors") is not None:
            vectors = pack(then["vectors"], f"{where}[{index}].then.vectors", as_text=as_text)
            gate = {**gate, "then": {**then, "vectors": vectors}}
        packed.append(gate)
    return pack_arrays(packed, where, as_text=as_text)


def _pack_hook(given: Any, name: Any, where: str, as_text: bool) -> Packed:
    if isinstance(given, Mapping) and "data" in given:
        data = given["data"]
        return {**given, "data": _travelling(data, as_text) if isinstance(data, bytes | bytearray) else data}
    is_layered = isinstance(given, Mapping) and "vector" not in given
    if parse_hook(name, where) is HookPoint.FINAL_NORM and not is_layered:
        given = {-1: given}
    if not isinstance(given, Mapping) or not given:
        raise RequestError(where, f"expected a non-empty object of layer to vector, got {shown(given)}")
    rows, scales = [], []
    for layer, vector in given.items():
        inner = f"{where}.{layer}"
        vector, scale = split_scale(vector, inner) if isinstance(vector, Mapping) else (vector, 1.0)
        rows.append(read_vector(vector, _width(vector, inner), inner))
        scales.append(scale)
    data, dtype, width = _stack(rows, where)
    document: Packed = {
        "dtype": dtype,
        "shape": [len(rows), width],
        "layer_indices": list(given),
        "data": _travelling(data, as_text),
    }
    return {**document, "scales": scales} if any(scale != 1 for scale in scales) else document


def _width(vector: Any, where: str) -> int:
    try:
        return len(vector)
    except TypeError:
        raise RequestError(where, f"expected a list of numbers, an array or a tensor, got {shown(vector)}") from None


def _stack(rows: list[tuple[Rows, StoredType]], where: str) -> tuple[bytes, StoredType, int]:
    """Join the rows, in their own type if they share one, else in float32; return bytes, type and width."""
    widths = sorted({len(row) for row, _ in rows})
    if len(widths) != 1 or widths[0] == 0:
        raise RequestError(where, f"expected vectors of one width, got the widths {widths}")
    types = {dtype for _, dtype in rows}
    if len(types) == 1:
        return b"".join(row.tobytes() for row, _ in rows), types.pop(), widths[0]
    return b"".join(np.asarray(widen(row, dtype), "<f4").tobytes() for row, dtype in rows), "float32", widths[0]


def _travelling(data: bytes | bytearray, as_text: bool) -> str | bytes:
    return base64.b64encode(data).decode("ascii") if as_text else bytes(data)
