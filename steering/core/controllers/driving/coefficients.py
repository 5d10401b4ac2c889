"""Coefficients of contents on running requests, of what is contributed to each. Engine thread only.

Most requests have one contribution, whose value changes behind each row. Those are kept in arrays beside (`Lanes`), so
that one change of many requests is a few operations on arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError
from headgate.steering.core.content import Limits, check_programs
from headgate.steering.core.controllers.contents import FIELD, Static
from headgate.steering.core.controllers.driving.drives import Drives
from headgate.steering.core.controllers.driving.lanes import DrivenRequest, Lanes, Source
from headgate.steering.core.controllers.driving.untold import Untold
from headgate.steering.gates.coefficient_changes import CoefficientChange, CoefficientChanges, ColumnChanges
from headgate.steering.programs.program import Program


class Contribution(NamedTuple):
    """A content with its coefficient."""

    content: Program
    value: float


class Coefficients:
    """The requests of an engine core, and the coefficients that they have.

    Args:
        drives: Gives contents columns.
        services: Tells positions, and hashes blocks anew.
        limits: Of all that controllers turn on for a request at one site.
    """

    def __init__(self, drives: Drives, services: CoreServices, limits: Limits) -> None:
        self._drives = drives
        self._services = services
        self._limits = limits
        self._requests: dict[str, DrivenRequest] = {}
        self._lanes = Lanes()
        self._untold = Untold()
        self._num_keys = 0

    def add(self, req_id: str, num_prompt: int, static: Static) -> None:
        """Add a request, on which nothing is set."""
        self._requests[req_id] = DrivenRequest(num_prompt, static, self._lanes.take())

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self._lanes.free(request.number)
        for column in request.drives:
            self._drives.let_go(column)
        self._untold.drop(req_id)

    def ids(self) -> list[str]:
        """Return the requests."""
        return list(self._requests)

    def of(self, req_id: str) -> DrivenRequest:
        """Return a request.

        Raises:
            RequestError: If it is not known.
        """
        if (found := self._requests.get(req_id)) is None:
            raise RequestError(FIELD, f"no request {req_id!r} runs")
        return found

    def key(self, req_id: str) -> bytes | None:
        """Return the content key of all that was set on a request; no other request has the same. Any thread."""
        request = self._requests.get(req_id)
        return None if request is None else request.key

    def next_position(self, req_id: str) -> int | None:
        """Return the first position of a request on which a change acts; None if it has ended, or waits unseen."""
        progress = self._services.progress(req_id)
        return None if progress is None else progress.position

    def check(self, req_id: str, added: Iterable[Contribution | None]) -> None:
        """Check that contributions fit beside what was set on a request; the workers know their contents after that.

        Raises:
            RequestError: If they do not, or there is no room for them.
        """
        request = self._requests[req_id]
        drives = dict(request.drives)
        for contribution in added:
            if contribution is not None:
                drive = self._drives.of(contribution.content)
                drives[drive.column] = drive
        if len(drives) > len(request.drives):
            programs = [drive.program for drive in drives.values()]
            check_programs(programs, self._limits, FIELD, "with what controllers turned on before")

    def contribute(self, req_id: str, source: Source, added: Contribution | None, first: int) -> None:
        """Put a contribution in place of the earlier one of its source, from a position on.

        Raises:
            RequestError: As `check`. Nothing has changed.
        """
        request = self._requests[req_id]
        drive = None if added is None else self._drives.of(added.content)
        earlier = request.contributions.get(source)
        if drive is not None and added is not None and earlier is not None and earlier[0] == drive.column:
            self.adjust(req_id, source, added.value, first)
            return
        self.check(req_id, [added])
        self._lanes.leave(request)
        touched: set[int] = set()
        if request.contributions.pop(source, None) is not None and earlier is not None:
            touched.add(earlier[0])
        if drive is not None and added is not None:
            request.contributions[source] = drive.column, added.value
            touched.add(drive.column)
            if drive.column not in request.drives:
                request.drives[drive.column] = drive
                self._drives.use(drive.column)
        for column in sorted(touched):
            self._set(req_id, request, column, first)
        self._lanes.enter(request)

    def adjust(self, req_id: str, source: Source, value: float, first: int) -> None:
        """Change the coefficient of what a source contributes to a request already, from a position on."""
        request = self._requests[req_id]
        self._lanes.leave(request)
        column, _ = request.contributions[source]
        request.contributions[source] = column, value
        self._set(req_id, request, column, first)
        self._lanes.enter(request)

    def adjust_each(
        self,
        req_ids: tuple[str, ...],
        at: Int64Array | None,
        source: Source,
        content: Program,
        values: npt.NDArray[np.float64],
    ) -> tuple[BoolArray, Int64Array]:
        """Change the coefficient of many requests, whose one contribution is this content of a source.

        Args:
            req_ids: The requests, and others.
            at: Their places there, ascending, int64 ``[n]``; None for all.
            source: Whose contribution.
            content: What it contributes.
            values: The coefficients, float64 ``[n]``, finite.

        Returns:
            Of which requests it is that now, ``[n]``: the others are not known, have ended, come several times, or have
            other contributions. And the first position of each of those, int64 ``[n]``.
        """
        drive, lanes, group = self._drives.find(content), self._lanes, self._lanes.group(req_ids, self._requests)
        if drive is None or not group.are_different:
            return np.zeros(len(values), np.bool_), np.zeros(len(values), np.int64)
        numbers, firsts, whose = group.numbers, self._services.positions(req_ids), group.places
        if at is not None and len(at) < len(req_ids):
            # Workers keep what travels, and the array is the controller's, who may use it again.
            numbers, firsts, whose = numbers[at], firsts[at], at.copy()
        done: BoolArray = lanes.lanes[numbers] == lanes.of(drive, source)
        done &= firsts >= 0
        changed = lanes.values[numbers] != values
        changed &= done
        acting = firsts
        if np.count_nonzero(changed) < len(values):
            (index,) = changed.nonzero()
            numbers, whose, acting, values = numbers[index], whose[index], firsts[index], values[index]
        if len(values):
            lanes.values[numbers] = values
            self._untold.add(ColumnChanges(req_ids, whose, drive.column, acting, values.astype(np.float32)))
        return done, firsts

    def take_changes(self, scheduled: Collection[str]) -> CoefficientChanges | None:
        """Return the changes that the workers do not know about the requests of a step; they count as told."""
        return self._untold.take(scheduled)

    def _set(self, req_id: str, request: DrivenRequest, column: int, first: int) -> None:
        contributions = request.contributions
        if len(contributions) == 1:
            ((known, value),) = contributions.values()
            value = value if known == column else 0.0
        else:
            value = sum(value for known, value in contributions.values() if known == column)
        if value == request.values.get(column, 0.0):
            return
        request.values[column] = value
        self._untold.add_one(CoefficientChange(req_id, column, first, value))
        if request.key is None:
            # From here on its KV follows from what was decided, which no other request knows.
            self._num_keys += 1
            request.key = hashlib.sha256(f"headgate driven\n{self._num_keys}\n{req_id}".encode()).digest()
            if self._services.progress(req_id) is not None:
                self._services.rekey(req_id, first)
