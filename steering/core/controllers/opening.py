"""Starts the controllers of an engine core."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.steering.config import MAX_DRIVEN, MAX_READ, WHERE, SteeringConfig, first_controller_column
from headgate.steering.controllers.controller_process import ProcessHost
from headgate.steering.controllers.host import ControllerHost, LocalHost
from headgate.steering.core.admission import Reservations
from headgate.steering.core.content import check_programs
from headgate.steering.core.controllers.actuation import Actuation
from headgate.steering.core.controllers.coefficients import Coefficients
from headgate.steering.core.controllers.contents import Contents
from headgate.steering.core.controllers.controllers import Controllers
from headgate.steering.core.controllers.drives import Drives, demand_of_both
from headgate.steering.core.controllers.outcomes import Outcomes
from headgate.steering.core.controllers.readers import ScoreColumns, running_controllers
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
        config: The configuration, with controllers.
        facts: Facts of the engine core.
        state: The state, with the modules that are registered at start.
        reservations: Reserves slots.
        rules: Notifies the workers.
        services: The engine core's.

    Raises:
        ConfigError: If one cannot run here.
    """
    steerable = _checked(state.steerable, facts)
    modules = {module.name: module for module in state.modules()}
    content = GateContent(steerable, state.probes, state.saes, modules)
    first = first_controller_column(config)
    columns = ScoreColumns(first, MAX_READ)
    try:
        host = _open_host(config, facts, services, columns)
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
    host.start({each.name: each.reader.numbers for each in running})
    driven = range(first + MAX_READ, first + MAX_READ + MAX_DRIVEN)
    drives = Drives(driven, reservations, tell)
    for each in running:
        logger.info("steering: controller %s, for %s", each.name, each.spec.applies_to)
    coefficients = Coefficients(drives, services, state.limits)
    submitted = services.actions if config.from_consumers else None
    return Controllers(running, host, Actuation(Contents(state), coefficients), services, Outcomes(), submitted)


def _open_host(
    config: SteeringConfig, facts: CoreFacts, services: CoreServices, columns: ScoreColumns
) -> ControllerHost:
    """Load the configured controllers, in a process of their own or here.

    Raises:
        ConfigError: If one cannot be made, or the process does not start.
    """

    def tokens_of(req_id: str) -> Any:
        progress = services.progress(req_id)
        return None if progress is None else progress.token_ids

    has_process = facts.has_own_process if config.controller_process is None else config.controller_process
    if config.controllers and has_process:
        scores = slice(columns.first, columns.first + columns.size)
        return ProcessHost(config.controllers, services.progress, scores)
    return LocalHost(config.controllers, tokens_of, columns.first)


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
