"""Steering in one engine core: resolves each request's vectors, keys its KV blocks, and says who may run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.capture.monitoring.rate_limited_log import SparseLog
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import WHERE, SaeSource, SteeringConfig, parse_config
from headgate.steering.core.admission import Reservations
from headgate.steering.core.audit import Audit
from headgate.steering.core.content import Limits
from headgate.steering.core.operator_calls import OperatorCalls
from headgate.steering.core.probes import open_probe
from headgate.steering.core.resolved import Resolved
from headgate.steering.core.rules.registry import NO_RULES, RuleKeys
from headgate.steering.core.rules.step_readings import StepReadings
from headgate.steering.core.saes import open_sae, warn_of_other_model
from headgate.steering.core.state import SteeringState
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.files.vector_files import VectorFileError, load
from headgate.steering.gates.conversations import ConversationLatches
from headgate.steering.gates.trace import Note
from headgate.steering.probes.probe import ProbeError
from headgate.steering.requests.rules.rule_files import load_rules
from headgate.steering.spec import PROGRAM_KEYS, SteeringSpec, from_wire, to_wire
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable

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
    ) -> None:
        limits = Limits(2 * config.max_ops_per_site, config.num_features)
        latches = ConversationLatches() if has_conversations else None
        self._state = SteeringState(dtype, limits, steerable, latches)
        self._reservations: Reservations[str] = Reservations(capacity)
        self._readings = StepReadings(self._state.rules, latches)
        self._operator = OperatorCalls(
            self._state, self._reservations, services, audit or Audit(), steerable, self._readings
        )
        self._resolved: dict[str, Resolved] = {}
        """Of requests that steer, from `accept` until `release`."""
        self._limits = config.wait_limits(is_offline=False)
        self._offline_limits = config.wait_limits(is_offline=True)
        self._clock = clock
        self._waiting_since: dict[str, float] = {}
        """Of requests whose wait is limited, in the order of their arrival."""
        self._payloads = LivePayloads()
        self._log = SparseLog("steering")

    def accept(self, req_id: str, wire: Mapping[str, Any] | None, num_prompt: int) -> dict[str, Any] | None:
        """Resolve a request's modules to content; returns its `SteeringWire` with the content keys and scales."""
        if wire is None:
            self._state.rules.add(req_id, None, num_prompt)
            return None
        if req_id in self._resolved:
            raise AssertionError(f"request {req_id!r} was taken already")
        spec = from_wire(wire)
        self._state.rules.add(req_id, spec.rules, num_prompt)
        try:
            resolved = self._state.resolve(req_id, spec, num_prompt, owner=wire.get("owner", ""))
        except BaseException:
            self._state.rules.forget(req_id)
            raise
        self._resolved[req_id] = resolved
        self._readings.add(req_id, spec.gates, resolved, num_prompt, is_traced=bool(wire.get("trace")))
        taken = {
            name: self._payloads.shared(value) if name in ("prefill", "decode") else value
            for name, value in wire.items()
        }
        names = ("prefill_parts", "decode_parts", "prefill_programs", "decode_programs")
        for name, found in zip(names, resolved.parts, strict=True):
            if found:
                taken[name] = [list(part) for part in found]
        if spec.is_to_lower:
            for name in PROGRAM_KEYS:
                taken.pop(name, None)
            if resolved.takes_own:
                for name in ("prefill", "decode", "is_shared"):
                    taken.pop(name, None)
            prefill, decode = resolved.own
            taken.update(to_wire(SteeringSpec(prefill_program=prefill, decode_program=decode)))
        return taken

    def block_keys(self, req_id: str) -> SteeredBlocks | None:
        """Return the block keys of the request under the present global vectors; None if nothing acts on it."""
        shared, own = self._state.global_keys, self._resolved.get(req_id)
        rules = self._state.rules.keys(req_id)
        keys = SteeredBlocks.join(
            global_prefill=shared.prefill,
            global_decode=shared.decode,
            prefill=own.prefill if own else None,
            decode=own.decode if own else None,
            rules=rules,
        )
        return keys if any(keys) else None

    def take_readings(self, readings: Mapping[str, Any], discarded: Collection[str]) -> dict[str, Note]:
        """Return a piece of each request's trace; see `ReadingCore`."""
        return self._readings.take(readings, discarded)

    def forget(self, req_id: str) -> None:
        """Forget a request that was taken."""
        self._readings.forget(req_id)
        self._state.rules.forget(req_id)
        if self._resolved.pop(req_id, None) is not None:
            self._state.release(req_id)

    def offer(self, req_id: str, *, priority: int, is_session: bool, is_offline: bool) -> bool:
        """Reserve the request's slots, or let it wait for them."""
        resolved = self._resolved.get(req_id)
        acts = resolved is not None or any(self._state.global_keys[1:]) or self._state.rules.acting(req_id)
        if is_session and acts:
            raise RequestError(
                "prompt",
                "streaming-input sessions cannot be steered, nor run while global vectors or rules act: their prompt "
                "grows into what was generated; send the whole prompt at once",
            )
        self._readings.begin(req_id)
        if resolved is None:
            return True
        self._operator.forget_unused()
        limits = self._offline_limits if is_offline else self._limits
        has_slots = self._reservations.offer(
            req_id, resolved.demand, req_id, priority=priority, max_waiting=limits.max_waiting
        )
        if not has_slots:
            if limits.max_wait_s < math.inf:
                self._waiting_since[req_id] = self._clock()
            reservations = self._reservations
            self._log.warning(
                f"{reservations.num_waiting} requests wait for vector slots; {reservations.num_reserved} of "
                f"{reservations.capacity} are reserved. Raise max_steering_slots if that happens often"
            )
        return has_slots

    def overdue(self) -> dict[str, str]:
        """Return the requests that have waited for their slots too long, each with the reason to tell."""
        last = self._clock() - self._limits.max_wait_s
        reservations = self._reservations
        why = (
            f"no vector slots were free for {self._limits.max_wait_s:g} s (steering.max_wait_s); "
            f"{reservations.num_reserved} of {reservations.capacity} are taken. Try again later"
        )
        return dict.fromkeys(takewhile(lambda req_id: self._waiting_since[req_id] <= last, self._waiting_since), why)

    def release(self, req_id: str) -> None:
        """Free the slots of a request, and forget it."""
        self._reservations.release(req_id)
        self.forget(req_id)

    def withdraw(self, req_ids: Collection[str] | None) -> list[str]:
        """Remove the requests among `req_ids` (None: all) that wait for slots, and return them in order."""
        withdrawn = self._reservations.withdraw(req_ids)
        for req_id in withdrawn:
            self._waiting_since.pop(req_id, None)
        return withdrawn

    def admit(self) -> list[str]:
        """Return the waiting requests that have their slots now."""
        admitted = self._reservations.admit()
        for req_id in admitted:
            self._waiting_since.pop(req_id, None)
        return admitted

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Run a method of `headgate.steering.core.operator_calls` by its name, such as ``register``.

        Raises:
            RequestError: If the method is unknown, or refuses.
        """
        return self._operator.call(method, args)

    def load(self, name: str, path: str, steerable: Steerable) -> None:
        """Register a module from a file.

        Raises:
            ConfigError: If it cannot be read, does not fit the model, or finds no room.
        """
        try:
            self._operator.register(name, load(path).spec(steerable))
        except (OSError, VectorFileError, RequestError) as error:
            raise ConfigError(f"additional_config['headgate']['steering'].modules.{name}: {path}: {error}") from error

    def load_sae(
        self, name: str, source: SaeSource, steerable: Steerable, model: str, *, is_encoded: bool = False
    ) -> None:
        """Register an SAE of the configuration; `is_encoded`: workers have its weights.

        Raises:
            ConfigError: If it cannot be read, or does not fit the model.
        """
        try:
            sae = open_sae(name, source.path, source.site, steerable)
        except (OSError, FeatureFileError) as error:
            raise ConfigError(f"additional_config['headgate']['steering'].saes.{name} (--saes): {error}") from error
        warn_of_other_model(sae, model)
        self._state.saes.put(replace(sae, is_encoded=is_encoded))
        logger.info("steering: SAE %s, %d features at %s", name, sae.coder.num_features, sae.site.name)

    def load_probe(self, name: str, path: str, steerable: Steerable) -> None:
        """Register a probe of the configuration.

        Raises:
            ConfigError: If it cannot be read, does not fit the model, or finds no room.
        """
        try:
            self._state.probes.put(name, open_probe(Path(path), steerable))
        except (ProbeError, RequestError, OSError) as error:
            raise ConfigError(f"additional_config['headgate']['steering'].probes.{name} (--probes): {error}") from error

    def room(self) -> str:
        """Return a line on the slots for the log."""
        names = ", ".join(module.name for module in self._state.modules()) or "none"
        reserved, capacity = self._reservations.num_reserved, self._reservations.capacity
        return f"room for {capacity} vectors at a time, {reserved} of them taken by named modules: {names}"


def open_core(facts: CoreFacts, section: Mapping[str, Any], services: CoreServices) -> SteeringCore:
    """Return the part for the configuration's ``steering`` section: the hook ``headgate_core``."""
    config = parse_config(section)
    model = facts.model
    steerable = config.steerable(num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype)
    audit = Audit(facts.engine, None if config.audit_file is None else Path(config.audit_file))
    capacity = config.num_slots(model.num_layers) - 1
    if facts.num_stages > 1:
        # Strengths stay on the stage that computes them, and what is read of stages but the last does not come back.
        steerable = replace(steerable, max_gates=0)
    dtype, has_conversations = cast("StoredType", model.dtype), facts.num_engines == 1
    core = SteeringCore(
        dtype, capacity, services, config, audit, steerable=steerable, has_conversations=has_conversations
    )
    for name, source in config.saes.items():
        is_encoded = name in config.sae_encode
        core.load_sae(name, SaeSource.parse(source), steerable, model.name, is_encoded=is_encoded)
    for name, path in config.modules.items():
        core.load(name, path, steerable)
    for name, path in config.probes.items():
        core.load_probe(name, path, steerable)
    _load_rules(core, config.rules_file, steerable)
    logger.info("steering: %s", core.room())
    return core


def _load_rules(core: SteeringCore, path: str | None, steerable: Steerable) -> None:
    """Register the rules of the configuration's file, if there is one.

    Raises:
        ConfigError: If it cannot be read, something that a rule names is not there, or there is no room.
    """
    for rule in () if path is None else load_rules(Path(path), steerable):
        try:
            core.call("register_rule", {"name": rule.name, "rule": rule.to_wire()})
        except RequestError as error:
            raise ConfigError(f"{WHERE}.rules_file (--steering-rules): {path}: rule {rule.name!r}: {error}") from error
        logger.info("steering: rule %s, for %s", rule.name, rule.applies_to.value)


BLOCK_KEY_TAG = "headgate"
"""First half of each extra key. The same for both phases: a steered answer can become the prompt of the next turn."""


class SteeredBlocks(NamedTuple):
    """Extra keys of one request's KV blocks; implements `headgate.capture.engine.contracts.core_part.BlockKeys`.

    A block of the prompt is keyed by the vectors of the prefill phase, a generated one by those of the decode phase,
    and the block with tokens of both phases by both and by where the prompt ends in it. Blocks on which nothing acts
    have no extra key, so they are shared with requests of an engine without steering.

    Attributes:
        prefill: Name of the content that acts in the prefill phase; None if nothing does.
        decode: The same for the decode phase.
        skips_reading: See `BlockKeys`.
    """

    prefill: str | None
    decode: str | None
    skips_reading: bool = False

    @classmethod
    def join(
        cls,
        *,
        global_prefill: bytes | None,
        global_decode: bytes | None,
        prefill: bytes | None,
        decode: bytes | None,
        rules: RuleKeys = NO_RULES,
    ) -> SteeredBlocks:
        """Join the content keys of global vectors, of rules and of a request's own, phase by phase."""
        return cls(
            _joined(global_prefill, rules.prefill, prefill),
            _joined(global_decode, rules.decode, decode),
            rules.has_state,
        )

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        """Return the extra keys of the block of tokens ``start : end``: none, or one pair of a tag and a name.

        Args:
            start: Position of the block's first token.
            end: Position after its last.
            num_prompt: Length of the request's prompt.
        """
        if self.prefill == self.decode or end <= num_prompt:
            name = self.prefill
        elif start >= num_prompt:
            name = self.decode
        else:
            name = f"{self.prefill or ''}:{self.decode or ''}@{num_prompt - start}"
        return ((BLOCK_KEY_TAG, name),) if name else ()


def _joined(*acting: bytes | None) -> str | None:
    """Return the name of all; one alone has the same name wherever it comes from: equal vectors make equal KV."""
    names = [key.hex() for key in acting if key]
    return "+".join(names) or None
