"""The OpenAI-compatible server that steers, over the model-free worker."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.files.vector_files import save
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.saes import TinySae
from tests.fakes.server import Server, serving
from tests.fakes.steering_forms import BAD, GOOD, HIDDEN, ROW, listed

pytestmark = pytest.mark.engine

MODULE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
FLAGS = [
    *("--served-model-name", "tiny", "--dtype", "bfloat16", "--load-format", "dummy", "--enforce-eager"),
    *("--worker-cls", "tests.fakes.noting_worker.NotingWorker", "--block-size", "32", "--max-model-len", "1024"),
    *("--distributed-executor-backend", "uni", "--max-num-seqs", "16"),
    *("--enable-steering", "--max-steering-configs", "1", "--steering-sites", '{"post_mlp": "all", "pre_attn": "all"}'),
]
PACKED = {"dtype": "float32", "shape": [HIDDEN], "data": base64.b64encode(ROW.astype("<f4").tobytes()).decode()}
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("modules") / "calm.safetensors"
    vectors = PhaseVectors.from_rows({Site(3, HookPoint.POST_MLP): ROW})
    assert vectors is not None
    save(path, vectors)
    sae = TinySae(architecture="jumprelu", width=HIDDEN).save(path.parent / "sae")
    saes = ["--saes", f"tiny={sae}@3.post_mlp", f"mapped={sae}@3.post_mlp", "--sae-encode", "tiny"]
    named = ["--steering-modules", f"calm={path}", *saes]
    with serving([*MODULE, str(model_dir), *FLAGS, *named]) as running:
        yield running


def complete(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/completions", **{"model": "tiny", "prompt": "The capital", "max_tokens": 3, **body})


def chat(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", **{"model": "tiny", "messages": CHAT, "max_tokens": 3, **body})


def respond(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/responses", **{"model": "tiny", "input": "Hi", "max_output_tokens": 16, **body})


ROUTES = pytest.mark.parametrize("send", [complete, chat, respond], ids=["completion", "chat", "response"])
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
@ROUTES
def test_steered_requests_are_served(server: Server, send: Any, stream: bool) -> None:
    for fields in (*GOOD.values(), {"steering_name": "calm"}, {"steering_module_ref": {"name": "calm", "scale": 2}}):
        response = send(server, stream=stream, **fields)
        assert response.status_code == 200, response.text
        assert "error" not in response.text.replace('"error":null', "")


@STREAM
@ROUTES
@pytest.mark.parametrize(("fields", "field"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_a_400_that_names_its_field(
    server: Server, send: Any, fields: Any, field: str, stream: bool
) -> None:
    response = send(server, stream=stream, **fields)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")


EDIT = {"sae": "tiny", "feature": 3, "set": 2.5}
CLAMP = {"feature_idx": 1, "kind": "absolute", "value": 2}
GOOD_FEATURES: list[dict[str, Any]] = [
    {"steering_features": [EDIT, {"sae": "tiny", "feature": 4, "nudge": -1, "only_if_active": True}]},
    {"prefill_steering_features": [EDIT], "decode_steering_features": [{**EDIT, "set": 1}]},
    {
        "sae_clamp_specs": [
            {
                "module_name": "tiny",
                "clamps": {"post_block": {"3": [{"feature_idx": 1, "kind": "absolute", "value": 2}]}},
            }
        ]
    },
    {"sae_reconstruction": ["tiny"]},
    {"prefill_sae_reconstruction": ["tiny"], "steering_features": [EDIT, {**EDIT, "sae": "mapped", "feature": 5}]},
    {"sae_full_reconstruction_specs": [{"module_name": "tiny", "clamps": {"post_mlp": {"3": [CLAMP]}}}]},
]
BAD_FEATURES: list[tuple[dict[str, Any], str]] = [
    ({"steering_features": [{**EDIT, "sae": "none"}]}, "steering_features[0].sae"),
    ({"steering_features": [{**EDIT, "feature": 12}]}, "steering_features[0].feature"),
    ({"decode_steering_features": [{**EDIT, "max": 1}]}, "decode_steering_features[0].max"),
    ({"steering_features": [EDIT, EDIT]}, "steering_features[1].feature"),
    ({"steering_features": [{**EDIT, "unit": "max_act"}]}, "steering_features[0].unit"),
    ({"steering_features": [{"sae": "tiny", "feature": i, "set": 1} for i in range(65)]}, "steering_features"),
    ({"sae_reconstruction": "tiny"}, "sae_reconstruction"),
    ({"decode_sae_reconstruction": ["none"]}, "decode_sae_reconstruction[0]"),
    ({"sae_reconstruction": ["mapped"]}, "sae_reconstruction[0]"),
    ({"sae_reconstruction": ["tiny", "tiny"]}, "sae_reconstruction"),
    ({"sae_reconstruction": ["tiny"], "decode_sae_reconstruction": ["tiny"]}, "decode_sae_reconstruction[0]"),
    ({"prefill_sae_features": [EDIT]}, "prefill_sae_features"),
]


@STREAM
@ROUTES
def test_requests_that_change_features_are_served(server: Server, send: Any, stream: bool) -> None:
    for fields in GOOD_FEATURES:
        response = send(server, stream=stream, **fields)
        assert response.status_code == 200, response.text
        assert "error" not in response.text.replace('"error":null', "")


@STREAM
@ROUTES
@pytest.mark.parametrize(("fields", "field"), BAD_FEATURES)
def test_bad_features_are_a_400_that_names_the_field(
    server: Server, send: Any, fields: Any, field: str, stream: bool
) -> None:
    response = send(server, stream=stream, **fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


ABLATE = {"at": "3.post_mlp", "method": "ablate", "vector": ROW.tolist()}
CAP = {"at": {"hook": "post-mlp", "layers": [3]}, "method": "clamp", "vector": "calm", "max": 3.1, "positions": [-1]}
BOUNDED = {"post_mlp": {"3": [{"vector": ROW.tolist(), "min": -0.5, "max": 1.25, "strength": 1.0}]}}
GOOD_OPERATIONS: list[dict[str, Any]] = [
    {"steering_ops": [ABLATE, CAP]},
    {"steering_ops": [{**ABLATE, "vector": PACKED}], "decode_steering_ops": [{**CAP, "preserve_norm": True}]},
    {"prefill_steering_ops": [ABLATE], "steering_clamps": BOUNDED},
    {"prefill_steering_clamps": BOUNDED, "decode_steering_clamps": BOUNDED},
]
BAD_OPERATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"steering_ops": [{**ABLATE, "at": "2.post_mlp"}]}, "steering_ops[0].at", "--steering-op-sites"),
    ({"steering_ops": [{**ABLATE, "tau": 1}]}, "steering_ops[0].tau", "ablate"),
    ({"decode_steering_ops": [{**CAP, "vector": "none"}]}, "decode_steering_ops[0].vector", "none"),
    ({"steering_ops": [ABLATE] * 9}, "steering_ops", "--max-steering-ops-per-site"),
    *(
        (
            {f"{phase}steering_ops": [{**ABLATE, "vector": vector, "positions": [-500]}]},
            f"{phase}steering_ops[0].positions",
            "position -500 lies before the prompt",
        )
        for phase in ("", "prefill_", "decode_")
        for vector in (ROW.tolist(), "calm")
    ),
    (
        {"steering_ops": [{**ABLATE, "positions": {"start": -500, "stop": -400}}]},
        "steering_ops[0].positions",
        "selects no position",
    ),
    ({"steering_clamps": {"post_mlp": {"2": BOUNDED["post_mlp"]["3"]}}}, "steering_clamps", "--steering-op-sites"),
]


@STREAM
@ROUTES
def test_requests_with_operations_are_served(server: Server, send: Any, stream: bool) -> None:
    for fields in GOOD_OPERATIONS:
        response = send(server, stream=stream, **fields)
        assert response.status_code == 200, response.text
        assert "error" not in response.text.replace('"error":null', "")


@STREAM
@ROUTES
@pytest.mark.parametrize(("fields", "field", "reason"), BAD_OPERATIONS)
def test_bad_operations_are_a_400_that_names_field_and_reason(
    server: Server, send: Any, fields: Any, field: str, reason: str, stream: bool
) -> None:
    response = send(server, stream=stream, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(field)
    assert reason in error["message"]


@pytest.mark.parametrize("send", [complete, chat], ids=["completion", "chat"])
def test_beam_search_is_a_400(server: Server, send: Any) -> None:
    response = send(server, use_beam_search=True, n=2, steering_name="calm")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "steering_name"


@ROUTES
@STREAM
@pytest.mark.parametrize("field", ["steering_gates", "steering"])
@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
def test_a_conversation_beside_its_gates_is_a_400(
    server: Server, send: Any, stream: bool, field: str, is_long: bool
) -> None:
    """Whatever the gates are. Of long bodies they are taken out before the server reads."""
    gates = [{"when": "always", "then": "observe", "scope": "rest_of_conversation", "name": "g" * 100000 * is_long}]

    answer = send(server, stream=stream, conversation_id="ticket", **{field: gates})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "conversation_id"


@ROUTES
def test_a_conversation_without_gates_is_somebody_else_s(server: Server, send: Any) -> None:
    assert send(server, conversation_id="ticket").status_code == 200


def test_capture_is_not_configured_here(server: Server) -> None:
    response = complete(server, capture={"rows": {}}, steering_vectors={"post_mlp": {3: listed(ROW)}})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "capture"


def test_a_wire_dict_cannot_be_brought_along(server: Server) -> None:
    response = complete(server, vllm_xargs={"headgate": "x"})

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "extra_args.headgate"


@pytest.mark.parametrize("name", ["steering_vectors", "steering_name", "capture"])
def test_the_anthropic_route_refuses_what_it_would_ignore(server: Server, name: str) -> None:
    value = {"steering_vectors": {"post_mlp": {"3": listed(ROW)}}, "steering_name": "calm", "capture": {"memory": {}}}[
        name
    ]
    body = {"model": "tiny", "messages": CHAT, "max_tokens": 3}

    refused = server.post("/v1/messages", **body, **{name: value})

    assert refused.status_code == 400, refused.text
    assert name in refused.text
    assert server.post("/v1/messages", **body).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("steering_name", "calm"), ("capture", {"memory": {}})])
def test_scoring_refuses_what_it_would_ignore(server: Server, name: str, value: Any) -> None:
    body = {"model": "tiny", "query": [5, 6, 7], "items": [[8], [9]], "label_token_ids": [3, 4]}

    refused = server.post("/generative_scoring", **body, **{name: value})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert "/v1/completions" in refused.json()["error"]["message"]
    assert "/v1/completions" not in server.post("/generative_scoring", **body).text
