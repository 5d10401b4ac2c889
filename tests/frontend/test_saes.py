"""The routes of SAEs on vLLM's own application, over two engine cores; no engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.schema.errors import RequestError
from headgate.steering.core import operator_calls
from headgate.steering.features.labels import labels_path, write_labels
from headgate.steering.features.tensors import FeatureFileError
from tests.fakes.saes import TinySae
from tests.fakes.transcoders import TinyTranscoder
from tests.frontend.test_app import Server, conforms, starter

pytestmark = pytest.mark.engine

WIDTH = 8
SAES, REGISTER, MODULE = "/v1/steering/saes", "/v1/steering/saes/register", "/v1/steering/modules/register"
SET = "/v1/steering/set"
EDIT = {"sae": "a", "feature": 3, "set": 2.5}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of SAEs with one SAE, ``b``; another one, ``a``, lies beside it."""
    TinySae(width=WIDTH).save(tmp_path / "a")
    TinySae(architecture="gated", width=WIDTH).save(tmp_path / "root" / "b")
    return tmp_path / "root"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, root: Path) -> Callable[..., Server]:
    start = starter(monkeypatch)

    def with_saes(*flags: str, **section: Any) -> Server:
        saes = {"a": f"{root.parent / 'a'}@2.post_mlp"}
        return start(*flags, section={"saes": saes, "sae_root": str(root), **section})

    return with_saes


def test_an_sae_is_registered_in_every_engine_core(started: Callable[..., Server]) -> None:
    server = started()

    answer = server.post(REGISTER, name="b", path="b", site="2.post_mlp")

    assert answer.status_code == 200, answer.text
    listed = server.get(SAES).json()
    assert [(sae["name"], sae["activation"]) for sae in listed["saes"]] == [("a", "relu"), ("b", "gated")]
    assert answer.json() == {"status": "ok", **listed["saes"][1]}
    assert server.get("/v1/steering").json()["is_consistent"]
    (entry,) = server.get("/v1/steering/audit").json()["entries"]
    assert (entry["action"], entry["name"]) == ("register_sae", "b")
    assert all(len(core.call("saes", {})) == 2 for core in server.engine.engine_core.cores.values())


@pytest.mark.parametrize("before", [False, True], ids=["new", "registered before"])
def test_what_one_engine_core_refuses_is_taken_back_in_the_other(
    started: Callable[..., Server], root: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    server = started()
    if before:
        TinySae(width=WIDTH, seed=9).save(root / "earlier")
        server.post(REGISTER, name="b", path="earlier", site="2.post_mlp")
    listed, opened, calls = server.get(SAES).json(), operator_calls.open_sae, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise FeatureFileError("the disk is gone")
        return opened(*args)

    monkeypatch.setattr(operator_calls, "open_sae", failing)
    answer = server.post(REGISTER, name="b", path="b", site="2.post_mlp")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert server.get(SAES).json() == listed
    assert server.get("/v1/steering").json()["is_consistent"]


def test_a_transcoder_is_registered_with_the_sites_that_it_writes(started: Callable[..., Server], root: Path) -> None:
    TinyTranscoder(layer=1, num_layers=2, width=WIDTH).save(root / "t")
    server = started(op_sites={"mlp_in": [1], "mlp_out": [1, 2]})

    answer = server.post(REGISTER, name="t", path="t/W_enc_1.safetensors")

    assert answer.status_code == 200, answer.text
    assert answer.json()["site"] == "1.mlp_in"
    assert answer.json()["write_sites"] == ["1.mlp_out", "2.mlp_out"]
    assert server.get(SAES).json()["saes"][1]["write_sites"] == ["1.mlp_out", "2.mlp_out"]


def test_a_transcoder_whose_sites_are_not_declared_is_a_400(started: Callable[..., Server], root: Path) -> None:
    TinyTranscoder(layer=1, num_layers=2, width=WIDTH).save(root / "t")

    answer = started(op_sites={"mlp_in": [1], "mlp_out": [1]}).post(REGISTER, name="t", path="t/W_enc_1.safetensors")

    assert answer.status_code == 400, answer.text
    assert "no operations at 2.mlp_out" in answer.json()["error"]["message"]


def test_the_answers_are_as_described(started: Callable[..., Server]) -> None:
    server = started()
    described = server.get("/openapi.json").json()["paths"]
    bodies = {REGISTER: {"name": "b", "path": "b", "site": "2.post_mlp"}, SAES: None}

    for path, body in bodies.items():
        method = "get" if body is None else "post"
        content = described[path][method]["responses"]["200"]["content"]["application/json"]
        answer = server.ask(method.upper(), path, body)
        assert answer.status_code == 200, answer.text
        for value in (answer.json(), content["example"]):
            conforms(value, content["schema"], path)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"name": "b"}, "path", "expected the path"),
        ({"name": "b", "path": 5}, "path", "expected the path"),
        ({"path": "b"}, "name", "is missing"),
        ({"name": "", "path": "b", "site": "2.post_mlp"}, "name", "name"),
        ({"name": "b", "path": "../a", "site": "2.post_mlp"}, "path", "outside of the server's --sae-root"),
        ({"name": "b", "path": "/etc", "site": "2.post_mlp"}, "path", "outside of the server's --sae-root"),
        ({"name": "b", "path": "link", "site": "2.post_mlp"}, "path", "outside of the server's --sae-root"),
        ({"name": "b", "path": "c", "site": "2.post_mlp"}, "path", "no such file"),
        ({"name": "b", "path": "b", "site": "post_mlp"}, "site", "not a site"),
        ({"name": "b", "path": "b", "site": "1.post_mlp"}, "path", "--steering-op-sites"),
        ({"name": "b", "path": "b"}, "path", "has no site"),
        ({"name": "b", "path": "b", "scale": 2}, "scale", "no field of this route"),
    ],
)
def test_bad_input_is_a_400_that_names_its_field(
    started: Callable[..., Server], root: Path, body: dict[str, Any], field: str, message: str
) -> None:
    server = started()
    (root / "link").symlink_to(root.parent / "a")

    answer = server.post(REGISTER, **body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert message in answer.json()["error"]["message"]
    assert server.get(SAES).json()["count"] == 1


def test_without_a_root_nothing_is_registered_over_http(started: Callable[..., Server]) -> None:
    answer = started(sae_root=None).post(REGISTER, name="b", path="b", site="2.post_mlp")

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert "--sae-root" in answer.json()["error"]["message"]


def test_administrators_alone_register(started: Callable[..., Server], tmp_path: Path) -> None:
    roles = {"steering-key-of-alice-00": ["steer"], "admin-key-of-the-owner-0": ["admin"]}
    keys = [{"name": f"k{at}", "sha256": digest_of(key), "roles": role} for at, (key, role) in enumerate(roles.items())]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    server = started("--headgate-keys", str(path))
    body = {"name": "b", "path": "b", "site": "2.post_mlp"}

    statuses = [server.ask("POST", REGISTER, body, **{"X-Headgate-Key": key}).status_code for key in ("", *roles)]

    assert statuses == [403, 403, 200]
    assert server.get(SAES).json()["count"] == 2


def test_modules_may_hold_features_and_reconstructions(started: Callable[..., Server]) -> None:
    server = started(sae_encode=["a"])

    edits = {"features": [EDIT], "decode_features": [{**EDIT, "feature": 4}]}
    good = server.post(MODULE, name="m", **edits, decode_sae_reconstruction=["a"])
    other = server.post(MODULE, name="n", sae_reconstruction=["b"])
    bad = server.post(MODULE, name="n", features=[{**EDIT, "feature": 12}])
    assert good.status_code == 200, good.text
    assert good.json()["decode"]["op_sites"] == ["2.post_mlp"]
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "features[0].feature")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "sae_reconstruction[0]")
    assert [sae["is_encoded"] for sae in server.get(SAES).json()["saes"]] == [True]


def test_features_and_reconstructions_act_on_everybody(started: Callable[..., Server]) -> None:
    server = started(sae_encode=["a"])

    done = server.post(SET, steering_features=[EDIT], decode_sae_reconstruction=["a"])
    shared = server.get("/v1/steering").json()["global"]
    wrong = server.post(SET, decode_steering_features=[{**EDIT, "feature": 12}])
    twice = server.post(SET, decode_features=[EDIT])
    named = server.post(SET, sae_clamp_specs=[])
    cleared = server.post(SET, features=[], decode_sae_reconstruction=[])

    assert done.json() == {"status": "ok", "hook_points": ["post_mlp"], "layers_updated": [2]}, done.text
    assert shared["prefill"]["op_sites"] == shared["decode"]["op_sites"] == ["2.post_mlp"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "decode_steering_features[0].feature")
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "decode_features")
    assert (named.status_code, named.json()["error"]["param"]) == (400, "sae_clamp_specs")
    assert cleared.status_code == 200, cleared.text
    assert server.get("/v1/steering").json()["global"]["decode"]["hash"] is None
    assert server.get("/v1/steering").json()["is_consistent"]


def test_a_feature_that_one_engine_core_refuses_is_taken_back_in_the_other(
    started: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started()
    server.post(SET, features=[EDIT])
    before, (_, core) = server.get("/v1/steering").json()["global"], server.engine.engine_core.cores.values()
    original = core.state.saes.program

    def failing(edits: Any) -> Any:
        if edits:
            raise RequestError("decode_features[0].sae", "the disk is gone")
        return original(edits)

    monkeypatch.setattr(core.state.saes, "program", failing)
    answer = server.post(SET, decode_features=[{**EDIT, "feature": 4}])

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "decode_features[0].sae")
    after = server.get("/v1/steering").json()
    assert after["is_consistent"]
    assert after["global"]["decode"] == before["decode"]


def test_fields_may_have_their_names_in_requests(started: Callable[..., Server]) -> None:
    server = started()
    vectors = {"post_mlp": {"2": [1.0] * WIDTH}}
    ablate = {"at": "2.post_mlp", "method": "ablate", "vector": [2.0] * WIDTH}
    short = {"vectors": vectors, "prefill_ops": [ablate], "decode_features": [EDIT]}
    long = {"steering_vectors": vectors, "prefill_steering_ops": [ablate], "decode_steering_features": [EDIT]}

    first, second = (server.post(MODULE, name="m", **fields) for fields in (short, long))
    done = server.post("/v1/steering/set", steering_ops=[ablate], decode_steering_vectors=vectors)

    assert second.json() == {**first.json(), "version": 2}
    assert first.json()["decode"]["op_sites"] == first.json()["prefill"]["op_sites"] == ["2.post_mlp"]
    assert done.json() == {"status": "ok", "hook_points": ["post_mlp"], "layers_updated": [2]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"steering_ops": [{"at": "2.post_mlp", "method": "bend"}]}, "steering_ops[0].method"),
        ({"steering_vectors": {"post_mlp": {"2": [1.0]}}}, "steering_vectors.post_mlp.2"),
        ({"steering_ops": [], "ops": []}, "ops"),
        ({"steering_name": "m"}, "steering_name"),
    ],
)
def test_errors_have_the_names_that_the_client_wrote(
    started: Callable[..., Server], fields: dict[str, Any], field: str
) -> None:
    server = started()

    for path, more in ((MODULE, {"name": "n"}), ("/v1/steering/set", {})):
        answer = server.post(path, **more, **fields)

        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert answer.json()["error"]["message"].startswith(f"{field}: ")


def test_features_are_found_by_their_labels(started: Callable[..., Server], root: Path) -> None:
    server, path = started(), f"{SAES}/a/features"
    assert server.get(path).json() == {"sae": "a", "num_labels": 0, "features": [], "count": 0}
    write_labels(root.parent / "a", {3: "Words about the Sea", 7: "sea", 8: "land"})

    answer = server.get(f"{path}?query=SEA")

    found = [{"id": 7, "label": "sea"}, {"id": 3, "label": "Words about the Sea"}]
    assert answer.json() == {"sae": "a", "num_labels": 3, "features": found, "count": 2}
    assert server.get(f"{path}?limit=1").json()["count"] == 1
    described = server.get("/openapi.json").json()["paths"][f"{SAES}/{{name}}/features"]["get"]
    content = described["responses"]["200"]["content"]["application/json"]
    for value in (answer.json(), content["example"]):
        conforms(value, content["schema"], path)
    assert {each["name"] for each in described["parameters"]} == {"name", "query", "limit"}


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [("x/features", 404, None), ("a/features?limit=0", 400, "limit"), ("a/features?limit=x", 400, "limit"),
     ("a/features?q=x", 400, "q"), (f"a/features?query={'x' * 201}", 400, "query")],
)  # fmt: skip
def test_searches_are_refused_by_parameter(
    started: Callable[..., Server], path: str, status: int, param: str | None
) -> None:
    answer = started().get(f"{SAES}/{path}")

    assert answer.status_code == status, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_damaged_labels_are_an_error_of_the_server(started: Callable[..., Server], root: Path) -> None:
    labels_path(root.parent / "a").write_text("[]")

    answer = started().get(f"{SAES}/a/features")

    assert answer.status_code == 500, answer.text
    assert "line 1: expected an object of JSON" in answer.text, "(the server leaves paths out)"
