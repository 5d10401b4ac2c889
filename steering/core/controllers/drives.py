"""The contents that controllers turn on, each with a column for its coefficient and slots for its vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from headgate.capture.schema.errors import RequestError
from headgate.steering.core.admission import Demand, Load, Reservations
from headgate.steering.core.controllers.contents import FIELD, driven
from headgate.steering.programs.program import Program


class Drive(NamedTuple):
    """A content that is known to the workers.

    Attributes:
        column: Column of its coefficient.
        program: With that column in it.
        serial: Serial number among all drives: another content in this column has another.
    """

    column: int
    program: Program
    serial: int

    def to_worker(self) -> dict[str, Any]:
        """Return plain values for `headgate.steering.worker.rows.rule_programs.ActingRule`."""
        wire = self.program.to_wire()
        name, columns = f"drive\n{self.column}", [self.column, self.column + 1]
        return {"name": name, "applies_to": None, "columns": columns, "prefill": wire, "decode": wire}


class Drives:
    """The contents in use. Engine thread only.

    One that no request uses stays until its column is needed. Where it was used, it stays while that request lives: the
    request's rows may be computed again.

    Args:
        columns: The columns that they can have.
        reservations: Reserves slots.
        tell: Sends these programs to the workers.
    """

    def __init__(
        self,
        columns: Sequence[int],
        reservations: Reservations[str],
        tell: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> None:
        self._free = list(columns)
        self._reservations = reservations
        self._tell = tell
        self._known: dict[bytes, Drive] = {}
        """By the key of the content, the one that was used the longest time ago first."""
        self._serials = count()
        self._users: Counter[int] = Counter()
        """Requests, by column."""

    def of(self, content: Program) -> Drive:
        """Return the drive of a content, which the workers know from here on.

        Raises:
            RequestError: If there is no room for it.
            Exception: What a worker raised. Nothing has changed.
        """
        if (known := self._known.pop(content.key, None)) is not None:
            self._known[content.key] = known
            return known
        column = self._free[-1] if self._free else self._make_room()
        made = Drive(column, driven(content, column), next(self._serials))
        self._reservations.keep_module(_key(column), demand_of_both(made.program), FIELD)
        try:
            self._tell([*(drive.to_worker() for drive in self._known.values()), made.to_worker()])
        except BaseException:
            self._reservations.release_module(_key(column))
            raise
        self._free.remove(column)
        self._known[content.key] = made
        return made

    def find(self, content: Program) -> Drive | None:
        """Return the drive of a content, if the workers know it."""
        return self._known.get(content.key)

    def use(self, column: int) -> None:
        """Count a request that is driven in a column."""
        self._users[column] += 1

    def release(self, column: int) -> None:
        """Undo `use`."""
        self._users[column] -= 1

    def _make_room(self) -> int:
        """Free the least recently used column that no request uses."""
        for key, drive in self._known.items():
            if not self._users[drive.column]:
                del self._known[key]
                self._free.append(drive.column)
                self._reservations.release_module(_key(drive.column))
                return drive.column
        raise RequestError(
            FIELD, f"{len(self._known)} different contents act on running requests, the most that can at a time"
        )


def _key(column: int) -> str:
    """The key of a drive among the registered names of an engine core, which nothing else there can have."""
    return f"drive\n{column}"


def demand_of_both(program: Program) -> Demand:
    """Return the slots of a program that workers have for both phases."""
    load = Load(program.key, program.num_rows)
    return Demand(load, load)
