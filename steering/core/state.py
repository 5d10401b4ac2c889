"""Global vectors and named modules of one engine core, which is the authority for both.

Requests name modules; here the names are resolved to content, once, when the engine core takes the request. So a name
that is registered anew steers later requests only, and never shares KV or vectors with its earlier content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.core.admission import Demand, Load
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import TIERS, PhaseVectors, SteeringSpec, weighted_sum
from headgate.steering.vectors.sums import LIMIT, merge_over, peak, sum_key, without

Parts = tuple[tuple[bytes, float], ...]
"""Content keys of modules' vectors, and their scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTiers:
    """Vectors that act on every request. Immutable: a change makes new ones.

    Attributes:
        base: In both phases.
        prefill: Added to it at positions of the prompt.
        decode: Added to it at generated positions.
    """

    base: PhaseVectors | None = None
    prefill: PhaseVectors | None = None
    decode: PhaseVectors | None = None

    def updated(self, update: GlobalTiers, cleared: Mapping[str, Collection[Site]], *, replace: bool) -> GlobalTiers:
        """Return these tiers with `update` in place of what they had, site by site; with `replace`, `update` alone.

        Args:
            update: Vectors to set.
            cleared: Sites to take back, by tier.
            replace: Take back everything that `update` does not set.
        """
        if replace:
            return update
        kept = {name: without(getattr(self, name), cleared.get(name, ())) for name in TIERS}
        return GlobalTiers(**{name: merge_over(kept[name], getattr(update, name)) for name in TIERS})

    def phases(self, dtype: StoredType, field: str) -> SteeringSpec:
        """Return the sums that act in each phase.

        Raises:
            RequestError: If a sum leaves what `dtype`, the model's, can hold beside a request's vectors.
        """
        try:
            prefill = weighted_sum([(self.base, 1.0), (self.prefill, 1.0)])
            decode = weighted_sum([(self.base, 1.0), (self.decode, 1.0)])
        except OverflowError as error:
            raise RequestError(field, str(error)) from error
        _check_limit(max(peak(prefill), peak(decode)), dtype, field)
        return SteeringSpec(prefill=prefill, decode=decode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A registered module.

    Attributes:
        name: Its name in requests.
        prefill: Its vectors at positions of the prompt.
        decode: Its vectors at generated positions.
        peak: Largest magnitude of any of its values.
        version: `SteeringState.version` when it was registered.
    """

    name: str
    prefill: PhaseVectors | None
    decode: PhaseVectors | None
    peak: float
    version: int
    _about: Mapping[str, object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: a list of many modules is made while the engine waits.
        object.__setattr__(self, "_about", described(self.prefill, self.decode))

    @property
    def demand(self) -> Demand:
        """The slots that the module holds while it is registered."""
        return demand_of(self.prefill, self.decode)

    def described(self) -> dict[str, object]:
        """Return plain values for the list of modules."""
        return {"name": self.name, "version": self.version, **self._about}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A request's steering in terms of content.

    Attributes:
        prefill: Content key of its sum in the prefill phase; None if nothing of its own acts there.
        decode: The same for the decode phase.
        prefill_parts: Modules' vectors that workers add to its inline prefill vectors.
        decode_parts: Modules' vectors that workers add to its inline decode vectors.
        demand: The slots to reserve.
    """

    prefill: bytes | None
    decode: bytes | None
    prefill_parts: Parts
    decode_parts: Parts
    demand: Demand


class GlobalKeys(NamedTuple):
    """The global vectors of one moment.

    Attributes:
        version: `SteeringState.version` when they were set; block hashes made under another one are stale.
        prefill: Content key of the vectors of the prefill phase; None if there are none.
        decode: The same for the decode phase.
    """

    version: int = 0
    prefill: bytes | None = None
    decode: bytes | None = None


class SteeringState:
    """Global vectors, named modules, and the content that requests still refer to.

    Requests are resolved on the thread that takes them in, and everything else happens on the engine core's own: the
    lock guards the modules and who refers to their content. `global_keys` is replaced as a whole, so any thread reads
    a consistent one.

    Args:
        dtype: The model's.

    Attributes:
        tiers: The global vectors.
        shared: The sums of `tiers` that act in each phase.
        version: Counts changes, of global vectors and of modules.
        global_keys: Content keys of the global vectors, and the version they date from.
    """

    def __init__(self, dtype: StoredType) -> None:
        self.tiers = GlobalTiers()
        self.shared = SteeringSpec()
        self.version = 0
        self.global_keys = GlobalKeys()
        self._lock = Lock()
        self._dtype: StoredType = dtype
        self._modules: dict[str, Module] = {}
        self._users: Counter[bytes] = Counter()
        self._of_request: dict[str, frozenset[bytes]] = {}
        self._unused: set[bytes] = set()

    def global_phases(self, tiers: GlobalTiers, field: str = "global") -> SteeringSpec:
        """Return the sums of `tiers`, to reserve their slots before `set_global`. Raises as `GlobalTiers.phases`."""
        return tiers.phases(self._dtype, field)

    def set_global(self, tiers: GlobalTiers) -> None:
        """Make `tiers` the global vectors; ``GlobalTiers()`` clears them."""
        self.shared = self.global_phases(tiers)
        self.tiers = tiers
        with self._lock:
            self.version += 1
        prefill, decode = self.shared.prefill, self.shared.decode
        self.global_keys = GlobalKeys(self.version, prefill.key if prefill else None, decode.key if decode else None)

    def global_status(self) -> dict[str, object]:
        """Return sites and content keys of the global vectors, plain values."""
        tiers = {"base": self.tiers.base, "prefill": self.tiers.prefill, "decode": self.tiers.decode}
        return {
            "version": self.global_keys.version,
            "tiers": {name: _sites(vectors) for name, vectors in tiers.items() if vectors is not None},
            **described(self.shared.prefill, self.shared.decode),
        }

    def read_module(self, name: str, spec: SteeringSpec, field: str = "module") -> Module:
        """Return the module that `name` would be, to reserve its slots before `register`.

        Raises:
            RequestError: If it names other modules, holds nothing but zeros, or is too large for the model's dtype.
        """
        if spec.modules:
            raise RequestError(field, f"module {name!r} refers to other modules; give their vectors instead")
        if spec.prefill is None and spec.decode is None:
            raise RequestError(field, f"module {name!r} has no vector other than zero")
        largest = max(peak(spec.prefill), peak(spec.decode))
        _check_limit(largest, self._dtype, field)
        return Module(name=name, prefill=spec.prefill, decode=spec.decode, peak=largest, version=self.version + 1)

    def register(self, module: Module) -> None:
        """Register a module, in place of an earlier one of its name."""
        with self._lock:
            earlier = self._modules.get(module.name)
            self._modules[module.name] = module
            self._use(_contents(module))
            if earlier is not None:
                self._disuse(_contents(earlier))
            self.version += 1

    def unregister(self, name: str, field: str = "name") -> Module:
        """Forget a module; requests that were resolved keep its content.

        Raises:
            RequestError: If there is none of that name.
        """
        with self._lock:
            module = self._module(name, field)
            del self._modules[name]
            self._disuse(_contents(module))
            self.version += 1
        return module

    def modules(self) -> tuple[Module, ...]:
        """Return all modules, in the order of their names."""
        with self._lock:
            return tuple(self._modules[name] for name in sorted(self._modules))

    def module(self, name: str, field: str = "name") -> Module:
        """Return the module of that name.

        Raises:
            RequestError: If there is none of that name.
        """
        with self._lock:
            return self._module(name, field)

    def resolve(self, req_id: str, spec: SteeringSpec, field: str = "steering_module_ref") -> Resolved:
        """Resolve the names in a request's spec to content, and keep that content until `release`.

        Raises:
            RequestError: On an unknown name, or if the sum could leave what the model's dtype can hold.
        """
        own = max(peak(spec.prefill), peak(spec.decode))
        with self._lock:
            named = [(self._module(ref.name, field), ref.scale) for ref in spec.modules]
            _check_limit(max((abs(scale) for _, scale in named), default=0.0), "float32", field)
            _check_limit(own + sum(abs(scale) * module.peak for module, scale in named), self._dtype, field)
            resolved = _resolved(spec, named)
            parts = frozenset(key for key, _ in (*resolved.prefill_parts, *resolved.decode_parts))
            if parts:
                if req_id in self._of_request:
                    raise AssertionError(f"request {req_id!r} was taken already")
                self._of_request[req_id] = parts
                self._use(parts)
        return resolved

    def release(self, req_id: str) -> None:
        """Stop keeping the content of a request that was freed or refused, if it refers to any."""
        with self._lock:
            self._disuse(self._of_request.pop(req_id, frozenset()))

    def take_unused(self) -> tuple[bytes, ...]:
        """Return the keys of contents that nobody refers to any more, sorted, each once: workers can forget them."""
        with self._lock:
            unused, self._unused = tuple(sorted(self._unused)), set()
        return unused

    def _module(self, name: str, field: str) -> Module:
        module = self._modules.get(name)
        if module is None:
            known = ", ".join(sorted(self._modules)) or "none"
            raise RequestError(field, f"unknown steering module {name!r}; registered: {known}")
        return module

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


def demand_of(prefill: PhaseVectors | None, decode: PhaseVectors | None) -> Demand:
    """Return the slots that vectors need by themselves."""
    return Demand(_load_of(prefill, []), _load_of(decode, []))


def described(prefill: PhaseVectors | None, decode: PhaseVectors | None) -> dict[str, object]:
    """Return content keys (``hash``) and sites of both phases, plain values."""
    return {
        "hash": {
            "prefill": prefill.key.hex() if prefill else None,
            "decode": decode.key.hex() if decode else None,
        },
        "sites": {"prefill": _sites(prefill), "decode": _sites(decode)},
    }


def _resolved(spec: SteeringSpec, named: list[tuple[Module, float]]) -> Resolved:
    prefill = [(module.prefill, scale) for module, scale in named if module.prefill and scale != 0]
    decode = [(module.decode, scale) for module, scale in named if module.decode and scale != 0]
    demand = Demand(_load_of(spec.prefill, prefill), _load_of(spec.decode, decode))
    return Resolved(
        prefill=demand.prefill.key if demand.prefill else None,
        decode=demand.decode.key if demand.decode else None,
        prefill_parts=tuple((vectors.key, scale) for vectors, scale in prefill),
        decode_parts=tuple((vectors.key, scale) for vectors, scale in decode),
        demand=demand,
    )


def _load_of(own: PhaseVectors | None, named: list[tuple[PhaseVectors, float]]) -> Load | None:
    """Return the load of the sum of a request's own vectors and modules."""
    parts = [*named, (own, 1.0)] if own else named
    key = sum_key((vectors.key, scale) for vectors, scale in parts)
    return None if key is None else Load(key, len({site for vectors, _ in parts for site in vectors.sites}))


def _contents(module: Module) -> frozenset[bytes]:
    return frozenset(vectors.key for vectors in (module.prefill, module.decode) if vectors)


def _sites(vectors: PhaseVectors | None) -> list[str]:
    return [site.name for site in vectors.sites] if vectors else []


def _check_limit(largest: float, dtype: StoredType, field: str) -> None:
    if not largest < LIMIT[dtype]:
        raise RequestError(
            field,
            f"the vectors times their scales reach {largest:.4g}; sums for a model in {dtype} stay finite below "
            f"{LIMIT[dtype]:.4g}: use smaller vectors or scales",
        )
