"""Reading the bodies of ``/v1/steering``, and whose they are; servers alone load this module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fastapi import Request

from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.capture.schema.errors import RequestError, shown
from headgate.steering.core.audit import Actor


async def read_fields(services: RouteServices, request: Request, known: Collection[str]) -> dict[str, Any]:
    """Return the body, an object of the fields `known`.

    Raises:
        RequestError: If it is none, or has other fields.
    """
    document = await services.read_object(request)
    for name in document:
        if name not in known:
            raise RequestError(shown(name)[1:-1], f"is no field of this route; it has {', '.join(known)}")
    return document


def name_in(document: Mapping[str, Any]) -> Any:
    """Return the field ``name`` of a body.

    Raises:
        RequestError: If it is missing.
    """
    if "name" not in document:
        raise RequestError("name", "is missing")
    return document["name"]


def actor_of(services: RouteServices, request: Request) -> Actor:
    """Return the client that sent a request."""
    client = services.client(request)
    return Actor(key=client.key, address=client.address, is_bound=client.is_bound)
