"""vLLM's own server application with our plugin in it, over engine cores that are steering's alone: no engine runs.

What needs no tokens is tested here, also with two engine cores, since it takes no time; `test_routes` has the rest.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from headgate.capture.engine import plugin
from headgate.capture.engine.contracts.core_part import CoreFacts
from headgate.capture.engine.contracts.parts import request_parts
from headgate.capture.engine.frontends import lazy_capture
from headgate.capture.engine.requests.request_reader import REQUEST_READER, OpenPart, RequestReader
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ForbiddenError, RequestError
from headgate.steering.core.steering_core import open_core

pytestmark = pytest.mark.engine

MODEL = ModelInfo(name="tiny", num_layers=4, hidden_size=8, dtype="bfloat16", sites=())
VECTOR = [0.5, -1.0, 2.0, 0.0, 0.0, 1.0, 0.25, 3.0]
ONE = {"post_mlp": {"2": VECTOR}}
SET, CLEAR = "/v1/steering/set", "/v1/steering/clear"
REGISTER, UNREGISTER = "/v1/steering/modules/register", "/v1/steering/modules/unregister"
API = {"Authorization": "Bearer a"}


class Services:
    """Workers that do what they are told; one can be told to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""

    def call_workers(self, method: str, args: Any) -> list[Any]:
        self.calls.append(method)
        if method == self.failing:
            self.failing = ""
            raise RequestError("vectors", "this engine core has no room")
        return [True if method == "is_in_one_stage" else None]

    def prepare_change(self, field: str) -> None:
        pass

    def rekey_running(self) -> dict[str, int]:
        return {}

    def restart_running(self) -> None:
        self.calls.append("restart")

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


class Client:
    """An engine client with two engine cores."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.core_engines = (b"0", b"1")
        self.services = {core: Services() for core in self.core_engines}
        self.cores = {
            core: open_core(CoreFacts(model=MODEL, engine=index), section, self.services[core])
            for index, core in enumerate(self.core_engines)
        }

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        if method == "collective_rpc":
            return [{"steering": {"slots_live": 1, "slots_used": 2, "modules": 0, "reconstructions": {}}}]
        part, name, given = msgspec.msgpack.decode(msgspec.msgpack.encode(args))
        assert (method, part) == ("headgate_call", "steering")
        try:
            return {"ok": msgspec.msgpack.decode(msgspec.msgpack.encode(self.cores[engine].call(name, given)))}
        except (RequestError, ForbiddenError) as error:
            message = str(error).removeprefix(f"{error.field}: ")
            is_forbidden = isinstance(error, ForbiddenError)
            return {"error": {"field": error.field, "message": message, "is_forbidden": is_forbidden}}


class Engine:
    """As far as the plugin looks at an `AsyncLLM`."""

    def __init__(self, section: dict[str, Any] | None) -> None:
        part = request_parts()["steering"]
        self.engine_core = Client(section or {})
        opened = {} if section is None else {"steering": OpenPart("steering", part, part.open(section, MODEL))}
        self.input_processor = SimpleNamespace(**{REQUEST_READER: RequestReader(None, opened)})
        ours = {} if section is None else {"headgate": {"steering": section}}
        self.vllm_config = Namespace(additional_config=ours, parallel_config=Namespace(_api_process_rank=0))


lazy_capture.add_async_handles(Engine)


class Server:
    """The application with one engine; each call runs a loop of its own."""

    def __init__(self, app: Any, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self._request(method, path, json=body, headers=headers)

    def upload(self, path: str, file: tuple[str, bytes], **fields: str) -> httpx.Response:
        return self._request("POST", path, data=fields, files={"file": file})

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, **content)

        return asyncio.run(ask())

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Answer as the server does: for an ``httpx.MockTransport``."""
        path = request.url.raw_path.decode()
        answer = self._request(request.method, path, content=request.content, headers=request.headers)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("GET", path, **headers)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.ask("POST", path, body)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    return starter(monkeypatch)


def starter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    def start(
        *flags: str,
        is_steering: bool = True,
        plugins: str | None = "headgate",
        audit_file: str | None = None,
        section: dict[str, Any] | None = None,
        **environment: str,
    ) -> Server:
        for name, value in {**environment, **({"VLLM_PLUGINS": plugins} if plugins else {})}.items():
            monkeypatch.setenv(name, value)
        plugin.register()
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.entrypoints.openai.api_server import build_app
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--host", "127.0.0.1", *flags])
        app = build_app(args, ("generate",))
        engine = Engine({"audit_file": audit_file, **(section or {})} if is_steering else None)
        for found in app.state.endpoint_plugins:
            asyncio.run(found.init_state(engine, app.state, args))
        return Server(app, engine)

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return start


def restarts(server: Server) -> list[int]:
    return [services.calls.count("restart") for services in server.engine.engine_core.services.values()]


def test_a_change_reaches_every_engine_core(started: Callable[..., Server]) -> None:
    server = started()

    assert server.post(SET, vectors=ONE).json()["status"] == "ok"
    assert server.post(REGISTER, name="calm", vectors=ONE).status_code == 200

    assert restarts(server) == [1, 1]
    status = server.get("/v1/steering").json()
    assert status["is_consistent"]
    assert [slots["reserved"] for slots in status["slots"]] == [2, 2]
    assert server.post(CLEAR).json() == {"status": "ok"}
    assert server.post(UNREGISTER, name="calm").status_code == 200
    assert [slots["reserved"] for slots in server.get("/v1/steering").json()["slots"]] == [0, 0]


@pytest.mark.parametrize(("path", "method"), [(SET, "set_global"), (REGISTER, "keep_module")])
def test_what_one_engine_core_refuses_is_taken_back_in_the_other(
    started: Callable[..., Server], path: str, method: str
) -> None:
    server = started()
    server.post(SET, vectors={"pre_attn": {"1": VECTOR}})
    server.post(REGISTER, name="calm", vectors={"pre_attn": {"1": VECTOR}})
    before = server.get("/v1/steering").json()
    server.engine.engine_core.services[b"1"].failing = method

    named = {"name": "calm"} if path == REGISTER else {}
    answer = server.post(path, vectors=ONE, **named)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vectors")
    after = server.get("/v1/steering").json()
    assert after["is_consistent"]
    assert after["global"]["tiers"] == before["global"]["tiers"]
    assert after["modules"]["calm"]["prefill"] == before["modules"]["calm"]["prefill"]


def test_the_answers_are_as_described(started: Callable[..., Server]) -> None:
    """Every answer has the keys that the OpenAPI description requires, and its example too."""
    server = started()
    described = server.get("/openapi.json").json()["paths"]
    server.post(SET, vectors=ONE)
    bodies = {
        SET: {"vectors": ONE},
        CLEAR: {},
        REGISTER: {"name": "calm", "vectors": ONE},
        UNREGISTER: {"name": "calm"},
    }
    for path in ("/v1/steering", "/v1/steering/layers", "/v1/steering/modules", *bodies):
        method = "post" if path in bodies else "get"
        content = described[path][method]["responses"]["200"]["content"]["application/json"]
        answer = server.ask(method.upper(), path, bodies.get(path))
        assert answer.status_code == 200, answer.text
        for value in (answer.json(), content["example"]):
            conforms(value, content["schema"], path)
    for path, body in bodies.items():
        for example in (described[path]["post"].get("requestBody") or {}).get("content", {}).values():
            conforms(body, example["schema"], path)


def conforms(value: Any, schema: dict[str, Any], where: str) -> None:
    """A small reading of JSON Schema: types, properties, items, alternatives."""
    if "anyOf" in schema:
        assert any(_conforms(value, option, where) for option in schema["anyOf"]), f"{where}: {value}"
        return
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert isinstance(value, tuple(kinds[kind] for kind in named)), f"{where}: {value} is no {named}"  # type: ignore[arg-type]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        assert set(schema.get("required", ())) <= set(value), f"{where}: {value} lacks a key"
        for key, inner in value.items():
            assert key in known or others is not False, f"{where}: unknown key {key}"
            found = known.get(key, others)
            if isinstance(found, dict):
                conforms(inner, found, f"{where}.{key}")
    elif isinstance(value, list):
        for inner in value:
            conforms(inner, schema["items"], f"{where}[]")


def _conforms(value: Any, schema: dict[str, Any], where: str) -> bool:
    try:
        conforms(value, schema, where)
    except AssertionError:
        return False
    return True


def test_the_log_says_what_there_is_room_for(
    started: Callable[..., Server], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("headgate"), "handlers", [logging.NullHandler()])
    caplog.set_level("INFO", "headgate")

    started("--host", "0.0.0.0", HEADGATE_CAPTURE_KEYS="a,b")

    assert "steering: room for 8191 vectors at a time, 0 of them taken by named modules: none" in caplog.messages
    assert "headgate: /v1/steering is served; closed, HEADGATE_STEERING_KEYS is not set" in caplog.messages
    assert "headgate: /v1/capture is served; 2 keys" in caplog.messages


def test_without_steering_its_routes_say_how_to_start_it(started: Callable[..., Server]) -> None:
    server = started(is_steering=False)

    for answer in (server.get("/v1/steering"), server.post(SET, vectors=ONE), server.post(CLEAR)):
        assert answer.status_code == 404
        assert "--enable-steering" in answer.json()["error"]["message"]
    assert server.get("/v1/capture/consumers").status_code == 404
    assert "headgate_" not in server.get("/metrics").text


def test_without_vllm_plugins_nothing_is_added_but_the_reason(started: Callable[..., Server]) -> None:
    server = started(plugins=None)

    for path in ("/v1/steering", "/v1/steering/modules", "/v1/capture/consumers"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)
        assert "VLLM_PLUGINS=headgate" in answer.json()["error"]["message"]
    assert "/v1/steering" not in server.get("/openapi.json").json()["paths"]
    other = server.get("/v1/steeringwheel")
    assert (other.status_code, "VLLM_PLUGINS" in other.text) == (404, False)
    assert server.get("/version").status_code == 200
    assert "headgate_" not in server.get("/metrics").text


def test_another_plugin_alone_does_not_let_ours_in(started: Callable[..., Server]) -> None:
    assert "VLLM_PLUGINS=headgate" in started(plugins="other").get("/v1/steering").text


@pytest.mark.parametrize(
    ("flags", "keys", "given", "status"),
    [
        ((), {}, {}, 200),
        (("--host", "0.0.0.0"), {}, {}, 403),
        (("--host", "0.0.0.0"), {"HEADGATE_CAPTURE_KEYS": "k"}, {"X-Headgate-Key": "k"}, 403),
        (("--host", "0.0.0.0"), {"HEADGATE_STEERING_KEYS": "k,l"}, {"X-Headgate-Key": "l"}, 200),
        (("--host", "0.0.0.0"), {"HEADGATE_STEERING_KEYS": "k,l"}, {"Authorization": "Bearer k"}, 200),
        (("--uds", "/tmp/x.sock"), {}, {}, 200),
        ((), {"HEADGATE_STEERING_KEYS": "k"}, {}, 403),
        ((), {"HEADGATE_STEERING_KEYS": "k"}, {"X-Headgate-Key": "m"}, 403),
        (("--api-key", "a"), {}, {}, 401),
        (("--api-key", "a"), {}, {"X-Headgate-Key": "a"}, 401),
        (("--api-key", "a"), {}, API, 200),
        (("--api-key", "a"), {"HEADGATE_STEERING_KEYS": "k"}, API, 403),
        (("--api-key", "a"), {"HEADGATE_STEERING_KEYS": "k"}, {**API, "X-Headgate-Key": "k"}, 200),
    ],
)  # fmt: skip
def test_who_may_change_anything(
    started: Callable[..., Server], flags: tuple[str, ...], keys: dict[str, str], given: dict[str, str], status: int
) -> None:
    server = started(*flags, **keys)
    reading = 401 if status == 401 else 200

    for path, body in ((SET, {"vectors": ONE}), (CLEAR, {}), (REGISTER, {"name": "a", "vectors": ONE})):
        assert server.ask("POST", path, body, **given).status_code == status
    assert server.ask("POST", UNREGISTER, {"name": "a"}, **given).status_code == status
    for path in ("/v1/steering", "/v1/steering/layers", "/v1/steering/modules"):
        assert server.get(path, **given).status_code == reading


def test_the_page_of_metrics_has_ours_and_the_servers(started: Callable[..., Server]) -> None:
    server = started("--api-key", "a")
    server.ask("POST", SET, {"vectors": ONE}, Authorization="Bearer a")

    answer = server.get("/metrics")

    assert 'headgate_steering_slots_reserved{engine="1"} 1.0' in answer.text
    assert 'headgate_steering_global_vectors{engine="0"} 2.0' in answer.text
    assert "http_request" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


def test_an_error_of_the_engine_is_told(started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = started()

    async def dead(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(server.engine.engine_core, "_call_utility_async", dead)

    answer = server.get("/v1/steering")

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
