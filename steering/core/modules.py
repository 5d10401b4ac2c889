"""Named modules of one engine core, and the content of modules that requests still refer to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.admission import Demand
from headgate.steering.core.content import demand_of, described
from headgate.steering.programs.operations import Float32Row
from headgate.steering.programs.program import Program
from headgate.steering.spec import SteeringSpec
from headgate.steering.vectors.phase_vectors import PhaseVectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A registered module.

    Attributes:
        name: Its name in requests.
        prefill: Its vectors at positions of the prompt.
        decode: Its vectors at generated positions.
        peak: Largest magnitude of any value of its vectors.
        version: `SteeringState.version` when it was registered.
        prefill_program: Its operations at positions of the prompt.
        decode_program: Its operations at generated positions.
    """

    name: str
    prefill: PhaseVectors | None
    decode: PhaseVectors | None
    peak: float
    version: int
    prefill_program: Program | None = None
    decode_program: Program | None = None
    _about: Mapping[str, object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: a list of many modules is made while the engine waits.
        object.__setattr__(self, "_about", described(self.spec))

    @property
    def spec(self) -> SteeringSpec:
        """Vectors and operations, as they were registered."""
        return SteeringSpec(
            prefill=self.prefill,
            decode=self.decode,
            prefill_program=self.prefill_program,
            decode_program=self.decode_program,
        )

    @property
    def demand(self) -> Demand:
        """The slots that the module holds while it is registered."""
        return demand_of(self.spec)

    def vector_at(self, site: Site, *, is_decode: bool) -> Float32Row | None:
        """Return the module's vector at a site: that of the phase, or else of the other one; None if it has none."""
        for vectors in (self.decode, self.prefill) if is_decode else (self.prefill, self.decode):
            if vectors is not None and site in vectors.sites:
                row: Float32Row = vectors.float32()[vectors.sites.index(site)]
                return row
        return None

    def described(self) -> dict[str, object]:
        """Return plain values for the list of modules."""
        return {"name": self.name, "version": self.version, **self._about}


class ModuleRegistry:
    """Registered modules by name, and who uses their content, which outlives them. The caller holds `lock`.

    Attributes:
        lock: Guards everything here.
        by_name: All modules; another object after each change.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.by_name: Mapping[str, Module] = {}
        self._users: Counter[bytes] = Counter()
        self._of_request: dict[str, frozenset[bytes]] = {}
        self._unused: set[bytes] = set()

    def put(self, module: Module) -> None:
        """Register a module, in place of an earlier one of its name."""
        earlier = self.by_name.get(module.name)
        self.by_name = {**self.by_name, module.name: module}
        self._use(_contents(module))
        if earlier is not None:
            self._disuse(_contents(earlier))

    def remove(self, name: str, field: str) -> Module:
        """Forget a module; requests that hold its content keep it.

        Raises:
            RequestError: If there is none of that name.
        """
        module = self.find(name, field)
        self.by_name = {other: kept for other, kept in self.by_name.items() if other != name}
        self._disuse(_contents(module))
        return module

    def all(self) -> tuple[Module, ...]:
        """Return all modules, in the order of their names."""
        return tuple(self.by_name[name] for name in sorted(self.by_name))

    def find(self, name: str, field: str) -> Module:
        """Return the module of that name.

        Raises:
            RequestError: If there is none of that name.
        """
        module = self.by_name.get(name)
        if module is None:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise RequestError(field, f"unknown steering module {name!r}; registered: {known}")
        return module

    def hold(self, req_id: str, keys: frozenset[bytes]) -> None:
        """Keep content for a request until `let_go`."""
        if not keys:
            return
        if req_id in self._of_request:
            raise AssertionError(f"request {req_id!r} was taken already")
        self._of_request[req_id] = keys
        self._use(keys)

    def let_go(self, req_id: str) -> None:
        """Undo `hold`, if the request holds anything."""
        self._disuse(self._of_request.pop(req_id, frozenset()))

    def take_unused(self) -> tuple[bytes, ...]:
        """Return the keys of contents that nobody refers to any more, sorted, each once."""
        unused, self._unused = tuple(sorted(self._unused)), set()
        return unused

    def _use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._users[key] += 1
            self._unused.discard(key)

    def _disuse(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._unused.add(key)


def _contents(module: Module) -> frozenset[bytes]:
    return frozenset(part.key for phase in module.spec.phases for part in phase if part)
