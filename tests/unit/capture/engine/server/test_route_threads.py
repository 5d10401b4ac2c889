"""Where the bodies of steering's routes are read: beside the event loop, whatever has to be done with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fastapi import FastAPI

from headgate.capture.engine.client_errors import as_client_error
from headgate.capture.engine.contracts.core_calls import AsyncCoreClient
from headgate.capture.engine.contracts.parts import RouteClient
from headgate.capture.engine.server import plugin_routes
from headgate.capture.engine.server.bodies.middleware import LONG_BODY, install_bodies
from headgate.capture.engine.server.plugin_routes import read_object
from headgate.capture.schema.config import ServerConfig
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import SteeringConfig
from headgate.steering.control import handle, routes
from headgate.steering.control.handle import AsyncSteering
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.documents import request
from headgate.steering.vectors import phase_vectors
from headgate.steering.vectors.phase_vectors import Steerable

LAYERS, HIDDEN = 8, 4096
SITES = tuple(Site(layer, HookPoint.POST_MLP) for layer in range(LAYERS))
STEERABLE = Steerable(num_layers=LAYERS, hidden_size=HIDDEN, dtype="float32", sites=SITES, max_vectors=2 * LAYERS)
ROWS = np.random.default_rng(0).normal(size=(LAYERS, HIDDEN)).astype(np.float32)
LISTS = {"post_mlp": {str(layer): row.tolist() for layer, row in enumerate(ROWS)}}
HEAD = {"dtype": "float32", "shape": [LAYERS, HIDDEN], "layer_indices": list(range(LAYERS))}
FORMS = {
    "application/json": msgspec.json.encode({"vectors": LISTS}),
    "application/msgpack": msgspec.msgpack.encode({"vectors": {"post_mlp": {**HEAD, "data": ROWS.tobytes()}}}),
}


class Client:
    """One engine core, without workers."""

    core_engines = (b"0",)

    def __init__(self) -> None:
        services = SimpleNamespace(
            call_workers=lambda method, args: [],
            prepare_change=lambda field: None,
            rekey_running=lambda: {},
            restart_running=lambda: None,
            fail=lambda reason: None,
        )
        self.part = SteeringCore("float32", 64, services, SteeringConfig())

    async def _call_utility_async(self, name: str, part: str, method: str, args: Any, *, engine: bytes) -> Any:
        return {"ok": self.part.call(method, args)}


def application(client: Client) -> Any:
    handle = AsyncSteering(AsyncCoreClient(client, "steering"), STEERABLE)

    async def allowed() -> None:
        return None

    services = SimpleNamespace(
        engine=lambda: None,
        handle=lambda: handle,
        require_key=allowed,
        require_admin=allowed,
        has_key=lambda request: True,
        client=lambda request: RouteClient(None, None, False),
        read_object=read_object,
        client_errors=as_client_error,
    )
    app = FastAPI()
    app.include_router(routes.open_routes(services))
    install_bodies(app, ServerConfig())
    return app


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[threading.Thread]]:
    """The threads on which everything that depends on the length of a body is done."""
    found: dict[str, set[threading.Thread]] = {}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.setdefault(name, set()).add(threading.current_thread())
            return original(*args, **kwargs)

        return noted

    for kind, (short, long) in plugin_routes._DECODERS.items():
        monkeypatch.setitem(plugin_routes._DECODERS, kind, (noting("short", short), noting("decode", long)))
    for module, name in ((routes, "read_tier"), (routes, "read_update"), (handle, "read_update")):
        monkeypatch.setattr(module, name, noting("read", getattr(module, name)))
    monkeypatch.setattr(request, "read_tier", noting("read", request.read_tier))
    for module in (handle, request):
        monkeypatch.setattr(module, "sum_tiers", noting("add up", module.sum_tiers))
    monkeypatch.setattr(phase_vectors, "content_key", noting("hash", phase_vectors.content_key))
    monkeypatch.setattr(handle, "to_wire", noting("pack", handle.to_wire))
    return found


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("path", ["/v1/steering/set", "/v1/steering/modules/register"])
def test_a_long_body_is_read_beside_the_event_loop(
    path: str, kind: str, threads: dict[str, set[threading.Thread]]
) -> None:
    client = Client()
    named = path.endswith("register")
    content = FORMS[kind]
    if named:  # the name goes in front
        content = (b'{"name":"calm",' + content[1:]) if kind.endswith("json") else b"\x82\xa4name\xa4calm" + content[1:]

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=application(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            return await http.post(path, content=content, headers={"Content-Type": kind})

    response = asyncio.run(post())

    assert response.status_code == 200, response.text
    assert len(content) > LONG_BODY
    assert set(threads) == {"decode", "read", "add up", "hash", "pack"}
    assert all(threading.main_thread() not in found for found in threads.values()), threads
    status = client.part.call("status", {})
    sites = status["modules"][0]["sites"] if named else status["global"]["sites"]
    assert sites["prefill"] == [site.name for site in SITES]
