"""The rules of ``llm.steering`` and ``async_llm.steering``."""

from __future__ import annotations

from typing import Any

from headgate.capture.engine.contracts.request_part import AsyncEngineCores, EngineCores
from headgate.steering.control.rules import operations
from headgate.steering.control.rules.operations import DynamicStatus, RuleStatus
from headgate.steering.core.audit import OPERATOR, Actor
from headgate.steering.vectors.phase_vectors import Steerable


class Rules:
    """Rules of an `LLM`: gates that act on requests which did not ask."""

    _cores: EngineCores
    steerable: Steerable

    def register_rule(self, name: str, *, applies_to: str, when: Any, then: Any, **others: Any) -> RuleStatus:
        """Register a rule, which acts from the next step on, on requests that run too; an earlier one is replaced.

        Probes, modules and SAEs that it names stay for it as they are now, whatever is registered later.

        ::

            llm.steering.register_rule(
                "calm-down", applies_to="all", when={"probe": "anger", "above": 0.5}, then={"module": "calm"}
            )
            llm.steering.register_rule("watch", applies_to="opt_out", when={"probe": "anger"}, then="observe")

        Args:
            name: 1 to 256 printable characters.
            applies_to: ``"all"`` requests; ``"opt_in"``, those whose ``steering_rules`` name it; or ``"opt_out"``,
                beside these all that have no such field.
            when: The condition, as of ``steering_gates``.
            then: What it turns on, as there; ``"observe"`` for nothing.
            others: ``strength`` and ``scope``, as there.

        Raises:
            RequestError: If it cannot be read, names something that is not there, or there is no room.
        """
        document = {"applies_to": applies_to, "when": when, "then": then, **others}
        return self._cores.run(operations.register_rule(name, document, self.steerable, self._cores.num_engines))

    def unregister_rule(self, name: str) -> RuleStatus:
        """Forget a rule; it acts on nothing from the next step on.

        Raises:
            RequestError: If there is none of that name.
        """
        return self._cores.run(operations.unregister_rule(name, self._cores.num_engines))

    def rules(self) -> dict[str, RuleStatus]:
        """Return the registered rules, by name."""
        return self._cores.run(operations.rules())

    def dynamic(self) -> DynamicStatus:
        """Return probes, rules and gates, with the rows that they wrote so far."""
        return self._cores.run(operations.dynamic())


class AsyncRules:
    """Rules of an `AsyncLLM`. Changes are noted as those of `by`."""

    _cores: AsyncEngineCores
    steerable: Steerable

    async def register_rule(
        self, name: str, *, applies_to: Any, when: Any, then: Any, by: Actor = OPERATOR, **others: Any
    ) -> RuleStatus:
        """See `Rules.register_rule`."""
        document = {"applies_to": applies_to, "when": when, "then": then, **others}
        engines = self._cores.num_engines
        return await self._cores.run(operations.register_rule(name, document, self.steerable, engines, by))

    async def unregister_rule(self, name: str, *, by: Actor = OPERATOR) -> RuleStatus:
        """See `Rules.unregister_rule`."""
        return await self._cores.run(operations.unregister_rule(name, self._cores.num_engines, by))

    async def rules(self) -> dict[str, RuleStatus]:
        """See `Rules.rules`."""
        return await self._cores.run(operations.rules())

    async def dynamic(self) -> DynamicStatus:
        """See `Rules.dynamic`."""
        return await self._cores.run(operations.dynamic())
