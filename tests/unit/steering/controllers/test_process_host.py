"""Controllers in a process of their own are told, and answer, as those in the engine core."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.capture.schema.errors import ConfigError
from headgate.steering.controllers import SetSteeringEach, Stop, controller_process
from headgate.steering.controllers.controller_process import ProcessHost
from headgate.steering.controllers.host import Answers, LocalHost
from headgate.steering.controllers.loading import ControllerSpec
from tests.deadlines import patience
from tests.fakes.forks import ADDRESS
from tests.fakes.hosted_controllers import Running, Worker, publish, spec, told_of

TIMEOUT_S = patience(60)
NAMES = {"all": ["one", "two"], "some": ["one"]}
NUMBERS = {"all": [0, 1], "some": [2]}


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugins")
    publish(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.delenv(ADDRESS, raising=False)  # processes begin as they do for users
        yield


class Pair:
    """A host of each kind, with the same controllers."""

    def __init__(self, specs: list[ControllerSpec], numbers: dict[str, list[int]]) -> None:
        self.worker, self.number = Worker(numbers), 0
        size = self.worker.size
        self.local = LocalHost(specs, self.worker.tokens_of)
        self.apart = ProcessHost(specs, self.worker.progress, slice(0, size))
        names: Any = {name: list(each.probes) for name, each in self.local.loaded.items()}
        for host in (self.local, self.apart):
            host.start({name: dict(zip(names[name], numbers[name], strict=True)) for name in names})

    def add(self, req_id: str, num_prompt: int, acting: tuple[str, ...]) -> None:
        self.worker.requests[req_id] = Running(num_prompt, acting, list(range(100, 100 + num_prompt)))
        if acting:
            for host in (self.local, self.apart):
                host.add(req_id, num_prompt, acting)

    def end(self, req_id: str) -> None:
        del self.worker.requests[req_id]
        for host in (self.local, self.apart):
            host.end(req_id)

    def step(self, rows: dict[str, int], discarded: frozenset[str] = frozenset()) -> tuple[Answers, Answers]:
        """A step for both hosts; what the engine core does with its tokens comes before what controllers answer."""
        table = self.worker.step(rows)
        self.number += 1
        for host in (self.local, self.apart):
            host.read(table, discarded, self.number)
        self.worker.generate(set(rows) - discarded)
        return self.local.take(), self.apart.take()


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "no tokens"])
def telling(request: pytest.FixtureRequest) -> Pair:
    is_told: bool = request.param
    specs = [
        spec("telling", "all", names=NAMES["all"], needs_tokens=is_told, never_waits=True),
        spec("telling", "some", names=NAMES["some"], needs_tokens=is_told),
    ]
    return Pair(specs, NUMBERS)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 5), st.sampled_from([("all",), ("all", "some"), ("some",), ()])),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("chunk"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.integers(0, 5)),
    ),
    min_size=2,
    max_size=25,
)
_serial = iter(range(10**9))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_it_is_told_what_a_local_one_is_told(telling: Pair, actions: list[tuple[Any, ...]]) -> None:
    worker = telling.worker
    for action in actions:
        running = list(worker.requests)
        if action[0] == "add" and len(running) < 6:
            telling.add(f"r{next(_serial)}", action[1], action[2])
        elif action[0] == "end" and running:
            telling.end(running[action[1] % len(running)])
        elif action[0] == "restart" and running:  # preempted: all its rows are computed again
            worker.requests[running[action[1] % len(running)]].done = 0
        elif action[0] in ("steps", "chunk", "discard") and running:
            for _ in range(action[1] if action[0] == "steps" else 1):
                limit = action[1] if action[0] == "chunk" else 99
                left = {name: len(each.tokens) - each.done for name, each in worker.requests.items()}
                rows = {name: min(limit, number) for name, number in left.items() if number}
                dropped = frozenset([running[action[1] % len(running)]]) if action[0] == "discard" else frozenset()
                local, apart = telling.step(rows, dropped)
                for name in dropped:
                    worker.requests[name].done -= rows.get(name, 0)
                assert told_of(apart.actions) == told_of(local.actions)
    for name in list(worker.requests):
        telling.end(name)


def test_scales_for_many_requests_come_as_the_controller_gave_them() -> None:
    pair = Pair([spec("setting", "all", names=["one"], never_waits=True)], {"all": [0]})
    for at in range(5):
        pair.add(f"s{at}", 1, ("all",))
    num_compared = 0
    for number in range(60):
        local, apart = pair.step(dict.fromkeys(pair.worker.requests, 1))
        assert len(local.actions) == len(apart.actions)
        for (_, one, _), (name, other, _) in zip(local.actions, apart.actions, strict=True):
            assert name == "all"
            assert type(one) is type(other)
            if isinstance(one, SetSteeringEach) and isinstance(other, SetSteeringEach):
                assert one.requests == other.requests
                assert (one.at is None) == (other.at is None)
                np.testing.assert_array_equal(one.scales, other.scales)
                if one.at is not None:
                    np.testing.assert_array_equal(one.at, other.at)
                num_compared += 1
        if number == 30:
            pair.end("s2")
    assert num_compared > 50


@pytest.mark.parametrize(("how", "message"), [("raise", "raised RuntimeError: no more"), ("die", "ended by SIGKILL")])
def test_one_that_fails_is_switched_off_and_the_engine_core_goes_on(how: str, message: str) -> None:
    host = Pair([spec("failing", "all", how=how)], {"all": [0]})
    host.add("f", 1, ("all",))
    table = host.worker.step({"f": 1})
    host.apart.read(table, (), 1)
    host.worker.generate(["f"])
    found = host.apart.take()

    (off,) = found.switched_off
    assert off.controller == "all"
    assert message in off.error
    assert message in (host.apart.figures()["all"].error or "")
    host.apart.read(host.worker.step({"f": 1}), (), 2)
    host.apart.end("f")
    assert host.apart.take() == Answers()


def test_an_action_that_cannot_leave_the_process_is_dropped_alone() -> None:
    pair = Pair([spec("failing", "all", how="odd")], {"all": [0]})
    pair.add("x", 1, ("all",))
    table = pair.worker.step({"x": 1})
    pair.apart.read(table, (), 1)

    assert pair.apart.take().actions == [("all", Stop("x", "well"), 1)]
    assert pair.apart.figures()["all"].dropped == 1
    assert pair.apart.figures()["all"].error is None


def test_one_that_hangs_costs_a_budget_once_and_is_switched_off_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_process, "HANGS_S", 0.2)
    pair = Pair([spec("failing", "all", budget_ms=20, how="hang")], {"all": [0]})
    pair.add("h", 1, ("all",))
    host, found, waited_s = pair.apart, Answers(), []
    while not found.switched_off:
        table = pair.worker.step({"h": 1})
        host.read(table, (), 1)
        pair.worker.generate(["h"])
        began = time.perf_counter()
        found = host.take()
        waited_s.append(time.perf_counter() - began)

    assert "has not returned from a step" in found.switched_off[0].error
    assert host.figures()["all"].skipped > 0
    assert waited_s[0] >= 0.02, "the others are waited for no more: see test_lateness"


def test_a_process_that_cannot_serve_says_why_at_the_start(tmp_path: Any) -> None:
    def started(*specs: ControllerSpec) -> None:
        ProcessHost(specs, lambda _: None, slice(0, 1))

    with pytest.raises(ConfigError, match="'nobody': no entry point of that name"):
        started(spec("nobody", "x"))
    with pytest.raises(ConfigError, match=r"failed: TypeError: .*unexpected keyword argument 'wrong'"):
        started(spec("failing", "x", wrong=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(ConfigError, match="did not start"):
            started(spec("failing", "x", how="raise"))


ORPHANING = """
import sys, time
sys.path[:0] = {path!r}
from tests.fakes.hosted_controllers import spec
from tests.unit.steering.controllers.test_process_host import Pair
pair = Pair([spec("failing", "all", budget_ms=500, how="hang")], {{"all": [0]}})
pair.add("h", 1, ("all",))
table = pair.worker.step({{"h": 1}})
pair.apart.read(table, (), 1)
pair.apart.take()
print(pair.apart._process._process.child.pid, flush=True)
time.sleep(600)
"""


def test_one_that_hangs_ends_when_the_engine_core_is_killed() -> None:
    script = ORPHANING.format(path=[path for path in sys.path if path])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine_core:
        assert engine_core.stdout is not None
        child = int(engine_core.stdout.readline())
        ends = os.pidfd_open(child)
        engine_core.kill()

    try:
        assert select.select([ends], [], [], TIMEOUT_S)[0], "it lives on"
    finally:
        os.close(ends)
