"""Headgate's routes on the real server, over a worker without a model: shapes, errors, keys, what VLLM_PLUGINS does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fakes.routes_server import (
    COMMAND,
    FLAGS,
    ONE,
    PLUGINS,
    REGISTER,
    SET,
    UNREGISTER,
    VECTOR,
    complete,
    get,
    post,
)
from tests.fakes.server import Server, serving
from tests.fakes.steering_forms import HIDDEN, LAYERS, ROW, packed

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    with serving([*COMMAND, str(model_dir), *FLAGS], **PLUGINS) as running:
        yield running


@pytest.fixture(autouse=True)
def left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is left set or registered, and no slot stays reserved."""
    yield
    if "server" not in request.fixturenames:
        return
    server = request.getfixturevalue("server")
    assert server.post("/v1/steering/clear").status_code == 200
    for name in get(server, "/v1/steering/modules").json()["modules"]:
        assert server.post("/v1/steering/modules/unregister", name=name).status_code == 200
    assert [slots["reserved"] for slots in get(server, "/v1/steering").json()["slots"]] == [0]


SEED = {
    "vectors": {"post_mlp": {"14": VECTOR, "20": {"vector": VECTOR, "scale": 2.0}}},
    "prefill_vectors": {"pre_attn": {"14": VECTOR}},
    "decode_vectors": {"post_attn": {"14": VECTOR}},
    "replace": False,
}


def test_global_vectors_are_set_as_the_article_has_it(server: Server) -> None:
    answer = server.post("/v1/steering/set", **SEED)

    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "ok", "hook_points": ["post_mlp", "pre_attn", "post_attn"], "layers_updated": [14, 20]},
    )
    shared = get(server, "/v1/steering").json()["global"]
    assert shared["tiers"] == {
        "base": ["14.post_mlp", "20.post_mlp"],
        "prefill": ["14.pre_attn"],
        "decode": ["14.post_attn"],
    }
    assert shared["prefill"]["sites"] == ["14.pre_attn", "14.post_mlp", "20.post_mlp"]
    assert shared["decode"]["sites"] == ["14.post_attn", "14.post_mlp", "20.post_mlp"]


def test_replace_takes_everything_else_away_and_clear_all(server: Server) -> None:
    server.post("/v1/steering/set", **SEED)
    added = server.post("/v1/steering/set", vectors={"post_mlp": {"3": VECTOR}})
    assert added.json()["layers_updated"] == [3]
    assert get(server, "/v1/steering").json()["global"]["tiers"]["base"] == ["3.post_mlp", "14.post_mlp", "20.post_mlp"]

    server.post("/v1/steering/set", vectors={"post_block": {"5": VECTOR}}, replace=True)
    assert get(server, "/v1/steering").json()["global"]["tiers"] == {"base": ["5.post_mlp"]}

    refused = server.post("/v1/steering/clear", name="strong")
    assert refused.status_code == 400
    assert "name: is no field of this route; it has none" in refused.json()["error"]["message"]
    assert post(server, "/v1/steering/clear", b"5", "application/json").status_code == 400
    assert get(server, "/v1/steering").json()["global"]["tiers"] == {"base": ["5.post_mlp"]}

    for body, kind in ((b"", None), (b"{}", "application/json")):
        assert post(server, "/v1/steering/clear", body, kind).json() == {"status": "ok"}
    assert get(server, "/v1/steering").json()["global"]["tiers"] == {}


def test_zeros_take_sites_back_and_hyphens_are_read(server: Server) -> None:
    server.post("/v1/steering/set", **SEED)

    answer = server.post(
        "/v1/steering/set",
        vectors={"post-mlp": {"14": [0.0] * HIDDEN, "3": VECTOR}},
        prefill_vectors={"pre-attn": {"14": {"vector": VECTOR, "scale": 0}}},
    )

    assert answer.json() == {"status": "ok", "hook_points": ["post_mlp", "pre_attn"], "layers_updated": [3, 14]}
    assert get(server, "/v1/steering").json()["global"]["tiers"] == {
        "base": ["3.post_mlp", "20.post_mlp"],
        "decode": ["14.post_attn"],
    }


def test_all_forms_are_the_same_vectors(server: Server) -> None:
    rows = np.stack([ROW])
    binary = {"dtype": "float32", "shape": [1, HIDDEN], "layer_indices": [14], "data": rows.tobytes()}
    text = "application/json; charset=utf-8"
    bodies = (
        (msgspec.json.encode({"vectors": ONE, "replace": True}), "application/json"),
        (msgspec.json.encode({"vectors": {"post_block": packed([14])}, "replace": True}), text),
        (msgspec.msgpack.encode({"vectors": {"post_mlp": binary}, "replace": True}), "application/msgpack"),
        (msgspec.msgpack.encode({"vectors": {"post_mlp": {14: VECTOR}}, "replace": True}), "application/x-msgpack"),
    )
    hashes = []
    for content, kind in bodies:
        answer = post(server, "/v1/steering/set", content, kind)
        assert answer.json() == {"status": "ok", "hook_points": ["post_mlp"], "layers_updated": [14]}
        hashes.append(get(server, "/v1/steering").json()["global"]["prefill"]["hash"])

    assert len(set(hashes)) == 1


def test_modules_are_registered_used_listed_and_forgotten(server: Server) -> None:
    answers = [
        server.post("/v1/steering/modules/register", name=name, vectors=ONE, decode_vectors=None)
        for name in ("safety", "creativity")
    ]

    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "ok")] * 2
    assert answers[0].json()["name"] == "safety"
    assert [answer.json()["modules"] for answer in answers] == [["safety"], ["creativity", "safety"]]
    assert answers[0].json()["prefill"]["sites"] == ["14.post_mlp"]
    assert get(server, "/v1/steering/modules").json() == {"modules": ["creativity", "safety"], "count": 2}
    assert set(get(server, "/v1/steering").json()["modules"]) == {"creativity", "safety"}
    assert complete(server, steering_name="safety").status_code == 200

    gone = server.post("/v1/steering/modules/unregister", name="safety")

    assert gone.json() == {"status": "ok", "name": "safety"}
    assert get(server, "/v1/steering/modules").json() == {"modules": ["creativity"], "count": 1}
    refused = complete(server, steering_name="safety")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "steering_name")


def test_layers_say_what_can_be_steered(server: Server) -> None:
    everywhere = list(range(LAYERS))

    assert get(server, "/v1/steering/layers").json() == {
        "hook_points": {"pre_attn": everywhere, "post_attn": everywhere, "post_mlp": everywhere},
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": "bfloat16",
        "max_vectors_per_request": 149,
        "op_hook_points": {},
        "max_ops_per_site": 8,
    }


def test_consumers_are_listed_without_their_parameters(server: Server) -> None:
    answer = get(server, "/v1/capture/consumers")

    assert answer.json()["count"] == 2
    assert answer.json()["consumers"][0] == {
        "name": "rows",
        "consumer": "rows",
        "location": "worker",
        "reads_client_spec": True,
        "overload": "block",
        "offers": {},
        "is_browsable": False,
    }
    assert answer.json()["sites"] == {"post_mlp": [3, 5]}
    assert "size" not in answer.text


def test_a_consumer_without_a_state_is_a_404(server: Server) -> None:
    for name in ("rows", "moments"):
        answer = get(server, f"/v1/capture/{name}")

        assert answer.status_code == 404
        assert "those that have one: none" in answer.json()["error"]["message"]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing to set": (SET, {}, "vectors"),
    "a module of zeros": (
        REGISTER,
        {"name": "a", "vectors": {"post_mlp": {"3": [0.0] * HIDDEN}}},
        "vectors.post_mlp.3",
    ),
    "packed rows and a list": (
        SET,
        {"vectors": {"post_mlp": {**packed([3]), "4": VECTOR}}},
        "vectors.post_mlp",
    ),
    "packed rows, and a list under another name": (
        SET,
        {"vectors": {"post_mlp": packed([3]), "post-mlp": {"3": VECTOR}}},
        "vectors.post-mlp.3",
    ),
    "an unknown key": (SET, {"vectors": ONE, "replce": True}, "replce"),
    "a replace that is no flag": (SET, {"vectors": ONE, "replace": "yes"}, "replace"),
    "a wrong width": (SET, {"vectors": {"post_mlp": {"3": [1.0]}}}, "vectors.post_mlp.3"),
    "an unknown hook": (SET, {"prefill_vectors": {"nowhere": {"3": VECTOR}}}, "prefill_vectors.nowhere"),
    "a layer too high": (SET, {"decode_vectors": {"post_mlp": {"30": VECTOR}}}, "decode_vectors.post_mlp"),
    "a site that is not configured": (SET, {"vectors": {"mlp_out": {"3": VECTOR}}}, "vectors.mlp_out.3"),
    "too large for the model": (SET, {"vectors": {"post_mlp": {"3": [3.4e38] * HIDDEN}}}, "vectors"),
    "a broken base64": (SET, {"vectors": {"post_mlp": packed([3], data="AA")}}, "vectors.post_mlp.data"),
    "no name": (REGISTER, {"vectors": ONE}, "name"),
    "a name that is none": (REGISTER, {"name": ["a"], "vectors": ONE}, "name"),
    "a name too long": (REGISTER, {"name": "a" * 257, "vectors": ONE}, "name"),
    "no vectors": (REGISTER, {"name": "a"}, "vectors"),
    "a path of the server's": (REGISTER, {"name": "a", "path": "/etc/passwd"}, "path"),
    "too many vectors": (
        REGISTER,
        {
            "name": "a",
            "prefill_vectors": {hook: packed(list(range(LAYERS))) for hook in ("pre_attn", "post_attn", "post_mlp")},
            "decode_vectors": {"post_mlp": {str(layer): VECTOR[::-1] for layer in range(LAYERS)}},
            "vectors": {"post_attn": {str(layer): VECTOR[::-1] for layer in range(LAYERS)}},
        },
        "vectors",
    ),
    "nobody": (UNREGISTER, {}, "name"),
}


@pytest.mark.parametrize(("path", "body", "field"), BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_a_400_that_names_its_field_and_changes_nothing(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    server.post(SET, **SEED)
    before = get(server, "/v1/steering").json()

    answer = server.post(path, **body)

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, 400)
    assert error["message"].startswith(field)
    assert get(server, "/v1/steering").json() == before


def test_a_module_that_is_not_there_is_a_404_in_vllms_shape(server: Server) -> None:
    answer = server.post(UNREGISTER, name="nobody")

    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error == {"message": error["message"], "type": "Not Found", "param": None, "code": 404}
    assert "unknown steering module 'nobody'; registered: none" in error["message"]


UNREADABLE = {
    "nothing": (b"", "application/json", 400),
    "no JSON": (b"{", "application/json", 400),
    "a list": (b"[1]", "application/json", 400),
    "NaN": (b'{"vectors": NaN}', "application/json", 400),
    "deep": (b"[" * 100_000, "application/json", 400),
    "no text": (b'{"a": "\xff"}', "application/json", 400),
    "no msgpack": (b"\xc1", "application/msgpack", 400),
    "keys that are no text": (b"\x81\x01\x01", "application/msgpack", 400),
    "curl's default": (b"{}", "application/x-www-form-urlencoded", 415),
    "no type": (b"{}", None, 415),
}


@pytest.mark.parametrize(("content", "kind", "status"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_body_that_cannot_be_read_is_refused(server: Server, content: bytes, kind: str | None, status: int) -> None:
    answer = post(server, SET, content, kind)

    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == status
    field = "vectors" if b"NaN" in content else "body"
    assert error["param"] == (field if status == 400 else None)


ROWS = "/v1/capture/{consumer}/captures/{tag}/{name}/rows"


def test_the_description_has_every_route_with_examples(server: Server) -> None:
    paths = get(server, "/openapi.json").json()["paths"]
    ours = {path: found for path, found in paths.items() if path.startswith(("/v1/steering", "/v1/capture"))}

    assert {(path, method) for path, found in ours.items() for method in found} == {
        ("/v1/steering", "get"),
        ("/v1/steering/layers", "get"),
        ("/v1/steering/audit", "get"),
        ("/v1/steering/modules", "get"),
        ("/v1/steering/set", "post"),
        ("/v1/steering/clear", "post"),
        ("/v1/steering/modules/register", "post"),
        ("/v1/steering/modules/unregister", "post"),
        ("/v1/steering/saes", "get"),
        ("/v1/steering/saes/register", "post"),
        ("/v1/steering/saes/{name}/features", "get"),
        ("/v1/steering/dynamic", "get"),
        ("/v1/steering/probes", "get"),
        ("/v1/steering/probes/register", "post"),
        ("/v1/steering/probes/unregister", "post"),
        ("/v1/steering/rules", "get"),
        ("/v1/steering/rules/register", "post"),
        ("/v1/steering/rules/unregister", "post"),
        ("/v1/capture/consumers", "get"),
        ("/v1/capture/{consumer}", "get"),
        ("/v1/capture/{consumer}", "post"),
        ("/v1/capture/{consumer}/captures", "get"),
        ("/v1/capture/{consumer}/captures/{tag}/{name}", "get"),
        (ROWS, "get"),
    }
    assert "application/octet-stream" in ours.pop(ROWS)["get"]["responses"]["200"]["content"]
    for found in ours.values():
        for operation in found.values():
            assert "example" in operation["responses"]["200"]["content"]["application/json"]
    for path in (SET, REGISTER, UNREGISTER):
        assert ours[path]["post"]["requestBody"]["content"]["application/json"]["examples"]


def test_a_hundred_changes_at_once_leave_one_of_them(server: Server) -> None:
    import concurrent.futures

    def change(number: int) -> tuple[int, str | None]:
        content = msgspec.json.encode({"vectors": {"post_mlp": {str(number % LAYERS): VECTOR}}, "replace": True})
        answers = [post(server, SET, content), complete(server)]
        return sum(answer.status_code for answer in answers), answers[0].text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert {status for status, _ in pool.map(change, range(100))} == {400}
    assert len(get(server, "/v1/steering").json()["global"]["tiers"]["base"]) == 1
