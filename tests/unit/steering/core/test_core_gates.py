"""Gates in an engine core: names become content, keys of blocks follow, traces and conversations are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headgate.capture.probe import Activation, HiddenLayer, Probe, ProbeKind
from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.steering.config import parse_config
from headgate.steering.core import gates
from headgate.steering.core.steering_core import SteeringCore
from headgate.steering.documents.gates import read_rule
from headgate.steering.gates.gate import (
    FOLLOWING,
    FeatureReading,
    Gate,
    InlineProbe,
    Leaf,
    ModuleThen,
    NamedProbe,
    Pid,
    Then,
    columns_of,
    probe_key,
)
from headgate.steering.gates.lowering import lower_gates
from headgate.steering.gates.trace import join_notes
from headgate.steering.programs.codes import (
    CODE,
    CODE_MASK,
    UNIT_MASK,
    Code,
    GateScope,
    Mode,
    ScorePooling,
    UnitFunction,
)
from headgate.steering.programs.operations import Method, ModuleVector, Operation
from headgate.steering.programs.program import Program
from headgate.steering.programs.wire import content_to_wire
from headgate.steering.spec import ModuleRef, SteeringSpec, from_wire, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors

HIDDEN = 4
READ, LATE, UNDECLARED = Site(1, HookPoint.POST_MLP), Site(2, HookPoint.POST_MLP), Site(3, HookPoint.POST_MLP)
CONFIG = parse_config({"op_sites": {"post_mlp": [1, 2]}})
STEERABLE = CONFIG.steerable(num_layers=4, hidden_size=HIDDEN, dtype="float32")
DRAFTED = replace(STEERABLE, knows_positions=False)
WEIGHT = np.array([1, 0, 0, 0], np.float32)
VECTORS = PhaseVectors.from_rows({LATE: WEIGHT})
assert VECTORS is not None


MLP = Probe(
    site=READ,
    kind=ProbeKind.MLP,
    weight=np.array([[1.0, -2.0, 0.0]], np.float32),
    hidden=HiddenLayer(
        weight=np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]], np.float32),
        bias=np.array([0.5, 0.25, 1.0], np.float32),
        activation=Activation.GELU,
    ),
    threshold=0.0,
)


class NoWorkers:
    def call_workers(self, method: str, args: Any) -> list[object]:
        return []

    def prepare_change(self, field: str) -> None: ...

    def restart_running(self) -> None: ...

    def rekey_running(self) -> dict[str, int]:
        return {}

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


def core_with(**settings: Any) -> SteeringCore:
    core = SteeringCore("float32", 64, NoWorkers(), CONFIG, **{"steerable": STEERABLE, **settings})
    core.state.probes.put("anger", Probe(site=READ, weight=WEIGHT[None], threshold=0.25))
    return core


def adding(site: Site = LATE) -> Then:
    vectors = {"vector": np.ones(HIDDEN, np.float32)}
    return Then(operations=(Operation(method=Method.ADDITIVE, site=site, vectors=vectors, numbers={"scale": 1.0}),))


def gate(reading: Any = None, **settings: Any) -> Gate:
    leaf = {"reading": reading or NamedProbe("anger", "steering_gates[0].when.probe"), "threshold": None}
    leaf |= {name: settings.pop(name) for name in ("threshold", "pooling") if name in settings}
    return Gate(**{"name": "g", "when": Leaf(**leaf), "then": adding(), "where": "steering_gates[0]", **settings})


def accepted(core: SteeringCore, req_id: str, *gates: Gate, num_prompt: int = 5, **wire: Any) -> SteeringSpec:
    """The spec that the workers get."""
    spec = SteeringSpec(gates=gates)
    taken = core.accept(req_id, {**to_wire(spec), **wire}, num_prompt)
    assert taken is not None
    assert "gates" not in taken
    return from_wire(taken)


def codes_of(spec: SteeringSpec) -> list[int]:
    assert spec.decode_program is not None
    return (spec.decode_program.codes[:, CODE] & CODE_MASK).tolist()


def test_a_probe_by_name_becomes_what_it_was_when_the_request_came():
    core = core_with()

    first = accepted(core, "a", gate())
    core.state.probes.put("anger", Probe(site=READ, weight=2 * WEIGHT[None], threshold=0.25))
    second = accepted(core, "b", gate())

    assert codes_of(first) == [Code.SCORE, Code.LEAF, Code.GATE, Code.ADD]
    assert first.decode_program is not None
    assert second.decode_program is not None
    assert first.decode_program.key != second.decode_program.key


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        (gate(NamedProbe("joy", "here")), "here", "unknown probe 'joy'; registered: anger"),
        (gate(FeatureReading("sae", 3, "here"), threshold=1.0), "here", "unknown SAE 'sae'; registered: none"),
        (gate(InlineProbe(site=UNDECLARED, weight=WEIGHT, where="here"), threshold=1.0), "here", "3.post_mlp"),
        (gate(InlineProbe(site=READ, weight=WEIGHT)), "steering_gates", "no threshold of its own"),
        (gate(then=adding(UNDECLARED)), "steering_gates[0].then", "--steering-op-sites"),
        (gate(InlineProbe(site=LATE, weight=WEIGHT), threshold=1.0, then=adding(READ)), "steering_gates[0].scope", "n"),
        (gate(then=Then(module=ModuleThen("calm", where="here"))), "here", "unknown steering module 'calm'"),
    ],
)
def test_a_gate_that_cannot_be_is_refused_and_leaves_nothing(given, field, message):
    core = core_with()

    with pytest.raises(RequestError, match=message) as caught:
        accepted(core, "a", given)

    assert caught.value.field == field
    accepted(core, "a", gate())


def test_a_probe_of_several_classes_cannot_decide():
    core = core_with()
    core.state.probes.put("mood", Probe(site=READ, weight=np.eye(2, HIDDEN), classes=("glad", "sad")))

    with pytest.raises(RequestError, match="has 2 classes"):
        accepted(core, "a", gate(NamedProbe("mood"), threshold=0.0))


def test_an_engine_without_room_takes_no_gates():
    core = core_with(steerable=replace(STEERABLE, max_gates=0))

    with pytest.raises(RequestError, match="--max-steering-gates is 0"):
        accepted(core, "a", gate())


def test_an_engine_without_room_takes_no_rules():
    core = core_with(steerable=replace(STEERABLE, max_rules=0))
    rule = read_rule("calm", {"applies_to": "all", "when": "always", "then": "observe"}, STEERABLE)

    with pytest.raises(RequestError, match=r"^name: this engine takes no rules: --max-steering-rules is 0"):
        core.operator.register_rule(rule)


def test_strengths_go_to_later_pipeline_stages_alone():
    """A gate, a rule and an attenuation that write on the stage before their probe are refused; all others are not."""
    back = gate(read(LATE), threshold=0.0, scope=GateScope.NEXT, then=adding(READ))
    fading = gate(read(LATE), threshold=0.0, scope=GateScope.NEXT, then=Then(attenuate=0.5))
    document = {"applies_to": "all", "when": {"probe": {"at": LATE.name, "weight": [1.0, 0, 0, 0]}, "above": 0.0}}
    document |= {"scope": "next_token", "then": {"vectors": {"post_mlp": {str(READ.layer): [1.0, 0, 0, 0]}}}}
    rule, static = read_rule("calm", document, STEERABLE), PhaseVectors.from_rows({READ: WEIGHT})
    apart = core_with(steerable=replace(STEERABLE, stages={READ: 0, LATE: 1}))

    for each, vectors in ((back, None), (fading, static)):
        wire = to_wire(SteeringSpec(gates=(each,), prefill=vectors, decode=vectors))
        with pytest.raises(RequestError, match=r"writes at 1.post_mlp, on an earlier pipeline stage") as caught:
            apart.accept("a", wire, 5)
        assert caught.value.field == "steering_gates[0].then"
    with pytest.raises(RequestError, match="earlier pipeline stage") as caught:
        apart.operator.register_rule(rule)
    assert caught.value.field == "then"
    accepted(apart, "a", gate())
    accepted(apart, "b", gate(read(LATE), threshold=0.0, scope=GateScope.NEXT), replace(fading, name="nothing"))
    together = core_with(steerable=replace(STEERABLE, stages={READ: 1, LATE: 1}))
    accepted(together, "a", back)
    together.operator.register_rule(rule)


def read(site: Site) -> InlineProbe:
    return InlineProbe(site=site, weight=WEIGHT, bias=0.0, is_cosine=False, where="steering_gates[0].when.probe")


def keys(core: SteeringCore, req_id: str, *gates: Gate, num_prompt: int = 5) -> tuple[str, str]:
    accepted(core, req_id, *gates, num_prompt=num_prompt)
    found = core.block_keys(req_id)
    assert found is not None
    assert found.prefill is not None
    assert found.decode is not None
    return found.prefill, found.decode


def test_blocks_are_keyed_by_what_their_rows_depend_on():
    core = core_with()
    plain, longer = keys(core, "a", gate()), keys(core, "b", gate(), num_prompt=6)
    pooled = (
        keys(core, "c", gate(pooling=ScorePooling.LAST_PROMPT)),
        keys(core, "d", gate(pooling=ScorePooling.LAST_PROMPT), num_prompt=6),
    )

    assert keys(core, "e", gate(name="other")) == plain
    assert plain[0] == longer[0]
    assert len({*plain, longer[1]}) == 3
    assert len({*pooled[0], *pooled[1], *plain}) == 6
    assert keys(core, "f", gate(threshold=0.5)) != plain


def readings(req_id: str, first: int, signals: np.ndarray) -> dict[str, Any]:
    return {
        "ids": (req_id,),
        "firsts": np.array([first]),
        "counts": np.array([len(signals)]),
        "has_one_each": len(signals) == 1,
        "columns": signals.shape[1],
        "reported": None,
        "values": signals.astype(np.float32),
    }


def test_the_trace_of_a_request_that_wants_one_is_told():
    core = core_with()
    accepted(core, "a", gate(), trace=True)
    columns = columns_of([gate()])
    signals = np.zeros((2, columns.num_columns))
    signals[:, columns.scores[0].column] = [0.5, -0.5]
    signals[0, columns.gates[0].column : columns.gates[0].column + 2] = 1

    told = core.take_readings(readings("a", 3, signals), ())
    discarded = core.take_readings(readings("a", 5, signals), {"a"})
    core.release("a")

    assert join_notes([told.pop("a")], None) == {
        "positions": [3, 4],
        "scores": {"anger": [0.5, -0.5]},
        "gates": {"g": {"strength": [1.0, 0.0], "applied": [1.0, 0.0]}},
        "actions": [],
    }
    assert told == discarded == {}
    assert core.take_readings(readings("a", 5, signals), ()) == {}


def test_rows_of_drafts_behind_the_last_token_are_neither_told_nor_counted():
    core = core_with(steerable=DRAFTED)
    accepted(core, "a", gate(), trace=True)
    columns = columns_of([gate()])
    signals = np.ones((4, columns.num_columns))

    told = core.take_readings(readings("a", 5, signals), (), {"a": 7})
    none = core.take_readings(readings("a", 7, signals), (), {"a": 7})
    core.release("a")

    assert join_notes([told["a"]], None)["positions"] == [5, 6]
    assert none == {}
    assert core.operator.call("dynamic", {})["gates"] == {"g": 2}


def test_with_drafts_workers_count_nothing_by_themselves():
    spec = to_wire(SteeringSpec(gates=(gate(),)))

    assert core_with().accept("a", spec, 5).get("counted") is True
    assert "counted" not in core_with(steerable=DRAFTED).accept("a", spec, 5)


def reading_late(core: SteeringCore) -> SteeringCore:
    core.state.probes.put("late", Probe(site=LATE, weight=WEIGHT[None], threshold=0.25))
    return core


@pytest.mark.parametrize("scope", [GateScope.NEXT, GateScope.REST], ids=lambda scope: scope.name)
def test_with_drafts_no_row_waits_for_the_one_before_it(scope: GateScope):
    """What acts at an earlier site follows from the row before, unless the prompt alone decides it."""
    core, usual = reading_late(core_with(steerable=DRAFTED)), reading_late(core_with())
    late = NamedProbe("late", "steering_gates[0].when.probe")
    early = gate(late, scope=scope, then=adding(READ))
    accepted(core, "late", gate(scope=scope))
    accepted(core, "pooled", gate(late, scope=scope, then=adding(READ), pooling=ScorePooling.PROMPT_MEAN))

    with pytest.raises(RequestError, match=r"^steering_gates\[0\].scope: writes at sites before"):
        accepted(core, "early", early)
    accepted(usual, "early", early)


def test_with_drafts_a_loop_goes_on_from_row_to_row_whatever_it_reads():
    core = reading_late(core_with(steerable=DRAFTED))
    loop = {"mode": Mode.PID, "pid": Pid(setpoint=0.2), "threshold": None, "pooling": ScorePooling.PROMPT_MEAN}
    late = NamedProbe("late", "steering_gates[0].when.probe")

    with pytest.raises(RequestError, match=r"^steering_gates\[0\].scope: writes at sites before"):
        accepted(core, "loop", gate(late, scope=GateScope.NEXT, then=adding(READ), **loop))


@pytest.mark.parametrize("has_more", [False, True])
def test_with_drafts_rows_beside_the_only_token_of_a_prompt_wait_for_nothing(has_more: bool):
    """Whether or not the gates were lowered before, for a longer prompt."""
    core = reading_late(core_with(steerable=DRAFTED))
    late = NamedProbe("late", "steering_gates[0].when.probe")
    early = gate(late, scope=GateScope.REST, then=adding(READ), pooling=ScorePooling.LAST_PROMPT)
    spec = {"decode": {LATE: WEIGHT}} if has_more else {}
    wire = to_wire(SteeringSpec(gates=(early,), **{key: PhaseVectors.from_rows(rows) for key, rows in spec.items()}))

    assert core.accept("two", wire, 2) is not None
    with pytest.raises(RequestError, match=r"^steering_gates\[0\].scope: .*a prompt of two tokens or more"):
        core.accept("one", wire, 1)


def test_with_drafts_a_rule_writes_where_it_was_evaluated():
    core = reading_late(core_with(steerable=DRAFTED))
    vectors = {"vectors": {"post_mlp": {READ.layer: WEIGHT.tolist()}}}
    asked = {"applies_to": "all", "when": {"probe": "late"}, "then": vectors, "scope": "next_token"}

    with pytest.raises(RequestError, match=r"^then: writes at sites before"):
        core.operator.register_rule(read_rule("calm", asked, STEERABLE))


def test_a_request_that_captures_is_described_though_it_asks_for_nothing():
    core = core_with()
    accepted(core, "captured", gate())
    accepted(core, "plain", gate())
    core.accept("untouched", None, 4)
    for name in ("captured", "untouched"):
        core.describe(name, 4)
        core.offer(name, priority=0, is_session=False, is_offline=False)
    columns = columns_of([gate()])
    rows = [np.zeros((2, columns.num_columns)), np.ones((1, columns.num_columns)), np.ones((1, columns.num_columns))]

    for name, shift in (("captured", 0), ("plain", 1)):
        for first, signals in zip((3, 5, 6), rows, strict=True):
            core.take_readings(readings(name, first, signals + shift), ())

    describe = core.description("captured")
    assert describe is not None
    assert describe(6)["positions"] == [3, 4]
    assert describe(8) == {
        "positions": [3, 4, 5, 6],
        "scores": {"anger": [0.0, 0.0, 1.0, 1.0]},
        "gates": {"g": {"strength": [0.0, 0.0, 1.0, 1.0], "applied": [0.0, 0.0, 1.0, 1.0]}},
        "actions": [],
    }
    assert core.description("plain") is core.description("nobody") is None
    untouched = core.description("untouched")
    assert untouched is not None
    assert untouched(8) == {}
    core.release("captured")
    assert core.description("captured") is None


def latched(spec: SteeringSpec) -> float:
    assert spec.decode_program is not None
    codes, params = spec.decode_program.codes, spec.decode_program.params
    return float(params[np.flatnonzero(codes[:, CODE] & CODE_MASK == Code.GATE)[0], 2])


def test_a_latch_goes_on_in_the_conversation_of_its_client_and_no_other():
    core = core_with()
    talk = {"scope": GateScope.REST, "conversation": "c"}
    first = accepted(core, "a", gate(**talk), owner="alice")
    column = columns_of([gate()]).gates[0].column
    signals = np.full((1, columns_of([gate()]).num_columns), np.nan)
    before = core.take_readings(readings("a", 0, signals), ())
    unlatched = latched(accepted(core, "b", gate(**talk), owner="alice"))
    signals[0, column + FOLLOWING] = 0.75
    core.take_readings(readings("a", 1, signals), ())

    assert before == {}
    assert np.isnan([latched(first), unlatched]).all()
    assert latched(accepted(core, "c", gate(name="renamed", **talk), owner="alice")) == 0.75
    others = [
        accepted(core, "d", gate(**talk), owner="bob"),
        accepted(core, "e", gate(**talk)),
        accepted(core, "f", gate(scope=GateScope.REST, conversation="other"), owner="alice"),
        accepted(core, "g", gate(threshold=0.5, **talk), owner="alice"),
        accepted(core, "h", gate(scope=GateScope.REST), owner="alice"),
    ]
    assert np.isnan([latched(each) for each in others]).all()


def test_conversations_are_refused_where_their_requests_may_go_elsewhere():
    core = core_with(has_conversations=False)

    with pytest.raises(RequestError, match="data parallelism") as caught:
        accepted(core, "a", gate(scope=GateScope.REST, conversation="c"))

    assert caught.value.field == "steering_gates[0].scope"


def test_a_gate_that_attenuates_takes_the_requests_own_vectors_in():
    core = core_with()
    vectors = PhaseVectors.from_rows({LATE: np.ones(HIDDEN, np.float32)})
    spec = SteeringSpec(prefill=vectors, decode=vectors, gates=(gate(then=Then(attenuate=0.5)),))

    taken = core.accept("a", to_wire(spec), 5)

    assert taken is not None
    workers = from_wire(taken)
    assert (workers.prefill, workers.decode) == (None, None)
    assert codes_of(workers) == [Code.SCORE, Code.LEAF, Code.GATE, Code.ATTENUATE, Code.ADD]


def test_front_ends_learn_the_names_of_probes() -> None:
    core = core_with()
    vectors = PhaseVectors.from_rows({LATE: np.ones(HIDDEN, np.float32)})
    core.call("register", {"name": "anger", "spec": to_wire(SteeringSpec(decode=vectors))})

    listed = {found["name"]: found for found in core.call("names", {})}

    assert list(listed) == ["anger", probe_key("anger")]
    assert listed[probe_key("anger")] == {"name": probe_key("anger"), "at": "1.post_mlp", "classes": ["positive"]}


@pytest.mark.parametrize(
    ("site", "width", "field", "message"),
    [
        (UNDECLARED, HIDDEN, "at", "no probe can read at 3.post_mlp; declared sites: 1.post_mlp, 2.post_mlp"),
        (READ, HIDDEN + 1, "weight", "expected rows of 4 values, as at 1.post_mlp; got 5"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused_by_the_core_too(site: Site, width: int, field: str, message: str) -> None:
    """A front end that checks otherwise, such as one of another version, must not have rows read wrongly."""
    core = core_with()
    probe = Probe(site=site, weight=np.ones((1, width), np.float32), threshold=0.0)

    with pytest.raises(RequestError, match=message) as refused:
        core.call("register_probe", {"name": "anger", "probe": content_to_wire(probe)})

    assert refused.value.field == field
    assert core.call("probes", {})[0]["at"] == READ.name
    core.call(
        "register_probe", {"name": "late", "probe": content_to_wire(replace(probe, site=LATE, weight=WEIGHT[None]))}
    )
    assert [found["at"] for found in core.call("probes", {})] == [READ.name, LATE.name]


def test_an_mlp_becomes_an_entry_for_each_unit_that_counts_and_their_sum():
    config = parse_config({"op_sites": {"post_mlp": [1, 2]}, "max_probe_units": 3})
    core = SteeringCore("float32", 64, NoWorkers(), config, steerable=STEERABLE)
    core.state.probes.put("mood", MLP)
    mood = NamedProbe("mood", "steering_gates[0].when.probe")

    wire = core.accept("a", to_wire(SteeringSpec(gates=(gate(mood),))), 4)

    (program, _) = [one for _, one in from_wire(wire).phases]
    scores = program.codes[:, CODE][program.codes[:, CODE] & CODE_MASK == Code.SCORE]
    assert [code & UNIT_MASK for code in scores.tolist()] == [UnitFunction.GELU, UnitFunction.SUM]
    constant = float(Activation.GELU.apply(np.array([0.25]))[0])
    np.testing.assert_allclose(program.params[:2, 2:4], [[0.5, 1.0], [-2.0 * constant, 0.0]], rtol=1e-6)


def test_more_units_than_fit_are_refused():
    config = parse_config({"op_sites": {"post_mlp": [1, 2]}, "max_probe_units": 3})
    core = SteeringCore("float32", 64, NoWorkers(), config, steerable=STEERABLE)
    core.state.probes.put("mood", MLP)
    core.state.probes.put("same", replace(MLP, threshold=1.0))
    gates = [gate(NamedProbe(name, f"g{at}"), name=name) for at, name in enumerate(("mood", "same"))]

    with pytest.raises(RequestError, match=r"the MLP probes at 1\.post_mlp make 4 entries, at most 3 fit"):
        core.accept("a", to_wire(SteeringSpec(gates=tuple(gates))), 4)


def program_of(spec: SteeringSpec) -> Program:
    assert spec.decode_program is not None
    return spec.decode_program


def test_gates_that_are_equal_are_lowered_once_while_what_they_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[object] = []
    monkeypatch.setattr(gates, "lower_gates", lambda *given: lowered.append(given) or lower_gates(*given))
    core = core_with()

    first, again = program_of(accepted(core, "a", gate())), program_of(accepted(core, "b", gate()))
    accepted(core, "c", gate(threshold=0.5))
    assert first.key == again.key
    assert len(lowered) == 2

    core.state.probes.put("joy", Probe(site=READ, weight=WEIGHT[None]))
    accepted(core, "d", gate())
    core.state.register(core.state.read_module("calm", SteeringSpec(prefill=VECTORS, decode=VECTORS)))
    accepted(core, "e", gate())
    assert len(lowered) == 4


def test_a_request_with_gates_that_came_before_becomes_what_it_would_alone() -> None:
    def taken(core: SteeringCore, number: int, num_prompt: int, **others: Any) -> Any:
        spec, name = SteeringSpec(gates=(gate(scope=GateScope.NEXT),), **others), f"r{number}"
        wire = core.accept(name, {**to_wire(spec), "trace": number % 2 == 0}, num_prompt)
        core.offer(name, priority=0, is_session=False, is_offline=False)
        return wire, core.block_keys(name), core.state.rules.num_prompt(name)

    def with_module() -> SteeringCore:
        core = core_with()
        core.operator.register("calm", SteeringSpec(decode=VECTORS))
        return core

    others: list[dict[str, Any]] = [
        {},
        {"prefill": VECTORS},
        {"modules": (ModuleRef("calm", 2.0),)},
        {"prefill": VECTORS, "decode": VECTORS, "modules": (ModuleRef("calm"),)},
        {"rules": ()},
    ]
    core = with_module()
    for number in range(3 * len(others)):
        given = number, 5 + number % 2, others[number % len(others)]
        assert taken(core, *given[:2], **given[2]) == taken(with_module(), *given[:2], **given[2])


def test_gates_whose_programs_depend_on_more_are_lowered_each_time() -> None:
    core = core_with()
    attenuating = gate(then=Then(attenuate=0.0))

    found = [
        program_of(accepted(core, str(scale), attenuating, **to_wire(SteeringSpec(decode=VECTORS.scaled(scale)))))
        for scale in (1.0, 2.0)
    ]

    assert found[0].key != found[1].key


WIDER = Site(1, HookPoint.MLP_ACT)
PADDED = PhaseVectors.from_rows({LATE: np.array([1, 2, 3, 4, 0, 0], np.float32)})
"""As vectors are kept where a site that can be steered has rows of six values."""


@pytest.mark.parametrize("reads", ["nothing", "its vector"])
def test_a_modules_vector_acts_as_one_of_the_gates_own_where_some_sites_are_wider(reads: str) -> None:
    core = core_with(
        steerable=replace(STEERABLE, sites=(*STEERABLE.sites, WIDER), shapes={WIDER: SiteShape(6, STEERABLE.dtype)})
    )
    core.state.register(core.state.read_module("calm", SteeringSpec(prefill=PADDED, decode=PADDED)))
    vector = np.array([1, 2, 3, 4], np.float32)
    own = Operation(method=Method.ADDITIVE, site=LATE, vectors={"vector": vector}, numbers={"scale": 1.0})
    named = replace(own, vectors={"vector": ModuleVector("calm", LATE)})
    then = Then(module=ModuleThen("calm", where="here")) if reads == "nothing" else Then(operations=(named,))

    by_name = accepted(core, "a", gate(then=then))
    by_value = accepted(core, "b", gate(then=Then(operations=(own,))))

    assert by_name.decode_program is not None
    assert by_value.decode_program is not None
    assert by_name.decode_program.key == by_value.decode_program.key
    assert by_name.prefill_program == by_value.prefill_program


def test_a_gate_attenuates_vectors_where_some_sites_are_wider() -> None:
    core = core_with(
        steerable=replace(STEERABLE, sites=(*STEERABLE.sites, WIDER), shapes={WIDER: SiteShape(6, STEERABLE.dtype)})
    )
    spec = SteeringSpec(prefill=PADDED, decode=PADDED, gates=(gate(then=Then(attenuate=0.5)),))

    taken = core.accept("a", to_wire(spec), 5)

    assert taken is not None
    program = from_wire(taken).decode_program
    assert program is not None
    assert program.rows.shape[1] == HIDDEN
    assert [1.0, 2.0, 3.0, 4.0] in (8 * program.rows).tolist() + (4 * program.rows).tolist()


def test_operations_along_a_modules_vector_are_as_along_their_own_where_some_sites_are_wider() -> None:
    core = core_with(
        steerable=replace(STEERABLE, sites=(*STEERABLE.sites, WIDER), shapes={WIDER: SiteShape(6, STEERABLE.dtype)})
    )
    core.state.register(core.state.read_module("calm", SteeringSpec(prefill=PADDED, decode=PADDED)))
    vector = np.array([1, 2, 3, 4], np.float32)
    own = Operation(method=Method.ABLATE, site=LATE, vectors={"vector": vector}, numbers={"scale": 1.0})
    other = replace(own, site=READ)

    def resolved(req_id: str, *operations: Operation) -> Program | None:
        spec = SteeringSpec(prefill_ops=operations, decode_ops=operations)
        taken = core.accept(req_id, to_wire(spec), 5)
        assert taken is not None
        return from_wire(taken).decode_program

    named = replace(own, vectors={"vector": ModuleVector("calm", LATE)})
    assert resolved("a", other, named) == resolved("b", other, own)
