"""HTTP routes ``/v1/steering/rules`` and ``/v1/steering/dynamic``; servers alone load this module."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from fastapi import APIRouter, Depends, HTTPException, Request

from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.steering.control.bodies import actor_of, name_in, read_fields
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.control.rules import openapi
from headgate.steering.requests.rules.rule_fields import RULE_FIELDS
from headgate.steering.vectors.phase_vectors import check_name


def open_rule_routes(services: RouteServices) -> APIRouter:
    """Return the router of ``/v1/steering/rules`` and ``/v1/steering/dynamic``."""
    routes = RuleRoutes(services)
    router = APIRouter(prefix="/v1/steering", tags=["steering"])
    keyed = [Depends(services.require_key)]
    for path, answer, about in (
        ("/rules/register", routes.register, openapi.REGISTER),
        ("/rules/unregister", routes.unregister, openapi.UNREGISTER),
    ):
        router.add_api_route(path, answer, methods=["POST"], dependencies=keyed, response_model=None, **about)
    for path, read, about in (("/rules", routes.rules, openapi.RULES), ("/dynamic", routes.dynamic, openapi.DYNAMIC)):
        router.add_api_route(path, read, methods=["GET"], dependencies=keyed, response_model=None, **about)
    return router


class RuleRoutes:
    """The routes, one method each. Errors are HTTP errors, or `RequestError`s that become one."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services

    async def register(self, request: Request) -> dict[str, Any]:
        """Register a rule: a gate that acts on requests which did not ask; an earlier one of the name is replaced.

        It acts from the next step on, on requests that run too.
        """
        handle = self._handle()
        with self._services.client_errors():
            document = await read_fields(self._services, request, ("name", *RULE_FIELDS))
            name = name_in(document)
            fields = {key: document.get(key) for key in RULE_FIELDS}
            rule = await handle.register_rule(name, **fields, by=actor_of(self._services, request))
        return {"status": "ok", **dataclasses.asdict(rule)}

    async def unregister(self, request: Request) -> dict[str, Any]:
        """Forget a rule; it acts on nothing from the next step on."""
        handle = self._handle()
        with self._services.client_errors():
            name = check_name(name_in(await read_fields(self._services, request, ("name",))), "name", "a rule")
            if name not in (known := await handle.rules()):
                raise HTTPException(404, f"name: unknown rule {name!r}; registered: {', '.join(known) or 'none'}")
            rule = await handle.unregister_rule(name, by=actor_of(self._services, request))
        return {"status": "ok", "name": rule.name}

    async def rules(self) -> dict[str, Any]:
        """Return the registered rules."""
        found = await self._handle().rules()
        return {"rules": [dataclasses.asdict(rule) for rule in found.values()], "count": len(found)}

    async def dynamic(self) -> dict[str, Any]:
        """Return probes, rules and gates, with the rows that they wrote so far."""
        return dataclasses.asdict(await self._handle().dynamic())

    def _handle(self) -> AsyncSteering:
        return cast("AsyncSteering", self._services.handle())
