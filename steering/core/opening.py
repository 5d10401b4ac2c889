"""Opens an engine core's half of steering, with all that the configuration names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.capture.probes.probe import ProbeError
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import WHERE, SteeringConfig, has_controllers, parse_config
from headgate.steering.core.audit import Audit
from headgate.steering.core.controllers.opening import open_controllers
from headgate.steering.core.probes import open_probe
from headgate.steering.core.saes.registry import open_sae, warn_of_other_model
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.features.sparse_coder import gathered
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.files.vector_files import VectorFileError, load
from headgate.steering.requests.rules.rule_files import load_rules
from headgate.steering.sae_sources import SaeSource
from headgate.steering.vectors.dtypes import StoredType
from headgate.steering.vectors.phase_vectors import Steerable

logger = logging.getLogger("headgate")


def open_core(facts: CoreFacts, section: Mapping[str, Any], services: CoreServices) -> SteeringCore:
    """Return the part for the configuration's ``steering`` section: the hook ``headgate_core``."""
    config = parse_config(section)
    model = facts.model
    steerable = config.steerable(num_layers=model.num_layers, hidden_size=model.hidden_size, dtype=model.dtype)
    audit = Audit(facts.engine, None if config.audit_file is None else Path(config.audit_file))
    capacity = config.num_slots(model.num_layers) - 1
    if facts.num_stages > 1:
        # Strengths stay on the stage that computes them, and what is read of stages but the last does not come back.
        steerable = replace(steerable, max_gates=0, max_rules=0)
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
        core.start(open_controllers(config, facts, core.state, core.reservations, core.operator.rules, services))
    logger.info("steering: %s", _room(core))
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
