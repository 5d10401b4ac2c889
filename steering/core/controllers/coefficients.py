"""Coefficients of contents on running requests, of what is contributed to each. Engine thread only."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.capture.schema.errors import RequestError
from headgate.steering.core.content import Limits, check_programs
from headgate.steering.core.controllers.contents import FIELD, Static
from headgate.steering.core.controllers.drives import Drive, Drives
from headgate.steering.programs.program import Program

Source = tuple[str, ...]
"""Whose contribution: the controller, and what it set."""


class Contribution(NamedTuple):
    """A content with its coefficient."""

    content: Program
    value: float


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
        changes: Changes that the workers do not know: column, first position and coefficient of each.
    """

    num_prompt: int
    static: Static
    contributions: dict[Source, tuple[int, float]] = field(default_factory=dict)
    drives: dict[int, Drive] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    key: bytes | None = None
    changes: list[tuple[int, int, float]] = field(default_factory=list)


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
        self._changed: dict[str, None] = {}
        """Requests with changes that the workers do not know."""
        self._num_keys = 0

    def add(self, req_id: str, num_prompt: int, static: Static) -> None:
        """Add a request, on which nothing is set."""
        self._requests[req_id] = DrivenRequest(num_prompt, static)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        request = self._requests.pop(req_id, None)
        self._changed.pop(req_id, None)
        for column in request.drives if request is not None else ():
            self._drives.let_go(column)

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

    def adjust(self, req_id: str, source: Source, value: float, first: int) -> None:
        """Change the coefficient of what a source contributes to a request already, from a position on."""
        request = self._requests[req_id]
        column, _ = request.contributions[source]
        request.contributions[source] = column, value
        self._set(req_id, request, column, first)

    def take_changes(self, scheduled: Collection[str]) -> list[tuple[str, int, int, float]]:
        """Return the changes that the workers do not know about the requests of a step; they count as told."""
        found = []
        for req_id in [known for known in self._changed if known in scheduled]:
            del self._changed[req_id]
            request = self._requests[req_id]
            found += [(req_id, *change) for change in request.changes]
            request.changes = []
        return found

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
        request.changes.append((column, first, value))
        self._changed[req_id] = None
        if request.key is None:
            # From here on its KV follows from what was decided, which no other request knows.
            self._num_keys += 1
            request.key = hashlib.sha256(f"headgate driven\n{self._num_keys}\n{req_id}".encode()).digest()
            if self._services.progress(req_id) is not None:
                self._services.rekey(req_id, first)
