"""Steering in one engine core: the authority for global vectors, named modules, and who may run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import parse_config
from headgate.steering.core.admission import Reservations
from headgate.steering.core.cache_keys import PhaseKeys, block_keys, phase_keys
from headgate.steering.core.module_registry import ModuleRegistry
from headgate.steering.core.state import GlobalTiers, Resolved, SteeringState, demand_of
from headgate.steering.files.vector_files import VectorFileError, load
from headgate.steering.requests.request_fields import check_name
from headgate.steering.requests.wire import SteeringWire, to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable, SteeringSpec

logger = logging.getLogger("headgate")

TIERS = ("base", "prefill", "decode")
_PROBE = "headgate-probe"
"""Stands for the id of a request that is not there."""


class SteeredBlocks(NamedTuple):
    """Block keys of one request; implements `headgate.capture.engine.contracts.core_part.BlockKeys`."""

    keys: PhaseKeys

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        """As `headgate.steering.core.cache_keys.block_keys`."""
        return block_keys(start, end, num_prompt, self.keys)


class SteeringCore:
    """Implements `headgate.capture.engine.contracts.core_part.CorePart`.

    `accept`, `block_keys` and `forget` run on the input thread, everything else on the engine thread: requests are
    resolved under the lock of `SteeringState`, and who runs is the engine thread's alone.

    Args:
        dtype: The model's.
        capacity: Slots of the workers' pools, the zero vector aside.
        services: What can be had done.
    """

    def __init__(self, dtype: StoredType, capacity: int, services: CoreServices) -> None:
        self._state = SteeringState(dtype)
        self._reservations: Reservations[str] = Reservations(capacity)
        self._services = services
        self._library = ModuleRegistry(self._state, self._reservations, services)
        self._resolved: dict[str, Resolved] = {}
        """Of requests that steer, from `accept` until `release`."""
        self._log = SparseLog("steering")
        self._methods: dict[str, Callable[..., Any]] = {
            "set_global": self._set_global,
            "clear_global": self._clear_global,
            "register": self._register,
            "unregister": self._unregister,
            "modules": self._modules,
            "names": self._names,
            "status": self._status,
            "counts": self._counts,
            "check": self._check,
            "export_global": self._export_global,
            "export_module": self._export_module,
        }

    def accept(self, req_id: str, wire: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Resolve a request's modules to content; returns its wire form with the keys and scales of that."""
        if wire is None:
            return None
        if req_id in self._resolved:
            raise AssertionError(f"request {req_id!r} was taken already")
        resolved = self._state.take(req_id, SteeringWire(wire).spec())
        self._resolved[req_id] = resolved
        parts = {"pp": resolved.prefill_parts, "dp": resolved.decode_parts}
        return {**wire, **{name: [list(part) for part in found] for name, found in parts.items() if found}}

    def block_keys(self, req_id: str) -> SteeredBlocks | None:
        """What acts on the request under the global vectors of now."""
        shared, own = self._state.global_keys, self._resolved.get(req_id)
        keys = phase_keys(
            global_prefill=shared.prefill,
            global_decode=shared.decode,
            prefill=own.prefill if own else None,
            decode=own.decode if own else None,
        )
        return SteeredBlocks(keys) if any(keys) else None

    def forget(self, req_id: str) -> None:
        """Forget what was taken."""
        if self._resolved.pop(req_id, None) is not None:
            self._state.let_go(req_id)

    def offer(self, req_id: str, *, priority: int, is_session: bool) -> bool:
        """Reserve the request's slots, or let it wait for them."""
        resolved = self._resolved.get(req_id)
        if is_session and (resolved is not None or any(self._state.global_keys[1:])):
            raise RequestError(
                "prompt",
                "streaming-input sessions cannot be steered, nor run while global vectors are set: their prompt grows "
                "into what was generated; send the whole prompt at once",
            )
        if resolved is None:
            return True
        self._library.forget_dropped()
        has_slots = self._reservations.offer(req_id, resolved.demand, req_id, priority=priority)
        if not has_slots:
            reservations = self._reservations
            self._log.warning(
                f"{reservations.num_waiting} requests wait for vector slots; {reservations.num_reserved} of "
                f"{reservations.capacity} are reserved. Raise max_steering_slots if that happens often"
            )
        return has_slots

    def release(self, req_id: str) -> None:
        """Give the slots back, and let go of the content."""
        self._reservations.release(req_id)
        self.forget(req_id)

    def withdraw(self, req_ids: Collection[str] | None) -> list[str]:
        """Those of `req_ids` that wait for slots wait no longer."""
        return self._reservations.withdraw(req_ids)

    def admit(self) -> list[str]:
        """Those that have their slots now."""
        return self._reservations.admit()

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Run one of the methods below by its name, such as ``register``; arguments and answers are described there.

        Raises:
            RequestError: If the method is unknown, or refuses.
        """
        if method not in self._methods:
            raise RequestError("method", f"steering has no method {method!r}; known: {', '.join(self._methods)}")
        self._library.forget_dropped()
        return self._methods[method](**args)

    def load(self, name: str, path: str, steerable: Steerable) -> None:
        """Register a module from a file.

        Raises:
            ConfigError: If it cannot be read, does not fit the model, or finds no room.
        """
        try:
            self._library.register(name, load(path).spec(steerable))
        except (OSError, VectorFileError, RequestError) as error:
            raise ConfigError(f"additional_config['headgate']['steering'].modules.{name}: {path}: {error}") from error

    def room(self) -> str:
        """What there is room for, for the log."""
        names = ", ".join(module.name for module in self._state.modules()) or "none"
        reserved, capacity = self._reservations.num_reserved, self._reservations.capacity
        return f"room for {capacity} vectors at a time, {reserved} of them taken by named modules: {names}"

    def _set_global(self, tiers: Mapping[str, Any], replace: bool) -> dict[str, Any]:
        """Take over `tiers`, each ``to_wire(SteeringSpec(prefill=...))`` or None; `replace`: nothing else is left."""
        given = {name: None if tiers.get(name) is None else SteeringWire(tiers[name]).prefill() for name in TIERS}
        self._change_global(self._state.tiers.updated(GlobalTiers(**given), replace=replace))
        return self._status()

    def _clear_global(self) -> dict[str, Any]:
        """Set nothing."""
        self._change_global(GlobalTiers())
        return self._status()

    def _change_global(self, tiers: GlobalTiers) -> None:
        """Everybody's KV is computed anew, also for a decode-only change: a block must not mix old and new vectors."""
        before, after = self._state.shared, self._state.global_phases(tiers)
        is_same = _keys(before) == _keys(after)
        if not is_same:
            self._services.check_restart("global")
            self._reservations.set_global(demand_of(after.prefill, after.decode), "global")
            try:
                self._library.tell(
                    ("set_global", {"spec": to_wire(after)}), undo=("set_global", {"spec": to_wire(before)})
                )
            except BaseException:
                self._reservations.set_global(demand_of(before.prefill, before.decode), "global")
                raise
        self._state.set_global(tiers)
        if not is_same:
            self._services.restart_running()

    def _register(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Register ``to_wire(spec)`` as `name`; returns `headgate.steering.core.state.Module.described`."""
        return self._library.register(check_name(name, "name"), SteeringWire(spec).spec()).described()

    def _unregister(self, name: str) -> dict[str, Any]:
        """Forget a module; requests that use it already keep it."""
        return self._library.unregister(name).described()

    def _check(self, spec: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Refuse, for `field`, what a request would be refused for if it brought ``to_wire(spec)`` now."""
        resolved = self._state.take(_PROBE, SteeringWire(spec).spec(), field)
        self._state.let_go(_PROBE)
        self._reservations.check(resolved.demand, field)
        return {}

    def _modules(self) -> list[dict[str, Any]]:
        """What is registered."""
        return [module.described() for module in self._state.modules()]

    def _names(self) -> list[dict[str, Any]]:
        """The names alone, for front ends, each with the largest magnitude of the module's values as ``peak``."""
        return [{"name": module.name, "peak": module.peak} for module in self._state.modules()]

    def _export_global(self) -> dict[str, Any]:
        """The tiers as ``set_global`` takes them: to set them again."""
        tiers = {name: getattr(self._state.tiers, name) for name in TIERS}
        return {name: None if tier is None else to_wire(SteeringSpec(prefill=tier)) for name, tier in tiers.items()}

    def _export_module(self, name: str) -> dict[str, Any]:
        """A module's spec as ``register`` takes it: to register it again."""
        module = next((module for module in self._state.modules() if module.name == name), None)
        if module is None:
            known = ", ".join(module.name for module in self._state.modules()) or "none"
            raise RequestError("name", f"unknown steering module {name!r}; registered: {known}")
        return to_wire(SteeringSpec(prefill=module.prefill, decode=module.decode))

    def _status(self) -> dict[str, Any]:
        """Global vectors, modules, slots, and the numbers of requests that have slots and that wait for them."""
        return {
            "global": self._state.global_status(),
            "modules": self._modules(),
            "slots": {"capacity": self._reservations.capacity, "reserved": self._reservations.num_reserved},
            "configs": self._reservations.num_configs,
            "running": self._reservations.num_admitted,
            "waiting": self._reservations.num_waiting,
        }

    def _counts(self) -> dict[str, int]:
        """What metrics show: numbers alone, for it is asked every second while the engine waits."""
        shared = self._state.shared
        return {
            "slots": self._reservations.capacity,
            "slots_reserved": self._reservations.num_reserved,
            "configs": self._reservations.num_configs,
            "requests_running": self._reservations.num_admitted,
            "requests_waiting": self._reservations.num_waiting,
            "modules": len(self._state.modules()),
            "global_vectors": sum(len(vectors.sites) for vectors in (shared.prefill, shared.decode) if vectors),
        }


def open_core(facts: CoreFacts, section: Mapping[str, Any], services: CoreServices) -> SteeringCore:
    """The part for the configuration's ``steering`` section: the hook ``headgate_core``."""
    config = parse_config(section)
    model = facts.model
    steerable = config.steerable(num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype)
    core = SteeringCore(cast("StoredType", model.dtype), config.max_steering_slots - 1, services)
    for name, path in config.modules.items():
        core.load(name, path, steerable)
    logger.info("steering: %s", core.room())
    return core


def _keys(spec: SteeringSpec) -> tuple[bytes | None, bytes | None]:
    return _key(spec.prefill), _key(spec.decode)


def _key(vectors: PhaseVectors | None) -> bytes | None:
    return None if vectors is None else vectors.key
