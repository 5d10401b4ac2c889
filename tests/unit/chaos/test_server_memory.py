"""What the chaos run calls growth of a server's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.fleet import Process
from tests.chaos.memory import BASE_MIB, LEAST, WARM_UP, Memory


def seen(mib: Callable[[int], float], last: int) -> list[str]:
    """The growth found of one process of two, which has so many MiB after so many requests."""
    memory = Memory()
    for num_requests in range(0, last + 1, 1000):
        steady = Process(1, "VLLM::EngineCor", 590.0, 1.0)
        memory.look(num_requests, [steady, Process(2, "VLLM::Worker", mib(num_requests), 1.0)])
    return list(memory.growth())


def test_what_is_kept_of_each_request_is_growth() -> None:
    (text,) = seen(lambda num_requests: 1000 + num_requests / 384, WARM_UP + 2 * LEAST)

    assert text.startswith("(2, 'VLLM::Worker') grew by 23 MiB in 9000 requests, allowed are 22:")


LEVEL = [(2477, 990), (6156, 1050), (8252, 1067), (10527, 1079), (13208, 1090), (18915, 1100), (23108, 1100)]
"""MiB of a worker in an hour of a busy machine: its arenas fill late."""


@pytest.mark.parametrize(("more", "is_growth"), [(0, False), (2, True)], ids=["levels off", "goes on"])
def test_growth_does_not_level_off(more: int, is_growth: bool) -> None:
    memory = Memory()
    for num_requests, mib in LEVEL:
        memory.look(num_requests, [Process(2, "VLLM::Worker", mib + more * num_requests / 1024, 1.0)])

    assert bool(list(memory.growth())) == is_growth


@pytest.mark.parametrize(
    ("mib", "last"),
    [
        (lambda num_requests: min(1000 + num_requests / 10, 1000 + WARM_UP / 10), WARM_UP + 2 * LEAST),
        (lambda num_requests: 1000 + BASE_MIB * (num_requests > WARM_UP), WARM_UP + 2 * LEAST),
        (lambda num_requests: 1000 + num_requests / 10, WARM_UP + LEAST - 1000),
    ],
    ids=["warm-up", "pages", "too short"],
)
def test_a_warm_up_and_an_allocators_pages_are_none(mib: Callable[[int], float], last: int) -> None:
    assert seen(mib, last) == []
