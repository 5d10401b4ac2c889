"""The routes of consumers: their states, what they make of a prompt, and what they have stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from headgate.capture.engine.client_errors import answer_refused, as_client_error, refused_error
from headgate.capture.engine.requests.capture_frontend import FRONT_END
from headgate.capture.engine.server.capture_routes import open_routes
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import OverloadedError, RequestError
from headgate.capture.schema.registry import load_configured
from headgate.capture.schema.results import CaptureResult
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.moments import MomentsConsumer
from tests.fakes.capturing import capturing
from tests.fakes.clients import show
from tests.fakes.heads import Letters, runs_loop

KEYS = {
    "mine": AccessKey(name="mine", sha256=digest_of("mine"), roles=("capture",), tags=("mine",)),
    "other": AccessKey(name="other", sha256=digest_of("other"), roles=("capture",), consumers=("logging",)),
}


class ThreadLetters(Letters):
    """Refuses to work on an event loop."""

    max_text = 100

    def encode(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        assert not runs_loop()
        return super().encode(text, is_prompt=is_prompt)

    def shown(self, token: int) -> str:
        assert not runs_loop()
        return super().shown(token)


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


def configured(root: Path) -> tuple[CaptureConsumerSpec, ...]:
    return (
        CaptureConsumerSpec(name="logging"),
        CaptureConsumerSpec(name="lens"),
        CaptureConsumerSpec(name="attention"),
        CaptureConsumerSpec(name="probe", params={"probes": {"anger": str(root / "anger.safetensors")}}),
        CaptureConsumerSpec(name="moments", instance_name="spread", params={"root": str(root)}),
    )


async def read_prompt(prompt: Any, instance: str, spec: Any) -> CaptureResult:
    if spec.get("top") == 0:
        raise RequestError(f"capture.{instance}.top", "is 0")
    if spec.get("top") == 1:
        raise OverloadedError("too many wait")
    return CaptureResult(status="ok", payload={"prompt": list(prompt), "name": instance, "spec": spec})


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    with serving(configured(root)) as client:
        yield client


@contextmanager
def serving(consumers: tuple[CaptureConsumerSpec, ...]) -> Iterator[TestClient]:
    """The routes of a server with these consumers."""
    config = CaptureConsumersConfig(consumers=consumers)
    classes = {spec.instance: load_configured(spec) for spec in config.consumers}
    front = SimpleNamespace(config=config, model=EXAMPLE_MODEL, consumers=classes)

    async def require_key(request: Request) -> None:
        key = KEYS.get(request.headers.get("x-headgate-key", ""))
        show(*[] if key is None else [key])

    async def answer_wrong(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"param": getattr(error, "parameter", None)}, 400)

    async def read_object(request: Request) -> Any:
        return await request.json()

    async def vocabulary() -> Letters:
        return ThreadLetters(30)

    services: Any = SimpleNamespace(
        require_key=require_key,
        read_object=read_object,
        vocabulary=vocabulary,
        read_prompt=read_prompt,
        client_errors=as_client_error,
        engine=lambda: SimpleNamespace(
            input_processor=SimpleNamespace(**{FRONT_END: front}),
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64)),
        ),
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


@pytest.mark.parametrize(("prompt", "tokens"), [("bcd", [1, 2, 3]), ([7, 8], [7, 8])])
def test_a_prompt_is_read_without_an_answer(client: TestClient, prompt: Any, tokens: list[int]) -> None:
    answer = client.post("/v1/capture/lens", json={"prompt": prompt, "top": 5})

    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["payload"] == {"prompt": tokens, "name": "lens", "spec": {"positions": "all_prompt", "top": 5}}
    assert (found["status"], found["prompt_token_ids"]) == ("ok", tokens)
    assert found["tokens"] == [Letters(30).shown(token) for token in tokens]
    chosen = client.post("/v1/capture/lens", json={"prompt": prompt, "positions": [0]}).json()
    assert chosen["payload"]["spec"] == {"positions": [0]}


def test_a_prompt_is_read_by_a_consumer_without_the_field_positions(client: TestClient) -> None:
    answer = client.post("/v1/capture/attention", json={"prompt": [1, 2], "layers": [3]})

    assert answer.json()["payload"]["spec"] == {"layers": [3]}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [30]}, 400, "prompt"),
        ({"prompt": "b" * 101}, 400, "prompt"),
        ({"prompt": "b", "top": 0}, 400, "capture.lens.top"),
        ({"prompt": "b", "top": 1}, 503, None),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_read_is_refused(client: TestClient, body: Any, status: int, param: str) -> None:
    answer = client.post("/v1/capture/lens", json=body)

    assert (answer.status_code, answer.json().get("param")) == (status, param)


def test_the_list_of_consumers_is_no_state(client: TestClient) -> None:
    assert client.get("/v1/capture/consumers").json()["count"] == 5


def test_the_schema_has_every_location_and_overload_policy(client: TestClient) -> None:
    document = client.get("/openapi.json").json()

    answer = document["paths"]["/v1/capture/consumers"]["get"]["responses"]["200"]["content"]["application/json"]
    fields = answer["schema"]["properties"]["consumers"]["items"]["properties"]
    assert fields["location"]["enum"] == ["worker", "engine", "driver"]
    assert fields["overload"]["enum"] == ["block", "drop", "spill"]


def test_a_damaged_state_is_an_error_that_names_the_file(client: TestClient, root: Path) -> None:
    (root / "moments-0.safetensors").write_bytes(b"nonsense")

    answer = client.get("/v1/capture/spread")

    assert answer.status_code == 500
    assert "moments-0.safetensors" in answer.text


def test_names_that_requests_may_choose_from_are_listed_and_parameters_are_not(client: TestClient) -> None:
    answer = client.get("/v1/capture/consumers", headers={"x-headgate-key": "mine"})

    offers = {each["name"]: each["offers"] for each in answer.json()["consumers"]}
    assert offers == {
        "logging": {},
        "lens": {"lens": ["logit"]},
        "attention": {},
        "probe": {"probes": ["anger"]},
        "spread": {},
    }
    assert "safetensors" not in answer.text


def test_a_stored_capture_has_the_texts_of_its_tokens(tmp_path: Path) -> None:
    with capturing(tmp_path) as files:
        request = files.request({"request_id": "day"})
        files.feed.whole(request)

    with serving((CaptureConsumerSpec(name="filesystem", params={"root": str(tmp_path)}),)) as client:
        answer = client.get("/v1/capture/filesystem/captures/default/day.safetensors")

    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["token_ids"][: len(request.info.prompt_token_ids)] == [*request.info.prompt_token_ids]
    assert found["positions"] == [*range(len(found["token_ids"]))]
    assert found["tokens"] == [Letters(30).shown(token) for token in found["token_ids"]]
