"""Rows that are left in the ring for a while, and the ends of requests that wait for them."""

from __future__ import annotations

import threading
import time

import pytest

from headgate.capture import local_delivery
from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import ConsumerContext
from headgate.capture.session import lingers, open_session
from headgate.consumers.filesystem import FilesystemConsumer
from tests.fakes import capture_world
from tests.fakes.capture_world import SITES, Keeper, make_staging, make_world, want, world
from tests.fakes.pipeline import MODEL, TIMEOUT_S, final_state

LONG_S = 1.0


class Hasty(Keeper):
    linger_s = 0.1


class Patient(Keeper):
    linger_s = 0.9


def test_an_end_waits_for_the_rows_that_are_left_in_the_ring() -> None:
    keeper, staging = Keeper(), make_staging()
    with world((keeper, {}), staging=staging, linger_s=LONG_S) as it:
        for req_id in ("a", "b"):
            it.add(req_id, {"c0": want()})
        it.step(a=(0, 4), b=(0, 4))
        for position in (4, 5):
            it.step(a=(position, position + 1), b=(position, position + 1))

        it.session.request_finished("a", final_state(num_tokens=7))
        assert (staging.num_kept_rows, staging.staged_bytes) == (12, 0)  # "b" runs: there will be more steps

        it.session.request_finished("b", final_state(num_tokens=7))
        assert staging.num_kept_rows == 0  # there may be none

        assert {result.status for result in it.sender.wait(2)} == {"ok"}
    assert [captured.positions.tolist() for captured in keeper.captured] == [[0, 1, 2, 3, 4, 5]] * 2


def test_an_end_does_not_wait_for_requests_that_have_stopped() -> None:
    staging = make_staging()
    with world((Keeper(), {}), staging=staging, linger_s=LONG_S) as it:
        for req_id in ("a", "b"):
            it.add(req_id, {"c0": want()})
        it.step(a=(0, 4), b=(0, 4))

        it.session.request_stopped("a")
        assert staging.num_kept_rows == 8
        it.session.request_stopped("b")
        assert staging.num_kept_rows == 0  # no step will follow

        it.session.request_finished("a", final_state())  # how "b" ended is not known yet
        (result,) = it.sender.wait(1)
    assert (result.status, result.num_rows) == ("ok", 4)


def test_the_end_of_a_request_whose_client_waits_does_not() -> None:
    staging = make_staging()
    with world((Keeper(), {}), staging=staging, linger_s=LONG_S) as it:
        it.add("patient", {"c0": want()})
        it.add("waits", {"c0": want()}, wait=True)
        it.step(patient=(0, 4), waits=(0, 4))

        it.session.request_finished("waits", final_state(num_tokens=5))

        assert staging.num_kept_rows == 0
        (result,) = it.sender.wait(1)
    assert (result.status, result.num_rows) == ("ok", 4)


@pytest.mark.parametrize("is_process", [True, False])
def test_a_capture_process_delivers_an_end_at_once(monkeypatch: pytest.MonkeyPatch, is_process: bool) -> None:
    """Others run, whose rows would wait; on threads of the worker the end waits for a moment, too."""
    monkeypatch.setattr(local_delivery, "END_LINGER_S", 0.5)
    monkeypatch.setattr(capture_world, "NUM_READERS", int(is_process))
    with world((Keeper(), {}), linger_s=LONG_S) as it:
        it.add("runs", {"c0": want()})
        it.add("ends", {"c0": want()}, wait=True)
        it.step(runs=(0, 4), ends=(0, 4))

        started = time.monotonic()
        it.session.request_finished("ends", final_state(num_tokens=5))
        (result,) = it.sender.wait(1)

        assert (result.status, result.num_rows) == ("ok", 4)
        assert (time.monotonic() - started < 0.4) == is_process


def test_rows_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, now = make_staging(), [100.0]
    monkeypatch.setattr("headgate.capture.staging.ring.time.monotonic", lambda: now[0])
    with world((Keeper(), {}), staging=staging, linger_s=LONG_S) as it:
        it.add("a", {"c0": want()})
        kept = []
        for position in range(4):
            it.step(a=(position, position + 1))
            kept.append(staging.num_kept_rows)
            now[0] += 0.6 * LONG_S

    assert kept == [1, 2, 0, 1]


def test_many_rows_do_not_wait() -> None:
    staging = make_staging(num_rows=1000, max_tokens=1000, staging_rows=20_000)
    with world((Keeper(), {}), staging=staging, linger_s=LONG_S) as it:
        it.add("a", {"c0": want()}, num_prompt=800)
        it.step(a=(0, 240))
        assert staging.num_kept_rows == 240
        it.step(a=(240, 250))
        assert staging.num_kept_rows == 0  # a quarter of the ring


def test_many_bytes_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = make_staging(num_rows=1000, max_tokens=1000, staging_rows=20_000)
    monkeypatch.setattr("headgate.capture.staging.ring.RING_BYTES", (50 * len(SITES) + 10) * staging.row_bytes)
    with world((Keeper(), {}), staging=staging, linger_s=LONG_S) as it:
        it.add("a", {"c0": want()}, num_prompt=100)
        it.add("b", {"c0": want(sites=SITES[:1])}, num_prompt=100)
        it.step(a=(0, 50), b=(0, 9))
        assert staging.num_kept_rows == 59
        it.step(b=(9, 10))
        assert staging.num_kept_rows == 0


def test_rows_wait_as_long_as_every_consumer_that_runs_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, now = make_staging(), [100.0]
    monkeypatch.setattr("headgate.capture.staging.ring.time.monotonic", lambda: now[0])
    kept = []

    def step(seconds: float, **spans: tuple[int, int]) -> None:
        it.step(**spans)
        kept.append(staging.num_kept_rows)
        now[0] += seconds

    with world((Patient(), {}), (Hasty(), {}), staging=staging, linger_s=None) as it:
        it.add("patient", {"c0": want()})
        step(0.5, patient=(0, 1))
        it.add("both", {"c0": want(), "c1": want()})
        step(0.05, patient=(1, 2), both=(0, 1))  # the first row has waited for longer than the new request's may
        step(0.05, patient=(2, 3), both=(1, 2))
        it.session.request_finished("both", final_state(4, 3))
        step(0.2, patient=(3, 4))
        step(0, patient=(4, 5))  # rows of "both" have waited for longer than they may, though it is over
        step(0.8, patient=(5, 6))
        step(0.2, patient=(6, 7))
        step(0, patient=(7, 8))

    assert kept == [1, 0, 2, 3, 0, 1, 2, 0]


@pytest.mark.threads_only
def test_a_stand_in_waits_as_the_consumer_in_the_driver_does() -> None:
    def allowed(linger_s: float | None = None) -> float:
        config = CaptureConsumersConfig(consumers=(spec,), linger_s=linger_s)
        session = open_session(config=config, model=MODEL, sites=SITES, staging=make_staging())
        assert session.close(TIMEOUT_S).is_clean
        return session._window.least

    def alone(linger_s: float | None = None) -> float:
        return lingers(CaptureConsumersConfig(linger_s=linger_s), {0: Patient})[0]

    spec = CaptureConsumerSpec(name="filesystem", location="driver", params={"root": "/data"})
    context = ConsumerContext(instance_name="", model=MODEL)
    (stand_in,) = local_delivery._stand_ins({3: spec}, context, sender=None)

    assert (stand_in.bit, stand_in.consumer.location) == (3, "driver")
    assert allowed() == FilesystemConsumer.linger_s != type(stand_in.consumer).linger_s
    assert (alone(), alone(0.5), allowed(0.5)) == (Patient.linger_s, 0.5, 0.5)


def test_an_id_that_begins_again_does_not_mix_with_what_waits() -> None:
    keeper = Keeper()
    with world((keeper, {}), linger_s=LONG_S) as it:
        it.add("other", {"c0": want()}, num_prompt=2)
        it.add("a", {"c0": want()}, number=1, key="first")
        it.step(a=(0, 4), other=(0, 1))
        it.session.request_finished("a", final_state(num_tokens=5))

        it.add("a", {"c0": want()}, num_prompt=3, number=2, key="second")
        it.step(a=(0, 3), other=(1, 2))
        it.session.request_finished("a", final_state(3, 4))
        it.session.request_finished("other", final_state(2, 3))

        it.sender.wait(3)
    results = {message["key"]: message["result"] for message in it.sender.sent}
    assert {results["first"].num_rows, results["second"].num_rows} == {4, 3}
    assert {result.status for result in results.values()} == {"ok"}


def test_closing_on_the_step_thread_delivers_what_waits() -> None:
    keeper = Keeper()
    it = make_world((keeper, {}), linger_s=LONG_S)
    for req_id in ("a", "runs"):
        it.add(req_id, {"c0": want()})
    it.step(a=(0, 4), runs=(0, 4))
    it.session.request_finished("a", final_state(num_tokens=5))

    it.session.close(TIMEOUT_S)

    results = {message["key"]: message["result"] for message in it.sender.sent}
    assert (results["key-a"].status, results["key-a"].num_rows) == ("ok", 4)
    assert "shut down before the request had ended" in str(results["key-runs"].error)


def test_closing_on_another_thread_ends_what_waits_with_an_error() -> None:
    it = make_world((Keeper(), {}), linger_s=LONG_S)
    for req_id in ("a", "runs"):
        it.add(req_id, {"c0": want()})
    it.step(a=(0, 4), runs=(0, 4))
    it.session.request_finished("a", final_state(num_tokens=5))

    closing = threading.Thread(target=it.session.close, args=(TIMEOUT_S,))
    closing.start()
    closing.join(TIMEOUT_S)

    results = {message["key"]: message["result"] for message in it.sender.sent}
    assert results["key-a"].status != "ok"
    assert "4 of 4" in str(results["key-a"].error)
