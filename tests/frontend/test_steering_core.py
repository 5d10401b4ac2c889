"""The real engine core and scheduler, steered: whose KV is shared with whom, and what a change of the vectors costs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.capture.schema.errors import RequestError, UnsupportedError
from headgate.steering.spec import SteeringSpec, to_wire
from tests.fakes.steered_core import BLOCK, Core, engine_request, naming

pytestmark = pytest.mark.engine

PROMPT = list(range(100, 100 + 3 * BLOCK + 4))
"""Three full blocks; the fourth is filled with what is generated."""

SCRIPT = list(range(500, 600))
COLD, WARM = len(PROMPT), len(PROMPT) - 3 * BLOCK
ANSWER = 2 * BLOCK
"""Tokens of an answer that fills two blocks after the prompt's."""


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Core]:
    core = Core(model_dir, asynchronous=request.param)
    yield core
    core.close()


@pytest.fixture
def core(engine: Core) -> Iterator[Core]:
    """The engine with an empty cache, and nothing left in it afterwards."""
    assert engine.core.reset_prefix_cache()
    for known in (engine.tokens, engine.ended, engine.worker.computed, engine.worker.acted, engine.worker.calls):
        known.clear()
    yield engine
    engine.check_empty()


def decode_only(core: Core, *layers: int) -> SteeringSpec:
    return SteeringSpec(decode=core.vectors(*layers))


def prefill_only(core: Core, *layers: int) -> SteeringSpec:
    return SteeringSpec(prefill=core.vectors(*layers))


def test_steered_then_plain_and_the_other_way_round(core: Core) -> None:
    assert core.serve("a1", PROMPT, core.both(0)) == COLD
    assert core.serve("p1", PROMPT) == COLD
    assert core.serve("a2", PROMPT, core.both(0)) == WARM
    assert core.serve("p2", PROMPT) == WARM


def test_other_vectors_share_nothing(core: Core) -> None:
    assert core.serve("a", PROMPT, core.both(0)) == COLD
    assert core.serve("b", PROMPT, core.both(0, value=2.0)) == COLD
    assert core.serve("c", PROMPT, core.both(1)) == COLD


def test_a_decode_only_config_shares_the_plain_prompt_both_ways(core: Core) -> None:
    assert core.serve("p", PROMPT) == COLD
    assert core.serve("d", PROMPT, decode_only(core, 0)) == WARM
    core.core.reset_prefix_cache()
    assert core.serve("d2", PROMPT, decode_only(core, 0)) == COLD
    assert core.serve("p2", PROMPT) == WARM
    assert core.serve("e", PROMPT, decode_only(core, 1)) == WARM


def test_a_prefill_only_config_shares_the_prompt_of_one_in_both_phases(core: Core) -> None:
    assert core.serve("a", PROMPT, core.both(0)) == COLD
    assert core.serve("b", PROMPT, prefill_only(core, 0)) == WARM


@pytest.mark.parametrize(
    ("first", "then", "num_shared"),
    [
        ("both", "both", 5),
        ("both", "plain", 0),
        ("decode", "plain", 3),
        ("decode", "both", 0),
        ("prefill", "both", 3),
        ("plain", "plain", 5),
    ],
)
def test_the_next_turn_of_a_steered_answer(core: Core, first: str, then: str, num_shared: int) -> None:
    specs = {"both": core.both(0), "decode": decode_only(core, 0), "prefill": prefill_only(core, 0)}
    core.serve("turn 1", PROMPT, specs.get(first, SteeringSpec()), script=SCRIPT, max_tokens=ANSWER)
    history = [*PROMPT, *core.tokens["turn 1"], 7]

    assert core.serve("turn 2", history, specs.get(then, SteeringSpec())) == len(history) - num_shared * BLOCK


def test_a_module_and_its_vectors_inline_are_one_thing(core: Core) -> None:
    core.register("calm", core.both(0))

    assert core.serve("named", PROMPT, naming(("calm", 1.0))) == COLD
    assert core.serve("inline", PROMPT, core.both(0)) == WARM
    assert core.serve("half", PROMPT, naming(("calm", 0.5))) == COLD
    assert core.worker.acted["named"] == {("p", None, core.vectors(0).key)}


def test_a_name_registered_anew_means_something_else(core: Core) -> None:
    core.register("calm", core.both(0))
    assert core.serve("old", PROMPT, naming(("calm", 1.0))) == COLD
    core.register("calm", core.both(1))
    assert core.serve("new", PROMPT, naming(("calm", 1.0))) == COLD
    core.register("calm", core.both(0))
    assert core.serve("old again", PROMPT, naming(("calm", 1.0))) == WARM


def test_a_request_keeps_what_its_name_meant_when_it_came(core: Core) -> None:
    core.register("calm", core.both(0))
    core.add("old", PROMPT, naming(("calm", 1.0)), script=SCRIPT, max_tokens=20)
    core.step()
    core.register("calm", core.both(1))
    core.add("new", PROMPT, naming(("calm", 1.0)), script=SCRIPT, max_tokens=20)
    core.done("unregister", name="calm")
    core.run()

    for req_id, layer in (("old", 0), ("new", 1)):
        key = core.vectors(layer).key
        assert core.worker.acted[req_id] == {("p", None, key), ("d", None, key)}
    core.done("status")
    assert core.worker.leftovers()["contents"] == []


def test_a_decode_only_global_change_keeps_the_blocks_of_prompts(core: Core) -> None:
    assert core.serve("p", PROMPT) == COLD
    core.set_global(decode=core.vectors(0))
    assert core.serve("d", PROMPT) == WARM
    core.set_global(base=core.vectors(0))
    assert core.serve("b", PROMPT) == COLD
    core.set_global(base=core.vectors(0), decode=core.vectors(1))
    assert core.serve("bd", PROMPT) == WARM
    core.done("clear_global")
    assert core.serve("p2", PROMPT) == WARM


def test_vectors_of_the_request_come_on_top_of_the_global_ones(core: Core) -> None:
    core.serve("inline", PROMPT, core.both(0))
    core.set_global(base=core.vectors(0))
    assert core.serve("global", PROMPT) == WARM  # the same vectors, wherever they come from
    assert core.serve("both", PROMPT, core.both(0)) == COLD
    assert core.serve("both again", PROMPT, core.both(0)) == WARM


def test_tiers_are_taken_over_or_replaced(core: Core) -> None:
    core.set_global(base=core.vectors(0))
    status = core.set_global(replace=False, decode=core.vectors(1))
    assert status["global"]["tiers"] == {"base": ["0.post_mlp"], "decode": ["1.post_mlp"]}
    assert status["slots"] == {"capacity": 8, "reserved": 3}
    status = core.set_global(prefill=core.vectors(2))
    assert status["global"]["tiers"] == {"prefill": ["2.post_mlp"]}
    assert core.done("clear_global")["global"]["tiers"] == {}


@pytest.mark.parametrize("tier", ["base", "prefill", "decode"])
def test_a_global_change_restarts_whoever_runs(core: Core, tier: str) -> None:
    names = [f"r{i}" for i in range(6)]
    for i, name in enumerate(names):
        spec = core.both(2) if i % 2 else SteeringSpec()
        core.add(name, [i, *PROMPT], spec, script=SCRIPT, max_tokens=40)
    for _ in range(20):
        core.step()
    before = {name: core.worker.computed[name] for name in names}
    core.set_global(**{tier: core.vectors(0)})
    core.run()

    for name in names:
        assert core.tokens[name] == SCRIPT[:40]
        computed_after = core.worker.computed[name] - before[name]
        # 41 tokens and the rest of the prompt, or all of it; what was generated before is computed again.
        assert (computed_after < 60) == (tier == "decode"), (name, computed_after)
        phases = "pd" if tier == "base" else tier[0]
        key = core.vectors(0).key
        assert {phase for phase, shared, _ in core.worker.acted[name] if shared == key} == set(phases)


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "stock's"])
def test_a_restart_keeps_the_tokens_of_steps_in_flight(core: Core, is_ours: bool) -> None:
    core.add("r", PROMPT, script=SCRIPT, max_tokens=40)
    for _ in range(12):
        core.step()
    request, queue = core.scheduler.requests["r"], core.core.batch_queue
    known, in_flight = request.num_output_tokens, len(queue or ())
    if is_ours:
        core.set_global(base=core.vectors(0))
    else:
        core.core.reset_prefix_cache(reset_running_requests=True)

    assert in_flight == (queue is not None)
    assert request.num_output_tokens == known + in_flight
    core.run()
    assert core.tokens["r"] == SCRIPT[:40]


def test_a_request_that_ends_with_a_step_in_flight_is_not_restarted(core: Core) -> None:
    core.add("r", PROMPT, script=SCRIPT, max_tokens=12)
    for _ in range(12):
        core.step()
    core.set_global(base=core.vectors(0))
    computed = core.worker.computed["r"]
    core.run()

    assert (core.tokens["r"], core.ended["r"], core.worker.computed["r"]) == (SCRIPT[:12], "length", computed)


def test_two_changes_in_a_row_and_one_step_apart(core: Core) -> None:
    core.add("r", PROMPT, script=SCRIPT, max_tokens=60)
    for i in range(30):
        core.step()
        core.set_global(base=core.vectors(0, value=1.0 + i))
        if i % 3 == 0:
            core.set_global(decode=core.vectors(1, value=1.0 + i))
    core.run()

    assert core.tokens["r"] == SCRIPT[:60]


def test_the_same_vectors_again_restart_nobody(core: Core) -> None:
    core.set_global(base=core.vectors(0))
    core.add("r", PROMPT, script=SCRIPT, max_tokens=10)
    core.step()
    core.set_global(base=core.vectors(0))
    core.run()

    assert core.worker.computed["r"] == len(PROMPT) + 9
    assert core.worker.calls == ["set_global"]


def test_a_request_between_the_threads_when_the_global_vectors_change(core: Core) -> None:
    core.serve("plain", PROMPT)
    queued = [core.preprocess(engine_request(f"q{i}", PROMPT, spec)) for i, spec in enumerate([SteeringSpec()] * 2)]
    core.set_global(base=core.vectors(0))
    for request in queued:
        core.core.add_request(request)
    core.run()

    assert core.worker.acted["q0"] == {("p", core.vectors(0).key, None)}
    assert core.worker.computed["q0"] == COLD


def test_samples_of_one_prompt_share_their_parameters(core: Core) -> None:
    first = engine_request("0_s", PROMPT, core.both(0), script=SCRIPT, max_tokens=30)
    second = msgspec.structs.replace(first, request_id="1_s")
    for request in (first, second):
        core.core.add_request(core.preprocess(request))
    core.step()
    core.set_global(base=core.vectors(1))
    core.run()

    assert core.tokens["0_s"] == core.tokens["1_s"] == SCRIPT[:30]


def test_a_request_without_steering_has_stock_hashes(core: Core) -> None:
    from vllm.v1.core import block_pool, kv_cache_utils

    stock = kv_cache_utils.generate_block_hash_extra_keys.__wrapped__
    plain, steered = (core.preprocess(engine_request("x", PROMPT, spec)) for spec in (SteeringSpec(), core.both(0)))

    for function in (kv_cache_utils.generate_block_hash_extra_keys, block_pool.generate_block_hash_extra_keys):
        assert function(plain, 0, BLOCK, 0) == stock(plain, 0, BLOCK, 0) == (None, 0)
        ((tag, name),), _ = function(steered, 0, BLOCK, 0)
        assert (tag, name) == ("headgate", core.vectors(0).key.hex())
    core.core.add_request(steered)
    core.run()


def test_the_stamp_travels_nowhere(core: Core) -> None:
    import copy

    request = core.add("r", PROMPT, core.both(0))
    core.run()

    assert "_headgate_block_keys" in vars(request.sampling_params)
    for copied in (copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))):
        assert "_headgate_block_keys" not in vars(copied(request.sampling_params))
    assert b"_headgate" not in msgspec.msgpack.encode(request.sampling_params)


def test_an_unknown_module_is_the_requests_error(core: Core) -> None:
    from vllm.exceptions import VLLMValidationError

    core.register("calm", core.both(0))
    with pytest.raises(VLLMValidationError, match=r"steering_module_ref: unknown steering module 'clam'.*calm") as info:
        core.add("r", PROMPT, naming(("clam", 1.0)))
    assert isinstance(info.value, RequestError)
    assert core.serve("r", PROMPT, naming(("calm", 1.0))) == COLD


def test_what_stock_refuses_is_let_go(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    core.register("calm", core.both(0))
    request = engine_request("r", PROMPT, naming(("calm", 1.0)))

    def fail(request: Any) -> None:
        raise LookupError

    with monkeypatch.context() as patched:
        patched.setattr(core.core, "request_block_hasher", fail)
        with pytest.raises(LookupError):
            core.preprocess(request)
    assert core.serve("r", PROMPT, naming(("calm", 1.0))) == COLD


def session(req_id: str, spec: SteeringSpec) -> Any:
    return engine_request(req_id, PROMPT, spec, max_tokens=2, resumable=True)


def test_streaming_input_sessions_and_steering_exclude_each_other(core: Core) -> None:
    with pytest.raises(RequestError, match="streaming-input sessions"):
        core.core.add_request(core.preprocess(session("s", core.both(0))))
    core.core.add_request(core.preprocess(session("s", SteeringSpec())))
    core.step()
    core.register("calm", core.both(0))
    assert "s" in core.scheduler.requests
    core.set_global(base=core.vectors(0))
    assert "s" not in core.scheduler.requests  # what it has computed cannot be computed anew
    core.run()
    with pytest.raises(RequestError, match="streaming-input sessions"):
        core.core.add_request(core.preprocess(session("s2", SteeringSpec())))


def test_calls_that_are_refused_change_nothing(core: Core) -> None:
    core.register("calm", core.both(0))
    before = core.done("status")
    too_many = to_wire(core.both(*range(1, 9)))

    assert core.refused("unregister", name="clam")["field"] == "name"
    assert core.refused("register", name="big", spec=too_many)["field"] == "module"
    assert core.refused("set_global", tiers={"base": to_wire(prefill_only(core, *range(1, 9)))}, replace=True)
    assert core.refused("nothing")["field"] == "method"
    assert core.core.headgate_call("capture", "status", {})["error"]["field"] == "part"
    assert core.done("status") == before


def test_a_worker_that_fails_leaves_the_vectors_as_they_were(core: Core) -> None:
    core.set_global(base=core.vectors(0))
    core.register("calm", core.both(1))
    before = core.done("status")
    core.worker.failing = {"set_global"}
    with pytest.raises(RuntimeError, match="as it was told to"):
        core.set_global(base=core.vectors(2))
    core.worker.failing = {"keep_module"}
    with pytest.raises(RuntimeError, match="as it was told to"):
        core.register("calm", core.both(2))

    assert core.done("status") == before
    assert core.serve("r", PROMPT, naming(("calm", 1.0))) == COLD
    assert core.worker.acted["r"] == {("p", core.vectors(0).key, core.vectors(1).key)}


def test_an_engine_whose_hashes_do_not_have_our_keys_does_not_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, core: Core
) -> None:
    from vllm.v1.core import kv_cache_utils

    stock = kv_cache_utils.generate_block_hash_extra_keys.__wrapped__
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", stock)
    with pytest.raises(UnsupportedError, match="would share KV"):
        Core(model_dir)
