"""Counters of one process are read by another: whole states only, without a wait."""

from __future__ import annotations

import os
from dataclasses import fields, replace

import pytest

from headgate.capture.delivery.delivery import DeliveryStats
from headgate.capture.links import shared_memory
from headgate.capture.links.shared_memory import StatsBoard
from headgate.capture.monitoring.stats import RESULT_BOUNDS_S, ConsumerStats, Figure

NAMES = ("rows", "n" * 300, "\N{GREEK SMALL LETTER ALPHA}" * 50)
LARGEST = 2**63 - 1


def stats(rows: int) -> DeliveryStats:
    counts = [rows] * (len(RESULT_BOUNDS_S) + 1)
    consumers = tuple(ConsumerStats(instance=name, rows=rows, result_counts=counts) for name in NAMES)
    return DeliveryStats(lost_results=rows, consumers=consumers)


@pytest.fixture
def boards() -> tuple[StatsBoard, StatsBoard]:
    """One to show on, and the same memory in another process's eyes."""
    shown = StatsBoard(NAMES)
    return shown, StatsBoard(NAMES, os.dup(shown.fd))


def test_what_is_shown_last_is_read(boards: tuple[StatsBoard, StatsBoard]) -> None:
    ours, theirs = boards
    assert theirs.read() is None

    for rows in (1, 2, 3):
        ours.show(stats(rows))
        assert theirs.read() == stats(rows)


def test_nothing_is_read_once_it_was_cleared(boards: tuple[StatsBoard, StatsBoard]) -> None:
    ours, theirs = boards
    ours.show(stats(1))

    theirs.clear()
    assert theirs.read() is None

    StatsBoard(NAMES, os.dup(ours.fd)).show(stats(1))  # by the next process
    assert theirs.read() == stats(1)


def test_a_state_that_is_half_written_is_not_read(
    boards: tuple[StatsBoard, StatsBoard],
) -> None:
    ours, theirs = boards
    ours.show(stats(1))
    ours._mapped[ours._place(1) + 100] ^= 1
    assert theirs.read() is None

    ours.show(stats(2))
    assert theirs.read() == stats(2)


def test_a_reader_that_was_overtaken_reads_again(
    boards: tuple[StatsBoard, StatsBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = boards
    ours.show(stats(1))
    checks = []

    def overtaken(data: bytes) -> int:
        checks.append(data)
        if len(checks) == 1:
            ours._mapped[ours._place(1) + 50] ^= 1
            ours.show(stats(2))
        return real(data)

    real = shared_memory.zlib.crc32
    ours._mapped[ours._place(1) + 50] ^= 1
    monkeypatch.setattr(shared_memory.zlib, "crc32", overtaken)

    assert theirs.read() == stats(2)


SPECIAL = ("instance", "result_counts", "is_hung", "figures")


def test_the_largest_counters_fit(boards: tuple[StatsBoard, StatsBoard]) -> None:
    ours, theirs = boards
    counted = [each.name for each in fields(ConsumerStats) if each.name not in SPECIAL]
    consumers = tuple(
        ConsumerStats(
            instance=name, result_counts=(LARGEST,) * (len(RESULT_BOUNDS_S) + 1), **dict.fromkeys(counted, LARGEST)
        )
        for name in NAMES
    )
    largest = replace(
        DeliveryStats(consumers=consumers), lost_results=LARGEST, lost_messages=LARGEST, dispatch_errors=LARGEST
    )

    ours.show(largest)

    assert [each.rows for each in theirs.read().consumers] == [LARGEST] * 3  # type: ignore[union-attr]


def test_figures_of_consumers_are_shown_as_far_as_there_is_room(
    boards: tuple[StatsBoard, StatsBoard], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = boards

    def counted(about: str) -> DeliveryStats:
        figure = Figure(name="uploads", kind="counter", about=about, value=3.0)
        return DeliveryStats(consumers=tuple(ConsumerStats(instance=name, rows=7, figures=(figure,)) for name in NAMES))

    ours.show(counted("Uploads that ended."))
    told = theirs.read()
    assert told is not None
    assert [each.figures for each in told.consumers] == [
        each.figures for each in counted("Uploads that ended.").consumers
    ]
    assert not caplog.records
    ours.show(counted("x" * 100_000))

    found = theirs.read()
    assert found is not None
    assert [(each.rows, each.figures) for each in found.consumers] == [(7, ())] * 3
    assert "figures of consumers are left out" in caplog.text


def test_other_consumers_than_those_of_the_board_are_a_bug() -> None:
    with pytest.raises(ValueError, match="do not fit a board"):
        StatsBoard(()).show(DeliveryStats(consumers=tuple(ConsumerStats(instance=f"c{i}") for i in range(9))))
