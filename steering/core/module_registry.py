"""Named modules of one engine core, kept alike in its books and in its workers. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.capture.engine.contracts.core_part import CoreServices
from headgate.steering.core.admission import Reservations
from headgate.steering.core.state import Module, SteeringState
from headgate.steering.requests.wire import to_wire
from headgate.steering.vectors.phase_vectors import SteeringSpec

Order = tuple[str, Mapping[str, Any]]
"""A method of steering's workers, and its arguments."""


class ModuleRegistry:
    """Registers modules: slots first, then the workers, and last the name, so that no request finds half of one.

    Args:
        state: Where the modules are kept.
        reservations: Of the slots.
        services: Calls the workers.
    """

    def __init__(self, state: SteeringState, reservations: Reservations[str], services: CoreServices) -> None:
        self._state = state
        self._reservations = reservations
        self._services = services

    def register(self, name: str, spec: SteeringSpec) -> Module:
        """Register a module, in place of an earlier one of its name.

        Raises:
            RequestError: If it cannot be one, or its slots are not free. Nothing has changed.
            Exception: What a worker raised. Nothing has changed.
        """
        module, earlier = self._state.read_module(name, spec), self._find(name)
        self._reservations.keep(name, module.demand, "module")
        try:
            self.tell(_keep(module), undo=("let_go", {"name": name}) if earlier is None else _keep(earlier))
        except BaseException:
            if earlier is None:
                self._reservations.let_go(name)
            else:
                self._reservations.keep(name, earlier.demand, "module")
            raise
        self._state.register(module)
        self.forget_dropped()
        return module

    def unregister(self, name: str) -> Module:
        """Forget a module; requests that use it already keep its vectors.

        Raises:
            RequestError: If there is none of that name.
            Exception: What a worker raised. Nothing has changed.
        """
        module = self._find(name)
        if module is not None:
            self.tell(("let_go", {"name": name}), undo=_keep(module))
        module = self._state.unregister(name)
        self._reservations.let_go(name)
        self.forget_dropped()
        return module

    def tell(self, order: Order, *, undo: Order) -> None:
        """Have every worker do `order`; if one fails, `undo` it in all, and if that fails, let the engine end.

        Raises:
            Exception: What a worker raised.
        """
        try:
            self._services.call_workers(*order)
        except BaseException as error:
            try:
                self._services.call_workers(*undo)
            except BaseException:
                self._services.fail(f"steering: workers may differ after {order[0]!r} failed in one: {error}")
                raise
            raise

    def forget_dropped(self) -> None:
        """Let the workers drop the contents that nobody refers to any more."""
        if keys := self._state.take_dropped():
            self._services.call_workers("forget", {"keys": list(keys)})

    def _find(self, name: str) -> Module | None:
        return next((module for module in self._state.modules() if module.name == name), None)


def _keep(module: Module) -> Order:
    spec = SteeringSpec(prefill=module.prefill, decode=module.decode)
    return "keep", {"name": module.name, "spec": to_wire(spec)}
