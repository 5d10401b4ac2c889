"""The queue between step thread and dispatch thread."""

from __future__ import annotations

import threading

from headgate.capture.local_delivery import Handoff
from tests.fakes.pipeline import TIMEOUT_S


def test_items_leave_in_the_order_they_entered() -> None:
    handoff: Handoff[int] = Handoff()

    for number in range(5):
        assert handoff.put(number)

    assert [handoff.next_item(0) for _ in range(5)] == list(range(5))


def test_taking_from_an_empty_queue_ends_when_time_is_up() -> None:
    assert Handoff[int]().next_item(0) is None


def test_items_that_are_false_are_items() -> None:
    handoff: Handoff[int] = Handoff()
    handoff.put(0)

    assert handoff.next_item(0) == 0


def test_a_closed_queue_refuses_and_gives_out_what_it_has() -> None:
    handoff: Handoff[int] = Handoff()
    handoff.put(1)

    handoff.close()

    assert not handoff.put(2)
    assert not handoff.is_done
    assert handoff.next_item(None) == 1
    assert handoff.is_done
    assert handoff.next_item(None) is None


def test_a_waiting_taker_gets_what_is_put_and_hears_of_the_end() -> None:
    handoff: Handoff[int] = Handoff()
    taken: list[int | None] = []
    came = threading.Event()

    def take() -> None:
        taken.append(handoff.next_item(TIMEOUT_S))
        came.set()
        taken.append(handoff.next_item(None))

    thread = threading.Thread(target=take)
    thread.start()
    handoff.put(7)
    assert came.wait(TIMEOUT_S)
    handoff.close()
    thread.join(TIMEOUT_S)

    assert taken == [7, None]
