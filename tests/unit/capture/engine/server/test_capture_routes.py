"""The route of a consumer's state: who may read it, and what of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.testclient import TestClient
from vllm.exceptions import VLLMValidationError

from headgate.capture.engine.access.access_key import AccessKey, digest_of
from headgate.capture.engine.requests.capture_frontend import FRONT_END
from headgate.capture.engine.server.capture_routes import open_routes
from headgate.capture.engine.setup.client_errors import answer_refused, as_client_error, refused_error
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.moments import MomentsConsumer
from tests.fakes.clients import show


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Moments of two requests, one under each of two tags."""
    params = {"root": str(tmp_path), "tags": ["mine"]}
    feed = Feed(MomentsConsumer(params, ConsumerContext(instance_name="moments", model=EXAMPLE_MODEL)))
    for tag in ("default", "mine"):
        context = SpecContext(instance_name="moments", model=EXAMPLE_MODEL, params=params, client_request_id=tag)
        raw = {"hooks": {"post_mlp": [1], "final_norm": "all"}, "positions": "all_prompt", "tag": tag}
        feed.whole(ExampleRequest(MomentsConsumer.validate_client_spec(raw, context), tag))
    feed.consumer.close(TIMEOUT_S)
    return tmp_path


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    consumers = (
        CaptureConsumerSpec(name="logging"),
        CaptureConsumerSpec(name="moments", instance_name="spread", params={"root": str(root)}),
    )
    front = SimpleNamespace(config=CaptureConsumersConfig(consumers=consumers), model=EXAMPLE_MODEL)
    keys = {
        "mine": AccessKey(name="mine", sha256=digest_of("mine"), roles=("capture",), tags=("mine",)),
        "other": AccessKey(name="other", sha256=digest_of("other"), roles=("capture",), consumers=("logging",)),
    }

    async def require_key(request: Request) -> None:
        key = keys.get(request.headers.get("x-headgate-key", ""))
        show(*[] if key is None else [key])

    async def answer_wrong(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"param": getattr(error, "parameter", None)}, 400)

    services: Any = SimpleNamespace(
        require_key=require_key,
        client_errors=as_client_error,
        engine=lambda: SimpleNamespace(input_processor=SimpleNamespace(**{FRONT_END: front})),
    )
    app = FastAPI()
    app.include_router(open_routes(services))
    app.add_exception_handler(refused_error(), answer_refused)
    app.add_exception_handler(VLLMValidationError, answer_wrong)
    with TestClient(app) as client:
        yield client


def tags(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 200, answer.text
    return [(entry["tag"], entry["site"]) for entry in answer.json()["entries"]]


def test_a_client_is_told_what_its_key_allows(client: TestClient) -> None:
    everything = [(tag, site) for tag in ("default", "mine") for site in ("1.post_mlp", "final_norm")]

    assert tags(client.get("/v1/capture/spread")) == everything
    assert tags(client.get("/v1/capture/spread", params={"site": "final_norm"})) == everything[1::2]
    assert tags(client.get("/v1/capture/spread", headers={"X-Headgate-Key": "mine"})) == everything[2:]
    refused = client.get("/v1/capture/spread", headers={"X-Headgate-Key": "other"})
    assert refused.status_code == 403
    assert "it may use logging" in refused.text


def test_wrong_fields_of_the_query_are_named(client: TestClient) -> None:
    answer = client.get("/v1/capture/spread", params={"phase": "late"})

    assert (answer.status_code, answer.json()) == (400, {"param": "phase"})


@pytest.mark.parametrize("name", ["logging", "moments", "nobody"])
def test_others_have_no_state(client: TestClient, name: str) -> None:
    answer = client.get(f"/v1/capture/{name}")

    assert answer.status_code == 404
    assert "those that have one: spread" in answer.text


def test_the_list_of_consumers_is_no_state(client: TestClient) -> None:
    assert client.get("/v1/capture/consumers").json()["count"] == 2


def test_a_damaged_state_is_an_error_that_names_the_file(client: TestClient, root: Path) -> None:
    (root / "moments-0.safetensors").write_bytes(b"nonsense")

    answer = client.get("/v1/capture/spread")

    assert answer.status_code == 500
    assert "moments-0.safetensors" in answer.text
