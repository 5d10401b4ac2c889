"""Chooses where the controllers of an engine core live, and lets them read what forwards tell by themselves."""

from __future__ import annotations

import logging
from typing import Any, cast

from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
from headgate.steering.config import SteeringConfig
from headgate.steering.controllers.hosting.host import ControllerHost, LocalHost
from headgate.steering.controllers.hosting.process_host import ProcessHost
from headgate.steering.controllers.hosting.told_words import ToldPlace
from headgate.steering.core.controllers.readers import ScoreColumns

logger = logging.getLogger("headgate")


def open_host(
    config: SteeringConfig, facts: CoreFacts, services: CoreServices, columns: ScoreColumns
) -> ControllerHost:
    """Load the configured controllers, in a process of their own or here.

    Args:
        config: With controllers.
        facts: Of the engine core.
        services: Of the engine core.
        columns: Of the signals, for all that controllers read.

    Raises:
        ConfigError: If one cannot be made, or the process does not start.
    """

    def tokens_of(req_id: str) -> Any:
        progress = services.progress(req_id)
        return None if progress is None else progress.token_ids

    has_process = facts.has_own_process if config.controller_process is None else config.controller_process
    if not config.controllers or not has_process:
        return LocalHost(config.controllers, tokens_of, columns.first)
    scores, counts = (slice(first, first + columns.size) for first in (columns.first, columns.first_count))
    host = ProcessHost(
        config.controllers,
        services.progress,
        scores,
        counts,
        lambda: services.call_workers("tell", {"quietly": False}),
    )
    answers = services.call_workers("told_place", {})
    places = [ToldPlace(*cast("tuple[Any, ...]", place)) for place in answers if place is not None]
    if len(places) == 1 and host.attach(places[0], is_alone=len(answers) == 1):
        services.call_workers("tell", {"quietly": True})
    else:
        logger.info("steering: scores reach controllers with the outputs of steps: no worker's memory can be read here")
    return host
