"""The queue before a writer thread: bounded, in order, and closed in an orderly way."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from headgate.capture.schema.errors import ConsumerError
from headgate.consumers.feed import TIMEOUT_S
from headgate.consumers.filesystem.request_writer import WriterThread


class Gate:
    """A task that holds up its writer until it is told otherwise."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S), "nobody opened the gate"


def nothing() -> None:
    """Do nothing."""


def fail() -> None:
    """Raise."""
    raise RuntimeError("a bug")


def test_tasks_run_in_order_and_are_settled_before_the_end() -> None:
    done: list[object] = []
    writer = WriterThread(
        "test", queue_bytes=1 << 20, after_batch=lambda: done.append("settled"), ended=lambda: done.append("ended")
    )

    for number in range(500):
        writer.submit(partial(done.append, number))
    writer.close()

    assert writer.join(TIMEOUT_S)
    assert [entry for entry in done if isinstance(entry, int)] == list(range(500))
    assert done[-2:] == ["settled", "ended"]
    longest = max(len(run) for run in "".join("s" if entry == "settled" else "t" for entry in done).split("s"))
    assert longest <= 128 + 1  # also a queue that never runs empty is settled now and then


def test_a_full_queue_makes_submit_wait() -> None:
    gate, second_is_in = Gate(), threading.Event()
    writer = WriterThread("test", queue_bytes=10_000, after_batch=nothing, ended=nothing)
    writer.submit(gate.pass_through)
    assert gate.reached.wait(TIMEOUT_S)
    writer.submit(nothing, 6_000)

    def submit_another() -> None:
        writer.submit(nothing, 6_000)
        second_is_in.set()

    other = threading.Thread(target=submit_another)
    other.start()
    assert not second_is_in.is_set()
    gate.opened.set()

    assert second_is_in.wait(TIMEOUT_S)
    other.join(TIMEOUT_S)
    writer.close()
    assert writer.join(TIMEOUT_S)


def test_a_task_larger_than_the_queue_is_taken_when_it_is_alone() -> None:
    done = threading.Event()
    writer = WriterThread("test", queue_bytes=10, after_batch=nothing, ended=nothing)

    writer.submit(done.set, 1_000_000)

    assert done.wait(TIMEOUT_S)
    writer.close()
    assert writer.join(TIMEOUT_S)


def test_a_task_that_is_not_urgent_is_done_before_the_next_and_at_the_end() -> None:
    done: list[str] = []
    urgent_is_done = threading.Event()
    writer = WriterThread("test", queue_bytes=10_000, after_batch=nothing, ended=nothing)

    writer.submit(partial(done.append, "first"), is_urgent=False)
    writer.submit(urgent_is_done.set)
    assert urgent_is_done.wait(TIMEOUT_S)
    assert done == ["first"]
    writer.submit(partial(done.append, "last"), is_urgent=False)
    writer.close()

    assert writer.join(TIMEOUT_S)
    assert done == ["first", "last"]


def test_room_that_a_task_takes_for_which_nobody_woke_the_thread_comes_free() -> None:
    done: list[str] = []
    writer = WriterThread("test", queue_bytes=10_000, after_batch=nothing, ended=nothing)
    writer.submit(partial(done.append, "small"), is_urgent=False)

    other = threading.Thread(target=lambda: writer.submit(partial(done.append, "large"), 1_000_000), daemon=True)
    other.start()
    other.join(TIMEOUT_S)
    assert not other.is_alive(), "nobody makes room"
    writer.close()

    assert writer.join(TIMEOUT_S)
    assert done == ["small", "large"]


def test_closing_turns_away_who_waits_for_room() -> None:
    gate, turned_away = Gate(), threading.Event()
    writer = WriterThread("test", queue_bytes=10_000, after_batch=nothing, ended=nothing)
    writer.submit(gate.pass_through)
    assert gate.reached.wait(TIMEOUT_S)
    writer.submit(nothing, 9_000)

    def submit_another() -> None:
        with pytest.raises(ConsumerError, match="closed"):
            writer.submit(nothing, 9_000)
        turned_away.set()

    other = threading.Thread(target=submit_another)
    other.start()
    writer.close()

    assert turned_away.wait(TIMEOUT_S)
    other.join(TIMEOUT_S)
    assert not writer.join(0.0)
    gate.opened.set()
    assert writer.join(TIMEOUT_S)


def test_a_task_that_raises_ends_neither_the_thread_nor_the_tasks_after_it(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    writer = WriterThread("test", queue_bytes=10_000, after_batch=nothing, ended=nothing)

    with caplog.at_level(logging.ERROR):
        writer.submit(fail)
        writer.submit(done.set)
        writer.close()

        assert writer.join(TIMEOUT_S)
    assert done.is_set()
    assert "a task of test failed" in caplog.text
