"""Coefficients of contents on running requests, of what is contributed to each. Engine thread only.

Most requests have one contribution, whose value changes after each row. Those are kept in arrays beside
(`SingleContributions`), so that one change of many requests is a few operations on arrays.

`Actuation` makes contributions of the actions of controllers. Each action contributes to one request, or to all: a
controller's `SetSteering`, its `SetGlobal`, and one `SetScale` for each target. The coefficient of a content on a
request is the sum of the contributions to it there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.schema.batch import BoolArray, Int64Array
from headgate.capture.schema.errors import RequestError, finite, shown
from headgate.steering.controllers.actions import GLOBAL, SetGlobal, SetScale, SetSteering, SetSteeringEach
from headgate.steering.core.content import Limits, check_programs
from headgate.steering.core.controllers.contents import FIELD, Contents, Drive, Drives, Static
from headgate.steering.gates.step_table import (
    CoefficientChange,
    CoefficientChanges,
    ColumnChanges,
    by_column,
)
from headgate.steering.programs.program import Program
from headgate.steering.vectors.sums import MAX_STRENGTH

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.core_part import CoreServices


Source = tuple[str, ...]
"""Whose contribution: the controller, and what it set."""


@dataclass(slots=True)
class DrivenRequest:
    """A request that controllers may act on.

    Attributes:
        num_prompt: Tokens of its prompt.
        static: Its steering without them.
        contributions: Column and coefficient, by source.
        drives: All drives that it has had, by column.
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


class ActionRequests(NamedTuple):
    """Requests as an action names them; the next one is likely to name the same.

    Attributes:
        req_ids: The tuple object.
        numbers: int64 ``[n]``; `_NOBODY` for unknown requests.
        places: int64 ``[n]``: 0, 1, 2 ...
        are_different: Whether each of them comes once.
    """

    req_ids: tuple[str, ...]
    numbers: Int64Array
    places: Int64Array
    are_different: bool


_NO_REQUESTS = ActionRequests((), np.empty(0, np.int64), np.empty(0, np.int64), True)
_AT_FIRST = 64
_NONE = -1
_NOBODY = 0
"""The number of requests that are not known: it never has a contribution."""


class SingleContributions:
    """The requests by numbers, and the coefficient of each that has one contribution.

    Attributes:
        kinds: int64: number of the drive and source of each; `_NONE` for requests that have none, or several.
        values: float64: the coefficient of each that has one.
    """

    def __init__(self) -> None:
        self._free = list(range(_AT_FIRST - 1, _NOBODY, -1))
        self.kinds: Int64Array = np.full(_AT_FIRST, _NONE, np.int64)
        self.values: npt.NDArray[np.float64] = np.zeros(_AT_FIRST)
        self._sources: dict[Source, int] = {}
        self._group = _NO_REQUESTS

    def of(self, drive: Drive, source: Source) -> int:
        """Return the number in `kinds` of what a source contributes by a drive."""
        return drive.serial << 20 | self._sources.setdefault(source, len(self._sources))

    def take(self) -> int:
        """Return a free number."""
        self._group = _NO_REQUESTS
        if not self._free:
            size = len(self.kinds)
            self._free = list(range(2 * size - 1, size - 1, -1))
            self.kinds = np.concatenate([self.kinds, np.full(size, _NONE, np.int64)])
            self.values = np.concatenate([self.values, np.zeros(size)])
        return self._free.pop()

    def free(self, number: int) -> None:
        """Let a number be another request's."""
        self._group = _NO_REQUESTS
        self.kinds[number] = _NONE
        self._free.append(number)

    def group(self, req_ids: tuple[str, ...], requests: Mapping[str, DrivenRequest]) -> ActionRequests:
        """Return the known requests among some, by their numbers."""
        if self._group.req_ids is not req_ids:
            known = map(requests.get, req_ids)
            numbers = np.array([_NOBODY if request is None else request.number for request in known], np.int64)
            are_different = len(set(req_ids)) == len(req_ids)
            self._group = ActionRequests(req_ids, numbers, np.arange(len(req_ids)), are_different)
        return self._group

    def leave(self, request: DrivenRequest) -> None:
        """Put the value of a request's one contribution back to where several have theirs."""
        if self.kinds[request.number] == _NONE:
            return
        self.kinds[request.number] = _NONE
        ((source, (column, _)),) = request.contributions.items()
        request.contributions[source] = column, float(self.values[request.number])
        request.values[column] = request.contributions[source][1]

    def enter(self, request: DrivenRequest) -> None:
        """Keep the value of a request in the arrays, if it has one contribution."""
        if len(request.contributions) == 1 and request.key is not None:
            ((source, (column, value)),) = request.contributions.items()
            self.kinds[request.number] = self.of(request.drives[column], source)
            self.values[request.number] = value


class PendingChanges:
    """Keeps changes in the order in which they were decided, until steps of their requests."""

    def __init__(self) -> None:
        self._pieces: list[ColumnChanges] = []
        self._single: list[CoefficientChange] = []
        """Decided after the pieces, one by one."""

    def add(self, piece: ColumnChanges) -> None:
        """Add some of one column."""
        if self._single:
            self._close()
        self._pieces.append(piece)

    def add_one(self, change: CoefficientChange) -> None:
        """Add one."""
        self._single.append(change)

    def take(self, scheduled: Collection[str]) -> CoefficientChanges | None:
        """Take those of some requests; None if there are none."""
        if self._single:
            self._close()
        if not self._pieces:
            return None
        is_scheduled = scheduled.__contains__
        for piece in self._pieces:
            if not all(map(is_scheduled, piece.req_ids)):
                return tuple(self._split(is_scheduled)) or None
        found, self._pieces = self._pieces, []
        return tuple(found)

    def drop(self, req_id: str) -> None:
        """Drop those of a request."""
        self._single = [change for change in self._single if change.req_id != req_id]
        if any(req_id in piece.req_ids for piece in self._pieces):
            self._split(lambda known: known == req_id)

    def _close(self) -> None:
        """Make pieces of the changes that were decided one by one."""
        self._pieces += by_column(self._single)
        self._single = []

    def _split(self, is_taken: Callable[[str], bool]) -> list[ColumnChanges]:
        """Take those of some requests out, and keep the others."""
        found: list[ColumnChanges] = []
        kept: list[ColumnChanges] = []
        for piece in self._pieces:
            takes = np.array([is_taken(req_id) for req_id in piece.req_ids], np.bool_)[piece.whose]
            for into, wanted in ((found, takes), (kept, ~takes)):
                if np.count_nonzero(wanted):
                    into.append(piece.where(wanted))
        self._pieces = kept
        return found


class Contribution(NamedTuple):
    """A content with its coefficient."""

    content: Program
    value: float


class Coefficients:
    """The requests of an engine core, and the coefficients that they have.

    Args:
        drives: Gives contents columns.
        services: Gives positions, and hashes blocks anew.
        limits: Limits of all that controllers turn on for a request at one site.
    """

    def __init__(self, drives: Drives, services: CoreServices, limits: Limits) -> None:
        self._drives = drives
        self._services = services
        self._limits = limits
        self._requests: dict[str, DrivenRequest] = {}
        self._single = SingleContributions()
        self._pending = PendingChanges()
        self._num_keys = 0

    def add(self, req_id: str, num_prompt: int, static: Static) -> None:
        """Add a request, on which nothing is set."""
        self._requests[req_id] = DrivenRequest(num_prompt, static, self._single.take())

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self._single.free(request.number)
        for column in request.drives:
            self._drives.release(column)
        self._pending.drop(req_id)

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
        self._single.leave(request)
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
        self._single.enter(request)

    def adjust(self, req_id: str, source: Source, value: float, first: int) -> None:
        """Change the coefficient of what a source contributes to a request already, from a position on."""
        request = self._requests[req_id]
        self._single.leave(request)
        column, _ = request.contributions[source]
        request.contributions[source] = column, value
        self._set(req_id, request, column, first)
        self._single.enter(request)

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
            Which requests the change reached, ``[n]``: the others are not known, have ended, come several times, or
            have other contributions. And the first position of each reached request, int64 ``[n]``.
        """
        drive, single, group = self._drives.find(content), self._single, self._single.group(req_ids, self._requests)
        if drive is None or not group.are_different:
            return np.zeros(len(values), np.bool_), np.zeros(len(values), np.int64)
        numbers, firsts, whose = group.numbers, self._services.positions(req_ids), group.places
        if at is not None and len(at) < len(req_ids):
            # Workers keep what travels, and the array is the controller's, who may use it again.
            numbers, firsts, whose = numbers[at], firsts[at], at.copy()
        done: BoolArray = single.kinds[numbers] == single.of(drive, source)
        done &= firsts >= 0
        changed = single.values[numbers] != values
        changed &= done
        acting = firsts
        if np.count_nonzero(changed) < len(values):
            (index,) = changed.nonzero()
            numbers, whose, acting, values = numbers[index], whose[index], firsts[index], values[index]
        if len(values):
            single.values[numbers] = values
            self._pending.add(ColumnChanges(req_ids, whose, drive.column, acting, values.astype(np.float32)))
        return done, firsts

    def take_changes(self, scheduled: Collection[str]) -> CoefficientChanges | None:
        """Return the changes that the workers do not know about the requests of a step; they count as sent."""
        return self._pending.take(scheduled)

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
        self._pending.add_one(CoefficientChange(req_id, column, first, value))
        if request.key is None:
            # From here on its KV follows from what was decided, which no other request knows.
            self._num_keys += 1
            request.key = hashlib.sha256(f"headgate driven\n{self._num_keys}\n{req_id}".encode()).digest()
            if self._services.progress(req_id) is not None:
                self._services.rekey(req_id, first)


class Actuation:
    """Applies actions.

    Args:
        contents: Makes programs.
        coefficients: Coefficients of the requests.

    Attributes:
        coefficients: As given.
    """

    def __init__(self, contents: Contents, coefficients: Coefficients) -> None:
        self._contents = contents
        self.coefficients = coefficients
        self._for_all: dict[Source, SetGlobal | SetScale] = {}
        """Actions for all requests, later ones too."""
        self._log = SparseLog("steering")

    def begin(self, req_id: str, num_prompt: int, static: Static) -> list[tuple[str, SetGlobal | SetScale]]:
        """Follow a request; what was set for all acts on it, as far as it can.

        Returns:
            The actions that do, each with its controller.
        """
        self.coefficients.add(req_id, num_prompt, static)
        acting = []
        for source, action in self._for_all.items():
            try:
                if (added := self._for_request(action, static)) is not None:
                    self.coefficients.contribute(req_id, source, added, num_prompt)
                    acting.append((source[0], action))
            except RequestError as error:
                self._log.warning(f"controller {source[0]}: not on request {req_id}: {error}")
        return acting

    def steer(self, controller: str, action: SetSteering) -> dict[str, int]:
        """Apply an action to a request; returns the first position on which it acts there.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        request, first = self.coefficients.of(action.request), self._first(action.request)
        own = self._contribution(action)
        aside = None
        if not action.compose and not request.static.is_empty:
            aside = Contribution(self._contents.of_static(request.static), -1.0)
        instead = (controller, "instead")
        if aside is not None:
            self.coefficients.check(action.request, [own, aside])
        self.coefficients.contribute(action.request, (controller,), own, first)
        if aside is not None or instead in request.contributions:
            self.coefficients.contribute(action.request, instead, aside, first)
        return {action.request: first}

    def take_back(self, controller: str, req_id: str) -> Iterator[tuple[SetSteering | SetScale, dict[str, int]]]:
        """Take back what a controller set on one request alone; yields the actions that do so, and where they act."""
        sources = self.coefficients.of(req_id).contributions
        if (controller,) in sources or (controller, "instead") in sources:
            action = SetSteering(req_id)
            yield action, self.steer(controller, action)
        if (controller, "scale") in sources:
            unscaled = SetScale(req_id, 1.0)
            yield unscaled, self.scale(controller, unscaled)

    def steer_each(self, controller: str, action: SetSteeringEach) -> tuple[BoolArray, Int64Array]:
        """Apply an action to those of its requests on which its controller has that module on alone: by arrays.

        Args:
            controller: Its name.
            action: With a tuple of requests, and a scale for each that it is for, float64 ``[n]``.

        Returns:
            To which of the requests it was applied, ``[n]``, and the first position of each of those, int64 ``[n]``.
            For the others nothing has changed; `steer` applies what `SetSteeringEach.each` yields for them.
        """
        if np.count_nonzero(np.abs(action.scales) <= MAX_STRENGTH) == len(action.scales):  # none is not a number
            try:
                content = self._contents.of_module(action.module)
                return self.coefficients.adjust_each(
                    tuple(action.requests), action.at, (controller,), content, action.scales
                )
            except RequestError:
                pass
        return np.zeros(len(action), np.bool_), np.zeros(len(action), np.int64)

    def forget(self, req_id: str) -> None:
        """Forget a request, if it is known. Any thread."""
        self.coefficients.forget(req_id)

    def steer_all(self, controller: str, action: SetGlobal) -> dict[str, int]:
        """Apply an action to all requests; returns the first position of each that it changes.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        if action.phase != "decode":
            raise RequestError(
                FIELD, f"phase: controllers act on generated positions: expected decode, got {action.phase!r}"
            )
        return self._apply_to_all((controller, GLOBAL), action)

    def scale(self, controller: str, action: SetScale) -> dict[str, int]:
        """Scale steering that is there without controllers; returns the first position of each request that changes.

        Raises:
            RequestError: If it cannot be applied. Nothing has changed.
        """
        _check_number(action.scale)
        if action.target in self.coefficients.ids():
            request, first = self.coefficients.of(action.target), self._first(action.target)
            added = Contribution(self._contents.of_static(request.static), action.scale - 1.0)
            self.coefficients.contribute(action.target, (controller, "scale"), added, first)
            return {action.target: first}
        if action.target == GLOBAL:
            self._contents.of_global()
        else:
            self._contents.check_module(action.target)
        return self._apply_to_all((controller, "scale", action.target), action)

    def global_changed(self) -> None:
        """Follow a change of the global vectors, after which everything is computed anew: their scale is 1 again."""
        scaled = [
            source
            for source, action in self._for_all.items()
            if isinstance(action, SetScale) and action.target == GLOBAL
        ]
        for source in scaled:
            del self._for_all[source]
            for req_id in self.coefficients.ids():
                self.coefficients.contribute(req_id, source, None, self.coefficients.of(req_id).num_prompt)

    def _first(self, req_id: str) -> int:
        first = self.coefficients.next_position(req_id)
        if first is None:
            raise RequestError(FIELD, f"request {req_id!r} has ended")
        return first

    def _contribution(self, action: SetSteering | SetGlobal) -> Contribution | None:
        """Return what an action turns on; None for nothing."""
        given = action.given
        _check_number(action.scale)
        if len(given) > 1:
            raise RequestError(
                FIELD, f"expected at most one of module, vectors, ops and features, got {' and '.join(given)}"
            )
        if not given or action.scale == 0:
            return None
        if action.module is not None:
            return Contribution(self._contents.of_module(action.module), float(action.scale))
        return Contribution(self._contents.of_document(given), float(action.scale))

    def _for_request(self, action: SetGlobal | SetScale, static: Static) -> Contribution | None:
        """Return what an action for all turns on for a request."""
        if isinstance(action, SetGlobal):
            return self._contribution(action)
        if action.target == GLOBAL:
            return Contribution(self._contents.of_global(), action.scale - 1.0)
        named = [(module, scale) for module, scale in static.modules if module.name == action.target and scale]
        if not named:
            return None
        scale = math.fsum(scale for _, scale in named)
        return Contribution(self._contents.of_module_vectors(named[0][0]), scale * (action.scale - 1.0))

    def _apply_to_all(self, source: Source, action: SetGlobal | SetScale) -> dict[str, int]:
        wanted = {
            req_id: self._for_request(action, self.coefficients.of(req_id).static) for req_id in self.coefficients.ids()
        }
        firsts = {req_id: first for req_id in wanted if (first := self.coefficients.next_position(req_id)) is not None}
        for req_id in firsts:
            self.coefficients.check(req_id, [wanted[req_id]])
        self._for_all[source] = action
        changed = {}
        for req_id, first in firsts.items():
            if wanted[req_id] is not None or source in self.coefficients.of(req_id).contributions:
                self.coefficients.contribute(req_id, source, wanted[req_id], first)
                changed[req_id] = first
        return changed


def _check_number(value: Any) -> None:
    if finite(value) is None:
        raise RequestError(FIELD, f"scale: expected a finite number, got {shown(value)}")
    if abs(value) > MAX_STRENGTH:
        raise RequestError(FIELD, f"scale: expected a number of at most {MAX_STRENGTH:g} in magnitude, got {value:g}")
