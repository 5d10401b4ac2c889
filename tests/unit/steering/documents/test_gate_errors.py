"""A mistake in gates is one error that names its field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from headgate.capture.schema.errors import RequestError
from headgate.steering.documents.gates import read_gate_fields, read_gates
from tests.fakes.gate_forms import EARLIER, INLINE, LATER, PACKED, PROBE, gate, gated, old_gate
from tests.fakes.op_fields import V
from tests.fakes.random_fields import values

GATES, OLD = "steering_gates", "steering"
FIRST = f"{GATES}[0]"
NAN, INF = float("nan"), float("inf")
ZEROS = [0.0] * 6
SCORE = {"probe": "anger"}

Case = tuple[dict[str, Any], str, str]


def gates(*documents: Any) -> dict[str, Any]:
    return {GATES: list(documents)}


def _when(when: Any, path: str, message: str) -> Case:
    return gates(gate(when=when)), f"{FIRST}.when{path}", message


def _leaf(path: str, message: str, **keys: Any) -> Case:
    return _when({**PROBE, **keys}, path, message)


def _inline(path: str, message: str, **keys: Any) -> Case:
    probe = {key: value for key, value in {**INLINE, **keys}.items() if value is not None}
    return _when({"probe": probe, "above": 1}, f".probe{path}", message)


def _then(then: Any, path: str, message: str) -> Case:
    return gates(gate(then=then)), f"{FIRST}.then{path}", message


def _key(key: str, value: Any, message: str) -> Case:
    return gates(gate(**{key: value})), f"{FIRST}.{key}", message


def _op(path: str, message: str, **keys: Any) -> Case:
    return _then({"ops": [{"at": "1.post_mlp", "method": "ablate", "vector": V, **keys}]}, f".ops[0]{path}", message)


def loop(**pid: Any) -> dict[str, Any]:
    """A gate with a control loop."""
    return gate(when=SCORE, strength={"pid": pid})


def _nested(depth: int) -> Any:
    return {"not": _nested(depth - 1)} if depth else PROBE


def _two(**keys: Any) -> list[dict[str, Any]]:
    """Two gates, of which the first brings a probe."""
    return [gate(name="anger", when={"probe": INLINE, "above": 1}), gate(**keys)]


LARGE: list[Case] = [
    (gates(gate(strength={"proportional": 1.1e6})), f"{FIRST}.strength.proportional", "at most 1.04858e+06"),
    _then({"attenuate": -1.1e6}, ".attenuate", "at most 1.04858e+06"),
    (
        gates(gate(then={"attenuate": 2000.0}), gate(then={"attenuate": 2000.0})),
        f"{GATES}[1].then.attenuate",
        "at most 1.04858e+06 in magnitude, got 4e+06",
    ),
    (
        gates(gate(then={"attenuate": -2000.0}, strength={"proportional": 1000.0})),
        f"{FIRST}.then.attenuate",
        "got 2.001e+06",
    ),
    ({OLD: [old_gate(apply={"kind": "attenuate", "strength": 2e6})]}, f"{OLD}[0].apply.strength", "got 2e+06"),
]
LISTS: list[Case] = [
    ({GATES: []}, GATES, "non-empty list of gates"),
    ({GATES: gate()}, GATES, "non-empty list"),
    ({GATES: "calm"}, GATES, "non-empty list"),
    ({GATES: True}, GATES, "non-empty list"),
    (gates(*[gate()] * 5), GATES, "has 5 gates, at most 4 fit"),
    (gates(gate(), None), f"{GATES}[1]", "expected a gate"),
    (gates("calm"), FIRST, "expected a gate"),
    (gates([gate()]), FIRST, "expected a gate"),
    (gates({}), f"{FIRST}.when", "is missing"),
    (gates({"when": PROBE}), f"{FIRST}.then", "is missing"),
    (gates(gate(then=None)), f"{FIRST}.then", "is missing"),
    (gates(gate(above=1)), f"{FIRST}.above", "unknown key; a gate has name, when"),
    (gates(gate(**{"x" * 5000: 1})), f"{FIRST}.{'x' * 5000}"[:300] + "...", "unknown key"),
    (gates({**gate(), 3: 1}), f"{FIRST}.3", "unknown key"),
    ({GATES: [gate()], OLD: [old_gate()]}, OLD, "excludes steering_gates"),
]

HEADS: list[Case] = [
    _key("name", "", "printable"),
    _key("name", "a\n", "printable"),
    _key("name", "x" * 257, "printable"),
    _key("name", 3, "printable"),
    (gates(gate(name="a"), gate(name="a")), f"{GATES}[1].name", "'a' is the name of steering_gates[0]"),
    (gates(gate(name="gate1"), gate()), f"{GATES}[1].name", "named by its index"),
    (gates(*_two()), f"{FIRST}.name", "two scores would be called 'anger'"),
    (gates(*reversed(_two())), f"{GATES}[1].name", "two scores would be called 'anger'"),
    (
        gates(
            gate(name="a", when={"any": [{"probe": INLINE, "above": 1}, {"sae": "s", "feature": 1, "above": 1}]}),
            gate(name="a.1", when={"cosine": V, "at": "1.post_mlp", "above": 1}),
        ),
        f"{GATES}[1].name",
        "'a.1'",
    ),
    _key("strength", "soft", "expected"),
    _key("strength", 1.0, "expected"),
    _key("strength", {}, "expected"),
    _key("strength", {"proportional": 1, "sigmoid": 1}, "expected"),
    (gates(gate(strength={"proportional": 0})), f"{FIRST}.strength.proportional", "above 0"),
    (gates(gate(strength={"proportional": None})), f"{FIRST}.strength.proportional", "finite number"),
    (gates(gate(strength={"sigmoid": -1})), f"{FIRST}.strength.sigmoid", "above 0"),
    (gates(gate(strength={"sigmoid": INF})), f"{FIRST}.strength.sigmoid", "finite number"),
    (gates(gate(strength={"sigmoid": True})), f"{FIRST}.strength.sigmoid", "finite number"),
    (gates(loop()), f"{FIRST}.strength.pid.setpoint", "is missing"),
    (gates(loop(setpoint=1, gain=2)), f"{FIRST}.strength.pid.gain", "unknown key; a control loop has setpoint, kp"),
    (gates(loop(setpoint=INF)), f"{FIRST}.strength.pid.setpoint", "finite number"),
    (gates(loop(setpoint=1, kd="1")), f"{FIRST}.strength.pid.kd", "finite number"),
    (gates(loop(setpoint=1, min=0.5)), f"{FIRST}.strength.pid.min", "expected 0 or less"),
    (gates(loop(setpoint=1, max=-1)), f"{FIRST}.strength.pid.max", "expected 0 or more"),
    (gates(loop(setpoint=1, max=1e9)), f"{FIRST}.strength.pid.max", "at most"),
    (gates(gate(strength={"pid": 1})), f"{FIRST}.strength.pid", "expected an object"),
    (gates({**loop(setpoint=1), "scope": "rest_of_request"}), f"{FIRST}.scope", "this_token or next_token"),
    (gates({**loop(setpoint=1), "when": "always"}), f"{FIRST}.when", "expected"),
    (gates({**loop(setpoint=1), "when": {"any": [PROBE]}}), f"{FIRST}.when.any", "reads one score"),
    (gates({**loop(setpoint=1), "when": PROBE}), f"{FIRST}.when.above", "has a setpoint and no threshold"),
    (gates({**loop(setpoint=1), "when": {**SCORE, "pool": "last_prompt"}}), f"{FIRST}.when.pool", "reads each row"),
    _key("scope", "all", "expected one of this_token, next_token"),
    _key("scope", ["this_token"], "expected one of"),
    _key("conversation_id", "c", "for the scope rest_of_conversation alone, not for this_token"),
    (gates(gate(scope="rest_of_request", conversation_id="c")), f"{FIRST}.conversation_id", "alone"),
    (gates(gate(scope="rest_of_conversation")), f"{FIRST}.conversation_id", "is missing"),
    (gates(gate(scope="rest_of_conversation", conversation_id="")), f"{FIRST}.conversation_id", "printable"),
    (gates(gate(scope="rest_of_conversation", conversation_id="c" * 257)), f"{FIRST}.conversation_id", "256"),
    (gates(gate(scope="rest_of_conversation", conversation_id="\x00")), f"{FIRST}.conversation_id", "printable"),
    (gates(gate(scope="rest_of_conversation", conversation_id=7)), f"{FIRST}.conversation_id", "printable"),
]

CONDITIONS: list[Case] = [
    _when("sometimes", "", "expected"),
    _when([PROBE], "", "expected"),
    _when({}, "", "expected"),
    _when({"above": 1}, "", "has none of the keys probe, sae"),
    _when({"prob": "anger"}, ".prob", "unknown key"),
    _when({"probe": None, "above": 1}, "", "has none of the keys"),
    _when({**PROBE, "sae": "s"}, ".sae", "excludes 'probe'"),
    _when({"any": [PROBE], "all": [PROBE]}, ".all", "excludes 'any': a condition has one of probe"),
    _when({"any": [PROBE], "above": 1}, ".above", "unknown key; a condition with 'any' has any"),
    _when({**PROBE, "feature": 1}, ".feature", "unknown key"),
    _when({**PROBE, "at": "1.post_mlp"}, ".at", "unknown key"),
    _when({**PROBE, "hysteresys": None}, ".hysteresys", "unknown key"),
    _when({"any": []}, ".any", "non-empty list"),
    _when({"all": PROBE}, ".all", "non-empty list"),
    _when({"any": [PROBE, None]}, ".any[1]", "is missing"),
    _when({"any": [{**PROBE, "hysteresis": -1}]}, ".any[0].hysteresis", "must not be negative"),
    _when({"not": [PROBE]}, ".not", "expected"),
    _when(_nested(8), ".not" * 8, "8 times at most"),
    _when(_nested(500), ".not" * 8, "8 times at most"),
    _when({"any": [PROBE] * 1000}, ".any", "--max-steering-gates"),
    _when({"any": [{"any": [PROBE] * 4}, {"all": [{"cosine": [1], "at": "x"}] * 9}]}, ".any[1].all", "take"),
    _leaf(".above", "finite number", above=NAN),
    _leaf(".above", "finite number", above=INF),
    _leaf(".above", "finite number", above=1e39),
    _leaf(".above", "finite number", above="1"),
    _leaf(".above", "finite number", above=True),
    _leaf(".below", "excludes 'above'", below=1),
    _leaf(".hysteresis", "finite number", hysteresis=True),
    _leaf(".hysteresis", "finite number", hysteresis=NAN),
    _leaf(".pool", "expected one of token", pool="mean"),
    _leaf(".pool", "expected one of token", pool={"ema": 0.5, "alpha": 1}),
    _leaf(".pool", "expected one of token", pool={}),
    _leaf(".pool", "expected one of token", pool=["token"]),
    _leaf(".pool.ema", "above 0", pool={"ema": 0}),
    _leaf(".pool.ema", "1 at most", pool={"ema": 1.5}),
    _leaf(".pool.ema", "finite number", pool={"ema": True}),
    _leaf(".pool.ema", "finite number", pool={"ema": None}),
    _leaf(".probe", "a probe's name", probe=""),
    _leaf(".probe", "a probe's name", probe="a\nb"),
    _leaf(".probe", "expected the name of a probe", probe=3),
    _leaf(".probe", "expected the name of a probe", probe=V),
    _when({"probe": INLINE}, ".above", "is missing"),
    _when({"probe": INLINE, "below": None}, ".above", "is missing"),
    _inline(".at", "is missing", at=None),
    _inline(".at", "not a site", at="post_mlp"),
    _inline(".at", "--steering-op-sites", at="3.post_mlp"),
    _inline(".at", "--steering-op-sites", at="99.post_mlp"),
    _inline(".weight", "is missing", weight=None),
    _inline(".weight", "expected 6 numbers", weight=V[1:]),
    _inline(".weight", "is zero in float32", weight=ZEROS),
    _inline(".weight", "not finite", weight=[*V[1:], NAN]),
    _inline(".weight", "expected 6 numbers", weight=np.zeros((2, 6))),
    _inline(".weight", "printable", weight=""),
    _inline(".weight", "'module' and 'site'", weight={"module": "m", "scale": 2}),
    _inline(".weight.site", "not a site", weight={"module": "m", "site": "mid"}),
    _inline(".weight.dtype", "float32", weight={"dtype": "int8", "shape": [6], "data": b""}),
    _inline(".bias", "finite number", bias=[1.0]),
    _inline(".threshold", "unknown key; a probe has at", threshold=1.0),
    _inline(".hidden", "Register an MLP with POST /v1/steering/probes/register", hidden={"weight": [V]}),
    _inline(".kind", 'a cosine is the condition {"cosine": vector, "at"}', kind="cosine"),
    _when({"sae": "s", "above": 1}, ".feature", "is missing"),
    _when({"sae": "s", "feature": -1, "above": 1}, ".feature", "index of a feature"),
    _when({"sae": "s", "feature": True, "above": 1}, ".feature", "index of a feature"),
    _when({"sae": 3, "feature": 1, "above": 1}, ".sae", "an SAE's name"),
    _when({"sae": "s", "feature": 1}, ".above", "is missing"),
    _when({"cosine": V, "above": 1}, ".at", "is missing"),
    _when({"cosine": V, "at": "1.post_mlp"}, ".above", "is missing"),
    _when({"cosine": ZEROS, "at": "1.post_mlp", "above": 1}, ".cosine", "is zero"),
    _when({"cosine": V, "at": "1.post_mlp", "above": 1, "bias": 1}, ".bias", "unknown key"),
    _when(
        {"all": [{"cosine": V, "at": f"0.{hook}", "above": 1} for hook in ("mlp_out", "attn_out")]},
        "",
        "side by side",
    ),
]

THENS: list[Case] = [
    _then("watch", "", '"observe"'),
    _then(["observe"], "", '"observe"'),
    _then({}, "", "exactly one of"),
    _then({"scale": 1}, "", "exactly one of"),
    _then({"modul": "calm"}, ".modul", "unknown key"),
    _then({"observe": True}, ".observe", "unknown key"),
    _then({"module": "calm", "attenuate": 1}, ".attenuate", "got module and attenuate"),
    _then({"attenuate": 1, "scale": 1}, ".scale", "is for a module"),
    _then({"module": ""}, ".module", "printable"),
    _then({"module": ["calm"]}, ".module", "printable"),
    _then({"module": "calm", "scale": INF}, ".scale", "finite number"),
    _then({"attenuate": "half"}, ".attenuate", "finite number"),
    _then({"attenuate": True}, ".attenuate", "finite number"),
    _then({"vectors": V}, ".vectors", "hook point to vectors"),
    _then({"vectors": {"lunch": {1: V}}}, ".vectors.lunch", "unknown hook point"),
    _then({"vectors": {"post_mlp": {1: V[1:]}}}, ".vectors.post_mlp.1", "expected 6 numbers"),
    _then({"vectors": {"post_mlp": {1: ZEROS}}}, ".vectors.post_mlp.1", "is zero"),
    _then({"vectors": {"post_mlp": {1: {"vector": V, "scale": 0}}}}, ".vectors", "adds nothing"),
    _then({"vectors": {"post_mlp": {3: V}}}, ".vectors.post_mlp.3", "--steering-op-sites"),
    _then({"vectors": {"final_norm": V}}, ".vectors.final_norm", "--steering-op-sites"),
    _then({"ops": []}, ".ops", "non-empty list"),
    _then({"ops": [V]}, ".ops[0]", "expected an operation"),
    _op(".at", "--steering-op-sites", at="3.post_mlp"),
    _op(".method", "expected one of", method="erase"),
    _op(".positions", "is not for a gate", positions="prompt"),
    _op(".source", "is not for a gate", source={"request": "r", "position": 1}, vector=None),
    _op(".vector", "has no direction", vector=ZEROS),
    _then({"ops": [{"at": "1.post_mlp", "method": "ablate", "vector": V}] * 9}, ".ops[8]", "one operation too many"),
    _then({"features": []}, ".features", "non-empty list"),
    _then({"features": [{"sae": "s", "feature": 1}]}, ".features[0]", "exactly one of set"),
    _then({"features": [{"sae": "s", "feature": 1, "set": 1}] * 2}, ".features[1].feature", "given twice"),
    (
        gates(gate(when={"probe": INLINE, "above": 1}, then={"vectors": EARLIER})),
        f"{FIRST}.scope",
        "reads at 1.post_mlp and writes at 0.post_mlp",
    ),
    (
        gates(
            gate(
                when={"any": [PROBE, {"not": {"cosine": V, "at": "0.attn_out", "above": 0}}]},
                then={"ops": [{"at": "0.mlp_out", "method": "ablate", "vector": V}]},
            )
        ),
        f"{FIRST}.scope",
        "next_token works",
    ),
]


def _old(path: str, message: str, **keys: Any) -> Case:
    return {OLD: [old_gate(**keys)]}, f"{OLD}[0]{path}", message


def _old_when(path: str, message: str, **keys: Any) -> Case:
    return _old(f".when{path}", message, when={**old_gate()["when"], **keys})


def _old_add(path: str, message: str, **keys: Any) -> Case:
    steer = {"kind": "inline", "packed": {"post_mlp": {**PACKED, "layer_indices": [2]}}}
    return _old(f".apply{path}", message, apply={"kind": "add", "steer": steer, **keys})


def _packed(layers: list[int]) -> dict[str, Any]:
    rows = {"shape": [len(layers), 6], "layer_indices": layers, "data": PACKED["data"] * len(layers)}
    return {"kind": "inline", "packed": {"post_mlp": {**PACKED, **rows}}}


PREDECESSOR: list[Case] = [
    ({OLD: {"layer": 3}}, OLD, "non-empty list"),
    ({OLD: [old_gate()] * 5}, OLD, "has 5 gates"),
    ({OLD: [3]}, f"{OLD}[0]", "expected a gate"),
    _old(".then", "unknown key", then={"module": "calm"}),
    _old(".scope", "expected one of", scope="forever"),
    _old(".conversation_id", "is missing", scope="rest_of_conversation"),
    _old(".when", "an object with a 'kind'", when="always"),
    _old(".when.kind", "expected one of always, probe", when={"kind": "feature"}),
    _old(".when.threshold", "unknown key", when={"kind": "always", "threshold": 1}),
    _old_when(".threshold", "is missing", threshold=None),
    _old_when(".threshold", "finite number", threshold=NAN),
    _old_when(".sharpness", "above 0", sharpness=0),
    _old_when(".sharpness", "finite number", sharpness="4"),
    _old_when(".probe", "an object with a 'kind'", probe="anger"),
    _old_when(".probe.kind", "expected one of name, inline", probe={"name": "anger"}),
    _old_when(".probe.name", "a probe's name", probe={"kind": "name"}),
    _old_when(".probe.packed", "is missing", probe={"kind": "inline"}),
    _old_when(".probe.packed", "expected one row", probe=_packed([1, 2])),
    _old_when(".probe.packed", "--steering-op-sites", probe=_packed([3])),
    _old(".apply", "an object with a 'kind'", apply=None),
    _old(".apply.kind", "expected one of add, attenuate", apply={"kind": "clamp"}),
    _old(".apply.strength", "is missing", apply={"kind": "attenuate"}),
    _old(".apply.steer", "unknown key", apply={"kind": "attenuate", "strength": 1, "steer": {}}),
    _old_add(".strength", "finite number", strength=True),
    _old_add(".steer.kind", "expected one of name, inline", steer=LATER),
    _old_add(".steer", "an object with a 'kind'", steer=V),
    _old_add(".steer.name", "a module's name", steer={"kind": "name", "name": ""}),
    _old_add(".steer.packed.post_mlp", "form lacks", steer={"kind": "inline", "packed": {"post_mlp": {"data": b""}}}),
    _old(".scope", "writes at 0.post_mlp", apply={"kind": "add", "steer": _packed([0])}),
]

BAD = [*LISTS, *LARGE, *HEADS, *CONDITIONS, *THENS, *PREDECESSOR]


def test_the_table_is_long_enough() -> None:
    assert len(BAD) >= 150


@pytest.mark.parametrize(("fields", "field", "message"), BAD)
def test_a_mistake_is_one_error_that_names_its_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_gate_fields(fields, gated())

    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")
    assert message in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("fields", [gates(gate()), {OLD: [old_gate()]}, gates()])
def test_gates_are_off_where_the_operator_has_none(fields: Mapping[str, Any]) -> None:
    with pytest.raises(RequestError, match="gates are off on this server; the operator sets --max-steering-gates"):
        read_gate_fields(fields, gated(max_gates=0))


def test_features_need_saes() -> None:
    reads = gate(when={"sae": "s", "feature": 1, "above": 1})
    edits = gate(then={"features": [{"sae": "s", "feature": 1, "set": 1}]})

    for document, field in ((reads, f"{FIRST}.when.sae"), (edits, f"{FIRST}.then.features")):
        with pytest.raises(RequestError, match="this server has no SAEs") as refused:
            read_gates([document], gated(max_features=0))
        assert refused.value.field == field


@pytest.mark.parametrize("key", ["when", "then", "strength", "scope", "name", "conversation_id"])
@given(value=values)
def test_any_value_is_read_or_refused(key: str, value: Any) -> None:
    refused = ""
    try:
        read_gates([gate(**{key: value})], gated())
    except RequestError as error:
        refused = error.field

    assert not refused or refused.startswith(FIRST)
