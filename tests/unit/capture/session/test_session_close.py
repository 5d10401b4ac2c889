"""The beginning and the end of a session: what is opened, what is delivered, what is left, and no thread stays."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

import pytest

from headgate.capture.delivery.consumer_queue import UnfinishedWork
from headgate.capture.delivery.delivery import CloseReport
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.errors import ConfigError
from headgate.capture.session import open_session
from tests.fakes.capture_world import Keeper, make_staging, make_world, want, world
from tests.fakes.pipeline import MODEL, ROW_BYTES, SITES, TIMEOUT_S, Gate, Recorder, at_gate, final_state, when_it_waits
from tests.fakes.published import install_plugin
from tests.unit.capture.schema.test_registry import CONSUMER

CLEAN = UnfinishedWork()


def test_closing_delivers_everything_that_ended_before() -> None:
    keeper = Keeper()
    it = make_world((keeper, {}))

    for number in range(20):
        it.add(f"r{number}", {"c0": want()})
        it.step(**{f"r{number}": (0, 4)})
        it.session.request_finished(f"r{number}", final_state(4))
    report = it.session.close(TIMEOUT_S)

    assert report == CloseReport(consumers={"c0": CLEAN})
    assert report.is_clean
    assert len(keeper.captured) == 20
    assert {message["result"].status for message in it.sender.sent} == {"ok"}


def test_closing_tells_requests_that_are_still_running() -> None:
    it = make_world((Keeper(), {}))

    it.add("a", {"c0": want()})
    it.step(a=(0, 4))
    report = it.session.close(TIMEOUT_S)

    assert report.consumers == {"c0": UnfinishedWork(unfinished=1)}
    assert "shut down before the request had ended" in str(it.sender.sent[0]["result"].error)


def test_closing_again_changes_nothing_and_later_calls_are_ignored() -> None:
    keeper = Keeper()
    it = make_world((keeper, {}))
    report = it.session.close(TIMEOUT_S)

    it.add("a", {"c0": want()})
    it.step(a=(0, 4))
    it.session.request_finished("a", final_state(4))

    assert it.session.close(TIMEOUT_S) is report
    assert (keeper.captured, it.sender.sent, it.session.stats().steps) == ([], [], 0)


def test_a_hanging_consumer_costs_the_close_its_time_and_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gate, keeper = Gate(), Keeper()
    hanging = Recorder(at_gate(gate, "write"))
    it = make_world((hanging, {}), (keeper, {}))
    it.add("a", {"c0": want(), "c1": want()})
    it.step(a=(0, 4))
    it.session.request_finished("a", final_state(4))
    gate.wait_reached()
    started = time.monotonic()

    with caplog.at_level(logging.WARNING, "headgate"):
        report = it.session.close(0.2)

    assert time.monotonic() - started < TIMEOUT_S / 2
    assert report.consumers == {"c0": UnfinishedWork(unfinished=1, is_stuck=True), "c1": CLEAN}
    assert "capture was closed before everything was delivered" in caplog.text
    results = {message["instance"]: message["result"].status for message in it.sender.sent}
    assert results == {"c0": "error", "c1": "ok"}
    gate.opened.set()


@pytest.mark.threads_only
def test_a_full_queue_does_not_keep_the_dispatch_thread_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, keeper = Gate(), Keeper()
    slow = Recorder(at_gate(gate, "write"))
    it = make_world((slow, {"queue_bytes": 1}), (keeper, {}))
    waits = when_it_waits(it.session._delivery._consumers[0].queue._changed, monkeypatch)
    it.add("a", {"c0": want(), "c1": want()})
    for position in range(4):
        it.step(a=(position, position + 1))
    it.session.request_finished("a", final_state(4))
    assert waits.wait(TIMEOUT_S)

    report = it.session.close(0.2)

    assert not report.is_dispatch_stuck
    assert report.consumers["c1"] == CLEAN
    assert {m["instance"]: m["result"].status for m in it.sender.sent} == {"c0": "error", "c1": "ok"}
    gate.opened.set()


@pytest.mark.threads_only
def test_a_stalled_engine_goes_on_when_the_consumer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, staging = Gate(), make_staging(staging_rows=32)
    slow = Recorder(at_gate(gate, "write"))
    stalls = when_it_waits(staging.memory.arena._freed, monkeypatch)
    thread = threading.Thread(target=lambda: stalls.wait(TIMEOUT_S) and gate.opened.set())

    with world((slow, {"queue_bytes": 1}), staging=staging) as it:
        thread.start()
        it.add("a", {"c0": want()}, num_prompt=40)
        for position in range(40):
            it.step(a=(position, position + 1))
        it.session.request_finished("a", final_state(40))
        (result,) = it.sender.wait()
        thread.join(TIMEOUT_S)

    assert (result.status, result.num_rows) == ("ok", 40)
    assert it.session.stats().stalls >= 1


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package with a worker-located consumer, `good`, and a driver-located one, `far`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install_plugin(tmp_path, "acme", CONSUMER, {"good": "Good", "far": "Driver"})
    yield
    sys.modules.pop("consumers_of_acme", None)


@pytest.mark.threads_only
@pytest.mark.usefixtures("plugins")
def test_a_session_opens_worker_consumers_and_stands_in_for_the_others() -> None:
    config = CaptureConsumersConfig(consumers=(CaptureConsumerSpec(name="far"), CaptureConsumerSpec(name="good")))

    session = open_session(config=config, model=MODEL, sites=SITES, staging=make_staging(), versions={"vllm": "0"})
    report = session.close(TIMEOUT_S)

    assert report == CloseReport(consumers={"far": CLEAN, "good": CLEAN})
    assert sys.modules["consumers_of_acme"].log[1:] == [("open", "good"), ("close", "good")]


@pytest.mark.threads_only
@pytest.mark.usefixtures("plugins")
def test_a_session_that_cannot_open_closes_what_it_opened(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    spill = CaptureConsumerSpec(name="good", overload="spill")
    config = CaptureConsumersConfig(consumers=(spill,), spill_dir=missing)

    with pytest.raises(ConfigError, match="cannot write to"):
        open_session(config=config, model=MODEL, sites=SITES, staging=make_staging())

    assert sys.modules["consumers_of_acme"].log[1:] == [("open", "good"), ("close", "good")]


def test_rows_of_a_step_that_failed_before_its_end_are_missing_and_not_mistaken_for_others() -> None:
    keeper = Keeper()

    with world((keeper, {})) as it:
        it.add("a", {"c0": want()})
        it.step(a=(0, 2))
        it.session.step_begins(it.view(a=(2, 3)))  # the forward raises, and `step_ends` never comes
        it.step(a=(3, 4))
        it.session.request_finished("a", final_state(4))
        (result,) = it.sender.wait()

    assert result.status == "partial_error"
    assert "1 of 4 wanted positions are missing" in str(result.error)
    assert keeper.captured[0].positions.tolist() == [0, 1, 3]
    assert result.num_bytes == 3 * len(SITES) * ROW_BYTES
