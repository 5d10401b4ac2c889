"""Steering in one engine core: resolves each request's vectors, keys its KV blocks, and says who may run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np

from headgate.capture.engine.contracts.core_part import CoreFacts, Decided
from headgate.capture.monitoring.logs import SparseLog
from headgate.capture.probe import ProbeError
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.config import WHERE, SteeringConfig, has_controllers, parse_config
from headgate.steering.core.admission import Reservations
from headgate.steering.core.audit import Audit
from headgate.steering.core.content import Limits
from headgate.steering.core.controllers.contents import NOTHING, Static
from headgate.steering.core.controllers.controllers import Controllers, open_controllers
from headgate.steering.core.operator_calls import OperatorCalls
from headgate.steering.core.probes import open_probe
from headgate.steering.core.resolved import Resolved, SteeredBlocks
from headgate.steering.core.rules.step_readings import RequestReadings
from headgate.steering.core.saes import open_sae, warn_of_other_model
from headgate.steering.core.state import SteeringState
from headgate.steering.documents.gates import load_rules
from headgate.steering.features.importing import SaeSource
from headgate.steering.features.sparse_coder import gathered
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.files.vector_files import VectorFileError, load
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.step_table import StepTable
from headgate.steering.gates.trace import Note, join_notes
from headgate.steering.programs.wire import content_to_wire
from headgate.steering.spec import PROGRAM_KEYS, from_wire, programs_to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.core_part import CoreServices

logger = logging.getLogger("headgate")


class LivePayloads:
    """The inline vectors of live requests, by content key. Input thread only."""

    def __init__(self) -> None:
        self._payloads: WeakValueDictionary[bytes, np.ndarray[Any, Any]] = WeakValueDictionary()

    def shared(self, vectors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return vectors with the payload of an earlier request that has the same and lives: one copy serves all."""
        payload = vectors["payload"]
        if not isinstance(payload, np.ndarray):  # short ones are bytes
            return vectors
        return {**vectors, "payload": self._payloads.setdefault(vectors["key"], payload)}


class SteeringCore:
    """Implements `headgate.capture.engine.contracts.core_part.CorePart`.

    `accept`, `block_keys` and `forget` run on the input thread, everything else on the engine thread: requests are
    resolved under the lock of `SteeringState`, and the engine thread alone decides who runs.

    Args:
        dtype: The model's.
        capacity: Slots of the workers' pools, the zero vector aside.
        services: Calls the workers and restarts requests.
        config: The operator's: the limits of requests that wait.
        audit: Notes changes of what steers others; one of its own if None.
        clock: Seconds, never going back.
        steerable: The model, for SAEs that are registered; None if none can be.
        has_conversations: Whether all requests of a conversation come here.
        num_reserved_slots: Slots beyond `capacity`, for operators' changes; see `Reservations`.

    Attributes:
        state: Global vectors, modules, SAEs, probes and rules.
        reservations: Reservations of the slots.
        operator: The calls of front ends.
    """

    def __init__(
        self,
        dtype: StoredType,
        capacity: int,
        services: CoreServices,
        config: SteeringConfig,
        audit: Audit | None = None,
        clock: Callable[[], float] = time.monotonic,
        steerable: Steerable | None = None,
        *,
        has_conversations: bool = True,
        num_reserved_slots: int = 0,
    ) -> None:
        limits = Limits(2 * config.max_ops_per_site, config.num_features, config.num_probe_units)
        latches = ConversationLatches() if has_conversations else None
        self.state = SteeringState(dtype, limits, steerable, latches)
        self.reservations: Reservations[str] = Reservations(capacity, num_reserved_slots)
        # Where drafts are verified, the host alone knows which rows of a request that ends still count.
        is_counted_there = steerable is None or steerable.knows_positions
        self._readings = RequestReadings(self.state.rules, latches, is_counted_there=is_counted_there)
        self.operator = OperatorCalls(self.state, self.reservations, services, audit or Audit(), self._readings)
        self._controllers: Controllers | None = None
        self._resolved: dict[str, Resolved] = {}
        """Resolved steering of requests, from `accept` until `release`."""
        self._limits = config.wait_limits(is_offline=False)
        self._offline_limits = config.wait_limits(is_offline=True)
        self._clock = clock
        self._waiting_since: dict[str, float] = {}
        """Start of the wait of requests whose wait is limited, in the order of their arrival."""
        self._payloads = LivePayloads()
        self._log = SparseLog("steering")

    def start(self, controllers: Controllers) -> None:
        """Let controllers act on the requests that come from here on."""
        self._controllers = controllers
        self._readings.beside = controllers.sources
        self.operator.controllers = controllers

    def accept(self, req_id: str, wire: Mapping[str, Any] | None, num_prompt: int) -> dict[str, Any] | None:
        """Resolve a request's modules to content; returns its `SteeringWire` with the content keys and scales."""
        if wire is None:
            self.state.rules.add(req_id, None, num_prompt)
            if self._controllers is not None:
                self._controllers.add(req_id, num_prompt, None, NOTHING)
            return None
        if req_id in self._resolved:
            raise AssertionError(f"request {req_id!r} was taken already")
        shared = {
            name: self._payloads.shared(value) if name in ("prefill", "decode") else value
            for name, value in wire.items()
        }
        gates = self.state.gates.read(wire["gates"], wire["gates_key"]) if "gates" in wire else None
        spec = from_wire(shared, None if gates is None else gates.gates)
        self.state.rules.add(req_id, spec.rules, num_prompt)
        try:
            resolved = self.state.resolve(req_id, spec, num_prompt, owner=wire.get("owner", ""), gates=gates)
        except BaseException:
            self.state.rules.forget(req_id)
            raise
        self._resolved[req_id] = resolved
        is_traced = bool(wire.get("trace"))
        replaced = PROGRAM_KEYS if spec.is_to_lower else ()
        taken = {name: value for name, value in shared.items() if name not in replaced}
        if self._readings.add(req_id, resolved, num_prompt, is_traced=is_traced):
            taken["counted"] = True
        names = ("prefill_parts", "decode_parts", "prefill_programs", "decode_programs")
        for name, found in zip(names, resolved.parts, strict=True):
            if found:
                taken[name] = [list(part) for part in found]
        if spec.is_to_lower:
            if resolved.takes_own:
                for name in ("prefill", "decode", "is_shared"):
                    taken.pop(name, None)
            taken.update(resolved.own_wire or programs_to_wire(*resolved.own))
        if self._controllers is not None:
            vectors = None if resolved.takes_own else spec.decode
            static = Static(vectors, resolved.named, has_programs=resolved.own[1] is not None)
            self._controllers.add(req_id, num_prompt, spec.rules, static, is_traced=is_traced)
        return taken

    def block_keys(self, req_id: str) -> SteeredBlocks | None:
        """Return the block keys of the request under the present global vectors; None if nothing acts on it."""
        shared, own = self.state.global_keys, self._resolved.get(req_id)
        rules, driven = self.state.rules.keys(req_id), None
        if self._controllers is not None:
            driven = self._controllers.key(req_id)
            needs_prompt = any(each.needs_prompts for each in self._controllers.acting(req_id))
            rules = rules._replace(has_state=rules.has_state or needs_prompt)
        keys = SteeredBlocks.join(
            global_prefill=shared.prefill,
            global_decode=shared.decode,
            prefill=own.prefill if own else None,
            decode=own.decode if own else None,
            rules=rules,
            driven=driven,
        )
        return keys if any(keys) else None

    def take_readings(
        self, readings: Mapping[str, Any], discarded: Collection[str], ends: Mapping[str, int] | None = None
    ) -> dict[str, Note]:
        """Return a piece of each request's trace; see `CorePart`."""
        self._readings.take_counts(readings.get("written", ()))
        if "ids" not in readings:
            return {}
        step = StepTable.of(readings)
        if ends is not None:
            step = step.cut(ends)
        if self._controllers is not None:
            self._controllers.read(step, discarded)
        return self._readings.take(step, discarded)

    def begin_again(self, req_id: str) -> Note | None:
        """Forget the rows of a trace, and let controllers begin anew; see `CorePart`."""
        if self._controllers is not None:
            self._controllers.begin_again(req_id)
        return self._readings.begin_again(req_id)

    def describe(self, req_id: str, num_prompt: int) -> None:
        """Follow a request that captures; see `CorePart`."""
        self._readings.describe(req_id, num_prompt)
        if self._controllers is not None:
            self._controllers.traced.add(req_id)

    def description(self, req_id: str) -> Callable[[int], Mapping[str, Any]] | None:
        """Return the trace of a request that captured; see `CorePart`."""
        log = self._readings.log(req_id)
        return None if log is None else lambda end: join_notes(log, end) if log else {}

    def decide(self) -> Decided | None:
        """Let controllers decide; see `CorePart`."""
        decided = None if self._controllers is None else self._controllers.decide()
        if decided is not None:
            self._readings.keep(cast("Mapping[str, Note]", decided.notes))
        return decided

    def orders(self, scheduled: Mapping[str, int]) -> Mapping[str, Any] | None:
        """Return what controllers decided for the requests of a step; see `CorePart`."""
        return None if self._controllers is None else self._controllers.orders(scheduled)

    def forget(self, req_id: str) -> None:
        """Forget a request that was taken."""
        self._readings.forget(req_id)
        self.state.rules.forget(req_id)
        if self._controllers is not None:
            self._controllers.forget(req_id)
        if self._resolved.pop(req_id, None) is not None:
            self.state.release(req_id)

    def offer(self, req_id: str, *, priority: int, is_session: bool, is_offline: bool) -> bool:
        """Reserve the request's slots, or let it wait for them."""
        resolved = self._resolved.get(req_id)
        if is_session and self.acts_on(req_id):
            raise RequestError(
                "prompt",
                "streaming-input sessions cannot be steered, nor run while global vectors, rules or controllers act: "
                "their prompt grows into what was generated; send the whole prompt at once",
            )
        if self._controllers is not None:
            self._controllers.begin(req_id)
        if resolved is None:
            return True
        if self.state.has_unused:
            self.operator.forget_unused()
        limits = self._offline_limits if is_offline else self._limits
        has_slots = self.reservations.offer(
            req_id, resolved.demand, req_id, priority=priority, max_waiting=limits.max_waiting
        )
        if not has_slots:
            if limits.max_wait_s < math.inf:
                self._waiting_since[req_id] = self._clock()
            reservations = self.reservations
            self._log.warning(
                f"{reservations.num_waiting} requests wait for vector slots; {reservations.num_reserved} of "
                f"{reservations.capacity} are reserved. Raise max_steering_slots if that happens often"
            )
        return has_slots

    def acts_on(self, req_id: str) -> bool:
        """Whether anything steers a request, or would read it to decide whether to."""
        acts = req_id in self._resolved or any(self.state.global_keys[1:]) or bool(self.state.rules.acting(req_id))
        return acts or (self._controllers is not None and bool(self._controllers.acting(req_id)))

    def overdue(self) -> dict[str, str]:
        """Return the requests that waited for their slots too long, or in vain, each with its error's reason."""
        last = self._clock() - self._limits.max_wait_s
        reservations = self.reservations
        why = (
            f"no vector slots were free for {self._limits.max_wait_s:g} s (steering.max_wait_s); "
            f"{reservations.num_reserved} of {reservations.capacity} are taken. Try again later"
        )
        late = takewhile(lambda req_id: self._waiting_since[req_id] <= last, self._waiting_since)
        in_vain = (
            "global vectors, modules or rules have been set or registered meanwhile, and leave fewer of the "
            f"{reservations.capacity} vector slots than this request needs; steer fewer sites"
        )
        return {**dict.fromkeys(late, why), **dict.fromkeys(reservations.take_stranded(), in_vain)}

    def release(self, req_id: str) -> None:
        """Free the slots of a request, and forget it."""
        self._readings.settle()
        self.reservations.release(req_id)
        self.forget(req_id)

    def withdraw(self, req_ids: Collection[str] | None) -> list[str]:
        """Remove the requests among `req_ids` (None: all) that wait for slots, and return them in order."""
        withdrawn = self.reservations.withdraw(req_ids)
        for req_id in withdrawn:
            self._waiting_since.pop(req_id, None)
        return withdrawn

    def admit(self) -> list[str]:
        """Return the waiting requests that have their slots now."""
        admitted = self.reservations.admit()
        for req_id in admitted:
            self._waiting_since.pop(req_id, None)
        return admitted

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Run a method of `headgate.steering.core.operator_calls` by its name, such as ``register``.

        Raises:
            RequestError: If the method is unknown, or refuses.
        """
        return self.operator.call(method, args)


def open_core(facts: CoreFacts, section: Mapping[str, Any], services: CoreServices) -> SteeringCore:
    """Return the part for the configuration's ``steering`` section: the hook ``headgate_core``."""
    config = parse_config(section)
    model = facts.model
    steerable = config.steerable(
        num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype, shapes=model.shapes
    )
    audit = Audit(facts.engine, None if config.audit_file is None else Path(config.audit_file))
    capacity = config.num_slots(model.num_layers) - 1
    if facts.num_stages > 1:
        owned = services.call_workers("op_sites", {})
        steerable = replace(steerable, stages=_stages(cast("list[list[str]]", owned)))
    if facts.has_drafts:
        steerable = replace(steerable, knows_positions=False)
    dtype, has_conversations = cast("StoredType", model.dtype), facts.num_engines == 1
    core = SteeringCore(
        dtype,
        capacity,
        services,
        config,
        audit,
        steerable=steerable,
        has_conversations=has_conversations,
        num_reserved_slots=config.num_reserved_slots(model.num_layers),
    )
    _load_saes(core, config, steerable, model.name)
    for name, path in config.modules.items():
        _load_module(core, name, path, steerable)
    for name, path in config.probes.items():
        _load_probe(core, name, path, steerable)
    _load_rules(core, config.rules_file, steerable)
    if has_controllers(config):
        core.start(open_controllers(config, facts, core.state, core.reservations, core.operator.set_beside, services))
    logger.info("steering: %s", _room(core))
    return core


def _stages(owned: Iterable[Sequence[str]]) -> dict[Site, int]:
    """Return the number of the pipeline stage of each op site, by the names that each worker has."""
    distinct = dict.fromkeys(map(tuple, owned))
    return {Site.parse(name): stage for stage, names in enumerate(distinct) for name in names}


def _load_rules(core: SteeringCore, path: str | None, steerable: Steerable) -> None:
    """Register the rules of the configuration's file, if there is one.

    Raises:
        ConfigError: If it cannot be read, something that a rule names is not there, or there is no room.
    """
    for rule in () if path is None else load_rules(Path(path), steerable):
        try:
            core.call("register_rule", {"name": rule.name, "rule": content_to_wire(rule)})
        except RequestError as error:
            raise ConfigError(f"{WHERE}.rules_file (--steering-rules): {path}: rule {rule.name!r}: {error}") from error
        logger.info("steering: rule %s, for %s", rule.name, rule.applies_to.value)


def _load_module(core: SteeringCore, name: str, path: str, steerable: Steerable) -> None:
    """Register a module from a file.

    Raises:
        ConfigError: If it cannot be read, does not fit the model, or finds no room.
    """
    try:
        core.operator.register(name, load(path).spec(steerable))
    except (OSError, VectorFileError, RequestError) as error:
        raise ConfigError(f"{WHERE}.modules.{name}: {path}: {error}") from error


GATHERED_BYTES = 1 << 30
"""Rows of configured SAEs that an engine core keeps in memory, at most, because their files hold them as columns."""


def _load_saes(core: SteeringCore, config: SteeringConfig, steerable: Steerable, model: str) -> None:
    """Register the SAEs of the configuration.

    Raises:
        ConfigError: If one cannot be read, or does not fit the model.
    """
    left = GATHERED_BYTES
    for name, text in config.saes.items():
        source = SaeSource.parse(text)
        try:
            sae = open_sae(name, source.path, source.site, steerable)
            coder, taken = gathered(sae.coder, left)
        except (OSError, FeatureFileError) as error:
            raise ConfigError(f"{WHERE}.saes.{name} (--saes): {error}") from error
        warn_of_other_model(sae, model)
        left -= taken
        core.state.saes.put(replace(sae, coder=coder, is_encoded=name in config.sae_encode))
        kept = f", {taken / MIB:.0f} MiB of rows copied into memory" if taken else ""
        logger.info("steering: SAE %s, %d features at %s%s", name, sae.coder.num_features, sae.site.name, kept)


def _load_probe(core: SteeringCore, name: str, path: str, steerable: Steerable) -> None:
    """Register a probe of the configuration.

    Raises:
        ConfigError: If it cannot be read, does not fit the model, or finds no room.
    """
    try:
        core.state.probes.put(name, open_probe(Path(path), steerable))
    except (ProbeError, RequestError, OSError) as error:
        raise ConfigError(f"{WHERE}.probes.{name} (--probes): {error}") from error


def _room(core: SteeringCore) -> str:
    """Return a line on the slots for the log."""
    names = ", ".join(module.name for module in core.state.modules()) or "none"
    reserved, capacity = core.reservations.num_reserved, core.reservations.capacity
    return f"room for {capacity} vectors at a time, {reserved} of them taken by named modules: {names}"
