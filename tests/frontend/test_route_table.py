"""The table of routes against vLLM's application and the source of its routers; refusals in that very application."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headgate.capture.engine.requests.sampling_params import PREFIXES, is_ours
from headgate.capture.engine.server.bodies.field_guard import ROUTES, Kind
from tests.fakes.server import known_flags
from tests.frontend.test_app import Server, started  # noqa: F401  (a fixture)

pytestmark = pytest.mark.engine

TASKS = (
    "generate",
    "render",
    "transcription",
    "realtime",
    "embed",
    "classify",
    "score",
    "token_embed",
    "token_classify",
)
FLAGS = ("--enable-scale-out", "--enable-fault-tolerance", "--tokens-only", "--enable-tokenizer-info-endpoint")
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_COHERE_API": "1"}
DECORATORS = ("post", "put", "patch", "websocket", "api_route", "add_api_route", "add_route", "add_api_websocket_route")
FIELDS = {
    "steering_name": "calm",
    "steering_of_tomorrow": [{"feature": 1}],
    "sae_clamp_specs": [1],
    "capture": {"rows": {}},
    "return_hidden_states": "last",
}
OURS = ("/v1/steering/", "/v1/capture/", "/v1/patch_sweep")
WITHOUT_OUR_FIELDS = (Kind.REFUSED, Kind.PARAMETERS)


def vllm_folder() -> Path:
    import vllm

    return Path(vllm.__file__).parent


def routes_in_source() -> Iterator[str]:
    """Paths that vLLM's routers give to POST routes and websockets, whatever has to be set for them to be served."""
    for file in (vllm_folder() / "entrypoints").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            path = node.args[0]
            methods = next((ast.unparse(word.value) for word in node.keywords if word.arg == "methods"), "POST")
            if (
                node.func.attr in DECORATORS
                and isinstance(path, ast.Constant)
                and str(path.value).startswith("/")
                and re.search("POST|PUT|PATCH|sorted", methods)
            ):
                yield str(path.value)


def test_every_route_in_vllms_source_is_in_the_table() -> None:
    found = set(routes_in_source())

    assert {"/v1/completions", "/v1/realtime", "/inference/v1/generate", "/v1/audio/transcriptions"} <= found
    assert found - ROUTES.keys() == set()


def test_every_route_of_the_application_is_in_the_table(full: Server) -> None:
    found = {
        route.path
        for route in full.app.routes
        if {"POST", "PUT", "PATCH"} & set(getattr(route, "methods", None) or ()) or "WebSocket" in type(route).__name__
    }
    ours = {path for path in found if path.startswith(OURS)}

    assert {"/v1/completions", "/v1/realtime", "/inference/v1/generate", "/v1/audio/transcriptions"} <= found
    assert found - ours - ROUTES.keys() == set()


def test_no_field_of_vllms_own_begins_like_ours() -> None:
    """A body's fields that vLLM knows are never refused for their names."""
    own = set()
    for file in (vllm_folder() / "entrypoints").rglob("*protocol*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)

    assert "max_tokens" in own
    assert [name for name in own if is_ours(name)] == []
    assert all(is_ours(f"{prefix}_anything") for prefix in PREFIXES)


@pytest.fixture
def full(started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Server:  # noqa: F811
    """The application with every task and every switch that this vLLM has."""
    return build_full(started, monkeypatch, "headgate")


def build_full(start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, plugins: str | None) -> Server:
    from vllm.entrypoints.openai import api_server

    build = api_server.build_app
    monkeypatch.setattr(api_server, "build_app", lambda args, tasks: build(args, TASKS))
    server = start(*known_flags(*FLAGS), plugins=plugins, **SWITCHES)
    server.app.state.engine_client = SimpleNamespace(errored=False)
    return server


@pytest.mark.parametrize("plugins", ["headgate", None])
def test_a_field_is_refused_wherever_it_would_be_ignored(
    started: Callable[..., Server],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    plugins: str | None,
) -> None:
    server = build_full(started, monkeypatch, plugins)
    paths = [path for path, kind in ROUTES.items() if kind in WITHOUT_OUR_FIELDS and path != "/v1/realtime"]

    for path in [*paths, "/v1/of_a_later_vllm"]:
        for name, value in FIELDS.items():
            for body, field in (
                ({name: value}, name),
                ({"vllm_xargs": {name: value}}, f"vllm_xargs.{name}"),
                ({"sampling_params": {name: value}}, f"sampling_params.{name}"),
            ):
                assert_refused(server.post(path, model="m", **body), field, path)


def test_parameters_that_clients_write_hold_fields_in_one_place_alone(full: Server) -> None:
    def generate(params: dict[str, Any]) -> httpx.Response:
        return full.post("/inference/v1/generate", token_ids=[1], sampling_params=params)

    assert_refused(generate({"steering_name": "calm"}), "sampling_params.steering_name", "generate")
    # Within extra_args it reaches the handler, which this application does not have.
    assert "steering" not in generate({"extra_args": {"steering_name": "calm"}}).text


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_the_form_of_an_audio_route_is_looked_at(full: Server, path: str) -> None:
    """The handler's own check; what vLLM itself would do afterwards needs a model that hears."""
    handler = {"transcriptions": "transcription", "translations": "translation"}[path.rpartition("/")[2]]
    heard: list[Any] = []
    stand_in(full, handler, heard)
    file = ("a.wav", b"RIFF")

    for name in FIELDS:
        assert_refused(full.upload(path, file, **{name: "x"}), name, path)
        for value in ("x", 1):
            xargs = json.dumps({name: value})
            assert_refused(full.upload(path, file, vllm_xargs=xargs), f"vllm_xargs.{name}", path)
    assert heard == []
    full.upload(path, file, vllm_xargs=json.dumps({"other": 1}))
    assert heard == [b"RIFF"]


def stand_in(server: Server, handler: str, heard: list[Any]) -> None:
    """Put vLLM's own handler of an audio route in, as far as its way to the engine."""
    import importlib

    module = importlib.import_module(f"vllm.entrypoints.speech_to_text.{handler}.serving")
    name = {"transcription": "OpenAIServingTranscription", "translation": "OpenAIServingTranslation"}[handler]

    class Hearing(getattr(module, name)):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            pass

        async def _create_speech_to_text(self, audio_data: bytes, **kwargs: Any) -> Any:
            heard.append(audio_data)
            return self.create_error_response("nobody hears")

    setattr(server.app.state, f"openai_serving_{handler}", Hearing())


def assert_refused(response: httpx.Response, field: str, path: str) -> None:
    assert response.status_code == 400, f"{path}: {response.status_code} {response.text}"
    error = response.json().get("error") or response.json()
    assert error["message"].startswith(f"{field}: "), f"{path}: {response.text}"
    assert error.get("param", field) == field
