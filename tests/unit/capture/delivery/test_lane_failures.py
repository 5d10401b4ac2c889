"""A consumer that raises, hangs or is shut down: what it costs, and whom."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.delivery import consumer_queue
from headgate.capture.delivery.consumer_queue import UnfinishedWork
from tests.fakes.pipeline import (
    TIMEOUT_S,
    Gate,
    Recorder,
    Reports,
    at_gate,
    close_lane,
    final_state,
    lane_request,
    open_lane,
    packet,
    running,
    send,
    when_it_waits,
)

PACKET_BYTES = packet([(lane_request(), [0])]).num_bytes
"""One row of one request."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The lanes' clock, which the test turns: ``clock.now``. It starts as the real one, by which waits of tests end."""
    clock = SimpleNamespace(now=time.monotonic())
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(consumer_queue, "time", clock)
    return clock


def test_a_request_with_an_unknown_end_is_an_error_and_abandoned() -> None:
    sink, reports, request = Recorder(), Reports(), lane_request()

    with running(sink, reports) as lane:
        lane.begin(request)
        lane.finish(request, None)

    assert sink.names() == ["begin", "abandon", "close"]
    assert reports.wait()["request-1"].status == "error"
    assert "nobody knows how the request ended" in str(reports.wait()["request-1"].error)


@pytest.mark.parametrize("error", [ValueError("bad row"), SystemExit(3)], ids=["exception", "exit"])
@pytest.mark.parametrize("at", ["begin", "write", "finish"])
def test_a_raising_consumer_costs_its_request_and_nobody_else(at: str, error: BaseException) -> None:
    def behave(name: str, detail: Any) -> None:
        if name == at and "request-1" in str(detail):
            raise error

    sink, reports = Recorder(behave), Reports()
    bad, good = lane_request("request-1"), lane_request("request-2")

    with running(sink, reports) as lane:
        for request in (bad, good):
            lane.begin(request)
            send(lane, request, [0, 1, 2, 3])
        send(lane, bad, [4])
        for request in (bad, good):
            lane.finish(request, final_state())
        results = reports.wait(2)

    assert results["request-1"].status == "error"
    assert results["request-1"].error == f"c: {type(error).__name__}: {error}"
    assert results["request-2"].status == "ok"
    assert ("write", [("request-1", [4])]) not in sink.calls or at == "finish"
    assert ("abandon", "request-1") in sink.calls or at == "finish"
    assert lane.stats().errors == 1


def test_a_failing_write_fails_every_request_in_it_and_spares_later_rows_of_others() -> None:
    def behave(name: str, detail: Any) -> None:
        if name == "write" and len(detail) == 2 and detail[0][1] == [0]:
            raise ValueError("no")

    sink, reports = Recorder(behave), Reports()
    first, second, third = (lane_request(f"request-{number}") for number in (1, 2, 3))

    with running(sink, reports) as lane:
        for request in (first, second, third):
            lane.begin(request)
        lane.offer(packet([(first, [0]), (second, [0])]), may_wait=True)
        lane.offer(packet([(first, [1]), (third, [0, 1, 2, 3]), (second, [1])]), may_wait=True)
        for request in (first, second, third):
            lane.finish(request, final_state())
        results = reports.wait(3)

    assert [results[f"request-{number}"].status for number in (1, 2, 3)] == ["error", "error", "ok"]
    assert sink.calls[-3] == ("write", [("request-3", [0, 1, 2, 3])])
    (block,) = sink.blocks
    assert block.rows[0, :, 0].tolist() == [3, 3, 3, 3]


def test_a_consumer_that_fails_to_let_go_fails_nothing_else() -> None:
    def behave(name: str, _detail: Any) -> None:
        if name in ("begin", "abandon", "close"):
            raise ValueError(name)

    reports, request = Reports(), lane_request()
    lane = open_lane(Recorder(behave), reports)

    lane.begin(request)
    lane.finish(request, final_state())
    left = close_lane(lane)

    assert reports.wait()["request-1"].error == "c: ValueError: begin"
    assert left == UnfinishedWork(close_error="c: ValueError: close")


def test_a_call_that_takes_too_long_ends_finished_requests_with_an_error_though_nothing_else_comes(
    clock: SimpleNamespace,
) -> None:
    gate, reports, request = Gate(), Reports(), lane_request()
    sink = Recorder(at_gate(gate, "finish"))

    with running(sink, reports, max_stall_s=5) as lane:
        lane.begin(request)
        lane.finish(request, final_state())
        gate.wait_reached()
        assert lane.watch() == clock.now + 5
        clock.now += 5
        assert lane.watch() is None
        result = reports.wait()["request-1"]
        assert lane.stats().is_hung
        gate.opened.set()

    assert (result.status, result.error) == ("error", "c: hung: one call took longer than 5 s")
    assert (lane.stats().hangs, lane.stats().is_hung) == (1, False)


def test_a_hung_consumer_recovers_for_new_requests_and_lets_go_of_the_old_ones(clock: SimpleNamespace) -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(
        lambda name, detail: gate.pass_through() if name == "write" and "request-1" in str(detail) else None
    )
    stuck, begun, late, fresh = (lane_request(f"request-{number}") for number in range(1, 5))

    with running(sink, reports, max_stall_s=5) as lane:
        lane.begin(begun)
        lane.begin(stuck)
        send(lane, stuck, [0, 1])
        gate.wait_reached()
        send(lane, begun, [0, 1])
        clock.now += 5
        lane.watch()
        lane.begin(late)
        for request in (stuck, begun, late):
            send(lane, request, [2, 3])
            lane.finish(request, final_state())
        failed = reports.wait(3)
        gate.opened.set()
        with lane._changed:
            assert lane._changed.wait_for(lambda: not lane._is_hung, TIMEOUT_S)
        lane.begin(fresh)
        send(lane, fresh, [0, 1, 2, 3])
        lane.finish(fresh, final_state())
        result = reports.wait(4)["request-4"]

    assert {each.status for each in failed.values()} == {"error"}
    assert "was hung or shut down when the request began" in str(failed["request-3"].error)
    assert result.status == "ok"
    assert sorted(detail for name, detail in sink.calls if name == "abandon") == ["request-1", "request-2"]
    assert lane.stats().dropped_rows == 2 + 3 * 2


def test_holding_up_the_engine_for_too_long_counts_as_hung() -> None:
    gate, reports, request = Gate(), Reports(), lane_request()

    with running(Recorder(at_gate(gate, "write")), reports, queue_bytes=PACKET_BYTES, max_stall_s=0.05) as lane:
        lane.begin(request)
        send(lane, request, [0])
        gate.wait_reached()
        assert send(lane, request, [1])
        lane.finish(request, final_state())
        result = reports.wait()["request-1"]
        gate.opened.set()

    assert (result.status, result.error) == ("error", "c: hung: held up the engine for longer than 0.05 s")
    assert (lane.stats().hangs, lane.stats().stalls, lane.stats().dropped_rows) == (1, 1, 1)
    assert lane.stats().stall_s >= 0.01


def test_what_a_hung_call_returns_in_the_end_is_not_reported_again(clock: SimpleNamespace) -> None:
    gate, reports, request = Gate(), Reports(), lane_request()
    later: Future[str] = Future()

    def behave(name: str, _detail: Any) -> Any:
        if name == "finish":
            gate.pass_through()
            return later
        return None

    with running(Recorder(behave), reports, max_stall_s=5) as lane:
        lane.begin(request)
        lane.finish(request, final_state())
        gate.wait_reached()
        clock.now += 5
        lane.watch()
        gate.opened.set()
        later.set_result("late")

    assert reports.wait()["request-1"].status == "error"


def test_payloads_that_are_under_way_elsewhere_survive_a_hang(clock: SimpleNamespace) -> None:
    gate, reports, later = Gate(), Reports(), Future[str]()
    slow, stuck = lane_request("request-1"), lane_request("request-2")

    def behave(name: str, detail: Any) -> Any:
        if (name, detail) == ("begin", "request-2"):
            gate.pass_through()
        return later if name == "finish" else None

    with running(Recorder(behave), reports, max_stall_s=5) as lane:
        lane.begin(slow)
        send(lane, slow, [0, 1, 2, 3])
        lane.finish(slow, final_state())
        lane.begin(stuck)
        gate.wait_reached()
        clock.now += 5
        lane.watch()
        later.set_result("done")
        assert reports.wait()["request-1"].payload == "done"
        gate.opened.set()
        lane.finish(stuck, final_state())

    assert reports.wait(2)["request-2"].status == "error"


def test_what_a_consumer_has_to_let_go_of_survives_a_hang(clock: SimpleNamespace) -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(lambda name, detail: gate.pass_through() if (name, detail) == ("begin", "request-2") else None)
    wrong, stuck = lane_request("request-1"), lane_request("request-2")

    with running(sink, reports, max_stall_s=5) as lane:
        lane.begin(wrong)
        lane.begin(stuck)
        gate.wait_reached()
        lane.finish(wrong, final_state(), contradiction="its rows are another's")
        clock.now += 5
        lane.watch()
        gate.opened.set()
        lane.finish(stuck, final_state())
        results = reports.wait(2)

    assert results["request-1"].error == "c: its rows are another's"
    assert sorted(detail for name, detail in sink.calls if name == "abandon") == ["request-1", "request-2"]


def test_a_bug_of_ours_fails_its_request_and_the_lane_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, reports = Recorder(), Reports()
    first, second = lane_request("request-1"), lane_request("request-2")
    monkeypatch.setattr(first.ledger, "close", lambda _final: 1 / 0)

    with running(sink, reports) as lane:
        for request in (first, second):
            lane.begin(request)
            send(lane, request, [0, 1, 2, 3])
            lane.finish(request, final_state())
        results = reports.wait(2)

    assert results["request-1"].error == "c: internal error: ZeroDivisionError('division by zero')"
    assert results["request-2"].status == "ok"
    assert ("abandon", "request-1") in sink.calls


def test_rows_that_came_twice_are_not_given_to_the_consumer_as_a_whole() -> None:
    sink, reports, request = Recorder(), Reports(), lane_request()

    with running(sink, reports) as lane:
        lane.begin(request)
        for positions in ([0, 1, 2, 3], [3]):
            send(lane, request, positions)
        lane.finish(request, final_state())

    assert "rows were delivered twice or unasked for" in str(reports.wait()["request-1"].error)
    assert sink.names() == ["begin", "write", "write", "abandon", "close"]


def test_nothing_is_watched_while_nothing_is_under_way(clock: SimpleNamespace) -> None:
    with running(Recorder(), Reports(), max_stall_s=5) as lane:
        assert lane.watch() is None


def test_closing_delivers_what_is_queued_and_tells_requests_that_never_ended() -> None:
    sink, reports = Recorder(), Reports()
    ended, running_on = lane_request("request-1"), lane_request("request-2")
    lane = open_lane(sink, reports)

    for request in (ended, running_on):
        lane.begin(request)
        send(lane, request, [0, 1, 2, 3])
    lane.finish(ended, final_state())
    left = close_lane(lane)

    assert left == UnfinishedWork(unfinished=1)
    results = reports.wait(2)
    assert results["request-1"].status == "ok"
    assert "shut down before the request had ended" in str(results["request-2"].error)
    assert sink.names()[-1] == "close"


def test_closing_gives_up_a_consumer_that_hangs_and_its_thread_ends_with_the_call() -> None:
    gate, reports = Gate(), Reports()
    sink = Recorder(at_gate(gate, "write"))
    requests = [lane_request(f"request-{number}") for number in (1, 2)]
    lane = open_lane(sink, reports)

    for request in requests:
        lane.begin(request)
        send(lane, request, [0, 1, 2, 3])
        lane.finish(request, final_state())
    gate.wait_reached()
    left = close_lane(lane, 0)

    assert left == UnfinishedWork(unfinished=2, is_stuck=True)
    assert {result.status for result in reports.wait(2).values()} == {"error"}
    assert lane.stats().dropped_rows == 4
    gate.opened.set()
    lane._thread.join(TIMEOUT_S)
    assert not lane._thread.is_alive()
    assert sink.names() == ["begin", "write", "close"]


def test_a_dispatch_thread_that_waits_for_room_is_let_go_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reports, request = Gate(), Reports(), lane_request()
    lane = open_lane(Recorder(at_gate(gate, "write")), reports, queue_bytes=PACKET_BYTES)
    lane.begin(request)
    send(lane, request, [0])
    gate.wait_reached()
    waits = when_it_waits(lane._changed, monkeypatch)
    thread = threading.Thread(target=lambda: send(lane, request, [1, 2]))
    thread.start()
    assert waits.wait(TIMEOUT_S)

    lane.stop_holding_up()

    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert lane.stats().dropped_rows == 2
    gate.opened.set()
    assert close_lane(lane) == UnfinishedWork(unfinished=1)
