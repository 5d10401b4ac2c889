"""Notes about requests, kept in the engine core until their request has an output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput

from headgate.capture.engine.contracts.core_part import CorePart
from headgate.capture.engine.core.engine_core import StepNotes, check_carrier, update_from_output
from headgate.capture.engine.core.steps_in_flight import STEPS
from headgate.capture.schema.errors import UnsupportedError

WANTS = {"v": 1, "notes": True}


class Part(CorePart):
    """Notes for each request of a step the number that the worker read; it writes down who was discarded."""

    def __init__(self) -> None:
        self.discarded: list[set[str]] = []

    def take_readings(self, readings: Any, discarded: Any, ends: Any = None) -> Any:
        self.discarded.append(set(discarded))
        return dict(readings)

    def begin_again(self, req_id: str) -> Any:
        return f"{req_id} again"


class Scheduler:
    """The scheduler as `StepNotes` sees it; `ends` are the requests that end in the next step."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.ends: set[str] = set()
        self.silent: set[str] = set()
        self.part = Part()  # type: ignore[abstract]
        self.notes = StepNotes(self, "reading", self.part)  # type: ignore[arg-type]

    def add(self, req_id: str, wire: Any = WANTS) -> None:
        self.requests[req_id] = SimpleNamespace(
            sampling_params=SimpleNamespace(extra_args={"headgate": wire} if wire else None),
            is_finished=lambda: False,
            status="running",
        )

    def free(self, req_id: str) -> None:
        del self.requests[req_id]
        self.notes.release(req_id)

    def step(self, *req_ids: str, readings: Any = None, part: str = "reading", num_tokens: int = 1) -> dict[str, Any]:
        """Run a step; return the ``kv_transfer_params`` of its outputs."""
        scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(req_ids, num_tokens))
        output = SimpleNamespace(**({} if readings is None else {"headgate_readings": {part: readings}}))

        def original(scheduler: Any, scheduler_output: Any, runner_output: Any) -> Any:
            made = [EngineCoreOutput(req_id, [1]) for req_id in req_ids if req_id not in self.silent]
            for req_id in sorted(self.ends):
                self.free(req_id)
            self.ends = set()
            return {0: SimpleNamespace(outputs=made)}

        made = self.notes.update(original, scheduled, output)  # type: ignore[arg-type]
        return {one.request_id: one.kv_transfer_params for one in made[0].outputs}


def noted(*notes: object) -> dict[str, Any]:
    return {"headgate_notes": {"reading": list(notes)}}


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_notes_leave_with_the_output_of_their_step(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.add("b")

    assert scheduler.step("a", "b", readings={"a": 1}) == {"a": noted(1), "b": None}
    assert scheduler.step("a", "b", readings={"b": 2}) == {"a": None, "b": noted(2)}


def test_notes_of_a_prompts_chunks_wait_for_its_first_output_in_order(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.silent = {"a"}
    assert scheduler.step("a", readings={"a": 1}) == {}
    assert scheduler.step("a", readings={"a": 2}) == {}
    scheduler.silent = set()

    assert scheduler.step("a", readings={"a": 3}) == {"a": noted(1, 2, 3)}
    assert scheduler.step("a") == {"a": None}


def test_a_prompt_that_begins_again_says_so_in_order(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.silent = {"a"}
    scheduler.step("a", readings={"a": 1})
    scheduler.notes.begin_again("a", 0)
    scheduler.notes.begin_again("gone", 0)
    scheduler.silent = set()

    assert scheduler.step("a", readings={"a": 2}) == {"a": noted(1, "a again", 2)}


def test_steps_in_flight_do_not_count_for_a_prompt_that_begins_again(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.add("b")
    scheduler.step("a", "b", readings={})
    scheduler.notes.begin_again("a", 2)

    notes = [scheduler.step("a", "b", readings=readings) for readings in ({"a": 1, "b": 1}, None, {"a": 3, "b": 3})]

    assert scheduler.part.discarded == [set(), {"a"}, set()]
    assert notes == [{"a": noted("a again"), "b": noted(1)}, {"a": None, "b": None}, {"a": noted(3), "b": noted(3)}]


def test_the_last_output_has_them_too(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.ends = {"a"}

    assert scheduler.step("a", readings={"a": 1}) == {"a": noted(1)}


def test_what_is_left_of_a_request_that_ended_is_not_told_to_the_next_of_its_name(scheduler: Scheduler) -> None:
    for ends_in_a_step in (True, False):
        scheduler.add("a")
        scheduler.silent = {"a"}
        scheduler.step("a", readings={"a": 1})
        if ends_in_a_step:
            scheduler.ends = {"a"}
            scheduler.step()
        else:
            scheduler.free("a")
        scheduler.silent = set()
        scheduler.add("a")

        assert scheduler.step("a") == {"a": None}
        scheduler.free("a")


def test_notes_that_nobody_wants_are_dropped(scheduler: Scheduler) -> None:
    scheduler.add("steered", wire={"v": 1})
    scheduler.add("plain", wire=None)

    told = scheduler.step("steered", "plain", "gone", readings={"steered": 1, "plain": 2, "gone": 3})

    assert told == {"steered": None, "plain": None, "gone": None}


def test_other_things_in_the_field_stay(scheduler: Scheduler) -> None:
    scheduler.add("a")
    output = EngineCoreOutput("a", [1], kv_transfer_params={"theirs": 1})
    scheduler.notes.update(
        lambda *args: {0: SimpleNamespace(outputs=[output])},
        SimpleNamespace(num_scheduled_tokens={"a": 1}),  # type: ignore[arg-type]
        SimpleNamespace(headgate_readings={"reading": {"a": 7}}),  # type: ignore[arg-type]
    )

    assert output.kv_transfer_params == {"theirs": 1, **noted(7)}


def test_requests_that_ended_after_a_step_was_launched_are_told_to_the_part(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.requests["a"].is_finished = lambda: True
    scheduler.add("b")

    told = scheduler.step("a", "b", "gone", readings={"a": 1, "b": 2})

    assert scheduler.part.discarded == [{"a", "gone"}]
    assert told["a"] is None
    assert told["b"] == noted(2)


def test_a_request_that_came_again_is_found_by_the_next_step(scheduler: Scheduler) -> None:
    scheduler.add("a")
    scheduler.add("b")
    scheduler.step("a", "b", readings={"a": 1, "b": 1})
    scheduler.free("a")
    scheduler.step("a", "b", readings={"a": 2, "b": 2})
    scheduler.add("a")

    told = scheduler.step("a", "b", readings={"a": 4, "b": 4})

    assert scheduler.part.discarded == [set(), {"a"}, set()]
    assert told == {"a": noted(4), "b": noted(4)}


def test_requests_of_different_states_are_looked_at_one_by_one(scheduler: Scheduler) -> None:
    """One that was preempted gets what its steps in flight bring."""
    for req_id in ("a", "b"):
        scheduler.add(req_id)
    scheduler.requests["b"].status = "preempted"

    assert scheduler.step("a", "b", readings={"a": 5, "b": 5}) == {"a": noted(5), "b": noted(5)}
    assert scheduler.part.discarded == [set()]


def test_readings_that_nothing_takes_are_a_bug(scheduler: Scheduler) -> None:
    with pytest.raises(AssertionError, match="takes the readings of part 'other'"):
        scheduler.step("a", readings={"a": 1}, part="other")


def test_a_vllm_without_the_field_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.engine

    check_carrier()
    monkeypatch.setattr(vllm.v1.engine, "EngineCoreOutput", SimpleNamespace(__struct_fields__=("request_id",)))

    with pytest.raises(UnsupportedError, match="no field 'kv_transfer_params'"):
        check_carrier()


class Describing(Part):
    """Describes requests by the length of their prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.described: dict[str, int] = {}

    def describe(self, req_id: str, num_prompt: int) -> None:
        self.described[req_id] = num_prompt

    def description(self, req_id: str) -> Any:
        num_prompt = self.described.get(req_id)
        return None if num_prompt is None else lambda end: {"prompt": num_prompt, "end": end}


def test_a_part_may_describe_requests_that_capture() -> None:
    notes = StepNotes(Scheduler(), "reading", Describing())  # type: ignore[arg-type]
    notes.describe("a", 5)

    assert notes.description("a")(7) == {"reading": {"prompt": 5, "end": 7}}
    assert notes.description("b")(7) == {}


def test_other_parts_describe_nothing(scheduler: Scheduler) -> None:
    scheduler.notes.describe("a", 5)

    assert scheduler.notes.description("a")(7) == {}


def test_where_drafts_are_verified_rows_are_taken_as_far_as_tokens_were_before_a_request_is_released() -> None:
    """A token of a draft ends "a": what the part gets is known after that, and then alone "a" is forgotten."""
    scheduler, happened = Scheduler(), []

    class Cutting(Part):
        def take_readings(self, readings: Any, discarded: Any, ends: Any = None) -> Any:
            happened.append(("taken", dict(ends), set(discarded)))
            return dict(readings)

    def release(req_id: str) -> None:
        happened.append(("released", req_id))
        scheduler.notes.release(req_id)

    scheduler.notes = StepNotes(scheduler, "reading", Cutting(), release)  # type: ignore[arg-type]
    for req_id in "ab":
        scheduler.add(req_id)
    a, b = scheduler.requests["a"], scheduler.requests["b"]
    a.request_id, a.num_tokens, b.num_tokens = "a", 5, 9

    def original(*_: Any) -> Any:
        a.num_tokens, b.num_tokens = 6, 12
        del scheduler.requests["a"]
        assert scheduler.notes.waits(a, lambda: happened.append(("noted", "a")))
        return {0: SimpleNamespace(outputs=[EngineCoreOutput(req_id, [1]) for req_id in "ab"])}

    scheduled = SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 4, "gone": 1})
    output = SimpleNamespace(headgate_readings={"reading": {"a": "rows of a", "b": "rows of b"}})
    made = scheduler.notes.update(original, scheduled, output)  # type: ignore[arg-type]

    assert happened == [("taken", {"a": 5, "b": 11}, {"gone"}), ("noted", "a"), ("released", "a")]
    found = {one.request_id: one.kv_transfer_params for one in made[0].outputs}
    assert found == {"a": noted("rows of a"), "b": noted("rows of b")}
    assert not scheduler.notes.waits(b, lambda: None)


def test_an_output_tells_that_its_captured_prompt_was_computed_again() -> None:
    """Also one that ends with this output: its rows are forgotten while the step is taken."""
    steps = SimpleNamespace(outdated=frozenset({"a"}))

    def original(scheduler: Any, *_: Any) -> Any:
        steps.outdated = frozenset()
        made = [EngineCoreOutput("a", [1], kv_transfer_params={"theirs": 3}), EngineCoreOutput("b", [1])]
        return {0: SimpleNamespace(outputs=made)}

    scheduler: Any = SimpleNamespace(**{STEPS: steps})
    told = [
        [output.kv_transfer_params for output in update_from_output(original)(scheduler, None, None)[0].outputs]
        for _ in range(2)
    ]

    assert told == [[{"theirs": 3, "headgate_outdated": True}, None], [{"theirs": 3}, None]]
