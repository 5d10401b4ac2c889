"""Rules in the real engine core and scheduler: whose KV is shared with whom, and what a change does to who runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.steering.documents.gates import read_rule
from headgate.steering.programs.wire import content_to_wire
from headgate.steering.spec import SteeringSpec
from tests.fakes.steered_core import BLOCK, Core

pytestmark = pytest.mark.engine

PROMPT = list(range(100, 100 + 3 * BLOCK + 4))
COLD, WARM = len(PROMPT), len(PROMPT) - 3 * BLOCK
ANSWER = 2 * BLOCK
SCRIPT = list(range(500, 600))
SITE = "0.post_mlp"


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Core]:
    steering = {"op_sites": {"post_mlp": [0]}, "max_steering_slots": 33}
    core = Core(model_dir, asynchronous=request.param, steering=steering)
    yield core
    core.close()


@pytest.fixture
def core(engine: Core) -> Iterator[Core]:
    """The engine with an empty cache, and nothing left in it afterwards."""
    assert engine.core.reset_prefix_cache()
    for known in (engine.tokens, engine.ended, engine.worker.computed, engine.worker.acted, engine.worker.calls):
        known.clear()
    yield engine
    for rule in engine.done("rules"):
        off(engine, rule["name"])
    engine.check_empty()


def wire(core: Core, name: str, applies_to: str = "all", **fields: Any) -> dict[str, Any]:
    ones = np.ones(core.hidden_size, np.float32)
    document = {
        "applies_to": applies_to,
        "when": {"cosine": ones, "at": SITE, "above": 0.0},
        "then": {"vectors": {"post_mlp": {"0": ones}}},
        **fields,
    }
    steerable = core.scheduler._headgate_core._part.state.steerable
    return content_to_wire(read_rule(name, document, steerable))


def on(core: Core, name: str, applies_to: str = "all", **fields: Any) -> Any:
    return core.done("register_rule", name=name, rule=wire(core, name, applies_to, **fields))


def off(core: Core, name: str) -> None:
    core.done("unregister_rule", name=name)


def naming(*names: str) -> SteeringSpec:
    return SteeringSpec(rules=names)


def start(core: Core, req_id: str, num_steps: int = 6) -> None:
    """Let a request generate a few tokens, and go on."""
    core.add(req_id, PROMPT, script=SCRIPT, max_tokens=ANSWER)
    for _ in range(num_steps):
        core.step()
    assert 0 < len(core.tokens[req_id]) < ANSWER


def test_blocks_are_shared_with_those_on_whom_the_same_rules_act(core: Core) -> None:
    assert core.serve("plain", PROMPT) == COLD

    on(core, "calm", "opt_out")

    assert core.serve("ruled", PROMPT) == COLD
    assert core.serve("ruled again", PROMPT) == WARM
    assert core.serve("out", PROMPT, naming()) == WARM
    assert core.serve("in", PROMPT, naming("calm")) == WARM
    off(core, "calm")
    assert core.serve("plain again", PROMPT) == WARM
    on(core, "calm", "opt_out")
    assert core.serve("ruled later", PROMPT) == WARM


def test_who_opts_in_is_not_who_does_not(core: Core) -> None:
    on(core, "calm", "opt_in")

    assert core.serve("plain", PROMPT) == COLD
    assert core.serve("in", PROMPT, naming("calm")) == COLD
    assert core.serve("in again", PROMPT, naming("calm")) == WARM
    assert core.serve("plain again", PROMPT) == WARM


def test_a_rule_that_observes_changes_no_key(core: Core) -> None:
    assert core.serve("plain", PROMPT) == COLD

    on(core, "watch", then="observe")

    assert core.serve("watched", PROMPT) == WARM


def test_a_rule_with_a_state_lets_nothing_be_read_from_the_cache(core: Core) -> None:
    on(core, "latch", scope="rest_of_request")

    assert core.serve("one", PROMPT) == COLD
    assert core.serve("two", PROMPT) == COLD
    off(core, "latch")
    on(core, "watch", scope="rest_of_request", then="observe")
    assert core.serve("three", PROMPT) == COLD


@pytest.mark.parametrize("turns_on", [True, False], ids=["on", "off"])
def test_blocks_of_a_request_that_met_a_change_are_nobody_elses_from_there_on(core: Core, turns_on: bool) -> None:
    if not turns_on:
        on(core, "calm")
    start(core, "a")

    on(core, "calm") if turns_on else off(core, "calm")
    core.run()

    assert core.worker.computed["a"] == len(PROMPT) + ANSWER - 1  # nothing was computed anew
    history = [*PROMPT, *core.tokens["a"], 7]
    assert core.serve("next turn", history) == len(history)
    off(core, "calm") if turns_on else on(core, "calm")
    assert core.serve("as before", history) == len(history) - 3 * BLOCK  # those of the prompt
    core.run()


def test_preempted_after_a_change_a_request_is_computed_under_the_present_rules(core: Core) -> None:
    start(core, "a")
    on(core, "calm")
    for _ in range(3):
        core.step()

    core.set_global(decode=core.vectors(3))  # restarts whatever runs
    core.run()

    assert core.ended["a"] == "length"
    history = [*PROMPT, *core.tokens["a"], 7]
    assert core.serve("next turn", history) == len(history)  # no other request finds the blocks of "a"
    assert core.serve("again", history) < len(history)


def test_two_changes_while_a_request_waits_and_one_runs(core: Core) -> None:
    start(core, "a")
    core.add("b", PROMPT, script=SCRIPT, max_tokens=3)
    on(core, "calm")
    core.step()
    on(core, "calm", then={"vectors": {"post_mlp": {"0": np.full(core.hidden_size, 2.0, np.float32)}}})
    core.run()

    assert (core.ended["a"], core.ended["b"]) == ("length", "length")


def test_a_change_that_a_worker_refuses_is_undone(core: Core) -> None:
    on(core, "calm")
    before = core.done("status")
    core.worker.failing.add("set_rules")

    with pytest.raises(RuntimeError, match="fails as it was told to"):
        core.call("register_rule", name="other", rule=wire(core, "other"))

    after = core.done("status")
    assert (after["rules"], after["slots"]) == (before["rules"], before["slots"])
    assert [rule["name"] for rule in core.worker._rules] == ["calm"]


def test_slots_of_a_rule_are_reserved_while_it_is_registered(core: Core) -> None:
    on(core, "calm")

    assert core.done("status")["slots"]["reserved"] > 0
    off(core, "calm")
    assert core.done("status")["slots"]["reserved"] == 0


def test_rules_and_their_columns_are_limited(core: Core) -> None:
    for index in range(8):
        on(core, f"rule {index}")

    refused = core.refused("register_rule", name="more", rule=wire(core, "more"))

    assert refused["field"] == "name"
    assert "8 rules are registered" in refused["message"]
    off(core, "rule 3")
    assert on(core, "more")["name"] == "more"


def test_a_session_runs_without_rules(core: Core) -> None:
    core.add("session", PROMPT, resumable=True)

    on(core, "asked", applies_to="opt_in")
    assert "session" in core.scheduler.requests  # it has not asked for that rule
    on(core, "calm")

    assert "session" not in core.scheduler.requests
    core.run()
