"""The routes of probes on vLLM's own application, over two engine cores; no engine runs."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.client import Client
from headgate.steering.core import probes as core_probes
from headgate.steering.core.probes import ProbeRegistry
from headgate.steering.documents.probes import probe_document
from headgate.steering.probes import HiddenLayer, Probe, save
from tests.frontend.test_app import VECTOR, Server, conforms, starter

pytestmark = pytest.mark.engine

PROBES, REGISTER = "/v1/steering/probes", "/v1/steering/probes/register"
UNREGISTER, AUDIT = "/v1/steering/probes/unregister", "/v1/steering/audit"
SITE = Site.parse("2.post_mlp")
ANGER = {"name": "anger", "at": "2.post_mlp", "weight": VECTOR}
HIDDEN = {"weight": [VECTOR], "bias": [0.0], "activation": "gelu"}
ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    start = starter(monkeypatch)
    return lambda *flags, **section: start(*flags, section={"op_sites": {"post_mlp": [2]}, **section})


def found(server: Server, name: str) -> list[Probe]:
    """The probe of a name in each engine core."""
    cores = server.engine.engine_core.cores.values()
    return [core.state.probes.find(name) for core in cores]


def test_a_probe_is_registered_in_every_engine_core_replaced_and_forgotten(started: Callable[..., Server]) -> None:
    server = started()

    answer = server.post(REGISTER, **ANGER, bias=0.5, threshold=1.5)

    assert answer.status_code == 200, answer.text
    listed = server.get(PROBES).json()
    assert answer.json() == {"status": "ok", **listed["probes"][0]}
    assert (listed["count"], listed["probes"][0]["threshold"], listed["probes"][0]["kind"]) == (1, 1.5, "linear")
    kept = found(server, "anger")
    for probe in kept:
        np.testing.assert_allclose(probe.scores(ROWS)[:, 0], ROWS.astype(float) @ np.array(VECTOR) + 0.5)
    assert server.post(REGISTER, **ANGER, kind="cosine").json()["kind"] == "cosine"
    assert found(server, "anger")[0] is not kept[0]
    assert server.get("/v1/steering").json()["is_consistent"]
    assert server.post(UNREGISTER, name="anger").json() == {"status": "ok", "name": "anger"}
    assert found(server, "anger") == [None, None]
    lines = server.get(AUDIT).json()["entries"]
    assert [line["action"] for line in lines] == ["register_probe", "register_probe", "unregister_probe"]
    assert lines[0]["prefill"] == kept[0].sha256
    missing = server.post(UNREGISTER, name="anger")
    assert (missing.status_code, missing.json()["error"]["message"]) == (
        404,
        "name: unknown probe 'anger'; registered: none",
    )


@pytest.mark.parametrize(
    "weight",
    [
        ROWS.tolist(),
        {"dtype": "float32", "shape": [3, 8], "data": base64.b64encode(ROWS.tobytes()).decode()},
        [{"dtype": "float32", "shape": [8], "data": base64.b64encode(row.tobytes()).decode()} for row in ROWS],
    ],
    ids=["lists", "packed", "packed rows"],
)
def test_rows_come_in_every_form(started: Callable[..., Server], weight: Any) -> None:
    server = started()

    answer = server.post(
        REGISTER, name="x", at="2.post_mlp", weight=weight, bias=[1, 2, 3], classes=["a", "b", "c"], kind=None
    )

    assert answer.status_code == 200, answer.text
    assert answer.json()["classes"] == ["a", "b", "c"]
    np.testing.assert_array_equal(found(server, "x")[1].weight, ROWS)


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"at": "2.post_mlp", "weight": VECTOR}, "name", "is missing"),
    "a name of a number": ({**ANGER, "name": 3}, "name", "expected a probe's name"),
    "no site": ({"name": "x", "weight": VECTOR}, "at", "is missing"),
    "no such site": ({**ANGER, "at": "2.nowhere"}, "at", "not a site"),
    "a site that is not declared": ({**ANGER, "at": "1.post_mlp"}, "at", "--steering-op-sites"),
    "no weight": ({"name": "x", "at": "2.post_mlp"}, "weight", "is missing"),
    "a short row": ({**ANGER, "weight": [1.0, 2.0]}, "weight", "expected 8 numbers"),
    "a short row of two": ({**ANGER, "weight": [VECTOR, [1.0]]}, "weight[1]", "expected 8 numbers"),
    "text in a row": ({**ANGER, "weight": [*VECTOR[:7], "x"]}, "weight", "value 7 is not a number"),
    "zeros": ({**ANGER, "weight": [0.0] * 8}, "weight", "reads nothing"),
    "too many rows": ({**ANGER, "weight": [VECTOR] * 257}, "weight", "at most 256"),
    "a packed row of another size": (
        {**ANGER, "weight": {"dtype": "float32", "shape": [1, 4], "data": ""}},
        "weight.shape",
        "expected [classes, 8]",
    ),
    "packed data that is cut off": (
        {**ANGER, "weight": {"dtype": "float32", "shape": [1, 8], "data": "AAAA"}},
        "weight.data",
        "expected 32 bytes",
    ),
    "packed NaN": (
        {
            **ANGER,
            "weight": {
                "dtype": "float32",
                "shape": [1, 8],
                "data": base64.b64encode(np.full(8, np.nan, np.float32).tobytes()).decode(),
            },
        },
        "weight",
        "not finite",
    ),
    "two biases": ({**ANGER, "bias": [1.0, 2.0]}, "bias", "expected 1 numbers"),
    "a bias of text": ({**ANGER, "bias": "x"}, "bias", "expected a finite number"),
    "a bias of a cosine": ({**ANGER, "bias": 1.0, "kind": "cosine"}, "bias", "a cosine probe has none"),
    "another kind": ({**ANGER, "kind": "tree"}, "kind", "linear, cosine, mlp"),
    "a kind of a list": ({**ANGER, "kind": []}, "kind", "linear, cosine, mlp"),
    "an mlp without a layer": ({**ANGER, "kind": "mlp"}, "hidden", "a probe of the kind mlp has one"),
    "a layer of others": ({**ANGER, "weight": [1.0], "hidden": HIDDEN}, "hidden", "of the kind linear has none"),
    "a larger mlp than fits": (
        {**ANGER, "weight": [1.0], "kind": "mlp", "hidden": HIDDEN},
        "hidden.weight",
        "is for 0",
    ),
    "half a layer": ({**ANGER, "kind": "mlp", "hidden": {"bias": [0.0]}}, "hidden", "weight, bias, activation"),
    "a narrow layer": (
        {**ANGER, "weight": [1.0], "kind": "mlp", "hidden": {**HIDDEN, "weight": [[1.0]]}},
        "hidden.weight[0]",
        "expected",
    ),
    "another function": (
        {**ANGER, "weight": [1.0], "kind": "mlp", "hidden": {**HIDDEN, "activation": "tanh"}},
        "hidden.activation",
        "relu, gelu, silu",
    ),
    "a threshold of true": ({**ANGER, "threshold": True}, "threshold", "expected a finite number"),
    "a threshold of two classes": ({**ANGER, "weight": [VECTOR] * 2, "threshold": 1}, "threshold", "2 classes"),
    "one name for two": ({**ANGER, "weight": [VECTOR] * 2, "classes": ["a"]}, "classes", "expected 2 names"),
    "one name twice": ({**ANGER, "weight": [VECTOR] * 2, "classes": ["a", "a"]}, "classes", "of its own"),
    "names that are no list": ({**ANGER, "classes": "a"}, "classes", "expected a list"),
    "a name of two lines": ({**ANGER, "classes": ["a\nb"]}, "classes", "printable"),
    "another pooling": ({**ANGER, "pooling": "max"}, "pooling", "prompt_mean"),
    "a model of a number": ({**ANGER, "model": 3}, "model", "printable name"),
    "an unknown field": ({**ANGER, "metadata": {}}, "metadata", "no field of this route"),
}


@pytest.mark.parametrize(("body", "field", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_body_is_a_400_that_names_its_field(
    started: Callable[..., Server], body: dict[str, Any], field: str, message: str
) -> None:
    server = started()

    answer = server.post(REGISTER, **body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert message in answer.json()["error"]["message"]
    assert server.get(PROBES).json()["count"] == 0


def test_the_answers_are_as_described(started: Callable[..., Server]) -> None:
    server = started()
    described = server.get("/openapi.json").json()["paths"]

    for path, body in {REGISTER: ANGER, PROBES: None, UNREGISTER: {"name": "anger"}}.items():
        method = "get" if body is None else "post"
        content = described[path][method]["responses"]["200"]["content"]["application/json"]
        answer = server.ask(method.upper(), path, body)
        assert answer.status_code == 200, answer.text
        for value in (answer.json(), content["example"]):
            conforms(value, content["schema"], path)


@pytest.mark.parametrize("before", [False, True], ids=["new", "registered before"])
def test_what_one_engine_core_refuses_is_taken_back_in_the_other(
    started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    server = started()
    if before:
        server.post(REGISTER, **ANGER)
    listed, put, puts = server.get(PROBES).json(), ProbeRegistry.put, []

    def failing(registry: ProbeRegistry, name: str, probe: Probe) -> None:
        puts.append(name)
        if len(puts) == 2:
            raise RequestError("weight", "no room")
        put(registry, name, probe)

    monkeypatch.setattr(ProbeRegistry, "put", failing)
    answer = server.post(REGISTER, **{**ANGER, "bias": 3.0})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight")
    assert server.get(PROBES).json() == listed
    assert server.get("/v1/steering").json()["is_consistent"]


def test_too_many_weights_are_refused(started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_probes, "MAX_BYTES", 2 * 32)
    server = started()

    statuses = [server.post(REGISTER, **{**ANGER, "name": name}).status_code for name in ("a", "b", "a", "c")]

    assert statuses == [200, 200, 200, 400]
    assert [probe["name"] for probe in server.get(PROBES).json()["probes"]] == ["a", "b"]


def test_a_probe_is_its_own_clients_to_change(started: Callable[..., Server], tmp_path: Path) -> None:
    roles = {"key-of-alice-0123456": "steer", "key-of-bob-0123456789": "steer", "key-of-nobody-012345": "capture"}
    keys = [{"name": key, "sha256": digest_of(key), "roles": [role]} for key, role in roles.items()]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    server = started("--headgate-keys", str(path))
    alice, bob, nobody = ({"X-Headgate-Key": key} for key in roles)

    def ask(who: dict[str, str], where: str, body: dict[str, Any]) -> int:
        return server.ask("POST", where, body, **who).status_code

    assert [ask(who, REGISTER, ANGER) for who in ({}, nobody, alice, bob)] == [403, 403, 200, 403]
    module = {"name": "anger", "vectors": {"post_mlp": {"2": VECTOR}}}
    assert ask(bob, "/v1/steering/modules/register", module) == 200, "a module of that name is another thing"
    assert [ask(who, UNREGISTER, {"name": "anger"}) for who in (bob, alice)] == [403, 200]
    assert ask(bob, REGISTER, ANGER) == 200


def test_probes_of_the_configuration_declare_their_sites(started: Callable[..., Server], tmp_path: Path) -> None:
    save(tmp_path / "p.safetensors", Probe(site=Site.parse("1.mlp_out"), weight=[VECTOR], metadata={"auroc": "0.9"}))

    server = started(probes={"p": str(tmp_path / "p.safetensors")})

    (listed,) = server.get(PROBES).json()["probes"]
    assert (listed["name"], listed["at"], listed["metadata"]) == ("p", "1.mlp_out", {"auroc": "0.9"})
    assert server.get("/v1/steering/layers").json()["op_hook_points"] == {"mlp_out": [1], "post_mlp": [2]}


WIDE = HiddenLayer(weight=np.ones((2, 9)), bias=np.zeros(2), activation="relu")  # type: ignore[arg-type]
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "a layer that is not there": ({"site": Site.parse("4.post_mlp"), "weight": [VECTOR]}, "the model has 4 layers"),
    "another width": ({"site": SITE, "weight": [[1.0, 2.0]]}, "expected rows of 8 values, as at"),
    "a wide mlp": ({"site": SITE, "kind": "mlp", "weight": [[1.0, 2.0]], "hidden": WIDE}, "expected rows of 8 values"),
}


@pytest.mark.parametrize(("fields", "message"), UNFIT.values(), ids=UNFIT.keys())
def test_a_probe_that_does_not_fit_keeps_the_server_from_starting(
    started: Callable[..., Server], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "p.safetensors"
    save(path, Probe(**fields))

    with pytest.raises(ConfigError, match=rf"probes\.p \(--probes\): .*{message}"):
        started(probes={"p": str(path)})


def test_an_mlp_of_the_configuration_makes_room_for_those_that_are_registered_later(
    started: Callable[..., Server], tmp_path: Path
) -> None:
    layer = HiddenLayer(weight=ROWS[:2], bias=np.array([0.5, -0.5]), activation="silu")  # type: ignore[arg-type]
    probe = Probe(site=SITE, kind="mlp", weight=[[1.0, -2.0]], hidden=layer)  # type: ignore[arg-type]
    save(tmp_path / "p.safetensors", probe)
    server = started(probes={"p": str(tmp_path / "p.safetensors")})

    body = {"name": "q", **probe_document(probe), "weight": [1.0, -2.0]}
    body["hidden"] = {**body["hidden"], "weight": ROWS[:2].tolist()}
    answer = server.post(REGISTER, **body)

    assert answer.status_code == 200, answer.text
    assert (answer.json()["kind"], answer.json()["hidden_size"]) == ("mlp", 8)
    assert found(server, "q")[0].sha256 == found(server, "p")[0].sha256 == probe.sha256
    body["hidden"]["weight"], body["hidden"]["bias"], body["weight"] = ROWS.tolist(), [0.0] * 3, [1.0] * 3
    refused = server.post(REGISTER, **body)
    assert refused.status_code == 400
    assert "has 3 units; room is for 3, with one more for each probe" in refused.text


@pytest.mark.parametrize("is_binary", [False, True], ids=["json", "msgpack"])
def test_the_client_sends_files_and_arrays(started: Callable[..., Server], tmp_path: Path, is_binary: bool) -> None:
    server = started()
    client = Client("http://127.0.0.1", is_binary=is_binary, transport=httpx.MockTransport(server.handle))
    probe = Probe(site=SITE, weight=ROWS[:2], bias=[1, 2], classes=("a", "b"), pooling="last_prompt", model="m")
    save(tmp_path / "p.safetensors", probe)
    single = {"at": "2.post_mlp", "weight": ROWS[0].astype(np.float64), "bias": np.array([2.0]), "threshold": 0.5}

    with client:
        for name, source in (("file", tmp_path / "p.safetensors"), ("probe", probe), ("fields", single)):
            assert client.register_probe(name, source).name == name

        assert [status.name for status in client.probes()] == ["fields", "file", "probe"]
        assert [found(server, name)[0].sha256 for name in ("file", "probe")] == [probe.sha256] * 2
        np.testing.assert_array_equal(found(server, "fields")[0].weight, ROWS[:1])
        client.unregister_probe("file")
        assert [status.name for status in client.probes()] == ["fields", "probe"]
