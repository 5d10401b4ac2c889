"""How steering joins headgate; see `headgate.capture.engine.contracts.parts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headgate.capture.engine.contracts.parts import Part

if TYPE_CHECKING:
    from fastapi import APIRouter

    from headgate.capture.engine.contracts.core_part import CoreFacts, CoreServices
    from headgate.capture.engine.contracts.parts import RouteServices
    from headgate.capture.engine.contracts.request_part import RequestPart
    from headgate.capture.monitoring.metrics import MetricsPart
    from headgate.capture.monitoring.verify_checks import CheckPart
    from headgate.steering.core.steering_core import SteeringCore
    from headgate.steering.worker.steering_part import SteeringPart


class SteeringAsPart(Part):
    """Steering, as the engine sees it."""

    def worker(self, section: Mapping[str, Any]) -> SteeringPart:
        """Return steering's part in one worker."""
        from headgate.steering.config import parse_config
        from headgate.steering.worker.steering_part import SteeringPart

        return SteeringPart(parse_config(section))

    def refused_with_drafts(self, section: Mapping[str, Any]) -> list[str]:
        """Say what acts on, or counts, rows of drafts that are rejected later."""
        from headgate.steering.config import has_controllers, parse_config

        config, refused = parse_config(section), []
        if has_controllers(config):
            refused.append(
                "controllers, and consumers that steer, with speculative decoding: scores of rejected drafts would be "
                "read; start without --steering-controllers and steering.from_consumers, or without "
                "--speculative-config"
            )
        if config.sae_encode:
            refused.append(
                "encoded SAEs with speculative decoding: figures on rebuilt rows would count those of rejected drafts; "
                "start without --sae-encode, or without --speculative-config"
            )
        return refused

    def core(self, facts: CoreFacts, section: Mapping[str, Any], services: CoreServices) -> SteeringCore:
        """Return steering's part in one engine core."""
        from headgate.steering.core.steering_core import open_core

        return open_core(facts, section, services)

    def takes_actions(self, section: Mapping[str, Any]) -> bool:
        """Whether capture consumers may steer, as controllers do."""
        from headgate.steering.config import parse_config

        return parse_config(section).from_consumers

    def requests(self) -> RequestPart:
        """Return the fields ``steering_vectors`` and so on, flags, and ``LLM.steering``."""
        from headgate.steering.control.handle import SteeringRequests

        return SteeringRequests()

    def routes(self, services: RouteServices) -> APIRouter:
        """Return the routes ``/v1/steering/...`` and ``/v1/patch_sweep``."""
        from headgate.steering.control.routes import open_routes
        from headgate.steering.control.sweep_routes import open_sweep_route

        router = open_routes(services)
        router.routes.extend(open_sweep_route(services).routes)
        return router

    def metrics(self) -> MetricsPart:
        """Return steering's gauges."""
        from headgate.steering.control.metrics import SteeringMetrics

        return SteeringMetrics()

    def commands(self) -> dict[str, tuple[str, str]]:
        """``headgate sae``, ``lens``, ``probe`` and ``vectors``."""
        return {
            "sae": ("headgate.steering.features.commands:app", "Import SAEs and transcoders, and check them."),
            "lens": ("headgate.steering.lenses.commands:app", "Import lenses, and check them on a model."),
            "probe": ("headgate.steering.probes.commands:app", "Make probes from captured rows, and judge them."),
            "vectors": ("headgate.steering.files.commands:app", "Show and import files of steering vectors."),
        }

    def checks(self) -> CheckPart:
        """Return the checks that steered tokens change as they must, and no others do."""
        from headgate.steering.verify import SteeringChecks

        return SteeringChecks()
