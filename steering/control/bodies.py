"""Reading the bodies of ``/v1/steering``, and whose they are; servers alone load this module."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Request

from headgate.capture.engine.contracts.route_part import RouteServices
from headgate.capture.schema.errors import RequestError, shown
from headgate.steering.core.audit import Actor
from headgate.steering.requests.feature_fields import MODULE_FEATURES, REQUEST_FEATURES
from headgate.steering.requests.op_fields import MODULE_FIELDS as MODULE_OPS
from headgate.steering.requests.op_fields import REQUEST_FIELDS as REQUEST_OPS
from headgate.steering.requests.request_fields import BASE, DECODE, MODULE_FIELDS, PREFILL

_SHORT = {
    **dict(zip((BASE, PREFILL, DECODE), MODULE_FIELDS, strict=True)),
    **dict(zip(REQUEST_OPS.all, MODULE_OPS.all, strict=True)),
    **dict(zip(REQUEST_FEATURES.features, MODULE_FEATURES.features, strict=True)),
}
"""Names in modules and in the global state, by the names of the same fields in requests."""


async def read_fields(services: RouteServices, request: Request, known: Collection[str]) -> dict[str, Any]:
    """Return the body, an object of the fields `known`.

    Raises:
        RequestError: If it is none, or has other fields.
    """
    document = await services.read_object(request)
    for name in document:
        if name not in known:
            raise _unknown(name, known)
    return document


async def read_steering(services: RouteServices, request: Request, known: Collection[str]) -> dict[str, Any]:
    """Return the body, an object of the fields `known` that steer; those may have their names in requests.

    Raises:
        RequestError: If it is none, or has other fields.
    """
    document = await services.read_object(request)
    for name in document:
        if _SHORT.get(name, name) not in known:
            raise _unknown(name, known)
    return document


@contextmanager
def short_names(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give a body's fields their names in modules: ``ops`` for ``steering_ops``; in errors they are as in the body.

    Raises:
        RequestError: If a field has both names, or was raised within.
    """
    written: dict[str, str] = {}
    for name in document:
        other = written.setdefault(_SHORT.get(name, name), name)
        if other != name:
            raise RequestError(name, f"is the same field as {other}; give one of them")
    try:
        yield {short: document[name] for short, name in written.items()}
    except RequestError as error:
        name = re.split(r"[.\[]", error.field, maxsplit=1)[0]
        if written.get(name, name) == name:
            raise
        message = str(error).removeprefix(f"{error.field}: ")
        raise RequestError(written[name] + error.field.removeprefix(name), message) from error


def _unknown(name: object, known: Collection[str]) -> RequestError:
    return RequestError(shown(name)[1:-1], f"is no field of this route; it has {', '.join(known)}")


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
    return Actor(key=client.key, address=client.address, forwarded=client.forwarded, is_bound=client.is_bound)
