"""Who waits for vector slots in the real engine core; that everybody gets there through aborts, preemption, changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from headgate.capture.schema.errors import RequestError
from headgate.steering.spec import SteeringSpec, to_wire
from tests.fakes.steered_core import BLOCK, Core, engine_request, naming

pytestmark = pytest.mark.engine

CAPACITY = 8
SCRIPT = list(range(500, 700))


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Core]:
    """Ten sequences at a time and a few blocks: memory for KV runs out all the time."""
    core = Core(model_dir, asynchronous=request.param, num_gpu_blocks_override=18, max_num_seqs=10, max_model_len=512)
    yield core
    core.close()


@pytest.fixture
def core(engine: Core) -> Iterator[Core]:
    for known in (engine.tokens, engine.ended, engine.worker.computed, engine.worker.acted, engine.worker.calls):
        known.clear()
    yield engine
    engine.check_empty()


def held(core: Core) -> list[str]:
    """Requests that wait outside the scheduler, as they came."""
    from headgate.capture.engine.core.engine_core import adapter_of

    return list(adapter_of(core.core)._waiting)  # type: ignore[union-attr]


def five(core: Core, value: float) -> SteeringSpec:
    """A config of five vectors: one fits, two do not."""
    return core.both(*range(5), value=value)


def test_who_does_not_fit_waits_outside_the_scheduler_and_others_pass(core: Core) -> None:
    core.add("a", [1] * 40, five(core, 1.0), script=SCRIPT, max_tokens=20)
    core.add("b", [1] * 40, five(core, 2.0), script=SCRIPT, max_tokens=5)
    core.add("a2", [1] * 40, five(core, 1.0), script=SCRIPT, max_tokens=5)
    core.add("plain", [1] * 40, script=SCRIPT, max_tokens=5)
    core.step()

    assert (held(core), list(core.scheduler.requests)) == (["b", "a2"], ["a", "plain"])
    status = core.done("status")
    assert (status["slots"], status["waiting"]) == ({"capacity": CAPACITY, "reserved": 5}, 2)
    core.run()
    assert list(core.ended) == ["plain", "a", "b", "a2"]
    assert all(tokens == SCRIPT[: len(tokens)] for tokens in core.tokens.values())


def test_a_request_that_never_fits_is_refused_and_holds_nothing(core: Core) -> None:
    with pytest.raises(RequestError, match="needs 10 vector slots, but only 8 of 8"):
        core.add("r", [1], core.both(*range(10)))
    assert core.done("status")["slots"]["reserved"] == 0
    assert core.serve("r", [1], five(core, 1.0)) == 1


def test_those_that_wait_are_aborted_as_others_are(core: Core) -> None:
    for i in range(4):
        core.add(f"r{i}", [1] * 40, five(core, float(i + 1)), script=SCRIPT, max_tokens=30)
    core.step()
    core.abort("r1", "nobody")
    assert held(core) == ["r2", "r3"]
    core.abort("r0")  # what it had goes to the next
    assert (held(core), list(core.scheduler.requests)) == (["r3"], ["r2"])
    core.run()
    assert core.ended == {"r2": "length", "r3": "length"}
    assert not core.worker.computed["r1"]


def test_who_waits_too_long_ends_with_the_reason_and_the_next_may_enter(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headgate.capture.engine.core.engine_core import adapter_of

    part, now = adapter_of(core.core)._part, 0.0  # type: ignore[union-attr]
    monkeypatch.setattr(part, "_clock", lambda: now)
    core.add("a", [1] * 40, five(core, 1.0), script=SCRIPT, max_tokens=30)
    core.add("b", [1] * 40, core.both(*range(7), value=2.0), script=SCRIPT, max_tokens=5)
    now = 60.0
    core.add("c", [1] * 40, core.both(1, 2), script=SCRIPT, max_tokens=5)
    core.step()
    assert held(core) == ["b", "c"]

    now = 120.0
    core.step()

    assert (held(core), core.ended) == ([], {"b": "error"})
    assert sorted(core.scheduler.requests) == ["a", "c"]
    assert core.stop_reasons["b"].startswith("headgate: overloaded: no vector slots were free for 120 s")
    core.run()
    assert (core.ended["a"], core.ended["c"], core.worker.computed["b"]) == ("length", "length", 0)


def test_everybody_is_aborted_at_once(core: Core) -> None:
    from vllm.v1.request import RequestStatus

    for i in range(4):
        core.add(f"r{i}", [1] * 40, five(core, float(i + 1)), script=SCRIPT, max_tokens=30)
    core.step()
    told = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)

    assert [(request.request_id, str(request.get_finished_reason())) for request in told] == [
        (f"r{i}", "abort") for i in range(4)
    ]
    assert (held(core), list(core.scheduler.requests)) == ([], [])
    core.step_idle()


def test_room_that_a_module_or_the_global_vectors_leave_is_used(core: Core) -> None:
    core.register("big", core.both(*range(6)))
    core.add("named", [1] * 40, naming(("big", 1.0)), script=SCRIPT, max_tokens=4)
    core.set_global(base=core.vectors(7))
    assert core.refused("register", name="more", spec=to_wire(core.both(8, 9)))["field"] == "module"
    core.done("clear_global")
    core.run()
    core.add("a", [1] * 40, core.both(7, 8), script=SCRIPT, max_tokens=30)
    core.add("b", [1] * 40, core.both(9), script=SCRIPT, max_tokens=30)
    assert held(core) == ["b"]
    core.done("unregister", name="big")
    assert held(core) == []
    core.run()


def test_who_waits_in_vain_since_a_module_came_is_sent_away(core: Core) -> None:
    core.add("a", [1] * 40, core.both(*range(3)), script=SCRIPT, max_tokens=10)
    core.add("b", [1] * 40, core.both(*range(7), value=2.0), script=SCRIPT, max_tokens=10)
    assert held(core) == ["b"]
    core.register("two", core.both(8, 9))
    core.run()
    assert (core.ended, held(core)) == ({"b": "error", "a": "length"}, [])
    assert core.stop_reasons["b"].startswith("headgate: overloaded: global vectors, modules or rules have been set")


def test_a_request_refused_at_the_door_since_a_module_came_first(core: Core) -> None:
    queued = core.preprocess(engine_request("r", [1], core.both(*range(7))))
    core.register("two", core.both(8, 9))
    with pytest.raises(RequestError, match="needs 7 vector slots, but only 6 of 8"):
        core.core.add_request(queued)
    assert core.serve("other", [1], core.both(*range(6))) == 1


class Churn:
    """Random work for one engine; what must hold at every moment is checked here and in the worker."""

    def __init__(self, core: Core, seed: int) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.lengths: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.num_refused = 0
        self.num_global_changes = 0
        self.most_held = 0
        self.prompts = [[i] * self.random.randrange(1, 5 * BLOCK) for i in range(4)]

    def play(self, num_requests: int) -> None:
        while len(self.lengths) < num_requests or self.core.is_busy:
            before = held(self.core)
            choices = [self.step] * 12 + [self.abort, self.change_global, self.register, self.unregister]
            if len(self.lengths) < num_requests:
                choices += [self.add] * 6
            self.random.choice(choices)()
            self.check(before)

    def check(self, before: list[str]) -> None:
        now = held(self.core)
        self.most_held = max(self.most_held, len(now))
        # Those that left the queue without being aborted had been there before all that are left.
        gone = {*self.aborted, *self.core.sent_away}
        let_in = [name for name in before if name not in now and name not in gone]
        stayed = [name for name in before if name in now]
        assert not let_in or not stayed or before.index(let_in[-1]) < before.index(stayed[0])
        assert now[: len(stayed)] == stayed
        assert not now or self.core.scheduler.requests, "only requests that wait are left"
        assert self.core.done("status")["slots"]["reserved"] <= CAPACITY

    def step(self) -> None:
        if self.core.is_busy:
            self.core.step()

    def spec(self) -> SteeringSpec:
        kind = self.random.randrange(8)
        layers = sorted(self.random.sample(range(8), self.random.randrange(1, 6)))
        value = float(self.random.randrange(1, 3))
        one, other = self.core.vectors(*layers, value=value), self.core.vectors(*layers[:2], value=3.0)
        if kind in (0, 6, 7):
            return SteeringSpec()
        if kind == 1:
            return SteeringSpec(decode=one)
        if kind == 2:
            return SteeringSpec(prefill=one)
        if kind == 3:
            return SteeringSpec(prefill=one, decode=other)
        if kind == 4:
            return naming((self.random.choice("xyz"), self.random.choice([1.0, -0.5])))
        return SteeringSpec(prefill=one, decode=one)

    def add(self) -> None:
        name, length = f"r{len(self.lengths) + self.num_refused}", self.random.randrange(1, 120)
        prompt = [*self.random.choice(self.prompts), *([9] * self.random.randrange(3)), 8]
        try:
            self.core.add(name, prompt, self.spec(), script=SCRIPT, max_tokens=length)
        except RequestError:  # an unknown module, or no room beside modules and global vectors
            self.num_refused += 1
        else:
            self.lengths[name] = length

    def abort(self) -> None:
        live = [name for name in self.lengths if name not in self.core.ended and name not in self.aborted]
        if live and self.random.random() < 0.5:
            names = self.random.sample(live, min(len(live), self.random.randrange(1, 3)))
            self.aborted.update(names)
            self.core.abort(*names)

    def change_global(self) -> None:
        if self.random.random() < 0.5:
            tiers = {
                name: to_wire(SteeringSpec(prefill=self.core.vectors(self.random.randrange(3))))
                for name in ("base", "prefill", "decode")
                if self.random.random() < 0.4
            }
            answer = self.core.call("set_global", tiers=tiers, replace=self.random.random() < 0.7)
            self.num_global_changes += "ok" in answer

    def register(self) -> None:
        layers = self.random.sample(range(8), self.random.randrange(1, 3))
        spec = self.core.both(*sorted(layers), value=float(self.random.randrange(4, 7)))
        self.core.call("register", name=self.random.choice("xyz"), spec=to_wire(spec))

    def unregister(self) -> None:
        if self.random.random() < 0.4:
            self.core.call("unregister", name=self.random.choice("xyz"))


@pytest.mark.parametrize("seed", range(4))
def test_churn(core: Core, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions, churn = preemptions_of(core, monkeypatch), Churn(core, seed)
    churn.play(200)

    assert churn.most_held >= 5
    assert churn.num_global_changes >= 5
    assert len(churn.aborted) >= 5
    assert max(preemptions.values(), default=0) >= 2
    for name, length in churn.lengths.items():
        assert core.tokens.get(name, []) == SCRIPT[: len(core.tokens.get(name, []))]
        if name not in churn.aborted and name not in core.sent_away:
            assert (core.ended[name], len(core.tokens[name])) == ("length", length)


def preemptions_of(core: Core, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each request was preempted for want of memory, filled in as it goes."""
    counts: dict[str, int] = {}
    original = core.scheduler._preempt_request

    @wraps(original)
    def counted(request: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("drop_stale_output"):
            counts[request.request_id] = counts.get(request.request_id, 0) + 1
        original(request, *args, **kwargs)

    monkeypatch.setattr(core.scheduler, "_preempt_request", counted)
    return counts
