"""The contents that controllers turn on: programs with a coefficient each, its column, and slots for their vectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, cast

from headgate.capture.schema.errors import RequestError
from headgate.steering.core.admission import Demand, Load, Reservations
from headgate.steering.core.gates import GateContent
from headgate.steering.core.resolved import Module
from headgate.steering.core.state import SteeringState
from headgate.steering.documents.gates import read_then
from headgate.steering.documents.operations import KeptRows, VectorReader
from headgate.steering.gates.lowering import DECODE, joined_entries, then_programs
from headgate.steering.programs.codes import gate_field
from headgate.steering.programs.program import Program, entries_of
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors, weighted_sum

FIELD = "controller"
"""Stands for the field of a request in errors about actions."""


class Static(NamedTuple):
    """The steering that a request has on generated positions without controllers.

    Attributes:
        vectors: Its own vectors; None if there are none.
        modules: Modules that it names, with the scale of each.
        has_programs: Whether it has operations, features or gates of its own.
    """

    vectors: PhaseVectors | None = None
    modules: tuple[tuple[Module, float], ...] = ()
    has_programs: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing steers it."""
        return self.vectors is None and not self.modules and not self.has_programs


NOTHING = Static()


class Contents:
    """Makes programs of the content of actions. Engine thread only.

    Args:
        state: State of the engine core.

    Raises:
        AssertionError: If it does not know its model.
    """

    def __init__(self, state: SteeringState) -> None:
        if state.steerable is None:
            raise AssertionError("controllers in an engine core that does not know its model")
        self._state = state
        self._steerable = state.steerable
        self._modules: dict[str, tuple[Module, Program]] = {}
        """Programs of modules by their names, with what they were made of."""

    def of_module(self, name: str) -> Program:
        """Return what a registered module does at generated positions, with the scale 1.

        Raises:
            RequestError: If there is none of that name, or it cannot be turned on here.
        """
        module, known = self._state.module(name, FIELD), self._modules.get(name)
        if known is not None and known[0] is module:
            return known[1]
        program = self._checked(self._joined(module.decode, module.decode_program), f"{FIELD}.module")
        self._modules[name] = module, program
        return program

    def check_module(self, name: str) -> None:
        """Refuse a name that no registered module has.

        Raises:
            RequestError: If it is one.
        """
        self._state.module(name, FIELD)

    def of_document(self, document: Mapping[str, Any]) -> Program:
        """Return what one of ``module``, ``vectors``, ``ops`` and ``features`` does at generated positions.

        Raises:
            RequestError: If it cannot be read, or cannot be turned on here.
        """
        where = f"{FIELD}.{next(iter(document), 'content')}"
        then = read_then(document, self._steerable, VectorReader(KeptRows()), FIELD)
        modules = {module.name: module for module in self._state.modules()}
        content = GateContent(self._steerable, self._state.probes, self._state.saes, modules)
        return self._checked(then_programs(then, content, content.dtype)[DECODE], where)

    def of_static(self, static: Static) -> Program:
        """Return a request's own vectors, and those of its modules.

        Raises:
            RequestError: If there are none, or it has programs beside.
        """
        if static.has_programs or any(module.decode_program is not None for module, _ in static.modules):
            raise RequestError(
                FIELD, "the request's own steering has operations, features or gates; vectors alone can be scaled"
            )
        parts = [(static.vectors, 1.0), *((module.decode, scale) for module, scale in static.modules)]
        return self._of_vectors(weighted_sum(parts), "the request has no steering of its own")

    def of_module_vectors(self, module: Module) -> Program:
        """Return the vectors of a module as a request got them.

        Raises:
            RequestError: If it has none, or programs beside.
        """
        if module.decode_program is not None:
            raise RequestError(FIELD, f"module {module.name!r} has operations or features; vectors alone can be scaled")
        return self._of_vectors(module.decode, f"module {module.name!r} does nothing at generated positions")

    def of_global(self) -> Program:
        """Return the operator's global vectors.

        Raises:
            RequestError: If there are none, or programs beside.
        """
        shared = self._state.shared
        if shared.decode_program is not None:
            raise RequestError(FIELD, "global operations or features act, too; vectors alone can be scaled")
        return self._of_vectors(shared.decode, "there are no global vectors for generated positions")

    def _of_vectors(self, vectors: PhaseVectors | None, otherwise: str) -> Program:
        program = self._joined(vectors)
        if program is None:
            raise RequestError(FIELD, otherwise)
        return self._checked(program, FIELD)

    def _joined(self, vectors: PhaseVectors | None, program: Program | None = None) -> Program | None:
        dtype = cast("StoredType", self._steerable.dtype)
        return joined_entries(vectors, program, 1.0, dtype, self._steerable.width)

    def _checked(self, program: Program | None, where: str) -> Program:
        if program is None:
            raise RequestError(where, "does nothing at generated positions, where controllers act")
        if program.reconstructs or program.num_changes:
            raise RequestError(where, "lets an SAE reconstruct rows, or a transcoder act; controllers cannot")
        for site in program.sites:
            if site not in self._steerable.op_sites:
                declared = ", ".join(each.name for each in self._steerable.op_sites) or "none"
                raise RequestError(
                    where,
                    f"writes at {site.name}; controllers write at declared sites: {declared}; the operator declares "
                    "them with --steering-op-sites",
                )
        return program


def driven(program: Program, column: int) -> Program:
    """Return a program whose effect on generated rows is multiplied by the coefficient in a column.

    Args:
        program: Program of a content.
        column: Column of its coefficient.
    """
    entries = [entry._replace(group=gate_field(entry.group, column, is_early=True)) for entry in entries_of(program)]
    return Program.from_entries(entries, program.dtype, program.groups)


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
        """Return plain values for `headgate.steering.worker.placed_programs.ActingRule`."""
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
        notify: Sends these programs to the workers.
    """

    def __init__(
        self,
        columns: Sequence[int],
        reservations: Reservations[str],
        notify: Callable[[Sequence[Mapping[str, Any]]], None],
    ) -> None:
        self._free = list(columns)
        self._reservations = reservations
        self._notify = notify
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
            self._notify([*(drive.to_worker() for drive in self._known.values()), made.to_worker()])
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
