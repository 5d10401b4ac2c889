"""Requests with one contribution each, whose value changes behind each row: in arrays, for all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import Int64Array
from headgate.steering.core.controllers.contents import Static
from headgate.steering.core.controllers.driving.drives import Drive

Source = tuple[str, ...]
"""Whose contribution: the controller, and what it set."""


@dataclass(slots=True)
class DrivenRequest:
    """A request that controllers may act on.

    Attributes:
        num_prompt: Tokens of its prompt.
        static: Its steering without them.
        contributions: Column and coefficient, by source.
        drives: Those that it has had, by column.
        values: The coefficient in each column.
        key: Content key of what was set; None as long as nothing was.
        number: Its place in arrays.
    """

    num_prompt: int
    static: Static
    number: int
    contributions: dict[Source, tuple[int, float]] = field(default_factory=dict)
    drives: dict[int, Drive] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    key: bytes | None = None


class Group(NamedTuple):
    """Requests as an action names them; the next one is likely to name the same.

    Attributes:
        req_ids: The very tuple.
        numbers: int64 ``[n]``; `_NOBODY` for those that are not known.
        places: int64 ``[n]``: 0, 1, 2 ...
        are_different: Whether each of them comes once.
    """

    req_ids: tuple[str, ...]
    numbers: Int64Array
    places: Int64Array
    are_different: bool


_NO_GROUP = Group((), np.empty(0, np.int64), np.empty(0, np.int64), True)
_AT_FIRST = 64
_NO_LANE = -1
_NOBODY = 0
"""The number of requests that are not known: it never has a lane."""


class Lanes:
    """The requests, by numbers.

    Attributes:
        lanes: int64: number of the drive and source of each; `_NO_LANE` for requests that have none, or several.
        values: float64: the coefficient of each that has a lane.
    """

    def __init__(self) -> None:
        self._free = list(range(_AT_FIRST - 1, _NOBODY, -1))
        self.lanes: Int64Array = np.full(_AT_FIRST, _NO_LANE, np.int64)
        self.values: npt.NDArray[np.float64] = np.zeros(_AT_FIRST)
        self._sources: dict[Source, int] = {}
        self._group = _NO_GROUP

    def of(self, drive: Drive, source: Source) -> int:
        """Return the lane of what a source contributes by a drive."""
        return drive.serial << 20 | self._sources.setdefault(source, len(self._sources))

    def take(self) -> int:
        """Return a free number."""
        self._group = _NO_GROUP
        if not self._free:
            size = len(self.lanes)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.lanes = np.concatenate([self.lanes, np.full(size, _NO_LANE, np.int64)])
            self.values = np.concatenate([self.values, np.zeros(size)])
        return self._free.pop()

    def free(self, number: int) -> None:
        """Let a number be another request's."""
        self._group = _NO_GROUP
        self.lanes[number] = _NO_LANE
        self._free.append(number)

    def group(self, req_ids: tuple[str, ...], requests: Mapping[str, DrivenRequest]) -> Group:
        """Return some requests, among those that are known, by their numbers."""
        if self._group.req_ids is not req_ids:
            known = map(requests.get, req_ids)
            numbers = np.array([_NOBODY if request is None else request.number for request in known], np.int64)
            are_different = len(set(req_ids)) == len(req_ids)
            self._group = Group(req_ids, numbers, np.arange(len(req_ids)), are_different)
        return self._group

    def leave(self, request: DrivenRequest) -> None:
        """Put the value of a request's one contribution back to where several have theirs."""
        if self.lanes[request.number] == _NO_LANE:
            return
        self.lanes[request.number] = _NO_LANE
        ((source, (column, _)),) = request.contributions.items()
        request.contributions[source] = column, float(self.values[request.number])
        request.values[column] = request.contributions[source][1]

    def enter(self, request: DrivenRequest) -> None:
        """Give a request a lane, if it has one contribution."""
        if len(request.contributions) == 1 and request.key is not None:
            ((source, (column, value)),) = request.contributions.items()
            self.lanes[request.number] = self.of(request.drives[column], source)
            self.values[request.number] = value
