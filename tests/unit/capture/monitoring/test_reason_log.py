"""The same reason again within a second is counted, not repeated."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.monitoring.logs import MAX_REASONS, REASON_S, ReasonLog


def test_a_reason_is_logged_once_a_second_and_others_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    log = ReasonLog("refused", lambda: now)
    with caplog.at_level(logging.INFO, "headgate"):
        for _ in range(3):
            log.info("a", "one")
        log.info("b", "two")
        now += REASON_S
        log.info("a", "three")

    assert caplog.messages == [
        "refused: one",
        "refused: two",
        "refused: three (2 more for that reason since the last line)",
    ]


def test_reasons_without_end_are_counted_as_one(caplog: pytest.LogCaptureFixture) -> None:
    log = ReasonLog("refused", lambda: 0.0)
    with caplog.at_level(logging.INFO, "headgate"):
        for number in range(3 * MAX_REASONS):
            log.info(str(number), "text")

    assert len(caplog.messages) == MAX_REASONS + 1
