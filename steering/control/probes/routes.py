"""HTTP routes ``/v1/steering/probes``; servers alone load this module."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from fastapi import APIRouter, Depends, HTTPException, Request

from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.steering.control.bodies import actor_of, name_in, read_fields
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.control.probes import openapi
from headgate.steering.requests.probe_fields import PROBE_FIELDS
from headgate.steering.vectors.phase_vectors import check_name


def open_probe_routes(services: RouteServices) -> APIRouter:
    """Return the router of ``/v1/steering/probes``."""
    routes = ProbeRoutes(services)
    router = APIRouter(prefix="/v1/steering/probes", tags=["steering"])
    keyed = [Depends(services.require_key)]
    for path, answer, about in (
        ("/register", routes.register, openapi.REGISTER),
        ("/unregister", routes.unregister, openapi.UNREGISTER),
    ):
        router.add_api_route(path, answer, methods=["POST"], dependencies=keyed, response_model=None, **about)
    router.add_api_route("", routes.probes, methods=["GET"], response_model=None, **openapi.PROBES)
    return router


class ProbeRoutes:
    """The routes, one method each. Errors are HTTP errors, or `RequestError`s that become one."""

    def __init__(self, services: RouteServices) -> None:
        self._services = services

    async def register(self, request: Request) -> dict[str, Any]:
        """Name a probe, for gates; an earlier one of the name is replaced.

        Requests that run already keep the probe that the name stood for when they were made.
        """
        handle = self._handle()
        with self._services.client_errors():
            document = await read_fields(self._services, request, ("name", *PROBE_FIELDS))
            name = name_in(document)
            fields = {key: value for key, value in document.items() if key != "name"}
            probe = await handle.register_probe(name, fields, by=actor_of(self._services, request))
        return {"status": "ok", **dataclasses.asdict(probe)}

    async def unregister(self, request: Request) -> dict[str, Any]:
        """Forget a probe; requests that run already keep it."""
        handle = self._handle()
        with self._services.client_errors():
            name = check_name(name_in(await read_fields(self._services, request, ("name",))), "name", "a probe")
            if name not in (known := await handle.probes()):
                raise HTTPException(404, f"name: unknown probe {name!r}; registered: {', '.join(known) or 'none'}")
            probe = await handle.unregister_probe(name, by=actor_of(self._services, request))
        return {"status": "ok", "name": probe.name}

    async def probes(self) -> dict[str, Any]:
        """Return the probes that gates can name."""
        found = await self._handle().probes()
        return {"probes": [dataclasses.asdict(probe) for probe in found.values()], "count": len(found)}

    def _handle(self) -> AsyncSteering:
        return cast("AsyncSteering", self._services.handle())
