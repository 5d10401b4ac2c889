"""Starts the controllers of an engine core."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import MAX_DRIVEN, MAX_READ, WHERE, SteeringConfig, first_controller_column
from headgate.steering.core.admission import Reservations
from headgate.steering.core.content import check_programs
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.contents import Contents
from headgate.steering.core.controllers.controllers import Controllers
from headgate.steering.core.controllers.driving.coefficients import Coefficients
from headgate.steering.core.controllers.driving.drives import Drives, demand_of_both
from headgate.steering.core.controllers.driving.hearing import Hearing
from headgate.steering.core.controllers.hosting import open_host
from headgate.steering.core.controllers.outcomes import Outcomes
from headgate.steering.core.controllers.readers import ScoreColumns
from headgate.steering.core.controllers.running import running_controllers
from headgate.steering.core.gates import GateContent
from headgate.steering.core.rules.calls import RuleCalls
from headgate.steering.core.state import SteeringState
from headgate.steering.vectors.phase_vectors import Steerable

logger = logging.getLogger("headgate")

_PLACE = f"{WHERE}.controllers (--steering-controllers)"


def open_controllers(
    config: SteeringConfig,
    facts: CoreFacts,
    state: SteeringState,
    reservations: Reservations[str],
    rules: RuleCalls,
    services: CoreServices,
) -> Controllers:
    """Start the configured controllers; the workers know what they read from here on.

    Args:
        config: With controllers.
        facts: Of the engine core.
        state: With the modules that are registered at start.
        reservations: Of the slots.
        rules: Tells the workers.
        services: Of the engine core.

    Raises:
        ConfigError: If one cannot run here.
    """
    steerable = _checked(state.steerable, facts)
    modules = {module.name: module for module in state.modules()}
    content = GateContent(steerable, state.probes, state.saes, modules)
    first = first_controller_column(config)
    columns = ScoreColumns(first, first + MAX_READ, MAX_READ)
    try:
        host = open_host(config, facts, services, columns)
        running = list(running_controllers(config.controllers, host.loaded, content, modules, columns))
        check_programs([each.reader.program for each in running], state.limits, "controllers", "of all controllers")
        for each in running:
            _check_name(each.name, state)
            reservations.keep_module(f"controller\n{each.name}", demand_of_both(each.reader.program), "controllers")
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{_PLACE}: {error}") from error
    readers = [each.reader.to_worker() for each in running]

    def tell(drives: Sequence[Mapping[str, Any]]) -> None:
        rules.set_beside([*readers, *drives])

    tell(())
    state.rules.reserve(each.name for each in running)
    host.start({each.name: each.reader.told for each in running})
    driven = range(first + 2 * MAX_READ, first + 2 * MAX_READ + MAX_DRIVEN)
    drives = Drives(driven, reservations, tell, can_be_heard=host.heard is not None)
    for each in running:
        logger.info("steering: controller %s, for %s", each.name, each.spec.applies_to)
    coefficients = Coefficients(drives, services, state.limits)
    submitted = services.actions if config.from_consumers else None
    contents, outcomes = Contents(state), Outcomes()
    hearing = Hearing(host.heard, contents, coefficients, outcomes)
    return Controllers(running, host, Actuation(contents, coefficients), services, outcomes, hearing, submitted)


def _checked(steerable: Steerable | None, facts: CoreFacts) -> Steerable:
    if facts.num_stages > 1:
        raise ConfigError(
            f"{_PLACE}: scores of pipeline stages but the last do not come back to the engine core; start the engine "
            "with tensor parallelism"
        )
    if steerable is None or not steerable.op_sites:
        raise ConfigError(
            f"{_PLACE}: controllers, and consumers that steer, act at op sites, and there are none; declare them with "
            "--steering-op-sites, or with --probes NAME=PATH for the site of a probe"
        )
    return steerable


def _check_name(name: str, state: SteeringState) -> None:
    if state.rules.find(name) is not None:
        raise ConfigError(f"controller {name!r} has the name of a rule; give it an instance_name")
