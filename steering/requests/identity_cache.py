"""Remembers what raw values came to, for those that come again: one `SamplingParams` is often used for many prompts.

Values are known by identity, and compared with a copy of what they held then: an array that was changed in place since
is read anew. That takes a fraction of reading.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

Result = TypeVar("Result")
_Key = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Found(Generic[Result]):
    """What values came to."""

    result: Result


class _Entry(NamedTuple):
    values: dict[str, Any]
    """Held, so that no other object gets the identity of one of them."""
    copies: dict[str, Any]
    found: Found[Any]


class IdentityCache(Generic[Result]):
    """The last few results. Any thread.

    Args:
        capacity: Results that are kept, each with its values and a copy of them.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._lock = Lock()

    def find(self, values: Mapping[str, Any]) -> Found[Result] | None:
        """What these very values came to, if they still hold what they held then; else None."""
        key = _key(values)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is None or not all(_is_same(values[name], entry.copies[name]) for name in values):
            return None
        return entry.found

    def keep(self, values: Mapping[str, Any], result: Result) -> None:
        """Remember what `values` came to; lists of numbers must hold numbers alone."""
        entry = _Entry(dict(values), {name: _copy(value) for name, value in values.items()}, Found(result))
        with self._lock:
            self._entries[_key(values)] = entry
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)


class _Array(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data: bytes


class _Tensor(NamedTuple):
    clone: Any


class _Buffer(NamedTuple):
    data: bytes


class _Listed(NamedTuple):
    items: list[Any]


def _key(values: Mapping[str, Any]) -> _Key:
    return tuple((name, id(value)) for name, value in values.items())


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_nested(items: list[Any] | tuple[Any, ...]) -> bool:
    return bool(items) and not isinstance(items[0], int | float | np.number)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return _Array(value.dtype, value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return _Listed([_copy(item) for item in value] if _is_nested(value) else list(value))
    if isinstance(value, bytearray | memoryview):
        return _Buffer(bytes(value))
    return _Tensor(value.detach().clone()) if _is_tensor(value) else value


def _is_same(value: Any, copy: Any) -> bool:
    if isinstance(value, Mapping):
        return (
            isinstance(copy, dict)
            and list(value) == list(copy)
            and all(_is_same(inner, copy[key]) for key, inner in value.items())
        )
    if isinstance(value, np.ndarray):
        return isinstance(copy, _Array) and (value.dtype, value.shape, value.tobytes()) == copy
    if isinstance(value, list | tuple):
        if not isinstance(copy, _Listed) or len(value) != len(copy.items):
            return False
        if _is_nested(value):
            return all(_is_same(item, kept) for item, kept in zip(value, copy.items, strict=True))
        return list(value) == copy.items
    if isinstance(value, bytearray | memoryview):
        return isinstance(copy, _Buffer) and bytes(value) == copy.data
    if _is_tensor(value):
        return isinstance(copy, _Tensor) and _is_same_tensor(value, copy.clone)
    return value is copy or (isinstance(value, int | float | str) and type(value) is type(copy) and value == copy)


def _is_same_tensor(value: Any, clone: Any) -> bool:
    import torch

    return (value.dtype, value.device, value.shape) == (clone.dtype, clone.device, clone.shape) and torch.equal(
        value, clone
    )
