"""HTTP routes ``/v1/steering/...`` on vLLM's server.

Servers alone load this module, which uses their FastAPI. Vectors are read on a thread beside the event loop; the calls
of the engine cores are those of ``AsyncLLM.steering``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastapi import APIRouter, Depends, HTTPException, Request

from headgate.capture.schema.errors import RequestError, read_flag, shown
from headgate.capture.schema.sites import HookPoint, Site, parse_hook
from headgate.steering.control import openapi
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.control.status import SaeDocument, SteeringStatus
from headgate.steering.core.audit import SIZE, Actor
from headgate.steering.documents.features import (
    MODULE_FEATURES,
    REQUEST_FEATURES,
    PhaseFeatures,
    read_global_features,
)
from headgate.steering.documents.gates import RULE_FIELDS
from headgate.steering.documents.operations import MODULE_FIELDS as MODULE_OPS
from headgate.steering.documents.operations import REQUEST_FIELDS as REQUEST_OPS
from headgate.steering.documents.probes import PROBE_FIELDS
from headgate.steering.documents.request import (
    BASE,
    DECODE,
    DOCUMENT_FIELDS,
    MODULE_FIELDS,
    PREFILL,
    SteeringDocument,
    read_global_ops,
)
from headgate.steering.documents.vectors import TierUpdate, read_tier, read_update
from headgate.steering.features.labels import labels_of
from headgate.steering.features.tensors import FeatureFileError
from headgate.steering.vectors.phase_vectors import PhaseVectors, Steerable, check_name

if TYPE_CHECKING:
    from headgate.capture.engine.contracts.parts import RouteServices

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
    return RequestError(shown(name)[1:-1], f"is no field of this route; it has {', '.join(known) or 'none'}")


def name_in(document: Mapping[str, Any]) -> Any:
    """Return the field ``name`` of a body.

    Raises:
        RequestError: If it is missing.
    """
    if "name" not in document:
        raise RequestError("name", "is missing")
    return document["name"]


class _Routes:
    """Base of all routes: reads bodies, finds clients and names. Errors are HTTP errors, or `RequestError`s.

    Args:
        services: Services of the server.
    """

    def __init__(self, services: RouteServices) -> None:
        self._services = services

    def _handle(self) -> AsyncSteering:
        return cast("AsyncSteering", self._services.handle())

    def _actor(self, request: Request) -> Actor:
        """Return the client that sent a request."""
        client = self._services.client(request)
        return Actor(key=client.key, address=client.address, forwarded=client.forwarded, is_bound=client.is_bound)

    async def _read(self, request: Request, known: Collection[str]) -> dict[str, Any]:
        return await read_fields(self._services, request, known)

    async def _read_registered(
        self, request: Request, registered: Callable[[], Awaitable[Collection[str]]], kind: str, of: str
    ) -> str:
        """Return the ``name`` of a body that has nothing else.

        Args:
            request: The request.
            registered: Asks for the registered names.
            kind: What the name is of, as `check_name` says it.
            of: The same without an article.

        Raises:
            RequestError: If it is no name.
            HTTPException: With status 404, if nothing is registered under it.
        """
        name = check_name(name_in(await self._read(request, ("name",))), "name", kind)
        if name not in (known := await registered()):
            raise HTTPException(404, f"name: unknown {of} {name!r}; registered: {', '.join(known) or 'none'}")
        return name


class ProbeRoutes(_Routes):
    """Routes about probes, one method each."""

    async def register(self, request: Request) -> dict[str, Any]:
        """Name a probe, for gates; an earlier one of the name is replaced.

        Requests that run already keep the probe that the name stood for when they were made.
        """
        handle = self._handle()
        with self._services.client_errors():
            document = await self._read(request, ("name", *PROBE_FIELDS))
            name = name_in(document)
            fields = {key: value for key, value in document.items() if key != "name"}
            probe = await handle.register_probe(name, fields, by=self._actor(request))
        return {"status": "ok", **dataclasses.asdict(probe)}

    async def unregister(self, request: Request) -> dict[str, Any]:
        """Forget a probe; requests that run already keep it."""
        handle = self._handle()
        with self._services.client_errors():
            name = await self._read_registered(request, handle.probes, "a probe", "probe")
            probe = await handle.unregister_probe(name, by=self._actor(request))
        return {"status": "ok", "name": probe.name}

    async def probes(self) -> dict[str, Any]:
        """Return the probes that gates can name."""
        found = await self._handle().probes()
        return {"probes": [dataclasses.asdict(probe) for probe in found.values()], "count": len(found)}


class RuleRoutes(_Routes):
    """Routes about rules, one method each."""

    async def register(self, request: Request) -> dict[str, Any]:
        """Register a rule: a gate that acts on requests which did not ask; an earlier one of the name is replaced.

        It acts from the next step on, on requests that run too.
        """
        handle = self._handle()
        with self._services.client_errors():
            document = await self._read(request, ("name", *RULE_FIELDS))
            name = name_in(document)
            fields = {key: document.get(key) for key in RULE_FIELDS}
            rule = await handle.register_rule(name, **fields, by=self._actor(request))
        return {"status": "ok", **dataclasses.asdict(rule)}

    async def unregister(self, request: Request) -> dict[str, Any]:
        """Forget a rule; it acts on nothing from the next step on."""
        handle = self._handle()
        with self._services.client_errors():
            name = await self._read_registered(request, handle.rules, "a rule", "rule")
            rule = await handle.unregister_rule(name, by=self._actor(request))
        return {"status": "ok", "name": rule.name}

    async def rules(self) -> dict[str, Any]:
        """Return the registered rules."""
        found = await self._handle().rules()
        return {"rules": [dataclasses.asdict(rule) for rule in found.values()], "count": len(found)}

    async def dynamic(self) -> dict[str, Any]:
        """Return probes, rules and gates, with the rows that they wrote so far."""
        return dataclasses.asdict(await self._handle().dynamic())


Tiers = dict[str, PhaseVectors | None]


class SteeringRoutes(_Routes):
    """Routes about global vectors, named modules and SAEs, one method each."""

    async def set(self, request: Request) -> dict[str, Any]:
        """Set global vectors, operations and features; requests that run are steered by them from the next step on.

        Vectors replace those at the same site of the same tier, and zeros take them back; operations replace all of
        the same tier, edits of features and reconstructions all of the same field, and an empty list takes them back.
        With `replace` everything else is removed.
        """
        handle = self._handle()
        services, known = self._services, (*DOCUMENT_FIELDS, "replace")
        with services.client_errors(), short_names(await read_steering(services, request, known)) as document:
            replace = read_flag(document.get("replace") or False, "replace")
            updates = await asyncio.to_thread(read_updates, document, handle.steerable)
            specs = await asyncio.to_thread(read_global_ops, document, handle.steerable)
            features = await asyncio.to_thread(read_global_features, document, handle.steerable)
            await handle.set(**updates, **operations_in(document), replace=replace, by=self._actor(request))
        op_sites = [site for spec in specs.values() for site in spec.op_sites]
        op_sites += await self._written_sites(features.values())
        return {
            "status": "ok",
            "hook_points": list(dict.fromkeys([*hook_points(document), *(site.hook.value for site in op_sites)])),
            "layers_updated": layers_of(updates.values(), op_sites),
        }

    async def clear(self, request: Request) -> dict[str, Any]:
        """Remove all global vectors; named modules stay. A body, if there is one, is an empty object."""
        services = self._services
        with services.client_errors():
            if await request.body():
                await read_steering(services, request, ())
        await self._handle().clear(by=self._actor(request))
        return {"status": "ok"}

    async def register(self, request: Request) -> dict[str, Any]:
        """Name vectors and operations, for `steering_name` and `steering_module_ref` of requests.

        An earlier module of the name is replaced.

        Requests that run already keep the content that the name had when they were made.
        """
        handle = self._handle()
        services, known = self._services, ("name", *DOCUMENT_FIELDS)
        with services.client_errors(), short_names(await read_steering(services, request, known)) as document:
            tiers = await asyncio.to_thread(read_tiers, document, handle.steerable)
            others = {**tiers, **operations_in(document)}
            vectors = others.pop("vectors")
            module = await handle.register(
                name_in(document), vectors, **cast("SteeringDocument", others), by=self._actor(request)
            )
            names = list(await handle.modules())
        return {"status": "ok", **dataclasses.asdict(module), "modules": names}

    async def unregister(self, request: Request) -> dict[str, Any]:
        """Forget a named module; requests that run already keep it."""
        handle = self._handle()
        with self._services.client_errors():
            name = await self._read_registered(request, handle.modules, "a module", "steering module")
            module = await handle.unregister(name, by=self._actor(request))
        return {"status": "ok", "name": module.name}

    async def status(self) -> dict[str, Any]:
        """Return global vectors, modules, and the vector slots in use."""
        return plain_status(await self._handle().status())

    async def layers(self) -> dict[str, Any]:
        """Return the sites that can be steered on this server."""
        handle = self._handle()
        about = handle.steerable
        return {
            "hook_points": handle.layers(),
            "op_hook_points": handle.op_layers(),
            "num_layers": about.num_layers,
            "hidden_size": about.hidden_size,
            "dtype": about.dtype,
            "max_vectors_per_request": about.max_vectors,
            "max_ops_per_site": about.max_ops_per_site,
        }

    async def modules(self) -> dict[str, Any]:
        """Return the names of the registered modules."""
        names = list(await self._handle().modules())
        return {"modules": names, "count": len(names)}

    async def saes(self, request: Request) -> dict[str, Any]:
        """Return the SAEs whose features requests can change.

        The folders of their files are for clients that may change what steers everybody.
        """
        saes = list((await self._handle().saes()).values())
        if not self._services.has_key(request):
            saes = [dataclasses.replace(sae, source=os.path.basename(sae.source)) for sae in saes]
        return {"saes": [dataclasses.asdict(sae) for sae in saes], "count": len(saes)}

    async def sae_features(self, name: str, request: Request) -> dict[str, Any]:
        """Return the features of an SAE whose labels have every word of `query`, the shortest labels first.

        Without a query every label fits. At most `limit` are returned, by default 50.
        """
        saes = await self._handle().saes()
        if name not in saes:
            raise HTTPException(404, f"unknown SAE {name!r}; registered: {', '.join(saes) or 'none'}")
        with self._services.client_errors():
            query, limit = search_in(request.query_params)
        try:
            labels = await asyncio.to_thread(labels_of, Path(saes[name].source))
            found = await asyncio.to_thread(labels.search, query, limit)
        except FeatureFileError as error:
            raise HTTPException(500, str(error)) from None
        features = [{"id": one, "label": label} for one, label in found]
        return {"sae": name, "num_labels": len(labels), "features": features, "count": len(features)}

    async def register_sae(self, request: Request) -> dict[str, Any]:
        """Register an SAE of the folder `--sae-root`, for `steering_features`; an earlier one of the name is replaced.

        Its files are read where they are: replace them by renaming others, never write into them.
        """
        handle = self._handle()
        with self._services.client_errors():
            document = await self._read(request, SaeDocument.__struct_fields__)
            path = within_root(document.get("path"), handle.sae_root)
            sae = await handle.register_sae(name_in(document), path, document.get("site"), by=self._actor(request))
        return {"status": "ok", **dataclasses.asdict(sae)}

    async def audit(self) -> dict[str, Any]:
        """Return the last changes of global vectors and modules, the newest last."""
        return {"entries": await self._handle().audit(), "size": SIZE}

    async def _written_sites(self, features: Iterable[PhaseFeatures]) -> list[Site]:
        """Return where edits of features and reconstructions write."""
        names = {edit.sae for each in features for edit in (*each.prefill, *each.decode)}
        saes = await self._handle().saes() if names else {}
        return [Site.parse(site) for name, sae in saes.items() if name in names for site in sae.write_sites]


MAX_FOUND = 1000
"""Features in one answer to a search, at most."""
_MAX_QUERY = 200


def search_in(params: Mapping[str, str]) -> tuple[str, int]:
    """Return the query and the limit of a search.

    Raises:
        RequestError: Naming the parameter that is wrong.
    """
    unknown = next((key for key in params if key not in ("query", "limit")), None)
    if unknown is not None:
        raise RequestError(unknown, "unknown parameter; known: query, limit")
    query, limit = params.get("query", ""), params.get("limit", "50")
    if len(query) > _MAX_QUERY:
        raise RequestError("query", f"expected at most {_MAX_QUERY} characters, got {len(query)}")
    if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit[:9]) <= MAX_FOUND:
        raise RequestError("limit", f"expected a whole number from 1 to {MAX_FOUND}, got {shown(limit)}")
    return query, int(limit[:9])


def within_root(path: object, root: str | None) -> str:
    """Return the real path of an SAE that a client names.

    Args:
        path: Absolute, or relative to `root`.
        root: The folder that may be read; None if there is none.

    Raises:
        RequestError: If the path leaves the folder, links followed.
    """
    if root is None:
        raise RequestError("path", "this server registers no SAEs at run time; the operator starts it with --sae-root")
    if not isinstance(path, str) or not path or "\0" in path:
        raise RequestError("path", f"expected the path of an SAE below --sae-root, got {shown(path)}")
    top = os.path.realpath(root)
    found = os.path.realpath(os.path.join(top, path))
    if os.path.commonpath([top, found]) != top:
        raise RequestError("path", "lies outside of the server's --sae-root")
    return found


def read_tiers(document: Mapping[str, Any], steerable: Steerable) -> Tiers:
    """Read the vectors in a body, by field; long lists take a while.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    return {field: read_tier(document.get(field), steerable, field) for field in MODULE_FIELDS}


def read_updates(document: Mapping[str, Any], steerable: Steerable) -> dict[str, TierUpdate | None]:
    """Read the global vectors in a body, by field; long lists take a while.

    Raises:
        RequestError: Naming the field that is wrong.
    """
    return {field: read_update(document.get(field), steerable, field) for field in MODULE_FIELDS}


def operations_in(document: Mapping[str, Any]) -> SteeringDocument:
    """Return the fields of a body beside its vectors; they are read beside the event loop, where they are lowered."""
    return cast("SteeringDocument", {name: document.get(name) for name in DOCUMENT_FIELDS[len(MODULE_FIELDS) :]})


def hook_points(document: Mapping[str, Any]) -> list[str]:
    """Return the hook points of the vectors in a body that was read, by their own names, in the order of the body."""
    given = (hook for field in MODULE_FIELDS for hook in document.get(field) or ())
    return list(dict.fromkeys(parse_hook(hook, MODULE_FIELDS[0]).value for hook in given))


def layers_of(updates: Iterable[TierUpdate | None], op_sites: Iterable[Site] = ()) -> list[int]:
    """Return the layers where something was set, or vectors were taken back; the final norm has none."""
    sites = {*op_sites, *(site for update in updates if update is not None for site in update.sites)}
    return sorted({site.layer for site in sites if site.hook is not HookPoint.FINAL_NORM})


def plain_status(status: SteeringStatus) -> dict[str, Any]:
    """Return a status as JSON values."""
    return {
        "global": dataclasses.asdict(status.shared),
        "modules": {name: dataclasses.asdict(module) for name, module in status.modules.items()},
        "slots": [dataclasses.asdict(slots) for slots in status.slots],
        "is_consistent": status.is_consistent,
    }


def open_routes(services: RouteServices) -> APIRouter:
    """Return the router of ``/v1/steering``."""
    steering, probes, rules = SteeringRoutes(services), ProbeRoutes(services), RuleRoutes(services)
    router = APIRouter(prefix="/v1/steering", tags=["steering"])
    keyed, admin = [Depends(services.require_key)], [Depends(services.require_admin)]
    for method, path, answer, about, needed in (
        ("POST", "/set", steering.set, openapi.SET, keyed),
        ("POST", "/clear", steering.clear, openapi.CLEAR, keyed),
        ("POST", "/modules/register", steering.register, openapi.REGISTER, keyed),
        ("POST", "/modules/unregister", steering.unregister, openapi.UNREGISTER, keyed),
        ("GET", "", steering.status, openapi.STATUS, []),
        ("GET", "/layers", steering.layers, openapi.LAYERS, []),
        ("GET", "/modules", steering.modules, openapi.MODULES, []),
        ("GET", "/saes", steering.saes, openapi.SAES, []),
        ("GET", "/saes/{name}/features", steering.sae_features, openapi.SAE_FEATURES, []),
        ("GET", "/audit", steering.audit, openapi.AUDIT, admin),
        ("POST", "/saes/register", steering.register_sae, openapi.REGISTER_SAE, admin),
        ("POST", "/probes/register", probes.register, openapi.REGISTER_PROBE, keyed),
        ("POST", "/probes/unregister", probes.unregister, openapi.UNREGISTER_PROBE, keyed),
        ("GET", "/probes", probes.probes, openapi.PROBES, []),
        ("POST", "/rules/register", rules.register, openapi.REGISTER_RULE, keyed),
        ("POST", "/rules/unregister", rules.unregister, openapi.UNREGISTER_RULE, keyed),
        ("GET", "/rules", rules.rules, openapi.RULES, keyed),
        ("GET", "/dynamic", rules.dynamic, openapi.DYNAMIC, keyed),
    ):
        router.add_api_route(path, answer, methods=[method], dependencies=needed, response_model=None, **about)
    return router
