"""The engine core's half of steering, without an engine: what it asks of the workers, and what is undone."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from headgate.capture.engine.contracts.core_calls import frame_of
from headgate.capture.engine.contracts.core_part import CoreFacts
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError, OverloadedError, RequestError
from headgate.capture.schema.sites import Site
from headgate.steering.config import SteeringConfig, parse_config
from headgate.steering.core.steering_core import SteeringCore, open_core
from headgate.steering.files.vector_files import VectorFile, save
from headgate.steering.spec import ModuleRef, SteeringSpec, from_wire, to_wire
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.steering_tables import CONFIGS, HIDDEN, vectors

FACTS = CoreFacts(model=ModelInfo(name="m", num_layers=2, hidden_size=HIDDEN, dtype="bfloat16", sites=()))
NAMED = to_wire(SteeringSpec(modules=(ModuleRef("calm", 2.0),)))


class Workers:
    """Services that note what is asked of them.

    Attributes:
        calls: Methods and arguments.
        failing: How many of the next calls fail.
        restarts: Requests were restarted so often.
        failed: Why the engine was to end.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.failing = 0
        self.restarts = 0
        self.failed: list[str] = []
        self.is_restartable = True

    def call_workers(self, method: str, args: Mapping[str, Any]) -> list[Any]:
        self.calls.append((method, args))
        if self.failing:
            self.failing -= 1
            raise RuntimeError("worker 1")
        return [None]

    def prepare_change(self, field: str) -> None:
        if not self.is_restartable:
            raise RequestError(field, "not now")

    def rekey_running(self) -> dict[str, int]:
        return {}

    def restart_running(self) -> None:
        self.restarts += 1

    def fail(self, reason: str) -> None:
        self.failed.append(reason)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def core(workers: Workers) -> SteeringCore:
    return SteeringCore("bfloat16", 8, workers, SteeringConfig())


def both(made: PhaseVectors) -> dict[str, Any]:
    return to_wire(SteeringSpec(prefill=made, decode=made))


def tier(made: PhaseVectors) -> dict[str, Any]:
    return to_wire(SteeringSpec(prefill=made))


def test_what_does_not_steer_is_left_alone(core: SteeringCore) -> None:
    assert core.accept("r", None, 10) is None
    assert core.block_keys("r") is None
    assert core.offer("r", priority=0, is_session=True, is_offline=False)
    core.release("r")


def test_workers_get_the_content_of_names_and_their_scales(core: SteeringCore) -> None:
    core.call("register", {"name": "calm", "spec": to_wire(SteeringSpec(decode=CONFIGS[1]))})
    taken = core.accept("r", NAMED, 10)

    assert taken == {**NAMED, "decode_parts": [[CONFIGS[1].key, 2.0]]}
    assert "decode_parts" not in NAMED
    keys = core.block_keys("r")
    assert keys is not None
    assert keys.of_block(0, 4, 4) == ()
    ((tag, name),) = keys.of_block(4, 8, 4)
    assert (tag, len(name)) == ("headgate", 64)  # a whole SHA-256


def test_a_request_is_taken_once(core: SteeringCore) -> None:
    core.accept("r", both(CONFIGS[0]), 10)
    with pytest.raises(AssertionError, match="taken already"):
        core.accept("r", both(CONFIGS[0]), 10)
    core.forget("r")
    core.accept("r", both(CONFIGS[0]), 10)


def test_contents_are_forgotten_when_their_last_user_is_gone(core: SteeringCore, workers: Workers) -> None:
    core.call("register", {"name": "calm", "spec": both(CONFIGS[0])})
    core.accept("r", NAMED, 10)
    core.offer("r", priority=0, is_session=False, is_offline=False)
    core.call("register", {"name": "calm", "spec": both(CONFIGS[1])})
    assert workers.methods == ["keep_module", "keep_module"]
    core.release("r")
    core.call("status", {})
    assert workers.calls[2:] == [("forget", {"keys": [CONFIGS[0].key]})]
    core.call("unregister", {"name": "calm"})
    assert workers.calls[3:] == [("release_module", {"name": "calm"}), ("forget", {"keys": [CONFIGS[1].key]})]


def test_slots_wait_and_are_handed_on(core: SteeringCore) -> None:
    for name, made in (("a", vectors(dict.fromkeys(range(6), 5.0))), ("b", vectors({i: 9.0 + i for i in range(6)}))):
        core.accept(name, both(made), 10)
    assert core.offer("a", priority=0, is_session=False, is_offline=False)
    assert not core.offer("b", priority=0, is_session=False, is_offline=False)
    assert core.call("status", {})["waiting"] == 1
    assert core.admit() == []
    core.release("a")
    assert core.admit() == ["b"]
    assert core.withdraw(None) == []
    core.release("b")
    assert core.call("status", {})["slots"] == {"capacity": 8, "reserved": 0}


def test_counts_are_those_of_the_status_without_its_lists(core: SteeringCore) -> None:
    core.call("register", {"name": "calm", "spec": both(vectors({0: 1.0}))})
    core.call("set_global", {"tiers": {"decode": tier(vectors({0: 2.0, 1: 3.0}))}, "replace": True})
    for name, made in ((name, vectors({2: 5.0 + index})) for index, name in enumerate("abc")):
        core.accept(name, both(made), 10)
        core.offer(name, priority=0, is_session=False, is_offline=False)

    counts, status = core.call("counts", {}), core.call("status", {})

    assert counts == {
        "slots": status["slots"]["capacity"],
        "slots_reserved": status["slots"]["reserved"],
        "configs": status["configs"],
        "requests_running": status["running"],
        "requests_waiting": status["waiting"],
        "modules": len(status["modules"]),
        "global_vectors": sum(map(len, status["global"]["sites"].values())),
        "rule_rows": {},
        "gate_rows": {},
        "controllers": {},
    }
    assert (counts["requests_running"], counts["modules"], counts["global_vectors"]) == (2, 1, 2)
    assert counts["requests_waiting"] == 1


def test_the_log_says_when_requests_wait(core: SteeringCore, caplog: pytest.LogCaptureFixture) -> None:
    core.accept("a", both(CONFIGS[3]), 10)
    core.offer("a", priority=0, is_session=False, is_offline=False)
    with caplog.at_level(logging.WARNING, "headgate"):
        for i in range(3):
            core.accept(f"b{i}", both(CONFIGS[4]), 10)
            core.offer(f"b{i}", priority=0, is_session=False, is_offline=False)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "1 requests wait for vector slots; 6 of 8 are reserved" in record.message


def test_global_vectors_go_to_the_workers_as_phases(core: SteeringCore, workers: Workers) -> None:
    status = core.call(
        "set_global", {"tiers": {"base": tier(CONFIGS[0]), "prefill": None, "decode": None}, "replace": True}
    )
    ((method, args),) = workers.calls
    spec = from_wire(args["spec"])
    assert (method, workers.restarts) == ("set_global", 1)
    assert (spec.prefill, spec.decode) == (CONFIGS[0], CONFIGS[0])
    assert status["global"]["hash"] == {"prefill": CONFIGS[0].key.hex(), "decode": CONFIGS[0].key.hex()}
    keys = core.block_keys("anyone")
    assert keys is not None
    assert keys.of_block(0, 4, 100) == (("headgate", CONFIGS[0].key.hex()),)

    core.call("set_global", {"tiers": {"base": tier(CONFIGS[0])}, "replace": False})
    assert (len(workers.calls), workers.restarts) == (1, 1)  # nothing is new
    core.call("clear_global", {})
    assert workers.calls[1:] == [("set_global", {"spec": {}})]
    assert (core.block_keys("anyone"), workers.restarts) == (None, 2)


def test_a_change_that_cannot_restart_requests_is_refused_before_it_begins(
    core: SteeringCore, workers: Workers
) -> None:
    workers.is_restartable = False
    with pytest.raises(RequestError, match="not now"):
        core.call("set_global", {"tiers": {"base": tier(CONFIGS[0])}, "replace": True})
    assert (workers.calls, core.call("status", {})["slots"]["reserved"]) == ([], 0)


CHANGES = {
    "global": ("set_global", {"tiers": {"base": tier(CONFIGS[1])}, "replace": True}),
    "new": ("register", {"name": "new", "spec": both(CONFIGS[1])}),
    "again": ("register", {"name": "calm", "spec": both(CONFIGS[1])}),
    "unregister": ("unregister", {"name": "calm"}),
}
UNDONE = {
    "global": ("set_global", {"spec": {}}),
    "new": ("release_module", {"name": "new"}),
    "again": ("keep_module", {"name": "calm", "spec": both(CONFIGS[0])}),
    "unregister": ("keep_module", {"name": "calm", "spec": both(CONFIGS[0])}),
}


@pytest.mark.parametrize("change", [*CHANGES])
def test_a_worker_that_fails(core: SteeringCore, workers: Workers, change: str) -> None:
    core.call("register", {"name": "calm", "spec": both(CONFIGS[0])})
    before = core.call("status", {})
    workers.failing = 1
    with pytest.raises(RuntimeError, match="worker 1"):
        core.call(*CHANGES[change])
    assert workers.calls[-1] == UNDONE[change]
    assert core.call("status", {}) == before
    assert (workers.failed, workers.restarts) == ([], 0)

    workers.failing = 2
    with pytest.raises(RuntimeError, match="worker 1"):
        core.call(*CHANGES[change])
    (reason,) = workers.failed
    assert "workers may differ" in reason


def test_sessions_are_refused_when_anything_acts_on_them(core: SteeringCore) -> None:
    core.accept("s", both(CONFIGS[0]), 10)
    with pytest.raises(RequestError, match="streaming-input sessions"):
        core.offer("s", priority=0, is_session=True, is_offline=False)
    core.release("s")
    core.call("set_global", {"tiers": {"decode": tier(CONFIGS[0])}, "replace": True})
    with pytest.raises(RequestError, match="streaming-input sessions"):
        core.offer("t", priority=0, is_session=True, is_offline=False)


@pytest.mark.parametrize(
    ("method", "args", "field"),
    [
        ("nothing", {}, "method"),
        ("unregister", {"name": "nobody"}, "name"),
        ("register", {"name": "", "spec": both(CONFIGS[0])}, "name"),
        ("register", {"name": "m", "spec": NAMED}, "module"),
    ],
)
def test_calls_that_are_refused(
    core: SteeringCore, workers: Workers, method: str, args: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as info:
        core.call(method, args)
    assert (info.value.field, workers.calls) == (field, [])


def test_modules_of_the_configuration_are_there_from_the_start(tmp_path: Path, workers: Workers) -> None:
    path = tmp_path / "calm.safetensors"
    save(path, VectorFile(decode_vectors=CONFIGS[0]))
    core = open_core(FACTS, {"modules": {"calm": str(path)}, "max_steering_slots": 9}, workers)

    (module,) = core.call("modules", {})
    assert (module["name"], module["hash"]["decode"]) == ("calm", CONFIGS[0].key.hex())
    assert workers.methods == ["keep_module"]
    assert core.call("status", {})["slots"] == {"capacity": 8, "reserved": 1}


def test_a_module_may_be_a_file_of_another_tool(tmp_path: Path, workers: Workers) -> None:
    rows = torch.arange(1.0, 2 * HIDDEN + 1).reshape(2, HIDDEN)
    torch.save(rows, tmp_path / "DiffMean_weight.pt")
    section = {"modules": {"calm": f"{tmp_path / 'DiffMean_weight.pt'}@layer=1,concept=1"}}

    (module,) = open_core(FACTS, section, workers).call("modules", {})

    expected = PhaseVectors.from_rows({Site.parse("1.post_mlp"): rows[1].numpy()})
    assert expected is not None
    assert module["hash"]["decode"] == module["hash"]["prefill"] == expected.key.hex()


@pytest.mark.parametrize("settings", [{"modules": {"calm": "nowhere.json"}}, {"max_steering_slots": 3}])
def test_a_module_that_cannot_be_loaded_keeps_the_engine_from_starting(
    tmp_path: Path, workers: Workers, settings: dict[str, Any]
) -> None:
    path = tmp_path / "calm.safetensors"
    save(path, VectorFile(vectors=CONFIGS[3]))
    with pytest.raises(ConfigError, match=r"modules\.calm"):
        open_core(FACTS, {"modules": {"calm": str(path)}, **settings}, workers)


def test_requests_with_equal_vectors_hold_one_copy(core: SteeringCore) -> None:
    def arrived() -> dict[str, Any]:
        wire = both(CONFIGS[1])
        return {**wire, "prefill": {**wire["prefill"], "payload": frame_of(bytes(wire["prefill"]["payload"]))}}

    taken = [core.accept(f"r{i}", arrived(), 10) for i in range(3)]

    payloads = [wire["prefill"]["payload"] for wire in taken if wire is not None]
    assert len({id(payload) for payload in payloads}) == 1
    assert payloads[0].tobytes() == bytes(CONFIGS[1].payload)
    last = weakref.ref(payloads[0])
    del taken, payloads
    gc.collect()
    assert last() is None


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def waiting(workers: Workers, clock: Clock, num_waiting: int, *, is_offline: bool = False, **config: Any) -> Any:
    """A core whose eight slots are taken, and others wait: ``w0``, ``w1`` and so on, a second apart."""
    core = SteeringCore("bfloat16", 8, workers, parse_config(config), clock=clock)
    core.accept("runs", both(vectors({i: 50.0 + i for i in range(6)})), 10)
    assert core.offer("runs", priority=0, is_session=False, is_offline=is_offline)
    for i in range(num_waiting):
        core.accept(f"w{i}", both(vectors(dict.fromkeys(range(6), 1.0 + i))), 10)
        assert not core.offer(f"w{i}", priority=0, is_session=False, is_offline=is_offline)
        clock.now += 1
    return core


def test_no_more_than_max_waiting_wait_and_the_next_is_sent_away(workers: Workers) -> None:
    core = waiting(workers, Clock(), 2, max_waiting=2)
    core.accept("late", both(vectors(dict.fromkeys(range(6), 9.0))), 10)

    with pytest.raises(OverloadedError, match=r"2 steered requests wait .*max_waiting.*6 of 8 slots are taken"):
        core.offer("late", priority=0, is_session=False, is_offline=False)
    core.release("late")

    assert core.call("counts", {})["requests_waiting"] == 2
    core.accept("fits", both(vectors({0: 1.0})), 10)
    core.release("runs")
    assert core.admit() == ["w0"]


def test_further_samples_wait_beside_the_first_whatever_the_limit_is(workers: Workers) -> None:
    core = waiting(workers, Clock(), 1, max_waiting=1)
    core.accept("w0 again", both(vectors(dict.fromkeys(range(6), 1.0))), 10)

    assert not core.offer("w0 again", priority=0, is_session=False, is_offline=False)

    core.release("runs")
    assert core.admit() == ["w0", "w0 again"]


def test_who_has_waited_too_long_is_overdue_and_nobody_else(workers: Workers) -> None:
    clock = Clock()
    core = waiting(workers, clock, 4, max_wait_s=10)

    clock.now = 1009.9
    assert core.overdue() == {}
    clock.now = 1011.0
    assert list(core.overdue()) == ["w0", "w1"]
    assert "no vector slots were free for 10 s (steering.max_wait_s); 6 of 8 are taken" in core.overdue()["w0"]

    assert core.withdraw({"w0"}) == ["w0"]
    assert list(core.overdue()) == ["w1"]
    core.release("runs")
    assert core.admit() == ["w1"]
    clock.now += 100
    assert list(core.overdue()) == ["w2", "w3"]


@pytest.mark.parametrize(("is_offline", "num_overdue"), [(True, 0), (False, 1024)])
def test_by_default_an_llm_waits_as_long_as_it_takes(workers: Workers, is_offline: bool, num_overdue: int) -> None:
    clock = Clock()
    core = waiting(workers, clock, 1024, is_offline=is_offline)
    core.accept("one more", both(vectors(dict.fromkeys(range(6), -9.0))), 10)

    clock.now += 10_000
    assert len(core.overdue()) == num_overdue
    if is_offline:
        assert not core.offer("one more", priority=0, is_session=False, is_offline=True)
    else:
        with pytest.raises(OverloadedError):
            core.offer("one more", priority=0, is_session=False, is_offline=False)
