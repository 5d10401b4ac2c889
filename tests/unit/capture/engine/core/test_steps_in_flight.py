"""Outputs of launched steps are taken ahead of time, by stock's own step."""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from headgate.capture.engine.core.steps_in_flight import StepsInFlight, reset_prefix_cache, steps_of

CAPTURES = SimpleNamespace(extra_args={"headgate": {"v": 1, "capture": {}}})


class Scheduler:
    """Makes one output of each step; it never has a step to launch, or every time it is asked."""

    def __init__(self, *, has_more: bool) -> None:
        self.has_more = has_more
        self.requests: dict[str, Any] = {}
        self.taken: list[int] = []
        self.num_resets = 0

    def has_requests(self) -> bool:
        return self.has_more

    def schedule(self, *args: Any) -> Any:
        raise AssertionError("a step was launched")

    def update_from_output(self, step: int, output: str) -> dict[int, str]:
        self.taken.append(step)
        return {0: output} if output else {}

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> int:
        self.num_resets += 1
        return len(self.taken)


class Core:
    """An engine core with steps in flight, numbered from the oldest; in its client's process or in one of its own."""

    def __init__(self, *outputs: Any, is_apart: bool = True, has_more: bool = True) -> None:
        self.scheduler = Scheduler(has_more=has_more)
        self.batch_queue_size = len(outputs) + 1
        self.batch_queue: Any = deque(maxlen=self.batch_queue_size)
        for step, output in enumerate(outputs):
            self.batch_queue.appendleft((finished(output), step, finished(None)))
        self.posted: list[bool] = []
        self.num_aborts = 0
        self.capture_iteration_details = self.log_error_detail = lambda _: nullcontext()
        self.step_fn: Any = lambda: EngineCore.step_with_batch_queue(self)  # type: ignore[arg-type]
        if is_apart:
            self.output_queue: Any = queue.Queue()

    def _process_aborts_queue(self) -> None:
        self.num_aborts += 1

    def _attach_iteration_details(self, outputs: Any, details: Any) -> None: ...

    def _attach_weight_version(self, outputs: Any) -> None: ...

    def post_step(self, model_executed: bool) -> None:
        self.posted.append(model_executed)


def finished(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


@pytest.mark.parametrize("has_more", [True, False])
def test_a_client_elsewhere_gets_all_outputs_in_order_and_nothing_is_launched(has_more: bool) -> None:
    core: Any = Core("first", "", "third", has_more=has_more)

    StepsInFlight(core).take()

    assert list(core.output_queue.queue) == [(0, "first"), (0, "third")]
    assert core.scheduler.taken == [0, 1, 2]
    assert (core.posted, core.num_aborts) == ([False] * 3, 3)
    assert core.scheduler.has_requests() is has_more
    assert not core.batch_queue


def test_a_client_in_this_process_gets_them_with_its_next_steps() -> None:
    core: Any = Core("first", "", "third", is_apart=False)

    StepsInFlight(core).take()
    core.batch_queue.appendleft((finished("later"), 3, finished(None)))
    core.scheduler.has_requests = lambda: False

    assert [core.step_fn()[0] for _ in range(3)] == [{0: "first"}, {0: "third"}, {0: "later"}]


@pytest.mark.parametrize("batch_queue", [None, deque()])
def test_an_engine_without_steps_in_flight_does_nothing(batch_queue: Any) -> None:
    core: Any = Core()
    core.batch_queue = batch_queue
    steps = StepsInFlight(core)
    steps.take()

    assert core.posted == []
    assert steps_of(core.scheduler) is steps


def test_a_step_that_fails_ends_the_engine() -> None:
    core: Any = Core("first", RuntimeError("the worker died"), "third")

    with pytest.raises(RuntimeError, match="the worker died"):
        StepsInFlight(core).take()

    assert list(core.output_queue.queue) == [(0, "first")]
    assert core.scheduler.has_requests()
    with pytest.raises(RuntimeError, match="headgate: a step in flight failed: the worker died"):
        core.step_fn()


@pytest.mark.parametrize(("resets", "num_taken"), [((True,), 2), ((), 0), ((False,), 0)])
def test_stocks_own_restart_of_requests_loses_no_token(resets: tuple[bool, ...], num_taken: int) -> None:
    core: Any = Core("first", "second")
    StepsInFlight(core)

    wrapped = reset_prefix_cache(Scheduler.reset_prefix_cache)

    assert wrapped(core.scheduler, *resets) == num_taken
    assert wrapped(Scheduler(has_more=False), *resets) == 0


def request(*, num_computed: int, num_tokens: int = 9, params: Any = CAPTURES) -> Any:
    return SimpleNamespace(
        request_id="a",
        num_prompt_tokens=9,
        num_tokens=num_tokens,
        num_computed_tokens=num_computed,
        sampling_params=params,
    )


@pytest.mark.parametrize(
    ("held", "num_outdated"),
    [
        (request(num_computed=4), 4),
        (request(num_computed=0), 0),
        (request(num_computed=9, num_tokens=10), 0),
        (request(num_computed=4, params=SimpleNamespace(extra_args=None)), 0),
    ],
    ids=["within its prompt", "not begun", "behind its first token", "captures nothing"],
)
def test_rows_of_a_prompt_without_its_first_token_are_outdated(held: Any, num_outdated: int) -> None:
    core: Any = Core()
    steps = StepsInFlight(core)
    steps.outdate(held)

    assert steps.outdated == ({"a"} if num_outdated else set())
    assert [steps.release("a"), steps.release("a")] == [num_outdated, 0]


def test_those_computed_before_a_preemption_as_well() -> None:
    core: Any = Core()
    steps = StepsInFlight(core)
    steps.preempted(request(num_computed=6))
    steps.preempted(request(num_computed=2))
    steps.outdate(request(num_computed=0))

    assert steps.release("a") == 6


def test_a_reset_of_running_requests_outdates_prompts() -> None:
    core: Any = Core()
    steps = StepsInFlight(core)
    core.scheduler.requests = {"a": request(num_computed=3)}

    reset_prefix_cache(Scheduler.reset_prefix_cache)(core.scheduler, True)

    assert steps.release("a") == 3
