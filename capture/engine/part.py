"""How capture joins headgate; see `contracts.parts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.capture.engine.contracts.parts import Part
from headgate.capture.schema.config import parse_config

if TYPE_CHECKING:
    from fastapi import APIRouter

    from headgate.capture.engine.contracts.parts import RouteServices
    from headgate.capture.engine.worker.capture_part import CapturePart
    from headgate.capture.monitoring.metrics import MetricsPart
    from headgate.capture.monitoring.verify_checks import CheckPart
    from headgate.capture.schema.batch import Document

COMMANDS = {
    "doctor": (
        "headgate.capture.engine.commands.doctor:command",
        "Say whether headgate fits what is installed, and what MODEL offers.",
    ),
    "keys": ("headgate.capture.engine.commands.keys:keys", "Make keys of clients and of hosts."),
    "serve": (
        "headgate.capture.engine.commands.serve:serve",
        "Serve MODEL over HTTP: vllm serve with headgate's flags and routes.",
    ),
    "studio": (
        "headgate.capture.engine.commands.studio:studio",
        "Serve MODEL with a page in the browser that shows what it carries, and steers it.",
    ),
    "verify": (
        "headgate.capture.engine.commands.verify:verify",
        "Compare answers, captures and steering of MODEL with stock vLLM on this machine.",
    ),
}


class CaptureAsPart(Part):
    """Capture, as the engine sees it."""

    def worker(self, section: Document) -> CapturePart | None:
        """Capture in one worker; None without consumers: nothing in the graph, nothing after the step."""
        from headgate.capture.engine.worker.capture_part import CapturePart

        config = parse_config(section)
        return CapturePart(config) if config.consumers else None

    def routes(self, services: RouteServices) -> APIRouter:
        """The routes ``/v1/capture/...``."""
        from headgate.capture.engine.server.capture_routes import open_routes

        return open_routes(services)

    def metrics(self) -> MetricsPart:
        """Capture's counters."""
        from headgate.capture.engine.server.metrics_page import CaptureMetrics

        return CaptureMetrics()

    def commands(self) -> dict[str, tuple[str, str]]:
        """``headgate doctor``, ``keys``, ``serve``, ``studio`` and ``verify``."""
        return COMMANDS

    def checks(self) -> CheckPart:
        """Captured rows are complete, the request's own, and those of eager mode."""
        from headgate.capture.engine.commands.verify_engine import CaptureChecks

        return CaptureChecks()
