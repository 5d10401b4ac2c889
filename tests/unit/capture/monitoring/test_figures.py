"""Numbers that consumers count by themselves, over restarts, and where a consumer cannot tell them."""

from __future__ import annotations

import pytest

from headgate.capture.capture_process import added
from headgate.capture.delivery.consumer_queue import ConsumerThread
from headgate.capture.delivery.delivery import DeliveryStats
from headgate.capture.monitoring.stats import ConsumerStats, Figure, added_figures, figures_of
from headgate.capture.schema.config import CaptureConsumerSpec
from tests.fakes.pipeline import MODEL


def figure(name: str, value: float, kind: str = "counter") -> Figure:
    return Figure(name=name, kind=kind, about="Files.", value=value)


class Counting:
    """A consumer with one figure; it raises if that is negative."""

    def __init__(self, value: float) -> None:
        self.value = value

    def figures(self) -> list[Figure]:
        if self.value < 0:
            raise ValueError("no store")
        return [figure("done", self.value)]


def test_counters_go_on_over_a_restart_and_gauges_do_not() -> None:
    before = [figure("done", 5), figure("waiting", 7, "gauge"), figure("gone", 1)]
    now = [figure("done", 2), figure("waiting", 1, "gauge"), figure("new", 4)]

    found = added_figures(before, now)

    assert {each.name: each.value for each in found} == {"done": 7, "waiting": 1, "new": 4, "gone": 1}
    assert {each.name: each.value for each in added_figures(before, [])} == {"done": 5, "gone": 1}


def test_a_capture_process_that_was_started_again_goes_on_with_them() -> None:
    parts = [
        DeliveryStats(consumers=(ConsumerStats(instance="files", rows=3, figures=(figure("done", value),)),))
        for value in (4, 5)
    ]

    (found,) = added(*parts).consumers

    assert found == ConsumerStats(instance="files", rows=6, figures=(figure("done", 9),))


def test_a_consumer_without_figures_has_none() -> None:
    assert figures_of(object()) == ()
    assert figures_of(Counting(3)) == (figure("done", 3),)


def test_figures_that_cannot_be_told_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    spec, consumer = CaptureConsumerSpec(name="mine"), Counting(2)
    thread = ConsumerThread(spec, consumer, lambda *_: None, model=MODEL)  # type: ignore[arg-type]
    assert thread.stats().figures == (figure("done", 2),)

    consumer.value = -1

    assert thread.stats().figures == ()
    assert "its figures are not told" in caplog.text
    assert "no store" in caplog.text
