"""The routes of rules on vLLM's own application, over two engine cores; no engine runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from headgate.capture.engine.access.access_key import digest_of
from headgate.capture.monitoring.metrics import EngineStats
from headgate.capture.schema.errors import ConfigError
from headgate.steering.client import Client
from headgate.steering.control.metrics import families
from headgate.steering.control.openapi import REGISTER_RULE
from headgate.steering.documents.gates import RuleDocument
from headgate.steering.documents.schema import schema_of
from tests.frontend.test_app import VECTOR, Server, conforms, starter

pytestmark = pytest.mark.engine

RULES, REGISTER = "/v1/steering/rules", "/v1/steering/rules/register"
UNREGISTER, AUDIT = "/v1/steering/rules/unregister", "/v1/steering/audit"
WHEN = {"probe": {"at": "2.post_mlp", "weight": VECTOR}, "above": 0.5}
CALM = {
    "name": "calm",
    "applies_to": "all",
    "when": WHEN,
    "then": {"vectors": {"post_mlp": {"2": VECTOR}}},
    "scope": "rest_of_request",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    start = starter(monkeypatch)
    return lambda *flags, **section: start(*flags, section={"op_sites": {"post_mlp": [2]}, **section})


def names(server: Server) -> list[list[str]]:
    """The rules of each engine core."""
    cores = server.engine.engine_core.cores.values()
    return [[rule.name for rule in core.state.rules.all()] for core in cores]


def test_a_rule_is_registered_in_every_engine_core_replaced_and_forgotten(started: Callable[..., Server]) -> None:
    server = started()

    answer = server.post(REGISTER, **CALM)

    assert answer.status_code == 200, answer.text
    listed = server.get(RULES).json()
    assert answer.json() == {"status": "ok", **listed["rules"][0]}
    assert listed["count"] == 1
    told = listed["rules"][0]
    assert (told["applies_to"], told["scope"], told["strength"], told["observes"]) == (
        "all",
        "rest_of_request",
        "binary",
        False,
    )
    assert (told["probes"], told["sites"]) == (["calm"], ["2.post_mlp"])
    assert told["when"] == {"probe": {"at": "2.post_mlp", "weight": None, "bias": 0.0}, "above": 0.5}
    assert told["then"] == {"ops": [{"at": "2.post_mlp", "method": "additive"}]}
    replaced = server.post(REGISTER, **{**CALM, "applies_to": "opt_in", "then": "observe", "strength": {"sigmoid": 2}})
    assert (replaced.json()["observes"], replaced.json()["strength"]) == (True, {"sigmoid": 2.0})
    assert replaced.json()["sha256"] != told["sha256"]
    status = server.get("/v1/steering").json()
    assert status["is_consistent"]
    assert status["slots"][0]["reserved"] > 0
    assert names(server) == [["calm"], ["calm"]]
    assert server.post(UNREGISTER, name="calm").json() == {"status": "ok", "name": "calm"}
    assert names(server) == [[], []]
    assert server.get("/v1/steering").json()["slots"][1]["reserved"] == 0
    lines = server.get(AUDIT).json()["entries"]
    assert [line["action"] for line in lines] == ["register_rule", "register_rule", "unregister_rule"]
    assert lines[0]["prefill"] == told["sha256"]
    missing = server.post(UNREGISTER, name="calm")
    assert (missing.status_code, missing.json()["error"]["message"]) == (
        404,
        "name: unknown rule 'calm'; registered: none",
    )


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({key: CALM[key] for key in CALM if key != "name"}, "name", "is missing"),
    "a name of a number": ({**CALM, "name": 3}, "name", "expected a rule's name"),
    "nobody": ({**CALM, "applies_to": None}, "applies_to", "is missing; expected one of all, opt_in, opt_out"),
    "somebody": ({**CALM, "applies_to": "some"}, "applies_to", "expected one of all, opt_in, opt_out"),
    "no condition": ({**CALM, "when": None}, "when", "is missing"),
    "no effect": ({**CALM, "then": None}, "then", "is missing"),
    "another field": ({**CALM, "until": 3}, "until", "is no field of this route"),
    "a conversation": ({**CALM, "scope": "rest_of_conversation"}, "scope", "rules do not follow conversations"),
    "an attenuation": ({**CALM, "then": {"attenuate": 0.5}}, "then.attenuate", "no static steering of its own"),
    "a site that is not declared": (
        {**CALM, "when": {**WHEN, "probe": {"at": "1.post_mlp", "weight": VECTOR}}},
        "when.probe.at",
        "--steering-op-sites",
    ),
    "a module that is not there": ({**CALM, "then": {"module": "m"}}, "then.module", "unknown steering module 'm'"),
    "a probe that is not there": ({**CALM, "when": {"probe": "p"}}, "when.probe", "unknown probe 'p'"),
    "an SAE where there is none": (
        {**CALM, "when": {"sae": "s", "feature": 1, "above": 0}},
        "when.sae",
        "",
    ),
    "a scope that cannot act": (
        {**CALM, "scope": "this_token", "then": {"ops": [{"at": "2.post_mlp", "method": "ablate"}]}},
        "then.ops[0].vector",
        "",
    ),
    "too many columns": ({**CALM, "when": {"any": [WHEN] * 30}}, "when", "all rules together have 64"),
}


def test_a_wrong_rule_is_refused_by_field(started: Callable[..., Server]) -> None:
    server = started()

    for case, (body, field, message) in BAD.items():
        answer = server.post(REGISTER, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), (case, error)
        assert message in error["message"], case
    assert names(server) == [[], []]


def test_a_rule_keeps_what_its_names_stood_for(started: Callable[..., Server]) -> None:
    server = started()
    server.post("/v1/steering/probes/register", name="anger", at="2.post_mlp", weight=VECTOR, threshold=0.5)
    server.post("/v1/steering/modules/register", name="m", vectors={"post_mlp": {"2": VECTOR}})
    named = {**CALM, "when": {"probe": "anger"}, "then": {"module": "m", "scale": 2.0}}
    first = server.post(REGISTER, **named).json()

    server.post("/v1/steering/probes/unregister", name="anger")

    assert first["probes"] == ["anger"]
    assert server.get(RULES).json()["rules"][0]["sha256"] == first["sha256"]
    assert server.post(REGISTER, **named).status_code == 400
    assert server.get(RULES).json()["rules"][0]["sha256"] == first["sha256"]


def test_what_one_engine_core_refuses_is_taken_back_in_the_other(started: Callable[..., Server]) -> None:
    server = started()
    server.post(REGISTER, **CALM)
    before = server.get(RULES).json()
    server.engine.engine_core.services[b"1"].failing = "set_rules"

    answer = server.post(REGISTER, **{**CALM, "applies_to": "opt_out"})

    assert answer.status_code == 400
    assert server.get(RULES).json() == before
    assert server.get("/v1/steering").json()["is_consistent"]


def test_no_rules_where_they_are_off(started: Callable[..., Server]) -> None:
    for section in ({"max_rules": 0}, {"op_sites": {}}):
        answer = started(**section).post(REGISTER, **CALM)
        assert answer.status_code == 400
        assert "--steering-op-sites" in answer.json()["error"]["message"]


def test_a_rule_is_its_own_clients_to_change(started: Callable[..., Server], tmp_path: Path) -> None:
    roles = {"key-of-alice-0123456": "steer", "key-of-bob-0123456789": "steer", "key-of-nobody-012345": "capture"}
    keys = [{"name": key, "sha256": digest_of(key), "roles": [role]} for key, role in roles.items()]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    server = started("--headgate-keys", str(path))
    alice, bob, nobody = ({"X-Headgate-Key": key} for key in roles)

    def ask(who: dict[str, str], where: str, body: dict[str, Any]) -> int:
        return server.ask("POST", where, body, **who).status_code

    assert [ask(who, REGISTER, CALM) for who in ({}, nobody, alice, bob)] == [403, 403, 200, 403]
    assert [ask(who, UNREGISTER, {"name": "calm"}) for who in (nobody, bob, alice)] == [403, 403, 200]
    assert ask(bob, REGISTER, CALM) == 200


def test_the_answers_are_as_described(started: Callable[..., Server]) -> None:
    server = started()
    described = server.app.openapi()["paths"]
    for path, answer in (
        (REGISTER, server.post(REGISTER, **CALM)),
        (RULES, server.get(RULES)),
        (UNREGISTER, server.post(UNREGISTER, name="calm")),
    ):
        (about,) = described[path].values()
        schema = about["responses"]["200"]["content"]["application/json"]["schema"]
        conforms(answer.json(), schema, path)


SCORE = {"cosine": VECTOR, "at": "2.post_mlp", "above": 0.3}
CONDITIONS: list[Any] = [
    "generated",
    WHEN,
    {"probe": "anger", "below": 0.5, "hysteresis": 0.1, "pool": {"ema": 0.5}},
    {"sae": "s", "feature": 3, "above": 5, "pool": "prompt_mean"},
    SCORE,
    {"any": ["prompt", SCORE, {"all": [SCORE, {"not": WHEN}]}]},
    {"not": {"any": [SCORE]}},
]
EFFECTS: list[Any] = [
    "observe",
    {"module": "calm", "scale": 2.0},
    {"vectors": {"post_mlp": {"2": VECTOR}}},
    {"ops": [{"at": "2.post_mlp", "method": "ablate", "vector": "calm"}]},
    {"features": [{"sae": "s", "feature": 3, "set": 1.5}]},
]


def test_the_description_of_a_rule_has_its_conditions_and_effects() -> None:
    schema = schema_of(RuleDocument)
    for when in CONDITIONS:
        conforms({**CALM, "when": when}, schema, "when")
    for then in EFFECTS:
        conforms({**CALM, "then": then}, schema, "then")
    described = REGISTER_RULE["openapi_extra"]["requestBody"]["content"]["application/json"]
    for example in described["examples"].values():
        conforms(example["value"], described["schema"], "example")

    for wrong in (
        {"probe": 3},
        {**WHEN, "until": 1},
        {"sae": "s"},
        {"cosine": VECTOR},
        {"any": SCORE},
        {"module": "m"},
        3,
    ):
        with pytest.raises(AssertionError):
            conforms({**CALM, "when": wrong}, schema, "when")
    for wrong in ({"attenuate": 0.5}, {"module": 3}, {"ops": [{"method": "ablate"}]}, {"features": [3]}, None):
        with pytest.raises(AssertionError):
            conforms({**CALM, "then": wrong}, schema, "then")


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
def test_rules_of_a_file_are_there_at_start(
    started: Callable[..., Server], tmp_path: Path, write: Callable[[Any], str]
) -> None:
    path = tmp_path / "rules"
    path.write_text(write([CALM, {**CALM, "name": "watch", "then": "observe"}]))

    assert names(started(rules_file=str(path))) == [["calm", "watch"], ["calm", "watch"]]


WRONG_FILES = {
    "no list": ({"calm": 1}, "expected a list of rules"),
    "no rule": ([3], r"\[0\].rule: expected an object"),
    "no name": ([{key: CALM[key] for key in CALM if key != "name"}], r"\[0\].name: is missing"),
    "one name twice": ([CALM, CALM], r"\[1\].name: 'calm' is the name of an earlier rule"),
    "a wrong field": ([CALM, {**CALM, "name": "b", "scope": "ever"}], r"\[1\].scope: expected one of"),
    "another field": ([{**CALM, "until": 3}], r"\[0\].until: unknown key"),
    "a probe that is not there": ([{**CALM, "when": {"probe": "p"}}], r"rule 'calm': when.probe: unknown probe 'p'"),
}


def test_a_wrong_file_is_refused_at_start(started: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    for content, message in WRONG_FILES.values():
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            started(rules_file=str(path))


def test_a_file_that_cannot_be_read_is_refused_at_start(started: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("- name: [")

    for name in ("missing.yaml", "broken.yaml"):
        with pytest.raises(ConfigError, match=rf"--steering-rules\): .*{name}: cannot be read"):
            started(rules_file=str(tmp_path / name))


@pytest.mark.parametrize("is_binary", [False, True])
def test_the_client_calls_the_routes(started: Callable[..., Server], is_binary: bool) -> None:
    server = started()
    row = np.array(VECTOR, np.float32)
    rule = {**CALM, "when": {"probe": {"at": "2.post_mlp", "weight": row}, "above": 0.5}}

    with Client("http://127.0.0.1", is_binary=is_binary, transport=httpx.MockTransport(server.handle)) as client:
        status = client.register_rule("calm", **{key: rule[key] for key in rule if key != "name"})
        assert client.rules() == [status]
        assert status.name == "calm"
        client.unregister_rule("calm")
        assert client.rules() == []


def test_what_gates_and_rules_do_is_shown_and_counted(started: Callable[..., Server]) -> None:
    server = started()
    server.post(REGISTER, **CALM)
    for core in server.engine.engine_core.cores.values():
        core._readings.counts.rules["calm"] += 2
        core._readings.counts.gates["gate0"] += 3

    answer = server.get("/v1/steering/dynamic").json()

    rule = {"name": "calm", "applies_to": "all", "observes": False, "rows": 4}
    assert answer == {
        "probes": [],
        "rules": [rule],
        "gates": {"gate0": 6},
        "requests_with_gates": 0,
        "controllers": [],
        "latches": {"conversations": 0, "bytes": 0},
        "queue": None,
    }
    (about,) = server.app.openapi()["paths"]["/v1/steering/dynamic"].values()
    conforms(answer, about["responses"]["200"]["content"]["application/json"]["schema"], "dynamic")
    cores = [core.call("counts", {}) for core in server.engine.engine_core.cores.values()]
    found = {
        family.name: {sample.labels: sample.value for sample in family.samples}
        for family in families([EngineStats(workers=(), core=core) for core in cores])
    }
    assert found["headgate_steering_rule_rows"] == {("0", "calm"): 2, ("1", "calm"): 2}
    assert found["headgate_steering_gate_rows"] == {("0", "gate0"): 3, ("1", "gate0"): 3}
