"""Element types of steering vectors: how rows are stored, widened, narrowed and measured. numpy only.

numpy has no bfloat16, so rows of that type are held as their raw bits in uint16; the upper half of a float32 is exactly
the bfloat16 of the same value.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

StoredType = Literal["bfloat16", "float16", "float32"]
"""Element types that a vector is kept and sent in."""

Rows = npt.NDArray[Any]
"""``[n, hidden]`` in a stored type: uint16 bits for bfloat16, else float16 or float32."""

Float32Rows = npt.NDArray[np.float32]

STORAGE: dict[StoredType, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""The numpy type that holds each element type: little-endian, as on the wire and in files."""

_BITS: dict[StoredType, npt.NDArray[Any]] = {
    "bfloat16": np.array(0x7FFF, "<u2"),
    "float16": np.array(0x7FFF, "<u2"),
    "float32": np.array(0x7FFFFFFF, "<u4"),
}
"""The mask that clears the sign bit of each element type, in its unsigned view."""

OVERFLOW: dict[str, float] = {
    "float16": 65520.0,
    "bfloat16": float(np.array(0x7F7F8000, np.uint32).view(np.float32)),
    "float32": float("inf"),
}
"""The smallest magnitude that rounds to infinity in a model of each element type."""


def widen(rows: Rows, dtype: StoredType) -> Float32Rows:
    """Return the same values in float32, exactly; `rows` itself if it is float32 already."""
    if dtype == "float32":
        return cast("Float32Rows", rows)
    if dtype == "float16":
        return rows.astype(np.float32)
    return np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)


def narrowest(rows: Rows, dtype: StoredType) -> tuple[Rows, StoredType]:
    """Return the rows in the first of bfloat16, float16, float32 that holds every value exactly, and its name.

    The result depends on the values alone, not on the type they came in: equal values have equal bytes.
    The first row is tried alone first, so the common case of no exact form costs next to nothing.
    """
    if dtype == "bfloat16" or not len(rows):
        return rows, dtype
    if as_bfloat16(rows[:1], dtype) is not None:
        bits = as_bfloat16(rows, dtype)
        if bits is not None:
            return bits, "bfloat16"
    if dtype == "float16":
        return rows, dtype
    if _as_float16(rows[:1]) is not None:
        halves = _as_float16(rows)
        if halves is not None:
            return halves, "float16"
    return rows, "float32"


def as_bfloat16(rows: Rows, dtype: StoredType) -> Rows | None:
    """Return the rows as bits of bfloat16 if it holds every value exactly, what is not finite included; else None."""
    bits = np.ascontiguousarray(widen(rows, dtype)).view(np.uint32)
    if np.bitwise_or.reduce(bits, axis=None) & 0xFFFF:
        return None
    return np.right_shift(bits, np.uint32(16)).astype(np.uint16)


def _as_float16(rows: Rows) -> Rows | None:
    with np.errstate(over="ignore", under="ignore"):
        halves = rows.astype(np.float16)
    is_exact = np.array_equal(halves.astype(np.float32).view(np.uint32), rows.view(np.uint32))
    return halves if is_exact else None


def peaks(rows: Rows, dtype: StoredType) -> npt.NDArray[np.float32]:
    """Return the largest magnitude of each row, ``[n]``; not finite if one of its values is not."""
    mask = _BITS[dtype]
    largest = (rows.view(mask.dtype) & mask).max(axis=1)
    return widen(largest.view(STORAGE[dtype]), dtype)
