"""A list that only its length may be asked of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Unread(Sequence[int]):
    """A list of some length whose elements nobody may look at."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"element {index} was read")
