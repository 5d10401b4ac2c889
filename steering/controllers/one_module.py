"""Controllers that read one probe, and turn one module on for each request."""

from __future__ import annotations

from collections.abc import Mapping

from headgate.capture.probes.files import load
from headgate.capture.probes.probe import Probe
from headgate.steering.controllers.controller import Controller, RequestView
from headgate.steering.controllers.request_slots import RequestSlots


class OneModuleController(Controller):
    """Derive from this: it follows the requests.

    Args:
        probe: Path of the probe's file; its scores are called ``score``.
        module: Name of the registered module.
        initial: Numbers of each request, as `RequestSlots` takes them.

    Raises:
        ProbeError: If the probe cannot be read.
    """

    never_waits = True

    def __init__(self, probe: str, module: str, **initial: float) -> None:
        self._probe = load(probe)
        self._module = module
        self._requests = RequestSlots(**initial)

    def probes(self) -> Mapping[str, Probe]:
        """Return the one probe."""
        return {"score": self._probe}

    def modules(self) -> tuple[str]:
        """Return the module."""
        return (self._module,)

    def request_begins(self, request: RequestView) -> None:
        """Follow a request."""
        self._requests.add(request.request)

    def request_ends(self, request: RequestView) -> None:
        """Forget a request."""
        self._requests.remove(request.request)
