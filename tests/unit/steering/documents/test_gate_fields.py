"""Fields of gates: every form gives the gates that it means, and the reader tells what they name."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import FINAL_NORM_SITE, HookPoint, Site
from headgate.steering.documents.gates import read_gates, read_predecessor
from headgate.steering.gates.gate import (
    FeatureReading,
    Gate,
    InlineProbe,
    Leaf,
    NamedProbe,
    Pid,
    columns_of,
)
from headgate.steering.programs.codes import Edit, GateScope, Mode, ScorePooling
from headgate.steering.programs.operations import Method, ModuleVector
from headgate.steering.programs.wire import content_from_wire, content_to_wire
from headgate.steering.spec import SteeringSpec, from_wire, to_wire
from tests.fakes.gate_forms import (
    EARLIER,
    INLINE,
    LATER,
    PACKED,
    PROBE,
    gate,
    gate_documents,
    gated,
    old_gate,
    plain,
    shape,
)
from tests.fakes.op_fields import V, W
from tests.fakes.vector_forms import bits_of

SECOND = Site(1, HookPoint.POST_MLP)
ROW = np.array([1.0, -2.0, 0.5, 0.0, 4.0, 1.5], np.float32)


def one(**keys: Any) -> Gate:
    (found,) = read_gates([gate(**keys)], gated())
    return found


def leaf(when: Any) -> Leaf:
    (found,) = one(when=when).leaves
    return found


def inline(probe: dict[str, Any]) -> InlineProbe:
    reading = leaf({"probe": probe, "above": 1}).reading
    assert isinstance(reading, InlineProbe)
    return reading


def old(**keys: Any) -> Gate:
    (found,) = read_predecessor([old_gate(**keys)], gated())
    return found


def test_a_gate_has_defaults() -> None:
    found = one()

    assert (found.name, found.mode, found.amount, found.scope) == ("gate0", Mode.BINARY, 1.0, GateScope.THIS)
    assert (found.conversation, found.where) == (None, "steering_gates[0]")
    assert plain(found.then.module) == ["calm", 1.0, "steering_gates[0].then.module"]


def test_a_gate_with_every_key_is_read() -> None:
    found = one(
        name="calm-down",
        when={"probe": "anger", "below": -0.5, "hysteresis": 0.1, "pool": {"ema": 0.25}},
        then={"module": "calm", "scale": 2},
        strength={"proportional": 3},
        scope="rest_of_conversation",
        conversation_id="chat 7",
    )
    (read,) = found.leaves

    assert (found.name, found.mode, found.amount) == ("calm-down", Mode.PROPORTIONAL, 3.0)
    assert (found.scope, found.conversation) == (GateScope.REST, "chat 7")
    assert (read.is_below, read.threshold, read.hysteresis) == (True, -0.5, 0.1)
    assert (read.pooling, read.alpha) == (ScorePooling.EMA, 0.25)
    assert read.reading == NamedProbe("anger", "steering_gates[0].when.probe")
    assert read.where == "steering_gates[0].when"
    assert plain(found.then.module)[:2] == ["calm", 2.0]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"probe": "anger"}, (False, None)),
        ({"probe": "anger", "above": None}, (False, None)),
        ({"probe": "anger", "below": None}, (True, None)),
        ({"probe": "anger", "above": None, "below": None}, (False, None)),
        ({"probe": "anger", "above": 2, "below": None}, (False, 2.0)),
        ({"probe": "anger", "above": None, "below": 2}, (True, 2.0)),
        ({"probe": "anger", "above": 0.0, "sae": None, "any": None}, (False, 0.0)),
        ({"probe": "anger", "above": np.float32(0.5)}, (False, 0.5)),
    ],
)
def test_the_threshold_of_a_named_probe_may_be_its_own(when: Any, expected: tuple[bool, float | None]) -> None:
    found = leaf(when)

    assert (found.is_below, found.threshold) == expected


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (None, (ScorePooling.TOKEN, 0.0)),
        ("token", (ScorePooling.TOKEN, 0.0)),
        ("last_prompt", (ScorePooling.LAST_PROMPT, 0.0)),
        ("prompt_mean", (ScorePooling.PROMPT_MEAN, 0.0)),
        ({"ema": 1}, (ScorePooling.EMA, 1.0)),
    ],
)
def test_every_pooling_is_read(pool: Any, expected: tuple[ScorePooling, float]) -> None:
    found = leaf({**PROBE, "pool": pool})

    assert (found.pooling, found.alpha) == expected


@pytest.mark.parametrize(
    "vector",
    [
        V,
        tuple(V),
        ROW,
        ROW.astype(np.float64),
        torch.tensor(ROW),
        torch.tensor(ROW).to(torch.bfloat16),
        {"dtype": "float32", "shape": [6], "data": ROW.tobytes()},
        {"dtype": "bfloat16", "shape": [6], "data": b64encode(bits_of(ROW).tobytes()).decode()},
    ],
)
def test_every_form_of_a_vector_is_read(vector: Any) -> None:
    probe, cosine = inline({**INLINE, "weight": vector}), leaf({"cosine": vector, "at": SECOND, "below": 0.2}).reading
    assert isinstance(cosine, InlineProbe)

    for found in (probe, cosine):
        assert isinstance(found.weight, np.ndarray)
        assert found.weight.dtype == np.float32
        assert found.weight.tolist() == V
        assert found.site == SECOND
    assert (probe.bias, probe.is_cosine, probe.where) == (0.25, False, "steering_gates[0].when.probe")
    assert (cosine.bias, cosine.is_cosine, cosine.where) == (0.0, True, "steering_gates[0].when")


@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        ("calm", ModuleVector("calm", SECOND)),
        ({"module": "calm"}, ModuleVector("calm", SECOND)),
        ({"module": "calm", "site": "final_norm"}, ModuleVector("calm", FINAL_NORM_SITE)),
    ],
)
def test_the_vector_of_a_module_is_named(vector: Any, expected: ModuleVector) -> None:
    assert inline({"at": "1.post_mlp", "weight": vector}).weight == expected


def test_a_feature_is_read() -> None:
    assert leaf({"sae": "sae", "feature": 7, "above": 3}).reading == FeatureReading("sae", 7, "steering_gates[0].when")


def test_conditions_stand_in_each_other() -> None:
    found = one(when={"any": [{"all": [PROBE, {"not": {"probe": "joy", "above": 1}}]}, "always", "generated"]})

    assert shape(found.when) == ["any", ["all", None, ["not", None]], "always", "generated"]
    assert [each.where for each in found.leaves] == [
        "steering_gates[0].when.any[0].all[0]",
        "steering_gates[0].when.any[0].all[1].not",
    ]


def test_conditions_are_eight_deep() -> None:
    when: Any = PROBE
    for _ in range(7):
        when = {"not": when}

    assert len(one(when=when).leaves) == 1
    with pytest.raises(RequestError) as refused:
        one(when={"not": when})
    assert refused.value.field == "steering_gates[0].when" + ".not" * 8


def test_gates_fill_their_columns() -> None:
    listed = [{"probe": f"p{index}", "above": 1} for index in range(5)]  # 5 * (3 + 1) + 4 * 2 and 3 for the gate

    assert columns_of(read_gates([gate(when={"any": listed})], gated(max_gates=4))).num_columns == 31
    shared = [*listed, {"probe": "p0", "below": 0}]  # 5 more
    with pytest.raises(RequestError, match="take 36 numbers for each row, 32 fit") as refused:
        read_gates([gate(when={"any": shared})], gated(max_gates=4))
    assert refused.value.field == "steering_gates"


def test_what_a_gate_turns_on_is_read() -> None:
    vectors = one(then={"vectors": {"post_mlp": {2: {"vector": V, "scale": 2}, 1: W}, "post_attn": {0: W}}}).then
    ops = one(then={"ops": [{"at": ["1.post_mlp", "2.post_mlp"], "method": "ablate", "vector": V}]}).then
    features = one(then={"features": [{"sae": "b", "feature": 1, "set": 2}, {"sae": "a", "feature": 7, "add": 1}]}).then

    assert [each.site.name for each in vectors.operations] == ["0.post_attn", "1.post_mlp", "2.post_mlp"]
    assert [plain(each.vectors)["vector"] for each in vectors.operations] == [W, W, [2 * value for value in V]]
    assert {each.method for each in vectors.operations} == {Method.ADDITIVE}
    assert [dict(each.numbers) for each in vectors.operations] == [{"scale": 1.0}] * 3
    assert vectors.operations[0].where == "steering_gates[0].then.vectors.post_attn.0"
    assert [each.site.name for each in ops.operations] == ["1.post_mlp", "2.post_mlp"]
    assert {each.method for each in ops.operations} == {Method.ABLATE}
    assert ops.operations[0].where == "steering_gates[0].then.ops[0]"
    assert [(each.sae, each.feature, each.edit) for each in features.features] == [
        ("a", 7, Edit.PLUS),
        ("b", 1, Edit.SET),
    ]
    assert features.features[0].where == "steering_gates[0].then.features[1]"
    assert one(then={"attenuate": 0}).then.attenuate == 0.0
    assert one(then="observe").then.observes


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (None, (Mode.BINARY, 1.0)),
        ("binary", (Mode.BINARY, 1.0)),
        ({"proportional": 2}, (Mode.PROPORTIONAL, 2.0)),
        ({"sigmoid": 0.5}, (Mode.SIGMOID, 0.5)),
    ],
)
def test_every_strength_is_read(strength: Any, expected: tuple[Mode, float]) -> None:
    found = one(strength=strength)

    assert (found.mode, found.amount) == expected


def test_a_control_loop_is_read() -> None:
    pid = {"setpoint": 0.5, "kp": 1, "ki": None, "min": -2, "max": 0}

    found = one(when={"probe": "anger", "pool": {"ema": 0.5}}, strength={"pid": pid}, scope="next_token")

    assert (found.mode, found.pid) == (Mode.PID, Pid(0.5, 1.0, 0.1, 0.0, -2.0, 0.0))
    assert [(leaf.threshold, leaf.pooling, leaf.alpha) for leaf in found.leaves] == [(None, ScorePooling.EMA, 0.5)]
    assert (found.has_state, found.largest_strength) == (True, 2.0)
    (kept,) = content_from_wire(tuple[Gate, ...], content_to_wire([found]))
    assert kept.pid == found.pid


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (None, GateScope.THIS),
        ("this_token", GateScope.THIS),
        ("next_token", GateScope.NEXT),
        ("next_step", GateScope.NEXT),
        ("rest_of_request", GateScope.REST),
    ],
)
def test_every_scope_is_read(scope: Any, expected: GateScope) -> None:
    assert one(scope=scope).scope is expected


def test_a_gate_acts_at_earlier_sites_later_alone() -> None:
    when = {"probe": INLINE, "above": 1}

    assert one(when=when, then={"vectors": LATER}).then.operations[0].site == Site(2, HookPoint.POST_MLP)
    assert one(when=when, then={"vectors": {"post_mlp": {1: V}}}).then.operations[0].site == SECOND
    assert one(when=when, then={"vectors": EARLIER}, scope="next_token").scope is GateScope.NEXT
    assert one(when="always", then={"vectors": EARLIER}).scope is GateScope.THIS
    with pytest.raises(RequestError, match="next_token works") as refused:
        one(when=when, then={"vectors": EARLIER})
    assert refused.value.field == "steering_gates[0].scope"


def test_gates_are_named_by_their_index() -> None:
    assert [found.name for found in read_gates([gate(), gate(name="mine"), gate()], gated())] == [
        "gate0",
        "mine",
        "gate2",
    ]


def test_a_tuple_of_gates_and_other_paths_are_read() -> None:
    assert read_gates((gate(),), gated(), "rule")[0].where == "rule[0]"


@given(st.lists(gate_documents, min_size=1, max_size=4))
def test_gates_survive_the_wire(documents: list[dict[str, Any]]) -> None:
    gates = read_gates(documents, gated(max_gates=64))
    spec = SteeringSpec(gates=gates)

    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(content_to_wire(gates)))

    assert [plain(found) for found in content_from_wire(tuple[Gate, ...], wire)] == [plain(found) for found in gates]
    assert [plain(found) for found in from_wire(to_wire(spec)).gates] == [plain(found) for found in gates]


def test_a_spec_of_gates_is_to_lower() -> None:
    spec = SteeringSpec(gates=read_gates([gate()], gated()))

    assert not spec.is_empty
    assert spec.is_to_lower
    assert "gates" not in to_wire(SteeringSpec())


class TestPredecessor:
    """The field ``steering``."""

    def test_a_probe_of_this_token_is_soft(self) -> None:
        found = old()
        (read,) = found.leaves

        assert (found.name, found.mode, found.amount, found.scope) == ("gate0", Mode.SIGMOID, 4.0, GateScope.THIS)
        assert (read.threshold, read.is_below, read.hysteresis, read.pooling) == (0.5, False, 0.0, ScorePooling.TOKEN)
        assert isinstance(read.reading, InlineProbe)
        assert plain(read.reading) == ["InlineProbe", plain(SECOND), V, 0.0, False, "steering[0].when.probe"]
        assert found.then.attenuate == 0.25

    @pytest.mark.parametrize("scope", ["next_step", "next_token", "rest_of_request"])
    def test_other_scopes_are_binary(self, scope: str) -> None:
        found = old(scope=scope)

        assert (found.mode, found.amount) == (Mode.BINARY, 1.0)

    def test_it_goes_on_in_a_conversation(self) -> None:
        found = old(scope="rest_of_conversation", conversation_id="c")

        assert (found.scope, found.conversation) == (GateScope.REST, "c")

    def test_names_are_those_of_probes_and_modules(self) -> None:
        found = old(
            when={"kind": "probe", "probe": {"kind": "name", "name": "anger"}, "threshold": 1},
            apply={"kind": "add", "steer": {"kind": "name", "name": "calm"}, "strength": 3},
        )

        assert found.leaves[0].reading == NamedProbe("anger", "steering[0].when.probe.name")
        assert plain(found.then.module) == ["calm", 3.0, "steering[0].apply.steer.name"]
        assert (found.mode, found.amount) == (Mode.SIGMOID, 1.0)

    def test_packed_vectors_are_added(self) -> None:
        steer = {"kind": "inline", "packed": {"post_mlp": PACKED}}
        found = old(when={"kind": "always"}, apply={"kind": "add", "steer": steer, "strength": 2})
        (operation,) = found.then.operations

        assert shape(found.when) == "always"
        assert (found.mode, operation.site, dict(operation.numbers)) == (Mode.BINARY, SECOND, {"scale": 2.0})
        assert plain(operation.vectors) == {"vector": V}
